"""What the caller asked for, made into passes, facts of the target, entry points and a place to write. Runs nothing.

What cannot be done is a `UsageError`, a place where nothing can be written an `OutputError`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args

from edge_opt.attention.form import FORM_NAMES
from edge_opt.conversion.container import Container, Sections
from edge_opt.conversion.result import ConversionResult
from edge_opt.ir import Model, Shape, Tensor
from edge_opt.output.atomic import resolve_target
from edge_opt.output.errors import UsageError, unknown
from edge_opt.passes import PASSES, Pass
from edge_opt.passes.contract import shape_options
from edge_opt.passes.inline_composites import InlineComposites
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.passes.tile_rows import TileRows
from edge_opt.proof.source import ModelLike
from edge_opt.targets import Target

Progress = Callable[[str, int, int], None]

Verify = Literal["regions", "exhaustive", "full", "none"]
GENERIC: Final = "generic"
_FORMATS = frozenset({".tflite", ".litertlm", ".task", ".onnx", ".pte", ".gguf", ".safetensors"})


class ConvertOptions(TypedDict, total=False):
    """The options of `convert`, as its documentation has them."""

    target: str | Target | None
    passes: str | Pass | Iterable[str | Pass] | None
    skip: str | Iterable[str] | None
    signatures: str | Iterable[str] | None
    verify: Verify
    proof_seconds: float | None
    overwrite: bool
    dry_run: bool
    require_match: bool
    require_all: bool
    require_sound: bool
    sections: Sections
    form: str | None
    rows_per_tile: int | None
    inline_composites: bool
    extract_signature: str | None
    shapes: Mapping[str, Sequence[int]] | None
    progress: Progress | None
    on_result: Callable[[ConversionResult], None] | None


def path_of(source: ModelLike) -> str | None:
    """The source's path; None for bytes and loaded models."""
    return None if isinstance(source, Model | bytes) else os.fspath(source)


def asked(
    facts: Target, passes: list[Pass], form: str | None, rows_per_tile: int | None, *, inline_composites: bool
) -> Target:
    """The target's facts, with what the caller wants otherwise."""
    if form is not None and form not in FORM_NAMES:
        raise unknown("form", form, FORM_NAMES)
    if rows_per_tile is not None and rows_per_tile < 1:
        raise UsageError(f"rows per tile must be 1 or more, not {rows_per_tile}")
    names = {entry.name for entry in passes}
    for option, given, needed in (
        (f"rows_per_tile={rows_per_tile}", rows_per_tile is not None, TileRows.name),
        (f"form='{form}'", form is not None, MhaToSha.name),
        ("inline_composites=True", inline_composites, InlineComposites.name),
    ):
        if given and needed not in names:
            raise UsageError(
                f"{option} has no effect without the pass '{needed}': leave the option out, or let that pass run"
            )
    facts = facts.asked(form=form, rows_per_tile=rows_per_tile, inline_composites=inline_composites or None)
    return facts if TileRows.name in names else facts.without_tiles()


def default_output(source: str | os.PathLike[str]) -> Path:
    """`gemma.tflite` -> `gemma.opt.tflite`, beside the input."""
    path = Path(source)
    return path.with_name(f"{path.stem}.opt{path.suffix}")


def destination_of(
    source: ModelLike, output: str | os.PathLike[str] | None, suffix: str, *, overwrite: bool
) -> Path | None:
    """Where to write: asked for, or beside the input; None for a source without a place of its own.

    `suffix` is that of what will be written: a name that promises another format is refused.
    """
    path = path_of(source)
    if output is None:
        if path is None:
            return None
        output = default_output(path)
    elif Path(output).suffix.lower() in _FORMATS - {suffix}:
        raise UsageError(f"{os.fspath(output)} cannot be written: the result is a {suffix}, name it so")
    status = None if path is None else Path(path).stat()
    inputs = () if status is None else ((status.st_dev, status.st_ino),)
    # Looked at before the work: nobody wants to learn of an existing output after an hour.
    resolve_target(output, overwrite=overwrite, inputs=inputs)
    return Path(output)


