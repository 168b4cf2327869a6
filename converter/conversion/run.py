"""The main job: read a model, rewrite it, prove each rewrite, write the result."""

import inspect
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Unpack, overload

from edge_opt.base.errors import EdgeOptError, UsageError, unknown
from edge_opt.comparison.compare import compare
from edge_opt.comparison.whole import WholeSignature, allowances
from edge_opt.conversion import choices
from edge_opt.conversion.choices import ConvertOptions, path_of
from edge_opt.conversion.container import (
    OF_HELPERS,
    Exported,
    choose_parts,
    find_stopped,
    find_unsound,
    fix_inputs,
    positions_in,
    remade,
)
from edge_opt.conversion.result import (
    ConversionResult,
    DifferenceFoundError,
    SignatureSummary,
    check_requirements,
    check_soundness,
)
from edge_opt.ir import Constants, Model, Subgraph, cleanup
from edge_opt.ir.model import restored_on_failure
from edge_opt.ir.opening import (
    ExportedModel,
    Opened,
    Part,
    Readable,
    check_not_compiled,
    rare_collections,
    readable,
)
from edge_opt.passes import PASSES, Context, MaskedRows, Pass, SiteReport, Status, run_pass
from edge_opt.passes.mha_to_sha import MhaToSha, attention_left, attention_uncalled
from edge_opt.proof.regions import RegionProver
from edge_opt.shapes.inference import doubted
from edge_opt.targets import Target


@overload
def convert(
    source: Readable, output: str | os.PathLike[str] | None = None, **options: Unpack[ConvertOptions]
) -> ConversionResult: ...


@overload
def convert(
    source: Exported, output: str | os.PathLike[str] | None = None, **options: Unpack[ConvertOptions]
) -> Exported: ...


