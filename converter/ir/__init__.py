"""The model as a graph in TFLite's terms, with use-def chains that edits keep consistent."""

from edge_opt.ir.dtypes import DType, Quantization
from edge_opt.ir.graph import (
    Buffer,
    Operator,
    OperatorCode,
    Shape,
    Signature,
    Subgraph,
    Tensor,
    same_type,
)
from edge_opt.ir.model import (
    Constants,
    Metadata,
    Model,
    Signatures,
    from_tables,
    save,
    to_bytes,
    to_tables,
)
from edge_opt.ir.opening import load
from edge_opt.ir.text import to_text
from edge_opt.ir.walk import topological

__all__ = [
    "Buffer",
    "Constants",
    "DType",
    "Metadata",
    "Model",
    "Operator",
    "OperatorCode",
    "Quantization",
    "Shape",
    "Signature",
    "Signatures",
    "Subgraph",
    "Tensor",
    "from_tables",
    "load",
    "same_type",
    "save",
    "to_bytes",
    "to_tables",
    "to_text",
    "topological",
]
