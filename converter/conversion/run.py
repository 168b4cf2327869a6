"""The main job: read a model, rewrite it, prove each rewrite, write the result."""

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Unpack, overload

from edge_opt.comparison.compare import compare
from edge_opt.comparison.whole import WholeSignature, allowances
from edge_opt.conversion.choices import (
    GENERIC,
    ConvertOptions,
    Progress,
    Verify,
    asked,
    check_verify,
    choose_passes,
    choose_shapes,
    choose_signatures,
    destination_of,
    path_of,
)
from edge_opt.conversion.container import (
    Container,
    Exported,
    ExportedModel,
    Part,
    Sections,
    find_stopped,
    find_unsound,
    model_content,
    open_container,
    remade,
)
from edge_opt.conversion.fixed_shapes import fix_shapes
from edge_opt.conversion.result import (
    ConversionResult,
    DifferenceFoundError,
    SignatureSummary,
    check_requirements,
    check_soundness,
)
from edge_opt.ir import Constants, Model, Subgraph
from edge_opt.ir.cleanup import Usage, keep_signature, name_apart, raise_runtime_version, remove_unused
from edge_opt.ir.compiled import check_not_compiled
from edge_opt.ir.layout import fill_old_codes, take_weights_inside
from edge_opt.ir.model import restored_on_failure
from edge_opt.ir.read import rare_collections
from edge_opt.output.errors import EdgeOptError, UsageError, unknown
from edge_opt.passes import PASSES, Context, MaskedRows, Pass, SiteReport, Status, run_pass
from edge_opt.passes.left import attention_left, attention_uncalled
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.proof.regions import RegionProver
from edge_opt.proof.source import ModelLike
from edge_opt.shapes.trust import doubted
from edge_opt.targets import Target, load_target

_LONGEST = 1_000_000
"""Seconds of a proof: alarms and time limits of sockets take no number of any size."""


@overload
def convert(
    source: ModelLike, output: str | os.PathLike[str] | None = None, **options: Unpack[ConvertOptions]
) -> ConversionResult: ...


@overload
def convert(
    source: Exported, output: str | os.PathLike[str] | None = None, **options: Unpack[ConvertOptions]
) -> Exported: ...


