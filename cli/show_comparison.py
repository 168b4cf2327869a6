"""Prints how far the outputs of two models are apart, or those of one from a golden file."""

from collections.abc import Iterable, Sequence

from edge_opt.cli import output
from edge_opt.comparison.findings import ComparisonReport, FirstDifference
from edge_opt.npu.comparing import NpuComparison, NpuSignature
from edge_opt.output.words import many, shortened

_OPERATORS_SHOWN = 16  # at either end of a region


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
    if report.equal:
        output.say(f"Equal: {report.summary()}.", style=output.GOOD)
    else:
        output.say("Different:", style=output.BAD)
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


def show_on_npu(report: NpuComparison) -> None:
    """The report of a comparison in the emulator: a row for each signature."""
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
