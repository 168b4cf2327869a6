"""`edge-opt convert`: calls the library and prints what was done, per signature and per verdict."""

from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from edge_opt.cli import output, streams
from edge_opt.cli.progress import bar
from edge_opt.conversion import ConversionResult, SignatureSummary, Verify
from edge_opt.conversion import convert as convert_model
from edge_opt.inspection.reporting import conversion_report
from edge_opt.report import check_report_path, write_report

if TYPE_CHECKING:
    from edge_opt.conversion.container import Sections


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The options of the command."""

    source: Path
    output: Path | None
    target: str
    passes: list[str] | None
    skip: list[str]
    signatures: list[str] | None
    verify: str
    proof_seconds: float | None
    sections: str
    report: Path | None
    dry_run: bool
    form: str | None
    rows_per_tile: int | None
    inline_composites: bool
    extract_signature: str | None
    require_match: bool
    require_all: bool
    force: bool


def run(request: Request, *, as_json: bool, quiet: bool) -> int:
    """Convert; sites that stay as they are do not change the exit code."""
    if request.report is not None:
        check_report_path(request.report, overwrite=request.force, others=(request.source, request.output))
    kept = (
        nullcontext(None)
        if request.dry_run
        else streams.written(request.output, request.source, as_json=as_json)
    )
    with kept as destination:
        return _run(request, destination, as_json=as_json, quiet=quiet)


def _run(request: Request, destination: Path | None, *, as_json: bool, quiet: bool) -> int:
    with bar(wanted=not quiet) as progress:
        result = convert_model(
            request.source,
            destination,
            target=request.target,
            passes=request.passes,
            skip=request.skip,
            signatures=request.signatures,
            verify=cast("Verify", request.verify),
            proof_seconds=request.proof_seconds,
            sections=cast("Sections", request.sections),
            overwrite=request.force,
            dry_run=request.dry_run,
            form=request.form,
            rows_per_tile=request.rows_per_tile,
            inline_composites=request.inline_composites,
            extract_signature=request.extract_signature,
            require_match=request.require_match,
            require_all=request.require_all,
            progress=progress,
        )
    if request.report is not None:
        report = conversion_report(result, target=request.target, sections=cast("Sections", request.sections))
        write_report(report, request.report, overwrite=request.force)
    if as_json:
        output.say_json(result.to_dict())
    elif not quiet:
        show(result)
        if request.report is not None:
            output.say(f"Report: {request.report}")
    return 0


def show(result: ConversionResult, *, folders: bool = True) -> None:
    """The result for people; `folders` where they want to know in which one it is."""
    output.say(_files(result, folders=folders))
    output.say()
    output.say(signature_table(result.signatures))
    output.say()
    output.say(streams.named(result.summary(), "MODEL"))


def signature_table(signatures: list[SignatureSummary]) -> str:
    """Before and after, one line for each entry point."""
    rows = [("signature", "operators", "blocks split", "largest tensor")]
    rows += [
        (
            summary.name,
            output.change(summary.operators_before, summary.operators_after),
            f"{summary.converted} of {summary.blocks}",
            output.change(
                output.size(summary.largest_tensor_before), output.size(summary.largest_tensor_after)
            ),
        )
        for summary in signatures
    ]
    return output.table(rows)


def _files(result: ConversionResult, *, folders: bool) -> str:
    def described(path: str | None) -> str:
        if path is None:
            return "nothing written (dry run)"
        shown = streams.name(path if folders else Path(path).name)
        return f"{shown} ({output.size(Path(path).stat().st_size)})"

    names = f"{described(result.input)} -> {described(result.output)}"
    return f"{names}, target {result.target}, {result.seconds:.1f} s"
