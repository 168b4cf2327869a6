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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_seeds import Seed

import edge_opt
from edge_opt.attention.find import find_blocks
from edge_opt.base.errors import EdgeOptError, ModelFormatError, UsageError
from edge_opt.conversion import ConversionResult, convert
from edge_opt.conversion.container import choose_parts
from edge_opt.ir import from_tables, load, to_bytes
from edge_opt.ir.opening import Opened
from edge_opt.schema import Data, Table, model_bytes, new_table, read_model
from edge_opt.schema.litertlm import MAGIC
from edge_opt.schema.table import ENUMS, NUMPY_TYPES, TABLES, UNIONS, FieldSpec

SECONDS = 1.0
"""Processor time that a mutant may take."""
STRUCTURED = 0.4

_COPIED_ONE_IN = 16
_BUNDLE_HEADER = 700
_EDGES = (0, 1, 2, 3, 4, 7, 8, 16, 31, 64, 127, 128, 255, 256, 1000, 32767, 32768, 65535, 65536, 1 << 24)
_BIG = (2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**48, 2**63 - 1, 2**64 - 1)
INTEGERS = (*_EDGES, *(-edge for edge in _EDGES), *_BIG, -(2**31), -(2**63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 3e38, float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", "a", "x" * 5000, "ünïcödé", "a\0b", "\n", "'", '"', "serving_default", "9" * 5000)
_PLACE = re.compile(r"subgraph|signature|metadata|not a TFLite model|was shortened|instead of|has more than")

Random = random.Random


class WrongError(Exception):
    """The library broke its promise: the text says which."""


class TooSlowError(Exception):
    """A mutant took longer than `SECONDS` of processor time."""


def mutant(
    seeds: Sequence[Seed], number: int, run: int = 0, structured: float = STRUCTURED
) -> tuple[str, bytes]:
    """The name of the seed that mutant `number` of a run is made of, and its bytes; small seeds have more mutants.

    `structured` is the share of those whose tables are changed; of the others, bytes are.
    """
    chance = Random(f"{run}/{number}")
    (chosen,) = chance.choices(seeds, cum_weights=_shares(tuple(map(_size, seeds))))
    content = chosen.content
    if chosen.root is not None and chance.random() < structured:
        content = _structured(chosen.root, content, seeds, chance)
    if content is chosen.content or chance.random() < 0.1:
        content = _raw(content, seeds, chance)
    return chosen.name, content


@lru_cache(maxsize=1)
def _shares(sizes: tuple[int, ...]) -> list[float]:
    return list(accumulate((1000 + size) ** -3 for size in sizes))


def _size(seed: Seed) -> int:
    return 4 * _BUNDLE_HEADER if seed.root is None else len(seed.content)


def examine(content: bytes, converted_one_in: int = 1) -> str:
    """Take a mutant the whole way, file to file, without running it; says how far it got.

    Of those that match without trouble only one in `converted_one_in` is converted, written and read again: that
    takes longest.

    Raises:
        WrongError: a promise is broken. Any other exception breaks one, too, and so does a warning.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if _is_bundle(content):
            return _examine_bundle(content)
        return _examine(content, zlib.crc32(content), converted_one_in)


def _is_bundle(content: bytes) -> bool:
    return content.startswith(MAGIC)


def _examine_bundle(content: bytes) -> str:
    """Bundles are read from files only."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "in.bundle", Path(folder) / "out.bundle"
        source.write_bytes(content)
        try:
            assert all(part.model for part in choose_parts(Opened(source), "all"))
        except (ModelFormatError, UsageError) as error:
            if not str(error).startswith(str(source)):
                _check_sentence(error)
            return "refused by the reader"
        try:
            result = _converted(source, target, sections="all")
        except ModelFormatError as error:
            if not re.search(r"so that no section can be moved|is recorded", str(error)):
                raise
            return "refused by the writer"
        if len(Opened(target).parts) != len(Opened(source).parts):
            raise WrongError("another number of models was written than read")
        return "converted" if result.converted else "accepted"


def _examine(content: bytes, checksum: int, converted_one_in: int) -> str:
    try:
        file = read_model(content)
    except ModelFormatError as error:
        _check_sentence(error)
        return "refused by the reader"
    if checksum % _COPIED_ONE_IN == 0:
        _check_copy(file.root)
    try:
        model = from_tables(file)
    except ModelFormatError as error:
        _check_sentence(error)
        return "refused as a graph"
    before = edge_opt.infer_shapes(model)
    for graph in model.subgraphs:
        for match in find_blocks(graph):
            str(match)
    if checksum // _COPIED_ONE_IN % converted_one_in:
        return "matched, not converted"
    sizes = {
        f"{signature}/{name}": [3 if size < 0 else size for size in tensor.shape_signature or tensor.shape]
        for signature, inputs in model.inputs()
        for name, tensor in inputs.items()
        if tensor.is_dynamic
    }
    if sizes:
        with suppress(UsageError):
            _converted(model, dry_run=True, shapes=sizes)
    result = _converted(model, dry_run=True)
    written = load(to_bytes(model))
    after = edge_opt.infer_shapes(written)
    if after and not before:
        raise WrongError(f"shapes disagree that agreed: {after[:3]}")
    return "converted" if result.converted else "accepted"


def _converted(source: Any, output: Any = None, **options: Any) -> ConversionResult:
    result = convert(source, output, verify="none", **options)
    for site in result.sites:
        if site.is_bug:
            raise WrongError(site.reason)
    return result


def _check_copy(root: Table) -> None:
    again = model_bytes(root)
    if model_bytes(read_model(again).root) != again:
        raise WrongError("what was read and written does not read and write the same")


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


# Structured mutants


def _structured(root: Table, content: bytes, seeds: Sequence[Seed], chance: Random) -> bytes:
    """Change fields in place, write the file, and change them back; `content` where the format cannot say it."""
    undo: list[tuple[dict[str, Any], dict[str, Any]]] = []
    by_type = _by_type(root)
    donor = chance.choice(seeds).root if chance.random() < 0.1 else root
    other = by_type if donor is None or donor is root else _by_type(donor)
    try:
        for _ in range(chance.choice((1, 1, 1, 2, 3, 6))):
            table = chance.choice(by_type[chance.choice(sorted(by_type))])
            undo.append((table.fields, dict(table.fields)))
            _change(table, by_type, other, chance)
        return model_bytes(root)
    except (ModelFormatError, OverflowError):
        return content
    finally:
        for fields, kept in reversed(undo):
            fields.clear()
            fields.update(kept)


def _by_type(root: Table) -> dict[str, list[Table]]:
    found: dict[str, list[Table]] = {}
    seen: set[int] = set()
    pending = [root]
    while pending:
        table = pending.pop()
        if id(table) in seen:
            continue
        seen.add(id(table))
        found.setdefault(table.name, []).append(table)
        for value in table.fields.values():
            if isinstance(value, Table):
                pending.append(value)
            elif isinstance(value, list):
                pending.extend(item for item in value if isinstance(item, Table))
    return found


Tables = dict[str, list[Table]]


def _change(table: Table, tables: Tables, other: Tables, chance: Random) -> None:
    present = [field for field in table.spec.fields if field.name in table.fields]
    fields = present if present and chance.random() < 0.85 else list(table.spec.fields)
    if not fields:
        return
    field = chance.choice(fields)
    if field.name in table.fields and chance.random() < 0.08:
        table.set(field.name, None)
        return
    _CHANGES[field.kind](table, field, tables if chance.random() < 0.7 else other, chance)


def _change_scalar(table: Table, field: FieldSpec, tables: Tables, chance: Random) -> None:
    old = table.get(field.name)
    if field.element == "bool":
        table.fields[field.name] = not old
    elif field.element.startswith("float"):
        table.fields[field.name] = chance.choice((*_FLOATS, old * 2, -old))
    else:
        enum = _ENUM_FIELDS.get((table.name, field.name))
        codes = (
            list(ENUMS[enum].values()) if enum else [chance.choice(INTEGERS), old + 1, old - 1, 2 * old, -old]
        )
        table.fields[field.name] = _fitting(chance.choice(codes), field.element)


_ENUM_FIELDS = {
    ("Tensor", "type"): "TensorType",
    ("OperatorCode", "builtin_code"): "BuiltinOperator",
    ("OperatorCode", "deprecated_builtin_code"): "BuiltinOperator",
}


def _fitting(value: int, element: str) -> int:
    limits = np.iinfo(NUMPY_TYPES[element])
    return min(max(int(value), int(limits.min)), int(limits.max))


def _change_string(table: Table, field: FieldSpec, tables: Tables, chance: Random) -> None:
    others = [
        other.fields[known.name]
        for other in chance.choice(list(tables.values()))
        for known in other.spec.fields
        if known.kind == "string" and known.name in other.fields
    ]
    table.fields[field.name] = chance.choice([*_TEXTS, *others[:20]])


def _change_scalars(table: Table, field: FieldSpec, tables: Tables, chance: Random) -> None:
    old = table.fields.get(field.name)
    if isinstance(old, Data) or field.table == "Buffer":
        table.fields[field.name] = _other_data(old, tables, chance)
        return
    values = [] if old is None else old.tolist()
    others = [t.fields[field.name].tolist() for t in tables.get(table.name, ()) if _has_array(t, field.name)]
    values = _other_list(values, _number_maker(field.element, chance), others, chance)
    table.fields[field.name] = np.array(values, NUMPY_TYPES[field.element])


def _has_array(table: Table, name: str) -> bool:
    return isinstance(table.fields.get(name), np.ndarray)


def _number_maker(element: str, chance: Random) -> Callable[[], Any]:
    if element == "bool":
        return lambda: chance.random() < 0.5
    if element.startswith("float"):
        return lambda: chance.choice(_FLOATS)
    return lambda: _fitting(chance.choice(INTEGERS if chance.random() < 0.4 else range(-1, 9)), element)


def _other_list(
    values: list[Any], make: Callable[[], Any], others: list[list[Any]], chance: Random
) -> list[Any]:
    values = list(values)
    place = chance.randrange(len(values) + 1)
    how = chance.randrange(8)
    if how <= 2 and values:
        values[place % len(values)] = make()
    elif how == 3:
        values.insert(place, make())
    elif how == 4:
        del values[place:]
    elif how == 5:
        values = values[place:] + values[:place]
    elif how == 6 and others:
        values = list(chance.choice(others))
    else:
        values *= chance.choice((0, 2, 3, 40, 5000 // (1 + len(values))))
    return values


def _other_data(old: Data | None, tables: Tables, chance: Random) -> Data:
    content = b"" if old is None else bytes(old.view()[:4096])
    stored = [t.fields["data"] for t in tables.get("Buffer", ()) if "data" in t.fields]
    how = chance.randrange(6)
    if how == 0 and stored:
        return chance.choice(stored)  # type: ignore[no-any-return]
    if how == 1:
        content = content[: chance.randrange(len(content) + 1)]
    elif how == 2:
        content += bytes(chance.choice((1, 3, 4, 64)))
    elif how == 3:
        content = struct.pack("<i", _fitting(chance.choice(INTEGERS), "int32")) * max(1, len(content) // 4)
    elif how == 4:
        content = chance.randbytes(len(content))
    elif content:
        place = chance.randrange(len(content))
        content = content[:place] + bytes([chance.randrange(256)]) + content[place + 1 :]
    return Data(content, external=chance.choice((None, True, False)))


def _change_table(table: Table, field: FieldSpec, tables: Tables, chance: Random) -> None:
    known = tables.get(field.element, [])
    table.fields[field.name] = chance.choice([*known, new_table(field.element)])


def _change_tables(table: Table, field: FieldSpec, tables: Tables, chance: Random) -> None:
    known = tables.get(field.element, [])

    def make() -> Table:
        return chance.choice([*known[:200], new_table(field.element)])

    others = [t.fields[field.name] for t in tables.get(table.name, ()) if field.name in t.fields]
    table.fields[field.name] = _other_list(table.fields.get(field.name, []), make, others, chance)


def _change_union(table: Table, field: FieldSpec, tables: Tables, chance: Random) -> None:
    if chance.random() < 0.5:
        member = chance.choice(list(UNIONS[field.element].values()))
        table.set(field.name, chance.choice([*tables.get(member, ()), new_table(member)]))
        return
    present = [name for name in UNIONS[field.element].values() if name in tables]
    if present:
        table.set(field.name, chance.choice(tables[chance.choice(present)]))


_CHANGES: dict[str, Callable[[Table, FieldSpec, Tables, Random], None]] = {
    "scalar": _change_scalar,
    "scalars": _change_scalars,
    "string": _change_string,
    "table": _change_table,
    "tables": _change_tables,
    "union": _change_union,
}
assert {field.kind for spec in TABLES.values() for field in spec.fields} <= set(_CHANGES)


# Raw mutants


def _raw(content: bytes, seeds: Sequence[Seed], chance: Random) -> bytes:
    first, last = 0, len(content)
    if _is_bundle(content) and chance.random() < 0.8:
        first, last = 0, _BUNDLE_HEADER  # the rest is in some model's mutants too
    changed = bytearray(content[first:last])
    for _ in range(chance.choice((1, 1, 1, 2, 2, 4, 16))):
        if len(changed) < 16:
            break
        chance.choice(_RAW)(changed, chance)
    if chance.random() < 0.1:
        other = chance.choice(seeds).content
        start = chance.randrange(len(other))
        piece = other[start : start + chance.choice((4, 16, 256, 4096))]
        at = chance.randrange(len(changed) + 1)
        changed[at : at + chance.choice((0, len(piece)))] = piece
    return content[:first] + bytes(changed) + content[last:]


def _flip(changed: bytearray, chance: Random) -> None:
    changed[chance.randrange(len(changed))] ^= 1 << chance.randrange(8)


def _put(changed: bytearray, chance: Random) -> None:
    changed[chance.randrange(len(changed))] = chance.choice(
        (0, 1, 4, 0x7F, 0x80, 0xFF, chance.randrange(256))
    )


def _put_integer(changed: bytearray, chance: Random) -> None:
    code, width = chance.choice((("<H", 2), ("<I", 4), ("<i", 4), ("<Q", 8)))
    at = chance.randrange(len(changed) - width + 1) & -width
    limits = 1 << (8 * width)
    value = chance.choice(INTEGERS) % limits
    struct.pack_into(code.upper(), changed, at, value)


def _bend_offset(changed: bytearray, chance: Random) -> None:
    """Change a word that could be an offset or a length: one that is smaller than the file."""
    for _ in range(20):
        at = chance.randrange(len(changed) - 3) & -4
        (value,) = struct.unpack_from("<I", changed, at)
        if 0 < value < len(changed):
            options = (
                0,
                value + 4,
                max(0, value - 4),
                value * 2,
                len(changed) - at,
                chance.randrange(len(changed)),
            )
            struct.pack_into("<I", changed, at, chance.choice(options))
            return


def _bend_vtable(changed: bytearray, chance: Random) -> None:
    at = chance.randrange(len(changed) - 1) & -2
    (value,) = struct.unpack_from("<H", changed, at)
    struct.pack_into("<H", changed, at, (value + chance.choice((-4, -2, 2, 4, 100))) % 65536)


def _truncate(changed: bytearray, chance: Random) -> None:
    del changed[chance.randrange(len(changed)) :]


def _remove(changed: bytearray, chance: Random) -> None:
    at = chance.randrange(len(changed))
    del changed[at : at + chance.choice((1, 2, 4, 8, 64))]


_RAW = (_flip, _flip, _put, _put, _put_integer, _bend_offset, _bend_offset, _bend_vtable, _truncate, _remove)
