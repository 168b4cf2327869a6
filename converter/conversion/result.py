"""What a conversion did, as data and in the sentences of console and reports; and the errors that carry it."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from edge_opt.base.errors import EdgeOptError, UsageError
from edge_opt.base.record import Record
from edge_opt.base.words import as_html, many, one_line, size
from edge_opt.comparison.whole import WholeSignature
from edge_opt.ir import Model, to_bytes
from edge_opt.ir.opening import ExportedModel, ModelLike
from edge_opt.passes import Proof, SiteReport, Status
from edge_opt.passes.contract import Ran
from edge_opt.soundness import Unsound, sentences

_SITES_NAMED = 6
_NOTES_SHOWN = 4
_KERNELS = {"xnnpack": "XNNPACK", "reference": "the reference kernels"}


class RequirementError(EdgeOptError):
    """The model does not fulfil what was asked for; `result` says what was found, nothing was written."""

    result: ConversionResult


class SitesLeftError(RequirementError):
    """A site could not be converted although `require_all` was asked for, or none could be verified."""

    exit_code = 1


class DifferenceFoundError(EdgeOptError):
    """Comparing the whole models found a difference; `result` has the figures, nothing was written."""

    result: ConversionResult
    exit_code = 1


@dataclass(slots=True)
class SignatureSummary:
    """One entry point before and after; bytes are those of its largest intermediate tensor.

    `shares` names the signatures that run the same subgraph, and so change with it.
    """

    name: str
    operators_before: int
    operators_after: int
    largest_tensor_bytes_before: int
    largest_tensor_bytes_after: int
    blocks: int
    blocks_converted: int
    shares: tuple[str, ...] = ()


@dataclass(slots=True, repr=False)
class ConversionResult(Record):
    """What was done: every site with its verdict, and where the model went (None for a dry run).

    `whole` has what comparing the whole models demanded and found, signature by signature, for `verify="full"`;
    `not_compared` the signatures that were meant to change, and were left out. `soundness`: what is broken in the
    model, and stays as it was. `failure`: why nothing was written, of a result that an error carries. `given`: what was
    given as a model. A result is true unless it has a `failure`.
    """

    input: str | None
    output: str | None
    target: str
    verified: str
    signatures: list[SignatureSummary] = field(default_factory=list)
    sites: list[SiteReport] = field(default_factory=list)
    seconds: float = 0.0
    model: Model | None = field(default=None, repr=False)
    whole: list[WholeSignature] = field(default_factory=list)
    not_compared: list[str] = field(default_factory=list)
    soundness: list[Unsound] = field(default_factory=list)
    failure: str | None = None
    given: ModelLike | None = field(default=None, repr=False)

    _left_out = ("model", "given")

    def __bool__(self) -> bool:
        return self.failure is None

    def __repr__(self) -> str:
        done = f"{len(self.converted)} of {len(self.sites)} sites converted"
        return f"ConversionResult({self.input!r} -> {self.output!r}, target {self.target!r}, {done})"

    def _repr_html_(self) -> str:
        return as_html(self.summary(), entry_points(self))

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write the converted model as a .tflite file, in place of one that is there."""
        assert self.model is not None
        self.model.save(path, overwrite=True)

    @property
    def exported(self) -> ExportedModel:
        """The converted model as one of the class that was given; where that is what `litert_torch.convert` returns."""
        assert self.model is not None
        if not isinstance(self.given, ExportedModel):
            raise UsageError("there is no exported model: a file, bytes or a Model was given")
        kind: Callable[[bytes], ExportedModel] = type(self.given)
        return kind(to_bytes(self.model))

    @property
    def converted(self) -> list[SiteReport]:
        """Sites that were rewritten."""
        return [site for site in self.sites if site.status is Status.CONVERTED and not site.settled]

    def summary(self) -> str:
        """What became of the sites, as the command line prints it: how they were verified, or why they stay."""
        lines = [headline(self)]
        groups: dict[tuple[Status, str, str], list[SiteReport]] = defaultdict(list)
        for site in _left(self):
            groups[site.status, site.pass_name, site.reason].append(site)
        for (status, name, reason), sites in groups.items():
            places = ", ".join(f"{site.signature}#{site.index}" for site in sites[:_SITES_NAMED])
            more = f" and {len(sites) - _SITES_NAMED} more" if len(sites) > _SITES_NAMED else ""
            lines.append(f"  {status} {many(len(sites), 'site')} of {name} ({places}{more}): {reason}")
        lines += [f"  {text}" for text in (*unsound(self), *_kept(self), *_extents(self))]
        lines += [f"  {text}" for text in _notes(self)]
        lines += [f"  {signature.sentence()}" for signature in self.whole]
        return "\n".join(map(one_line, lines))


