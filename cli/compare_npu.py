"""`edge-opt compare --on npu`: prints how far two models are apart as a Hexagon NPU computes them."""

from edge_opt.cli import output
from edge_opt.cli.app import Compare
from edge_opt.cli.compare import show_verdict
from edge_opt.cli.progress import bar
from edge_opt.ir.words import many
from edge_opt.npu.comparing import NpuComparison, NpuSignature, compare_on_npu


def run(asked: "Compare") -> int:
    """Compare in the compiler's emulator; 1 where something is not as demanded, or did not run."""
    with bar() as progress:
        options = asked.options("a", "b", "on", *asked.ON_CPU, "seconds", "as_json")
        report = compare_on_npu(asked.a, asked.b, **options, seconds=asked.seconds or None, progress=progress)
    if asked.as_json:
        output.say_json(report.to_dict())
    else:
        _show(report)
    return 0 if report.equal else 1


def _show(report: NpuComparison) -> None:
    flags = " ".join(report.flags) or "the compiler's own defaults"
    cut = "" if report.layers is None else f", the first {many(report.layers, 'layer')}"
    output.say(f"{report.chip}, in the emulator of its compiler{cut}; flags: {flags}")
    output.say()
    head = "signature, outputs, numbers, differ, a: lowest dB, b: lowest dB, seconds a, seconds b"
    rows = [tuple(head.split(", ")), *map(_row, report.signatures)]
    show_verdict(report, output.table(rows), report.caches)


def _row(signature: NpuSignature) -> tuple[str, ...]:
    if signature.verdict:
        return (signature.name, *"-------")
    lowest = [min(getattr(found, side) for found in signature.outputs) for side in ("db_a", "db_b")]
    return (
        signature.name,
        str(len(signature.outputs)),
        str(signature.elements),
        str(signature.differing),
        *(f"{value:.1f}" for value in lowest),
        *(f"{value:.1f}" for value in signature.seconds),
    )
