"""Prints a model as text: one line for each operator, shapes and constants in place.

    signature decode = #0 (query=%q) -> (output=%out)
    subgraph main (%q: float32[1,1,4,8], %k: float32[1,1,16,8]) {
      variable %state: float32[4]
      %scaled: float32[1,1,4,8] = MUL(%q, float32(0.5))
      %logits: float32[1,1,4,16] = BATCH_MATMUL(%scaled, %k) {adj_y: true}
      return %logits
    }

Constants are printed inline: `int32(2)` a scalar, `int32{0, 2, 1, 3}` a vector, `float32[2,3]{...}` any shape row by
row, `float32[1,16]{splat 0.5}` one repeated value; others of more than 64 elements are omitted. Names that are not
plain words are in double quotes. Quantization follows the type: `int16[1,4] q(0.001, 0)`, per axis
`int8[2,4] q([0.1, 0.2], [0, 0], axis 0)`, with more than eight scales `q(640 scales, axis 0)`. Tensors that no
operator defines are listed before the operators as `variable`, or as `unset` if they are not state. `print(graph)`
prints a subgraph in this form.
"""

import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from edge_opt.ir.graph import Operator, Subgraph, Tensor, used_tensors
from edge_opt.ir.model import Model
from edge_opt.schema.flexbuffers import read_flexbuffer
from edge_opt.schema.table import Table

_MOST_PRINTED = 64
_MOST_LOOKED_AT = 1 << 16
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_./]+\Z")
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


def to_text(model: Model) -> str:
    """The model as text."""
    lines: list[str] = []
    for signature in model.signatures:
        names = _names(signature.subgraph)
        inputs, outputs = (
            ", ".join(f"{_word(name)}={names[tensor]}" for name, tensor in side.items())
            for side in (signature.inputs, signature.outputs)
        )
        index = model.subgraphs.index(signature.subgraph)
        lines.append(f"signature {_word(signature.key)} = #{index} ({inputs}) -> ({outputs})\n")
    return "".join([*lines, *map(subgraph_text, model.subgraphs)])


def _word(name: str) -> str:
    return name if _PLAIN_WORD.match(name) else json.dumps(name)


def _names(subgraph: Subgraph) -> dict[Tensor, str]:
    """Printed names of a subgraph's tensors; repeated names get a number."""
    sides = (side for one in subgraph.signatures for side in (one.inputs, one.outputs))
    named = (tensor for side in sides for tensor in side.values())
    names: dict[Tensor, str] = {}
    taken: set[str] = set()
    for tensor in dict.fromkeys([*used_tensors(subgraph), *named]):
        name = tensor.name
        count = 1
        while name in taken:
            count += 1
            name = f"{tensor.name}~{count}"
        taken.add(name)
        names[tensor] = f"%{name}" if _PLAIN_NAME.match(name) else f"%{json.dumps(name)}"
    return names


def subgraph_text(subgraph: Subgraph) -> str:
    """One subgraph as text."""
    names = _names(subgraph)
    inputs = ", ".join(f"{names[tensor]}: {_type(tensor)}" for tensor in subgraph.inputs)
    lines = [f"subgraph {_word(subgraph.name or 'main')} ({inputs}) {{"]
    for tensor, name in names.items():
        if tensor not in subgraph.inputs and tensor.producer is None and not tensor.is_constant:
            lines.append(
                f"  {'variable' if tensor.is_variable else 'unset'} {name}: {_type(tensor)}"
            )
    lines += [f"  {operator_text(operator, names.__getitem__)}" for operator in subgraph.operators]
    results = ", ".join(names[tensor] for tensor in subgraph.outputs)
    return "\n".join([*lines, f"  return {results}", "}\n"])


def operator_text(
    operator: Operator, named: Callable[[Tensor], str] = lambda one: f"%{one.name}"
) -> str:
    """One operator as a line of the text form; `named` gives a tensor's printed name."""

    def argument(tensor: Tensor | None) -> str:
        if tensor is None:
            return "none"
        return _constant(tensor) if tensor.is_constant else named(tensor)

    arguments = ", ".join(map(argument, operator.inputs))
    outputs = ", ".join(f"{named(t)}: {_type(t)}" for t in operator.outputs)
    outputs += " = " if outputs else ""
    code = operator.name
    if code == "CUSTOM":
        code = f"CUSTOM {_string(operator.code.custom_code or '')} "
    return f"{outputs}{code}({arguments}){_options(operator.options)}"


def _type(tensor: Tensor) -> str:
    sizes = list(map(str, tensor.shape))
    if tensor.shape_signature is not None and len(tensor.shape_signature) == len(sizes):
        sizes = [
            "?" if s == -1 else size for s, size in zip(tensor.shape_signature, sizes, strict=True)
        ]
    return f"{tensor.dtype}[{','.join(sizes)}]{_quantization(tensor)}"


def _quantization(tensor: Tensor) -> str:
    return f" {tensor.quantization}" if tensor.is_quantized else ""


def _number(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    # str of a numpy scalar is the shortest text that reads back as the same number of that type.
    return str(value)


def _constant(tensor: Tensor) -> str:
    shape = f"[{','.join(map(str, tensor.shape))}]"
    values = (
        tensor.array().ravel()
        if tensor.has_numbers and tensor.elements <= _MOST_LOOKED_AT
        else None
    )
    text = f"{shape}{{...}}"
    if values is not None and len(values) <= _MOST_PRINTED:
        numbers = ", ".join(map(_number, values))
        text = (
            f"{shape if len(tensor.shape) > 1 else ''}{{{numbers}}}"
            if tensor.shape
            else f"({numbers})"
        )
    elif values is not None and (values == values[0]).all():
        text = f"{shape}{{splat {_number(values[0])}}}"
    return f"{tensor.dtype}{text}{_quantization(tensor)}"


def _options(table: Table | None) -> str:
    if table is None:
        return ""
    present = [(name, table.fields[name]) for name in table.spec.by_name if name in table.fields]
    texts = [
        f"{name}: {option_text(read_flexbuffer(value) if name == 'composite_attributes' else value)}"
        for name, value in present
        if isinstance(value, np.ndarray) or value != table.spec.defaults[name]
    ]
    return f" {{{', '.join(texts)}}}" if texts else ""


def option_text(value: Any) -> str:
    """The value of an option: `{epsilon: 1e-06}`, `[1, 2]`, `'RELU'`, `true`."""
    if isinstance(value, dict):
        return (
            f"{{{', '.join(f'{_word(key)}: {option_text(item)}' for key, item in value.items())}}}"
        )
    if isinstance(value, np.ndarray | list):
        return f"[{', '.join(map(option_text, value))}]"
    if isinstance(value, Table):
        return f"<{value.spec.name}>"
    return _string(value) if isinstance(value, str) else _number(value)


def _string(value: str) -> str:
    """Quote with single quotes, or as JSON if the value contains a single quote or is not printable."""
    return f"'{value}'" if value.isprintable() and "'" not in value else json.dumps(value)


# For `print(graph)`; `edge_opt.ir.graph` cannot import this module.
Subgraph.__str__ = subgraph_text  # type: ignore[method-assign, assignment]