def check_requirements(result: ConversionResult, *, require_all: bool) -> None:
    """Raise `SitesLeftError` where less was converted than was asked for, or nothing at all could be verified."""
    left = _left(result)
    if require_all and left:
        first = left[0]
        raise SitesLeftError(
            f"{len(left)} of {len(result.sites)} sites were not converted and require_all=True asks for all: nothing "
            f"was written; the first is {first.pass_name} site {first.index} of '{first.signature}': {first.reason}"
        )
    unverified = [site for site in left if site.proof is not None and site.proof.open]
    if unverified and not result.converted:
        raise SitesLeftError(
            f"none of {many(len(left), 'site')} could be verified: nothing was written; the first reason is: "
            f"{unverified[0].reason}; verify='none' converts without verification"
        )


def _left(result: ConversionResult) -> list[SiteReport]:
    """Sites that stay, although there was something to do."""
    return [site for site in result.sites if site.status is not Status.CONVERTED and not site.settled]


def headline(result: ConversionResult) -> str:
    """How many sites were converted and how that was verified, or why there was nothing to convert."""
    attention = [site for site in result.sites if site.heads is not None or not site.settled]
    sites = [site for site in attention if not site.settled]
    if not attention:
        return "The model holds no attention: there was nothing to split."
    if sites or result.converted:
        return f"{len(result.converted)} of {many(len(sites), 'site')} converted{_verified(result)}."
    if any((site.heads or 0) > 1 for site in attention):
        return (
            f"Target '{result.target}' leaves the attention of these signatures as it is: nothing was split."
        )
    return "Every attention in the model is single-head already: there was nothing to split."


def entry_points(result: ConversionResult) -> list[tuple[str, ...]]:
    """Each of them before and after, as rows of a table; the first row is its heads."""
    rows: list[tuple[str, ...]] = [("signature", "operators", "blocks split", "largest tensor")]
    rows += [
        (
            f"{entry.name} (also {', '.join(entry.shares)})" if entry.shares else entry.name,
            _change(str(entry.operators_before), str(entry.operators_after)),
            f"{entry.blocks_converted} of {entry.blocks}",
            _change(size(entry.largest_tensor_bytes_before), size(entry.largest_tensor_bytes_after)),
        )
        for entry in result.signatures
    ]
    return rows


def unsound(result: ConversionResult) -> list[str]:
    """What is broken in the input's quantization; nothing where it is sound."""
    return [f"Broken in the input: {text}" for text in sentences(result.soundness)]


def proof(site: SiteReport) -> str:
    """What the verification of a site showed, and what else a user should know of the site."""
    figures = site.proof
    if figures is None:
        return "; ".join(filter(None, ("not run", site.note)))
    differs = "equal" if not figures.max_abs else f"differs by up to {figures.max_abs:.3g}"
    text = "bit for bit equal" if figures.bitwise else differs
    text += f" ({figures.steps} steps)" if figures.steps else ""
    ran = f"same structure as {figures.like}, not run" if figures.like else extent(figures.ran)
    return "; ".join(filter(None, (text, ran, figures.note, site.note)))


