"""Tolerances for a whole model's outputs before and after conversion, derived from its rewrites.

If every accepted site of a signature demanded and gave identical bits, every output must be bit-identical. Otherwise
the difference passes through the rest of the network, and a tolerance applies:

- `16 * sum of the demanded relative tolerances`, relative to the largest value of the output. An error of
  1e-6 in one region may grow downstream; measured outputs differ by at most 0.4 times that sum.
- with quantized activations, `24` steps of the coarsest type among them (`80` if it is int16), because in every layer a
  difference of any size becomes a full step if it crosses a rounding boundary. Measured, depending on the processor: at
  most 16 steps of int8 and 28 of int16; two heads swapped in the last block gave 28 and 234. Outputs of other types
  may differ by the same fraction of their range.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edge_opt.base.record import Record
from edge_opt.base.words import many
from edge_opt.comparison.findings import OutputComparison, SignatureComparison
from edge_opt.ir import DType, Model, Operator, Subgraph
from edge_opt.passes import Site

_GROWTH = 16
_STEPS = {4: 24, 8: 24, 16: 80}  # by the coarsest activation's bits
_ROUNDING = 1e-6  # for proofs that are bitwise on the reference kernels only
_EXACT = frozenset({"DEQUANTIZE", "GATHER", "EMBEDDING_LOOKUP"})
_BITS = {DType.INT4: 4, DType.INT8: 8, DType.UINT8: 8, DType.INT16: 16}


@dataclass(frozen=True, slots=True)
class Allowance:
    """Permitted distance of a signature's outputs: `relative` to an output's range, or in `steps`.

    `because` names the passes that need it; empty if every output must be bit-identical.
    """

    relative: float = 0.0
    steps: int = 0
    because: str = ""

    def __str__(self) -> str:
        if not self.because:
            return "bit-identical, as is every rewritten region"
        return f"within {_distance(self.steps, self.relative)}, because of {self.because}"

    def permits(self, output: OutputComparison) -> bool:
        """True if the output is within the allowance."""
        if output.reason or output.bitwise or not self.because:
            return output.bitwise
        return output.max_rel <= self.relative or (output.steps or math.inf) <= self.steps


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
        return not self.violation

    @property
    def violation(self) -> str:
        """Describe the first output outside the allowance; empty if there is none."""
        if self.comparison.reason:
            return f"signature '{self.name}': {self.comparison.reason}"
        failed = (output for output in self.comparison.outputs if not self.allowance.permits(output))
        texts = (f"signature '{self.name}', {output.sentence()}" for output in failed)
        return next((f"{text}, but must be {self.allowance}" for text in texts), "")

    @property
    def outcome(self) -> str:
        """Describe how close the outputs were."""
        outputs = self.comparison.outputs
        text = f"all {len(outputs)} outputs are" if len(outputs) > 1 else "the output is"
        if self.comparison.bitwise:
            return f"{text} bit-identical"
        steps = max((output.steps or 0 for output in outputs), default=0)
        return f"{text} within {_distance(steps, max(output.max_rel for output in outputs))}"


def _distance(steps: int, relative: float) -> str:
    return f"{many(steps, 'step') + ' or ' if steps else ''}{relative:.2g} of the range"


def allowances(model: Model, sites: Mapping[str, Sequence[Site]]) -> dict[str, Allowance]:
    """Return the allowance of each entry point of a converted model, from the sites that were converted in it."""
    found: dict[Subgraph, list[Site]] = defaultdict(list)  # entry points may share a graph
    for name, graph in model.entry_points():
        found[graph] += sites.get(name, ())
    return {name: _allowance(found[graph], graph) for name, graph in model.entry_points()}


def _allowance(sites: Sequence[Site], graph: Subgraph) -> Allowance:
    proofs = [(site.pass_name, site.proof) for site in sites if site.proof is not None]
    tolerant = [(name, one) for name, one in proofs if one.demand.kind != "bitwise" or not one.bitwise]
    if not tolerant:
        return Allowance()
    demands = (one.demand for _, one in tolerant)
    relative = _GROWTH * sum(one.tolerance if one.kind == "relative" else _ROUNDING for one in demands)
    bits = min(filter(None, map(_bits, graph.operators)), default=0)
    steps = _STEPS.get(bits, 0)
    counts = Counter(name for name, _ in tolerant)
    because = ", ".join(f"{many(count, 'site')} of {name}" for name, count in counts.items())
    return Allowance(max(relative, steps * 2.0**-bits), steps, because)


def _bits(operator: Operator) -> int:
    """Return the bits of an operator's coarsest activation, or 0; float activations with integer weights count as 8."""
    coded = [t for t in (*operator.inputs, *operator.outputs) if t and t.is_quantized and t.dtype in _BITS]
    moving = [_BITS[tensor.dtype] for tensor in coded if not tensor.is_constant]
    return min(moving, default=8 if coded and operator.name not in _EXACT else 0)
