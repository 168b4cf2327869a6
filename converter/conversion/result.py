"""The result of a conversion, as data and as text for console and reports, and the errors that carry it."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from edge_opt.base.errors import EdgeOptError, UsageError
from edge_opt.base.record import Record
from edge_opt.base.words import listed, many, one_line, size
from edge_opt.ir import Model, to_bytes
from edge_opt.ir.opening import ExportedModel, ModelLike
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.soundness import Unsound, sentences
from edge_opt.verification.check import Exact, Steps
from edge_opt.verification.verdict import Proof, Ran, Status, Verdict
from edge_opt.verification.whole import WholeSignature

_ORDER = (Status.SKIPPED, Status.REVERTED, Status.SETTLED, Status.CONVERTED)
_KERNELS = {"xnnpack": "XNNPACK", "reference": "the reference kernels"}


class SitesSkippedError(EdgeOptError):
    """A site was skipped despite `require_all`, or no site could be verified; nothing was written."""

    result: ConversionResult
    exit_code = 1


class DifferenceFoundError(EdgeOptError):
    """Comparing the whole models found a difference; `result` has the figures, nothing was written."""

    result: ConversionResult
    exit_code = 1


@dataclass(slots=True)
class SignatureSummary:
    """One entry point before and after, with the bytes of its largest intermediate tensor.

    `shares` names the other signatures that run the same subgraph, and so change too. In one that was not `chosen`,
    attention was not looked for.
    """

    name: str
    operators_before: int
    operators_after: int
    largest_tensor_bytes_before: int
    largest_tensor_bytes_after: int
    blocks: int
    blocks_converted: int
    shares: tuple[str, ...] = ()
    chosen: bool = True


@dataclass(slots=True, repr=False)
class ConversionResult(Record):
    """Every site with its verdict, and the path of the output (None for a dry run).

    `whole`: for `verify="full"`, the comparison of the whole models by signature; `not_compared`: signatures that are
    meant to change. `soundness`: faults of the input that remain. `notes`: parts of the input that no runtime reads,
    and if they are kept. `failure`: why nothing was written, if an error carries the result; a result without failure
    is true. `given`: the source as passed to `convert`. A pickled result has neither model nor source.
    """

    input: str | None
    output: str | None
    target: str
    verified: str
    signatures: list[SignatureSummary] = field(default_factory=list)
    sites: list[Verdict] = field(default_factory=list)
    seconds: float = 0.0
    model: Model | None = field(default=None, repr=False)
    whole: list[WholeSignature] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    soundness: list[Unsound] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    failure: str | None = None
    given: ModelLike | None = field(default=None, repr=False)

    _left_out = ("model", "given")
    _only_here = ("model", "given")

    def __bool__(self) -> bool:
        return self.failure is None

    def __repr__(self) -> str:
        done = f"{len(self.converted)} of {len(self.sites)} sites converted"
        return (
            f"ConversionResult({self.input!r} -> {self.output!r}, target {self.target!r}, {done})"
        )

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the converted model as a .tflite file, replacing an existing one; UsageError in another process."""
        self._model_here().save(path, overwrite=True)

    @property
    def exported(self) -> ExportedModel:
        """The converted model in the class of a source from `litert_torch.convert`; UsageError for other sources."""
        model = self._model_here()
        if not isinstance(self.given, ExportedModel):
            raise UsageError("there is no exported model: a file, bytes or a Model was given")
        kind: Callable[[bytes], ExportedModel] = type(self.given)
        return kind(to_bytes(model))

    def _model_here(self) -> Model:
        if self.model is None:
            raise UsageError(
                "a copied or pickled result has no model: export it in the process that converted it"
            )
        return self.model

    @property
    def converted(self) -> list[Verdict]:
        """Sites that were rewritten; not inputs whose types changed, which have no new operators."""
        return [site for site in self.sites if site.status is Status.CONVERTED and site.added]

    @property
    def skipped(self) -> list[Verdict]:
        """Sites that were skipped or reverted although there was something to do."""
        return [site for site in self.sites if site.status in (Status.SKIPPED, Status.REVERTED)]

    def summary(self) -> str:
        """The outcome as the command line prints it; sites of a pass that need a remark, by remark.

        The headline does not count settled sites. Reports have every site.
        """
        lines = [headline(self)]
        for status in _ORDER:
            lines += _remarks(site for site in self.sites if site.status is status)
        lines += [*unsound_lines(self), *self.notes]
        lines += (f"{one.name}: {one.outcome}; required: {one.allowance}" for one in self.whole)
        return "\n  ".join(map(one_line, lines))


