"""Prints what `build` does stage by stage and what came of it, and the tables of `evaluate`, `profile` and `tune`."""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_opt.base.words import size
from edge_opt.build import BuildResult, StageReport
from edge_opt.build.phone import QUALCOMM
from edge_opt.cli import output
from edge_opt.npu import Figures, Profile, Tuning
from edge_opt.npu.figures import ITSELF_SINCE, NOTE

LEGEND = {
    "x first": "estimated time over that of the same signature in the first model; below 1 is faster",
    "NPU operators": "operators that the NPU takes, of all; the others run on the CPU",
    "time ms": "one run, as the compiler estimates it; it ranks graphs, and was measured on no device",
    "between": "the bounds of that estimate, in ms",
    "no cost": "operators that are not in the estimate",
    "spill": "bytes written out because on-chip memory is full; fill: bytes read back",
    "x floor": "DDR read over what has to be read at least: every weight and input once",
    "run list": "steps of the compiled graph",
}
_MINUTE = 60.0
_AUXILIARY = (
    "The auxiliary model is left to the CPU: of it litert-torch would compile the masks alone, and LiteRT-LM makes "
    f"them itself since {ITSELF_SINCE}. For an older one: --set disable_aux_compilation=false"
)


def show_profiles(profiles: Sequence[Profile]) -> None:
    """A row for each signature of each model, a legend, and what runs on the CPU instead."""
    first, names = profiles[0], _names([entry.model for entry in profiles])
    versions = ", ".join(f"{name} {text}" for name, text in first.versions.items())
    flags = " ".join(first.flags) or "the compiler's own defaults"
    output.say(f"{first.chip}, {versions}; flags: {flags}", "")
    several = len(profiles) > 1
    base = {figures.signature: _duration(figures) for figures in first.signatures}
    heads = columns(first.signatures[0])
    rows: list[tuple[str, ...]] = [("model", "signature", *(["x first"] if several else []), *heads)]
    for name, entry in zip(names, profiles, strict=True):
        for figures in entry.signatures:
            ratio = [_ratio(_duration(figures), base.get(figures.signature))] if several else []
            rows.append((name, figures.signature, *ratio, *columns(figures).values()))
    output.say(*output.table(rows, left=2), "")
    output.say(*(f"  {head}: {text}" for head, text in LEGEND.items() if head in rows[0]))
    output.say(*(f"  {note}" for note in dict.fromkeys(note for entry in profiles for note in entry.notes)))
    for name, entry in zip(names, profiles, strict=True):
        told = step_lines([step.to_dict() for step in entry.steps])
        output.say(*(["", f"{name}, by step:"] if told and several else []), *told)


def _names(paths: Sequence[str]) -> list[str]:
    """The files' names, with as many folders as it takes to tell different files apart."""
    parts = [Path(path).parts for path in paths]
    counts = range(1, max(map(len, parts)) + 1)
    told = ([str(Path(*own[-count:])) for own in parts] for count in counts)
    return next((names for names in told if len({*names}) == len({*parts})), list(paths))


def _duration(figures: Figures) -> int | None:
    return None if figures.time is None else figures.time.cycles


def _ratio(figure: float | None, first: float | None) -> str:
    return f"{figure / first:.3f}" if figure is not None and first else "-"


