"""The main job: read a model, rewrite it, verify each rewrite, write the result."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final, Literal, get_args

from edge_opt.base.atomic import resolve_target
from edge_opt.base.errors import EdgeOptError, UsageError, match_names, unknown
from edge_opt.base.words import Progress
from edge_opt.comparison.compare import compare
from edge_opt.comparison.whole import WholeSignature, allowances
from edge_opt.conversion.closing import close_inputs
from edge_opt.conversion.models import Sections, choose_parts, find_repairable, find_unsound, positions_in
from edge_opt.conversion.result import (
    ConversionResult,
    DifferenceFoundError,
    SignatureSummary,
    check_requirements,
)
from edge_opt.ir import Constants, Model, Subgraph, cleanup
from edge_opt.ir.model import restored_on_failure
from edge_opt.ir.opening import (
    ModelLike,
    Opened,
    Part,
    Readable,
    check_not_compiled,
    readable,
)
from edge_opt.passes import PASSES, Context, Pass, SiteReport, Status, run_pass
from edge_opt.passes.ledger import Ledger
from edge_opt.passes.mha_to_sha import MhaToSha, attention_left, attention_uncalled
from edge_opt.passes.position_table import PositionTable
from edge_opt.proof.regions import RegionProver
from edge_opt.schema.writer import SUFFIXES, check_suffix
from edge_opt.shapes.inference import doubted
from edge_opt.targets import Target, TargetLike, load_target

Verify = Literal["regions", "full", "none"]
GENERIC: Final = "generic"
_OF_HELPERS = frozenset({PositionTable.name})
"""Passes that run on every model of a bundle."""


def convert(
    source: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    target: TargetLike | None = None,
    skip: str | Iterable[str] | None = None,
    signatures: str | Iterable[str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    verify: Verify = "regions",
    dry_run: bool = False,
    require_all: bool = False,
    sections: Sections = "prefill-decode",
    exported: Mapping[str, Subgraph] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConversionResult:
    """Rewrite a model for an NPU, verify every rewrite, and write it; a loaded `Model` is edited in place.

    Examples:
        >>> result = convert("gemma.tflite", target="qualcomm-htp")  # writes gemma.opt.tflite
        >>> print(result.summary())

    Args:
        source: a .tflite file, its bytes, a .litertlm bundle, a loaded `Model` (unchanged by a `dry_run`, and where an
            error is raised), or what `litert_torch.convert` returns.
        output: where to write; beside the input as `<stem>.opt<suffix>` where None and the source is a file.
        target: a bundled target's name, the path of a target file, or a `Target`; "generic" where None.
        skip: names of passes (`edge_opt.passes.PASSES`) to leave out.
        signatures: entry points to rewrite, by name or a pattern such as `prefill_*`; in a bundle also as `model/name`.
        shapes: static shapes for inputs of open lengths, by `NAME` (in each signature with it) or `signature/NAME`.
        verify: "regions", the default, verifies each rewritten region, "full" also compares the whole models, "none"
            does neither.
        dry_run: do everything but write, and leave a `Model` as it is: what it would become is the result's `model`.
        require_all: raise `SitesLeftError` where a site was not converted.
        sections: of a bundle, "prefill-decode" rewrites that model only, the default, and "all" each of its models.
        exported: the entry points before they were quantized; tables of rope then have their exact frequencies.
        overwrite: replace an existing output.
        progress: called with (stage, done, total) on long work.

    Returns:
        The sites and what was done at each, the signatures before and after, the path written, and the model.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: an unknown name, an input that does not fit, an output that is the input or exists.
        OutputError: the output cannot be written.
        SitesLeftError: a site was not converted, and all were required; or none could be verified.
        DifferenceFoundError: `verify="full"` found a difference; nothing was written.
        RuntimeUnavailable: the runtime does not start here, so nothing can be verified; nothing was written.
    """
    started = time.perf_counter()
    given, source = source, readable(source)
    if verify not in get_args(Verify):
        raise unknown("verification", verify, get_args(Verify))
    if verify == "full" and isinstance(source, Model):
        raise UsageError("verify='full' compares with the source file: give a path or bytes, not a Model")
    passes, facts = _choose_passes(skip), load_target(target or GENERIC)
    if dry_run and isinstance(source, Model):
        source = deepcopy(source)
    with ExitStack() as stack:
        stack.enter_context(restored_on_failure(source))
        proving = stack.enter_context(ExitStack())
        prover = None
        if verify != "none":
            prover = proving.enter_context(
                RegionProver(model=str(source) if isinstance(source, str | os.PathLike) else "")
            )
            prover.start()  # its imports overlap with reading the model
        opened = Opened(source)
        parts = choose_parts(opened, sections)
        check_not_compiled(parts[0].model, opened.path)
        destination = None if dry_run else _destination(opened, output, overwrite=overwrite)
        result = ConversionResult(opened.path, None, facts.name, verify, model=parts[0].model)
        stack.enter_context(_carrying(result))
        result.soundness = find_unsound(opened)
        close_inputs(parts, shapes or {}, verify=verify != "none")
        conversion = _Conversion(opened, parts, facts, result, prover, exported or {}, progress)
        conversion.rewrite(passes, _choose_signatures(parts, signatures))
        proving.close()  # writing needs memory too
        check_requirements(result, require_all=require_all)
        conversion.finish()
        check = partial(conversion.compare_whole, source) if verify == "full" else None
        if destination is not None:
            on_bytes = None if progress is None else partial(progress, "writing")
            opened.save(destination, overwrite=overwrite, progress=on_bytes, check=check)
            result.output = str(destination)
        elif check is not None:
            check(None)
    result.seconds = time.perf_counter() - started
    result.given = given
    return result


def _choose_passes(skip: str | Iterable[str] | None) -> list[Pass]:
    skipped = match_names("pass", skip or (), PASSES)
    return [one for name, one in PASSES.items() if name not in skipped]


def _choose_signatures(parts: Sequence[Part], wanted: str | Iterable[str] | None) -> frozenset[str]:
    """The entry points to rewrite, as `Part.signature` has them."""
    both = [(part.signature(name), name) for part in parts for name, _ in part.model.entry_points()]
    names = [name for pair in both for name in pair]
    if wanted is not None:
        names = match_names("signature", wanted, dict.fromkeys(names))
    return frozenset(full for full, name in both if full in names or name in names)


def default_output(source: str | os.PathLike[str], suffix: str = "") -> Path:
    """`gemma.tflite` -> `gemma.opt.tflite`, beside the input; a name that promises another format gets the `suffix`."""
    path = Path(source)
    kept = suffix if suffix and path.suffix.lower() in SUFFIXES else path.suffix
    return path.with_name(f"{path.stem}.opt{kept}")


def _destination(opened: Opened, output: str | os.PathLike[str] | None, *, overwrite: bool) -> Path | None:
    """Where to write: `output`, or beside the input; None for a source without a place of its own.

    Raises:
        UsageError, OutputError: nothing can be written there; nobody wants to learn of that after an hour.
    """
    path = opened.path
    if output is None:
        if path is None:
            return None
        output = default_output(path, opened.suffix)
    check_suffix(output, opened.suffix)
    status = None if path is None else Path(path).stat()
    inputs = () if status is None else ((status.st_dev, status.st_ino),)
    resolve_target(output, overwrite=overwrite, inputs=inputs)
    return Path(output)


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
    """The models of one conversion, what is known of them, and the result that says what was done."""

    opened: Opened
    parts: list[Part]
    target: Target
    result: ConversionResult
    prover: RegionProver | None
    exported: Mapping[str, Subgraph]
    progress: Progress | None
    ledgers: list[Ledger] = field(default_factory=list)

    def rewrite(self, passes: list[Pass], signatures: frozenset[str]) -> None:
        """Run the passes on the chosen entry points, and add what they did to the result."""
        positions = positions_in(self.opened, self.parts)
        for part in self.parts:
            chosen = [one for one in passes if not part.is_helper or one.name in _OF_HELPERS]
            self._rewrite(part, chosen, signatures, positions)
        self.result.soundness += find_repairable(self.parts, positions_in(self.opened, self.parts))

    def finish(self) -> None:
        """Lay the models out as the target reads them, and check that they are what was verified."""
        for part in self.parts:
            part.changed |= self.target.external_weights is False and cleanup.take_weights_inside(part.model)
            part.changed |= self.target.new_operator_codes is False and cleanup.fill_old_codes(part.model)
        for ledger in self.ledgers:
            ledger.check()

    def _rewrite(
        self, part: Part, passes: list[Pass], signatures: frozenset[str], positions: int | None
    ) -> None:
        model, done = part.model, len(self.result.sites)
        entries = [entry for entry in model.entry_points() if part.signature(entry[0]) in signatures]
        # A subgraph of several signatures is rewritten once, under the first one's name.
        owners = {graph: name for name, graph in reversed(entries)}
        usage = cleanup.parts_in_use(model)
        old = [tensor for graph in model.subgraphs for tensor in graph.tensors]
        before = {name: (len(graph), _largest_tensor(graph)) for name, graph in model.entry_points()}
        # An estimate: most sites stand at a SOFTMAX, and most passes have none in a given model.
        total = done + sum(one.name == "SOFTMAX" for _, graph in entries for one in graph.operators)
        add_site = partial(self._add_site, total)
        for chosen in passes:
            for site in chosen.mend(model):
                add_site(replace(site, signature=part.signature(site.signature)))
        with doubted(model.subgraphs):
            uncalled = [*attention_uncalled(model)]  # once a composite is opened, its body is called no more
            for graph, name in reversed(owners.items()):
                context = Context(model, graph, part.signature(name), self.target, Constants(model))
                context.prover, context.on_site = self.prover, add_site
                context.positions, context.exported = positions, self.exported
                self._run_passes(passes, context)
            for site in uncalled:
                add_site(site)
        sites = self.result.sites[done:]
        if any(site.status is Status.CONVERTED for site in sites):
            cleanup.remove_unused(model, usage)
            cleanup.name_apart(model, old)
            part.changed = True
        self.result.signatures += _summaries(part, owners, before, sites)

    def _run_passes(self, passes: list[Pass], context: Context) -> None:
        reported = len(self.result.sites)
        for chosen in passes:
            run_pass(chosen, context)
        if context.ledger is not None:
            self.ledgers.append(context.ledger)
        sites, split = self.result.sites[reported:], PASSES[MhaToSha.name] in passes
        for site in attention_left(context.model, context.subgraph, context.signature, sites, split=split):
            assert context.on_site is not None
            context.on_site(site)

    def _add_site(self, total: int, site: SiteReport) -> None:
        sites = self.result.sites
        sites.append(site)
        if self.progress is not None:
            self.progress("rewriting", len(sites), max(total, len(sites)))

    def compare_whole(self, source: ModelLike, written: Path | None) -> None:
        """Compare the models as they were with those written or, in a dry run, with those in memory.

        Raises:
            DifferenceFoundError: an output is not as near as the rewrites' demands allow.
        """
        before = {part.index: part for part in Opened(source).parts}
        after = {} if written is None else {part.index: part for part in Opened(written).parts}
        for part in self.parts:
            now = part.model if written is None else after[part.index].readable
            self._compare(part, before[part.index].readable, now)
        for signature in self.result.whole:
            if not signature.holds:
                why = _explanation(self.result, signature.name)
                raise DifferenceFoundError(
                    f"the converted model differs from the input: {signature.violation()}{why}; nothing was written"
                )

    def _compare(self, part: Part, before: Readable, after: Readable) -> None:
        names = [name for name, _ in part.model.entry_points()]
        sites = {
            name: [site for site in self.result.sites if site.signature == part.signature(name)]
            for name in names
        }
        # What was held to a reference of its own is meant to differ, and was run at every value of its input.
        changed = [name for name in names if any(map(_has_reference, sites[name]))]
        self.result.not_compared += map(part.signature, changed)
        compared = [name for name in names if name not in changed]
        if part.is_helper or not compared:
            return
        allowed = allowances(part.model, sites)
        wanted = None if len(compared) == len(names) else compared
        report = compare(before, after, signatures=wanted, locate=False, progress=self.progress)
        for comparison in report.signatures:
            # A model without signatures is compared as `main`, whatever its subgraph is called.
            name = comparison.name if part.model.signatures else names[0]
            self.result.whole.append(WholeSignature(part.signature(name), allowed[name], comparison))


def _has_reference(site: SiteReport) -> bool:
    """Whether a converted site was not held to what the model gave before."""
    return site.status is Status.CONVERTED and site.proof is not None and site.proof.demand.kind == "absolute"


def _explanation(result: ConversionResult, signature: str) -> str:
    """What the proofs of a signature's sites said that may explain a difference between the whole models."""
    sites = [site for site in result.converted if site.signature == signature]
    for site in sites:
        if site.note:
            return f" (known of {site.pass_name}: {site.note}; skip='{site.pass_name}' leaves that as it was)"
    return ""


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
