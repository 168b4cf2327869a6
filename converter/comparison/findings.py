"""What a comparison found, as data: per signature, per output, with one sentence for people and a dict for programs.

Knows nothing of how models are run. In the dicts a figure that is not a finite number (the signal-to-noise ratio
where there is no noise, the distance to a NaN) is null.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_opt.base.record import Record
from edge_opt.base.words import as_html, many
from edge_opt.runtime.metrics import Difference, measure, merge
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class OutputComparison:
    """One output over all runs; `reason` says why it could not be measured, or what beside its elements differs."""

    name: str
    difference: Difference | None = None
    reason: str = ""

    @property
    def equal(self) -> bool:
        """Whether every element is within the tolerances."""
        return not self.reason and self.difference is not None and self.difference.equal

    @property
    def bitwise(self) -> bool:
        """Whether every element is the same bit for bit (NaN equals NaN)."""
        return not self.reason and self.difference is not None and self.difference.bitwise

    def sentence(self) -> str:
        """What differs, or that nothing does."""
        figures = self.difference
        if self.reason or figures is None:
            return f"output '{self.name}': {self.reason}"
        if figures.bitwise:
            return f"output '{self.name}': bitwise equal"
        text = f"output '{self.name}': {figures.differing} of {figures.elements} elements differ"
        if figures.worst is not None and figures.worst_values is not None:
            a, b = figures.worst_values
            text += f", by at most {figures.max_abs:.3g} (at {list(figures.worst)}: {a:.6g} against {b:.6g})"
        return f"{text}, SNR {figures.snr_db:.1f} dB"

    def merged(self, other: OutputComparison | None) -> OutputComparison:
        """The worse of two comparisons of the same output, figure by figure; the first where there is no other."""
        if other is None:
            return self
        worse = self.difference
        if worse is not None and other.difference is not None:
            worse = merge(other.difference, worse)
        return OutputComparison(self.name, worse, other.reason or self.reason)

    def to_dict(self) -> dict[str, Any]:
        """The figures as JSON values."""
        unmeasured = {"max_abs": None, "snr_db": None, "cosine": None}
        figures = unmeasured if self.difference is None else self.difference.to_dict()
        reason = {"reason": self.reason} if self.reason else {}
        return {"name": self.name, **figures, "bitwise": self.bitwise, "equal": self.equal, **reason}


def measured(info_a: TensorInfo, info_b: TensorInfo, a: Array, b: Array, **how: Any) -> OutputComparison:
    """One output on one set of inputs; `how` goes to `metrics.measure`."""
    if a.shape != b.shape:
        return OutputComparison(info_a.name, reason=f"shape {a.shape} in a, {b.shape} in b")
    return OutputComparison(info_a.name, measure(a, b, quantized_a=info_a, quantized_b=info_b, **how))


@dataclass(frozen=True, slots=True)
class SignatureComparison(Record):
    """One signature on one set of kernels; `reason` says why it could not be run on both sides.

    `masked_rows` are its outputs where a mask closes whole rows, and are not part of the verdict: a row without a key
    belongs to no token. Empty where no input is a mask, or hostile inputs, which close rows, are part of it.
    """

    _properties = ("equal", "bitwise")

    name: str
    backend: str
    outputs: tuple[OutputComparison, ...] = ()
    reason: str = ""
    masked_rows: tuple[OutputComparison, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether every output is within the tolerances."""
        return not self.reason and all(output.equal for output in self.outputs)

    @property
    def bitwise(self) -> bool:
        """Whether every output is the same bit for bit."""
        return not self.reason and all(output.bitwise for output in self.outputs)

    def row(self) -> tuple[str, ...]:
        """How many outputs are equal, and the worst figures of all: a row of `ComparisonReport.rows`."""
        equal = sum(output.bitwise for output in self.outputs)
        figures = [output.difference for output in self.outputs if output.difference is not None]
        worst: tuple[str, ...] = ("-", "-", "-")
        if figures and not self.reason:
            worst = (
                f"{max(figure.max_abs for figure in figures):.3g}",
                f"{min(figure.snr_db for figure in figures):.1f} dB",
                f"{min(figure.cosine for figure in figures):.6g}",
            )
        return (self.name, self.backend, str(len(self.outputs)), str(equal), *worst)

    def masked_rows_sentence(self) -> str:
        """How far outputs are apart where rows are masked everywhere; empty where they are not."""
        figures = [output.difference for output in self.masked_rows if not output.bitwise]
        if not figures:
            return ""
        worst = max((figure.max_abs for figure in figures if figure is not None), default=math.inf)
        return (
            f"with rows that are masked everywhere, {len(figures)} of {len(self.masked_rows)} outputs of signature "
            f"'{self.name}' ({self.backend}) differ, by up to {worst:.3g}"
        )

    def sentences(self) -> list[str]:
        """One sentence per thing that differs in any bit."""
        where = f"signature '{self.name}' ({self.backend})"
        if self.reason:
            return [f"{where}: {self.reason}"]
        return [f"{where}, {output.sentence()}" for output in self.outputs if not output.bitwise]


@dataclass(frozen=True, slots=True)
class FirstDifference(Record):
    """Where two models begin to differ: a tensor of both, and the operators that lead to it from equal tensors.

    Operators are in the text form, with short names; `names` has the models' own. `constants` are those that both
    regions read, with other numbers. `reason` says why nothing was found, or why not closer.
    """

    signature: str
    backend: str
    tensor: str = ""
    short_name: str = ""
    figures: OutputComparison | None = None
    equal_before: tuple[str, ...] = ()
    operators_a: tuple[str, ...] = ()
    operators_b: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    constants: tuple[str, ...] = ()
    reason: str = ""

    _or_null = ("tensor", "short_name", "reason")


