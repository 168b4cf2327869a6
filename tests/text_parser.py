"""Reads the text form that `edge_opt.ir.text` prints, so that tests and pages can write a graph down.

A constant printed as `{...}` has no values and is refused. A `#` that no digit follows begins a comment. Every error
names the line.
"""

import json
import math
import re
from collections.abc import Callable, Collection
from typing import Any, TypeVar

import numpy as np
from flatbuffers import flexbuffers
from numpy.typing import NDArray

from edge_opt.base.errors import EdgeOptError
from edge_opt.ir.dtypes import DType, Quantization
from edge_opt.ir.graph import Buffer, Operator, OperatorCode, Subgraph, Tensor
from edge_opt.ir.model import Model, Signature
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS
from edge_opt.schema.data import Data
from edge_opt.schema.table import Table, new_table

_Item = TypeVar("_Item")
_INTEGER = re.compile(r"-?\d+\Z")
_TOKEN = re.compile(
    r"""\s*(?:(?P<comment>\#(?![0-9])[^\n]*)|(?P<tensor>%(?:"(?:[^"\\\n]|\\.)*"|[A-Za-z0-9_./]+))"""
    r"""|(?P<string>'[^'\n]*')|(?P<quoted>"(?:[^"\\\n]|\\.)*")"""
    r"""|(?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf\b|nan\b))|(?P<word>[A-Za-z_][A-Za-z0-9_]*)"""
    r"""|(?P<arrow>->)|(?P<punct>[\[\](){},:=?\#]))"""
)


