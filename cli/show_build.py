"""Prints what `edge-opt build` does, stage by stage, what came of it, and the table of `edge-opt evaluate`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from edge_opt.build import BuildResult, StageReport
from edge_opt.build.building import work_folder
from edge_opt.build.vendors import QUALCOMM
from edge_opt.build.work import WorkFolder
from edge_opt.cli import output
from edge_opt.cli.show_profile import step_lines
from edge_opt.npu.figures import ITSELF_SINCE
from edge_opt.output.words import Progress, size

_MINUTE = 60.0
_AUXILIARY = (
    "The auxiliary model is left to the CPU: of it litert-torch would compile the masks alone, and LiteRT-LM makes "
    f"them itself since {ITSELF_SINCE}. For an older one: --set disable_aux_compilation=false"
)


@contextmanager
def stages_shown(
    destination: Path, work: Path | None, *, as_json: bool, quiet: bool
) -> Iterator[tuple[Progress, Callable[[StageReport], None]]]:
    """What `build` takes as `progress` and `on_stage`: a bar for the stage that runs, a line for each that ran.

    Never both at once: they go to one terminal.
    """
    bars: list[Progress | None] = []
    log = WorkFolder(work_folder(destination, work))
    with ExitStack() as stack:

        def progress(stage: str, done: int, total: int) -> None:
            if not bars:
                bars.append(stack.enter_context(output.bar(wanted=not quiet, note=log.last_line)))
            if bars[0] is not None:
                bars[0](stage, done, total)

        def on_stage(report: StageReport) -> None:
            stack.close()
            bars.clear()
            if not (as_json or quiet):
                output.say(_line(report), *(f"  {note}" for note in report.notes))

        yield progress, on_stage


def _line(report: StageReport) -> str:
    memory = "" if report.peak_bytes is None else f"  {size(report.peak_bytes)} of memory"
    spent = f"{_time(report.seconds):>8}" if report.made_now else f"{'kept':>8}"
    return f"{report.name:<10}{spent}  {size(report.bytes):>10}{memory if report.made_now else ''}"


def _time(seconds: float) -> str:
    if seconds < _MINUTE:
        return f"{seconds:.1f} s"
    return f"{int(seconds // _MINUTE)} m {int(seconds % _MINUTE):02} s"


def show(result: BuildResult) -> None:
    """The bundle, how each signature came out, and what to do next."""
    kept = [
        f"{entry['signature']}: {entry['kept']}, {entry['why']}" for entry in result.optimized["signatures"]
    ]
    output.say("", *kept, *result.optimized["notes"], *step_lines(result.optimized["steps"]), "")
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


def _ratio(perplexity: float | None, reference: float | None) -> str:
    return "-" if perplexity is None or reference is None else f"{perplexity / reference:.3f}"
