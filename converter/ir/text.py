"""A model as text and back: one line an operator, shapes and constants in place. Golden tests are written in it.

    signature decode = #0 (query=%q) -> (output=%out)
    subgraph main (%q: float32[1,1,4,8], %k: float32[1,1,16,8]) {
      %scaled: float32[1,1,4,8] = MUL(%q, float32(0.5))
      %logits: float32[1,1,4,16] = BATCH_MATMUL(%scaled, %k) {adj_y: true}
      return %logits
    }

Constants stand where they are read: `int32(2)` a scalar, `int32{0, 2, 1, 3}` a vector, `float32[2,3]{...}` any
shape row by row, `float32[1,16]{splat 0.5}` one value everywhere. Constants of more than 64 elements are printed
as `float32[640,640]{...}`, which can be read by people but not parsed. Quantization follows a type:
`int16[1,4] q(0.001, 0)`, per axis `int8[2,4] q([0.1, 0.2], [0, 0], axis 0)`.
"""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_opt.ir.dtypes import DType
from edge_opt.ir.graph import BUILTIN_OPERATORS, Buffer, Operator, OperatorCode, Subgraph, Tensor
from edge_opt.ir.model import Model, Signature
from edge_opt.ir.operators import options_table
from edge_opt.ir.quantization import Quantization
from edge_opt.schema.data import Data
from edge_opt.schema.errors import EdgeOptError
from edge_opt.schema.table import Table, new_table

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_MOST_PRINTED = 64
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_./]+\Z")


class TextFormError(EdgeOptError):
    """The text is not a model; names the line."""


def to_text(model: Model) -> str:
    """The model as text."""
    lines: list[str] = []
    names = [_Names(subgraph) for subgraph in model.subgraphs]
    for signature in model.signatures:
        index = next(i for i, graph in enumerate(model.subgraphs) if graph is signature.subgraph)
        inputs = ", ".join(f"{n}={names[index].of(t)}" for n, t in signature.inputs.items())
        outputs = ", ".join(f"{n}={names[index].of(t)}" for n, t in signature.outputs.items())
        lines.append(f"signature {signature.key} = #{index} ({inputs}) -> ({outputs})")
    for subgraph, named in zip(model.subgraphs, names, strict=True):
        lines.extend(_subgraph_lines(subgraph, named))
    return "\n".join(lines) + "\n"


def subgraph_text(subgraph: Subgraph) -> str:
    """One subgraph as text."""
    return "\n".join(_subgraph_lines(subgraph, _Names(subgraph))) + "\n"


class _Names:
    """Printed names of a subgraph's tensors: as they are where that is unambiguous."""

    def __init__(self, subgraph: Subgraph) -> None:
        self._names: dict[int, str] = {}
        taken: set[str] = set()
        for tensor in _used_tensors(subgraph):
            name, count = tensor.name, 1
            while name in taken:
                count += 1
                name = f"{tensor.name}~{count}"
            taken.add(name)
            self._names[id(tensor)] = f"%{name}" if _PLAIN_NAME.match(name) else f"%{json.dumps(name)}"

    def of(self, tensor: Tensor) -> str:
        return self._names[id(tensor)]


def _used_tensors(subgraph: Subgraph) -> Iterator[Tensor]:
    seen: set[int] = set()

    def fresh(tensors: Iterable[Tensor | None]) -> Iterator[Tensor]:
        for tensor in tensors:
            if tensor is not None and id(tensor) not in seen:
                seen.add(id(tensor))
                yield tensor

    yield from fresh(subgraph.inputs)
    for operator in subgraph.operators:
        yield from fresh(operator.inputs)
        yield from fresh(operator.outputs)
    yield from fresh(subgraph.outputs)


def _subgraph_lines(subgraph: Subgraph, names: _Names) -> Iterator[str]:
    inputs = ", ".join(f"{names.of(t)}: {_type(t)}" for t in subgraph.inputs)
    yield f"subgraph {subgraph.name or 'main'} ({inputs}) {{"
    for operator in subgraph.operators:
        yield "  " + operator_text(operator, names.of)
    yield f"  return {', '.join(names.of(t) for t in subgraph.outputs)}"
    yield "}"


