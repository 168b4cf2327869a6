"""Checks that a bundle's sections survive the stages, and restores lost ones."""

import re
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from edge_opt.ir import Model, Tensor, load
from edge_opt.ir.opening import CALL, MAIN_SECTION, is_compiled
from edge_opt.schema.data import Source
from edge_opt.schema.litertlm import Bundle, Section, is_bundle, read_bundle, section_of
from edge_opt.schema.reader import read_model
from edge_opt.schema.table import ENUMS, Table

_NUMBERS = ENUMS["AnySectionDataType"]
_KINDS = {number: kind for kind, number in _NUMBERS.items()}
_CHUNK = 1 << 20
_WORD = re.compile(r"[\w .-]*", re.ASCII)


def closed(path: Path) -> Path:
    """The bundle, or a copy in the temporary folder without header entries that litert-torch may take for files.

    litert-torch looks up components of a bundle, such as its tokenizer, among its header's entries, and opens any file
    that these name.
    """
    if not is_bundle(path):
        return path
    bundle = read_bundle(path)
    if not bundle.loose:
        return path
    bundle.drop_loose()
    copy = Path(tempfile.mkdtemp(prefix="edge-opt-"), path.name)
    bundle.write({}, copy)
    return copy


def check_words(bundle: Bundle) -> None:
    """Refuse a bundle whose header has other words than letters: litert-torch makes file names of them, and TOML."""
    for word in bundle.words:
        if not _WORD.fullmatch(word):
            raise bundle.source.refusal(
                f"its header has an unusual name, {word!r:.60}: export the bundle again"
            )


def keep_sections(before: Path, after: Path) -> str:
    """Restore sections of `before` that a stage did not write to `after`.

    Rewrites `after` as `before` with the stage's models, so order, metadata and other sections are kept.

    Returns:
        A note for the user, empty if none was lost.
    """
    whole = read_bundle(before)
    written = read_bundle(after)
    places = {key: index for index, key in enumerate(_keys(written))}
    lost: list[str] = []
    models: dict[int, Table] = {}
    for index, (section, key) in enumerate(zip(whole.sections, _keys(whole), strict=True)):
        if key not in places:
            lost.append(section_name(section))
        elif section.is_model:
            models[index] = read_model(written.content(places[key]))
    if not lost:
        return ""
    replace_file(after, partial(whole.write, models))
    return f"Restored sections that litert-torch dropped: {', '.join(lost)}"


def replace_file(path: Path, write: Callable[[Path], None]) -> None:
    """Replace a bundle that is read until the new one is written."""
    written = path.with_name(f"{path.stem}_new{path.suffix}")
    write(written)
    written.replace(path)


def metadata_of(
    path: Path, kind: str, message: Any, edit: Callable[[Any], None] | None = None
) -> Any | None:
    """A bundle's section of a kind, a protocol buffer of the class `message`; None if it has none.

    With `edit`, which changes it in place, the bundle gets the changed section.
    """
    bundle = read_bundle(path)
    place = section_of(bundle, _NUMBERS[kind])
    if place is None:
        return None
    content = bundle.content(place)
    values = message.FromString(content.read(0, content.size))
    if edit is not None:
        edit(values)
        changed = {place: values.SerializeToString(deterministic=True)}
        replace_file(path, partial(bundle.write, changed))
    return values


def faults(before: Path, after: Path) -> list[str]:
    """Describe faults of a compiled bundle; `before` is the compiler's input.

    The prefill/decode model must be one NPU call per signature. Any other model must be unchanged, or compiled with the
    same signatures. All other sections must have the same bytes in the same order.
    """
    old = read_bundle(before)
    new = read_bundle(after)
    if _keys(old) != _keys(new):
        return [f"its sections are {_names(new)}, expected {_names(old)}"]
    sentences: list[str] = []
    for index, section in enumerate(old.sections):
        wrong = _section_faults(section, old.content(index), new.content(index))
        sentences += [f"its {section_name(section)} {fault}" for fault in wrong]
    return sentences


def _section_faults(section: Section, before: Source, after: Source) -> list[str]:
    is_main = section.model_type == MAIN_SECTION
    if not is_main and _same(before, after):
        return []
    if not section.is_model:
        return ["has changed"]
    return _model_faults(load(before), load(after), main=is_main)


def _model_faults(before: Model, after: Model, *, main: bool) -> list[str]:
    if _interface(before) != _interface(after):
        return ["model's signatures have changed"]
    if not main:
        return [] if is_compiled(after) else ["model differs and is not compiled"]
    wrong: list[str] = []
    for key, graph in after.entry_points():
        left = [operator.name for operator in graph.operators if operator.code.custom_code != CALL]
        if left or len(graph) != 1:
            wrong.append(
                f"model has {len(graph)} operators in '{key}', {len(left)} not on the NPU, expected one call"
            )
    return wrong


def _interface(model: Model) -> dict[str, object]:
    """Names, types and shapes of every signature's inputs and outputs."""
    return {one.key: (_ends(one.inputs), _ends(one.outputs)) for one in model.signatures}


def _ends(named: Mapping[str, Tensor]) -> object:
    return {(key, tensor.dtype, tuple(tensor.shape)) for key, tensor in named.items()}


def _names(bundle: Bundle) -> str:
    return ", ".join(map(section_name, bundle.sections))


def section_name(section: Section) -> str:
    """A section's name for messages: a model's purpose, or the format's name of the type."""
    return section.model_type or _KINDS.get(
        section.data_type, f"section of type {section.data_type}"
    )


def _keys(bundle: Bundle) -> list[tuple[int, str, int]]:
    """Each section's type, purpose, and number among those of the same type and purpose."""
    counts = Counter[tuple[int, str]]()
    keys: list[tuple[int, str, int]] = []
    for section in bundle.sections:
        kind = (section.data_type, section.model_type)
        keys.append((*kind, counts[kind]))
        counts[kind] += 1
    return keys


def _same(a: Source, b: Source) -> bool:
    if a.size != b.size:
        return False
    for at in range(0, a.size, _CHUNK):
        size = min(_CHUNK, a.size - at)
        if a.read(at, size) != b.read(at, size):
            return False
    return True
