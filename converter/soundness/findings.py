"""What is ruined in a model, as data and in the sentences of console and reports."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from edge_opt.output.words import shortened


@dataclass(frozen=True, slots=True)
class Unsound:
    """One tensor that cannot hold what it should: what that means is `message`, what to do about it `remedy`.

    `model` is the model's type in a bundle, empty for a model alone.
    """

    rule: str
    signature: str
    tensor: str
    message: str
    remedy: str
    model: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports."""
        return asdict(self)


def sentences(findings: Iterable[Unsound]) -> list[str]:
    """One for each rule and signature: layers repeat, so only the first tensor is named."""
    groups: dict[tuple[str, str, str], list[Unsound]] = {}
    for found in findings:
        groups.setdefault((found.model, found.signature, found.rule), []).append(found)
    told = []
    for (model, signature, _), (first, *others) in groups.items():
        where = f"{model}/{signature}" if model else signature
        more = f" (and {len(others)} more like it)" if others else ""
        told.append(f"{where}: '{shortened(first.tensor)}' {first.message}{more}: {first.remedy}")
    return told
