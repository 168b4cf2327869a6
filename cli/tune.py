"""`edge-opt tune`: prints what the compiler makes of one block in every form, and writes the best down."""

from pathlib import Path

from edge_opt.cli import output
from edge_opt.cli.app import Tune
from edge_opt.cli.profile import columns
from edge_opt.npu import Tuning, tune, tuned_target, write_target
from edge_opt.output.atomic import resolve_target


def run(asked: Tune) -> int:
    """Try every form; one that the compiler refuses is in the table and does not change the exit code."""
    if asked.output is not None:
        # Looked at before the work, which takes minutes.
        resolve_target(asked.output, overwrite=asked.overwrite)
    with output.bar(wanted=not asked.quiet) as progress:
        options = asked.options("model", "output", "seconds", "overwrite", "as_json", "quiet")
        found = tune(asked.model, **options, seconds=asked.seconds or None, progress=progress)
    if asked.output is not None:
        write_target(tuned_target(found), asked.output, overwrite=asked.overwrite)
    if asked.as_json:
        written = None if asked.output is None else str(asked.output)
        output.say_json({**found.to_dict(), "written": written})
    elif not asked.quiet:
        _show(found, asked.output)
    return 0


def _show(found: Tuning, destination: Path | None) -> None:
    versions = ", ".join(f"{name} {text}" for name, text in found.versions.items())
    what = f"{found.target.name}: {found.chip}, {versions}"
    output.say(f"{what}; {found.extent} of {found.signature}, best first", "")
    told = [(trial, columns(trial.figures)) for trial in found.trials if trial.usable and trial.figures]
    rows: list[tuple[str, ...]] = [("form", *(told[0][1] if told else ()), "seconds")]
    rows += [(str(trial.choice), *cells.values(), f"{trial.seconds:.1f}") for trial, cells in told]
    output.say(*output.table(rows, left=1), "", *(f"  {note}" for note in found.notes))
    left = [trial for trial in found.trials if not trial.usable]
    output.say(*(f"  left out, {trial.choice}: {trial.failure or trial.verdict}" for trial in left))
    best = "No winner" if found.winner is None else f"Best: {found.winner.choice}"
    output.say(f"{best}: {found.checked}.")
    if destination is not None:
        output.say(f"It is in {destination}: edge-opt convert {found.model} --target {destination}")
