"""Rewrite a signature in every form, compile and rank the forms, and make a target from the best."""

import os
from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, Future
from contextlib import ExitStack
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from edge_opt.attention.block import FORMS, Block, logits_bytes
from edge_opt.attention.find import find_blocks
from edge_opt.base.atomic import AnyPath, scratch_folder
from edge_opt.base.errors import UsageError, match_names
from edge_opt.base.record import Record
from edge_opt.base.words import Progress, no_progress
from edge_opt.conversion import convert
from edge_opt.ir import Model, load, save
from edge_opt.ir.opening import Opened
from edge_opt.ir.text import subgraph_text
from edge_opt.npu.comparing import compare_on_npu
from edge_opt.npu.compiler import (
    Backend,
    Compiler,
    CompilerMissingError,
    compiling_threads,
    cut_entry_point,
)
from edge_opt.npu.profiling import Measured, gathered, measure, versions
from edge_opt.npu.vendors import backend_of, target_backend
from edge_opt.targets import Target, TargetLike, load_target, target_names

BASE = "qualcomm-htp"
"""The default target to tune."""
_TILES = 4
_LEAST_ROWS = 2
_SMALL_TILES = (128, 64)
_ALWAYS = 1  # a minimum head size that every attention block has
Changes = Mapping[str, Any] | None
"""Target settings that a form changes; None keeps the model as exported."""


@dataclass(frozen=True, slots=True)
class Trial(Record):
    """One compiled form; wrong outputs in the emulator count as a failure, too."""

    form: str
    measured: Measured


@dataclass(frozen=True, slots=True)
class Tuning(Record):
    """All trials, best first; failed ones come last.

    `long_context` is true if one head does not fit on the chip. `checked` says how the winner's outputs were checked,
    or why not; `changes` are its changes to the target.
    """

    model: str
    signature: str
    long_context: bool
    target: Target
    chip: str
    versions: Mapping[str, str]
    trials: tuple[Trial, ...]
    checked: str = ""
    changes: Changes = None
    notes: tuple[str, ...] = ()

    _properties = ("winner",)
    _left_out = ("target",)

    @property
    def winner(self) -> Trial | None:
        """The best trial; None if all failed."""
        return next((trial for trial in self.trials if trial.measured.figures is not None), None)


