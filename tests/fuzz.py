"""Mutants of small models, by number, and what the library must make of each: accept it, or refuse it with one error.

Structured mutants change fields of the parsed tables and write them again; raw ones change bytes. Mutant `number` of
the same seeds is always the same, so a finding can be made again from its number alone.
"""

import random
import re
import signal
import struct
import tempfile
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_seeds import Seed

import edge_opt
from edge_opt.attention.find import find_blocks
from edge_opt.base.errors import EdgeOptError, ModelFormatError, UsageError
from edge_opt.conversion import ConversionResult, convert
from edge_opt.ir import from_tables, load, to_bytes
from edge_opt.ir.opening import Opened
from edge_opt.ir.walk import walked
from edge_opt.schema import Data, Table, model_bytes, new_table, read_model
from edge_opt.schema.litertlm import MAGIC
from edge_opt.schema.table import ENUMS, NUMPY_TYPES, UNIONS, FieldSpec

SECONDS = 1.0
"""Processor time that a mutant may take."""
STRUCTURED = 0.4

_COPIED_ONE_IN = 16
_BUNDLE_HEADER = 700
_EDGES = (
    0,
    1,
    2,
    3,
    4,
    7,
    8,
    16,
    31,
    64,
    127,
    128,
    255,
    256,
    1000,
    32767,
    32768,
    65535,
    65536,
    1 << 24,
)
_BIG = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**63 - 1, 2**64 - 1)
INTEGERS = (*_EDGES, *(-edge for edge in _EDGES), *_BIG, -(2**31), -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 3e38, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "a", "x" * 5000, "ünïcödé", "a\0b", "\n", "'", '"', "serving_default", "9" * 5000)
_PLACE = re.compile(r"subgraph|signature|metadata|not a TFLite model|instead of|has more than")

Random = random.Random
Tables = dict[str, list[Table]]


class WrongError(Exception):
    """The library broke its promise: the text says which."""


class TooSlowError(Exception):
    """A mutant took longer than `SECONDS` of processor time."""


def mutant(
    seeds: Sequence[Seed], number: int, run: int = 0, share: float = STRUCTURED
) -> tuple[str, bytes]:
    """The name of the seed that mutant `number` of a run is made of, and its bytes; small seeds have more mutants.

    `share` is that of those whose tables are changed; of the others, bytes are.
    """
    chance = Random(f"{run}/{number}")
    sizes = [len(seed.content) if seed.root else 4 * _BUNDLE_HEADER for seed in seeds]
    (chosen,) = chance.choices(seeds, [(1000 + size) ** -3 for size in sizes])
    content = chosen.content
    if chosen.root is not None and chance.random() < share:
        content = _structured(chosen.root, content, chance)
    if content is chosen.content or chance.random() < 0.1:
        content = _raw(content, seeds, chance)
    return chosen.name, content


def examine(content: bytes, converted_one_in: int = 1) -> str:
    """Take a mutant the whole way, file to file, without running it; says how far it got.

    Of those that match without trouble only one in `converted_one_in` is converted, written and read again: that
    takes longest.

    Raises:
        WrongError: a promise is broken. Any other exception breaks one, too, and so does a warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if content.startswith(MAGIC):
            return _examine_bundle(content)
        return _examine(content, zlib.crc32(content), converted_one_in)


def _examine_bundle(content: bytes) -> str:
    """Bundles are read from files only."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.litertlm", Path(folder) / "out.litertlm"
        source.write_bytes(content)
        try:
            opened = Opened(source)
            assert all(part.model for part in opened.parts)
            opened.main()
        except (ModelFormatError, UsageError) as error:
            if not str(error).startswith(str(source)):
                _check_sentence(error)
            return "refused by the reader"
        result = _converted(source, target)
        written = Opened(target)
        assert written.main().model
        if len(written.parts) != len(opened.parts):
            raise WrongError("another number of models was written than read")
        return "a bundle converted" if result.converted else "a bundle accepted"


def _examine(content: bytes, checksum: int, converted_one_in: int) -> str:
    refused = "refused by the reader"
    try:
        root = read_model(content)
        refused = "refused as a graph"
        model = from_tables(root)
    except ModelFormatError as error:
        _check_sentence(error)
        return refused
    if checksum % _COPIED_ONE_IN == 0:
        again = model_bytes(root)
        if model_bytes(read_model(again)) != again:
            raise WrongError("what was read and written does not read and write the same")
    before = edge_opt.infer_shapes(model)
    for graph in model.subgraphs:
        for match in find_blocks(graph):
            str(match)
    if checksum // _COPIED_ONE_IN % converted_one_in:
        return "matched, not converted"
    sizes = {
        f"{signature}/{name}": [
            3 if size < 0 else size for size in tensor.shape_signature or tensor.shape
        ]
        for signature, inputs in model.inputs()
        for name, tensor in inputs.items()
        if tensor.is_dynamic
    }
    if sizes:
        with suppress(UsageError):
            _converted(model, dry_run=True, shapes=sizes)
    result = _converted(model, dry_run=True)
    after = edge_opt.infer_shapes(load(to_bytes(model)))
    if after and not before:
        raise WrongError(f"shapes disagree that agreed: {after[:3]}")
    return "converted" if result.converted else "accepted"


def _converted(source: Any, output: Any = None, **options: Any) -> ConversionResult:
    result = convert(source, output, verify="none", **options)
    for site in result.sites:
        if site.is_bug:
            raise WrongError(site.reason)
    return result


def _check_sentence(error: EdgeOptError) -> None:
    if getattr(error, "table", None) is None and not _PLACE.search(str(error)):
        raise WrongError(f"the error names no place: {error}")


