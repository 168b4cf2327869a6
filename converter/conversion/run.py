"""The main job: read a model, rewrite it, verify each rewrite, write the result."""

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from edge_opt.base.atomic import AnyPath, output_path, resolve_target
from edge_opt.base.errors import EdgeOptError, UsageError, match_names, unknown
from edge_opt.base.words import Progress
from edge_opt.conversion import models
from edge_opt.conversion.dump import Dump
from edge_opt.conversion.result import (
    ConversionResult,
    DifferenceFoundError,
    SignatureSummary,
    check_requirements,
    has_several_heads,
)
from edge_opt.ir import Constants, Subgraph, cleanup
from edge_opt.ir.model import Model, restored_on_failure
from edge_opt.ir.opening import (
    ModelLike,
    Opened,
    Part,
    Readable,
    check_not_compiled,
    readable,
    without_collections,
)
from edge_opt.ir.walk import makers_of
from edge_opt.passes import PASSES, Context, Pass, Status, Verdict, run_pass
from edge_opt.passes.mha_to_sha import MhaToSha, left_over
from edge_opt.passes.position_table import PositionTable
from edge_opt.schema.writer import SUFFIXES, check_suffix
from edge_opt.shapes.inference import doubted
from edge_opt.targets import Target, TargetLike, load_target
from edge_opt.verification.audit import Audit
from edge_opt.verification.examine import Verifier
from edge_opt.verification.whole import by_graph, changed_on_purpose, compare_whole

Verify = Literal["regions", "full", "none"]