def check_verify(verify: str, source: object) -> None:
    """Whether there is such a verification, and whether it can be done for that source."""
    if verify not in get_args(Verify):
        raise unknown("verification", verify, get_args(Verify))
    if verify == "full" and isinstance(source, Model):
        raise UsageError("verify='full' compares with the source file: give a path or bytes, not a Model")


def choose_passes(
    passes: str | Pass | Iterable[str | Pass] | None, skip: str | Iterable[str] | None
) -> list[Pass]:
    """The passes to run, in the order in which they run."""
    skipped = _listed(skip or ())
    asked = list(PASSES) if passes is None else _listed(passes)
    own = [entry for entry in asked if isinstance(entry, Pass)]
    wanted = [entry for entry in asked if not isinstance(entry, Pass)]
    known = [*PASSES, *(entry.name for entry in own)]
    for name in (*wanted, *skipped):
        if name not in known:
            raise unknown("pass", name, known)
    chosen = [*(PASSES[name] for name in PASSES if name in wanted), *own]
    names = [entry.name for entry in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"there are two passes '{twice}': give one of them another name")
    return [entry for entry in chosen if entry.name not in skipped]


def choose_shapes(container: Container, shapes: Mapping[str, Sequence[int]]) -> list[dict[Tensor, Shape]]:
    """The inputs to be given static shapes, of each part; by `NAME`, `signature/NAME` or `model/signature/NAME`.

    Raises:
        UsageError: there is no such input, a shape does not fit it, or another input of its signature stays open.
    """
    found: list[dict[Tensor, Shape]] = [{} for _ in container.parts]
    signatures = [
        (part.signature(name), name, inputs, own)
        for part, own in zip(container.parts, found, strict=True)
        for name, inputs in part.model.inputs()
    ]
    named = [
        (own, tensor, (f"{full}/{name}", f"{signature}/{name}", name))
        for full, signature, inputs, own in signatures
        for name, tensor in inputs.items()
    ]
    known = list(dict.fromkeys(key for _, _, keys in named for key in reversed(keys)))
    for key in shapes:
        if key not in known:
            raise unknown("input", key, known)
    for own, tensor, keys in named:
        # What names one signature comes before what names all.
        wanted = next((shapes[key] for key in keys if key in shapes), None)
        if wanted is None:
            continue
        shape = _fitting(keys[0], tensor, wanted)
        if own.setdefault(tensor, shape) != shape:
            raise UsageError(f"input '{keys[0]}' is that of another signature too: give one shape to both")
    for full, _, inputs, own in signatures:
        left = {name: tensor for name, tensor in inputs.items() if tensor.is_dynamic and tensor not in own}
        if left and any(tensor in own for tensor in inputs.values()):
            add = " ".join(shape_options(left))
            raise UsageError(f"signature '{full}' has other inputs of open lengths: add {add}")
    return found


def _fitting(where: str, tensor: Tensor, given: Sequence[int]) -> Shape:
    declared = tensor.shape_signature or tensor.shape
    if len(given) != len(declared):
        raise UsageError(f"input '{where}' has {len(declared)} axes, and {len(given)} sizes were given")
    for axis, (size, wanted) in enumerate(zip(declared, given, strict=True)):
        if wanted < 1 or size not in (-1, wanted):
            expected = "1 or more" if size < 0 else size
            raise UsageError(f"axis {axis} of input '{where}' must be {expected}, and {wanted} was given")
    return tuple(given)


def _listed(names: str | Pass | Iterable[Any]) -> list[Any]:
    """The names as a list; a single name is not taken for a list of letters."""
    return [names] if isinstance(names, str | Pass) else list(names)


def choose_signatures(container: Container, wanted: str | Iterable[str] | None) -> frozenset[str]:
    """The entry points to rewrite, as `Part.signature` has them."""
    known = [
        (part.signature(name), name) for part in container.parts for name, _ in part.model.entry_points()
    ]
    if wanted is None:
        return frozenset(full for full, _ in known)
    names = _listed(wanted)
    either = list(dict.fromkeys(name for both in known for name in both))
    for name in names:
        if name not in either:
            raise unknown("signature", name, either)
    return frozenset(full for full, name in known if full in names or name in names)
