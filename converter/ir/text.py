"""Prints a model as text, which `edge_opt.ir.parse` reads: one line for each operator, shapes and constants in place.

    signature decode = #0 (query=%q) -> (output=%out)
    subgraph main (%q: float32[1,1,4,8], %k: float32[1,1,16,8]) {
      variable %state: float32[4]
      %scaled: float32[1,1,4,8] = MUL(%q, float32(0.5))
      %logits: float32[1,1,4,16] = BATCH_MATMUL(%scaled, %k) {adj_y: true}
      return %logits
    }

Constants are printed inline: `int32(2)` a scalar, `int32{0, 2, 1, 3}` a vector, `float32[2,3]{...}` any shape row by
row, `float32[1,16]{splat 0.5}` one repeated value, `float32[64,64]{seed 7}` the random numbers of a seed; others of
more than 64 elements are omitted. Names that are not plain words are in double quotes. Quantization follows the type:
`int16[1,4] q(0.001, 0)`, per axis `int8[2,4] q([0.1, 0.2], [0, 0], axis 0)`, with more than eight scales
`q(640 scales, axis 0)`. Tensors that no operator defines are listed before the operators as `variable`, or as `unset`
if they are not state; so is a constant that the graph returns, as `constant %name = int32(2)`. `print(graph)` prints a
subgraph in this form.

If the graphs alone do not give the same file, because of its order, names, metadata or the bytes of `{...}`, the last
line is `file CHECKSUM 'BASE64'`: the file, with a checksum of it and the graphs. In a short text, for a large file, it
is `file of 684064 bytes`, which `edge_opt.ir.parse` refuses.
"""

import base64
import json
import re
from collections.abc import Callable, Container
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.words import UniqueNames
from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import Operator, Subgraph, Tensor, used_tensors
from edge_opt.ir.model import Model, checked_tables, to_bytes
from edge_opt.ir.operators import KINDS
from edge_opt.ir.parse import MOST_BYTES, TextFormError, checksum, parse, random_numbers
from edge_opt.schema.flexbuffers import read_flexbuffer
from edge_opt.schema.table import FieldSpec, Table, vector
from edge_opt.schema.writer import lay_out, model_bytes

_MOST_PRINTED = 64
_MOST_LOOKED_AT = 1 << 16
_MOST_BYTES = 16 << 10  # of a file in a short text
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_./]+\Z")
_PLAIN_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")
_SEEDED = re.compile(r"seed_([0-9]{1,18})\Z")


def to_text(model: Model, *, constants: Literal["short", "full"] = "short") -> str:
    """The model as text. `parse` gives a model of the same bytes, or refuses the text.

    It refuses the short text of a file of over 16 KiB, unless the graphs alone give the same bytes.

    Raises:
        ModelFormatError: the model is invalid.
    """
    tables = checked_tables(model)
    text = graphs_text(model)
    if _is_whole(text, tables):
        return text
    size = lay_out(tables)[-1].end
    if constants == "short" and size > _MOST_BYTES:
        return f"{text}file of {size} bytes\n"
    content = base64.b64encode(model_bytes(tables)).decode()
    return f"{text}file {checksum(text, content)} '{content}'\n"


def _is_whole(graphs: str, tables: Table) -> bool:
    """True if the text of graphs alone gives a model with these tables."""
    try:
        model = parse(graphs)
    except TextFormError:
        return False
    return to_bytes(model) == model_bytes(tables)


def graphs_text(model: Model) -> str:
    """The signatures and subgraphs alone, also of an invalid model."""
    lines: list[str] = []
    for signature in model.signatures:
        names = _names(signature.subgraph)
        index = model.subgraphs.index(signature.subgraph)
        inputs = _arguments(signature.inputs, names)
        outputs = _arguments(signature.outputs, names)
        lines.append(f"signature {_word(signature.key)} = #{index} ({inputs}) -> ({outputs})\n")
    return "".join([*lines, *map(subgraph_text, model.subgraphs)])


def _arguments(tensors: dict[str, Tensor], names: dict[Tensor, str]) -> str:
    return ", ".join(f"{_word(name)}={_printed(names[tensor])}" for name, tensor in tensors.items())


def _word(name: str) -> str:
    return name if _PLAIN_WORD.match(name) else json.dumps(name)


def _printed(name: str) -> str:
    return f"%{name}" if _PLAIN_NAME.match(name) else f"%{json.dumps(name)}"


def _names(subgraph: Subgraph) -> dict[Tensor, str]:
    """Names of a subgraph's tensors in its text; repeated names get a number."""
    names = UniqueNames(mark="~")
    tensors = dict.fromkeys([*used_tensors(subgraph), *_signature_tensors(subgraph)])
    return {tensor: names.unique(tensor.name) for tensor in tensors}


def _signature_tensors(subgraph: Subgraph) -> list[Tensor]:
    found: list[Tensor] = []
    for signature in subgraph.signatures:
        found += (*signature.inputs.values(), *signature.outputs.values())
    return found


def subgraph_text(subgraph: Subgraph) -> str:
    """One subgraph as text."""
    names = {tensor: _printed(name) for tensor, name in _names(subgraph).items()}
    named = {*subgraph.inputs, *subgraph.outputs, *_signature_tensors(subgraph)}
    for operator in subgraph.operators:
        named.update(operator.intermediates)

    given = dict.fromkeys(subgraph.inputs)
    inputs = ", ".join(f"{names[tensor]}: {_type(tensor)}" for tensor in given)
    lines = [f"subgraph {_word(subgraph.name or 'main')} ({inputs}) {{"]
    for tensor, name in names.items():
        if tensor in given or tensor.producer is not None:
            continue
        if not tensor.is_constant:
            kind = "variable" if tensor.is_variable else "unset"
            lines.append(f"  {kind} {name}: {_type(tensor)}")
        elif tensor in named:
            lines.append(f"  constant {name} = {_constant(tensor)}")
    for operator in subgraph.operators:
        line = operator_text(operator, names.__getitem__, named)
        lines.append(f"  {line}")
    results = ", ".join(map(names.__getitem__, subgraph.outputs))
    return "\n".join([*lines, f"  return {results}", "}\n"])


