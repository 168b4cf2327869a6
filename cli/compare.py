"""`edge-opt compare`: prints how far two models' outputs are apart."""

from collections.abc import Iterable, Sequence

from edge_opt.cli import output
from edge_opt.cli.app import Compare
from edge_opt.cli.progress import bar
from edge_opt.comparison.compare import compare as compare_models
from edge_opt.comparison.findings import ComparisonReport, FirstDifference, SignatureComparison
from edge_opt.ir.words import shortened
from edge_opt.npu import NpuComparison

_OPERATORS_SHOWN = 16  # at either end of a region


def run(asked: "Compare") -> int:
    """Compare; 1 where the models are not equal within the tolerances."""
    with bar() as progress:
        options = asked.options("a", "b", "on", *asked.ON_NPU, "as_json")
        report = compare_models(asked.a, asked.b, **options, progress=progress)
    if asked.as_json:
        output.say_json(report.to_dict())
    else:
        show(report)
    return 0 if report.equal else 1


def show(report: ComparisonReport) -> None:
    """The report for people: a line for each signature, then each output that differs."""
    rows: list[tuple[str, ...]] = [
        ("signature", "kernels", "outputs", "bitwise equal", "max abs", "lowest SNR", "lowest cosine")
    ]
    rows += [_row(signature) for signature in report.signatures]
    show_verdict(report, output.table(rows, left=2), (*report.caches, *report.notes()))
    if report.equal and report.generation is not None:
        output.say(f"Generated: {report.generation.sentence()}.")
    if not report.equal and report.first_difference is not None:
        output.say()
        for line in _located(report.first_difference):
            output.say(line)


def show_verdict(report: "ComparisonReport | NpuComparison", table: str, notes: Iterable[str]) -> None:
    """The table with its notes, and whether all is equal, or what is not."""
    output.say(table)
    for sentence in notes:
        output.say(f"  {sentence}")
    output.say()
    output.say(f"Equal: {report.summary()}." if report.equal else "Different:")
    for sentence in report.differences():
        output.say(f"  {sentence}")


def _located(found: FirstDifference) -> list[str]:
    """Where the difference begins: both models' operators, then the long names of what they share."""
    if found.figures is None:
        return [f"Where it begins was not found: {found.reason}."]
    what = found.figures.sentence().split(": ", 1)[-1]
    lines = [f"First difference: signature '{found.signature}', tensor {found.short_name}: {what}"]
    lines += [f"  {found.reason}"] if found.reason else []
    lines += [f"  equal before it: {', '.join(found.equal_before) or 'nothing'}"]
    lines += [f"  constant with other numbers: '{shortened(name)}'" for name in found.constants]
    for side, operators in (("a", found.operators_a), ("b", found.operators_b)):
        lines.append(f"  in {side}:")
        lines += [f"    {line}" for line in _ends(operators)]
    shown = (found.short_name, *found.equal_before)
    lines += [f"  {name} is '{shortened(found.names[name])}'" for name in shown if name in found.names]
    return lines


def _ends(operators: Sequence[str]) -> list[str]:
    hidden = len(operators) - 2 * _OPERATORS_SHOWN
    if hidden < 2:
        return list(operators)
    note = f"... {hidden} more (all with --json) ..."
    return [*operators[:_OPERATORS_SHOWN], note, *operators[-_OPERATORS_SHOWN:]]


def _row(signature: SignatureComparison) -> tuple[str, ...]:
    outputs = signature.outputs
    equal = sum(item.bitwise for item in outputs)
    figures = [item.difference for item in outputs if item.difference is not None]
    if signature.reason or not figures:
        return (signature.name, signature.backend, str(len(outputs)), str(equal), "-", "-", "-")
    return (
        signature.name,
        signature.backend,
        str(len(outputs)),
        str(equal),
        f"{max(figure.max_abs for figure in figures):.3g}",
        f"{min(figure.snr_db for figure in figures):.1f} dB",
        f"{min(figure.cosine for figure in figures):.6g}",
    )
