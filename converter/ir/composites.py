"""Composites, operators that stand for a subgraph: their bodies, names, attributes and counts."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from edge_opt.base.record import Record
from edge_opt.ir.graph import Operator, Subgraph, same_type
from edge_opt.ir.model import Model
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.ir.text import option_text
from edge_opt.schema.flexbuffers import read_flexbuffer

COMPOSITE = "STABLEHLO_COMPOSITE"
BODY = "decomposition_subgraph_index"


@dataclass(frozen=True, slots=True)
class Composite(Record):
    """Composites with the same name and attributes; `attributes` is a text if they cannot be decoded."""

    name: str
    count: int
    attributes: Any

    def __str__(self) -> str:
        return f"{self.name} {option_text(self.attributes)}"


def composite_name(operator: Operator) -> str:
    """A composite's name, e.g. `odml.rms_norm`; empty for other operators."""
    named = operator.options if operator.name == COMPOSITE else None
    return "" if named is None else str(named.get("name") or "")


def body_of(model: Model, composite: Operator) -> Subgraph:
    """The subgraph that defines a composite's computation."""
    return model.subgraphs[int(composite.option(BODY))]


def checked_body(model: Model, composite: Operator) -> Subgraph:
    """The body of a composite; RefusedError if its arguments or results differ, or it has state."""
    body = body_of(model, composite)
    if len(body.inputs) != len(composite.inputs) or len(body.outputs) != len(composite.outputs):
        raise RefusedError(
            Why.INVALID_MODEL, "the composite and its body differ in arguments", composite
        )
    kept = next((tensor for tensor in body.tensors if tensor.is_variable), None)
    if kept is not None:
        raise RefusedError(
            Why.INVALID_MODEL,
            "all calls of the body share a tensor that is kept between runs",
            composite,
            kept,
        )
    own = (*body.inputs, *body.outputs)
    outer = (*composite.inputs, *composite.outputs)
    for inside, tensor in zip(own, outer, strict=True):
        if tensor is None or not same_type(inside, tensor):
            raise RefusedError(
                Why.INVALID_MODEL, "a tensor's type differs in the body", composite, tensor
            )
    return body


def composites(operators: Iterable[Operator]) -> list[Composite]:
    """The distinct composites among operators, by first occurrence."""
    found: Counter[tuple[str, bytes]] = Counter()
    contents: dict[int, bytes] = {}  # operators may share attributes: copy and hash them once
    for operator in operators:
        if operator.name == COMPOSITE and operator.options is not None:
            content = operator.options.get("composite_attributes")
            if id(content) not in contents:
                contents[id(content)] = b"" if content is None else bytes(content)
            found[composite_name(operator), contents[id(content)]] += 1
    return [
        Composite(name, count, read_flexbuffer(content)) for (name, content), count in found.items()
    ]
