"""`edge-opt golden`: records a model's outputs, and checks them."""

from pathlib import Path

from edge_opt.cli import output
from edge_opt.cli.compare import show
from edge_opt.comparison import golden


def record(model: Path, target: Path, *, force: bool) -> int:
    """Run the model and write its outputs."""
    written = golden.record(model, target, overwrite=force)
    output.say(f"{written}: {output.size(written.stat().st_size)}, check with `edge-opt golden check`")
    return 0


def check(model: Path, recorded: Path) -> int:
    """Run the model again; 1 where it no longer computes what was recorded."""
    report = golden.check(model, recorded)
    show(report)
    return 0 if report.equal else 1
