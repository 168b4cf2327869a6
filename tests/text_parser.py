"""Reads the text form that `edge_opt.ir.text` prints, so that tests and pages can write a graph down.

A constant printed as `{...}` has no values and is refused. A `#` that no digit follows begins a comment. Every error
names the line.
"""

import json
import re
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from flatbuffers import flexbuffers

from edge_opt.base.errors import EdgeOptError
from edge_opt.ir.dtypes import DType, Quantization
from edge_opt.ir.graph import Buffer, Operator, OperatorCode, Signature, Subgraph, Tensor
from edge_opt.ir.model import Model
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS
from edge_opt.schema.data import Data
from edge_opt.schema.table import Table, new_table

_Item = TypeVar("_Item")
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#(?![0-9])[^\n]*)|(?P<tensor>%(?:"(?:[^"\\\n]|\\.)*"|[A-Za-z0-9_./]+))"""
    r"""|(?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf\b|nan\b))"""
    r"""|(?P<name>'[^'\n]*'|"(?:[^"\\\n]|\\.)*"|[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>->|.)"""
)
Named = dict[str, Tensor]


class TextFormError(EdgeOptError):
    """The text is not a model; names the line."""


def parse(text: str) -> Model:
    """Read the text form.

    Raises:
        TextFormError: where the text is not one; names the line and what was found.
    """
    parser = _Parser(text)
    try:
        return parser.read()
    except (KeyError, ValueError, IndexError) as error:
        _, found, at = parser.tokens[parser.place]
        line = 1 + text.count("\n", 0, at)
        raise TextFormError(f"line {line}: {error}, at {found or 'the end'!r}") from error


def literal(values: Any) -> str:
    """A constant with these numbers, as the text form has it."""
    array = np.asarray(values)
    sizes, numbers = (",".join(map(str, some)) for some in (array.shape, array.ravel()))
    return f"{array.dtype}[{sizes}]{{{numbers}}}"


