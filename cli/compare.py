"""`edge-opt compare`: prints how far two models' outputs are apart."""

from pathlib import Path
from typing import cast

from edge_opt.cli import output
from edge_opt.cli.progress import bar
from edge_opt.verify.compare import Backend
from edge_opt.verify.compare import compare as compare_models
from edge_opt.verify.comparison import ComparisonReport, SignatureComparison


def run(
    a: Path, b: Path, *, backend: str, runs: int, seed: int, atol: float, rtol: float, as_json: bool
) -> int:
    """Compare; 1 where the models are not equal within the tolerances."""
    with bar() as progress:
        report = compare_models(
            a,
            b,
            backend=cast("Backend", backend),
            runs=runs,
            seed=seed,
            atol=atol,
            rtol=rtol,
            progress=progress,
        )
    if as_json:
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
    output.say(output.table(rows, left=2))
    output.say()
    if report.equal:
        output.say(f"Equal: {report.summary()}.")
        return
    output.say("Different:")
    for sentence in report.differences():
        output.say(f"  {sentence}")


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
