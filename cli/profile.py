"""`edge-opt profile`: prints what a target's compiler makes of models, side by side."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from edge_opt.cli import output
from edge_opt.npu import Figures, Profile, SpillFigures, profile

if TYPE_CHECKING:
    from edge_opt.cli.app import Profile as ProfileCommand

_SPILL_HEADS = (
    "NPU operators",
    "partitions",
    "time ms",
    "between",
    "no cost",
    "spill",
    "fill",
    "DDR read",
    "x floor",
    "DDR written",
    "run list",
)
_VELA_HEADS = ("NPU operators", "cycles", "SRAM", "DRAM", "SRAM traffic", "DRAM traffic")


def run(asked: "ProfileCommand") -> int:
    """Compile each model; what a compiler refuses is in the table and does not change the exit code."""
    options = asked.options("models", "seconds", "as_json")
    profiles = []
    for path in asked.models:
        output.complain(f"compiling {path} for {asked.target}")
        profiles.append(profile(path, **options, seconds=asked.seconds or None))
    if asked.as_json:
        output.say_json({"profiles": [entry.to_dict() for entry in profiles]})
    else:
        _show(profiles)
    return 0


def _show(profiles: Sequence[Profile]) -> None:
    first = profiles[0]
    versions = ", ".join(f"{name} {text}" for name, text in first.versions.items())
    flags = " ".join(first.flags) or "the compiler's own defaults"
    output.say(f"{first.target}: {first.chip}, {versions}; flags: {flags}")
    output.say()
    spills = isinstance(first.signatures[0], SpillFigures)
    rows: list[tuple[str, ...]] = [("model", "signature", *(_SPILL_HEADS if spills else _VELA_HEADS))]
    rows += [
        (Path(entry.model).name, figures.signature, *_cells(figures))
        for entry in profiles
        for figures in entry.signatures
    ]
    output.say(output.table(rows, left=2))
    for note in dict.fromkeys(note for entry in profiles for note in entry.notes):
        output.say(f"  {note}")
    reasons = _refusals(profiles)
    if reasons:
        output.say()
        output.say("on the CPU:")
        for text in reasons:
            output.say(f"  {text}")


def _cells(figures: Figures) -> tuple[str, ...]:
    operators = f"{figures.taken}/{figures.operators}"
    if isinstance(figures, SpillFigures):
        ratio = "-" if figures.read_ratio is None else f"{figures.read_ratio:.3f}"
        return (
            operators,
            str(figures.partitions),
            *time_cells(figures),
            output.size(figures.spill),
            output.size(figures.fill),
            output.size(figures.ddr_read),
            ratio,
            output.size(figures.ddr_written),
            str(figures.run_list),
        )
    sizes = (figures.sram, figures.dram, figures.sram_traffic, figures.dram_traffic)
    return (operators, str(figures.cycles), *map(output.size, sizes))


def time_cells(figures: SpillFigures) -> tuple[str, str, str]:
    """Estimated milliseconds, their bounds, the operators that they leave out; dashes where there is no estimate."""
    time = figures.time
    if time is None:
        return ("-", "-", "-")
    low, middle, high = (f"{us / 1000:.3f}" for us in (time.us_low, time.us, time.us_high))
    return (middle, f"{low}-{high}", str(time.without_cost))


def _refusals(profiles: Sequence[Profile]) -> list[str]:
    lines = []
    for entry in profiles:
        counts: Counter[str] = Counter()
        for figures in entry.signatures:
            if not isinstance(figures, SpillFigures):
                counts.update(figures.on_cpu)
        lines += [f"{Path(entry.model).name}: {count} x {reason}" for reason, count in counts.most_common()]
    return lines