def tune(
    path: AnyPath,
    target: TargetLike = BASE,
    compiler: Compiler = Compiler(),
    *,
    signature: str | None = None,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Try every form on one signature of a model, for an NPU whose compiler estimates time. The file is not changed.

    Trials are ranked by the compiler's time estimate, then by bytes. The best trial's outputs are checked in the
    emulator: if they are not bit-identical to the export's, the next trial is taken.

    Args:
        path: a .tflite model as exported, or a bundle (its prefill/decode model is used).
        target: the target to vary, which names the compiler: qualcomm-htp, or your own target (or its file).
        compiler: settings of the NPU's compiler.
        signature: the entry point to tune for; default: the one with the largest attention block.
        jobs: number of parallel trials; default: the number of idle cores.
        executor: a `concurrent.futures` executor that runs the trials instead, also on a cluster; its workers need
            edge-opt and the same files at the same paths.
        progress: called with (stage, done, total).

    Raises:
        UsageError: the compiler has no estimates, or is not that of the target; or the signature does not exist or has
            no multi-head attention.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        ModelFormatError: the file is not a model.
    """
    base = load_target(target)
    tell = progress or no_progress
    backend = _estimating(base, compiler)
    backend.check_installed(compiler)
    model = Opened(path).main().model
    name, attention = largest_attention(model, signature)
    forms = _forms(model, name, attention, base)
    targets = {form: applied(base, changes) for form, changes in forms.items()}
    with ExitStack() as stack:
        exported = str(stack.enter_context(scratch_folder()) / "exported.tflite")
        save(cut_entry_point(model, name), exported)
        running = executor or stack.enter_context(compiling_threads(jobs or _idle_cores()))
        judge = backend.judge(compiler)
        waiting: dict[str, Future[Measured]] = {}
        for form, changed in targets.items():
            waiting[form] = running.submit(try_form, exported, changed, judge)
        found = gathered(waiting, "compiling", tell)
        trials = [Trial(form, measured) for form, measured in found.items()]
        trials.sort(key=_rank)
        try:
            backend.check_emulator(compiler)
        except CompilerMissingError as error:
            checked = f"outputs not checked: {error}"
        else:
            checked = _check(trials, exported, targets, compiler, tell)
    trials.sort(key=_rank)  # some may have failed the check
    figures = [trial.measured.figures for trial in trials if trial.measured.figures is not None]
    return Tuning(
        model=os.fspath(path),
        signature=name,
        long_context=base.overflows(attention),
        target=base,
        chip=compiler.chip,
        versions=versions(figures) if figures else {},
        trials=tuple(trials),
        checked=checked,
        changes=forms[trials[0].form],
        notes=tuple(one.note for one in figures[:1] if one.note),
    )


def _estimating(base: Target, compiler: Compiler) -> Backend:
    """The compiler that the target names, or else the chip's; UsageError if it has no estimates or they differ."""
    if base.compiler is None and base.name in target_names():
        raise UsageError(
            f"edge-opt cannot run the compiler of target '{base.name}': give {BASE}, or your own target file"
        )
    chips = backend_of(compiler.chip)
    backend = target_backend(base.compiler) or chips
    for one in (backend, chips):
        if not one.estimates:
            raise UsageError(
                f"no estimate for {one.manufacturer}: forms are ranked by estimated time, so give {BASE} and a chip "
                f"of Qualcomm"
            )
    if backend is not chips:
        raise UsageError(
            f"target '{base.name}' is not for the NPU of {compiler.chip}: give another chip"
        )
    return backend


def _rank(trial: Trial) -> tuple[float, ...]:
    return trial.measured.rank


def _idle_cores() -> int:
    return max(1, round((os.cpu_count() or 1) - os.getloadavg()[0]))


def largest_attention(model: Model, signature: str | None = None) -> tuple[str, Block]:
    """Return an entry point's name and its largest multi-head attention block; default: the largest of all.

    Raises:
        UsageError: the entry point does not exist, or has no multi-head attention.
    """
    graphs = dict(model.entry_points())
    found: list[tuple[str, Block]] = []
    for name in match_names("signature", signature, graphs):
        blocks = [match for match in find_blocks(graphs[name]) if isinstance(match, Block)]
        found += [(name, block) for block in blocks if block.heads > 1]
    if not found:
        place = "the model" if signature is None else f"signature '{signature}'"
        raise UsageError(f"{place} has no multi-head attention to tune for: see `edge-opt inspect`")
    return max(found, key=lambda one: logits_bytes(one[1]))


def _forms(model: Model, signature: str, attention: Block, base: Target) -> dict[str, Changes]:
    """Return the variants that give different graphs; without norms, norm variants drop out."""
    forms: dict[str, Changes] = {}
    graphs: set[str] = set()
    for form, changes in variants(attention, base):
        made = rewritten(cut_entry_point(model, signature), applied(base, changes))
        graph = subgraph_text(made.subgraphs[0])
        if graph not in graphs:
            graphs.add(graph)
            forms[form] = changes
    return forms


def variants(attention: Block, base: Target) -> Iterator[tuple[str, Changes]]:
    """Yield the model as exported, the same with the mask before the join, and every form.

    The form that is usually best also comes with the other norm, the mask on the other side, and tiles of rows.
    """
    yield "as exported", None
    yield "as exported, the mask before the join", {"mask_before_join": True}
    for form in FORMS:
        yield form, {"form": form, "rows_per_tile": None}
    best = "split-above"
    above = {"form": best, "rows_per_tile": None}
    if attention.head_size < (base.norm_per_head_from or _ALWAYS):
        norm = "a norm for each head"
        least = _ALWAYS
    else:
        norm = "one norm for all"
        least = attention.head_size + 1
    yield f"{best}, {norm}", {**above, "norm_per_head_from": least}
    place = "after" if base.mask_before_join else "before"
    other_place = not base.mask_before_join
    yield f"{best}, the mask {place} the join", {**above, "mask_before_join": other_place}
    rows = attention.query_length
    for size in dict.fromkeys((rows // _TILES, *_SMALL_TILES)):
        if _LEAST_ROWS <= size < rows and rows % size == 0:
            yield f"{best}, tiles of {size} rows", {**above, "rows_per_tile": size}


def applied(base: Target, changes: Changes) -> Target | None:
    """Return the target with a form for all signatures and lengths; None for the model as exported."""
    if changes is None:
        return None
    split = ("*",) if "form" in changes else ()
    return replace(base, **{**changes, "long_context": {}, "split_signatures": split})


def rewritten(model: Model, target: Target | None) -> Model:
    """Convert the model for the target, unverified, and return it; unchanged if `target` is None."""
    if target is not None:
        convert(model, target=target, verify="none")
    return model


def try_form(exported: str, target: Target | None, compiler: Compiler) -> Measured:
    """Rewrite and compile an exported model with one entry point; may run in another process."""
    model = rewritten(load(exported), target)
    return measure(model, model.signatures[0].key, compiler)


def _check(
    trials: list[Trial],
    exported: str,
    targets: Mapping[str, Target | None],
    compiler: Compiler,
    tell: Progress,
) -> str:
    """Mark trials as failed in `trials`, best first, up to one with the export's outputs. Return how it was checked."""
    for place, trial in enumerate(trials):
        target = targets[trial.form]
        if trial.measured.figures is None:
            break
        if target is None:
            return "nothing to check"
        tell(f"checking the outputs of {trial.form}", place, len(trials))
        found = compare_on_npu(exported, rewritten(load(exported), target), compiler)
        if found.equal:
            return f"bit-identical to the export in {compiler.chip}'s emulator"
        reason = found.signatures[0].reason
        if reason.startswith("a: "):
            return f"outputs not checked: as exported, {reason.removeprefix('a: ')}"
        trials[place] = Trial(
            trial.form, Measured(trial.measured.signature, failure=found.summary())
        )
    return "no form gives the export's outputs"


def tuned_target(tuning: Tuning, name: str | None = None) -> Target:
    """Return the target with the winner's form and its sources; the name defaults to `<target>-tuned`.

    Raises:
        UsageError: there is no winner.
    """
    base = tuning.target
    if tuning.winner is None:
        raise UsageError(
            f"no form of target '{base.name}' compiles and gives the export's outputs: there is no target to write"
        )
    changed = _changed(tuning)
    where = f"{Path(tuning.model).name}, {tuning.signature}"
    target = replace(
        base,
        **changed,
        name=name or f"{base.name}-tuned",
        summary=f"{base.name} as tuned for {tuning.chip} on {where}: {tuning.winner.form}",
        versions={**tuning.versions, "chip": tuning.chip},
    )
    measured = f"measured with `edge-opt tune` on {where}"
    sources: dict[str, str] = {}
    for fact in target.stated():
        source = measured if fact in changed else base.sources.get(fact)
        if source:
            sources[fact] = source
    return replace(target, sources=sources)


def _changed(tuning: Tuning) -> dict[str, Any]:
    """The facts of the target that the winner changes, where they belong: a form may be for long contexts only."""
    base = tuning.target
    signature = tuning.signature
    changed: dict[str, Any] = dict(tuning.changes or {})
    patterns = base.split_signatures
    if "form" not in changed:
        patterns = tuple(one for one in patterns if not fnmatchcase(signature, one))
        if tuning.changes is None and not patterns:
            # The trial was the exported file, with no pass run on it.
            changed["mask_before_join"] = False
        return {**changed, "split_signatures": patterns}
    if not base.splits(signature):
        patterns = (*patterns, signature)
    if tuning.long_context:
        changed["long_context"] = {"form": changed.pop("form")}
        rows = changed.pop("rows_per_tile")
        if rows is not None:
            changed["long_context"]["rows_per_tile"] = rows
    return {**changed, "split_signatures": patterns}
