"""Tolerances for a whole model's outputs before and after conversion, derived from its rewrites.

If every accepted site of a signature demanded and gave identical bits, every output must be bit-identical. Otherwise
the difference passes through the rest of the network, and a tolerance applies:

- `16 * sum of the demanded relative tolerances`, relative to the largest value of the output. An error of
  1e-6 in one region may grow downstream; measured outputs differ by at most 0.4 times that sum.
- with quantized activations, `24` steps of the coarsest type among them (`80` if it is int16), because in every layer a
  difference of any size becomes a full step if it crosses a rounding boundary. Measured, depending on the processor: at
  most 16 steps of int8 and 28 of int16; two heads swapped in the last block gave 28 and 234. For types with more bits,
  the same fraction of the range.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edge_opt.base.record import Record
from edge_opt.base.words import many
from edge_opt.comparison.findings import OutputComparison, SignatureComparison
from edge_opt.ir import DType, Model, Operator, Subgraph, Tensor
from edge_opt.passes import Site, Status

_GROWTH = 16
_STEPS = {4: 24, 8: 24, 16: 80}  # by the coarsest activation's bits
_ROUNDING = 1e-6  # for proofs that are bitwise on the reference kernels only
_EXACT = frozenset({"DEQUANTIZE", "GATHER", "EMBEDDING_LOOKUP"})
_BITS = {DType.INT4: 4, DType.INT8: 8, DType.UINT8: 8, DType.INT16: 16}


@dataclass(frozen=True, slots=True)
class Allowance:
    """Permitted distance of a signature's outputs: `relative` to an output's range, or in `steps` by name.

    `because` names the passes that need it; empty if every output must be bit-identical.
    """

    relative: float = 0.0
    steps: Mapping[str, int] = field(default_factory=dict)
    because: str = ""

    def __str__(self) -> str:
        if not self.because:
            return "bit for bit, as every rewritten region demands"
        most = f"{max(self.steps.values())} steps or " if self.steps else ""
        return f"within {most}{self.relative:.2g} of the range, because of {self.because}"

    def permits(self, output: OutputComparison) -> bool:
        """True if the output is within the allowance."""
        if output.reason or output.bitwise or not self.because:
            return output.bitwise
        if output.name in self.steps and output.steps is not None:
            return output.steps <= self.steps[output.name]
        return output.max_rel <= self.relative


@dataclass(frozen=True, slots=True)
class WholeSignature(Record):
    """Comparison of one signature of the whole models, and its allowance."""

    name: str
    allowance: Allowance
    comparison: SignatureComparison

    _properties = ("holds",)

    @property
    def holds(self) -> bool:
        """True if every output is within the allowance."""
        return not self.comparison.reason and all(map(self.allowance.permits, self.comparison.outputs))

    def violation(self) -> str:
        """Describe the first output outside the allowance."""
        if self.comparison.reason:
            return f"signature '{self.name}': {self.comparison.reason}"
        failed = next(output for output in self.comparison.outputs if not self.allowance.permits(output))
        return f"signature '{self.name}', {failed.sentence()}, and it must be the same {self.allowance}"

    def sentence(self) -> str:
        """Describe the outcome and the allowance."""
        return f"{self.name}: {self.outcome()}; demanded: {self.allowance}"

    def outcome(self) -> str:
        """Describe how close the outputs were."""
        text, outputs = f"all {many(len(self.comparison.outputs), 'output')} are", self.comparison.outputs
        if self.comparison.bitwise:
            return f"{text} bitwise equal"
        steps = max((output.steps or 0 for output in outputs), default=0)
        in_steps = f" {many(steps, 'step')} or" if steps else ""
        return f"{text} within{in_steps} {max(output.max_rel for output in outputs):.2g} of the range"


def allowances(model: Model, sites: Mapping[str, Sequence[Site]]) -> dict[str, Allowance]:
    """Return the allowance of each entry point of a converted model, from the `sites` reported for it."""
    allowed = {}
    for name, graph in model.entry_points():
        sharing = [other for other, its in model.entry_points() if its is graph]
        outputs = model.signatures[name].outputs if model.signatures else {t.name: t for t in graph.outputs}
        allowed[name] = _allowance([site for one in sharing for site in sites.get(one, ())], graph, outputs)
    return allowed


def _allowance(sites: Sequence[Site], graph: Subgraph, outputs: Mapping[str, Tensor]) -> Allowance:
    converted = ((site.pass_name, site.proof) for site in sites if site.status is Status.CONVERTED)
    proofs = [(name, proof) for name, proof in converted if proof is not None]
    tolerant = [(name, one) for name, one in proofs if one.demand.kind != "bitwise" or not one.bitwise]
    if not tolerant:
        return Allowance()
    demands = (one.demand for _, one in tolerant)
    relative = _GROWTH * sum(one.tolerance if one.kind == "relative" else _ROUNDING for one in demands)
    steps: dict[str, int] = {}
    bits = min(filter(None, map(_bits, graph.operators)), default=0)
    if bits:
        relative = max(relative, _STEPS[bits] * 2.0**-bits)
        wide = {name: max(_BITS[t.dtype] - bits, 0) for name, t in outputs.items() if t.dtype in _BITS}
        steps = {name: _STEPS[bits] << more for name, more in wide.items()}
    counts = Counter(name for name, _ in tolerant)
    return Allowance(relative, steps, ", ".join(f"{many(n, 'site')} of {name}" for name, n in counts.items()))


def _bits(operator: Operator) -> int:
    """Return the bits of an operator's coarsest activation, or 0; float activations with integer weights count as 8."""
    coded = [t for t in (*operator.inputs, *operator.outputs) if t and t.is_quantized and t.dtype in _BITS]
    moving = [_BITS[tensor.dtype] for tensor in coded if not tensor.is_constant]
    return min(moving, default=8 if coded and operator.name not in _EXACT else 0)
