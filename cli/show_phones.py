"""Prints the progress and result of `build`, and the tables of `evaluate`, `profile` and `tune`."""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote

from edge_opt.base.words import size
from edge_opt.building import BuildResult, StageReport
from edge_opt.building.evaluation import Evaluation, ModelScore
from edge_opt.cli import output
from edge_opt.inspection.report import Content, GainPicture, Table, to_html
from edge_opt.npu import Figures, Profile, TimeEstimate, Tuning
from edge_opt.targets.placement import placement_lines

_FIGURES = ("on NPU", "pieces", "est. ms", "spill", "at least", "read", "written")
_MINUTE = 60


def show_profiles(profiles: Sequence[Profile]) -> None:
    """Print a table of signatures for each model, and what runs where in those that do not run as a whole."""
    output.say(_settings(profiles[0]))
    for entry, (model, rows) in zip(profiles, _tables(profiles), strict=True):
        parted = [one.placement for one in entry.signatures if one.taken < one.operators]
        output.say("", model, *output.table(rows), *placement_lines(parted, "the compiler"))
    output.say("", *_notes(profiles))


def profile_page(profiles: Sequence[Profile], gain: GainPicture) -> str:
    """The profiles as an HTML page that begins with the picture of the gain."""
    sections: list[tuple[str, Content]] = [
        (gain.title, gain.rows),
        ("Limits of the estimates", gain.note),
        *_tables(profiles),
    ]
    sections += [("Notes", note) for note in _notes(profiles)]
    return to_html(profiles[-1].model, _settings(profiles[0]), sections)


def _settings(first: Profile) -> str:
    flags = " ".join(first.flags) or "the defaults of the compiler"
    return f"{first.chip}, {_versions(first.versions)}; flags: {flags}"


def _notes(profiles: Sequence[Profile]) -> dict[str, None]:
    return dict.fromkeys(note for entry in profiles for note in entry.notes)


def _tables(profiles: Sequence[Profile]) -> Iterator[tuple[str, Table]]:
    """A table of signatures for each model, with times relative to the first model's."""
    first_times = {one.signature: one.time for one in profiles[0].signatures}
    for entry in profiles:
        rows: Table = [("signature", *_FIGURES, "x first")]
        for one in entry.signatures:
            ratio = _ratio(one.time, first_times.get(one.signature))
            rows.append((one.signature, *_columns(one), ratio))
        yield entry.model, rows


def _versions(versions: Mapping[str, str]) -> str:
    titles = {"qairt": "QAIRT", "qnn": "QNN interface"}
    return ", ".join(f"{titles.get(name, name)} {version}" for name, version in versions.items())


def _columns(figures: Figures) -> tuple[str, ...]:
    """The values of `_FIGURES`."""
    on_npu = f"{figures.taken}/{figures.operators}"
    time = "-" if figures.time is None else f"{figures.time.us / 1000:.3f}"
    moved = (figures.spill, figures.least_read, figures.ddr_read, figures.ddr_written)
    sizes = ["-" if count is None else size(count) for count in moved]
    return (on_npu, str(figures.partitions), time, *sizes)


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
    spent = "reused"
    memory = ""
    if report.made_now:
        spent = _time(report.seconds)
        memory = f"  {size(report.peak_bytes)} of memory"
    output.complain(f"{report.name:<10}{spent:>8}  {size(report.bytes):>10}{memory}")
    for note in report.notes:
        output.complain(f"  {note}")


def _time(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    return f"{int(seconds // _MINUTE)} m {int(seconds % _MINUTE):02} s"


def show_build(result: BuildResult) -> None:
    """Print warnings, then four lines: the bundle, its estimated times, its quality, and the next command."""
    output.say(*(f"Warning: {warning}" for warning in result.warnings))
    written = Path(str(result.output))
    file = f"{written} ({size(written.stat().st_size)})"
    output.say(f"{file} for {result.chip} ({result.vendor}), in {_time(result.seconds)}.")
    output.say(_estimates(result), _quality(result))
    output.say(
        f"Next: adb push {quote(str(written))} /data/local/tmp/ (page Run on Android); {result.converted} runs on this "
        f"machine."
    )


def _estimates(result: BuildResult) -> str:
    """Each signature's estimate before and after, on one line."""
    parts: list[str] = []
    for gain in result.optimized.get("signatures", ()):
        before = gain["before"]
        kept = gain["after"] if gain["kept"] == "converted" else before
        if before and before["time"] and kept and kept["time"]:
            times = f"{before['time']['us'] / 1000:.3f} -> {kept['time']['us'] / 1000:.3f} ms"
            parts.append(f"{gain['signature']} {times}")
    if not parts:
        return "No estimate of time."
    return f"{', '.join(parts)}, as the compiler estimates; no phone was timed."


def _quality(result: BuildResult) -> str:
    """The bundle's perplexity with its error, on one line, and its divergence in the emulator."""
    evaluation = result.evaluation
    if evaluation is None:
        return "Not evaluated."
    if not evaluation.models:
        return evaluation.note
    _, bundle, *emulated = evaluation.models
    ratio = _ratio_and_error(bundle)
    parts = [f"Perplexity {ratio} times the checkpoint's on {bundle.tokens} tokens"]
    parts += [f"mean KL {_number(one.kl, '{:.4f}')} in the NPU's emulator" for one in emulated]
    return f"{', '.join(parts)}. {evaluation.note}"


def evaluation_lines(evaluation: Evaluation) -> list[str]:
    """A row for each model, then the amount of text scored."""
    heads = ("", "bits", "tokens", "perplexity", "x reference", "top-1 agreement", "mean KL")
    rows = [heads, *map(_score_row, evaluation.models)]
    if all(model.kl is None for model in evaluation.models):
        rows = [row[:5] for row in rows]  # LiteRT-LM reports neither of the last two
    scored = f"Scored on {evaluation.prompts} held-out prompts"
    if evaluation.skipped:
        scored += f"; {evaluation.skipped} skipped, longer than the cache"
    return [*output.table(rows), f"{scored}."]


def _score_row(model: ModelScore) -> tuple[str, ...]:
    agreement = None if model.top1_agreement is None else 100 * model.top1_agreement
    return (
        f"{model.source}, in the NPU's emulator" if model.on_npu else model.source,
        _number(model.bits, "{:.2f}"),
        str(model.tokens),
        _number(model.perplexity, "{:.2f}", "no number"),
        _ratio_and_error(model),
        _number(agreement, "{:.1f} %"),
        _number(model.kl, "{:.4f}"),
    )


def _ratio_and_error(model: ModelScore) -> str:
    return _number(model.ratio, "{:.3f}") + _number(model.ratio_error or None, " ± {:.3f}", "")


def _number(value: float | None, text: str, otherwise: str = "-") -> str:
    return text.format(value) if value is not None and math.isfinite(value) else otherwise
