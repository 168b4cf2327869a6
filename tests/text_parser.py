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
_INTEGER = re.compile(r"-?\d+\Z")
_TOKEN = re.compile(
    r"""(?P<space>\s+|\#(?![0-9])[^\n]*)|(?P<tensor>%(?:"(?:[^"\\\n]|\\.)*"|[A-Za-z0-9_./]+))"""
    r"""|(?P<string>'[^'\n]*'|"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf\b|nan\b))|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"""
    r"""|(?P<punct>->|[\[\](){},:=?\#])|(?P<unknown>.)"""
)
Named = dict[str, Tensor]


class TextFormError(EdgeOptError):
    """The text is not a model; names the line."""


def parse(text: str) -> Model:
    """Read the text form.

    Raises:
        TextFormError: where the text is not one; names the line and what was expected.
    """
    return _Parser(text).model()


def literal(values: Any) -> str:
    """A constant with these numbers, as the text form has it."""
    array = np.asarray(values)
    sizes, numbers = (",".join(map(str, some)) for some in (array.shape, array.ravel()))
    return f"{array.dtype}[{sizes}]{{{numbers}}}"


class _Parser:
    def __init__(self, text: str) -> None:
        found = [(str(m.lastgroup), m.group(), m.start()) for m in _TOKEN.finditer(text)]
        self._tokens = [(kind, token, at) for kind, token, at in found if kind != "space"]
        self._tokens.append(("end", "", len(text.rstrip())))
        self._text, self._place = text, 0
        self._model = Model()

    # Tokens

    def _kind(self) -> str:
        return self._tokens[self._place][0]

    def _peek(self) -> str:
        return self._tokens[self._place][1]

    def _check(self, fits: bool, expected: str) -> None:
        if not fits:
            _, found, at = self._tokens[self._place]
            line = 1 + self._text.count("\n", 0, at)
            raise TextFormError(f"line {line}: expected {expected}, found {found or 'the end'!r}")

    def _next(self, fits: bool = True, expected: str = "") -> str:
        self._check(fits, expected)
        self._place += 1
        return self._tokens[self._place - 1][1]

    def _expect(self, *tokens: str) -> None:
        for token in tokens:
            self._next(self._peek() == token, repr(token))

    def _take(self, token: str) -> bool:
        taken = self._peek() == token
        self._place += taken
        return taken

    def _word(self) -> str:
        """A name: a plain word, or anything in quotes, in double ones as in JSON."""
        text = self._next(self._kind() in ("word", "string"), "a name")
        return str(json.loads(text)) if text.startswith('"') else text.strip("'")

    def _number(self, dtype: DType = DType.FLOAT32) -> float | int | bool:
        if self._peek() in ("true", "false"):
            return self._next() == "true"
        if dtype.is_float:
            return float(self._next(self._kind() == "number", "a number"))
        return int(self._next(bool(_INTEGER.match(self._peek())), "an integer"))

    def _integer(self) -> int:
        return int(self._number(DType.INT64))

    def _until(self, end: str, read: Callable[[], _Item]) -> list[_Item]:
        """What `read` finds again and again, commas in between, until `end` comes."""
        found: list[_Item] = []
        while not self._take(end):
            found.append(read())
            self._take(",")
        return found

    def _named(self, sign: str, read: Callable[[], _Item]) -> Callable[[], tuple[str, _Item]]:
        """Reads a name, a sign, and what `read` finds."""

        def pair() -> tuple[str, _Item]:
            name = self._word()
            self._expect(sign)
            return name, read()

        return pair

    # Signatures

    def model(self) -> Model:
        signatures: list[tuple[str, int, dict[str, str], dict[str, str]]] = []
        named: list[Named] = []
        while self._kind() != "end":
            if self._take("signature"):
                key = self._word()
                self._expect("=", "#")
                index, inputs = self._integer(), self._arguments()
                self._expect("->")
                signatures.append((key, index, inputs, self._arguments()))
            else:
                self._expect("subgraph")
                named.append(self._subgraph())
        for key, index, *sides in signatures:
            self._check(0 <= index < len(named), f"subgraph #{index} of signature {key}")
            given, made = ({name: named[index][value] for name, value in side.items()} for side in sides)
            self._model.signatures.append(Signature(key, self._model.subgraphs[index], given, made))
        return self._model

    def _arguments(self) -> dict[str, str]:
        self._expect("(")
        return dict(self._until(")", self._named("=", self._tensor_name)))

    # Subgraphs

    def _subgraph(self) -> Named:
        graph, tensors = Subgraph(self._word()), Named()
        self._model.subgraphs.append(graph)
        self._expect("(")
        graph.inputs = self._until(")", lambda: self._define(graph, tensors))
        self._expect("{")
        while self._peek() in ("variable", "unset"):
            kept = self._next() == "variable"
            self._define(graph, tensors).is_variable = kept
        while not self._take("return"):
            self._operator(graph, tensors)
        graph.outputs = self._until("}", lambda: self._known(tensors))
        return tensors

    def _tensor_name(self) -> str:
        name = self._next(self._kind() == "tensor", "a tensor (%name)")[1:]
        return str(json.loads(name)) if name.startswith('"') else name

    def _known(self, tensors: Named) -> Tensor:
        name = self._tensor_name()
        self._check(name in tensors, f"%{name} to be defined")
        return tensors[name]

    def _define(self, graph: Subgraph, tensors: Named) -> Tensor:
        name = self._tensor_name()
        self._check(name not in tensors, f"another name than %{name}")
        self._expect(":")
        dtype = self._dtype()
        shape, signature = self._shape()
        made = Tensor(name, shape, dtype, quantization=self._parameters(), shape_signature=signature)
        tensors[name] = graph.add_tensor(made)
        return made

    def _dtype(self) -> DType:
        return DType[self._next(self._peek().upper() in DType.__members__, "an element type").upper()]

    def _shape(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        self._expect("[")
        sizes = tuple(self._until("]", lambda: -1 if self._take("?") else self._integer()))
        return tuple(1 if size == -1 else size for size in sizes), sizes if -1 in sizes else None

    def _parameters(self) -> Quantization | None:
        if not self._take("q"):
            return None
        self._expect("(")
        fields: dict[str, Any] = {}
        for name in ("scale", "zero_point"):
            values = self._until("]", self._number) if self._take("[") else [self._number()]
            fields[name] = values if name == "scale" else list(map(int, values))
            self._take(",")
        if self._take("axis"):
            fields["quantized_dimension"] = self._integer()
        self._expect(")")
        return Quantization(new_table("QuantizationParameters", **fields))

    # Operators

    def _operator(self, graph: Subgraph, tensors: Named) -> None:
        outputs: list[Tensor] = []
        made = dict(tensors)
        while self._kind() == "tensor":
            outputs.append(self._define(graph, made))
            if not self._take(","):
                self._expect("=")
                break
        name = self._next(self._peek() in BUILTIN_OPERATORS, "an operator")
        code = OperatorCode(BUILTIN_OPERATORS[name], 1, self._word() if name == "CUSTOM" else None)
        self._expect("(")
        inputs = self._until(")", lambda: self._argument(graph, tensors))
        tensors.update(made)
        if code not in self._model.operator_codes:
            self._model.operator_codes.append(code)
        options = KINDS[name].options if name != "CUSTOM" else None
        table = None if options is None else new_table(options)
        if self._take("{"):
            self._until("}", lambda: self._option(table))
        graph.append(Operator(code, inputs, outputs, table))

    def _argument(self, graph: Subgraph, tensors: Named) -> Tensor | None:
        if self._kind() == "tensor":
            return self._known(tensors)
        return None if self._take("none") else graph.add_tensor(self._literal(graph))

    def _literal(self, graph: Subgraph) -> Tensor:
        dtype, shape = self._dtype(), None
        self._check(dtype.numpy is not None, "a type whose constants can be written as text")
        if self._peek() == "[":
            shape, _ = self._shape()
        end = ")" if self._take("(") else "}"
        if end == "}":
            self._expect("{")
        splat = self._take("splat")
        values = self._until(end, lambda: self._number(dtype))
        wanted = () if end == ")" else (len(values),) if shape is None else shape
        count = 1 if splat else int(np.prod(wanted))
        self._check(len(values) == count, f"{count} numbers in the constant, not {len(values)}")
        array = np.array(values, dtype.numpy)
        array = np.full(wanted, array[0], dtype.numpy) if splat else array.reshape(wanted)
        buffer = Buffer(Data(array.tobytes()))
        self._model.buffers.append(buffer)
        name, parameters = f"const_{len(graph.tensors)}", self._parameters()
        return Tensor(name, array.shape, dtype, buffer=buffer, quantization=parameters)

    def _option(self, table: Table | None) -> None:
        field = self._word()
        self._check(table is not None and field in table.spec.by_name, f"an option, not '{field}'")
        assert table is not None
        self._expect(":")
        value = self._option_value()
        if isinstance(value, dict):  # attributes of a composite
            value = list(flexbuffers.Dumps(value))
        table.fields[field] = new_table(table.spec.name, **{field: value}).fields[field]

    def _option_value(self) -> Any:
        if self._take("["):
            return self._until("]", self._option_value)
        if self._take("{"):
            return dict(self._until("}", self._named(":", self._option_value)))
        if self._kind() == "string":
            return self._word()
        return self._number(DType.INT64 if _INTEGER.match(self._peek()) else DType.FLOAT32)
