"""Prints the progress and result of `build`, and the tables of `evaluate`, `profile` and `tune`."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from edge_opt.base.words import size
from edge_opt.building import BuildResult, StageReport
from edge_opt.building.evaluation import Evaluation, ModelScore
from edge_opt.cli import output
from edge_opt.npu import Figures, Profile, TimeEstimate, Tuning
from edge_opt.targets.placement import placement_lines

_FIGURES = ("on NPU", "pieces", "est. ms", "spill", "at least", "read", "written")
_MINUTE = 60


def show_profiles(profiles: Sequence[Profile]) -> None:
    """Print a table of signatures for each model."""
    first = profiles[0]
    flags = " ".join(first.flags) or "the defaults of the compiler"
    output.say(f"{first.chip}, {_versions(first.versions)}; flags: {flags}")
    base = {one.signature: one.time for one in first.signatures}
    for entry in profiles:
        rows = [
            (one.signature, *_columns(one), _ratio(one.time, base.get(one.signature)))
            for one in entry.signatures
        ]
        output.say("", entry.model, *output.table([("signature", *_FIGURES, "x first"), *rows]))
        parted = [one.placement for one in entry.signatures if one.taken < one.operators]
        output.say(*placement_lines(parted, "the compiler"))
    notes: dict[str, None] = {}
    for entry in profiles:
        notes |= dict.fromkeys(entry.notes)
    output.say("", *notes)


def _versions(versions: Mapping[str, str]) -> str:
    names = {"qairt": "QAIRT", "qnn": "QNN interface"}
    return ", ".join(f"{names.get(name, name)} {text}" for name, text in versions.items())


def _columns(figures: Figures) -> tuple[str, ...]:
    """The values of `_FIGURES`."""
    moved = (figures.spill, figures.least_read, figures.ddr_read, figures.ddr_written)
    time = "-" if figures.time is None else f"{figures.time.us / 1000:.3f}"
    sizes = ["-" if count is None else size(count) for count in moved]
    return (f"{figures.taken}/{figures.operators}", str(figures.partitions), time, *sizes)


def _ratio(time: TimeEstimate | None, first: TimeEstimate | None) -> str:
    return f"{time.us / first.us:.3f}" if time and first and first.us else "-"


def show_tuning(tuning: Tuning, destination: Path | None) -> None:
    """Print the trials, best first, the failed ones with reasons, and the winner."""
    output.say(f"{tuning.chip}, {_versions(tuning.versions)}; {tuning.signature}, best first", "")
    rows: list[tuple[str, ...]] = []
    skipped: list[str] = []
    for trial in tuning.trials:
        figures = trial.measured.figures
        if figures is None:
            skipped.append(f"  skipped, {trial.form}: {trial.measured.failure}")
        else:
            rows.append((trial.form, *_columns(figures)))
    if rows:
        output.say(*output.table([("form", *_FIGURES), *rows]))
    output.say("", *(f"  {note}" for note in tuning.notes))
    output.say(*skipped)
    best = "No winner" if tuning.winner is None else f"Best: {tuning.winner.form}"
    output.say(f"{best}, {tuning.checked}.")
    if destination is not None:
        output.say(
            f"Written to {destination}; next: edge-opt convert {tuning.model} --target {destination}"
        )


def show_stage(report: StageReport) -> None:
    """Print a stage's time and memory (or "reused"), and its outcomes and notes, on standard error."""
    spent = _time(report.seconds) if report.made_now else "reused"
    memory = f"  {size(report.peak_bytes)} of memory" if report.made_now else ""
    output.complain(f"{report.name:<10}{spent:>8}  {size(report.bytes):>10}{memory}")
    for note in report.notes:
        output.complain(f"  {note}")


def _time(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    return f"{int(seconds // _MINUTE)} m {int(seconds % _MINUTE):02} s"


def show_build(result: BuildResult) -> None:
    """Print warnings, each signature's outcome, the quality, and the bundle."""
    output.say(*(f"Warning: {warning}" for warning in result.warnings))
    output.say(*result.optimized["notes"], *result.caches["notes"])
    if result.evaluation is not None:
        output.say(*(evaluation_lines(result.evaluation) if result.evaluation.models else ()))
        output.say(result.evaluation.note)
    written = Path(str(result.output))
    file = f"{written} ({size(written.stat().st_size)})"
    output.say(f"{file} for {result.chip} ({result.vendor}), in {_time(result.seconds)}.")
    output.say(
        f"The uncompiled bundle, {result.converted}, also runs on this machine (page Run on Android)."
    )


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """A row for each model, then the amount of text scored."""
    heads = ("", "bits", "tokens", "perplexity", "x reference", "top-1 agreement", "mean KL")
    rows = [heads, *map(_score_row, evaluation.models)]
    if all(model.kl is None for model in evaluation.models):
        rows = [row[:5] for row in rows]
    skipped = f"; {evaluation.skipped} skipped, longer than the cache" if evaluation.skipped else ""
    return [
        *output.table(rows),
        f"Scored on {evaluation.prompts} held-out prompts{skipped}.",
    ]


def _score_row(model: ModelScore) -> tuple[str, ...]:
    agreement = None if model.top1_agreement is None else 100 * model.top1_agreement
    return (
        f"{model.source}, in the NPU's emulator" if model.on_npu else model.source,
        _number(model.bits, "{:.2f}"),
        str(model.tokens),
        _number(model.perplexity, "{:.2f}", "no number"),
        _number(model.ratio, "{:.3f}") + _number(model.ratio_error or None, " ± {:.3f}", ""),
        _number(agreement, "{:.1f} %"),
        _number(model.kl, "{:.4f}"),
    )


def _number(value: float | None, text: str, otherwise: str = "-") -> str:
    return text.format(value) if value is not None and math.isfinite(value) else otherwise
