"""Comparison results as data: one report for comparisons on the CPU, on an NPU, and with a golden file.

Independent of how models are run. In dicts, a figure that is not finite (the signal-to-noise ratio without noise, the
distance to a NaN) is null.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from itertools import chain
from typing import Any

from edge_opt.base.record import Record
from edge_opt.base.words import many
from edge_opt.ir.opening import ModelLike
from edge_opt.runtime.metrics import NONE, Difference, Tolerance, measure, merge
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.tensors import TensorInfo


@dataclass(frozen=True, slots=True)
class OutputComparison(Difference):
    """Distances between one output's elements, over all runs; `elements` is 0 if it could not be measured.

    `reason` explains a difference that the figures do not show. `db` is the signal-to-noise ratio of `a` and of `b`
    against the CPU, if the models ran elsewhere. `sample_of`: a golden file has only a sample of so many elements, not
    all of which are bit-identical; minimum, maximum and sum of all were compared as well. 0 if all were compared.
    """

    name: str = ""
    reason: str = ""
    sample_of: int = 0
    db: tuple[float, float] | None = None

    _or_null = ("reason",)

    @property
    def equal(self) -> bool:
        """True if every element is within the tolerances."""
        return not self.reason and self.outside == 0

    @property
    def bitwise(self) -> bool:
        """True if every element is bit-identical (NaN equals NaN)."""
        return not (self.reason or self.differing or self.sample_of)

    def sentence(self) -> str:
        """Describe how the output differs, if it does."""
        if self.reason or self.bitwise:
            return f"output '{self.name}': {self.reason or 'bit-identical'}"
        what = "sampled elements" if self.sample_of else "elements"
        text = f"output '{self.name}': {self.differing} of {self.elements} {what} differ"
        if self.worst is not None and self.worst_values is not None:
            a, b = self.worst_values
            text += (
                f", by at most {self.max_abs:.3g} (at {list(self.worst)}: {a:.6g} against {b:.6g})"
            )
        return f"{text}, SNR {self.snr_db:.1f} dB"

    def notes(self) -> Iterator[str]:
        """Notes that do not affect the verdict, to follow the output's name."""
        if self.sample_of:
            part = f"{self.elements} of {self.sample_of} elements"
            yield f": not bit-identical; compared were {part}, and minimum, maximum and sum of all"
        if self.elements and not self.finite:
            yield ": no element is finite in a"
        if self.kl is not None and self.differing:
            figures = f"top-1 agreement {self.top1:.2%}, KL divergence {self.kl:.3g} nats"
            yield f", mean over rows of logits: {figures}"

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, without figures if nothing was measured."""
        values = Record.to_dict(self)
        if self.elements or not self.reason:
            return values
        return {name: values[name] for name in ("name", "bitwise", "equal", "reason", "db")}


def name_of(given: ModelLike, role: str) -> str:
    """A model's display name: its path, or its role."""
    return os.fspath(given) if isinstance(given, str | os.PathLike) else f"<{role}>"


def measured(
    info_a: TensorInfo,
    info_b: TensorInfo,
    runs: Iterable[tuple[Array, Array]],
    tolerance: Tolerance = NONE,
    *,
    ordinary: int = 0,
    logits: bool = False,
) -> OutputComparison:
    """Compare one output over all runs, each with the arrays of both models; see `metrics.measure`.

    Runs after the `ordinary` ones count only if all bits are equal in these: figures of models that round differently
    are those of ordinary inputs.
    """
    name = info_a.name
    found: list[Difference] = []
    retyped = ""
    for a, b in runs:
        if len(found) == ordinary and not all(one.bitwise for one in found):
            break
        if a.shape != b.shape:
            return OutputComparison(name=name, reason=f"shape {a.shape} in a, {b.shape} in b")
        if a.dtype != b.dtype:
            retyped = f"{a.dtype} in a, {b.dtype} in b"
            if not (_are_reals(a, info_a) and _are_reals(b, info_b)):
                return OutputComparison(name=name, reason=retyped)
        found.append(measure(a, b, (info_a, info_b), tolerance=tolerance, logits=logits))
    output = OutputComparison(**asdict(reduce(merge, found)), name=name)
    reason = requantized(info_a, info_b)
    if retyped and output.equal and tolerance == NONE:
        reason = f"the same numbers, but {retyped}"
    return replace(output, reason=reason)