def operator_text(operator: Operator, name: Any = None) -> str:
    """One operator as a line of the text form; `name` gives a tensor's printed name."""
    named = name or (lambda tensor: f"%{tensor.name}")

    def argument(tensor: Tensor | None) -> str:
        if tensor is None:
            return "none"
        return _constant(tensor) if tensor.is_constant else str(named(tensor))

    arguments = ", ".join(argument(t) for t in operator.inputs)
    outputs = ", ".join(f"{named(t)}: {_type(t)}" for t in operator.outputs)
    code = f"CUSTOM '{operator.code.custom_code}' " if operator.name == "CUSTOM" else operator.name
    return f"{outputs} = {code}({arguments}){_options(operator.options)}"


def _type(tensor: Tensor) -> str:
    sizes = tensor.shape
    if tensor.shape_signature is not None and len(tensor.shape_signature) == len(sizes):
        shape = ",".join(
            "?" if s == -1 else str(n) for s, n in zip(tensor.shape_signature, sizes, strict=True)
        )
    else:
        shape = ",".join(map(str, sizes))
    return f"{tensor.dtype.name.lower()}[{shape}]{_quantization(tensor.quantization)}"


def _quantization(parameters: Quantization | None) -> str:
    if parameters is None or not parameters.is_affine:
        return ""
    scales = [_number(value) for value in parameters.scale]
    points = [str(value) for value in parameters.zero_point.tolist()]
    if not parameters.is_per_axis:
        return f" q({scales[0]}, {points[0]})"
    if len(scales) > _MOST_PRINTED:
        return f" q({len(scales)} scales, axis {parameters.dimension})"
    return f" q([{', '.join(scales)}], [{', '.join(points)}], axis {parameters.dimension})"