def extent(ran: Sequence[Ran]) -> str:
    """What was run: 'in full on XNNPACK, with lengths divided by 16 on the reference kernels'."""
    groups: dict[int, list[str]] = defaultdict(list)
    for part in ran:
        groups[part.divided].append(part.kernels)
    return ", ".join(
        f"{'in full' if divided == 1 else f'with lengths divided by {divided}'} on {_named(names)}"
        for divided, names in groups.items()
    )


def _kept(result: ConversionResult) -> list[str]:
    """Multi-head attention that is not split on purpose; the headline says it where nothing was converted."""
    settled = [site for site in result.sites if site.settled and site.status is Status.SKIPPED]
    groups = Counter((site.signature, site.reason) for site in settled if (site.heads or 0) > 1)
    lines = []
    for (signature, reason), count in groups.items() if result.converted else ():
        ran = Counter(site.pass_name for site in result.converted if site.signature == signature)
        others = ", ".join(f"{name} ({many(done, 'site')})" for name, done in ran.items())
        lines.append(
            f"{signature}, {many(count, 'block')} not split: {reason}{f'; converted there: {others}' if others else ''}"
        )
    return lines


def _notes(result: ConversionResult) -> list[str]:
    """What a user should know of sites that were converted, said once for all that it is true of."""
    converted = [site for site in result.sites if site.status is Status.CONVERTED]
    groups = Counter((site.pass_name, site.note) for site in converted if site.note)
    lines = [f"{many(n, 'site')} of {name}: {note}" for (name, note), n in groups.most_common(_NOTES_SHOWN)]
    hidden = len(groups) - len(lines)
    return [*lines, f"... {hidden} more such notes (all with --json)"] if hidden else lines


def _change(before: str, after: str) -> str:
    """'12 -> 34', or just '12' where nothing changed."""
    return before if before == after else f"{before} -> {after}"


def _verified(result: ConversionResult) -> str:
    proofs = [site.proof for site in result.converted if site.proof is not None]
    if result.verified == "none" or not result.converted:
        return ", not verified (--verify none)" if result.converted else ""
    if all(proof.bitwise for proof in proofs):
        text = f", each verified bit for bit on {_kernels(proofs)}"
    elif all(proof.demand.kind == "bitwise" for proof in proofs):
        notes = dict.fromkeys(proof.note for proof in proofs if not proof.bitwise)
        text = f", each verified bit for bit on the reference kernels ({'; '.join(notes)})"
    else:
        worst = max(proofs, key=lambda proof: proof.max_abs)
        figure = f"largest difference {worst.max_abs:.3g}" if worst.max_abs or not worst.note else ""
        text = f", each verified to what its pass demands ({': '.join(filter(None, (figure, worst.note)))})"
    if result.verified != "full":
        return text
    left_out = f" but {', '.join(result.not_compared)}, meant to change" if result.not_compared else ""
    return f"{text}, and the whole models compared{left_out}"


def _kernels(proofs: Sequence[Proof]) -> str:
    """'XNNPACK and the reference kernels', with how many sites where not all ran on the same."""
    groups = Counter(tuple(ran.kernels for ran in proof.ran) for proof in proofs)
    said = [(_named(names), many(count, "site")) for names, count in groups.most_common()]
    return said[0][0] if len(said) == 1 else ", ".join(f"{names} ({sites})" for names, sites in said)


def _extents(result: ConversionResult) -> list[str]:
    """What was not run in full; nothing where all was."""
    proofs = [site.proof for site in result.converted if site.proof]
    lines = []
    large = sum(not proof.like and any(ran.divided > 1 for ran in proof.ran) for proof in proofs)
    if large:
        inputs = "extreme inputs and what other kernels there are with shorter lengths"
        lines.append(f"{many(large, 'large region')} run in full on random inputs, {inputs}")
    for name, count in Counter(proof.like for proof in proofs if proof.like).items():
        lines.append(f"{many(count, 'site')}: same structure as {name}, not run")
    return lines


def _named(kernels: Sequence[str]) -> str:
    return " and ".join(_KERNELS.get(name, name) for name in kernels)
