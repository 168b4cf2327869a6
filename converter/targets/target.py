"""Read and write target files: how to rewrite for an NPU compiler, and what it refuses or gets wrong."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, TypedDict

import msgspec
from msgspec import Meta

from edge_opt.attention.block import AS_FOUND, FORM_NAMES, Block, logits_bytes
from edge_opt.base.atomic import path_of, write_whole
from edge_opt.base.errors import UsageError, did_you_mean, unknown
from edge_opt.ir import DType, Operator
from edge_opt.ir.composites import COMPOSITE, composite_name
from edge_opt.ir.refusal import RefusedError, Why
from edge_opt.schema.table import ENUMS
from edge_opt.targets.chips import NAMES, TARGETS, find_chip

Form = Annotated[str, Meta(pattern=f"^({'|'.join(FORM_NAMES)})$")]
Count = Annotated[int, Meta(ge=1)]


class LongContext(TypedDict, total=False):
    """A target's settings for attention that does not fit on the chip."""

    form: Form
    rows_per_tile: Count | None


@dataclass(frozen=True, slots=True)
class Target:
    """Facts about one NPU compiler; unknown facts are omitted, and neither used nor checked.

    Rewrites that need a refused operator are reverted, and `inspect --target` reports refusals.

    Rewriting:
        form: how heads are cut (`as-found`, `split`, `unpack`, `split-above`).
        split_signatures: patterns of the entry points that are worth splitting.
        unsplit_types: types of logits for which splitting gains nothing.
        split_from_head_size: least head size for which splitting helps.
        norm_per_head_from: least head size for cutting above norms, if the form does; smaller heads are cut below.
        rows_per_tile: most query rows of a head in one tile.
        mask_before_join: True if the mask is added to each part of the logits before they are joined.
        norms_round_down: True if integer norms truncate; some are then negated, so that the errors cancel.
        mask_constant: lowest value of an additive mask, within float16's range; it changes rows masked everywhere.
        inline_composites: open every composite, not only attention.
        on_chip_bytes: the NPU's on-chip memory, which should hold one head's logits.
        long_context: `form` and `rows_per_tile` for attention that does not fit.

    Refusals:
        refused_operators: names of operators that it refuses.
        accepted_operators: all operators that it accepts, except composites; any other is refused.
        accepted_composites: names of composites that it accepts even if `composites` is False.
        largest_joined_rows_bytes: most bytes of rows joined by a CONCATENATION that an ADD computes correctly.
        open_length: the length that it compiles open lengths as, without a warning.
        most_operators: most operators of a signature that it compiles.
        transposed_caches: chips on which it crashes if the positions of caches come before the heads.
        language_model_chips: the chips that are known to run language models.
        int64, floats, dynamic_shapes, composites: False if it refuses such tensors, dimensions or operators.
        signatures: False if it reads only subgraph 0.
        external_weights: False if it reads only weights inside the flatbuffer; they are written there, under 2 GB.
        new_operator_codes: False if it reads an operator's kind from `deprecated_builtin_code`; it is written there.

    Compiling:
        compiler: vendor of the compiler that edge-opt runs for it: `qualcomm`, `mediatek`.
        chip: the chip that it was loaded for, by the compiler's name.

    Origin:
        sources: the source of each fact.
        versions: the tools that it was measured with.
    """

    name: str
    summary: str
    form: Form = AS_FOUND
    split_signatures: tuple[str, ...] = ("*",)
    unsplit_types: tuple[str, ...] = ()
    split_from_head_size: Count | None = None
    norm_per_head_from: Count | None = None
    rows_per_tile: Count | None = None
    mask_before_join: bool = False
    norms_round_down: bool = False
    mask_constant: Annotated[float, Meta(lt=0, gt=-3.4e38)] | None = None
    inline_composites: bool = False
    on_chip_bytes: Count | None = None
    long_context: LongContext = field(default_factory=LongContext)
    refused_operators: tuple[str, ...] = ()
    accepted_operators: tuple[str, ...] = ()
    accepted_composites: tuple[str, ...] = ()
    largest_joined_rows_bytes: Count | None = None
    open_length: Count | None = None
    most_operators: Count | None = None
    transposed_caches: tuple[str, ...] = ()
    language_model_chips: tuple[str, ...] = ()
    int64: bool | None = None
    floats: bool | None = None
    dynamic_shapes: bool | None = None
    composites: bool | None = None
    signatures: bool | None = None
    external_weights: bool | None = None
    new_operator_codes: bool | None = None
    compiler: str | None = None
    chip: str | None = None
    sources: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    def splits(self, signature: str) -> bool:
        """True if the target gains from splitting this entry point."""
        name = signature.rsplit("/", 1)[-1]
        return any(fnmatchcase(name, pattern) for pattern in self.split_signatures)

    def no_gain(self, signature: str, match: Block) -> str:
        """The property of this attention that makes splitting it useless for the target; empty if it is useful."""
        if not self.splits(signature):
            return "this signature"
        logits = match.softmax.outputs[0].dtype.name
        if logits in self.unsplit_types:
            return f"attention in {logits}"
        small = match.head_size < (self.split_from_head_size or 0)
        return f"heads of size {match.head_size}" if small else ""

    def overflows(self, match: Block) -> bool:
        """True if the logits of one head need more memory than is on the chip."""
        return self.on_chip_bytes is not None and logits_bytes(match) > self.on_chip_bytes

    def for_attention(self, match: Block) -> Target:
        """The target for this attention: with `long_context`'s settings if it does not fit on the chip."""
        return replace(self, **self.long_context) if self.overflows(match) else self

    def to_dict(self) -> dict[str, Any]:
        """All known facts, as JSON values."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def stated(self) -> dict[str, Any]:
        """Facts that differ from those of an empty target."""
        blank = Target("", "").to_dict()
        return {name: value for name, value in self.to_dict().items() if value != blank.get(name)}

    def refuses(self, operator: Operator) -> bool:
        """True if the target is known to refuse operators of this kind."""
        if operator.name == COMPOSITE:
            is_accepted = composite_name(operator) in self.accepted_composites
            return self.composites is False and not is_accepted
        if self.accepted_operators and operator.name not in self.accepted_operators:
            return True
        return operator.name in self.refused_operators

    def check(self, operators: Iterable[Operator], instead_of: Iterable[Operator] = ()) -> None:
        """Check that the target accepts these operators, unless it refuses `instead_of` as well.

        Raises:
            RefusedError: it accepts only those in `instead_of`.
        """
        refused = next(filter(self.refuses, operators), None)
        if refused is not None and not any(map(self.refuses, instead_of)):
            raise RefusedError(Why.TARGET, f"target '{self.name}' refuses {refused.name}")


def target_names() -> list[str]:
    """Names of the bundled targets."""
    files = [Path(entry.name) for entry in resources.files(__package__).iterdir()]
    return sorted(file.stem for file in files if file.suffix == ".toml" and file.stem != "chips")


TargetLike = str | os.PathLike[str] | Target
GENERIC = "generic"


def load_target(name: TargetLike | None) -> Target:
    """Load a bundled target by its name or a chip's, or a user's by its path; a `Target` is returned, None is generic.

    Raises:
        UsageError: there is no such target, or its file has unknown facts or values of another type.
    """
    if isinstance(name, Target):
        return name
    name = GENERIC if name is None else str(path_of(name, "a target"))
    found = find_chip(name)
    if found is not None:
        return replace(load_target(TARGETS[found.vendor]), chip=found.chip)
    if name not in target_names() and not name.endswith(".toml"):
        known = [*target_names(), "a chip, such as SM8750", "a .toml file"]
        raise unknown("target", name, known, also=NAMES)
    path = Path(name) if name.endswith(".toml") else resources.files(__package__) / f"{name}.toml"
    try:
        return _parse(path.read_text(encoding="utf-8"), name)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"target file {name} cannot be read: {reason}") from error


def _parse(text: str, source: str) -> Target:
    try:
        data: dict[str, Any] = tomllib.loads(text)
        target = msgspec.convert(data, Target)
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"target file {source} is not valid TOML: {error}") from error
    except msgspec.ValidationError as error:
        raise UsageError(f"target file {source}: {error}") from error
    wrong = _unknown_name(data)
    if wrong:
        raise UsageError(f"target file {source}: {wrong}")
    return target


def _unknown_name(data: Mapping[str, Any]) -> str:
    """The first fact, operator or type in a target file that does not exist; empty if all do."""
    facts = [entry.name for entry in fields(Target)]
    for key in data:
        if key not in facts:
            return f"'{key}' is unknown, {did_you_mean(key, facts)}"
    for key in sorted(data.get("long_context", {}).keys() - LongContext.__annotations__.keys()):
        return f"'{key}' in 'long_context' is unknown"
    operators = ENUMS["BuiltinOperator"]
    for key, what, known in (
        ("refused_operators", "operator", operators),
        ("accepted_operators", "operator", operators),
        ("unsplit_types", "type", DType.__members__),
    ):
        for name in data.get(key, ()):
            if name not in known:
                return f"'{name}' in '{key}' is not a TFLite {what}, {did_you_mean(name, known)}"
    return ""


def write_target(target: Target, path: str | os.PathLike[str], *, overwrite: bool = False) -> None:
    """Write a target file.

    Raises:
        UsageError: its name does not end in .toml, or it exists and `overwrite` is False.
        OutputError: it cannot be written.
    """
    if not os.fspath(path).endswith(".toml"):
        raise UsageError(f"{os.fspath(path)} cannot be a target file: its name must end in .toml")
    write_whole(path, to_toml(target).encode(), overwrite=overwrite)


def to_toml(target: Target) -> str:
    """The text of the target's file; facts with default values are omitted."""
    lines: list[str] = []
    tables: list[str] = []
    for name, value in {"name": target.name, "summary": target.summary, **target.stated()}.items():
        if not isinstance(value, dict):
            lines.append(f"{name} = {_value(value)}")
            continue
        tables += ["", f"[{name}]"]
        tables += (f"{_value(key)} = {_value(one)}" for key, one in value.items())
    return "\n".join([*lines, *tables]) + "\n"


def _value(value: object) -> str:
    """A TOML value: as in JSON, except for one control character."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