class TextFormError(EdgeOptError):
    """The text is not a model; names the line."""


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
        position, line = 0, 1
        text = text.rstrip()
        while position < len(text):
            match = _TOKEN.match(text, position)
            if match is None:
                rest = text[position:].lstrip()
                line += text.count("\n", position, len(text) - len(rest))
                raise TextFormError(f"line {line}: cannot read {rest[:20]!r}")
            kind = match.lastgroup or ""
            line += text.count("\n", position, match.start(kind))
            position = match.end()
            if kind != "comment":
                self._tokens.append((kind, match.group(kind), line))
        self._tokens.append(("end", "", line))

    # Tokens

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

    def _wrong(self, message: str) -> TextFormError:
        """About the token just taken."""
        return TextFormError(f"line {self._tokens[self._position - 1][2]}: {message}")

    def _expect(self, token: str) -> None:
        if self._peek() != token:
            raise self._fail(repr(token))
        self._position += 1

    def _take(self, token: str) -> bool:
        if self._peek() == token:
            self._position += 1
            return True
        return False

    def _word(self) -> str:
        """A name: a plain word, or anything in double quotes."""
        if self._kind() == "quoted":
            return self._unquoted(self._next())
        if self._kind() != "word":
            raise self._fail("a name")
        return self._next()

    def _string(self) -> str:
        """A text in single quotes as it is, or in double quotes as in JSON."""
        return self._unquoted(self._next()) if self._kind() == "quoted" else self._next().strip("'")

    def _unquoted(self, text: str) -> str:
        try:
            return str(json.loads(text))
        except json.JSONDecodeError as error:
            raise self._wrong(f"{text} is no quoted name: {error.msg}") from None

    def _number(self) -> str:
        if self._kind() != "number":
            raise self._fail("a number")
        return self._next()

    def _integer(self) -> int:
        if not _INTEGER.match(self._peek()):
            raise self._fail("an integer")
        return int(self._next())

    def _until(self, end: str, read: Callable[[], _Item]) -> list[_Item]:
        """What `read` finds again and again, commas in between, until `end` comes."""
        found: list[_Item] = []
        while not self._take(end):
            found.append(read())
            self._take(",")
        return found

    # Signatures

    def model(self) -> Model:
        signatures: list[tuple[str, int, int, dict[str, str], dict[str, str]]] = []
        named: list[dict[str, Tensor]] = []
        while self._kind() != "end":
            if self._take("signature"):
                signatures.append(self._signature())
            elif self._take("subgraph"):
                named.append(self._subgraph())
            else:
                raise self._fail("'signature' or 'subgraph'")
        for key, position, index, inputs, outputs in signatures:
            self._position = position
            if not 0 <= index < len(named):
                raise self._wrong(f"signature {key}: subgraph #{index} does not exist")
            given, made = (
                {name: self._lookup(named[index], value) for name, value in arguments.items()}
                for arguments in (inputs, outputs)
            )
            self._model.signatures.append(Signature(key, self._model.subgraphs[index], given, made))
        return self._model

    def _signature(self) -> tuple[str, int, int, dict[str, str], dict[str, str]]:
        key = self._word()
        position = self._position
        self._expect("=")
        self._expect("#")
        index = self._integer()
        inputs = self._arguments()
        self._expect("->")
        return key, position, index, inputs, self._arguments()

    def _arguments(self) -> dict[str, str]:
        self._expect("(")
        return dict(self._until(")", self._named_tensor))

    def _named_tensor(self) -> tuple[str, str]:
        name = self._word()
        self._expect("=")
        return name, self._tensor_name()

    # Subgraphs

    def _subgraph(self) -> dict[str, Tensor]:
        graph = Subgraph(self._word())
        tensors: dict[str, Tensor] = {}
        self._model.subgraphs.append(graph)
        self._expect("(")
        graph.inputs = self._until(")", lambda: self._define(tensors, graph))
        self._expect("{")
        while self._peek() in ("variable", "unset"):
            kept = self._next() == "variable"
            self._define(tensors, graph).is_variable = kept
        while not self._take("return"):
            self._operator(graph, tensors)
        graph.outputs = self._until("}", lambda: self._lookup(tensors, self._tensor_name()))
        return tensors

    def _tensor_name(self) -> str:
        if self._kind() != "tensor":
            raise self._fail("a tensor (%name)")
        name = self._next()[1:]
        return self._unquoted(name) if name.startswith('"') else name

    def _lookup(self, tensors: dict[str, Tensor], name: str) -> Tensor:
        if name not in tensors:
            raise self._wrong(f"%{name} is read before it is defined")
        return tensors[name]

    def _define(self, tensors: dict[str, Tensor], graph: Subgraph, known: Collection[str] = ()) -> Tensor:
        name = self._tensor_name()
        if name in tensors or name in known:
            raise self._wrong(f"%{name} is already defined")
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
        sizes = self._until("]", lambda: -1 if self._take("?") else self._integer())
        shape = tuple(max(size, 1) if size == -1 else size for size in sizes)
        return shape, tuple(sizes) if -1 in sizes else None

    def _parameters(self) -> Quantization | None:
        if not self._take("q"):
            return None
        self._expect("(")
        scales, points, axis = self._numbers(), self._numbers(), 0
        if self._take("axis"):
            axis = self._integer()
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
        values = self._until("]", self._number) if self._take("[") else [self._number()]
        self._take(",")
        return values

    # Operators

    def _operator(self, graph: Subgraph, tensors: dict[str, Tensor]) -> None:
        made: dict[str, Tensor] = {}
        outputs: list[Tensor] = []
        while self._kind() == "tensor":
            outputs.append(self._define(made, graph, tensors))
            if not self._take(","):
                self._expect("=")
                break
        name = self._peek()
        if name not in BUILTIN_OPERATORS:
            raise self._fail("an operator" if outputs else "a tensor (%name) or an operator")
        self._position += 1
        custom = self._string() if name == "CUSTOM" else None
        self._expect("(")
        inputs = self._until(")", lambda: self._argument(graph, tensors))
        tensors.update(made)
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
        if dtype.numpy is None:
            raise self._wrong(f"constants of type {dtype.name.lower()} cannot be written as text")
        if self._peek() == "[":
            shape, _ = self._shape()
        scalar = self._take("(")
        if not scalar:
            self._expect("{")
        splat = self._take("splat")
        values = self._until(")" if scalar else "}", lambda: self._value(dtype))
        array = self._array(values, dtype.numpy, () if scalar else shape, splat=splat)
        buffer = Buffer(Data(array.tobytes()))
        self._model.buffers.append(buffer)
        name = f"const_{len(graph.tensors)}"
        sizes = tuple(int(size) for size in array.shape)
        return Tensor(name, sizes, dtype, buffer=buffer, quantization=self._parameters())

    def _array(
        self, values: list[Any], dtype: np.dtype[np.generic], shape: tuple[int, ...] | None, *, splat: bool
    ) -> NDArray[np.generic]:
        limits = np.iinfo(dtype.name) if dtype.kind in "iu" else None
        for value in values:
            if limits is not None and not limits.min <= value <= limits.max:
                raise self._wrong(f"{value} does not fit {dtype.name}")
        with np.errstate(over="ignore"):
            array = np.array(values, dtype)
        for value, stored in zip(values, array, strict=True):
            if dtype.kind == "f" and math.isinf(stored) and not math.isinf(value):
                raise self._wrong(f"{value:g} does not fit {dtype.name}")
        wanted = (len(values),) if shape is None else shape
        if splat and len(values) == 1:
            return np.full(wanted, array[0], dtype)
        if splat or len(values) != int(np.prod(wanted)):
            needed = 1 if splat else int(np.prod(wanted))
            raise self._wrong(f"the constant needs {needed} numbers, found {len(values)}")
        return array.reshape(wanted)

    def _value(self, dtype: DType) -> float | int | bool:
        if self._peek() in ("true", "false"):
            return self._next() == "true"
        return float(self._number()) if dtype.is_float else self._integer()

    def _options_of(self, operator: str) -> Table | None:
        name = KINDS[operator].options if operator != "CUSTOM" else None
        table = None if name is None else new_table(name)
        if self._take("{"):
            self._until("}", lambda: self._option(operator, table))
        return table

    def _option(self, operator: str, table: Table | None) -> None:
        field = self._word()
        if table is None or field not in table.spec.by_name:
            raise self._wrong(f"{operator} has no option '{field}'")
        self._expect(":")
        kind = table.spec.by_name[field].kind
        value = self._option_value()
        if isinstance(value, dict):  # attributes of a composite
            value = list(flexbuffers.Dumps(value))
        if isinstance(value, list) != (kind == "scalars"):
            raise self._wrong(f"option '{field}' needs {'a list' if kind == 'scalars' else 'one value'}")
        try:
            made = new_table(table.spec.name, **{field: value})
        except (OverflowError, TypeError, ValueError) as error:
            raise self._wrong(f"option '{field}': {error}") from None
        table.fields[field] = made.fields[field]

    def _attribute(self) -> tuple[str, Any]:
        name = self._word()
        self._expect(":")
        return name, self._option_value()

    def _option_value(self) -> Any:
        if self._take("["):
            return self._until("]", self._option_value)
        if self._take("{"):
            return dict(self._until("}", self._attribute))
        if self._kind() in ("string", "quoted"):
            return self._string()
        if self._peek() in ("true", "false"):
            return self._next() == "true"
        number = self._number()
        return int(number) if _INTEGER.match(number) else float(number)
