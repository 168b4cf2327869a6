"""The main job: read a model, run the passes signature by signature, prove each rewrite, write the result."""

from __future__ import annotations

import difflib
import os
import time
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, TypedDict, Unpack, get_args, overload

from edge_opt.attention.form import FORM_NAMES
from edge_opt.container import Container, Part, Sections, SingleModel, open_container
from edge_opt.exported import Exported, ExportedModel, model_content, remade
from edge_opt.ir import Constants, Model
from edge_opt.ir.cleanup import Usage, keep_signature, name_apart, remove_unused
from edge_opt.ir.collector import rare_collections
from edge_opt.ir.runtime import raise_runtime_version
from edge_opt.passes import PASSES, Context, MaskedRows, Pass, SiteReport, Status, run_pass
from edge_opt.passes.inline_composites import InlineComposites
from edge_opt.passes.left import attention_left
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.passes.tile_rows import TileRows
from edge_opt.report.strict_json import strict
from edge_opt.schema.atomic import resolve_target
from edge_opt.schema.errors import EdgeOptError, UsageError
from edge_opt.targets import Target, load_target
from edge_opt.verdicts import verdicts
from edge_opt.verify.regions import RegionProver

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from edge_opt.ir import Subgraph
    from edge_opt.verify.whole import WholeSignature

    Progress = Callable[[str, int, int], None]

Verify = Literal["regions", "exhaustive", "full", "none"]
GENERIC: Final = "generic"


class RequirementError(EdgeOptError):
    """The model does not fulfil what was asked for; `result` says what was found, nothing was written."""

    def __init__(self, message: str, result: ConversionResult) -> None:
        super().__init__(message)
        self.result = result


class NothingMatchedError(RequirementError):
    """`require_match` was asked for, and no site matched."""

    exit_code = 4


class SitesLeftError(RequirementError):
    """`require_all` was asked for, and a site could not be converted."""

    exit_code = 1


class DifferenceFoundError(EdgeOptError):
    """Comparing the whole models found a difference."""

    exit_code = 1


@dataclass(slots=True)
class SignatureSummary:
    """One entry point before and after; bytes are those of its largest intermediate tensor."""

    name: str
    operators_before: int
    operators_after: int = 0
    largest_tensor_before: int = 0
    largest_tensor_after: int = 0
    blocks: int = 0
    converted: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "name": self.name,
            "operators_before": self.operators_before,
            "operators_after": self.operators_after,
            "largest_tensor_bytes_before": self.largest_tensor_before,
            "largest_tensor_bytes_after": self.largest_tensor_after,
        }


