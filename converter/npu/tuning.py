"""Rewrites a signature in every form, compiles and ranks them, and makes a target of the best."""

import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_opt.attention.block import FORMS, Block
from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.record import Record
from edge_opt.base.words import Progress
from edge_opt.conversion import convert
from edge_opt.ir import Model, load, save
from edge_opt.ir.opening import Opened
from edge_opt.ir.text import subgraph_text
from edge_opt.npu.comparing import compare_on_npu
from edge_opt.npu.figures import Measured
from edge_opt.npu.hexagon import Compiler, compiling_threads, measure
from edge_opt.npu.layers import cut_entry_point, largest_attention, layer_ends
from edge_opt.npu.profiling import versions
from edge_opt.npu.sdk import find_sdk
from edge_opt.targets import Target, TargetLike, load_target, target_names
from edge_opt.targets.chips import DEFAULT_CHIP

BASE = "qualcomm-htp"
"""The target whose compiler can be run here."""
_TILES, _LEAST_ROWS = 4, 2
_SMALL_TILES = (128, 64)
_ALWAYS = 1  # a least head size that every attention has
_CHECKED_LAYERS = 2
Changes = Mapping[str, Any] | None
"""Facts of a target that a form changes; None leaves the model as exported."""


@dataclass(frozen=True, slots=True)
class Trial(Record):
    """One form, compiled.

    `verdict` says what is wrong with the numbers that the emulator computes; empty where nothing is, or nobody looked.
    """

    form: str
    measured: Measured
    seconds: float
    verdict: str = ""

    _or_null = ("verdict",)

    @property
    def usable(self) -> bool:
        """Whether it compiled, and nothing is known to be wrong with its numbers."""
        return self.measured.figures is not None and not self.verdict


@dataclass(frozen=True, slots=True)
class Tuning(Record):
    """All trials, best first; those that failed, or whose numbers are wrong, come last.

    `layers` is None where the whole signature was compiled. `long_context`: one head does not fit on the chip.
    `checked` says how the winner's numbers were checked, or why they were not, `changes` what it changes of the target.
    """

    model: str
    signature: str
    layers: int | None
    long_context: bool
    target: Target
    chip: str
    versions: Mapping[str, str]
    trials: tuple[Trial, ...]
    checked: str = ""
    changes: Changes = None
    notes: tuple[str, ...] = ()

    _properties = ("winner",)

    @property
    def winner(self) -> Trial | None:
        """The best one that compiled and whose numbers are right, if there is any."""
        return self.trials[0] if self.trials and self.trials[0].usable else None

    @property
    def extent(self) -> str:
        """How much of the signature was compiled, in words."""
        return {None: "all layers", 1: "one layer"}.get(self.layers, f"{self.layers} layers")

    def to_dict(self) -> dict[str, Any]:
        """For `--json`; of the target only the name."""
        return {**Record.to_dict(self), "target": self.target.name}


