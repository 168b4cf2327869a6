"""Checks that a bundle's sections survive the stages, and restores lost ones."""

import re
import tempfile
from pathlib import Path

from edge_opt.ir import Model, load
from edge_opt.ir.opening import CALL, MAIN_SECTION, is_compiled
from edge_opt.schema.data import Source
from edge_opt.schema.litertlm import Bundle, Section, is_bundle, read_bundle
from edge_opt.schema.reader import read_model
from edge_opt.schema.table import ENUMS

_KINDS = {number: kind for kind, number in ENUMS["AnySectionDataType"].items()}
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


def keep_sections(before: Path, after: Path) -> list[str]:
    """Restore sections of `before` that a stage did not write to `after`; return their names.

    Rewrites `after` as `before` with the stage's models, so order, metadata and other sections are kept.
    """
    whole, written = read_bundle(before), read_bundle(after)
    places = {key: index for index, key in enumerate(_keys(written))}
    kept = [(section, places.get(key)) for section, key in zip(whole.sections, _keys(whole), strict=True)]
    lost = [name(section) for section, place in kept if place is None]
    if lost:
        models = {
            index: read_model(written.content(place))
            for index, (section, place) in enumerate(kept)
            if section.is_model and place is not None
        }
        made = after.with_name(f"{after.stem}_whole{after.suffix}")
        whole.write(models, made, overwrite=True)
        made.replace(after)
    return lost


def faults(before: Path, after: Path) -> list[str]:
    """Describe faults of a compiled bundle; `before` is the compiler's input.

    The prefill/decode model must be one NPU call per signature. Any other model must be unchanged, or compiled with the
    same signatures. All other sections must have the same bytes in the same order.
    """
    old, new = read_bundle(before), read_bundle(after)
    if _keys(old) != _keys(new):
        was, now = (", ".join(map(name, bundle.sections)) for bundle in (old, new))
        return [f"its sections are {now}, expected {was}"]
    sentences = []
    for index, section in enumerate(old.sections):
        contents, main = (old.content(index), new.content(index)), section.model_type == MAIN_SECTION
        if main or not _same(*contents):
            wrong = _model_faults(*map(load, contents), main=main) if section.is_model else ["has changed"]
            sentences += [f"its {name(section)} {fault}" for fault in wrong]
    return sentences


def _model_faults(before: Model, after: Model, *, main: bool) -> list[str]:
    if _interface(before) != _interface(after):
        return ["model's signatures have changed"]
    if not main:
        return [] if is_compiled(after) else ["model differs and is not compiled"]
    wrong = []
    for key, graph in after.entry_points():
        left = [operator.name for operator in graph.operators if operator.code.custom_code != CALL]
        if left or len(graph) != 1:
            wrong.append(
                f"model has {len(graph)} operators in '{key}', {len(left)} not on the NPU, expected one call"
            )
    return wrong


def _interface(model: Model) -> list[object]:
    """Names, types and shapes of every signature's inputs and outputs."""
    return [
        (signature.key, {(key, one.dtype, tuple(one.shape)) for key, one in side.items()})
        for signature in sorted(model.signatures, key=lambda one: one.key)
        for side in (signature.inputs, signature.outputs)
    ]


def name(section: Section) -> str:
    """A section's name for messages: a model's purpose, or the format's name of the type."""
    return section.model_type or _KINDS.get(section.data_type, f"section of type {section.data_type}")


def _keys(bundle: Bundle) -> list[tuple[int, str, int]]:
    """Each section's type, purpose, and number among those of the same type and purpose."""
    kinds = [(section.data_type, section.model_type) for section in bundle.sections]
    return [(*kind, kinds[:at].count(kind)) for at, kind in enumerate(kinds)]


def _same(a: Source, b: Source) -> bool:
    pieces = ((at, min(_CHUNK, a.size - at)) for at in range(0, a.size, _CHUNK))
    return a.size == b.size and all(a.read(*piece) == b.read(*piece) for piece in pieces)
