"""`edge-opt golden`: records a model's outputs, and checks them."""

from edge_opt.cli import output
from edge_opt.cli.app import Check, Record
from edge_opt.cli.compare import show
from edge_opt.comparison import golden
from edge_opt.ir.words import size


def record(asked: "Record") -> int:
    """Run the model and write its outputs."""
    written = golden.record(asked.model, asked.output, overwrite=asked.overwrite)
    output.say(f"{written}: {size(written.stat().st_size)}, check with `edge-opt golden check`")
    return 0


def check(asked: "Check") -> int:
    """Run the model again; 1 where it no longer computes what was recorded."""
    report = golden.check(asked.model, asked.golden)
    show(report)
    return 0 if report.equal else 1
