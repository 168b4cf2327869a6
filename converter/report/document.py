"""The content of a report, the same for every format; a table is a list of rows, its heads first."""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_opt.conversion import ConversionResult
from edge_opt.conversion.result import headline
from edge_opt.ir import Operator, Tensor
from edge_opt.ir.text import operator_text
from edge_opt.ir.walk import needed_for
from edge_opt.passes import SiteReport, Status

NO_LINT = "Nothing in the result that the target is known to refuse or to get wrong."
_LONGEST_EXAMPLE = 120
_EXACT, _MORE = "bit for bit", "more"
_BUCKETS = {"up to 1e-7": 1e-7, "up to 1e-6": 1e-6, "up to 1e-4": 1e-4}

Table = list[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Example:
    """One region before and after, to be drawn; `name` gives a tensor's short name."""

    signature: str
    before: Sequence[Operator]
    after: Sequence[Operator]
    name: Callable[[Tensor], str]

    def lines(self, operators: Sequence[Operator]) -> list[str]:
        """One of both versions in the text form, with one of several heads that are alike."""
        lines = folded(operators, self.name)
        hidden = len(lines) - _LONGEST_EXAMPLE
        return lines if hidden <= 0 else [*lines[:_LONGEST_EXAMPLE], f"... {hidden} more ..."]

    def to_dict(self) -> dict[str, Any]:
        """Both versions in the text form."""
        return {
            "signature": self.signature,
            "before": [operator_text(operator, self.name) for operator in self.before],
            "after": [operator_text(operator, self.name) for operator in self.after],
        }


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did, ready to be written down. `lint` are (severity, sentence) about the result.

    `origin`: when it was made and with which versions, and the digests of the files; names and values.
    """

    result: ConversionResult
    version: str
    example: Example | None = None
    lint: Sequence[tuple[str, str]] = ()
    origin: Mapping[str, str] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The file's name, or what stands for it."""
        return Path(self.result.input).name if self.result.input else "model in memory"

    @property
    def summary(self) -> str:
        """What was done, or why nothing was written."""
        failure = self.result.failure
        last = [] if failure is None else [f"Refused: {failure}."]
        return " ".join([headline(self.result), *last])

    def whole(self) -> Table:
        """How equal the whole models had to be, and how equal they are."""
        rows = [(item.name, item.outcome(), str(item.allowance)) for item in self.result.whole]
        return [("signature", "found", "demanded"), *rows]

    def verdicts(self) -> list[tuple[str, Status, str, list[SiteReport]]]:
        """Sites in groups of equal pass, verdict and reason, the converted ones first."""
        groups: dict[tuple[str, Status, str], list[SiteReport]] = defaultdict(list)
        for site in self.result.sites:
            groups[site.pass_name, site.status, site.reason].append(site)
        found = [(*key, sites) for key, sites in groups.items()]
        return sorted(found, key=lambda group: group[1] is not Status.CONVERTED)

    def errors(self) -> list[tuple[str, int]]:
        """How many proved sites differ by how much: (bucket, sites), exact ones first; empty where nothing was run."""
        proofs = [site.proof for site in self.result.sites if site.proof is not None]
        found: Counter[str] = Counter()
        for proof in proofs:
            bucket = next((name for name, limit in _BUCKETS.items() if proof.max_abs <= limit), _MORE)
            found[_EXACT if proof.bitwise else bucket] += 1
        listed = [(bucket, found[bucket]) for bucket in (_EXACT, *_BUCKETS, _MORE)]
        return [entry for entry in listed if proofs and (entry[1] or entry[0] == _EXACT)]

    def distances(self) -> list[tuple[str, int]]:
        """Elements of the whole models' float outputs by distance in units in the last place, where there are any."""
        outputs = [output for signature in self.result.whole for output in signature.comparison.outputs]
        counts: Counter[str] = Counter()
        for output in outputs:
            if output.difference is not None:
                counts.update(dict(output.difference.ulps or ()))
        return [(bucket, count) for bucket, count in counts.items() if count]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values: `convert --json`, and the summary, histogram, lint and example."""
        return {
            **self.result.to_dict(),
            "version": self.version,
            "origin": dict(self.origin),
            "summary": self.summary,
            "largest_differences": [{"bucket": bucket, "sites": count} for bucket, count in self.errors()],
            "lint": [{"severity": severity, "message": message} for severity, message in self.lint],
            "example": None if self.example is None else self.example.to_dict(),
        }


class Stretch(NamedTuple):
    """`times` repetitions of `period` items, the first at `start`; no repetition where `times` is 0."""

    start: int = 0
    period: int = 0
    times: int = 0

    @property
    def hidden(self) -> range:
        """Places of the items that are like others before them."""
        return range(self.start + self.period, self.start + self.period * self.times)


def folded(operators: Sequence[Operator], name: Callable[[Tensor], str]) -> list[str]:
    """The operators in the text form, with the longest stretch that repeats itself shown once."""
    lines = [operator_text(operator, name) for operator in operators]
    stretch = longest_repeat([operator.name for operator in operators])
    if not stretch.hidden:
        return lines
    note = f"... {stretch.times - 1} more like these {stretch.period} ..."
    return [*lines[: stretch.hidden.start], note, *lines[stretch.hidden.stop :]]


def hoisted(operators: Sequence[Operator]) -> list[Operator]:
    """The operators in another valid order: what cuts tensors for several heads comes before the first head."""
    cut = [tensor for operator in operators if len(operator.outputs) > 1 for tensor in operator.outputs]
    early = set(needed_for(cut, operators))
    return sorted(operators, key=lambda operator: operator not in early)


def longest_repeat(kinds: Sequence[str], at_least: int = 4) -> Stretch:
    """The stretch of repetitions of `at_least` so many items that covers most."""
    best, covered = Stretch(), 0
    places = {kind: place for place, kind in enumerate(dict.fromkeys(kinds))}
    numbers = np.array([places[kind] for kind in kinds], np.int64)
    for period in range(at_least, len(kinds) // 2 + 1):
        others = np.flatnonzero(numbers[:-period] != numbers[period:])
        starts = np.arange(len(kinds) - period)
        # From each start on, as many items as this are the same a period later.
        same = np.append(others, len(starts))[np.searchsorted(others, starts)] - starts
        times = 1 + same // period
        most = int(times.max())
        if most > 1 and most * period > covered:
            # Of stretches that cover as much the last one ends where a head ends; others begin in the middle of a head.
            start = int(np.flatnonzero(times == most)[-1])
            best, covered = Stretch(start, period, most), most * period
    return best
