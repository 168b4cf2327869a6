"""Prints what `build` does stage by stage and what came of it, and the tables of `evaluate`, `profile` and `tune`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_opt.base.words import size
from edge_opt.build import BuildResult, StageReport
from edge_opt.build.phone import QUALCOMM
from edge_opt.cli import output
from edge_opt.npu import Figures, Profile, Tuning
from edge_opt.npu.figures import ITSELF_SINCE, NOTE, RUNS

_LEGEND = (
    "on NPU: operators that the NPU takes, of all; the others run on the CPU",
    "time ms: one run, as the compiler estimates it: it ranks graphs, and was measured on no device",
    "x first: that time over that of the same signature in the first model; below 1 is faster",
    "spill, fill: bytes written out because on-chip memory is full, and read back; more with --json",
)
_MINUTE = 60
_AUXILIARY = (
    "The auxiliary model is left to the CPU: of it litert-torch would compile the masks alone, and LiteRT-LM makes "
    f"them itself since {ITSELF_SINCE}. For an older one: --set disable_aux_compilation=false"
)


def show_profiles(profiles: Sequence[Profile]) -> None:
    """For each model a row for each signature, and what its parts take; then a legend."""
    first = profiles[0]
    versions = ", ".join(f"{name} {text}" for name, text in first.versions.items())
    flags = " ".join(first.flags) or "the compiler's own defaults"
    output.say(f"{first.chip}, {versions}; flags: {flags}")
    base = {figures.signature: _cycles(figures) for figures in first.signatures}
    for entry in profiles:
        rows = [
            {
                "signature": one.signature,
                **columns(one),
                "x first": _ratio(_cycles(one), base.get(one.signature)),
            }
            for one in entry.signatures
        ]
        output.say("", entry.model, *output.table([tuple(rows[0]), *(tuple(row.values()) for row in rows)]))
        output.say(*step_lines([step.to_dict() for step in entry.steps]))
    output.say("", *(f"  {text}" for text in _LEGEND))
    output.say(*(f"  {note}" for note in dict.fromkeys(note for entry in profiles for note in entry.notes)))


def _cycles(figures: Figures) -> int | None:
    return None if figures.time is None else figures.time.cycles


def _ratio(figure: float | None, first: float | None) -> str:
    return f"{figure / first:.3f}" if figure is not None and first else "-"


def step_lines(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """The table of steps, as `Step.to_dict` gives them, with what it says in sentences; nothing for none."""
    rows, refused = [], []
    for step in steps:
        for part, measured in step["parts"].items():
            figures = measured["figures"] or {}
            taken = f"{figures['taken']}/{figures['operators']}" if figures else "-"
            time = figures.get("time")
            told = f"{time['us'] / 1000:.3f}" if time else "-"
            rows.append((step["name"], part, RUNS[part], taken, told))
            if measured["failure"]:
                refused.append(f"  {measured['signature']} has no estimate: {measured['failure']}")
    heads = ("step", "part", "runs on", "NPU operators", "time ms")
    return ["", *output.table([heads, *rows], left=3), *refused, f"  {NOTE}"] if rows else []


def columns(figures: Figures) -> dict[str, str]:
    """A compiler's figures of one signature, by the heads of the table; a dash where there is no estimate of time."""
    return {
        "on NPU": f"{figures.taken}/{figures.operators}",
        "time ms": "-" if figures.time is None else f"{figures.time.us / 1000:.3f}",
        "spill": size(figures.spill),
        "fill": size(figures.fill),
        "read": size(figures.ddr_read),
        "written": size(figures.ddr_written),
    }


def show_tuning(tuning: Tuning, destination: Path | None) -> None:
    """The trials, best first, why others were left out, and what won."""
    versions = ", ".join(f"{name} {text}" for name, text in tuning.versions.items())
    output.say(f"{tuning.chip}, {versions}; {tuning.extent} of {tuning.signature}, best first", "")
    left = [one for one in tuning.trials if not one.usable]
    usable = [(one.form, one.measured.figures) for one in tuning.trials if one not in left]
    rows = [{"form": form, **columns(figures)} for form, figures in usable if figures is not None]
    output.say(*output.table([tuple(rows[0]), *(tuple(row.values()) for row in rows)]) if rows else ())
    output.say("", *(f"  {note}" for note in tuning.notes))
    output.say(*(f"  left out, {one.form}: {one.measured.failure or one.verdict}" for one in left))
    best = "No winner" if tuning.winner is None else f"Best: {tuning.winner.form}"
    output.say(f"{best}: {tuning.checked}.")
    if destination is not None:
        output.say(f"It is in {destination}: edge-opt convert {tuning.model} --target {destination}")


def show_stage(report: StageReport) -> None:
    """A line on standard error: what a stage took, or that an earlier run's result was kept."""
    memory = "" if report.peak_bytes is None else f"  {size(report.peak_bytes)} of memory"
    spent = f"{_time(report.seconds):>8}" if report.made_now else f"{'kept':>8}"
    line = f"{report.name:<10}{spent}  {size(report.bytes):>10}{memory if report.made_now else ''}"
    for text in (line, *(f"  {note}" for note in report.notes)):
        output.complain(text)


def _time(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    return f"{int(seconds // _MINUTE)} m {int(seconds % _MINUTE):02} s"


def show_build(result: BuildResult) -> None:
    """Warnings, how each signature came out, how good the text is, the bundle, and where the next steps are."""
    output.say(*(f"Warning: {warning}" for warning in result.warnings))
    output.say(
        *(f"{one['signature']}: {one['kept']}, {one['why']}" for one in result.optimized["signatures"])
    )
    output.say(*result.optimized["notes"], *result.caches["notes"])
    if result.vendor == QUALCOMM and result.settings["compile"].get("disable_aux_compilation"):
        output.say(_AUXILIARY)
    if result.evaluation is not None:
        output.say(*(evaluation_lines(result.evaluation) if result.evaluation["models"] else ()))
        output.say(*filter(None, [result.evaluation["note"]]))
    written = Path(str(result.output))
    output.say(
        f"{written} ({size(written.stat().st_size)}) for {result.chip} ({result.vendor}), in {_time(result.seconds)}."
    )
    output.say(f"Next steps, with the phone's commands: {result.next_file}")


def evaluation_lines(evaluation: Mapping[str, Any]) -> list[str]:
    """An `Evaluation` as plain values: a row for each model, then the text that it was scored on."""
    models = evaluation["models"]
    rows = [
        (
            f"{model['source']}, in the NPU's emulator" if model["on_npu"] else model["source"],
            "no number" if model["perplexity"] is None else f"{model['perplexity']:.2f}",
            _of_reference(model, models[0]),
            "-" if model["top1_agreement"] is None else f"{100 * model['top1_agreement']:.1f} %",
            "-" if model["kl"] is None else f"{model['kl']:.4f}",
        )
        for model in models
    ]
    heads = ("", "perplexity", "of the reference's", "top-1 agreement", "mean KL")
    shown = len(heads) - all(model["kl"] is None for model in models)
    scored = f"On {models[0]['tokens']} tokens of {evaluation['prompts']} held-out prompts"
    skipped = f"; {evaluation['skipped']} more are longer than the cache" if evaluation["skipped"] else ""
    return [*output.table([row[:shown] for row in (heads, *rows)]), f"{scored}{skipped}."]


def _of_reference(model: Mapping[str, Any], reference: Mapping[str, Any]) -> str:
    """The ratio of two perplexities, with its standard error where that is known."""
    error = model["ratio_error"]
    return _ratio(model["perplexity"], reference["perplexity"]) + (f" ± {error:.3f}" if error else "")