@dataclass(frozen=True, slots=True)
class GenerationComparison(Record):
    """Tokens that models `a` and `b` generated greedily from one prompt: for each step one for each batch row."""

    _properties = ("equal", "first_difference")

    count: int
    backend: str
    prompt: tuple[tuple[int, ...], ...]
    a: tuple[tuple[int, ...], ...]
    b: tuple[tuple[int, ...], ...]
    logits: OutputComparison

    @property
    def equal(self) -> bool:
        """Whether all tokens are the same."""
        return self.a == self.b

    @property
    def first_difference(self) -> int | None:
        """The first step whose tokens differ."""
        return next((step for step, one in enumerate(self.a) if one != self.b[step]), None)

    def sentence(self) -> str:
        """What came of it."""
        place = self.first_difference
        how = f"after a prompt of {len(self.prompt[0])} ({self.backend})"
        if place is not None:
            differing = f"{self.a[place]} against {self.b[place]}"
            return f"generated tokens differ from step {place} of {self.count} on, {how}: {differing}"
        return f"{self.count} generated tokens are the same, {how}; {self.logits.sentence()}"


def first_of(differences: Sequence[str]) -> str:
    """The first of several sentences, and how many others there are."""
    more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
    return f"{differences[0]}{more}"


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonReport(Record):
    """Two models, or a model and its golden file, on the same inputs.

    `caches` says what those of them held, `opened` at which one size inputs of open lengths were run.
    """

    _properties = ("equal", "bitwise")

    a: str
    b: str
    backend: str
    seed: int
    runs: int
    hostile: bool
    atol: float
    rtol: float
    signatures: tuple[SignatureComparison, ...] = ()
    first_difference: FirstDifference | None = None
    generation: GenerationComparison | None = None
    caches: tuple[str, ...] = ()
    opened: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"ComparisonReport({self.a!r}, {self.b!r}: {self.summary()})"

    def _repr_html_(self) -> str:
        return as_html(
            "\n".join([f"{self.summary()}.", *self.logits(), *self.caches, *self.notes()]), self.rows()
        )

    @property
    def equal(self) -> bool:
        """Whether |a-b| <= atol + rtol*|a| holds for every element of every output, and generated tokens are equal."""
        tokens = self.generation is None or self.generation.equal
        return tokens and all(signature.equal for signature in self.signatures)

    @property
    def bitwise(self) -> bool:
        """Whether every element is the same bit for bit (NaN equals NaN)."""
        return all(signature.bitwise for signature in self.signatures)

    def differences(self) -> list[str]:
        """One sentence for each signature or output that is not within the tolerances; empty if `equal`."""
        failed = [signature for signature in self.signatures if not signature.equal]
        sentences = [text for signature in failed for text in signature.sentences()]
        if self.generation is not None and not self.generation.equal:
            sentences.append(self.generation.sentence())
        return sentences

    def rows(self) -> list[tuple[str, ...]]:
        """A table of the signatures; the first row is its heads."""
        heads = ("signature", "kernels", "outputs", "bitwise equal", "max abs", "lowest SNR", "lowest cosine")
        return [heads, *(signature.row() for signature in self.signatures)]

    def logits(self) -> list[str]:
        """What differences mean for the tokens: one sentence for each output of logits that differs."""
        return [
            f"signature '{signature.name}' ({signature.backend}), logits '{output.name}', mean over rows: "
            f"top-1 agreement {figures.top1:.2%}, top-5 {figures.top5:.2%}, KL divergence {figures.kl:.3g} nats"
            for signature in self.signatures
            for output in signature.outputs
            if (figures := output.difference) and figures.kl is not None and not figures.bitwise
        ]

    def notes(self) -> list[str]:
        """What is not part of the verdict: one size of open lengths, masked rows, outputs without a finite element."""
        sizes = f"open lengths were run at one size only (--shape gives others): {', '.join(self.opened)}"
        without = [
            f"signature '{signature.name}' ({signature.backend}), output '{output.name}': no element is finite in a"
            for signature in self.signatures
            for output in signature.outputs
            if output.difference is not None and output.difference.elements and not output.difference.finite
        ]
        masked = (signature.masked_rows_sentence() for signature in self.signatures)
        return [*([sizes] if self.opened else []), *filter(None, masked), *without]

    def summary(self) -> str:
        """One sentence: that all is equal and how, or the first difference and how many there are."""
        count = sum(len(signature.outputs) for signature in self.signatures)
        if self.bitwise and self.equal:
            names = len({signature.name for signature in self.signatures})
            kernels = len({signature.backend for signature in self.signatures})
            backends = f" on {kernels} kernel sets" if kernels > 1 else ""
            outputs = "the only output" if count == kernels else f"all {count // kernels} outputs"
            verb = "is" if count == kernels else "are"
            return f"{outputs} of {many(names, 'signature')} {verb} bitwise equal{backends}"
        if self.equal:
            return f"all {count} outputs are equal within atol={self.atol:g}, rtol={self.rtol:g}"
        return first_of(self.differences())

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `edge-opt compare --json`."""
        return {**Record.to_dict(self), "notes": self.notes()}
