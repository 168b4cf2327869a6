"""`edge-opt build`, carried out: a line for each stage as it is done, and what came of it."""

import json
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edge_opt.build import BuildResult, StageReport, build
from edge_opt.build.building import work_folder
from edge_opt.build.vendors import QUALCOMM
from edge_opt.build.work import WorkFolder
from edge_opt.cli import output
from edge_opt.cli.app import Build
from edge_opt.cli.evaluate import lines
from edge_opt.cli.profile import steps_told
from edge_opt.npu.figures import ITSELF_SINCE
from edge_opt.output.progress import Progress
from edge_opt.output.words import size

_MINUTE = 60.0
_AUXILIARY = (
    "The auxiliary model is left to the CPU: of it litert-torch would compile the masks alone, and LiteRT-LM makes "
    f"them itself since {ITSELF_SINCE}. For an older one: --set disable_aux_compilation=false"
)


def run(asked: Build) -> int:
    """Build; a stage that an earlier run did is in the table too, and does not change the exit code."""
    options = asked.options("source", "output", "settings", "report", "as_json", "quiet")
    options["report"] = asked.report or ()
    told = (entry.partition("=") for entry in asked.settings or ())
    options["settings"] = {name.strip(): _value(value) for name, _, value in told}
    # A bar for the stage that runs, and a line for each that ran; never both, for they go to one terminal.
    bars: list[Progress | None] = []
    work = WorkFolder(work_folder(asked.output, asked.work))
    with ExitStack() as stack:

        def progress(stage: str, done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(output.bar(wanted=not asked.quiet, note=work.last_line)))
            if bars[0] is not None:
                bars[0](stage, done, total)

        def on_stage(report: StageReport) -> None:
            stack.close()
            bars.clear()
            if not (asked.as_json or asked.quiet):
                output.say(_line(report), *(f"  {note}" for note in report.notes))

        result = build(asked.source, asked.output, **options, progress=progress, on_stage=on_stage)
    if asked.as_json:
        output.say_json(result.to_dict())
    elif not asked.quiet:
        _show(result)
    return 0


def _value(text: str) -> Any:
    """JSON where it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _line(report: StageReport) -> str:
    memory = "" if report.peak_bytes is None else f"  {size(report.peak_bytes)} of memory"
    spent = f"{_time(report.seconds):>8}" if report.made_now else f"{'kept':>8}"
    return f"{report.name:<10}{spent}  {size(report.bytes):>10}{memory if report.made_now else ''}"


def _time(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    return f"{int(seconds // _MINUTE)} m {int(seconds % _MINUTE):02} s"


def _show(result: BuildResult) -> None:
    kept = [
        f"{entry['signature']}: {entry['kept']}, {entry['why']}" for entry in result.optimized["signatures"]
    ]
    output.say("", *kept, *result.optimized["notes"], *steps_told(result.optimized["steps"]), "")
    if result.vendor == QUALCOMM.title and result.settings["compile"].get("disable_aux_compilation"):
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
    told = lines(found, times) if found["models"] else []
    return [*told, *filter(None, [found["note"]])]


def _milliseconds(figures: Mapping[str, Any] | None) -> str:
    time = (figures or {}).get("time")
    return "-" if time is None else f"{time['us'] / 1000:.3f}"