def convert(
    source: ModelLike,
    output: str | os.PathLike[str] | None = None,
    *,
    target: TargetLike | None = None,
    skip: str | Iterable[str] | None = None,
    passes: str | Iterable[str | Pass] | None = None,
    signatures: str | Iterable[str] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
    verify: Verify = "regions",
    dry_run: bool = False,
    require_all: bool = False,
    sections: models.Sections = "prefill-decode",
    exported: Mapping[str, Subgraph] | None = None,
    dump: AnyPath | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> ConversionResult:
    """Rewrite a model for an NPU, verify every rewrite, and write it; a loaded `Model` is edited in place.

    Examples:
        >>> result = convert("gemma.tflite", target="qualcomm-htp")  # writes gemma.opt.tflite
        >>> print(result.summary())

    Args:
        source: a .tflite file, its bytes, a .litertlm bundle, a loaded `Model`, or what `litert_torch.convert` returns.
        output: where to write; in a folder, or if None beside the source file, `<stem>.opt<suffix>`.
        target: the name of a bundled target or of a chip, the path of a target file, or a `Target`; "generic" if None.
        skip: names of passes (`edge_opt.passes.PASSES`) to skip.
        passes: the passes to run, in this order, by name or as objects; default: all of `edge_opt.passes.PASSES`.
        signatures: entry points to rewrite, by name or a pattern such as `prefill_*`; in a bundle also as `model/name`.
        shapes: static shapes for inputs of open lengths, by `NAME` (in each signature with it) or `signature/NAME`.
        verify: "regions" verifies each rewritten region, "full" also compares the whole models, "none" does neither.
        dry_run: do everything except write; a `Model` is not changed, and the result's `model` is a converted copy.
        require_all: raise `SitesSkippedError` if a site is skipped.
        sections: in a bundle, "prefill-decode" rewrites only that model, "all" every model.
        exported: entry points of the model before quantization, which give RoPE tables exact frequencies.
        dump: a new or empty folder for the text of each signature, before the first and after each effective pass.
        overwrite: replace an existing output.
        progress: called with (stage, done, total) on long work.

    Returns:
        The sites and what was done at each, the signatures before and after, the path written, and the model.

    Raises:
        ModelFormatError: the source is not a valid model.
        UsageError: an unknown name, an input that does not fit, an output that is the input or exists, a source that
            was converted for another target.
        OutputError: the output cannot be written.
        SitesSkippedError: a site was skipped although all were required, or no site could be verified.
        DifferenceFoundError: `verify="full"` found a difference; nothing was written.
        RuntimeUnavailable: LiteRT cannot start, so nothing could be verified; nothing was written.
    """
    started = time.perf_counter()
    given = source
    source = readable(source)
    if verify not in get_args(Verify):
        raise unknown("verification", verify, get_args(Verify))
    if verify == "full" and isinstance(source, Model):
        raise UsageError(
            "verify='full' compares with the source file: give a path or bytes, not a Model"
        )
    chosen = _choose_passes(passes, skip or ())
    facts = load_target(target)
    texts = None if dump is None else Dump(dump)
    if dry_run and isinstance(source, Model):
        source = deepcopy(source)
    with ExitStack() as stack:
        stack.enter_context(without_collections())
        stack.enter_context(restored_on_failure(source))
        verifying = stack.enter_context(ExitStack())
        opened = Opened(source)
        verifier: Verifier | None = None
        if verify != "none":
            verifier = verifying.enter_context(Verifier(model=opened.path or ""))
            verifier.start()  # its imports overlap with reading the model
        parts = models.choose_parts(opened, sections)
        check_not_compiled(parts[0].model, opened.path)
        notes = dict.fromkeys(models.find_notes(opened, parts, facts.name, dry_run=dry_run))
        destination = None if dry_run else _destination(opened, output, overwrite=overwrite)
        result = ConversionResult(
            opened.path, None, facts.name, verify, model=parts[0].model, given=given
        )
        stack.enter_context(_carrying(result))
        result.soundness = models.find_unsound(opened)
        result.notes = [*notes]
        models.close_inputs(parts, shapes or {}, verify=verify != "none")
        positions = models.positions_in(opened, parts)
        rewriting = _Rewriting(
            chosen, facts, result, verifier, positions, exported or {}, progress, texts
        )
        wanted = _choose_signatures(parts, signatures)
        for part in parts:
            rewriting.rewrite(part, wanted)
        if positions is not None:
            result.soundness += models.stopped_positions(parts, positions)
        verifying.close()  # free its memory before writing
        check_requirements(result, require_all=require_all)
        check = (
            partial(_compare_whole, result, parts, source, progress) if verify == "full" else None
        )
        if destination is not None:
            on_bytes = None if progress is None else partial(progress, "writing")
            opened.save(destination, overwrite=overwrite, progress=on_bytes, check=check)
            result.output = str(destination)
        elif check is not None:
            check(None)
    result.seconds = time.perf_counter() - started
    return result


def _choose_passes(
    wanted: str | Iterable[str | Pass] | None, skip: str | Iterable[str]
) -> list[Pass]:
    """The passes to run, in order; UsageError for an unknown name, or for what is neither a name nor a pass."""
    if wanted is None:
        wanted = PASSES
    chosen: list[Pass] = []
    for one in [wanted] if isinstance(wanted, str) else wanted:
        if isinstance(one, Pass):
            chosen.append(one)
        elif isinstance(one, str):
            chosen += (PASSES[name] for name in match_names("pass", one, PASSES))
        else:
            raise UsageError(f"{one!r} is not a pass: give a name, or an object of a pass's class")
    names = [*PASSES, *(one.name for one in chosen)]
    skipped = match_names("pass", skip, dict.fromkeys(names))
    return [one for one in chosen if one.name not in skipped]


def _choose_signatures(parts: Sequence[Part], wanted: str | Iterable[str] | None) -> frozenset[str]:
    """Entry points to rewrite, named as by `Part.signature`; `wanted` may leave out the model's name."""
    names: dict[str, str] = {}
    for part in parts:
        for name, _ in part.model.entry_points():
            names[part.signature(name)] = name
    if wanted is None:
        return frozenset(names)
    chosen = match_names("signature", wanted, dict.fromkeys([*names, *names.values()]))
    return frozenset(full for full, name in names.items() if full in chosen or name in chosen)


def default_output(source: str | os.PathLike[str], suffix: str = "") -> Path:
    """`gemma.tflite` -> `gemma.opt.tflite`, beside the input; a known format's suffix becomes `suffix`, if given."""
    path = Path(source)
    kept = suffix if suffix and path.suffix.lower() in SUFFIXES else path.suffix
    return path.with_name(f"{path.stem}.opt{kept}")


def _destination(
    opened: Opened, output: str | os.PathLike[str] | None, *, overwrite: bool
) -> Path | None:
    """Path of the output, checked before the work; None if neither `output` nor a source file gives one."""
    path = opened.path
    if output is None and path is not None:
        output = default_output(path, opened.suffix)
    if output is None:
        return None
    output = output_path(output)
    if output.is_dir() and path is not None:
        output /= default_output(path, opened.suffix).name
    check_suffix(output, opened.suffix)
    resolve_target(output, overwrite=overwrite, inputs=[path])
    return output


@contextmanager
def _carrying(result: ConversionResult) -> Iterator[None]:
    """Attach the result so far to errors that are raised in the block."""
    try:
        yield
    except (EdgeOptError, KeyboardInterrupt) as error:
        result.failure = str(error) or "interrupted"
        error.result = result  # type: ignore[union-attr]
        raise


@dataclass(slots=True)
class _Rewriting:
    """Rewrites models one after the other, and records the sites in the result."""

    passes: list[Pass]
    target: Target
    result: ConversionResult
    verifier: Verifier | None
    positions: int | None
    exported: Mapping[str, Subgraph]
    progress: Progress | None
    texts: Dump | None = None
    expected: int = 0

    def rewrite(self, part: Part, wanted: frozenset[str]) -> None:
        """Run the passes on the `wanted` entry points of a model (on a helper, only `PositionTable`).

        Weights and operator codes are then stored as the target needs them. UnverifiedChangeError if any change of an
        entry point was not verified.
        """
        model = part.model
        done = len(self.result.sites)
        passes = self.passes
        if part.is_helper:
            passes = [one for one in passes if isinstance(one, PositionTable)]
        chosen: list[str] = []
        # A subgraph of several signatures is rewritten once, under the first name.
        owners: dict[Subgraph, str] = {}
        for name, graph in model.entry_points():
            if part.signature(name) in wanted:
                chosen.append(name)
                owners.setdefault(graph, name)
        usage = cleanup.parts_in_use(model)
        before = {graph: _size(graph) for graph in model.subgraphs}
        old = list(model.tensors())
        # An estimate: most sites are at a SOFTMAX, and most passes find none in a given model.
        operators = chain.from_iterable(owners)
        self.expected = done + sum(operator.name == "SOFTMAX" for operator in operators)
        for one in passes:
            for verdict in one.fix_interface(model, chosen):
                self._add(replace(verdict, signature=part.signature(verdict.signature)))
        audit = Audit(model)
        with doubted(model.subgraphs):
            for graph, name in owners.items():
                self._run(passes, part, graph, part.signature(name), audit)
        sites = self.result.sites[done:]
        is_converted = _any_converted(sites)
        if is_converted:
            audit.check()  # also the bodies that nothing calls any more
            cleanup.remove_unused(model, usage)
            cleanup.name_apart(model, old)
            part.changed = True
        self.result.signatures += _summaries(part, owners, before, sites)
        self._store(part)
        audit.check()
        if is_converted:
            models.mark_converted(model, self.target.name)

    def _store(self, part: Part) -> None:
        """Have weights and operator codes where the target reads them."""
        if self.target.external_weights is False and cleanup.take_weights_inside(part.model):
            part.changed = True
        if self.target.new_operator_codes is False and cleanup.fill_old_codes(part.model):
            part.changed = True

    def _run(
        self, passes: Iterable[Pass], part: Part, graph: Subgraph, signature: str, audit: Audit
    ) -> None:
        """Run passes on one entry point, and look for attention that is left after it was split."""
        context = Context(
            part.model,
            graph,
            signature,
            self.target,
            Constants(part.model),
            verifier=self.verifier,
            on_site=self._add,
            positions=self.positions,
            exported=self.exported,
            audit=audit,
        )
        if self.texts is not None:
            self.texts.write(signature, "input", graph)
        for chosen in passes:
            operators = set(graph.operators)
            verdicts = run_pass(chosen, context)
            if self.texts is not None and _any_converted(verdicts):
                self.texts.write(signature, chosen.name, graph)
            if isinstance(chosen, MhaToSha):
                for verdict in left_over(context, verdicts, operators):
                    self._add(verdict)

    def _add(self, verdict: Verdict) -> None:
        sites = self.result.sites
        sites.append(verdict)
        if self.progress is not None:
            self.progress("rewriting", len(sites), max(self.expected, len(sites)))


def _any_converted(verdicts: Iterable[Verdict]) -> bool:
    return any(verdict.status is Status.CONVERTED for verdict in verdicts)


class _Size(NamedTuple):
    """The number of a graph's operators, and the bytes of the largest tensor that they produce."""

    operators: int
    largest: int


def _size(graph: Subgraph) -> _Size:
    sizes = [tensor.dtype.byte_size(tensor.elements) or 0 for tensor in makers_of(graph)]
    return _Size(len(graph), max(sizes, default=0))


def _summaries(
    part: Part,
    owners: Mapping[Subgraph, str],
    before: Mapping[Subgraph, _Size],
    sites: list[Verdict],
) -> Iterator[SignatureSummary]:
    """Each entry point before and after; in a helper, only those with sites."""
    entries = part.model.entry_points()
    for name, graph in entries:
        owner = part.signature(owners.get(graph, name))
        own = [site for site in sites if site.signature == owner]
        if part.is_helper and not own:
            continue
        blocks = [site.status for site in own if has_several_heads(site)]
        others = [other for other, its in entries if its is graph and other != name]
        old = before[graph]
        new = _size(graph)
        yield SignatureSummary(
            part.signature(name),
            old.operators,
            new.operators,
            old.largest,
            new.largest,
            len(blocks),
            blocks.count(Status.CONVERTED),
            tuple(map(part.signature, others)),
            graph in owners,
        )


def _compare_whole(
    result: ConversionResult,
    parts: Sequence[Part],
    source: Readable,
    progress: Progress | None,
    written: Path | None,
) -> None:
    """Compare the source models with the written ones or, in a dry run, with those in memory.

    DifferenceFoundError if an output differs by more than the rewrites allow.
    """
    before = _by_index(source)
    after = {} if written is None else _by_index(written)
    for part in parts:
        model = part.model
        sites = by_graph(part, result.converted)
        result.not_compared += map(part.signature, changed_on_purpose(model, sites))
        if part.is_helper:
            continue
        now = model if written is None else after[part.index].readable
        for found in compare_whole(before[part.index].readable, now, model, sites, progress):
            result.whole.append(replace(found, name=part.signature(found.name)))
    for signature in result.whole:
        if signature.violation:
            known = _known_difference(result, signature.name)
            raise DifferenceFoundError(
                f"the converted model differs from the input: {signature.violation}{known}; nothing was written"
            )


def _known_difference(result: ConversionResult, signature: str) -> str:
    """The first pass that may change this signature's outputs, in brackets; empty if there is none."""
    for site in result.converted:
        if site.note and site.signature == signature:
            name = site.pass_name
            return f" (known for {name}: {site.note}; skip='{name}' skips it)"
    return ""


def _by_index(given: Readable) -> dict[int, Part]:
    """The models of a file or bundle by their index."""
    return {part.index: part for part in Opened(given).parts}