@dataclass(slots=True, repr=False)
class ConversionResult:
    """What was done: every site with its verdict, and where the model went (None for a dry run).

    `whole` has what comparing the whole models demanded and found, signature by signature, for `verify="full"`.
    `compile_with`: the target's compiler and the command with those `compiler_flags` that suit this model; None where
    its own defaults do.
    """

    input: str | None
    output: str | None
    target: str
    verified: str
    signatures: list[SignatureSummary] = field(default_factory=list)
    sites: list[SiteReport] = field(default_factory=list)
    compiler_flags: list[str] = field(default_factory=list)
    compile_with: str | None = None
    seconds: float = 0.0
    model: Model | None = field(default=None, repr=False)
    whole: list[WholeSignature] = field(default_factory=list)

    def __repr__(self) -> str:
        done = f"{len(self.converted)} of {len(self.sites)} sites converted"
        return f"ConversionResult({self.input!r} -> {self.output!r}, target {self.target!r}, {done})"

    @property
    def converted(self) -> list[SiteReport]:
        """Sites that were rewritten."""
        return [site for site in self.sites if site.status is Status.CONVERTED]

    @property
    def masked_rows(self) -> MaskedRows | None:
        """What changes in rows that are masked everywhere; None where nothing was found to."""
        return MaskedRows.of(self.sites)

    def summary(self) -> str:
        """What became of the sites, in sentences, as the command line prints it."""
        return "\n".join(verdicts(self))

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports; a figure that is not a finite number is None."""
        values = {
            "input": self.input,
            "output": self.output,
            "target": self.target,
            "seconds": round(self.seconds, 3),
            "signatures": [summary.to_dict() for summary in self.signatures],
            "sites": [site.to_dict() for site in self.sites],
            "verified": self.verified,
            "masked_rows": None if self.masked_rows is None else self.masked_rows.to_dict(),
            "compiler_flags": self.compiler_flags,
            "compile_with": self.compile_with,
            "whole": [signature.to_dict() for signature in self.whole],
        }
        found: dict[str, Any] = strict(values)
        return found


class ConvertOptions(TypedDict, total=False):
    """The options of `convert`, as its documentation has them."""

    target: str | Target | None
    passes: str | Pass | Iterable[str | Pass] | None
    skip: str | Iterable[str]
    signatures: str | Iterable[str] | None
    verify: Verify
    proof_seconds: float | None
    overwrite: bool
    dry_run: bool
    require_match: bool
    require_all: bool
    sections: Sections
    form: str | None
    rows_per_tile: int | None
    inline_composites: bool
    extract_signature: str | None
    progress: Progress | None


@overload
def convert(
    source: str | os.PathLike[str] | bytes | Model,
    output: str | os.PathLike[str] | None = None,
    **options: Unpack[ConvertOptions],
) -> ConversionResult: ...


@overload
def convert(
    source: Exported, output: str | os.PathLike[str] | None = None, **options: Unpack[ConvertOptions]
) -> Exported: ...


def convert(
    source: str | os.PathLike[str] | bytes | Model | ExportedModel,
    output: str | os.PathLike[str] | None = None,
    *,
    target: str | Target | None = None,
    passes: str | Pass | Iterable[str | Pass] | None = None,
    skip: str | Iterable[str] = (),
    signatures: str | Iterable[str] | None = None,
    verify: Verify = "regions",
    proof_seconds: float | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    require_match: bool = False,
    require_all: bool = False,
    sections: Sections = "prefill-decode",
    form: str | None = None,
    rows_per_tile: int | None = None,
    inline_composites: bool = False,
    extract_signature: str | None = None,
    progress: Progress | None = None,
) -> ConversionResult | ExportedModel:
    """Rewrite a model for an NPU, prove every rewrite, and write it.

    Args:
        source: a .tflite file, its bytes, a .litertlm or .task bundle, a loaded `Model` (which is edited in place,
            unless `dry_run`), or what `litert_torch.convert` returns; then the result is of that kind too.
        output: where to write; beside the input as `<stem>.opt<suffix>` where None and the source is a file.
        target: a bundled target's name, the path of a target file, or a `Target`; "generic" where None.
        passes: what to run, all that are on for the target where None: names of `edge_opt.passes.PASSES`, which run in
            that order, and `Pass` objects of your own, which run after them. One alone needs no list.
        skip: names of passes to leave out.
        signatures: names of the entry points to rewrite, all where None.
        verify: "regions" proves each rewritten region, "exhaustive" does so on every row and both kernel sets, "full"
            proves and also compares the whole models, "none" neither.
        proof_seconds: how long one run of a region may take; by default that follows from its size.
        overwrite: replace an existing output.
        dry_run: do everything but write, and leave a `Model` as it is: what it would become is the result's `model`.
        require_match: raise `NothingMatchedError` where no site was converted.
        require_all: raise `SitesLeftError` where a multi-head block was left as it is.
        form: how heads are cut, a word of target files; the target decides where None.
        rows_per_tile: cut every head further, into blocks of at most so many query rows; the target decides where None.
        inline_composites: open every composite (each proved against its body), for compilers that cannot.
        extract_signature: write this entry point only, as subgraph 0, for readers that look at no other.
        sections: of a bundle, rewrite the prefill/decode model only, or "all" of its models.
        progress: called with (stage, done, total) on long work.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: an unknown name, options that have no effect together, an output that is the input or exists.
        OutputError: the output cannot be written.
        DifferenceFoundError: `verify="full"` found a difference; nothing was written.
        RuntimeUnavailable: the runtime does not start here, so nothing can be proved; nothing was written.
    """
    started = time.perf_counter()
    exported = None
    if not isinstance(source, str | os.PathLike | bytes | Model):
        exported, source = source, model_content(source)
    _check_verify(verify, source)
    if proof_seconds is not None and not proof_seconds > 0:
        raise UsageError(f"the seconds of a proof must be more than 0, not {proof_seconds:g}")
    chosen = _choose_passes(passes, skip)
    facts = target if isinstance(target, Target) else load_target(target or GENERIC)
    facts = _asked(facts, chosen, form, rows_per_tile, inline_composites=inline_composites)
    if dry_run and isinstance(source, Model):
        source = deepcopy(source)
    with ExitStack() as stack:
        stack.enter_context(rare_collections())
        proving = stack.enter_context(ExitStack())
        # Started first: the runtime's import overlaps with reading the model.
        prover = (
            None
            if verify == "none"
            else proving.enter_context(
                RegionProver(
                    model=_path(source) or "", time_limit=proof_seconds, exhaustive=verify == "exhaustive"
                )
            )
        )
        if prover is not None:
            prover.start()
        container = open_container(source, sections)
        destination = None if dry_run else _destination(source, output, overwrite=overwrite)
        model = container.parts[0].model
        result = ConversionResult(_path(source), None, facts.name, verify, model=model)
        if extract_signature is not None:
            _extract(container, extract_signature)
        for part in container.parts:
            _rewrite(part, chosen, facts, signatures, prover, result, progress)
        proving.close()  # writing needs memory too
        result.compiler_flags = facts.flags()
        name = "MODEL" if destination is None else str(destination)
        result.compile_with = facts.compile_command(name, result.compiler_flags)
        _check_requirements(result, require_match=require_match, require_all=require_all)
        kept = None if extract_signature is None else [extract_signature]
        check = partial(_compare_whole, container, result, kept, progress) if verify == "full" else None
        if destination is not None:
            _write(container, destination, check, overwrite=overwrite, progress=progress)
            result.output = str(destination)
        elif check is not None:
            check(None)
    result.seconds = time.perf_counter() - started
    return result if exported is None else remade(exported, model)


def _path(source: str | os.PathLike[str] | bytes | Model) -> str | None:
    return None if isinstance(source, Model | bytes) else os.fspath(source)


def _asked(
    facts: Target,
    passes: list[Pass],
    form: str | None,
    rows_per_tile: int | None,
    *,
    inline_composites: bool,
) -> Target:
    """The target's facts, with what the caller wants otherwise."""
    if form is not None and form not in FORM_NAMES:
        raise _unknown("form", form, FORM_NAMES)
    if rows_per_tile is not None and rows_per_tile < 1:
        raise UsageError(f"rows per tile must be 1 or more, not {rows_per_tile}")
    names = {entry.name for entry in passes}
    for option, given, needed in (
        ("--rows-per-tile", rows_per_tile is not None, TileRows.name),
        ("--form", form is not None, MhaToSha.name),
        ("--inline-composites", inline_composites, InlineComposites.name),
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


def _destination(
    source: str | os.PathLike[str] | bytes | Model, output: str | os.PathLike[str] | None, *, overwrite: bool
) -> Path | None:
    if output is None:
        if isinstance(source, Model | bytes):
            return None
        output = default_output(source)
    inputs: tuple[tuple[int, int], ...] = ()
    if not isinstance(source, Model | bytes):
        status = Path(source).stat()
        inputs = ((status.st_dev, status.st_ino),)
    # Looked at before the work: nobody wants to learn of an existing output after an hour.
    resolve_target(output, overwrite=overwrite, inputs=inputs)
    return Path(output)


def _check_verify(verify: str, source: object) -> None:
    if verify not in get_args(Verify):
        raise _unknown("verification", verify, get_args(Verify))
    if verify == "full" and isinstance(source, Model):
        raise UsageError("verify='full' compares with the source file: give a path or bytes, not a Model")


def _unknown(kind: str, name: str, known: Iterable[str]) -> UsageError:
    names = list(known)
    close = difflib.get_close_matches(name, names, 1)
    hint = f"did you mean '{close[0]}'?" if close else f"there are: {', '.join(names) or 'none'}"
    return UsageError(f"{kind} '{name}' does not exist, {hint}")


def _choose_passes(passes: str | Pass | Iterable[str | Pass] | None, skip: str | Iterable[str]) -> list[Pass]:
    skipped = _listed(skip)
    asked = list(PASSES) if passes is None else _listed(passes)
    own = [entry for entry in asked if isinstance(entry, Pass)]
    wanted = [entry for entry in asked if not isinstance(entry, Pass)]
    known = [*PASSES, *(entry.name for entry in own)]
    for name in (*wanted, *skipped):
        if name not in known:
            raise _unknown("pass", name, known)
    chosen = [*(PASSES[name] for name in PASSES if name in wanted), *own]
    names = [entry.name for entry in chosen]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise UsageError(f"there are two passes '{twice}': give one of them another name")
    return [entry for entry in chosen if entry.name not in skipped]


def _listed(names: str | Pass | Iterable[Any]) -> list[Any]:
    """One alone is a list of one, not of a name's letters."""
    return [names] if isinstance(names, str | Pass) else list(names)


def _choose_signatures(model: Model, wanted: str | Iterable[str] | None) -> list[tuple[str, Subgraph]]:
    entries = model.entry_points()
    if wanted is None:
        return entries
    names = _listed(wanted)
    known = [name for name, _ in entries]
    for name in names:
        if name not in known:
            raise _unknown("signature", name, known)
    return [(name, subgraph) for name, subgraph in entries if name in names]


def _extract(container: Container, key: str) -> None:
    known = [signature.key for part in container.parts for signature in part.model.signatures]
    if key not in known:
        raise _unknown("signature", key, known)
    if not isinstance(container, SingleModel):
        raise UsageError("a bundle needs all signatures of its models: extract from the .tflite file instead")
    keep_signature(container.parts[0].model, key)


def _rewrite(
    part: Part,
    passes: list[Pass],
    target: Target,
    wanted: str | Iterable[str] | None,
    prover: RegionProver | None,
    result: ConversionResult,
    progress: Progress | None,
) -> None:
    model = part.model
    entries = _choose_signatures(model, wanted)
    usage = Usage.of(model)
    old = [tensor for graph in model.subgraphs for tensor in graph.tensors]
    graphs = {id(graph) for _, graph in entries}
    summaries = [
        (
            graph,
            SignatureSummary(
                part.signature(name), len(graph), largest_tensor_before=largest_intermediate(graph)
            ),
        )
        for name, graph in model.entry_points()
    ]
    result.signatures.extend(summary for _, summary in summaries)
    done = len(result.sites)
    # An estimate: most sites stand at a SOFTMAX, and most passes have none in a given model.
    total = done + sum(_softmaxes(graph) for _, graph in entries)

    def on_site(report: SiteReport) -> None:
        result.sites.append(report)
        if progress is not None:
            progress("rewriting", len(result.sites), max(total, len(result.sites)))

    for name, graph in entries:
        if id(graph) not in graphs:
            continue
        graphs.discard(id(graph))
        context = Context(model, graph, part.signature(name), target, Constants(model), prover, on_site)
        before = len(result.sites)
        for chosen_pass in passes:
            run_pass(chosen_pass, context)
        own, split = result.sites[before:], PASSES[MhaToSha.name] in passes
        for site in attention_left(model, graph, context.signature, own, split=split):
            on_site(site)
    own = result.sites[done:]
    if any(site.status is Status.CONVERTED for site in own):
        raise_runtime_version(model)
        remove_unused(model, usage)
        name_apart(model, old)
        part.changed = True
    for graph, summary in summaries:
        summary.operators_after = len(graph)
        summary.largest_tensor_after = largest_intermediate(graph)
        sites = [site for site in own if site.signature == summary.name]
        summary.blocks = sum((site.heads or 0) > 1 for site in sites)
        summary.converted = sum(site.status is Status.CONVERTED and (site.heads or 0) > 1 for site in sites)


def _softmaxes(graph: Subgraph) -> int:
    return sum(operator.name == "SOFTMAX" for operator in graph.operators)


def largest_intermediate(graph: Subgraph) -> int:
    """Bytes of the largest tensor that an operator of the subgraph defines."""
    sizes = (
        tensor.dtype.byte_size(tensor.elements) or 0
        for operator in graph.operators
        for tensor in operator.outputs
    )
    return max(sizes, default=0)


def _check_requirements(result: ConversionResult, *, require_match: bool, require_all: bool) -> None:
    if require_match and not result.converted:
        raise NothingMatchedError(
            "no attention block was converted and --require-match asks for one: nothing was written; "
            "run `edge-opt explain` to see why each block was left",
            result,
        )
    left = [site for site in result.sites if site.status is not Status.CONVERTED and not site.settled]
    if require_all and left:
        first = left[0]
        raise SitesLeftError(
            f"{len(left)} of {len(result.sites)} sites were not converted and --require-all asks for all: nothing "
            f"was written; the first is {first.pass_name} site {first.index} of '{first.signature}': {first.reason}",
            result,
        )


def _write(
    container: Container,
    destination: Path,
    check: Callable[[Path], None] | None,
    *,
    overwrite: bool,
    progress: Progress | None,
) -> None:
    def on_bytes(done: int, total: int) -> None:
        if progress is not None:
            progress("writing", done, total)

    container.save(destination, overwrite=overwrite, progress=on_bytes, check=check)


def _compare_whole(
    container: Container,
    result: ConversionResult,
    signatures: list[str] | None,
    progress: Progress | None,
    written: Path | None,
) -> None:
    """The models as they were with those written, or (a dry run) with those in memory."""
    from edge_opt.verify.whole import allowances, compare_whole  # noqa: PLC0415  only this path needs it

    for part, (before, after) in zip(container.parts, container.pairs(written), strict=True):
        names = {name: part.signature(name) for name, _ in part.model.entry_points()}
        sites = {name: [s for s in result.sites if s.signature == told] for name, told in names.items()}
        allowed = allowances(part.model, sites)
        found = compare_whole(before, after, allowed, signatures=signatures, progress=progress)
        result.whole += [replace(signature, name=part.signature(signature.name)) for signature in found]
    failed = next((signature for signature in result.whole if not signature.holds), None)
    if failed is not None:
        raise DifferenceFoundError(
            f"the converted model differs from the input: {failed.violation()}{_known(result, failed.name)}; "
            "nothing was written"
        )


def _known(result: ConversionResult, signature: str) -> str:
    """What the proofs of a signature's sites told that a whole comparison may show."""
    sites = [site for site in result.converted if site.signature == signature]
    known = [(str(rows), site) for site in sites if (rows := MaskedRows.of([site])) is not None]
    known += [(site.note, site) for site in sites if site.note]
    if not known:
        return ""
    text, site = known[0]
    return f" (known of {site.pass_name}: {text}; --skip {site.pass_name} leaves that as it was)"
