"""`edge-opt compare` and `golden`: print how far two models' outputs are apart, or one's from those that were kept."""

from collections.abc import Iterable, Sequence

from edge_opt.cli import declare, output
from edge_opt.cli.app import Check, Compare, Record
from edge_opt.comparison import golden
from edge_opt.comparison.compare import compare as compare_models
from edge_opt.comparison.findings import ComparisonReport, FirstDifference
from edge_opt.npu.comparing import NpuComparison, NpuSignature, compare_on_npu
from edge_opt.output.words import many, shortened, size

_OPERATORS_SHOWN = 16  # at either end of a region


def run(asked: Compare) -> int:
    """Compare; 1 where the models are not as equal as was asked for, or one did not run in the emulator."""
    on_npu = asked.on == "npu"
    given = asked.options("a", "b", "on", "shape", *(asked.ON_CPU if on_npu else asked.ON_NPU), "as_json")
    report: ComparisonReport | NpuComparison
    with output.bar() as progress:
        if on_npu:
            given["seconds"] = asked.seconds or None
            report = compare_on_npu(asked.a, asked.b, **given, progress=progress)
        else:
            shapes = declare.sizes(asked.shape)
            report = compare_models(asked.a, asked.b, **given, shapes=shapes, progress=progress)
    if asked.as_json:
        output.say_json(report.to_dict())
    elif isinstance(report, NpuComparison):
        _show_on_npu(report)
    else:
        show(report)
    return 0 if report.equal else 1


def record(asked: Record) -> int:
    """Run the model and write its outputs."""
    written = golden.record(asked.model, asked.output, overwrite=asked.overwrite)
    output.say(f"{written}: {size(written.stat().st_size)}, check with `edge-opt golden check`")
    return 0


def check(asked: Check) -> int:
    """Run the model again; 1 where it no longer computes what was recorded."""
    report = golden.check(asked.model, asked.golden)
    show(report)
    return 0 if report.equal else 1


def show(report: ComparisonReport) -> None:
    """The report for people: a line for each signature, then each output that differs."""
    _show_verdict(
        report, output.table(report.rows(), left=2), (*report.logits(), *report.caches, *report.notes())
    )
    if report.equal and report.generation is not None:
        output.say(f"Generated: {report.generation.sentence()}.")
    if not report.equal and report.first_difference is not None:
        output.say("", *_located(report.first_difference))


def _show_verdict(report: ComparisonReport | NpuComparison, table: list[str], notes: Iterable[str]) -> None:
    """The table with its notes, and whether all is equal, or what is not."""
    output.say(*table, *(f"  {sentence}" for sentence in notes), "")
    output.say(f"Equal: {report.summary()}." if report.equal else "Different:")
    output.say(*(f"  {sentence}" for sentence in report.differences()))


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


def _show_on_npu(report: NpuComparison) -> None:
    flags = " ".join(report.flags) or "the compiler's own defaults"
    cut = "" if report.layers is None else f", the first {many(report.layers, 'layer')}"
    output.say(f"{report.chip}, in the emulator of its compiler{cut}; flags: {flags}", "")
    head = "signature, outputs, numbers, differ, a: lowest dB, b: lowest dB, seconds a, seconds b"
    rows = [tuple(head.split(", ")), *map(_npu_row, report.signatures)]
    _show_verdict(report, output.table(rows), report.caches)


def _npu_row(signature: NpuSignature) -> tuple[str, ...]:
    if signature.verdict:
        return (signature.name, *"-------")
    lowest = [min(getattr(found, side) for found in signature.outputs) for side in ("db_a", "db_b")]
    counts = (len(signature.outputs), signature.elements, signature.differing)
    return (signature.name, *map(str, counts), *(f"{value:.1f}" for value in (*lowest, *signature.seconds)))
