"""What is ruined in a model, as data and in the sentences of console and reports."""

from collections.abc import Iterable
from dataclasses import dataclass

from edge_opt.output.record import Record
from edge_opt.output.words import shortened


@dataclass(frozen=True, slots=True)
class Unsound(Record):
    """One tensor that cannot hold what it should: what that means is `message`, what to do about it `remedy`.

    `model` is the model's type in a bundle, empty for a model alone.
    """

    rule: str
    signature: str
    tensor: str
    message: str
    remedy: str
    model: str = ""


def sentences(findings: Iterable[Unsound]) -> list[str]:
    """One for each rule and signature: layers repeat, so only the first tensor is named."""
    groups: dict[tuple[str, str, str], list[Unsound]] = {}
    for finding in findings:
        groups.setdefault((finding.model, finding.signature, finding.rule), []).append(finding)
    texts = []
    for first, *others in groups.values():
        where = f"{first.model}/{first.signature}" if first.model else first.signature
        more = f" (and {len(others)} more like it)" if others else ""
        texts.append(f"{where}: '{shortened(first.tensor)}' {first.message}{more}: {first.remedy}")
    return texts