def convert(
    source: Readable | ExportedModel,
    output: str | os.PathLike[str] | None = None,
    **options: Unpack[ConvertOptions],
) -> ConversionResult | ExportedModel:
    """Rewrite a model for an NPU, prove every rewrite, and write it.

    Args:
        source: a .tflite file, its bytes, a .litertlm bundle, a loaded `Model` (which is edited in place,
            unless `dry_run`, and stays as it was where an error is raised), or what `litert_torch.convert` returns;
            then a model of that kind comes back, and `on_result` gets the result.
        output: where to write; beside the input as `<stem>.opt<suffix>` where None and the source is a file.
        target: a bundled target's name, the path of a target file, or a `Target`; "generic" where None.
        passes: what to run, all that are on for the target where None: names of `edge_opt.passes.PASSES`, which run in
            that order, and `Pass` objects of your own, which run after them. One alone needs no list.
        skip: names of passes to leave out.
        signatures: names of the entry points to rewrite, all where None; those of a bundle also as `model/name`.
        verify: "regions", the default, proves each rewritten region, "exhaustive" does so on every row and both kernel
            sets, "full" proves and also compares the whole models, "none" neither.
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
        exported: the entry points before they were quantized; tables of rope then have their exact frequencies.
        sections: of a bundle, "prefill-decode" rewrites that model only, the default, and "all" each of its models.
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
    given, source = source, readable(source)
    options = choices.DEFAULTS | options
    choices.check_options(options, source)
    passes = choices.choose_passes(options)
    target = choices.choose_target(options, passes)
    dry_run, overwrite = options["dry_run"], options["overwrite"]
    if dry_run and isinstance(source, Model):
        source = deepcopy(source)
    with ExitStack() as stack:
        stack.enter_context(rare_collections())
        stack.enter_context(restored_on_failure(source))
        proving = stack.enter_context(ExitStack())
        prover = _start_prover(proving, options, path_of(source))
        opened = Opened(source)
        parts = choose_parts(opened, options["sections"])
        model = parts[0].model
        check_not_compiled(model, path_of(source))
        destination = (
            None if dry_run else choices.destination_of(source, output, opened.suffix, overwrite=overwrite)
        )
        result = ConversionResult(path_of(source), None, target.name, options["verify"], model=model)
        stack.enter_context(_carrying(result))
        conversion = _Conversion(source, opened, parts, passes, target, options, prover, result)
        conversion.rewrite_models()
        proving.close()  # writing needs memory too
        check_requirements(result, require_match=options["require_match"], require_all=options["require_all"])
        check = conversion.compare_whole if result.verified == "full" else None
        if destination is not None:
            on_progress = options["progress"]
            on_bytes = None if on_progress is None else partial(on_progress, "writing")
            opened.save(destination, overwrite=overwrite, progress=on_bytes, check=check)
            result.output = str(destination)
        elif check is not None:
            check(None)
    result.seconds = time.perf_counter() - started
    if on_result := options["on_result"]:
        on_result(result)
    return remade(given, model) if isinstance(given, ExportedModel) else result


def _signature() -> inspect.Signature:
    """What `help(convert)` shows: every option with its type and default in place of `**options`."""
    written = inspect.signature(convert)
    *positional, options = written.parameters.values()
    by_name = options.KEYWORD_ONLY
    keywords = [
        options.replace(name=name, kind=by_name, default=choices.DEFAULTS.get(name), annotation=kind)
        for name, kind in ConvertOptions.__annotations__.items()
    ]
    return written.replace(parameters=[*positional, *keywords])


convert.__dict__["__signature__"] = _signature()


def _start_prover(stack: ExitStack, options: ConvertOptions, path: str | None) -> RegionProver | None:
    """What proves rewrites until the stack closes; started early, its imports overlap with reading the model."""
    verify = options["verify"]
    if verify == "none":
        return None
    given = options["proof_seconds"]
    seconds = None if given is None else float(given)  # numpy's numbers are none of JSON
    prover = stack.enter_context(RegionProver(model=path or "", time_limit=seconds))
    prover.start()
    return prover


@contextmanager
def _carrying(result: ConversionResult) -> Iterator[None]:
    """Within the block, an error that ends the conversion carries the result as far as it is known."""
    try:
        yield
    except (EdgeOptError, KeyboardInterrupt) as error:
        result.failure = str(error) or "interrupted"
        error.result = result  # type: ignore[union-attr]
        raise


@dataclass(slots=True)
class _Conversion:
    """The models of one conversion, how they are rewritten, and the result that says what was done."""

    source: Readable
    opened: Opened
    parts: list[Part]
    passes: list[Pass]
    target: Target
    options: ConvertOptions
    prover: RegionProver | None
    result: ConversionResult

    def rewrite_models(self) -> None:
        """Fix shapes, run the passes, and lay the models out as the target reads them."""
        parts, result = self.parts, self.result
        require_sound = self.options["require_sound"]
        result.soundness = find_unsound(self.opened)
        check_soundness(result, require_sound=require_sound)
        self._extract_signature()
        fix_inputs(parts, self.options["shapes"] or {})
        signatures = choices.choose_signatures(parts, self.options["signatures"])
        for part in parts:
            self._rewrite(part, signatures, positions_in(self.opened, parts))
        result.soundness += find_stopped(parts, positions_in(self.opened, parts))
        check_soundness(result, require_sound=require_sound)
        for part in parts:
            part.changed |= self.target.external_weights is False and cleanup.take_weights_inside(part.model)
            part.changed |= self.target.new_operator_codes is False and cleanup.fill_old_codes(part.model)

    def _extract_signature(self) -> None:
        key = self.options["extract_signature"]
        if key is None:
            return
        keys = [signature.key for part in self.parts for signature in part.model.signatures]
        if key not in keys:
            raise unknown("signature", key, keys)
        if self.opened.bundle is not None:
            raise UsageError(
                "a bundle needs all signatures of its models: extract from the .tflite file instead"
            )
        cleanup.keep_signature(self.parts[0].model, key)

    def _rewrite(self, part: Part, signatures: frozenset[str], positions: int | None) -> None:
        """Run the passes on the chosen entry points of one model, and add what they did to the result."""
        model, done = part.model, len(self.result.sites)
        passes = [one for one in self.passes if not part.is_helper or one.name in OF_HELPERS]
        entries = [entry for entry in model.entry_points() if part.signature(entry[0]) in signatures]
        # A subgraph of several signatures is rewritten once, under the first one's name.
        owners = {graph: name for name, graph in reversed(entries)}
        usage = cleanup.parts_in_use(model)
        old = [tensor for graph in model.subgraphs for tensor in graph.tensors]
        before = {name: (len(graph), _largest_tensor(graph)) for name, graph in model.entry_points()}
        # An estimate: most sites stand at a SOFTMAX, and most passes have none in a given model.
        total = done + sum(one.name == "SOFTMAX" for _, graph in entries for one in graph.operators)
        with doubted(model.subgraphs):
            uncalled = [*attention_uncalled(model)]  # once a composite is opened, its body is called no more
            for name, graph in entries:
                if owners[graph] == name:
                    context = Context(
                        model,
                        graph,
                        part.signature(name),
                        self.target,
                        Constants(model),
                        self.prover,
                        partial(self._add_site, total),
                        positions,
                        self.options["exported"] or {},
                    )
                    self._run_passes(passes, context)
            for site in uncalled:
                self._add_site(total, site)
        sites = self.result.sites[done:]
        if any(site.status is Status.CONVERTED for site in sites):
            cleanup.raise_runtime_version(model)
            cleanup.remove_unused(model, usage)
            cleanup.name_apart(model, old)
            part.changed = True
        self.result.signatures += _summaries(part, owners, before, sites)

    def _run_passes(self, passes: list[Pass], context: Context) -> None:
        reported = len(self.result.sites)
        for chosen in passes:
            run_pass(chosen, context)
        sites, split = self.result.sites[reported:], PASSES[MhaToSha.name] in passes
        for site in attention_left(context.model, context.subgraph, context.signature, sites, split=split):
            assert context.on_site is not None
            context.on_site(site)

    def _add_site(self, total: int, site: SiteReport) -> None:
        sites, progress = self.result.sites, self.options["progress"]
        sites.append(site)
        if progress is not None:
            progress("rewriting", len(sites), max(total, len(sites)))

    def compare_whole(self, written: Path | None) -> None:
        """Compare the models as they were with those written or, in a dry run, with those in memory.

        Raises:
            DifferenceFoundError: an output is not as near as the rewrites' demands allow.
        """
        extracted = self.options["extract_signature"]
        before, after = Opened(self.source), None if written is None else Opened(written)
        for part in self.parts:
            names = [name for name, _ in part.model.entry_points()]
            sites = {
                name: [site for site in self.result.sites if site.signature == part.signature(name)]
                for name in names
            }
            # What was held to a reference of its own is meant to differ, and was run at every value of its input.
            compared = [name for name in names if not any(map(_has_reference, sites[name]))]
            if part.is_helper or not compared:
                continue
            allowed = allowances(part.model, sites)
            wanted = None if extracted is None and len(compared) == len(names) else compared
            progress = self.options["progress"]
            ours = before.part(part.index).readable
            theirs = part.model if after is None else after.part(part.index).readable
            report = compare(ours, theirs, signatures=wanted, locate=False, progress=progress)
            for comparison in report.signatures:
                # A model without signatures is compared as `main`, whatever its subgraph is called.
                name = comparison.name if part.model.signatures else names[0]
                self.result.whole.append(WholeSignature(part.signature(name), allowed[name], comparison))
        for signature in self.result.whole:
            if not signature.holds:
                why = _explanation(self.result, signature.name)
                raise DifferenceFoundError(
                    f"the converted model differs from the input: {signature.violation()}{why}; nothing was written"
                )


def _has_reference(site: SiteReport) -> bool:
    """Whether a converted site was not held to what the model gave before."""
    return site.status is Status.CONVERTED and site.proof is not None and site.proof.demand.kind == "absolute"


def _explanation(result: ConversionResult, signature: str) -> str:
    """What the proofs of a signature's sites said that may explain a difference between the whole models."""
    sites = [site for site in result.converted if site.signature == signature]
    for site in sites:
        rows = MaskedRows.of([site])
        if rows is not None:
            return _explained(site, str(rows))
    return next((_explained(site, site.note) for site in sites if site.note), "")