def _number(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "true" if value else "false"
    # str of a numpy scalar is the shortest text that reads back as the same number of that type.
    return str(value)


def _constant(tensor: Tensor) -> str:
    dtype = tensor.dtype.name.lower()
    suffix = _quantization(tensor.quantization)
    shape = "" if len(tensor.shape) <= 1 else f"[{','.join(map(str, tensor.shape))}]"
    if tensor.dtype.numpy is None or tensor.elements > _MOST_PRINTED:
        return f"{dtype}[{','.join(map(str, tensor.shape))}]{_splat(tensor)}{suffix}"
    values = [_number(value) for value in tensor.array().ravel()]
    if not tensor.shape:
        return f"{dtype}({values[0]}){suffix}"
    return f"{dtype}{shape}{{{', '.join(values)}}}{suffix}"


def _splat(tensor: Tensor) -> str:
    if tensor.dtype.numpy is None or tensor.elements > 1 << 16:
        return "{...}"
    values = tensor.array().ravel()
    return f"{{splat {_number(values[0])}}}" if (values == values[0]).all() else "{...}"


def _options(table: Table | None) -> str:
    if table is None:
        return ""
    texts = [
        f"{name}: {_option(value)}"
        for name, value in table.fields.items()
        if isinstance(value, np.ndarray) or value != _default(table, name)
    ]
    return f" {{{', '.join(texts)}}}" if texts else ""


def _default(table: Table, name: str) -> object:
    return Table(table.spec, {}).get(name)


def _option(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"[{', '.join(_number(v) for v in value)}]"
    if isinstance(value, Table):
        return f"<{value.spec.name}>"
    if isinstance(value, list):
        return f"[{', '.join(_option(v) for v in value)}]"
    return f"'{value}'" if isinstance(value, str) else _number(value)


_TOKEN = re.compile(
    r"""\s*(?:(?P<comment>\#[^0-9\n][^\n]*)|(?P<tensor>%(?:"(?:[^"\\]|\\.)*"|[A-Za-z0-9_./]+))|(?P<string>'[^']*')"""
    r"""|(?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf\b|nan\b))|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"""
    r"""|(?P<arrow>->)|(?P<punct>[\[\](){},:=?\#]))"""
)


def parse(text: str) -> Model:
    """Read the text form.

    Raises:
        TextFormError: where the text is not one; names the line and what was expected.
    """
    return _Parser(text).model()


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens: list[tuple[str, str, int]] = []
        self._position = 0
        self._model = Model()
        self._tokenize(text)

    def _tokenize(self, text: str) -> None:
        position = 0
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            line = text.count("\n", 0, position) + 1
            if match is None:
                raise TextFormError(f"line {line}: cannot read {text[position : position + 20]!r}")
            position = match.end()
            kind = match.lastgroup or ""
            if kind != "comment":
                line = text.count("\n", 0, match.start(kind)) + 1
                self._tokens.append((kind, match.group(kind), line))
        self._tokens.append(("end", "", text.count("\n") + 1))

    def _peek(self) -> str:
        return self._tokens[self._position][1]

    def _kind(self) -> str:
        return self._tokens[self._position][0]

    def _next(self) -> str:
        self._position += 1
        return self._tokens[self._position - 1][1]

    def _fail(self, expected: str) -> TextFormError:
        _, found, line = self._tokens[self._position]
        return TextFormError(f"line {line}: expected {expected}, found {found or 'the end'!r}")

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise self._fail(repr(token))
        self._position += 1

    def _take(self, token: str) -> bool:
        if self._peek() == token:
            self._position += 1
            return True
        return False

    def model(self) -> Model:
        signatures: list[tuple[str, int, dict[str, str], dict[str, str]]] = []
        named: list[dict[str, Tensor]] = []
        while self._kind() != "end":
            if self._take("signature"):
                signatures.append(self._signature())
            elif self._take("subgraph"):
                named.append(self._subgraph())
            else:
                raise self._fail("'signature' or 'subgraph'")
        for key, index, inputs, outputs in signatures:
            if not 0 <= index < len(named):
                raise TextFormError(f"signature {key}: subgraph #{index} does not exist")
            graph, tensors = self._model.subgraphs[index], named[index]
            self._model.signatures.append(
                Signature(
                    key,
                    graph,
                    {name: self._lookup(tensors, value) for name, value in inputs.items()},
                    {name: self._lookup(tensors, value) for name, value in outputs.items()},
                )
            )
        return self._model

    def _signature(self) -> tuple[str, int, dict[str, str], dict[str, str]]:
        key = self._next()
        self._expect("=")
        self._expect("#")
        index = int(self._number())
        inputs = self._arguments()
        self._expect("->")
        return key, index, inputs, self._arguments()

    def _arguments(self) -> dict[str, str]:
        self._expect("(")
        found: dict[str, str] = {}
        while not self._take(")"):
            name = self._next()
            self._expect("=")
            found[name] = self._tensor_name()
            self._take(",")
        return found

    def _tensor_name(self) -> str:
        if self._kind() != "tensor":
            raise self._fail("a tensor (%name)")
        name = self._next()[1:]
        return str(json.loads(name)) if name.startswith('"') else name

    def _number(self) -> str:
        if self._kind() != "number":
            raise self._fail("a number")
        return self._next()

    def _lookup(self, tensors: dict[str, Tensor], name: str) -> Tensor:
        if name not in tensors:
            raise TextFormError(f"%{name} is read before it is defined")
        return tensors[name]

    def _subgraph(self) -> dict[str, Tensor]:
        graph = Subgraph(self._next())
        tensors: dict[str, Tensor] = {}
        self._model.subgraphs.append(graph)
        self._expect("(")
        while not self._take(")"):
            graph.inputs.append(self._define(tensors, graph))
            self._take(",")
        self._expect("{")
        while not self._take("return"):
            self._operator(graph, tensors)
        while not self._take("}"):
            graph.outputs.append(self._lookup(tensors, self._tensor_name()))
            self._take(",")
        return tensors

    def _define(self, tensors: dict[str, Tensor], graph: Subgraph) -> Tensor:
        name = self._tensor_name()
        if name in tensors:
            raise self._fail(f"a name other than %{name}, which is already defined")
        self._expect(":")
        dtype = self._dtype()
        shape, signature = self._shape()
        tensors[name] = graph.add_tensor(
            Tensor(name, shape, dtype, quantization=self._parameters(), shape_signature=signature)
        )
        return tensors[name]

    def _dtype(self) -> DType:
        word = self._peek().upper()
        if word not in DType.__members__:
            raise self._fail("an element type")
        self._position += 1
        return DType[word]

    def _shape(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        self._expect("[")
        sizes: list[int] = []
        while not self._take("]"):
            sizes.append(-1 if self._take("?") else int(self._number()))
            self._take(",")
        shape = tuple(max(size, 1) if size == -1 else size for size in sizes)
        return shape, tuple(sizes) if -1 in sizes else None

    def _parameters(self) -> Quantization | None:
        if not self._take("q"):
            return None
        self._expect("(")
        scales, points, axis = self._numbers(), self._numbers(), 0
        if self._take("axis"):
            axis = int(self._number())
        self._expect(")")
        parameters = Quantization(
            new_table(
                "QuantizationParameters",
                scale=np.array(scales, np.float32),
                zero_point=np.array(points, np.float64).astype(np.int64),
            )
        )
        return parameters.along(axis) if axis else parameters

    def _numbers(self) -> list[str]:
        values: list[str] = []
        if self._take("["):
            while not self._take("]"):
                values.append(self._number())
                self._take(",")
        else:
            values.append(self._number())
        self._take(",")
        return values

    def _operator(self, graph: Subgraph, tensors: dict[str, Tensor]) -> None:
        outputs = [self._define(tensors, graph)]
        while self._take(","):
            outputs.append(self._define(tensors, graph))
        self._expect("=")
        name = self._next()
        custom = self._next().strip("'") if name == "CUSTOM" else None
        if name not in BUILTIN_OPERATORS:
            self._position -= 1
            raise self._fail("an operator")
        self._expect("(")
        inputs: list[Tensor | None] = []
        while not self._take(")"):
            inputs.append(self._argument(graph, tensors))
            self._take(",")
        code = OperatorCode(BUILTIN_OPERATORS[name], 1, custom)
        known = [c for c in self._model.operator_codes if c.key() == code.key()]
        if not known:
            self._model.operator_codes.append(code)
        graph.append(Operator((known or [code])[0], inputs, outputs, self._options_of(name)))

    def _argument(self, graph: Subgraph, tensors: dict[str, Tensor]) -> Tensor | None:
        if self._kind() == "tensor":
            return self._lookup(tensors, self._tensor_name())
        if self._take("none"):
            return None
        return graph.add_tensor(self._literal(graph))

    def _literal(self, graph: Subgraph) -> Tensor:
        dtype, shape = self._dtype(), None
        assert dtype.numpy is not None
        if self._peek() == "[":
            shape, _ = self._shape()
        scalar = self._take("(")
        if not scalar:
            self._expect("{")
        splat = self._take("splat")
        values: list[float | int | bool] = []
        while not self._take(")" if scalar else "}"):
            values.append(self._value(dtype))
            self._take(",")
        array = np.array(values, dtype.numpy)
        if splat:
            array = np.full(shape or (), values[0], dtype.numpy)
        elif scalar or shape is not None:
            array = array.reshape(shape or ())
        buffer = Buffer(Data(array.tobytes()))
        self._model.buffers.append(buffer)
        name = f"const_{len(graph.tensors)}"
        shape = tuple(int(size) for size in array.shape)
        return Tensor(name, shape, dtype, buffer=buffer, quantization=self._parameters())

    def _value(self, dtype: DType) -> float | int | bool:
        if self._peek() in ("true", "false"):
            return self._next() == "true"
        number = self._number()
        return float(number) if dtype.is_float else int(number)

    def _options_of(self, operator: str) -> Table | None:
        name = options_table(operator) if operator != "CUSTOM" else None
        given: dict[str, Any] = {}
        if self._take("{"):
            while not self._take("}"):
                field = self._next()
                self._expect(":")
                given[field] = self._option_value()
                self._take(",")
        return None if name is None else new_table(name, **given)

    def _option_value(self) -> Any:
        if self._take("["):
            values: list[int] = []
            while not self._take("]"):
                values.append(int(self._number()))
                self._take(",")
            return np.array(values, np.int32)
        if self._kind() == "string":
            return self._next().strip("'")
        if self._peek() in ("true", "false"):
            return self._next() == "true"
        number = self._number()
        return float(number) if re.search(r"[.einf]", number) else int(number)
