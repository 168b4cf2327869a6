"""Reads the text form, which `edge_opt.ir.text` documents, into a model.

The text is untrusted: all memory is bounded by its length and by `MOST_BYTES`, and every error names the line. A text
of graphs alone gets what is usual: operator versions for the operands' types, tensors and constants in the order of the
text, constants named by number. With a `file` line, the model is read from that, if its checksum tells that neither the
graphs nor the line changed.
"""

import base64
import json
import math
import re
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import ModelFormatError
from edge_opt.ir.checks import check_model
from edge_opt.ir.dtypes import DType, Quantization
from edge_opt.ir.graph import Buffer, Operator, OperatorCode, Signature, Subgraph, Tensor
from edge_opt.ir.model import Model, from_tables, usual_version
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS
from edge_opt.schema.data import Data
from edge_opt.schema.flexbuffers import write_flexbuffer
from edge_opt.schema.reader import read_model
from edge_opt.schema.table import NUMPY_TYPES, FieldSpec, Table, new_table, vector

MOST_BYTES = 1 << 30
"""Constants that a text does not list, `{seed N}` and `{splat N}`, may take this many bytes."""
_PIECE = 1 << 16
_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
# An unclosed quote takes the rest of its line, so that no text is searched twice.
_TOKEN = re.compile(
    rf"""(?P<space>(?:\s+|\#(?![0-9])[^\n]*)+)|(?P<tensor>%(?:{_STRING}|[A-Za-z0-9_./]+))"""
    r"""|(?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf\b|nan\b))"""
    rf"""|(?P<name>'[^'\n]*'|{_STRING}|[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>->|\.\.\.|"[^\n]*|.)|(?P<end>\Z)"""
)
_FILE = re.compile(r"^file ([0-9a-f]+) '([A-Za-z0-9+/=]*)'\s*\Z", re.MULTILINE)
# Raised for values that do not fit, here and by numpy.
_MISFIT = (ArithmeticError, LookupError, TypeError, ValueError)

_Item = TypeVar("_Item")
Named = dict[str, Tensor]


class _Signature(NamedTuple):
    """A signature as text: its subgraph's index, and tensors' printed names by arguments' names."""

    key: str
    subgraph: int
    inputs: dict[str, str]
    outputs: dict[str, str]


class TextFormError(ModelFormatError):
    """The text is not a model; the message names the line."""


def parse(text: str) -> Model:
    """The model that a text describes.

    Raises:
        TextFormError: the text is not a model, it leaves out the numbers of a constant, or all take more than 1 GiB.
    """
    file = _FILE.search(text)
    if file is not None:
        return _from_file(text[: file.start()], *file.groups())
    reading = _Reading(text)
    try:
        with np.errstate(over="raise"):
            return reading.whole()
    except _MISFIT as error:
        reason = error.args[0] if error.args else type(error).__name__
        raise TextFormError(f"{reading.place()}: {reason}") from error
    except ModelFormatError as error:
        raise TextFormError(f"{reading.place()}: the model is invalid: {error}") from error


def checksum(graphs: str, content: str) -> str:
    """A checksum of the text of graphs and of the file in base64; spaces and comments do not count."""
    found = _TOKEN.finditer(graphs)
    words = "\n".join(one[0] for one in found if one.lastgroup != "space")
    text = f"{words}\n{content}"
    return sha256(text.encode(errors="surrogatepass")).hexdigest()[:16]


def _from_file(graphs: str, expected: str, content: str) -> Model:
    """The model that a `file` line has, if it and the graphs before it have this checksum."""
    line = 1 + graphs.count("\n")
    if checksum(graphs, content) != expected:
        raise TextFormError(
            f"line {line}: the graphs or the `file` line were edited: delete the line to read the graphs alone"
        )
    try:
        return from_tables(read_model(base64.b64decode(content, validate=True)))
    except (ValueError, ModelFormatError) as error:
        raise TextFormError(f"line {line}: the `file` line is damaged: {error}") from error


