"""The content of a report, the same for every format."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edge_opt.ir.text import operator_text
from edge_opt.passes import Status
from edge_opt.report import words

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edge_opt.ir import Operator, Tensor
    from edge_opt.passes import SiteReport
    from edge_opt.report.subject import Subject


@dataclass(frozen=True, slots=True)
class Example:
    """One region before and after, to be drawn; `name` gives a tensor's short name."""

    signature: str
    before: Sequence[Operator]
    after: Sequence[Operator]
    name: Callable[[Tensor], str]

    def to_dict(self) -> dict[str, Any]:
        """Both versions in the text form."""
        return {
            "signature": self.signature,
            "before": [operator_text(operator, self.name) for operator in self.before],
            "after": [operator_text(operator, self.name) for operator in self.after],
        }


@dataclass(frozen=True, slots=True)
class Verdict:
    """Sites that share pass, verdict and reason."""

    pass_name: str
    status: str
    reason: str
    sites: tuple[SiteReport, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """What a conversion did, ready to be written down. `lint` are (severity, sentence) about the result."""

    subject: Subject
    version: str
    example: Example | None = None
    lint: Sequence[tuple[str, str]] = ()

    @property
    def converted(self) -> int:
        """Number of sites that were rewritten."""
        return sum(site.status is Status.CONVERTED for site in self.subject.sites)

    def verdicts(self) -> list[Verdict]:
        """Sites in groups of equal verdict, the converted ones first."""
        groups: dict[tuple[str, str, str], list[SiteReport]] = defaultdict(list)
        for site in self.subject.sites:
            groups[site.pass_name, str(site.status), site.reason].append(site)
        found = [Verdict(*key, tuple(sites)) for key, sites in groups.items()]
        return sorted(found, key=lambda verdict: verdict.status != Status.CONVERTED)

    def errors(self) -> list[tuple[str, int]]:
        """How many proved sites differ by how much: (bucket, sites), exact ones first."""
        buckets: dict[str, int] = dict.fromkeys(_BUCKETS, 0)
        for site in self.subject.sites:
            if site.proof is not None:
                buckets[_bucket(site.proof.bitwise, site.proof.max_abs)] += 1
        return [(bucket, count) for bucket, count in buckets.items() if count or bucket == _BUCKETS[0]]

    def distances(self) -> list[tuple[str, int]]:
        """Elements of the whole models' float outputs by distance in units in the last place, where there are any."""
        counts: dict[str, int] = {}
        for signature in self.subject.whole:
            for bucket, count in signature.distances().items():
                counts[bucket] = counts.get(bucket, 0) + count
        return [(bucket, count) for bucket, count in counts.items() if count]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values: `convert --json`, and the summary, counts, histogram, lint and example."""
        known = self.subject.to_dict()
        blocks = {item.name: (item.blocks, item.converted) for item in self.subject.signatures}
        for figures in known["signatures"]:
            figures["blocks"], figures["blocks_converted"] = blocks[figures["name"]]
        return {
            **known,
            "version": self.version,
            "summary": words.summary(self.subject),
            "largest_differences": [{"bucket": bucket, "sites": count} for bucket, count in self.errors()],
            "lint": [{"severity": severity, "message": message} for severity, message in self.lint],
            "example": None if self.example is None else self.example.to_dict(),
        }


_BUCKETS = ("bit for bit", "up to 1e-7", "up to 1e-6", "up to 1e-4", "more")


def _bucket(bitwise: bool, max_abs: float) -> str:
    if bitwise:
        return _BUCKETS[0]
    for bucket, limit in zip(_BUCKETS[1:], (1e-7, 1e-6, 1e-4), strict=False):
        if max_abs <= limit:
            return bucket
    return _BUCKETS[-1]
