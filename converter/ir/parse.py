"""Reads the text form, which `edge_opt.ir.text` documents, into a model.

The text is untrusted: all memory is bounded by its length and by `MOST_BYTES`, and every error names the line. A text
of graphs alone gets what is usual: operator versions for the operands' types, tensors and constants in the order of the
text, constants named by number. A `file` section gives everything else, as fields of the schema's tables.
"""

import base64
import json
import math
import re
from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import ModelFormatError
from edge_opt.base.words import shortened
from edge_opt.ir.checks import check_model
from edge_opt.ir.dtypes import DType, Quantization
from edge_opt.ir.fields import (
    MOST_BYTES,
    NewTable,
    Omitted,
    Shared,
    Target,
    field_of,
    lay_out_text,
    place_buffers,
    place_codes,
    place_tensors,
)
from edge_opt.ir.graph import Buffer, Operator, OperatorCode, Signature, Subgraph, Tensor
from edge_opt.ir.model import Model, from_tables, to_tables, usual_version
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS
from edge_opt.schema.data import Data
from edge_opt.schema.flexbuffers import write_flexbuffer
from edge_opt.schema.reader import MAX_OBJECTS
from edge_opt.schema.table import Table, new_table

_DEEPEST: Final = 8  # nested values
_PIECE: Final = 1 << 16
_NO_SHAPE: Final = "expected a shape in front of the numbers"
_STRING = r'"[^"\\\n]*(?:\\.[^"\\\n]*)*"'
_TOKEN = re.compile(
    rf"""(?P<space>(?:\s+|\#(?![0-9])[^\n]*)+)|(?P<tensor>%(?:{_STRING}|[A-Za-z0-9_./]+))"""
    r"""|(?P<number>-?(?:\d+\.?\d*(?:[eE][+-]?\d+)?|\.\d+|inf\b|nan\b))"""
    rf"""|(?P<name>'[^'\n]*'|{_STRING}|[A-Za-z_][A-Za-z0-9_]*)|(?P<sign>->|\.\.\.|.)|(?P<end>\Z)"""
)
# Raised for values that do not fit, here and by numpy.
_MISFIT: Final = (ArithmeticError, LookupError, TypeError, ValueError)

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
        TextFormError: the text is not a model, a constant has only a digest, or all constants take more than 1 GiB.
    """
    reading = Reading(text)
    try:
        with np.errstate(over="raise"):
            return reading.whole()
    except TextFormError:
        raise
    except _MISFIT as error:
        reason = error.args[0] if error.args else type(error).__name__
        raise TextFormError(f"{reading.place()}: {reason}") from error
    except ModelFormatError as error:
        raise TextFormError(f"{reading.place()}: the model is invalid: {error}") from error


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


class Reading:
    """A text as it is read: the `model` so far, and `names`, the tensors of each subgraph by their printed names."""

    def __init__(self, text: str) -> None:
        self.model = Model()
        self.names: list[Named] = []
        self._text = text
        self._bytes = 0
        self._depth = 0
        self._codes: set[OperatorCode] = set()
        self._at = 0
        self._end = 0
        self._kind = ""
        self._token = ""
        self._advance()

    # Tokens

    def _advance(self) -> None:
        kind = "space"
        while kind == "space":
            self._at = self._end
            found = _TOKEN.match(self._text, self._at)
            assert found is not None
            kind = str(found.lastgroup)
            self._end = found.end()
        self._kind = kind
        self._token = self._text[self._at : self._end]

    def place(self) -> str:
        """The line that is being read, and what is there."""
        found = repr(self._token[:40]) if self._token else "the end"
        return f"line {self._line()}, at {found}"

    def _line(self) -> int:
        return 1 + self._text.count("\n", 0, self._at)

    def _sees(self, *wanted: str) -> bool:
        """True if the next token, or its kind, is one of these."""
        return self._token in wanted or self._kind in wanted

    def _next(self, *wanted: str) -> str:
        if not self._sees(*wanted):
            raise ValueError(f"expected {' or '.join(wanted)}")
        token = self._token
        self._advance()
        return token

    def _takes(self, token: str) -> bool:
        if self._token != token:
            return False
        self._advance()
        return True

    def _until(self, end: str, read: Callable[[], _Item]) -> list[_Item]:
        """Items that `read` reads, separated by commas, up to the token `end`, which is taken, too."""
        found: list[_Item] = []
        while not self._takes(end):
            found.append(read())
            self._takes(",")
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
        number = self._number(DType.INT64)
        return int(number)

    def _value(self) -> Any:
        """A number, a text, `[...]` or `{name: ...}`."""
        self._depth += 1
        if self._depth > _DEEPEST:
            raise ValueError(f"values are nested over {_DEEPEST} deep")
        value = self._one_value()
        self._depth -= 1
        return value

    def _one_value(self) -> Any:
        if self._takes("base64"):
            return base64.b64decode(self._name(), validate=True)
        if self._takes("["):
            return self._until("]", self._value)
        if self._takes("{"):
            return dict(self._until("}", self._entry))
        return self._number() if self._sees("number", "true", "false") else self._name()

    def _entry(self) -> tuple[str, Any]:
        name = self._name()
        self._next(":")
        return name, self._value()

    # Graphs

    def whole(self) -> Model:
        """The model, including the `file` section.

        Raises:
            TextFormError: the numbers of a constant are not in the text.
        """
        self.graphs()
        root = self._file() if self._takes("file") else None
        if not self._sees("end"):
            raise ValueError("expected signature, subgraph or file")
        if root is None:
            check_model(self.model.subgraphs, self.model.signatures)
        else:
            self.model = from_tables(root)
        for tensor in self.model.tensors():
            _check_numbers(tensor)
        return self.model

    def graphs(self) -> None:
        """Read the signatures and subgraphs, up to the `file` section or the end."""
        signatures: list[_Signature] = []
        while self._sees("signature", "subgraph"):
            if self._takes("signature"):
                signatures.append(self._signature())
            else:
                self._next("subgraph")
                self._subgraph()
        for one in signatures:
            if one.subgraph >= len(self.names):
                raise ValueError(f"signature {one.key!r}: there is no subgraph #{one.subgraph}")
            graph = self.model.subgraphs[one.subgraph]
            tensors = self.names[one.subgraph]
            inputs = {name: _known(tensors, value) for name, value in one.inputs.items()}
            outputs = {name: _known(tensors, value) for name, value in one.outputs.items()}
            self.model.signatures.append(Signature(one.key, graph, inputs, outputs))

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
        return dict(self._until(")", self._named_tensor))

    def _named_tensor(self) -> tuple[str, str]:
        name = self._name()
        self._next("=")
        return name, self._tensor()

    def _subgraph(self) -> None:
        graph = Subgraph(self._name())
        tensors = Named()
        self.model.subgraphs.append(graph)
        self.names.append(tensors)
        self._next("(")
        graph.inputs = self._until(")", lambda: self._define(graph, tensors))
        self._next("{")
        while self._sees("variable", "unset", "constant"):
            self._alone(graph, tensors)
        while not self._takes("return"):
            self._operator(graph, tensors)
        graph.outputs = self._until("}", lambda: _known(tensors, self._tensor()))

    def _alone(self, graph: Subgraph, tensors: Named) -> None:
        """A tensor that no operator defines."""
        kind = self._next("name")
        if kind != "constant":
            tensor = self._define(graph, tensors)
            tensor.is_variable = kind == "variable"
            return
        name = self._new_name(tensors)
        self._next("=")
        tensors[name] = self._constant(graph, name)

    def _tensor(self) -> str:
        name = self._next("tensor")[1:]
        return str(json.loads(name)) if name.startswith('"') else name

    def _new_name(self, tensors: Named) -> str:
        name = self._tensor()
        if name in tensors:
            raise ValueError(f"%{name} is defined twice")
        return name

    def _define(self, graph: Subgraph, tensors: Named) -> Tensor:
        name = self._new_name(tensors)
        self._next(":")
        dtype = self._dtype()
        shape, signature = self._shape()
        made = Tensor(
            name, shape, dtype, quantization=self._parameters(), shape_signature=signature
        )
        tensors[name] = graph.add_tensor(made)
        return made

    def _dtype(self) -> DType:
        name = self._next("name")
        if name.upper() not in DType.__members__:
            raise ValueError(f"{name} is not a type")
        return DType[name.upper()]

    def _shape(self) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
        self._next("[")
        sizes = tuple(self._until("]", lambda: -1 if self._takes("?") else self._integer()))
        return tuple(1 if size == -1 else size for size in sizes), sizes if -1 in sizes else None

    def _parameters(self) -> Quantization | None:
        if not self._takes("q"):
            return None
        self._next("(")
        fields: dict[str, Any] = {}
        for name, dtype in (("scale", DType.FLOAT32), ("zero_point", DType.INT64)):
            fields[name] = self._numbers(dtype)
            if self._takes("scales"):
                fields = {}  # only their number: the `file` section has them
            if not self._takes(",") or not fields:
                break
        if self._takes("axis"):
            fields["quantized_dimension"] = self._integer()
        self._next(")")
        return Quantization(new_table("QuantizationParameters", **fields))

    def _numbers(self, dtype: DType) -> list[Any]:
        if not self._takes("["):
            return [self._number(dtype)]
        return self._until("]", lambda: self._number(dtype))

    def _operator(self, graph: Subgraph, tensors: Named) -> None:
        made = Named()
        while self._sees("tensor"):
            output = self._define(graph, made)
            if output.name in tensors:
                raise ValueError(f"%{output.name} is defined twice")
            if not self._takes(","):
                self._next("=")
                break
        name = self._next("name")
        if name not in BUILTIN_OPERATORS:
            raise ValueError(f"{name} is not an operator")
        custom = self._name() if name == "CUSTOM" else None
        self._next("(")
        inputs = self._until(")", lambda: self._argument(graph, tensors))
        outputs = list(made.values())
        tensors.update(made)
        code = OperatorCode(BUILTIN_OPERATORS[name], usual_version(name, inputs, outputs), custom)
        if code not in self._codes:
            self._codes.add(code)
            self.model.operator_codes.append(code)
        kind = KINDS[name]
        options = None if kind.options is None or name == "CUSTOM" else new_table(kind.options)
        if self._takes("{"):
            self._until("}", lambda: self._option(options))
        graph.append(Operator(code, inputs, outputs, options))

    def _argument(self, graph: Subgraph, tensors: Named) -> Tensor | None:
        if self._sees("tensor"):
            return _known(tensors, self._tensor())
        return None if self._takes("none") else self._constant(graph)

    def _option(self, options: Table | None) -> None:
        name, value = self._entry()
        field = None if options is None else options.spec.by_name.get(name)
        if options is None or field is None:
            raise ValueError(f"{name} is not an option")
        if name == "composite_attributes" and isinstance(value, str):
            return  # a text about bytes that are not attributes
        if name == "composite_attributes" and isinstance(value, dict):
            value = write_flexbuffer(value)
        Target(options, field).set(value)

    def _constant(self, graph: Subgraph, name: str = "") -> Tensor:
        dtype = self._dtype()
        shape = self._shape()[0] if self._sees("[") else None
        usual = f"const_{len(graph.tensors)}"
        if self._takes("("):
            shape = ()
            data = self._listed(dtype, shape)
            self._next(")")
        else:
            self._next("{")
            if self._takes("seed"):
                seed = self._integer()
                usual = f"seed_{seed}"
                data = Data(random_numbers(seed, dtype, self._count(dtype, shape)).tobytes())
            elif self._takes("splat"):
                count = self._count(dtype, shape)
                data = Data(_array(dtype, [self._number(dtype)]).tobytes() * count)
            elif self._takes("..."):
                data = Omitted(self._line(), dtype.byte_size(math.prod(shape or ())) or 0)
            else:
                data = self._listed(dtype, shape)
                shape = (data.length // _stored(dtype).itemsize,) if shape is None else shape
            self._next("}")
        if shape is None:
            raise ValueError(_NO_SHAPE)
        buffer = Buffer(data)
        made = Tensor(name or usual, shape, dtype, quantization=self._parameters(), buffer=buffer)
        self.model.buffers.append(buffer)
        return graph.add_tensor(made)

    def _count(self, dtype: DType, shape: tuple[int, ...] | None) -> int:
        """The number of elements of a constant that the text does not list."""
        if shape is None or any(size < 0 for size in shape):
            raise ValueError(_NO_SHAPE)
        count = math.prod(shape)
        self._spend(count * _stored(dtype).itemsize)
        return count

    def _spend(self, size: int) -> None:
        self._bytes += size
        if self._bytes > MOST_BYTES:
            raise ValueError(f"constants take {self._bytes} bytes, at most {MOST_BYTES} are read")

    def _listed(self, dtype: DType, shape: tuple[int, ...] | None) -> Data:
        """Numbers up to the closing bracket, which is not taken."""
        values: list[Any] = []
        while not self._sees(")", "}"):
            values.append(self._number(dtype))
            self._takes(",")
        array = _array(dtype, values)
        expected = array.size if shape is None else math.prod(shape)
        if array.size != expected:
            raise ValueError(f"{array.size} numbers for {expected} elements")
        self._spend(array.nbytes)
        return Data(array.tobytes())

    # The `file` section

    def _file(self) -> Table:
        """The tables of the whole file."""
        self._next("{")
        while self._takes("place"):
            self._place()
        root = to_tables(self.model)
        while not self._takes("}"):
            self._statement(root)
        lay_out_text(root)
        return root

    def _place(self) -> None:
        """`place subgraphs[0].tensors of 5: [0:3, 4]`."""
        kind = self._next("buffers", "operator_codes", "subgraphs")
        graph = None
        if kind == "subgraphs":
            (index,) = self._indices(len(self.model.subgraphs))
            graph = self.model.subgraphs[index]
            self._next(".")
            self._next("tensors")
        self._next("of")
        count = self._integer()
        if not 0 <= count <= MAX_OBJECTS:
            raise ValueError(f"{count} places, at most {MAX_OBJECTS} are read")
        self._next(":")
        places = self._indices(count, most=MAX_OBJECTS)
        if graph is not None:
            place_tensors(graph, places, count)
        elif kind == "buffers":
            place_buffers(self.model, places, count)
        else:
            place_codes(self.model, places, count)

    def _indices(self, count: int, most: int = 0) -> list[int]:
        """`[0, 4:6]`, each below `count`, `most` or `count` in all."""
        self._next("[")
        found: list[int] = []
        while not self._takes("]"):
            begin = self._integer()
            end = self._integer() if self._takes(":") else begin + 1
            if not 0 <= begin < end <= count:
                raise ValueError(f"[{begin}:{end}] is not within the {count} that there are")
            found.extend(range(begin, end))
            if len(found) > (most or count):
                raise ValueError(f"more than {most or count} places")
            self._takes(",")
        return found

    def _targets(self, root: Table) -> list[Target]:
        """The fields or list elements that a path names: `subgraphs[0].tensors[0:3].name`."""
        tables = [root]
        while True:
            name = self._next("name")
            targets = [Target(table, field_of(table, name)) for table in tables]
            if self._sees("["):
                items = [self._list(target) for target in targets]
                indices = self._indices(min(map(len, items)))
                targets = [
                    target._replace(element=index) for target in targets for index in indices
                ]
            if not self._takes("."):
                return targets
            tables = []
            for target in targets:
                table = target.get()
                if not isinstance(table, Table):
                    raise ValueError(f"{name} is not a table here")
                tables.append(table)

    def _list(self, target: Target) -> list[Table]:
        value = target.get()
        if not isinstance(value, list):
            raise ValueError(f"{target.field.name} is not a list of tables here")
        return value

    def _statement(self, root: Table) -> None:
        """`PATH: VALUE`, or `PATH: each [VALUE, ...]`."""
        targets = self._targets(root)
        self._next(":")
        if self._takes("each"):
            self._next("[")
            values = self._until("]", lambda: self._field_value(root))
        else:
            values = [self._field_value(root)] * len(targets)
        if len(values) != len(targets):
            raise ValueError(f"{len(values)} values for {len(targets)} fields")
        for target, value in zip(targets, values, strict=True):
            if not isinstance(value, Omitted):
                target.set(value)
            elif not isinstance(target.get(), Omitted):
                raise ValueError(
                    f"the bytes of {target.field.name} are not in the text, only a digest"
                )

    def _field_value(self, root: Table) -> Any:
        if self._takes("none"):
            return None
        if self._takes("same"):
            targets = self._targets(root)
            if len(targets) != 1:
                raise ValueError(f"expected one field, found {len(targets)}")
            return Shared(targets[0])
        if self._takes("digest"):
            self._next("(")
            self._name()
            self._next(",")
            self._integer()
            self._next(")")
            return Omitted(self._line())
        value = self._value()
        if isinstance(value, str) and self._takes("{"):  # a union's member
            self._next("}")
            return NewTable(value)
        if value == {}:
            return NewTable()
        if isinstance(value, list):
            return [NewTable() if one == {} else one for one in value]
        return value


def _known(tensors: Named, name: str) -> Tensor:
    if name not in tensors:
        raise ValueError(f"%{name} is not defined")
    return tensors[name]


def _stored(dtype: DType) -> np.dtype[Any]:
    """The numpy type of numbers in a text; ValueError if there is none."""
    stored = dtype.numpy
    if stored is None or dtype.is_complex:
        raise ValueError(
            f"numbers of {dtype} cannot be written: write {{...}} and give the buffer's bytes"
        )
    return stored


def _array(dtype: DType, values: list[Any]) -> NDArray[np.generic]:
    return np.array(values, _stored(dtype))


def _check_numbers(tensor: Tensor) -> None:
    data = tensor.data
    if isinstance(data, Omitted):
        title = f"'{shortened(tensor.name)}' ({tensor.dtype}{list(tensor.shape)})"
        remedy = 'print it with constants="full", or write {seed 1}'
        raise TextFormError(
            f"line {data.line}: the numbers of constant {title} are not in the text: {remedy}"
        )