def _are_reals(array: Array, info: TensorInfo) -> bool:
    """True for real numbers and their codes, which can be compared whatever their types."""
    return array.dtype.kind == "f" or info.quantized


def requantized(a: TensorInfo, b: TensorInfo) -> str:
    """How the quantization of one input or output differs, so that the same code means another number; else empty."""
    if a.is_float or b.is_float or a.quantization == b.quantization:
        return ""
    if a.dtype != b.dtype and not (a.scales and b.scales):
        return ""  # the difference is one of types
    if len(a.scales + b.scales) > 2:
        return "scales along an axis, which differ between a and b"
    return f"{_scale(a)} in a, {_scale(b)} in b"


def _scale(info: TensorInfo) -> str:
    return (
        f"scale {info.scales[0]:.6g}, zero point {info.zero_point}" if info.scales else "no scale"
    )


@dataclass(frozen=True, slots=True)
class SignatureComparison(Record):
    """Comparison of one signature; `reason` says why it could not be run on both sides, or how an input differs."""

    name: str
    outputs: tuple[OutputComparison, ...] = ()
    reason: str = ""

    _properties = ("equal", "bitwise")
    _or_null = ("reason",)

    @property
    def equal(self) -> bool:
        """True if every output is within the tolerances."""
        return not self.reason and all(output.equal for output in self.outputs)

    @property
    def bitwise(self) -> bool:
        """True if every output is bit-identical."""
        return not self.reason and all(output.bitwise for output in self.outputs)

    @property
    def measured(self) -> list[OutputComparison]:
        """The outputs that both models have."""
        return [output for output in self.outputs if output.elements or not output.reason]

    def row(self) -> list[str]:
        """Name, outputs, bit-identical ones, and the worst figures; those against the CPU only if there are any."""
        same = sum(output.bitwise for output in self.outputs)
        row = [self.name, str(len(self.outputs)), str(same), "-", "-"]
        if self.measured:
            row[3] = f"{max(output.max_abs for output in self.measured):.3g}"
            row[4] = f"{min(output.snr_db for output in self.measured):.1f} dB"
        against_cpu = [output.db for output in self.outputs if output.db is not None]
        if against_cpu:
            for side in (0, 1):
                lowest = min(pair[side] for pair in against_cpu)
                row.append(f"{lowest:.1f} dB")
        return row

    def sentences(self) -> list[str]:
        """The `reason`, if there is one, and one sentence for each output that is not bit-identical."""
        where = f"signature '{self.name}'"
        found = [f"{where}: {self.reason}"] if self.reason else []
        found += (f"{where}, {each.sentence()}" for each in self.outputs if not each.bitwise)
        return found


@dataclass(frozen=True, slots=True)
class FirstDifference(Record):
    """The first shared tensor that differs, and the operators that compute it from equal tensors.

    Operators are in text form with short names; `names` maps them to the models' names. `constants` have different
    values in the two models. `reason` says why nothing, or nothing more precise, was found.
    """

    signature: str
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
    """Tokens that `a` and `b` generated greedily from one prompt: for each step, one token per batch row."""

    count: int
    prompt: tuple[tuple[int, ...], ...]
    a: tuple[tuple[int, ...], ...]
    b: tuple[tuple[int, ...], ...]
    logits: OutputComparison

    _properties = ("equal", "first_difference")

    @property
    def equal(self) -> bool:
        """True if all tokens are the same."""
        return self.a == self.b

    @property
    def first_difference(self) -> int | None:
        """The first step with different tokens; None if all are the same."""
        return next((step for step, one in enumerate(self.a) if one != self.b[step]), None)

    def sentence(self) -> str:
        """The result in one sentence."""
        place = self.first_difference
        how = f"after a prompt of {len(self.prompt[0])}"
        if place is not None:
            differing = f"{self.a[place]} against {self.b[place]}"
            return (
                f"generated tokens differ from step {place} of {self.count} on, {how}: {differing}"
            )
        return f"{self.count} generated tokens are the same, {how}; {self.logits.sentence()}"


