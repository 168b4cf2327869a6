"""The whole model before and after a conversion: the same bit for bit, or as near as its rewrites were allowed to be.

What is allowed follows from what the accepted sites of a signature demanded of their regions. Where each demanded and
gave the same bits, every output must be the same, bit for bit. Where one did not, its difference goes through the rest
of the network, and outputs get room:

- `16 * sum of the demanded relative tolerances`, relative to the largest value of the output. One region's error of
  1e-6 may grow on its way; measured, outputs differ by at most 0.4 times that sum.
- where activations are quantized, `24` steps of the coarsest type among them, because a difference of any size turns
  into a step where it crosses the middle of two codes, in every layer anew. Measured: at most 16, for int8 and int16
  alike; two heads swapped in the last block gave 28 (int8) and 234 (int16). In a type with more bits it is as much of
  the range.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edge_opt.comparison.findings import OutputComparison, SignatureComparison
from edge_opt.ir import DType, Model, Operator, Subgraph
from edge_opt.passes import SiteReport, Status

_GROWTH = 16
_STEPS = 24
_ROUNDING = 1e-6  # of proofs that are bitwise on the reference kernels only
_BITS = {DType.INT4: 4, DType.INT8: 8, DType.UINT8: 8, DType.INT16: 16}


@dataclass(frozen=True, slots=True)
class Allowance:
    """How far the outputs of a signature may be apart: `relative` to an output's range, or so many `steps` by name.

    `because` names the passes that ask for it; empty where every output must be the same bit for bit. `floats` says
    whether any output is not counted in steps.
    """

    relative: float = 0.0
    steps: Mapping[str, int] = field(default_factory=dict)
    because: str = ""
    floats: bool = True

    def __str__(self) -> str:
        if not self.because:
            return "bit for bit, as every rewritten region demands"
        span = sorted({min(self.steps.values()), max(self.steps.values())}) if self.steps else []
        room = [f"{' to '.join(map(str, span))} steps"] if span else []
        room += [f"{self.relative:.2g} of the range"] * self.floats
        return f"within {', floats '.join(room)}, because of {self.because}"

    def in_steps(self, output: OutputComparison) -> bool:
        """Whether the output is judged by steps, not by its range."""
        return (
            output.name in self.steps
            and output.difference is not None
            and output.difference.steps is not None
        )

    def permits(self, output: OutputComparison) -> bool:
        """Whether the output is as near as it must be."""
        found = output.difference
        if output.bitwise or output.reason or found is None or not self.because:
            return output.bitwise
        if self.in_steps(output):
            assert found.steps is not None
            return found.steps <= self.steps[output.name]
        return found.max_rel <= self.relative


@dataclass(frozen=True, slots=True)
class WholeSignature:
    """One signature of the whole models, compared, and how equal it had to be."""

    name: str
    allowance: Allowance
    found: SignatureComparison

    @property
    def holds(self) -> bool:
        """Whether every output is as near as it must be."""
        return not self.found.reason and all(map(self.allowance.permits, self.found.outputs))

    def violation(self) -> str:
        """The first output that is too far off, in a sentence."""
        if self.found.reason:
            return f"signature '{self.name}': {self.found.reason}"
        failed = next(output for output in self.found.outputs if not self.allowance.permits(output))
        return f"signature '{self.name}', {failed.sentence()}, and it must be the same {self.allowance}"

    def sentence(self) -> str:
        """What was found and what was demanded."""
        return f"{self.name}: {self.found_text()}; demanded: {self.allowance}"

    def found_text(self) -> str:
        """How equal the outputs were."""
        outputs = self.found.outputs
        figures = [(o.difference, self.allowance.in_steps(o)) for o in outputs if o.difference is not None]
        count = f"all {len(self.found.outputs)} outputs"
        if self.found.bitwise:
            found = f"{count} are bitwise equal"
        else:
            coded = [figure for figure, steps in figures if steps]
            floats = [figure.max_rel for figure, steps in figures if not steps]
            room = [f"{max(figure.steps or 0 for figure in coded)} steps"] if coded else []
            room += [f"{max(floats):.2g} of the range"] if floats else []
            found = f"{count} are within {', floats '.join(room)}"
            agreement = [figure.top1 for figure, _ in figures if figure.top1 is not None]
            found += f", highest logits agree in {100 * min(agreement):.0f} % of rows" if agreement else ""
        return "; ".join(filter(None, (found, self.found.masked_rows_sentence())))

    def to_dict(self) -> dict[str, Any]:
        """For reports."""
        return {
            "signature": self.name,
            "holds": self.holds,
            "bitwise": self.found.bitwise,
            "demanded": str(self.allowance),
            "relative": self.allowance.relative,
            "steps": dict(self.allowance.steps),
            "outputs": [output.to_dict() for output in self.found.outputs],
        }


def allowances(model: Model, sites: Mapping[str, Sequence[SiteReport]]) -> dict[str, Allowance]:
    """What each entry point of a converted model is allowed; `sites` are those reported for each."""
    by_graph: dict[int, list[SiteReport]] = {}
    for name, graph in model.entry_points():
        by_graph.setdefault(id(graph), []).extend(sites.get(name, ()))
    found = {}
    for name, graph in model.entry_points():
        converted = [site for site in by_graph[id(graph)] if site.status is Status.CONVERTED]
        found[name] = _allowance(converted, graph, _outputs(model, name, graph))
    return found


def _outputs(model: Model, name: str, graph: Subgraph) -> dict[str, DType]:
    for signature in model.signatures:
        if signature.key == name:
            return {key: tensor.dtype for key, tensor in signature.outputs.items()}
    return {tensor.name: tensor.dtype for tensor in graph.outputs}


def _allowance(sites: Sequence[SiteReport], graph: Subgraph, outputs: Mapping[str, DType]) -> Allowance:
    tolerant: dict[str, int] = {}
    total = 0.0
    for site in sites:
        proof = site.proof
        assert proof is not None
        if proof.demand.kind == "bitwise" and proof.bitwise:
            continue
        tolerant[site.pass_name] = tolerant.get(site.pass_name, 0) + 1
        total += proof.demand.tolerance if proof.demand.kind == "relative" else _ROUNDING
    if not tolerant:
        return Allowance()
    relative, steps = _GROWTH * total, {}
    bits = min(map(_bits, graph.operators), default=math.inf)
    if bits < math.inf:
        relative = max(relative, _STEPS * 2.0**-bits)
        coded = {name: _BITS[dtype] for name, dtype in outputs.items() if dtype in _BITS}
        steps = {name: int(_STEPS * 2.0 ** max(own - bits, 0)) for name, own in coded.items()}
    because = ", ".join(f"{count} site{'s'[: count > 1]} of {name}" for name, count in tolerant.items())
    return Allowance(relative, steps, because, floats=len(steps) < len(outputs))


def _bits(operator: Operator) -> float:
    """Bits of an operator's coarsest activation; a float one that meets integer weights is quantized on the fly."""
    tensors = [tensor for tensor in (*operator.inputs, *operator.outputs) if tensor is not None]
    moving = [_BITS[t.dtype] for t in tensors if t.is_quantized and not t.is_constant and t.dtype in _BITS]
    weights = [t for t in operator.inputs if t is not None and t.is_constant and t.is_quantized]
    hybrid = not moving and any(tensor.dtype in _BITS for tensor in weights) and operator.name not in _EXACT
    return min([*moving, *([8] if hybrid else [])], default=math.inf)


_EXACT = frozenset({"DEQUANTIZE", "GATHER", "EMBEDDING_LOOKUP"})
