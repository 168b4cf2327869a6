"""`edge-opt convert`: calls the library and prints what was done, per signature and per verdict."""

from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from edge_opt.cli import output
from edge_opt.cli.progress import bar
from edge_opt.conversion import ConversionResult, SignatureSummary, Verify
from edge_opt.conversion import convert as convert_model
from edge_opt.passes import SiteReport, Status
from edge_opt.report import check_report_path, write_report
from edge_opt.reporting import conversion_report

if TYPE_CHECKING:
    from edge_opt.container import Sections

_SITES_NAMED = 6
_NOTES_SHOWN = 4


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
    sections: str
    report: Path | None
    dry_run: bool
    form: str | None
    rows_per_tile: int | None
    chain: bool | None
    inline_composites: bool
    extract_signature: str | None
    require_match: bool
    require_all: bool
    force: bool


def run(request: Request, *, as_json: bool, quiet: bool) -> int:
    """Convert; sites that stay as they are do not change the exit code."""
    if request.report is not None:
        check_report_path(request.report, overwrite=request.force, others=(request.source, request.output))
    with bar(wanted=not quiet) as progress:
        result = convert_model(
            request.source,
            request.output,
            target=request.target,
            passes=request.passes,
            skip=request.skip,
            signatures=request.signatures,
            verify=cast("Verify", request.verify),
            sections=cast("Sections", request.sections),
            overwrite=request.force,
            dry_run=request.dry_run,
            form=request.form,
            rows_per_tile=request.rows_per_tile,
            chain=request.chain,
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
    for line in verdicts(result):
        output.say(line)


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


def verdicts(result: ConversionResult) -> list[str]:
    """What became of the sites: converted and how that was proved, then those left, grouped by reason."""
    lines = [_headline(result)]
    groups: dict[tuple[Status, str, str], list[SiteReport]] = defaultdict(list)
    for site in result.sites:
        if site.status is not Status.CONVERTED and not site.settled:
            groups[site.status, site.pass_name, site.reason].append(site)
    for (status, name, reason), sites in groups.items():
        places = ", ".join(f"{site.signature}#{site.index}" for site in sites[:_SITES_NAMED])
        more = f" and {len(sites) - _SITES_NAMED} more" if len(sites) > _SITES_NAMED else ""
        lines.append(f"  {status} {output.many(len(sites), 'site')} of {name} ({places}{more}): {reason}")
    flags = [f"Compile it with {' '.join(result.compiler_flags)}"] if result.compiler_flags else []
    whole = [f"  {signature.sentence()}" for signature in result.whole]
    masked = [f"  But {result.masked_rows}"] if result.masked_rows is not None else []
    return [*lines, *masked, *_notes(result), *whole, *flags]


def _notes(result: ConversionResult) -> list[str]:
    """What is to be known of sites that were converted, said once for all that it is true of."""
    groups = Counter((site.pass_name, site.note) for site in result.converted if site.note)
    lines = [
        f"  {output.many(count, 'site')} of {name}: {note}"
        for (name, note), count in groups.most_common(_NOTES_SHOWN)
    ]
    hidden = len(groups) - len(lines)
    return [*lines, f"  ... {hidden} more such notes (all with --json)"] if hidden else lines


def _files(result: ConversionResult, *, folders: bool) -> str:
    def described(path: str | None) -> str:
        if path is None:
            return "nothing written (dry run)"
        return f"{path if folders else Path(path).name} ({output.size(Path(path).stat().st_size)})"

    names = f"{described(result.input)} -> {described(result.output)}"
    return f"{names}, target {result.target}, {result.seconds:.1f} s"


def _headline(result: ConversionResult) -> str:
    attention = [site for site in result.sites if site.heads is not None or not site.settled]
    if not attention:
        return "The model holds no attention: there was nothing to split."
    converted = result.converted
    if not converted and all(site.settled for site in attention):
        if any((site.heads or 0) > 1 for site in attention):
            return f"Target '{result.target}' leaves the attention of these signatures as it is: nothing was split."
        return "Every attention in the model is single-head already: there was nothing to split."
    sites = [site for site in attention if not site.settled]
    return f"{len(converted)} of {output.many(len(sites), 'site')} converted{_proved(result)}."


def _proved(result: ConversionResult) -> str:
    proofs = [site.proof for site in result.converted if site.proof is not None]
    if result.verified == "none" or not result.converted:
        return ", nothing proved (--verify none)" if result.converted else ""
    if all(proof.bitwise for proof in proofs):
        text = ", each proved bit for bit on XNNPACK and the reference kernels"
    else:
        worst = max(proof.max_abs for proof in proofs)
        text = f", each proved to what its pass demands (largest difference {worst:.3g})"
    return text + (", and the whole models compared" if result.verified == "full" else "")
