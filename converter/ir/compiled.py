"""Models that a vendor's compiler wrote: they call an NPU, so nothing here can rewrite or run them."""

import os
from pathlib import Path

from edge_opt.ir.model import Model
from edge_opt.output.errors import UsageError

CALL = "DISPATCH_OP"
"""The custom operator that is one call of the NPU, as LiteRT names it."""
WORK = ".work"
"""Ending of the folder beside a bundle in which `edge-opt build` keeps what its stages wrote."""


def is_compiled(model: Model) -> bool:
    """Whether an NPU is called anywhere."""
    return any(op.code.custom_code == CALL for graph in model.subgraphs for op in graph.operators)


def made_from(path: str | os.PathLike[str] | None) -> Path | None:
    """The quantized bundle that a compiled one was made from, where the work folder beside it has one."""
    if path is None:
        return None
    quantized = Path(path).with_suffix(WORK) / "quantize" / f"model{Path(path).suffix}"
    return quantized if quantized.is_file() else None


def check_not_compiled(model: Model, path: str | os.PathLike[str] | None) -> None:
    """UsageError for a compiled model; it names the bundle to give instead, if that can be told."""
    if not is_compiled(model):
        return
    instead = made_from(path) or "the bundle that it was made from"
    what = "the model" if path is None else os.fspath(path)
    raise UsageError(f"{what} is compiled for an NPU already: give {instead}")