def tune(
    path: AnyPath,
    target: TargetLike = BASE,
    *,
    signature: str | None = None,
    layers: int | None = None,
    sdk: AnyPath | None = None,
    chip: str | None = None,
    seconds: float | None = 1800.0,
    jobs: int | None = None,
    executor: Executor | None = None,
    progress: Progress | None = None,
) -> Tuning:
    """Try every form on one signature of a model, for a Hexagon NPU. The file is only read.

    Trials are ranked by the compiler's estimate of time, then by bytes. The best trial's numbers are checked in the
    emulator, on two layers at their real shapes: they must be the same bits as before. If they are not, the next trial
    is taken.

    Args:
        path: a .tflite model as exported, or a bundle: then its prefill/decode model.
        target: the target to vary: qualcomm-htp, or a target (or its file) of yours.
        signature: the entry point to tune for; None the one with the largest attention.
        layers: only so many, the first ones, for a cheaper look; None the whole signature.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip; None is SM8750.
        seconds: after so long a trial is given up; None never.
        jobs: how many trials run at a time; None as many as there are cores that have nothing to do.
        executor: what carries them out instead: any of `concurrent.futures`, a cluster's too. Its workers need the same
            files at the same paths, and edge-opt.
        progress: called with (stage, done, total).

    Raises:
        UsageError: the target is for other NPUs, or there is no such signature, or no attention in it.
        CompilerMissingError: the compiler, or a library that it needs, is not installed.
        ModelFormatError: the file is not a model.
    """
    base, tell = load_target(target), progress or (lambda *_: None)
    if base.name != BASE and base.name in target_names():
        raise UsageError(
            f"no compiler for target '{base.name}' can be run here: give {BASE}, or a target file of yours"
        )
    compiler = Compiler(chip or DEFAULT_CHIP, (), sdk, seconds)
    no_probe = find_sdk(sdk).no_probe
    whole = Opened(path).main().model
    name, _ = largest_attention(whole, signature)
    one_layer = layer_ends(whole, name, 1)
    model = cut_entry_point(whole, name, () if layers is None else layer_ends(whole, name, layers))
    _, attention = largest_attention(model)
    forms: dict[str, Changes] = {}
    graphs = set()
    for form, changes in variants(attention, base):
        layer = rewritten(cut_entry_point(whole, name, one_layer), applied(base, changes))
        graph = subgraph_text(layer.subgraphs[0])
        # Forms that give the same graph are one: without norms there is no other cut at the norm.
        if graph not in graphs:
            graphs.add(graph)
            forms[form] = changes
    targets = {form: applied(base, changes) for form, changes in forms.items()}
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-opt-"))
        exported = f"{folder}/exported.tflite"
        save(model, exported)
        running = executor or stack.enter_context(compiling_threads(jobs or _idle_cores()))
        waiting = [running.submit(try_form, exported, *one, compiler.judge()) for one in targets.items()]
        tell("compiling", 0, len(waiting))
        for done, _ in enumerate(as_completed(waiting), 1):
            tell("compiling", done, len(waiting))
        trials = sorted((future.result() for future in waiting), key=lambda trial: trial.measured.rank)
        checked = f"numbers not checked: {no_probe}"
        if not no_probe:
            trials, checked = _checked(trials, exported, targets, compiler, tell)
    figures = [trial.measured.figures for trial in trials if trial.measured.figures is not None]
    return Tuning(
        model=os.fspath(path),
        signature=name,
        layers=layers,
        long_context=base.overflows(attention),
        target=base,
        chip=compiler.chip,
        versions=versions(figures[0].qnn) if figures else {},
        trials=tuple(trials),
        checked=checked,
        changes=forms[trials[0].form],
        notes=tuple(one.note for one in figures[:1] if one.note),
    )