def _remarks(sites: Iterable[Verdict]) -> Iterator[str]:
    """One line for all sites of a pass with the same remark; the sites have one status."""
    groups: dict[tuple[str, str], list[Verdict]] = defaultdict(list)
    for site in sites:
        remark = site.note or site.reason
        if remark and (site.status is not Status.SETTLED or has_several_heads(site)):
            name = "" if _is_attention(site) else site.pass_name
            groups[name, remark].append(site)
    for (name, remark), group in groups.items():
        status = group[0].status
        what = f"{name}: {len(group)}" if name else many(len(group), "attention block")
        places = listed(f"{site.signature}#{site.index}" for site in group)
        if status is Status.SETTLED:
            what += ":"
        yield f"{what} {status} ({places}): {remark}"


def check_requirements(result: ConversionResult, *, require_all: bool) -> None:
    """Raise `SitesSkippedError` if a site was skipped and all are required, or if no site could be verified."""
    skipped = result.skipped
    if require_all and skipped:
        first = skipped[0]
        where = f"{first.pass_name} site {first.index} of '{first.signature}'"
        raise SitesSkippedError(
            f"{len(skipped)} of {len(result.sites)} sites were skipped, and require_all=True asks for all: "
            f"nothing was written; the first is {where}: {first.reason}"
        )
    unverified = [site for site in skipped if site.proof and site.proof.is_inconclusive]
    if unverified and not result.converted:
        raise SitesSkippedError(
            f"none of {many(len(skipped), 'site')} could be verified: nothing was written; the first reason is: "
            f"{unverified[0].reason}; verify='none' converts without verification"
        )


def headline(result: ConversionResult) -> str:
    """How many attention blocks were split and how they were verified, or why there was nothing to convert."""
    decided = [*result.converted, *result.skipped]
    blocks = sum(map(_is_attention, decided))
    split = sum(map(_is_attention, result.converted))
    settled = (site for site in result.sites if site.status is Status.SETTLED)
    declined = sum(map(has_several_heads, settled))
    parts = [f"{split} of {many(blocks, 'attention block')} split"] if blocks else []
    if len(decided) > blocks:
        others = many(len(decided) - blocks, "other rewrite" if blocks else "rewrite")
        parts.append(f"{len(result.converted) - split} of {others} made")
    if parts:
        return f"{', '.join(parts)}{_verified(result)}."
    if declined:
        text = f"Target '{result.target}' gains nothing from splitting {many(declined, 'attention block')}"
        return f"{text}: nothing was split."
    if all(site.heads is None for site in result.sites):
        return "No attention was found, or mha_to_sha was skipped: nothing was split."
    return "Every attention in the model is single-head already: there was nothing to split."


def has_several_heads(site: Verdict) -> bool:
    """True for attention with more than one head."""
    return (site.heads or 0) > 1


def _is_attention(site: Verdict) -> bool:
    return site.heads is not None or site.pass_name == MhaToSha.name


