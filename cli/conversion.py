"""What `edge-opt convert` does around the library's function: reports, standard output, and what it prints."""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

from edge_opt.cli import output, streams
from edge_opt.cli.wording import in_options
from edge_opt.conversion import ConversionResult, DifferenceFoundError, RequirementError, convert
from edge_opt.conversion.choices import ConvertOptions
from edge_opt.conversion.result import entry_points
from edge_opt.inspection.reporting import conversion_report
from edge_opt.output.words import size
from edge_opt.report import check_report_path, write_report
from edge_opt.report.diagram import NO_PICTURE, can_draw


def run(
    source: Path,
    destination: Path | None,
    reports: Sequence[Path],
    options: ConvertOptions,
    *,
    as_json: bool,
    quiet: bool,
) -> int:
    """Convert; sites that stay as they are do not change the exit code, unless a mistake of ours is why."""
    overwrite = options["overwrite"]
    for number, path in enumerate(reports):
        check_report_path(path, overwrite=overwrite, others=(source, destination, *reports[:number]))
    written = streams.written(destination, source, as_json=as_json)
    with nullcontext(None) if options["dry_run"] else written as file:
        try:
            with output.bar(wanted=not quiet) as progress:
                options["progress"] = progress
                result = convert(source, file, **options)
        except (RequirementError, DifferenceFoundError) as error:
            error.result.failure = in_options(str(error))
            _write_reports(reports, error.result, options)
            raise
        _write_reports(reports, result, options)
        output.answer(result.to_dict(), lambda: _show(result, reports), as_json=as_json, quiet=quiet)
    return output.EXIT_BUG if any(site.is_bug for site in result.sites) else 0


def _write_reports(reports: Sequence[Path], result: ConversionResult, options: ConvertOptions) -> None:
    if reports:
        report = conversion_report(result, target=options["target"], sections=options["sections"])
    for path in reports:
        write_report(report, path, overwrite=options["overwrite"])


def _show(result: ConversionResult, reports: Sequence[Path]) -> None:
    show(result)
    hint = f" ({NO_PICTURE})" if result.converted and not can_draw() else ""
    output.say(*(f"Report: {path}{hint if path.suffix == '.html' else ''}" for path in reports))


def show(result: ConversionResult, *, folders: bool = True) -> None:
    """The result for people; `folders` where they want to know in which one it is."""

    def described(path: str | None) -> str:
        if path is None:
            return "nothing written (dry run)"
        shown = streams.name(path if folders else Path(path).name)
        return f"{shown} ({size(Path(path).stat().st_size)})"

    names = f"{described(result.input)} -> {described(result.output)}"
    output.say(f"{names}, target {result.target}, {result.seconds:.1f} s", "")
    output.say(*output.table(entry_points(result)), "")
    verdict, *others = streams.named(result.summary(), "MODEL").splitlines()
    left = any(not site.settled for site in result.sites if site not in result.converted)
    output.say(verdict, style=output.BAD if left else output.GOOD)
    output.say(*others)