def variants(attention: Block, base: Target) -> Iterator[tuple[str, Changes]]:
    """As exported, with the mask before the join and without, and every form.

    Of the form that is mostly the best also tiles of rows, the other cut at the norm and the other place of the mask.
    """
    yield "as exported", None
    yield "as exported, the mask before the join", {"mask_before_join": True}
    for form in FORMS:
        yield form, {"form": form, "rows_per_tile": None}
    best, above = "split-above", {"form": "split-above", "rows_per_tile": None}
    if attention.head_size < (base.norm_per_head_from or _ALWAYS):
        yield f"{best}, a norm for each head", {**above, "norm_per_head_from": _ALWAYS}
    else:
        yield f"{best}, one norm for all", {**above, "norm_per_head_from": attention.head_size + 1}
    place = "after" if base.mask_before_join else "before"
    yield f"{best}, the mask {place} the join", {**above, "mask_before_join": not base.mask_before_join}
    rows = attention.query_length
    for size in dict.fromkeys((rows // _TILES, *_SMALL_TILES)):
        if _LEAST_ROWS <= size < rows and rows % size == 0:
            yield f"{best}, tiles of {size} rows", {**above, "rows_per_tile": size}


def applied(base: Target, changes: Changes) -> Target | None:
    """The target with a form for all signatures and lengths; None for the model as exported."""
    if changes is None:
        return None
    split = ("*",) if "form" in changes else ()
    return replace(base, **{**changes, "long_context": {}, "split_signatures": split})


def rewritten(model: Model, target: Target | None) -> Model:
    """The model in the target's form, not verified; as it is where that is None."""
    if target is not None:
        convert(model, target=target, verify="none")
    return model


def try_form(exported: str, form: str, target: Target | None, compiler: Compiler) -> Trial:
    """Rewrite the exported model, of one entry point, and compile that; maybe in another process."""
    started, model = time.perf_counter(), rewritten(load(exported), target)
    measured = measure(model, model.entry_points()[0][0], compiler)
    return Trial(form, measured, round(time.perf_counter() - started, 2))


def _idle_cores() -> int:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, round(cores - os.getloadavg()[0]))


def _checked(
    ranked: Sequence[Trial],
    exported: str,
    targets: Mapping[str, Target | None],
    compiler: Compiler,
    tell: Progress,
) -> tuple[list[Trial], str]:
    """The trials with the best one in front whose numbers are right, and what is to be said of the check."""
    wrong: list[Trial] = []
    for place, trial in enumerate(ranked):
        if not trial.usable:
            break
        target = targets[trial.form]
        if target is None:
            return [*ranked[place:], *wrong], "its numbers are those that the compiler makes of the export"
        tell(f"checking the numbers of {trial.form}", place, len(ranked))
        found = compare_on_npu(
            exported,
            rewritten(load(exported), target),
            sdk=compiler.sdk,
            chip=compiler.chip,
            layers=_CHECKED_LAYERS,
            seconds=compiler.seconds,
        )
        if found.equal:
            where = f"{_CHECKED_LAYERS} layers on {compiler.chip}'s emulator"
            return [*ranked[place:], *wrong], f"the same bits as exported, {where}"
        wrong.append(replace(trial, verdict=found.summary()))
    return [*wrong, *(trial for trial in ranked if not trial.usable)], "no trial's numbers are right"


def tuned_target(tuning: Tuning, name: str | None = None) -> Target:
    """The target with the form of the winner, and where that comes from; its name is `<target>-tuned` where None.

    Raises:
        UsageError: every trial failed.
    """
    base, winner = tuning.target, tuning.winner
    if winner is None:
        raise UsageError(
            f"nothing compiled for target '{base.name}' with the right numbers: there is no winner to write"
        )
    where = f"{tuning.extent} of {Path(tuning.model).name}, {tuning.signature}"
    changed: dict[str, Any] = dict(tuning.changes or {})
    splits, known = "form" in changed, base.split_signatures
    if splits and tuning.long_context:
        form = {name: changed.pop(name) for name in ("form", "rows_per_tile")}
        changed["long_context"] = {name: value for name, value in form.items() if value is not None}
    if splits != base.splits(tuning.signature):
        matching = [one for one in known if replace(base, split_signatures=(one,)).splits(tuning.signature)]
        known = (*known, tuning.signature) if splits else tuple(one for one in known if one not in matching)
    changed["split_signatures"] = known
    if tuning.changes is None and not known:
        changed["mask_before_join"] = False  # the trial was the exported file, with no pass run on it
    source = f"measured with `edge-opt tune` on {where}"
    target = replace(
        base,
        **changed,
        name=name or f"{base.name}-tuned",
        summary=f"{base.name} as tuned for {tuning.chip} on {where}: {winner.form}",
        versions={**tuning.versions, "chip": tuning.chip},
    )
    kept = {name: text for name, text in base.sources.items() if name not in changed}
    told = {name: source for name in changed if name in target.stated()}
    return replace(target, sources={**kept, **told})