def random_numbers(seed: int, dtype: DType, count: int) -> NDArray[np.generic]:
    """`count` numbers that are the same on every machine, `dtype`[count]: those of the literal `{seed N}`.

    They come from raw 64-bit words of PCG64. A float is the top 24 bits of one, in steps of 2^-23 from -1 to 1,
    rounded to the type; a boolean is the lowest bit; an integer type takes the words' bytes, lowest first.
    """
    stored = _stored(dtype)
    generator = np.random.PCG64(seed)
    numbers = np.empty(count, stored)
    for begin in range(0, count, _PIECE):
        piece = numbers[begin : begin + _PIECE]
        needed = len(piece) if stored.kind in "fb" else -(-piece.nbytes // 8)
        words = np.asarray(generator.random_raw(needed), "<u8").reshape(needed)
        if stored.kind == "f":
            piece[:] = (words >> np.uint64(40)) * 2.0**-23 - 1
        elif stored.kind == "b":
            piece[:] = words & np.uint64(1)
        else:
            piece[:] = words.view(stored)[: len(piece)]
    return numbers


class _Reading:
    """A text of graphs as it is read; `_tensors` has those of `_graph` by printed name, `_names` those of each."""

    def __init__(self, text: str) -> None:
        self._model = Model()
        self._graph = Subgraph()
        self._tensors = Named()
        self._names: list[Named] = []
        self._text = text
        self._bytes = 0
        self._tokens = (one for one in _TOKEN.finditer(text) if one.lastgroup != "space")
        self._found = next(self._tokens)

    # Tokens

    def place(self) -> str:
        """The line that is being read, and what is there."""
        token = self._found[0]
        found = repr(token[:40]) if token else "the end"
        line = 1 + self._text.count("\n", 0, self._found.start())
        return f"line {line}, at {found}"

    def _sees(self, *wanted: str) -> bool:
        """True if the next token, or its kind, is one of these."""
        return self._found[0] in wanted or self._found.lastgroup in wanted

    def _next(self, *wanted: str) -> str:
        if not self._sees(*wanted):
            raise ValueError(f"expected {' or '.join(wanted)}")
        token = self._found[0]
        # Nothing reads beyond the end.
        self._found = next(self._tokens)
        return token

    def _takes(self, token: str) -> bool:
        is_next = self._found[0] == token
        if is_next:
            self._next(token)
        return is_next

    def _until(self, end: str, read: Callable[[], _Item]) -> list[_Item]:
        """Items that `read` reads, separated by commas, up to the token `end`, which is taken, too."""
        found: list[_Item] = []
        while not self._takes(end):
            found.append(read())
            self._takes(",")
        return found

    def _mapping(self, end: str, read: Callable[[], tuple[str, _Item]]) -> dict[str, _Item]:
        """Items with names, like `_until`; ValueError if a name comes twice."""
        found: dict[str, _Item] = {}
        for name, value in self._until(end, read):
            if name in found:
                raise ValueError(f"{name} is given twice")
            found[name] = value
        return found

    def _name(self) -> str:
        """A plain word, or a text in single quotes, or in double quotes as in JSON."""
        text = self._next("name")
        return str(json.loads(text)) if text.startswith('"') else text.strip("'")

    def _number(self, dtype: DType | None = None) -> Any:
        """A number of that type; without one, an integer where it looks like one."""
        text = self._next("number", "true", "false")
        if text in ("true", "false"):
            return text == "true"
        is_float = not text.lstrip("-").isdigit() if dtype is None else dtype.is_float
        return float(text) if is_float else int(text)

    def _integer(self) -> int:
        return int(self._number(DType.INT64))

    def _value(self) -> Any:
        """A number, a text, or `[...]` of these."""
        return self._until("]", self._scalar) if self._takes("[") else self._scalar()

    def _scalar(self) -> Any:
        return self._number() if self._sees("number", "true", "false") else self._name()

    def _entry(self) -> tuple[str, Any]:
        name = self._name()
        self._next(":")
        return name, self._value()

    # Graphs

    def whole(self) -> Model:
        """The model with the signatures and subgraphs of the whole text."""
        signatures: list[_Signature] = []
        while self._sees("signature", "subgraph"):
            if self._takes("signature"):
                signatures.append(self._signature())
            else:
                self._next("subgraph")
                self._subgraph()
        if self._takes("file"):
            remedy = 'print it with constants="full", or delete this line to read the graphs alone'
            raise ValueError(f"the graphs do not give the whole file: {remedy}")
        if self._found[0]:
            raise ValueError("expected signature or subgraph")
        for one in signatures:
            if one.subgraph >= len(self._names):
                raise ValueError(f"signature {one.key!r}: there is no subgraph #{one.subgraph}")
            graph = self._model.subgraphs[one.subgraph]
            tensors = self._names[one.subgraph]
            inputs = {name: _known(tensors, value) for name, value in one.inputs.items()}
            outputs = {name: _known(tensors, value) for name, value in one.outputs.items()}
            self._model.signatures.append(Signature(one.key, graph, inputs, outputs))
        codes = dict.fromkeys(operator.code for operator in self._model.operators())
        self._model.operator_codes = list(codes)
        check_model(self._model.subgraphs, self._model.signatures)
        return self._model

    def _signature(self) -> _Signature:
        key = self._name()
        self._next("=")
        self._next("#")
        index = self._integer()
        inputs = self._arguments()
        self._next("->")
        return _Signature(key, index, inputs, self._arguments())

    def _arguments(self) -> dict[str, str]:
        self._next("(")
        return self._mapping(")", self._named_tensor)

    def _named_tensor(self) -> tuple[str, str]:
        name = self._name()
        self._next("=")
        return name, self._tensor()

    def _subgraph(self) -> None:
        graph = self._graph = Subgraph(self._name())
        self._tensors = Named()
        self._model.subgraphs.append(graph)
        self._names.append(self._tensors)
        self._next("(")
        graph.inputs = self._until(")", self._define)
        self._next("{")
        while self._sees("variable", "unset", "constant"):
            self._without_producer()
        while not self._takes("return"):
            self._operator()
        graph.outputs = self._until("}", self._known)

    def _without_producer(self) -> None:
        """A tensor that no operator defines."""
        kind = self._next("name")
        if kind != "constant":
            self._define().is_variable = kind == "variable"
            return
        name = self._new_name()
        self._next("=")
        self._tensors[name] = self._constant(name)

    def _tensor(self) -> str:
        name = self._next("tensor")[1:]
        return str(json.loads(name)) if name.startswith('"') else name

    def _known(self) -> Tensor:
        return _known(self._tensors, self._tensor())

    def _new_name(self) -> str:
        name = self._tensor()
        if name in self._tensors:
            raise ValueError(f"%{name} is defined twice")
        return name

    def _define(self) -> Tensor:
        name = self._new_name()
        self._next(":")
        dtype = self._dtype()
        shape, signature = self._shape()
        made = Tensor(
            name, shape, dtype, quantization=self._parameters(), shape_signature=signature
        )
        self._tensors[name] = self._graph.add_tensor(made)
        return made

    def _dtype(self) -> DType:
        name = self._next("name")
        if name.upper() not in DType.__members__:
            raise ValueError(f"{name} is not a type")
        return DType[name.upper()]

    def _shape(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        """`[1,?,4]`: the shape `(1, 1, 4)`, and the shape signature `(1, -1, 4)` if a size is open."""
        self._next("[")
        sizes = tuple(self._until("]", lambda: -1 if self._takes("?") else self._integer()))
        shape = tuple(1 if size == -1 else size for size in sizes)
        return shape, sizes if -1 in sizes else None

    def _parameters(self) -> Quantization | None:
        """`q(0.001, 0)`, `q([0.1, 0.2], [0, 0], axis 0)`, or nothing."""
        if not self._takes("q"):
            return None
        self._next("(")
        fields: dict[str, Any] = {"scale": self._numbers(DType.FLOAT32)}
        if self._takes("scales"):
            raise ValueError("the scales are not in the text, only their number")
        if self._takes(",") and not self._sees("axis"):
            fields["zero_point"] = self._numbers(DType.INT64)
            self._takes(",")
        if self._takes("axis"):
            fields["quantized_dimension"] = self._integer()
        self._next(")")
        return Quantization(new_table("QuantizationParameters", **fields))

    def _numbers(self, dtype: DType) -> list[Any]:
        if not self._takes("["):
            return [self._number(dtype)]
        return self._until("]", lambda: self._number(dtype))

    def _operator(self) -> None:
        """`%y: float32[4], %z: float32[4] = SPLIT(int32(0), %x) {num_splits: 2}`."""
        outputs: list[Tensor] = []
        while self._sees("tensor"):
            outputs.append(self._define())
            if not self._takes(","):
                self._next("=")
                break
        name = self._next("name")
        if name not in BUILTIN_OPERATORS:
            raise ValueError(f"{name} is not an operator")
        custom = self._name() if name == "CUSTOM" else None
        self._next("(")
        inputs = self._until(")", lambda: self._argument(outputs))
        code = OperatorCode(BUILTIN_OPERATORS[name], usual_version(name, inputs, outputs), custom)
        kind = KINDS[name].options
        options = None if kind is None or name == "CUSTOM" else new_table(kind)
        if self._takes("{"):
            self._until("}", lambda: self._option(options))
        self._graph.append(Operator(code, inputs, outputs, options))

    def _argument(self, results: Sequence[Tensor]) -> Tensor | None:
        """An operand; it cannot be one of the operator's own results."""
        if self._sees("tensor"):
            tensor = self._known()
            if tensor in results:
                raise ValueError(f"%{tensor.name} is not defined")
            return tensor
        return None if self._takes("none") else self._constant()

    def _option(self, options: Table | None) -> None:
        name = self._name()
        self._next(":")
        field = None if options is None else options.spec.by_name.get(name)
        if options is None or field is None:
            raise ValueError(f"{name} is not an option")
        if name in options.fields:
            raise ValueError(f"{name} is given twice")
        if name == "composite_attributes" and self._takes("{"):
            options.set(name, list(write_flexbuffer(self._mapping("}", self._entry))))
            return
        value = self._value()
        if name == "composite_attributes" and isinstance(value, str):
            raise ValueError(f"the attributes are not in the text, only {value}")
        options.set(name, _option_value(field, value))

    def _constant(self, name: str = "") -> Tensor:
        """`int32(2)`, `int32{0, 2, 1, 3}`, or another form, with a shape in front of the numbers."""
        dtype = self._dtype()
        shape = self._shape()[0] if self._sees("[") else None
        usual = f"const_{len(self._graph.tensors)}"
        end = "}"
        if self._takes("("):
            shape = ()
            end = ")"
        else:
            self._next("{")
        if self._takes("seed"):
            seed = self._integer()
            usual = f"seed_{seed}"
            array = random_numbers(seed, dtype, self._count(dtype, shape))
        elif self._takes("splat"):
            count = self._count(dtype, shape)
            array = np.array([self._number(dtype)], _stored(dtype)).repeat(count)
        elif self._takes("..."):
            title = f"{dtype}{list(shape or ())}"
            remedy = 'print it with constants="full", or write {seed 1}'
            raise ValueError(f"the numbers of constant {title} are not in the text: {remedy}")
        else:
            numbers: list[float] = []
            while not self._sees(end):
                numbers.append(self._number(dtype))
                self._takes(",")
            array = np.array(numbers, _stored(dtype))
        if shape is None:  # a vector; `_count` refuses the other forms without a shape
            shape = array.shape
        if array.size != math.prod(shape):
            raise ValueError(f"{array.size} numbers for {math.prod(shape)} elements")
        self._next(end)  # errors in the numbers name their line, not the next one
        buffer = Buffer(Data(array.tobytes()))
        made = Tensor(name or usual, shape, dtype, quantization=self._parameters(), buffer=buffer)
        self._model.buffers.append(buffer)
        return self._graph.add_tensor(made)

    def _count(self, dtype: DType, shape: tuple[int, ...] | None) -> int:
        """The number of elements of a constant that the text does not list."""
        if shape is None or any(size < 0 for size in shape):
            raise ValueError("expected a shape in front of the numbers")
        count = math.prod(shape)
        self._bytes += count * _stored(dtype).itemsize
        if self._bytes > MOST_BYTES:
            raise ValueError(f"constants take {self._bytes} bytes, at most {MOST_BYTES} are read")
        return count


def _known(tensors: Named, name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"%{name} is not defined")
    return tensors[name]


def _stored(dtype: DType) -> np.dtype[Any]:
    """The numpy type of numbers in a text; ValueError if there is none."""
    stored = dtype.numpy
    if stored is None or stored.kind == "c":
        raise ValueError(f"numbers of {dtype} cannot be written")
    return stored


def _option_value(field: FieldSpec, value: Any) -> Any:
    """An option's value as its table has it; ValueError or OverflowError if it does not fit."""
    if field.kind == "string" and isinstance(value, str):
        return value
    given = np.array(value)
    rank = {"scalar": 0, "scalars": 1}.get(field.kind)
    if given.ndim == rank and (not given.size or given.dtype.kind in _kinds(field.element)):
        numbers = vector(field.element, value)
        return numbers if rank else numbers.item()
    raise ValueError(f"{field.name} is {field.type}, which this value does not fit")


def _kinds(element: str) -> str:
    """Numpy's kinds of the numbers that fit a type: integers also fit floats."""
    kind = NUMPY_TYPES[element].kind
    return {"b": "b", "f": "iuf"}.get(kind, "iu")