class _Parser:
    def __init__(self, text: str) -> None:
        found = [(str(m.lastgroup), m.group(), m.start()) for m in _TOKEN.finditer(text)]
        self.tokens = [
            *(one for one in found if one[0] != "space"),
            ("end", "", len(text.rstrip())),
        ]
        self.place, self.model = 0, Model()

    def sees(self, *wanted: str) -> bool:
        """Whether the next token is one of these, or of one of these kinds."""
        return not {*wanted}.isdisjoint(self.tokens[self.place][:2])

    def next(self, *wanted: str) -> str:
        if not self.sees(*wanted):
            raise ValueError(f"expected {' or '.join(wanted)}")
        self.place += 1
        return self.tokens[self.place - 1][1]

    def takes(self, token: str) -> bool:
        return self.sees(token) and bool(self.next(token))

    def name(self) -> str:
        """A plain word, or anything in quotes, in double ones as in JSON."""
        text = self.next("name")
        return str(json.loads(text)) if text.startswith('"') else text.strip("'")

    def number(self, dtype: DType | None = None) -> Any:
        """Of that type; without one, an integer where it looks like one."""
        text = self.next("number", "true", "false")
        if text in ("true", "false"):
            return text == "true"
        is_float = not text.lstrip("-").isdigit() if dtype is None else dtype.is_float
        return float(text) if is_float else int(text)

    def until(self, end: str, read: Callable[[], _Item]) -> list[_Item]:
        """What `read` finds again and again, commas in between, until `end` comes."""
        found: list[_Item] = []
        while not self.takes(end):
            found.append(read())
            self.takes(",")
        return found

    def named(self, end: str, sign: str, read: Callable[[], _Item]) -> dict[str, _Item]:
        """Names, a sign behind each, and what `read` finds."""
        return dict(self.until(end, lambda: (self.name(), self.next(sign) and read())))

    def read(self) -> Model:
        signatures: list[tuple[str, int, dict[str, str], dict[str, str]]] = []
        named: list[Named] = []
        while not self.sees("end"):
            if self.takes("signature"):
                key = self.name()
                self.next("="), self.next("#")
                index, inputs = self.number(DType.INT32), self.arguments()
                self.next("->")
                signatures.append((key, index, inputs, self.arguments()))
            else:
                self.next("subgraph")
                named.append(self.subgraph())
        for key, index, *sides in signatures:
            given, made = (
                {name: named[index][value] for name, value in side.items()} for side in sides
            )
            self.model.signatures.append(Signature(key, self.model.subgraphs[index], given, made))
        return self.model

    def arguments(self) -> dict[str, str]:
        self.next("(")
        return self.named(")", "=", self.tensor)

    def subgraph(self) -> Named:
        graph, tensors = Subgraph(self.name()), Named()
        self.model.subgraphs.append(graph)
        self.next("(")
        graph.inputs = self.until(")", lambda: self.define(graph, tensors))
        self.next("{")
        while self.sees("variable", "unset"):
            kept = self.next("name") == "variable"
            self.define(graph, tensors).is_variable = kept
        while not self.takes("return"):
            self.operator(graph, tensors)
        graph.outputs = self.until("}", lambda: tensors[self.tensor()])
        return tensors

    def tensor(self) -> str:
        name = self.next("tensor")[1:]
        return str(json.loads(name)) if name.startswith('"') else name

    def define(self, graph: Subgraph, tensors: Named) -> Tensor:
        name = self.tensor()
        if name in tensors:
            raise ValueError(f"%{name} is defined twice")
        self.next(":")
        dtype = self.dtype()
        shape, signature = self.shape()
        made = Tensor(name, shape, dtype, quantization=self.parameters(), shape_signature=signature)
        tensors[name] = graph.add_tensor(made)
        return made

    def dtype(self) -> DType:
        return DType[self.next("name").upper()]

    def shape(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        self.next("[")
        sizes = tuple(self.until("]", lambda: -1 if self.takes("?") else self.number(DType.INT32)))
        return tuple(1 if size == -1 else size for size in sizes), sizes if -1 in sizes else None

    def parameters(self) -> Quantization | None:
        if not self.takes("q"):
            return None
        self.next("(")
        fields: dict[str, Any] = {}
        for name, dtype in (("scale", DType.FLOAT32), ("zero_point", DType.INT64)):
            number = lambda dtype=dtype: self.number(dtype)  # noqa: E731
            fields[name] = self.until("]", number) if self.takes("[") else [number()]
            self.takes(",")
        if self.takes("axis"):
            fields["quantized_dimension"] = self.number(DType.INT32)
        self.next(")")
        return Quantization(new_table("QuantizationParameters", **fields))

    def operator(self, graph: Subgraph, tensors: Named) -> None:
        outputs: list[Tensor] = []
        made = dict(tensors)
        while self.sees("tensor"):
            outputs.append(self.define(graph, made))
            if not self.takes(","):
                self.next("=")
                break
        name = self.next("name")
        code = OperatorCode(BUILTIN_OPERATORS[name], 1, self.name() if name == "CUSTOM" else None)
        self.next("(")
        inputs = self.until(")", lambda: self.argument(graph, tensors))
        tensors.update(made)
        if code not in self.model.operator_codes:
            self.model.operator_codes.append(code)
        options = KINDS[name].options if name != "CUSTOM" else None
        table = None if options is None else new_table(options)
        if self.takes("{"):
            self.until("}", lambda: self.option(table))
        graph.append(Operator(code, inputs, outputs, table))

    def argument(self, graph: Subgraph, tensors: Named) -> Tensor | None:
        if self.sees("tensor"):
            return tensors[self.tensor()]
        return None if self.takes("none") else graph.add_tensor(self.constant(graph))

    def constant(self, graph: Subgraph) -> Tensor:
        dtype = self.dtype()
        shape = self.shape()[0] if self.sees("[") else None
        end = ")" if self.next("(", "{") == "(" else "}"
        splat = self.takes("splat")
        values = self.until(end, lambda: self.number(dtype))
        if shape is None:
            shape = () if end == ")" else (len(values),)
        array = np.array(values, dtype.numpy)
        array = np.full(shape, array[0], dtype.numpy) if splat else array.reshape(shape)
        buffer = Buffer(Data(array.tobytes()))
        self.model.buffers.append(buffer)
        name, parameters = f"const_{len(graph.tensors)}", self.parameters()
        return Tensor(name, array.shape, dtype, buffer=buffer, quantization=parameters)

    def option(self, table: Table | None) -> None:
        field = self.name()
        if table is None or field not in table.spec.by_name:
            raise ValueError(f"{field} is not an option")
        self.next(":")
        value = self.value()
        if isinstance(value, dict):  # attributes of a composite
            value = list(flexbuffers.Dumps(value))
        table.fields[field] = new_table(table.spec.name, **{field: value}).fields[field]

    def value(self) -> Any:
        if self.takes("["):
            return self.until("]", self.value)
        if self.takes("{"):
            return self.named("}", ":", self.value)
        return self.number() if self.sees("number", "true", "false") else self.name()
