"""What `convert` can be asked for, and what follows: passes, target, entry points, a place to write.

Runs nothing. What cannot be done is a `UsageError`, a place where nothing can be written an `OutputError`.
"""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Final, Literal, TypedDict, get_args, get_origin

from edge_opt.attention.block import FORM_NAMES
from edge_opt.base.atomic import resolve_target
from edge_opt.base.errors import UsageError, unknown
from edge_opt.base.words import Progress
from edge_opt.conversion.container import Sections
from edge_opt.conversion.result import ConversionResult
from edge_opt.ir import Model, Subgraph
from edge_opt.ir.opening import Part, Readable
from edge_opt.passes import PASSES, Pass
from edge_opt.passes.inline_composites import InlineComposites
from edge_opt.passes.mha_to_sha import MhaToSha, TileRows
from edge_opt.schema.writer import SUFFIXES, check_suffix
from edge_opt.targets import Target, TargetLike, load_target

Verify = Literal["regions", "exhaustive", "full", "none"]
GENERIC: Final = "generic"
_MOST_SECONDS = 1_000_000
"""Of a proof: alarms and time limits of sockets take no number of any size."""


class ConvertOptions(TypedDict, total=False):
    """The options of `convert`, whose documentation says what each does; each may be left out."""

    target: TargetLike | None
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
    exported: Mapping[str, Subgraph] | None
    progress: Progress | None
    on_result: Callable[[ConversionResult], None] | None


DEFAULTS: Final[ConvertOptions] = {
    "target": None, "passes": None, "skip": None, "signatures": None, "verify": "regions", "proof_seconds": None,
    "overwrite": False, "dry_run": False, "require_match": False, "require_all": False, "require_sound": False,
    "sections": "prefill-decode", "form": None, "rows_per_tile": None, "inline_composites": False,
    "extract_signature": None, "shapes": None, "exported": None, "progress": None, "on_result": None,
}  # fmt: skip


def check_options(options: ConvertOptions, source: object) -> None:
    """Check the options that are only values, before any work.

    Raises:
        TypeError: there is no such option.
        UsageError: a value cannot work, or not with that source.
    """
    extra = [name for name in options if name not in ConvertOptions.__annotations__]
    if extra:
        raise TypeError(f"convert() got an unexpected keyword argument '{extra[0]}'")
    for name, kind in ConvertOptions.__annotations__.items():
        if not _fits(options.get(name), kind):
            expected = kind.__name__ if isinstance(kind, type) else kind
            raise UsageError(f"{name} is {options.get(name)!r:.60}, expected {expected}")
    verify, seconds = options["verify"], options["proof_seconds"]
    if verify not in get_args(Verify):
        raise unknown("verification", verify, get_args(Verify))
    if verify == "full" and isinstance(source, Model):
        raise UsageError("verify='full' compares with the source file: give a path or bytes, not a Model")
    if seconds is not None and not 0 < seconds <= _MOST_SECONDS:
        raise UsageError(
            f"the seconds of a proof must be more than 0 and at most {_MOST_SECONDS:,}, not {seconds:g}"
        )


def _fits(value: object, kind: Any) -> bool:
    """Whether a value is of the type; what a list or mapping holds, and words, are checked where they are used."""
    if get_origin(kind) is Literal:
        return isinstance(value, str)
    numbers = {int: Integral, float: Real}  # numpy's, too
    kinds = [get_origin(one) or one for one in get_args(kind) or (kind,)]
    return any(isinstance(value, numbers.get(one, one)) for one in kinds)


def choose_passes(options: ConvertOptions) -> list[Pass]:
    """The passes to run, in the order in which they run."""
    skipped, wanted = _listed(options["skip"]), _listed(options["passes"])
    if options["passes"] is None:
        wanted = list(PASSES)
    objects = [entry for entry in wanted if isinstance(entry, Pass)]
    names = [entry for entry in wanted if not isinstance(entry, Pass)]
    available = [*PASSES, *(entry.name for entry in objects)]
    for name in (*names, *skipped):
        if name not in available:
            raise unknown("pass", name, available)
    chosen = [*(PASSES[name] for name in PASSES if name in names), *objects]
    for number, entry in enumerate(chosen):
        if entry.name in [other.name for other in chosen[:number]]:
            raise UsageError(f"there are two passes '{entry.name}': give one of them another name")
    return [entry for entry in chosen if entry.name not in skipped]


def choose_target(options: ConvertOptions, passes: Iterable[Pass]) -> Target:
    """The target, with the facts that the options set otherwise."""
    form, rows = options["form"], options["rows_per_tile"]
    inline = options["inline_composites"]
    target = load_target(options["target"] or GENERIC)
    if form is not None and form not in FORM_NAMES:
        raise unknown("form", form, FORM_NAMES)
    if rows is not None and rows < 1:
        raise UsageError(f"rows per tile must be 1 or more, not {rows}")
    names = {entry.name for entry in passes}
    for option, is_given, needed in (
        (f"rows_per_tile={rows}", rows is not None, TileRows.name),
        (f"form='{form}'", form is not None, MhaToSha.name),
        ("inline_composites=True", inline, InlineComposites.name),
    ):
        if is_given and needed not in names:
            raise UsageError(
                f"{option} has no effect without the pass '{needed}': leave the option out, or let that pass run"
            )
    wishes = {"form": form, "rows_per_tile": rows, "inline_composites": inline or None}
    target = target.asked(**{name: value for name, value in wishes.items() if value is not None})
    return target if TileRows.name in names else target.asked(rows_per_tile=None)


def choose_signatures(parts: Sequence[Part], wanted: str | Iterable[str] | None) -> frozenset[str]:
    """The entry points to rewrite, as `Part.signature` has them."""
    both = [(part.signature(name), name) for part in parts for name, _ in part.model.entry_points()]
    names = _listed(wanted)
    available = list(dict.fromkeys(name for pair in both for name in pair))
    for name in names:
        if name not in available:
            raise unknown("signature", name, available)
    return frozenset(full for full, name in both if wanted is None or full in names or name in names)


def _listed(names: str | Pass | Iterable[Any] | None) -> list[Any]:
    """The names as a list; a single name is not taken for a list of letters."""
    return [names] if isinstance(names, str | Pass) else list(names or ())


def path_of(source: Readable) -> str | None:
    """The source's path; None for bytes and loaded models."""
    return None if isinstance(source, Model | bytes) else os.fspath(source)


def default_output(source: str | os.PathLike[str], suffix: str = "") -> Path:
    """`gemma.tflite` -> `gemma.opt.tflite`, beside the input; a name that promises another format gets the `suffix`."""
    path = Path(source)
    kept = suffix if suffix and path.suffix.lower() in SUFFIXES else path.suffix
    return path.with_name(f"{path.stem}.opt{kept}")


def destination_of(
    source: Readable, output: str | os.PathLike[str] | None, suffix: str, *, overwrite: bool
) -> Path | None:
    """Where to write: `output`, or beside the input; None for a source without a place of its own.

    `suffix` is that of what will be written: a name that promises another format is refused.
    """
    path = path_of(source)
    if output is None:
        if path is None:
            return None
        output = default_output(path, suffix)
    check_suffix(output, suffix)
    status = None if path is None else Path(path).stat()
    inputs = () if status is None else ((status.st_dev, status.st_ino),)
    # Looked at before the work: nobody wants to learn of an existing output after an hour.
    resolve_target(output, overwrite=overwrite, inputs=inputs)
    return Path(output)
