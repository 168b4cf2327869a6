"""Keeps the metadata entry `min_runtime_version` true: a rewrite may add operators that need a newer runtime."""

import re

from edge_opt.ir.graph import Buffer
from edge_opt.ir.model import Model
from edge_opt.ir.versions import runtime_version
from edge_opt.schema.data import Data

_ENTRY = "min_runtime_version"


def raise_runtime_version(model: Model) -> None:
    """Raise the entry to what the operators that rewrites added need; an entry that says nothing is left alone.

    The bytes get a buffer of their own, as long as the old one (16 bytes in what TFLite's converters write).
    """
    added = {id(code) for code in model.new_codes.values()}
    used = {op.code for graph in model.subgraphs for op in graph.operators if id(op.code) in added}
    needed = max((_numbers(runtime_version(code.name, code.version)) for code in used), default=())
    for entry in model.metadata:
        if entry.name != _ENTRY or entry.buffer.data is None:
            continue
        raw = bytes(entry.buffer.data.view())
        recorded = _numbers(raw.rstrip(b"\0").decode("ascii", "replace"))
        if recorded and recorded < needed:
            text = ".".join(map(str, needed)).encode()
            entry.buffer = Buffer(Data(text.ljust(len(raw), b"\0")))


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split("."))) if re.fullmatch(r"\d{1,9}(\.\d{1,9})*", version) else ()
