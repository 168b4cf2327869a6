"""Prints what a target's compiler makes of models: side by side for `profile`, in every form for `tune`."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from edge_opt.cli import output
from edge_opt.npu import Profile, SpillFigures, Tuning
from edge_opt.npu.figures import NOTE, Figures
from edge_opt.output.words import size

LEGEND = {
    "x first": "estimated time over that of the same signature in the first model; below 1 is faster",
    "NPU operators": "operators that the NPU takes, of all; the others run on the CPU",
    "time ms": "one run, as the compiler estimates it; it ranks graphs, and was measured on no device",
    "between": "the bounds of that estimate, in ms",
    "no cost": "operators that are not in the estimate",
    "spill": "bytes written out because on-chip memory is full; fill: bytes read back",
    "x floor": "DDR read over what has to be read at least: every weight and input once",
    "run list": "steps of the compiled graph",
    "cycles": "one run, as Vela's performance model estimates it",
    "SRAM": "memory used, on the chip and (DRAM) off it; traffic: bytes moved in one run",
}


def show(profiles: Sequence[Profile]) -> None:
    """A row for each signature of each model, a legend, and what runs on the CPU instead."""
    first, names = profiles[0], _names([entry.model for entry in profiles])
    versions = ", ".join(f"{name} {text}" for name, text in first.versions.items())
    flags = " ".join(first.flags) or "the compiler's own defaults"
    output.say(f"{first.target}: {first.chip}, {versions}; flags: {flags}", "")
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
    reasons = _refusals(zip(names, profiles, strict=True))
    if reasons:
        output.say("", "on the CPU:", *(f"  {text}" for text in reasons))


def _names(paths: Sequence[str]) -> list[str]:
    """The files' names, with as many folders as it takes to tell different files apart."""
    parts = [Path(path).parts for path in paths]
    counts = range(1, max(map(len, parts)) + 1)
    told = ([str(Path(*own[-count:])) for own in parts] for count in counts)
    return next((names for names in told if len({*names}) == len({*parts})), list(paths))


def _duration(figures: Figures) -> int | None:
    if isinstance(figures, SpillFigures):
        return None if figures.time is None else figures.time.cycles
    return figures.cycles


def _ratio(duration: int | None, first: int | None) -> str:
    return f"{duration / first:.3f}" if duration is not None and first else "-"


def step_lines(steps: Iterable[Mapping[str, Any]]) -> list[str]:
    """The table of steps, as `Step.to_dict` gives them, with what it says in sentences; nothing for none."""
    rows, refused = [], []
    for step in steps:
        for part in step["parts"]:
            figures = part["figures"] or {}
            taken = f"{figures['taken']}/{figures['operators']}" if figures else "-"
            time = figures.get("time")
            told = f"{time['us'] / 1000:.3f}" if time else "-"
            rows.append((step["name"], part["name"], part["runs"], taken, told))
            if part["failure"]:
                refused.append(f"  {part['signature']} has no estimate: {part['failure']}")
    heads = ("step", "part", "runs on", "NPU operators", "time ms")
    return ["", *output.table([heads, *rows], left=3), *refused, f"  {NOTE}"] if rows else []


def columns(figures: Figures) -> dict[str, str]:
    """What a compiler says of one signature, by the heads of the table; dashes where there is no estimate of time."""
    operators = {"NPU operators": f"{figures.taken}/{figures.operators}"}
    if not isinstance(figures, SpillFigures):
        return {
            **operators,
            "cycles": str(figures.cycles),
            "SRAM": size(figures.sram),
            "DRAM": size(figures.dram),
            "SRAM traffic": size(figures.sram_traffic),
            "DRAM traffic": size(figures.dram_traffic),
        }
    middle, between, without_cost = "-", "-", "-"
    if figures.time is not None:
        low, middle, high = (
            f"{us / 1000:.3f}" for us in (figures.time.us_low, figures.time.us, figures.time.us_high)
        )
        between, without_cost = f"{low}-{high}", str(figures.time.without_cost)
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


def _refusals(profiles: Iterable[tuple[str, Profile]]) -> list[str]:
    lines = []
    for name, entry in profiles:
        counts: Counter[str] = Counter()
        for figures in entry.signatures:
            if not isinstance(figures, SpillFigures):
                counts.update(figures.on_cpu)
        lines += [f"{name}: {count} x {reason}" for reason, count in counts.most_common()]
    return lines


def show_tuning(tuning: Tuning, destination: Path | None) -> None:
    """The trials, best first, why others were left out, and what won."""
    versions = ", ".join(f"{name} {text}" for name, text in tuning.versions.items())
    what = f"{tuning.target.name}: {tuning.chip}, {versions}"
    output.say(f"{what}; {tuning.extent} of {tuning.signature}, best first", "")
    told = [(trial, columns(trial.figures)) for trial in tuning.trials if trial.usable and trial.figures]
    rows: list[tuple[str, ...]] = [("form", *(told[0][1] if told else ()), "seconds")]
    rows += [(str(trial.choice), *cells.values(), f"{trial.seconds:.1f}") for trial, cells in told]
    output.say(*output.table(rows, left=1), "", *(f"  {note}" for note in tuning.notes))
    left = [trial for trial in tuning.trials if not trial.usable]
    output.say(*(f"  left out, {trial.choice}: {trial.failure or trial.verdict}" for trial in left))
    best = "No winner" if tuning.winner is None else f"Best: {tuning.winner.choice}"
    output.say(f"{best}: {tuning.checked}.")
    if destination is not None:
        output.say(f"It is in {destination}: edge-opt convert {tuning.model} --target {destination}")
