"""The whole model before and after a conversion: the same bit for bit, or as near as its rewrites were allowed to be.

What is allowed follows from what the accepted sites of a signature demanded of their regions. Where each demanded and
gave the same bits, every output must be the same, bit for bit. Where one did not, its difference goes through the rest
of the network, and outputs get room:

- `16 * sum of the demanded relative tolerances`, relative to the largest value of the output. One region's error of
  1e-6 may grow on its way; measured, outputs differ by at most 0.4 times that sum.
- where activations are quantized, `24` steps of the coarsest type among them (`80` if that is int16), because a
  difference of any size turns into a step where it crosses the middle of two codes, in every layer anew. Measured: at
  most 16 of int8 and 28 of int16, which depends on the processor; two heads swapped in the last block gave 28 and 234.
  In a type with more bits it is as much of the range.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_opt.base.words import many
from edge_opt.comparison.findings import OutputComparison, SignatureComparison
from edge_opt.ir import DType, Model, Operator, Subgraph, Tensor
from edge_opt.passes import SiteReport, Status

_GROWTH = 16
_STEPS = {4: 24, 8: 24, 16: 80}  # by the coarsest activation's bits
_ROUNDING = 1e-6  # of proofs that are bitwise on the reference kernels only
_BITS = {DType.INT4: 4, DType.INT8: 8, DType.UINT8: 8, DType.INT16: 16}


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far the outputs of a signature may be apart: `relative` to an output's range, or so many `steps` by name.

    `because` names the passes that ask for it; empty where every output must be the same bit for bit.
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
        """Whether the output is as near as it must be."""
        if output.bitwise or output.reason or output.difference is None or not self.because:
            return output.bitwise
        if output.name in self.steps and output.difference.steps is not None:
            return output.difference.steps <= self.steps[output.name]
        return output.difference.max_rel <= self.relative


@dataclass(frozen=True, slots=True)
class WholeSignature:
    """One signature of the whole models, compared, and how equal it had to be."""

    name: str
    allowance: Allowance
    comparison: SignatureComparison

    @property
    def holds(self) -> bool:
        """Whether every output is as near as it must be."""
        return not self.comparison.reason and all(map(self.allowance.permits, self.comparison.outputs))

    def violation(self) -> str:
        """The first output that is too far off, in a sentence."""
        if self.comparison.reason:
            return f"signature '{self.name}': {self.comparison.reason}"
        failed = next(output for output in self.comparison.outputs if not self.allowance.permits(output))
        return f"signature '{self.name}', {failed.sentence()}, and it must be the same {self.allowance}"

    def sentence(self) -> str:
        """What was found and what was demanded."""
        return f"{self.name}: {self.outcome()}; demanded: {self.allowance}"

    def outcome(self) -> str:
        """How equal the outputs were."""
        text, figures = f"all {len(self.comparison.outputs)} outputs are", self.comparison.measured
        if self.comparison.bitwise:
            text += " bitwise equal"
        else:
            steps = max((figure.steps or 0 for figure in figures), default=0)
            text += f" within {many(steps, 'step')} or" if steps else " within"
            text += f" {max(figure.max_rel for figure in figures):.2g} of the range"
        agreement = [figure.top1 for figure in figures if figure.top1 is not None and not figure.bitwise]
        text += f", highest logits agree in {100 * min(agreement):.0f} % of rows" if agreement else ""
        return "; ".join(filter(None, (text, self.comparison.masked_rows_sentence())))

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "signature": self.name,
            "holds": self.holds,
            "bitwise": self.comparison.bitwise,
            "demanded": str(self.allowance),
            "relative": self.allowance.relative,
            "steps": dict(self.allowance.steps),
            "outputs": [output.to_dict() for output in self.comparison.outputs],
        }


def allowances(model: Model, sites: Mapping[str, Sequence[SiteReport]]) -> dict[str, Allowance]:
    """What each entry point of a converted model is allowed; `sites` are those reported for each."""
    by_graph: dict[Subgraph, list[SiteReport]] = {}
    for name, graph in model.entry_points():
        by_graph.setdefault(graph, []).extend(sites.get(name, ()))
    allowed = {}
    for name, graph in model.entry_points():
        outputs = model.signatures[name].outputs if model.signatures else {t.name: t for t in graph.outputs}
        allowed[name] = _allowance(by_graph[graph], graph, outputs)
    return allowed


def _allowance(sites: Sequence[SiteReport], graph: Subgraph, outputs: Mapping[str, Tensor]) -> Allowance:
    tolerant: Counter[str] = Counter()
    total = 0.0
    for site in sites:
        proof = site.proof
        is_exact = proof and proof.demand.kind == "bitwise" and proof.bitwise
        if site.status is not Status.CONVERTED or is_exact:
            continue
        assert proof is not None
        tolerant[site.pass_name] += 1
        total += proof.demand.tolerance if proof.demand.kind == "relative" else _ROUNDING
    if not tolerant:
        return Allowance()
    relative, steps = _GROWTH * total, dict[str, int]()
    bits = min(filter(None, map(_bits, graph.operators)), default=0)
    if bits:
        relative = max(relative, _STEPS[bits] * 2.0**-bits)
        wide = {name: max(_BITS[t.dtype] - bits, 0) for name, t in outputs.items() if t.dtype in _BITS}
        steps = {name: int(_STEPS[bits] * 2.0**more) for name, more in wide.items()}
    because = ", ".join(f"{many(count, 'site')} of {name}" for name, count in tolerant.items())
    return Allowance(relative, steps, because)


def _bits(operator: Operator) -> int:
    """Bits of an operator's coarsest activation, 0 for none; a float one that meets integer weights is quantized."""
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None]
    moving = [_BITS[t.dtype] for t in tensors if t.is_quantized and not t.is_constant and t.dtype in _BITS]
    weights = [t for t in operator.inputs if t is not None and t.is_constant and t.is_quantized]
    hybrid = not moving and any(tensor.dtype in _BITS for tensor in weights) and operator.name not in _EXACT
    return min([*moving, *([8] if hybrid else [])], default=0)


_EXACT = frozenset({"DEQUANTIZE", "GATHER", "EMBEDDING_LOOKUP"})