def _explained(site: SiteReport, text: str) -> str:
    return f" (known of {site.pass_name}: {text}; skip='{site.pass_name}' leaves that as it was)"


def _summaries(
    part: Part, owners: dict[Subgraph, str], before: dict[str, tuple[int, int]], sites: list[SiteReport]
) -> Iterator[SignatureSummary]:
    """Each entry point before and after; of a helper those with sites only."""
    with_sites = {site.signature for site in sites}
    entries = part.model.entry_points()
    for name, graph in entries:
        owner = part.signature(owners.get(graph, name))
        if part.is_helper and owner not in with_sites:
            continue
        blocks = [site for site in sites if site.signature == owner and (site.heads or 0) > 1]
        operators, largest = before[name]
        yield SignatureSummary(
            part.signature(name),
            operators,
            len(graph),
            largest,
            _largest_tensor(graph),
            len(blocks),
            sum(site.status is Status.CONVERTED for site in blocks),
            tuple(part.signature(other) for other, its in entries if its is graph and other != name),
        )


def _largest_tensor(graph: Subgraph) -> int:
    """Bytes of the largest tensor that an operator of the subgraph defines."""
    tensors = (tensor for operator in graph.operators for tensor in operator.outputs)
    return max((tensor.dtype.byte_size(tensor.elements) or 0 for tensor in tensors), default=0)