def operator_text(
    operator: Operator,
    name: Callable[[Tensor], str] = lambda one: f"%{one.name}",
    named: Container[Tensor] = (),
) -> str:
    """One operator as a line of the text form.

    `name` gives a tensor's printed name. Constants are printed in place, except those in `named`.
    """
    arguments: list[str] = []
    for tensor in operator.inputs:
        if tensor is None:
            arguments.append("none")
        elif tensor.is_constant and tensor not in named:
            arguments.append(_constant(tensor))
        else:
            arguments.append(name(tensor))
    outputs = ", ".join(f"{name(tensor)}: {_type(tensor)}" for tensor in operator.outputs)
    outputs += " = " if outputs else ""
    code = operator.name
    if code == "CUSTOM":
        code = f"CUSTOM {string_text(operator.code.custom_code or '')} "
    return f"{outputs}{code}({', '.join(arguments)}){_options(operator)}"


def _type(tensor: Tensor) -> str:
    sizes = list(map(str, tensor.shape))
    signature = tensor.shape_signature or ()
    if len(signature) == len(sizes):
        for axis, size in enumerate(signature):
            if size == -1:
                sizes[axis] = "?"
    return f"{tensor.dtype}[{','.join(sizes)}]{_quantization(tensor)}"


def _quantization(tensor: Tensor) -> str:
    return f" {tensor.quantization}" if tensor.is_quantized else ""


def _constant(tensor: Tensor) -> str:
    return f"{tensor.dtype}{_numbers(tensor)}{_quantization(tensor)}"


def _numbers(tensor: Tensor) -> str:
    """A constant's shape, if it does not follow from its numbers, and the numbers, or `{...}` for those left out."""
    shape = f"[{','.join(map(str, tensor.shape))}]"
    seeded = _SEEDED.match(tensor.name)
    is_looked_at = tensor.elements <= _MOST_LOOKED_AT or seeded is not None
    if not is_looked_at or not tensor.has_numbers:
        return f"{shape}{{...}}"
    values = tensor.array()
    if values.dtype.kind == "c":
        return f"{shape}{{...}}"
    if not tensor.shape:
        return f"({number_text(values[()])})"
    if values.size <= _MOST_PRINTED:
        numbers = ", ".join(map(number_text, values.ravel()))
        return f"{shape if len(tensor.shape) > 1 else ''}{{{numbers}}}"
    if values.tobytes() == values.ravel()[:1].tobytes() * values.size:
        return f"{shape}{{splat {number_text(values.ravel()[0])}}}"
    if seeded is not None and _is_of_seed(int(seeded[1]), tensor.dtype, values):
        return f"{shape}{{seed {int(seeded[1])}}}"
    return f"{shape}{{...}}"


def _is_of_seed(seed: int, dtype: DType, values: NDArray[np.generic]) -> bool:
    """Whether these are the numbers of a seed, which the name of a constant promises."""
    is_read = values.nbytes <= MOST_BYTES
    return is_read and random_numbers(seed, dtype, values.size).tobytes() == values.tobytes()


def _options(operator: Operator) -> str:
    table = operator.options
    if table is None or table.name != KINDS[operator.code.name].options:
        return ""
    texts: list[str] = []
    for name, field in table.spec.by_name.items():
        value = table.fields.get(name)
        if value is None:
            continue
        if name == "composite_attributes":
            attributes = read_flexbuffer(bytes(value))
            if not isinstance(attributes, dict):  # bytes that are not attributes
                attributes = str(attributes)
            texts.append(f"{name}: {option_text(attributes)}")
        elif isinstance(value, np.ndarray) or value != field.default:
            texts.append(f"{name}: {value_text(field, value)}")
    return f" {{{', '.join(texts)}}}" if texts else ""


def option_text(value: Any) -> str:
    """An attribute's value: `{epsilon: 1e-06}`, `[1, 2]`, `'RELU'`, `true`."""
    if isinstance(value, dict):
        items = [f"{_word(key)}: {option_text(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(option_text, value))}]"
    return string_text(value) if isinstance(value, str) else number_text(value)


def value_text(field: FieldSpec, value: Any) -> str:
    """A string, number or vector of numbers as text; of a long vector, only that there is one."""
    if field.kind == "string":
        return string_text(value)
    numbers = vector(field.element, value)
    if field.kind == "scalar":
        return number_text(numbers[()])
    if len(numbers) > _MOST_PRINTED:
        return "[...]"
    return f"[{', '.join(map(number_text, numbers))}]"


def number_text(value: Any) -> str:
    """A number; of a numpy type, the shortest text that reads back as the same number of that type."""
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    if isinstance(value, np.floating):
        # Numpy's own text depends on its version: -1e+09 or -1000000000.0.
        return repr(float(np.format_float_scientific(value)))
    return str(value)


def string_text(value: str) -> str:
    """Quote with single quotes, or as JSON if the value has a single quote or more than printable ASCII characters."""
    is_plain = value.isascii() and value.isprintable() and "'" not in value
    return f"'{value}'" if is_plain else json.dumps(value)


# For `print(graph)`; `edge_opt.ir.graph` cannot import this module.
Subgraph.__str__ = subgraph_text  # type: ignore[method-assign, assignment]
