"""`edge-opt convert`: calls the library and prints what was done, per signature and per verdict."""

from contextlib import nullcontext
from pathlib import Path
from typing import cast

from edge_opt.cli import declare, output, streams
from edge_opt.cli.app import Convert
from edge_opt.cli.entry import EXIT_BUG
from edge_opt.conversion import ConversionResult, DifferenceFoundError, RequirementError
from edge_opt.conversion import convert as convert_model
from edge_opt.conversion.container import Sections
from edge_opt.conversion.result import entry_points
from edge_opt.inspection.reporting import conversion_report
from edge_opt.output.words import size
from edge_opt.report import check_report_path, write_report
from edge_opt.report.diagram import NO_PICTURE, can_draw

_OURS = ("source", "output", "shape", "report", "as_json", "quiet")


def run(asked: Convert) -> int:
    """Convert; sites that stay as they are do not change the exit code, unless a mistake of ours is why."""
    reports = asked.report or []
    for number, path in enumerate(reports):
        others = (asked.source, asked.output, *reports[:number])
        check_report_path(path, overwrite=asked.overwrite, others=others)
    written = streams.written(asked.output, asked.source, as_json=asked.as_json)
    with nullcontext(None) if asked.dry_run else written as destination:
        given = {**asked.options(*_OURS), "shapes": declare.sizes(asked.shape)}
        try:
            with output.bar(wanted=not asked.quiet) as progress:
                result = convert_model(asked.source, destination, **given, progress=progress)
        except (RequirementError, DifferenceFoundError) as error:
            error.result.failure = declare.as_written(str(error))
            _write_reports(asked, error.result)
            raise
        _write_reports(asked, result)
        if asked.as_json:
            output.say_json(result.to_dict())
        elif not asked.quiet:
            show(result)
            hint = f" ({NO_PICTURE})" if result.converted and not can_draw() else ""
            output.say(*(f"Report: {path}{hint if path.suffix == '.html' else ''}" for path in reports))
    return EXIT_BUG if any(site.is_bug for site in result.sites) else 0


def _write_reports(asked: Convert, result: ConversionResult) -> None:
    if asked.report:
        report = conversion_report(result, target=asked.target, sections=cast("Sections", asked.sections))
    for path in asked.report or ():
        write_report(report, path, overwrite=asked.overwrite)


def show(result: ConversionResult, *, folders: bool = True) -> None:
    """The result for people; `folders` where they want to know in which one it is."""

    def described(path: str | None) -> str:
        if path is None:
            return "nothing written (dry run)"
        shown = streams.name(path if folders else Path(path).name)
        return f"{shown} ({size(Path(path).stat().st_size)})"

    names = f"{described(result.input)} -> {described(result.output)}"
    output.say(f"{names}, target {result.target}, {result.seconds:.1f} s", "")
    output.say(
        *output.table(entry_points(result)), "", *streams.named(result.summary(), "MODEL").splitlines()
    )