@contextmanager
def time_limit(seconds: float = SECONDS) -> Iterator[None]:
    """Raise `TooSlowError` in the block when it has used that much processor time."""

    def stop(*_: object) -> None:
        raise TooSlowError(f"over {seconds} s")

    old = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, old)


def _structured(root: Table, content: bytes, chance: Random) -> bytes:
    """Change fields in place, write the file, and change them back; `content` where the format cannot say it."""
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    tables: Tables = {}
    for table in walked([root], _tables_in):
        tables.setdefault(table.name, []).append(table)
    try:
        for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
            table = chance.choice(tables[chance.choice(sorted(tables))])
            undo.append((table.fields, dict(table.fields)))
            _change(table, tables, chance)
        return model_bytes(root)
    except (ModelFormatError, OverflowError):
        return content
    finally:
        for fields, kept in reversed(undo):
            fields.clear()
            fields.update(kept)


def _tables_in(table: Table) -> list[Table]:
    values = table.fields.values()
    known = [one for value in values for one in (value if isinstance(value, list) else [value])]
    return [one for one in known if isinstance(one, Table)]


def _change(table: Table, tables: Tables, chance: Random) -> None:
    """Give a field another value, often one that another table has."""
    present = [field for field in table.spec.fields if field.name in table.fields]
    fields = present if present and chance.random() < 0.85 else list(table.spec.fields)
    if not fields:
        return
    field = chance.choice(fields)
    old, how = table.fields.get(field.name), chance.random()
    others = [one.fields[field.name] for one in tables[table.name] if field.name in one.fields]
    if old is not None and how < 0.08:
        new = None
    elif others and how < 0.25 and field.kind != "union":
        new = chance.choice(others)
    elif isinstance(old, Data) or (field.table == "Buffer" and field.kind == "scalars"):
        content = b"" if old is None else bytes(old.view()[:4096])
        number = struct.pack("<I", chance.choice(INTEGERS) % (1 << 32))
        longer = content + bytes(chance.choice((1, 3, 4, 64)))
        shorter = content[: chance.randrange(len(content) + 1)]
        contents = (
            shorter,
            longer,
            number * max(1, len(content) // 4),
            chance.randbytes(len(content)),
        )
        new = Data(chance.choice(contents), external=chance.choice((None, True, False)))
    elif field.kind == "scalars":
        values = _other_list([] if old is None else old.tolist(), field, tables, chance)
        new = np.array(values, NUMPY_TYPES[field.element])
    elif field.kind == "tables":
        new = _other_list(list(old or []), field, tables, chance)
    else:
        new = _made(field, tables, chance)
    table.set(field.name, new)


def _other_list(values: list[Any], field: FieldSpec, tables: Tables, chance: Random) -> list[Any]:
    place, how = chance.randrange(len(values) + 1), chance.randrange(7)
    if how <= 3:  # one instead of another, or between two
        values[place : place + (how < 3)] = [_made(field, tables, chance)]
        return values
    if how == 4:
        return values[:place]
    if how == 5:
        return values[place:] + values[:place]
    return values * chance.choice((0, 2, 3, 40, 1000 // (1 + len(values))))


def _made(field: FieldSpec, tables: Tables, chance: Random) -> Any:
    """A value, or an element of the value, of a field."""
    if field.kind == "string":
        return chance.choice(_TEXTS)
    if field.kind in ("table", "tables", "union"):
        name = field.element
        if field.kind == "union":
            members = list(UNIONS[name].values())
            known = [member for member in members if member in tables]
            name = chance.choice(known if known and chance.random() < 0.5 else members)
        return chance.choice([*tables.get(name, [])[:200], new_table(name)])
    if field.element == "bool":
        return chance.random() < 0.5
    if field.element.startswith("float"):
        return chance.choice(_FLOATS)
    codes = [*INTEGERS, *range(-1, 9), *range(9)]
    if (field.table, field.name) == ("Tensor", "type"):
        codes = list(ENUMS["TensorType"].values())
    elif field.table == "OperatorCode" and field.name.endswith("builtin_code"):
        codes = list(ENUMS["BuiltinOperator"].values())
    limits = np.iinfo(NUMPY_TYPES[field.element])
    return int(np.clip(chance.choice(codes), int(limits.min), int(limits.max)))


def _raw(content: bytes, seeds: Sequence[Seed], chance: Random) -> bytes:
    """Other numbers, of a byte or of the widths that the format has, and pieces of other files put in or cut out."""
    last = len(content)
    if content.startswith(MAGIC) and chance.random() < 0.8:
        last = _BUNDLE_HEADER  # the rest is in some model's mutants too
    changed = bytearray(content[:last])
    for _ in range(chance.choice((1, 1, 1, 2, 2, 4, 16))):
        code, width = chance.choice(
            (("<B", 1), ("<B", 1), ("<H", 2), ("<I", 4), ("<I", 4), ("<Q", 8))
        )
        at = chance.randrange(max(1, len(changed) - width)) & -width
        (old,) = struct.unpack_from(code, changed, at)
        near = (
            old ^ 1 << chance.randrange(8 * width),
            old + 4,
            old - 4,
            old * 2,
            len(changed) - at,
        )
        chosen = chance.choice((*near, chance.choice(INTEGERS)))
        struct.pack_into(code, changed, at, chosen % (1 << 8 * width))
    if chance.random() < 0.2:
        other = chance.choice(seeds).content
        start, at = chance.randrange(len(other)), chance.randrange(len(changed) + 1)
        piece = other[start : start + chance.choice((0, 0, 4, 16, 256, 4096))]
        changed[at : at + chance.choice((0, 1, 4, 64, len(piece), len(changed)))] = piece
    return bytes(changed) + content[last:]