def convert(
    source: ModelLike | ExportedModel,
    output: str | os.PathLike[str] | None = None,
    *,
    target: str | Target | None = None,
    passes: str | Pass | Iterable[str | Pass] | None = None,
    skip: str | Iterable[str] | None = None,
    signatures: str | Iterable[str] | None = None,
    verify: Verify = "regions",
    proof_seconds: float | None = None,
    overwrite: bool = False,
    dry_run: bool = False,
    require_match: bool = False,
    require_all: bool = False,
    require_sound: bool = False,
    sections: Sections = "prefill-decode",
    form: str | None = None,
    rows_per_tile: int | None = None,
    inline_composites: bool = False,
    extract_signature: str | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    progress: Progress | None = None,
    on_result: Callable[[ConversionResult], None] | None = None,
) -> ConversionResult | ExportedModel:
    """Rewrite a model for an NPU, prove every rewrite, and write it.

    Args:
        source: a .tflite file, its bytes, a .litertlm or .task bundle, a loaded `Model` (which is edited in place,
            unless `dry_run`, and stays as it was where an error is raised), or what `litert_torch.convert` returns;
            then a model of that kind comes back, and `on_result` gets the result.
        output: where to write; beside the input as `<stem>.opt<suffix>` where None and the source is a file.
        target: a bundled target's name, the path of a target file, or a `Target`; "generic" where None.
        passes: what to run, all that are on for the target where None: names of `edge_opt.passes.PASSES`, which run in
            that order, and `Pass` objects of your own, which run after them. One alone needs no list.
        skip: names of passes to leave out.
        signatures: names of the entry points to rewrite, all where None; those of a bundle also as `model/name`.
        verify: "regions" proves each rewritten region, "exhaustive" does so on every row and both kernel sets, "full"
            proves and also compares the whole models, "none" neither.
        proof_seconds: how long one run of a region may take; by default that follows from its size.
        overwrite: replace an existing output.
        dry_run: do everything but write, and leave a `Model` as it is: what it would become is the result's `model`.
        require_match: raise `NothingMatchedError` where no site was converted.
        require_all: raise `SitesLeftError` where a multi-head block was left as it is.
        require_sound: raise `UnsoundError` where the model was ruined before it came here.
        form: how heads are cut, a word of target files; the target decides where None.
        rows_per_tile: cut every head further, into blocks of at most so many query rows; the target decides where None.
        inline_composites: open every composite (each proved against its body), for compilers that cannot.
        extract_signature: write this entry point only, as subgraph 0, for readers that look at no other.
        shapes: static shapes for inputs of open lengths, by `NAME` (in each signature with it) or `signature/NAME`.
        sections: of a bundle, rewrite the prefill/decode model only, or "all" of its models.
        progress: called with (stage, done, total) on long work.
        on_result: called with the result when all is done: what was converted, and why the rest was not.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: an unknown name, options that have no effect together, an output that is the input or exists.
        OutputError: the output cannot be written.
        UnsoundError: `require_sound`, and the model's ranges cannot be those of real inputs; nothing was written.
        DifferenceFoundError: `verify="full"` found a difference; nothing was written.
        RuntimeUnavailable: the runtime does not start here, so nothing can be proved; nothing was written.
    """
    started = time.perf_counter()
    exported = None
    if not isinstance(source, str | os.PathLike | bytes | Model):
        exported, source = source, model_content(source)
    check_verify(verify, source)
    if proof_seconds is not None and not 0 < proof_seconds <= _LONGEST:
        raise UsageError(
            f"the seconds of a proof must be more than 0 and at most {_LONGEST:,}, not {proof_seconds:g}"
        )
    chosen = choose_passes(passes, skip)
    facts = asked(
        load_target(target or GENERIC), chosen, form, rows_per_tile, inline_composites=inline_composites
    )
    if dry_run and isinstance(source, Model):
        source = deepcopy(source)
    with ExitStack() as stack:
        stack.enter_context(rare_collections())
        stack.enter_context(restored_on_failure(source))
        proving = stack.enter_context(ExitStack())
        prover = None
        if verify != "none":
            name, exhaustive = path_of(source) or "", verify == "exhaustive"
            prover = proving.enter_context(
                RegionProver(model=name, time_limit=proof_seconds, exhaustive=exhaustive)
            )
            prover.start()  # first: the runtime's import overlaps with reading the model
        container = open_container(source, sections)
        check_not_compiled(container.parts[0].model, path_of(source))
        destination = (
            None if dry_run else destination_of(source, output, container.suffix, overwrite=overwrite)
        )
        model = container.parts[0].model
        result = ConversionResult(path_of(source), None, facts.name, verify, model=model)
        stack.enter_context(_carrying(result))
        result.soundness = find_unsound(container)
        check_soundness(result, require_sound=require_sound)
        if extract_signature is not None:
            _extract(container, extract_signature)
        _fix(container, shapes or {})
        wanted = choose_signatures(container, signatures)
        for part in container.parts:
            _rewrite(part, chosen, facts, wanted, prover, result, progress, container.positions)
        proving.close()  # writing needs memory too
        result.soundness += find_stopped(container)
        check_soundness(result, require_sound=require_sound)
        result.compiler_flags = facts.flags()
        result.compile_with = facts.compile_command(str(destination or "MODEL"), result.compiler_flags)
        _lay_out(container, facts)
        check_requirements(result, require_match=require_match, require_all=require_all)
        check = (
            partial(_compare_whole, container, result, extract_signature, progress)
            if verify == "full"
            else None
        )
        if destination is not None:
            on_bytes = None if progress is None else partial(progress, "writing")
            container.save(destination, overwrite=overwrite, progress=on_bytes, check=check)
            result.output = str(destination)
        elif check is not None:
            check(None)
    result.seconds = time.perf_counter() - started
    (on_result or (lambda _: None))(result)
    return result if exported is None else remade(exported, model)


@contextmanager
def _carrying(result: ConversionResult) -> Iterator[None]:
    """Within the block, what ends the conversion carries the result as far as it is known."""
    try:
        yield
    except (EdgeOptError, KeyboardInterrupt) as error:
        result.failure = str(error) or "interrupted"
        error.result = result  # type: ignore[union-attr]
        raise


def _lay_out(container: Container, facts: Target) -> None:
    """Weights and the kinds of operators where the target reads them."""
    for part in container.parts:
        part.changed |= facts.external_weights is False and take_weights_inside(part.model)
        part.changed |= facts.new_operator_codes is False and fill_old_codes(part.model)


def _extract(container: Container, key: str) -> None:
    known = [signature.key for part in container.parts for signature in part.model.signatures]
    if key not in known:
        raise unknown("signature", key, known)
    if container.bundle is not None:
        raise UsageError("a bundle needs all signatures of its models: extract from the .tflite file instead")
    keep_signature(container.parts[0].model, key)


def _fix(container: Container, shapes: Mapping[str, Sequence[int]]) -> None:
    for part, given in zip(container.parts, choose_shapes(container, shapes), strict=True):
        if given:
            fix_shapes(part.model, given)
            part.changed = True


