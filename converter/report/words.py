"""Numbers and verdicts in words, the same in every format."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from edge_opt.passes import MaskedRows

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.passes import SiteReport
    from edge_opt.passes.contract import Ran
    from edge_opt.report.subject import Subject

# Control characters, line separators, what turns the direction of writing, and halves of characters.
_UNSEEN = re.compile(
    r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)
_LONGEST_NAME = 64
_ROWS_SHOWN = 16
_KERNELS = {"xnnpack": "XNNPACK", "reference": "the reference kernels"}
NO_LINT = "Nothing in the result that the target is known to refuse or to get wrong."
_UNITS = ("bytes", "KiB", "MiB", "GiB")
_VERIFIED = {
    "regions": "every rewritten region was run before and after",
    "exhaustive": "every rewritten region was run before and after, in full on every kernel set",
    "full": "every region and the whole models were run before and after",
    "none": "nothing was run: --verify none",
}


def one_line(text: str) -> str:
    """Text of a model, which may hold anything, with the numbers of characters that are not to be seen."""
    return _UNSEEN.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def shortened(name: str) -> str:
    """A tensor's name for people; exporters write whole call stacks, and the end says most."""
    return name if len(name) <= _LONGEST_NAME else f"…{name[-_LONGEST_NAME:]}"


def masked_rows(subject: Subject) -> str:
    """A sentence on rows that are masked everywhere; empty where the proofs found no change in them."""
    found = subject.masked_rows
    return "" if found is None else f"Apart from that, {found}."


def size(count: int) -> str:
    """A number of bytes, in powers of 1024."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.0f} {_UNITS[0]}" if unit == 0 else f"{value:.2f} {_UNITS[unit]}"


def title(subject: Subject) -> str:
    """The file's name, or what stands for it."""
    return Path(subject.input).name if subject.input else "model in memory"


def summary(subject: Subject) -> str:
    """What was done, and what to tell the vendor's compiler."""
    blocks = sum(figures.blocks for figures in subject.signatures)
    split = sum(figures.converted for figures in subject.signatures)
    done = (
        f"{split} of {blocks} multi-head attention blocks were split by head"
        if blocks
        else "No block to split"
    )
    others = len(subject.converted) - split
    more = f", and {others} other sites were rewritten" if others else ""
    command = subject.compile_with
    compile_with = f" Compile it with {command}" if command is not None else ""
    return f"{done}{more}. Target {subject.target}; {_VERIFIED[subject.verified]}.{compile_with}"


def proof(site: SiteReport) -> str:
    """What the proof of a site showed, and what else is to be known of the site."""
    return "; ".join(text for text in (_proof(site), site.note) if text)


def _proof(site: SiteReport) -> str:
    if site.proof is None:
        return "not run"
    open_rows = "equal" if not site.proof.max_abs else f"differs by up to {site.proof.max_abs:.3g}"
    text = "bit for bit equal" if site.proof.bitwise else open_rows
    if site.proof.steps:
        text += f" ({site.proof.steps} steps)"
    rows = MaskedRows.of([site])
    if rows is not None:
        text += f"; rows masked everywhere {rows.how}"
    return "; ".join(part for part in (text, extent(site.proof.ran), site.proof.note) if part)


def kernels(names: Sequence[str]) -> str:
    """'XNNPACK and the reference kernels'."""
    return " and ".join(_KERNELS.get(name, name) for name in names)


def extent(ran: Sequence[Ran]) -> str:
    """What was run: 'in full on XNNPACK, rows 0, 31, 32 of 64 on the reference kernels'."""
    groups: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for part in ran:
        groups.setdefault((part.rows, part.length), []).append(part.kernels)
    return ", ".join(
        f"{f'rows {_listed(rows)} of {length}' if rows else 'in full'} on {kernels(names)}"
        for (rows, length), names in groups.items()
    )


def _listed(rows: Sequence[int]) -> str:
    """All of them where they are few, else the first ones and how many more."""
    shown = ", ".join(map(str, rows[:_ROWS_SHOWN]))
    return shown if len(rows) <= _ROWS_SHOWN else f"{shown} and {len(rows) - _ROWS_SHOWN} more"