def _verified(result: ConversionResult) -> str:
    if not result.converted:
        return ""
    if result.verified == "none":
        return ", not verified (--verify none)"
    proofs = [site.proof for site in result.converted if site.proof is not None]
    alike = sum(bool(proof.like) for proof in proofs)
    repeats = f"; {alike} repeat their structure" if alike else ""
    ran = f" ({len(proofs) - alike} run{repeats})"
    bounded = [proof for proof in proofs if not proof.bitwise]
    text = f", bit-identical{ran}"
    if not all(isinstance(proof.check, Exact) for proof in proofs):
        detail = _largest_difference(result.converted) or "no difference"
        text = f", verified within the tolerance of each pass{ran}: {detail}"
    elif bounded:
        where = " on the reference kernels" if all(map(_ran_on_reference, bounded)) else ""
        notes = dict.fromkeys(proof.note for proof in bounded)
        text += f"{where}; {'; '.join(notes)}"
    if result.verified == "full":
        text += ", and the whole models compared"
        if result.not_compared:
            text += f" except {', '.join(result.not_compared)}, which a pass changes on purpose"
    return text


def _largest_difference(converted: Iterable[Verdict]) -> str:
    """The largest difference of results, its pass, and how the check was met; empty if there is nothing to say."""
    proofs = [(site.proof, site.pass_name) for site in converted if site.proof is not None]
    worst, name = max(proofs, key=lambda pair: pair[0].max_abs)
    figure = f"largest difference {worst.max_abs:.3g}, by {name}" if worst.max_abs else ""
    if figure and isinstance(worst.check, Steps):
        figure += f" (--skip {name} leaves it out)"
    return ": ".join(filter(None, (figure, worst.note)))


def _ran_on_reference(proof: Proof) -> bool:
    return any(run.kernels == "reference" for run in proof.ran)


def entry_point_table(result: ConversionResult) -> list[tuple[str, ...]]:
    """Table of the entry points before and after; the first row has the headings."""
    rows: list[tuple[str, ...]] = [("signature", "operators", "blocks split", "largest tensor")]
    for one in result.signatures:
        name = f"{one.name} (also {', '.join(one.shares)})" if one.shares else one.name
        operators = _change(str(one.operators_before), str(one.operators_after))
        largest = _change(
            size(one.largest_tensor_bytes_before), size(one.largest_tensor_bytes_after)
        )
        blocks = f"{one.blocks_converted} of {one.blocks}" if one.chosen else "not chosen"
        rows.append((name, operators, blocks, largest))
    return rows


def _change(old: str, new: str) -> str:
    return old if old == new else f"{old} -> {new}"


def unsound_lines(result: ConversionResult) -> list[str]:
    """A line for each fault of the input that remains."""
    return [f"Broken in the input: {text}" for text in sentences(result.soundness)]


def proof_text(site: Verdict) -> str:
    """The outcome of a site's verification, and notes on the site."""
    figures = site.proof
    if figures is None:
        # An input that no operator reads has nothing to run.
        ran = "not run" if site.added else ""
        return "; ".join(filter(None, (ran, site.note, *site.failed)))
    differs = "equal" if not figures.max_abs else f"differs by up to {figures.max_abs:.3g}"
    text = "bit for bit equal" if figures.bitwise else differs
    text += f" ({figures.steps} steps)" if figures.steps else ""
    ran = f"same structure as {figures.like}, not run" if figures.like else extent(figures.ran)
    return "; ".join(filter(None, (text, ran, site.note, *site.failed, figures.note)))


def extent(ran: Sequence[Ran]) -> str:
    """'run in full on XNNPACK, with lengths divided by 16 on the reference kernels'; empty if nothing was run."""
    groups: dict[int, list[str]] = defaultdict(list)
    for part in ran:
        groups[part.divided].append(_KERNELS.get(part.kernels, part.kernels))
    parts: list[str] = []
    for divided, kernels in groups.items():
        how = "in full" if divided == 1 else f"with lengths divided by {divided}"
        parts.append(f"{how} on {' and '.join(kernels)}")
    return f"run {', '.join(parts)}" if parts else ""
