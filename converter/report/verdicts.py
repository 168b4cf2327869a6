"""What became of a model's sites, in sentences: what the console prints and `ConversionResult.summary` gives."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from edge_opt.passes import Status
from edge_opt.report import words

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.passes import Proof, SiteReport
    from edge_opt.report.subject import Subject

_SITES_NAMED = 6
_NOTES_SHOWN = 4


def verdicts(result: Subject) -> list[str]:
    """What became of the sites: converted and how that was proved, then those left, grouped by reason."""
    lines = [_headline(result)]
    groups: dict[tuple[Status, str, str], list[SiteReport]] = defaultdict(list)
    for site in result.sites:
        if site.status is not Status.CONVERTED and not site.settled:
            groups[site.status, site.pass_name, site.reason].append(site)
    for (status, name, reason), sites in groups.items():
        places = ", ".join(f"{site.signature}#{site.index}" for site in sites[:_SITES_NAMED])
        more = f" and {len(sites) - _SITES_NAMED} more" if len(sites) > _SITES_NAMED else ""
        lines.append(f"  {status} {_many(len(sites), 'site')} of {name} ({places}{more}): {reason}")
    compiler = [f"Compile it with {result.compile_with}"] if result.compile_with is not None else []
    whole = [f"  {signature.sentence()}" for signature in result.whole]
    masked = [f"  But {result.masked_rows}"] if result.masked_rows is not None else []
    return [*lines, *_kept(result), *_extents(result), *masked, *_notes(result), *whole, *compiler]


def _kept(result: Subject) -> list[str]:
    """Multi-head attention that stays on purpose, beside some that was split; the headline says it where all stays."""
    groups = Counter(
        (site.signature, site.reason)
        for site in result.sites
        if site.settled and site.status is Status.SKIPPED and (site.heads or 0) > 1
    )
    return [
        f"  {signature}, {_many(count, 'block')} left as exported: {reason}"
        for (signature, reason), count in groups.items()
        if result.converted
    ]


def _notes(result: Subject) -> list[str]:
    """What is to be known of sites that were converted, said once for all that it is true of."""
    groups = Counter((site.pass_name, site.note) for site in result.converted if site.note)
    lines = [
        f"  {_many(count, 'site')} of {name}: {note}"
        for (name, note), count in groups.most_common(_NOTES_SHOWN)
    ]
    hidden = len(groups) - len(lines)
    return [*lines, f"  ... {hidden} more such notes (all with --json)"] if hidden else lines


def _headline(result: Subject) -> str:
    attention = [site for site in result.sites if site.heads is not None or not site.settled]
    if not attention:
        return "The model holds no attention: there was nothing to split."
    converted = result.converted
    if not converted and all(site.settled for site in attention):
        if any((site.heads or 0) > 1 for site in attention):
            return f"Target '{result.target}' leaves the attention of these signatures as it is: nothing was split."
        return "Every attention in the model is single-head already: there was nothing to split."
    sites = [site for site in attention if not site.settled]
    return f"{len(converted)} of {_many(len(sites), 'site')} converted{_proved(result)}."


def _proved(result: Subject) -> str:
    proofs = [site.proof for site in result.converted if site.proof is not None]
    if result.verified == "none" or not result.converted:
        return ", nothing proved (--verify none)" if result.converted else ""
    if all(proof.bitwise for proof in proofs):
        text = f", each proved bit for bit on {_kernels(proofs)}"
    else:
        worst = max(proof.max_abs for proof in proofs)
        text = f", each proved to what its pass demands (largest difference {worst:.3g})"
    return text + (", and the whole models compared" if result.verified == "full" else "")


def _kernels(proofs: Sequence[Proof]) -> str:
    """'XNNPACK and the reference kernels', with how many sites where not all ran on the same."""
    groups = Counter(tuple(ran.kernels for ran in proof.ran) for proof in proofs)
    said = [(words.kernels(names), _many(count, "site")) for names, count in groups.most_common()]
    return said[0][0] if len(said) == 1 else ", ".join(f"{names} ({sites})" for names, sites in said)


def _extents(result: Subject) -> list[str]:
    """What was not run in full; nothing where all was."""
    parts = [any(ran.rows for ran in site.proof.ran) for site in result.converted if site.proof]
    whole = [any(not ran.rows for ran in site.proof.ran) for site in result.converted if site.proof]
    if not any(parts):
        return []
    first = sum(part and full for part, full in zip(parts, whole, strict=True))
    others = "the others, which differ only in numbers, on rows that reach every head and tile"
    which = "--report says which, --verify exhaustive runs all"
    return [f"  {_many(sum(parts), 'large site')}: {first} in full on one kernel set, {others} ({which})"]


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