def step_lines(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """The table of steps, as `Step.to_dict` gives them, with what it says in sentences; nothing for none."""
    rows, refused = [], []
    for step in steps:
        for part in step["parts"]:
            measured = part["measured"]
            figures = measured["figures"] or {}
            taken = f"{figures['taken']}/{figures['operators']}" if figures else "-"
            time = figures.get("time")
            told = f"{time['us'] / 1000:.3f}" if time else "-"
            rows.append((step["name"], part["name"], part["runs"], taken, told))
            if measured["failure"]:
                refused.append(f"  {measured['signature']} has no estimate: {measured['failure']}")
    heads = ("step", "part", "runs on", "NPU operators", "time ms")
    return ["", *output.table([heads, *rows], left=3), *refused, f"  {NOTE}"] if rows else []


def columns(figures: Figures) -> dict[str, str]:
    """What a compiler says of one signature, by the heads of the table; dashes where there is no estimate of time."""
    operators = {"NPU operators": f"{figures.taken}/{figures.operators}"}
    middle, between, without_cost = "-", "-", "-"
    if figures.time is not None:
        time = figures.time
        low, middle, high = (f"{us / 1000:.3f}" for us in (time.us_low, time.us, time.us_high))
        between, without_cost = f"{low}-{high}", str(time.without_cost)
    return {
        **operators,
        "partitions": str(figures.partitions),
        "time ms": middle,
        "between": between,
        "no cost": without_cost,
        "spill": size(figures.spill),
        "fill": size(figures.fill),
        "DDR read": size(figures.ddr_read),
        "x floor": "-" if figures.read_ratio is None else f"{figures.read_ratio:.3f}",
        "DDR written": size(figures.ddr_written),
        "run list": str(figures.run_list),
    }


def show_tuning(tuning: Tuning, destination: Path | None) -> None:
    """The trials, best first, why others were left out, and what won."""
    versions = ", ".join(f"{name} {text}" for name, text in tuning.versions.items())
    what = f"{tuning.target.name}: {tuning.chip}, {versions}"
    output.say(f"{what}; {tuning.extent} of {tuning.signature}, best first", "")
    figured = [(trial, trial.measured.figures) for trial in tuning.trials if trial.usable]
    told = [(trial, columns(figures)) for trial, figures in figured if figures]
    rows: list[tuple[str, ...]] = [("form", *(told[0][1] if told else ()), "seconds")]
    rows += [(trial.form, *cells.values(), f"{trial.seconds:.1f}") for trial, cells in told]
    output.say(*output.table(rows, left=1), "", *(f"  {note}" for note in tuning.notes))
    left = [trial for trial in tuning.trials if not trial.usable]
    output.say(*(f"  left out, {trial.form}: {trial.measured.failure or trial.verdict}" for trial in left))
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
    """The bundle, how each signature came out, and what to do next."""
    kept = [f"{one['signature']}: {one['kept']}, {one['why']}" for one in result.optimized["signatures"]]
    output.say("", *kept, *result.optimized["notes"], *step_lines(result.optimized["steps"]), "")
    if result.vendor == QUALCOMM and result.settings["compile"].get("disable_aux_compilation"):
        output.say(_AUXILIARY)
    output.say(*result.caches["notes"])
    if result.sections_put_back:
        names = ", ".join(result.sections_put_back)
        output.say(f"Sections that litert-torch's packing left out are back: {names}")
    if result.evaluation is not None:
        output.say(*_evaluation(result), "")
    written = Path(str(result.output))
    made = f"{written} ({size(written.stat().st_size)}) for {result.chip} ({result.vendor})"
    output.say(f"{made}: prefill and decode are one call of the NPU each.", "")
    if result.next is not None:
        output.say(*result.next.lines())


def _evaluation(result: BuildResult) -> list[str]:
    """The table of the models on the way, each with the estimated time of what it runs, then where the text is from."""
    found = result.evaluation or {}
    signatures = result.optimized["signatures"]
    times = {
        "": [f"{entry['signature']}, ms" for entry in signatures],
        "quantized": [_milliseconds(entry.get("before")) for entry in signatures],
        "converted": [
            _milliseconds(entry.get("after" if entry["kept"] == "converted" else "before"))
            for entry in signatures
        ],
    }
    told = evaluation_lines(found, times) if found["models"] else []
    return [*told, *filter(None, [found["note"]])]


def _milliseconds(figures: Mapping[str, Any] | None) -> str:
    time = (figures or {}).get("time")
    return "-" if time is None else f"{time['us'] / 1000:.3f}"


def evaluation_lines(
    evaluation: Mapping[str, Any], more: Mapping[str, Sequence[str]] | None = None
) -> list[str]:
    """An `Evaluation` as plain values: a row for each model, then the text that it was scored on.

    `more` has further cells by a model's name, the heads under "".
    """
    further = more or {}
    head = ("", "perplexity", "of the reference's", "top-1 agreement", *further.get("", ()))
    reference = evaluation["models"][0]["perplexity"]
    rows = [
        (
            model["source"],
            "no number" if model["perplexity"] is None else f"{model['perplexity']:.2f}",
            _ratio(model["perplexity"], reference),
            "-" if model["top1_agreement"] is None else f"{100 * model['top1_agreement']:.1f} %",
            *further.get(model["source"], ["-"] * len(further.get("", ()))),
        )
        for model in evaluation["models"]
    ]
    scored = f"On {evaluation['models'][0]['tokens']} tokens of {evaluation['prompts']} held-out prompts"
    skipped = f"; {evaluation['skipped']} more are longer than the cache" if evaluation["skipped"] else ""
    return [*output.table([head, *rows]), "", f"{scored}{skipped}."]
