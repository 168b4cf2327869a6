"""What a conversion did, as data; and the errors that carry it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from edge_opt.conversion.verdicts import verdicts
from edge_opt.passes import MaskedRows, SiteReport, Status
from edge_opt.schema.errors import EdgeOptError
from edge_opt.schema.strict_json import strict

if TYPE_CHECKING:
    from edge_opt.comparison.whole import WholeSignature
    from edge_opt.ir import Model


class RequirementError(EdgeOptError):
    """The model does not fulfil what was asked for; `result` says what was found, nothing was written."""

    def __init__(self, message: str, result: ConversionResult) -> None:
        super().__init__(message)
        self.result = result


class NothingMatchedError(RequirementError):
    """`require_match` was asked for, and no site matched."""

    exit_code = 4


class SitesLeftError(RequirementError):
    """`require_all` was asked for, and a site could not be converted."""

    exit_code = 1


class DifferenceFoundError(EdgeOptError):
    """Comparing the whole models found a difference."""

    exit_code = 1


@dataclass(slots=True)
class SignatureSummary:
    """One entry point before and after; bytes are those of its largest intermediate tensor."""

    name: str
    operators_before: int
    operators_after: int = 0
    largest_tensor_bytes_before: int = 0
    largest_tensor_bytes_after: int = 0
    blocks: int = 0
    blocks_converted: int = 0


@dataclass(slots=True, repr=False)
class ConversionResult:
    """What was done: every site with its verdict, and where the model went (None for a dry run).

    `whole` has what comparing the whole models demanded and found, signature by signature, for `verify="full"`.
    `compile_with`: the target's compiler and the command with those `compiler_flags` that suit this model; None where
    its own defaults do.
    """

    input: str | None
    output: str | None
    target: str
    verified: str
    signatures: list[SignatureSummary] = field(default_factory=list)
    sites: list[SiteReport] = field(default_factory=list)
    compiler_flags: list[str] = field(default_factory=list)
    compile_with: str | None = None
    seconds: float = 0.0
    model: Model | None = field(default=None, repr=False)
    whole: list[WholeSignature] = field(default_factory=list)

    def __repr__(self) -> str:
        done = f"{len(self.converted)} of {len(self.sites)} sites converted"
        return f"ConversionResult({self.input!r} -> {self.output!r}, target {self.target!r}, {done})"

    @property
    def converted(self) -> list[SiteReport]:
        """Sites that were rewritten."""
        return [site for site in self.sites if site.status is Status.CONVERTED]

    @property
    def masked_rows(self) -> MaskedRows | None:
        """What changes in rows that are masked everywhere; None where nothing was found to."""
        return MaskedRows.of(self.sites)

    def summary(self) -> str:
        """What became of the sites, in sentences, as the command line prints it."""
        return "\n".join(verdicts(self))

    def to_dict(self) -> dict[str, Any]:
        """For `--json` and reports; a figure that is not a finite number is None."""
        values = {
            "input": self.input,
            "output": self.output,
            "target": self.target,
            "seconds": round(self.seconds, 3),
            "signatures": list(map(asdict, self.signatures)),
            "sites": [site.to_dict() for site in self.sites],
            "verified": self.verified,
            "masked_rows": None if self.masked_rows is None else self.masked_rows.to_dict(),
            "compiler_flags": self.compiler_flags,
            "compile_with": self.compile_with,
            "whole": [signature.to_dict() for signature in self.whole],
        }
        return strict(values)


def check_requirements(result: ConversionResult, *, require_match: bool, require_all: bool) -> None:
    """Whether enough was converted.

    Raises:
        NothingMatchedError: `require_match`, and no site was converted.
        SitesLeftError: `require_all`, and a site was left that a conversion should have taken.
    """
    if require_match and not result.converted:
        raise NothingMatchedError(
            "no attention block was converted and --require-match asks for one: nothing was written; "
            "run `edge-opt explain` to see why each block was left",
            result,
        )
    left = [site for site in result.sites if site.status is not Status.CONVERTED and not site.settled]
    if require_all and left:
        first = left[0]
        raise SitesLeftError(
            f"{len(left)} of {len(result.sites)} sites were not converted and --require-all asks for all: nothing "
            f"was written; the first is {first.pass_name} site {first.index} of '{first.signature}': {first.reason}",
            result,
        )