@dataclass(frozen=True, slots=True, repr=False)
class ComparisonReport(Record):
    """Comparison of two models, or a model and its golden file, on the same inputs; true if they are equal.

    `signatures` has an entry for every signature of either model (with a `reason` if it could not be run on both), each
    with an `OutputComparison` for every output of either. `on` is "cpu", "reference" (the CPU's reference kernels) or
    "npu". `remarks` say how the models ran, such as the content of caches; they do not affect the verdict.
    """

    a: str
    b: str
    on: str
    seed: int
    atol: float = 0.0
    rtol: float = 0.0
    signatures: tuple[SignatureComparison, ...] = ()
    first_difference: FirstDifference | None = None
    generation: GenerationComparison | None = None
    remarks: tuple[str, ...] = ()

    _properties = ("equal", "bitwise")
    _left_out = ("remarks",)

    def __bool__(self) -> bool:
        return self.equal

    def __repr__(self) -> str:
        return f"ComparisonReport({self.a!r}, {self.b!r}: {self.summary()})"

    @property
    def measured(self) -> list[OutputComparison]:
        """The outputs that both models have."""
        return list(chain.from_iterable(signature.measured for signature in self.signatures))

    @property
    def equal(self) -> bool:
        """True if |a-b| <= atol + rtol*|a| for every element of every output, and generated tokens are equal.

        False if the models share no outputs, or if only one of them has a signature, input or output.
        """
        return not self.differences()

    @property
    def bitwise(self) -> bool:
        """True if every element is bit-identical (NaN equals NaN)."""
        return bool(self.measured) and all(signature.bitwise for signature in self.signatures)

    def differences(self) -> list[str]:
        """One sentence for each signature or output outside the tolerances; empty if `equal`."""
        sentences: list[str] = []
        for signature in self.signatures:
            if not signature.equal:
                sentences += signature.sentences()
        if self.generation is not None and not self.generation.equal:
            sentences.append(self.generation.sentence())
        if not sentences and not self.measured:
            sentences.append("nothing was compared: the models have no outputs in common")
        return sentences

    def rows(self) -> list[tuple[str, ...]]:
        """A table of the signatures with the worst figures of each; the first row is the header."""
        heads = ["signature", "outputs", "bit-identical", "max abs", "lowest SNR"]
        rows = [one.row() for one in self.signatures]
        if any(len(row) > len(heads) for row in rows):
            heads += ["a to CPU", "b to CPU"]
        rows.insert(0, heads)
        return [(*row, *["-"] * (len(heads) - len(row))) for row in rows]

    def notes(self) -> list[str]:
        """Notes that do not affect the verdict: remarks, logits statistics, and outputs without finite elements."""
        lines = [*self.remarks]
        for signature in self.signatures:
            for output in signature.measured:
                named = f"signature '{signature.name}', output '{output.name}'"
                lines += (f"{named}{note}" for note in output.notes())
        return lines

    def summary(self) -> str:
        """One sentence: how the models are equal, or the first difference and the number of others."""
        differences = self.differences()
        count = len(self.measured)
        if differences:
            more = f" (and {len(differences) - 1} more)" if len(differences) > 1 else ""
            return f"{differences[0]}{more}"
        outputs = f"all {many(count, 'output')} of {many(len(self.signatures), 'signature')}"
        within = f"equal within atol={self.atol:g}, rtol={self.rtol:g}"
        text = f"{outputs} are {'bit-identical' if self.bitwise else within}"
        sampled = sum(output.sample_of > 0 for output in self.measured)
        if not sampled:
            return text
        return f"{text} ({many(sampled, 'output')} by a sample, minimum, maximum and sum)"

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `edge-opt compare --json`."""
        return {**Record.to_dict(self), "differences": self.differences(), "notes": self.notes()}
