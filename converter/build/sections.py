"""The sections of a bundle on its way through the stages: what is in them, and that none gets lost."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.ir import Model, from_tables
from edge_opt.schema.litertlm import Bundle, Section, read_bundle
from edge_opt.schema.reader import read_model

if TYPE_CHECKING:
    from pathlib import Path

    from edge_opt.schema.data import Source

MAIN = "prefill_decode"
_CALL = "DISPATCH_OP"
_CHUNK = 1 << 20


def model_of(bundle: Bundle, kind: str) -> Model | None:
    """The model of a kind, e.g. `prefill_decode`."""
    for index, section in enumerate(bundle.sections):
        if section.model_type == kind:
            return from_tables(read_model(bundle.content(index)))
    return None


def is_compiled(model: Model) -> bool:
    """Whether an NPU is called anywhere."""
    return any(_calls(model))


def _calls(model: Model) -> list[bool]:
    return [operator.code.custom_code == _CALL for graph in model.subgraphs for operator in graph.operators]


def keep_sections(before: Path, after: Path) -> list[str]:
    """Put back the sections that `before` had and a stage did not write to `after`; returns what they are.

    The models that the stage wrote take the places of those that they were made from: order, metadata and everything
    that the stage knows nothing of stay as they were.
    """
    whole, made = read_bundle(before), read_bundle(after)
    written = {_key(section): index for index, section in enumerate(made.sections)}
    lost = [name(section) for section in whole.sections if _key(section) not in written]
    if lost:
        models = {
            index: read_model(made.content(written[_key(section)])).root
            for index, section in enumerate(whole.sections)
            if section.is_model and _key(section) in written
        }
        whole.write(models, after, overwrite=True)
    return lost


def faults(before: Path, after: Path) -> list[str]:
    """What is wrong with a compiled bundle, in sentences: `before` is what the compiler was given."""
    old, new = read_bundle(before), read_bundle(after)
    order = [[_key(section) for section in bundle.sections] for bundle in (old, new)]
    if order[0] != order[1]:
        told = [", ".join(map(name, bundle.sections)) for bundle in (old, new)]
        return [f"its sections are {told[1]}, and were {told[0]}"]
    found = []
    for index, section in enumerate(old.sections):
        if not section.is_model and not _same(old.content(index), new.content(index)):
            found.append(f"its {name(section)} is not what it was")
    return found + _model_faults(old, new)


def _model_faults(old: Bundle, new: Bundle) -> list[str]:
    before, after = model_of(old, MAIN), model_of(new, MAIN)
    assert before is not None, "looked at when it was given"
    assert after is not None, "the sections are the same"
    if (signatures(before)) != signatures(after):
        return [f"the signatures of its {MAIN} model are not those that it had"]
    found = []
    for key, graph in after.entry_points():
        left = [operator for operator in graph.operators if operator.code.custom_code != _CALL]
        if left:
            found.append(
                f"signature '{key}': the NPU does not take {len(left)} of its operators, {left[0].name} the first"
            )
        elif len(graph) != 1:
            found.append(f"signature '{key}' is cut into {len(graph)} calls of the NPU")
    if not found and len(after.subgraphs) != len(after.entry_points()):
        found.append(f"its {MAIN} model holds {len(after.subgraphs)} subgraphs, more than it has signatures")
    return found


def signatures(model: Model) -> dict[str, tuple[list[str], list[str]]]:
    """The names of every signature's inputs and outputs."""
    return {s.key: (sorted(s.inputs), sorted(s.outputs)) for s in model.signatures}


def name(section: Section) -> str:
    """What a section is, for people."""
    return section.model_type or _KINDS.get(section.data_type, f"section of type {section.data_type}")


# AnySectionDataType of the format, see `edge_opt.schema.litertlm`.
_KINDS = {
    1: "data",
    4: "SentencePiece tokenizer",
    5: "metadata",
    6: "tokenizer",
    7: "weights",
    9: "executor metadata",
}


def _key(section: Section) -> tuple[int, str]:
    return section.data_type, section.model_type


def _same(a: Source, b: Source) -> bool:
    return a.size == b.size and all(
        bytes(a.view(at, min(_CHUNK, a.size - at))) == bytes(b.view(at, min(_CHUNK, a.size - at)))
        for at in range(0, a.size, _CHUNK)
    )