def _rewrite(
    part: Part,
    passes: list[Pass],
    target: Target,
    wanted: frozenset[str],
    prover: RegionProver | None,
    result: ConversionResult,
    progress: Progress | None,
    positions: int | None,
) -> None:
    """Run the passes on the wanted entry points of one model, and add what they did to the result."""
    model = part.model
    passes = part.taking_part(passes)
    entries = [entry for entry in model.entry_points() if part.signature(entry[0]) in wanted]
    first = {id(graph): name for name, graph in reversed(entries)}
    usage = Usage.of(model)
    old = [tensor for graph in model.subgraphs for tensor in graph.tensors]
    before = [(name, graph, len(graph), _largest_tensor(graph)) for name, graph in model.entry_points()]
    done = len(result.sites)
    # An estimate: most sites stand at a SOFTMAX, and most passes have none in a given model.
    total = done + sum(one.name == "SOFTMAX" for _, graph in entries for one in graph.operators)

    def on_site(report: SiteReport) -> None:
        result.sites.append(report)
        if progress is not None:
            progress("rewriting", len(result.sites), max(total, len(result.sites)))

    split = PASSES[MhaToSha.name] in passes
    with doubted(model.subgraphs):
        for name, graph in entries:
            if first[id(graph)] != name:
                continue
            context = Context(model, graph, part.signature(name), target, Constants(model), prover, on_site)
            context.positions = positions
            reported = len(result.sites)
            for chosen_pass in passes:
                run_pass(chosen_pass, context)
            own = result.sites[reported:]
            for site in attention_left(model, graph, context.signature, own, split=split):
                on_site(site)
        for site in attention_uncalled(model):
            on_site(site)
    own = result.sites[done:]
    if any(site.status is Status.CONVERTED for site in own):
        raise_runtime_version(model)
        remove_unused(model, usage)
        name_apart(model, old)
        part.changed = True
    result.signatures += _summaries(part, first, before, own)


def _summaries(
    part: Part,
    first: Mapping[int, str],
    before: Sequence[tuple[str, Subgraph, int, int]],
    own: Sequence[SiteReport],
) -> Iterator[SignatureSummary]:
    """Each entry point before and after; of a helper those with sites only."""
    with_sites = {site.signature for site in own}
    for name, graph, operators, largest in before:
        told = part.signature(first.get(id(graph), name))
        if part.is_helper and told not in with_sites:
            continue
        blocks = [s for s in own if s.signature == told and (s.heads or 0) > 1]
        converted = sum(site.status is Status.CONVERTED for site in blocks)
        sizes = (operators, len(graph), largest, _largest_tensor(graph), len(blocks), converted)
        shared = (
            part.signature(other)
            for other, its in part.model.entry_points()
            if its is graph and other != name
        )
        yield SignatureSummary(part.signature(name), *sizes, tuple(shared))


def _largest_tensor(graph: Subgraph) -> int:
    """Bytes of the largest tensor that an operator of the subgraph defines."""
    tensors = (tensor for operator in graph.operators for tensor in operator.outputs)
    return max((tensor.dtype.byte_size(tensor.elements) or 0 for tensor in tensors), default=0)


def _compare_whole(
    container: Container,
    result: ConversionResult,
    extracted: str | None,
    progress: Progress | None,
    written: Path | None,
) -> None:
    """Compare the models as they were with those written or, in a dry run, with those in memory."""
    signatures = None if extracted is None else [extracted]
    for part, (before, after) in zip(container.parts, container.pairs(written), strict=True):
        if part.is_helper:
            continue
        names = {name: part.signature(name) for name, _ in part.model.entry_points()}
        sites = {name: [s for s in result.sites if s.signature == told] for name, told in names.items()}
        allowed = allowances(part.model, sites)
        # What was held to a reference of its own is meant to differ, and was run at every value of its input.
        kept = [name for name in signatures or names if not any(map(_has_reference, sites[name]))]
        if not kept:
            continue
        wanted = signatures if len(kept) == len(names) else kept
        report = compare(before, after, signatures=wanted, locate=False, progress=progress)
        for found in report.signatures:
            # A model without signatures is compared as `main`, whatever its subgraph is called.
            name = found.name if part.model.signatures else next(iter(allowed))
            result.whole.append(WholeSignature(part.signature(name), allowed[name], found))
    failed = next((signature for signature in result.whole if not signature.holds), None)
    if failed is not None:
        raise DifferenceFoundError(
            f"the converted model differs from the input: {failed.violation()}{_known(result, failed.name)}; "
            "nothing was written"
        )


def _has_reference(site: SiteReport) -> bool:
    """Whether a converted site was not held to what the model gave before."""
    return site.status is Status.CONVERTED and site.proof is not None and site.proof.demand.kind == "absolute"


def _known(result: ConversionResult, signature: str) -> str:
    """What the proofs of a signature's sites said that may explain a difference between the whole models."""
    sites = [site for site in result.converted if site.signature == signature]
    known = [(str(rows), site) for site in sites if (rows := MaskedRows.of([site])) is not None]
    known += [(site.note, site) for site in sites if site.note]
    if not known:
        return ""
    text, site = known[0]
    return f" (known of {site.pass_name}: {text}; skip='{site.pass_name}' leaves that as it was)"
