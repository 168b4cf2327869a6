"""Tolerances for a whole model's outputs before and after conversion, derived from its rewrites.

If every accepted site of a signature was checked for identical bits and gave them, every output must be bit-identical.
Otherwise the difference passes through the rest of the network, and a tolerance applies:

- `16 * sum of the sites' relative tolerances`, relative to the largest value of the output. An error of
  1e-6 in one region may grow downstream; measured outputs differ by at most 0.4 times that sum.
- with quantized activations, `24` steps of the coarsest type among them (`80` if it is int16), because in every layer a
  difference of any size becomes a full step if it crosses a rounding boundary. Measured, depending on the processor: at
  most 16 steps of int8 and 28 of int16; two heads swapped in the last block gave 28 and 234. Outputs of other types
  may differ by the same fraction of their range.

Integers that stand for themselves, such as token IDs, must be equal in any case.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edge_opt.base.record import Record
from edge_opt.base.words import Progress, many
from edge_opt.comparison.compare import compare
from edge_opt.comparison.findings import SignatureComparison
from edge_opt.ir import DType, Model, Operator, Subgraph
from edge_opt.ir.opening import ModelLike, Part
from edge_opt.runtime.metrics import Tolerance
from edge_opt.verification.check import ROUNDING, Exact
from edge_opt.verification.verdict import Verdict

_GROWTH = 16
_STEPS = {4: 24, 8: 24, 16: 80}  # by the coarsest activation's bits
_EXACT = frozenset({"DEQUANTIZE", "GATHER", "EMBEDDING_LOOKUP"})
_BITS = {DType.INT4: 4, DType.INT8: 8, DType.UINT8: 8, DType.INT16: 16}


@dataclass(frozen=True, slots=True)
class Allowance(Tolerance):
    """Permitted distance of a signature's outputs; `because` names the passes that need it."""

    because: str = ""

    _left_out = ("atol", "rtol")

    def __str__(self) -> str:
        if not self.because:
            return "bit-identical, as is every rewritten region"
        return f"within {_distance(self.steps, self.relative)}, because of {self.because}"


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
        for output in self.comparison.outputs:
            if output.reason or not self.allowance.permits(output):
                needed = "equal, as it has no rounding" if output.plain else self.allowance
                return f"signature '{self.name}', {output.sentence()}, but must be {needed}"
        return ""

    @property
    def outcome(self) -> str:
        """Describe how close the outputs were."""
        outputs = self.comparison.outputs
        if not outputs:
            return "there is no output to compare"
        text = f"all {len(outputs)} outputs are" if len(outputs) > 1 else "the output is"
        if self.comparison.bitwise:
            return f"{text} bit-identical"
        steps = max((output.steps or 0 for output in outputs), default=0)
        return f"{text} within {_distance(steps, max(output.max_rel for output in outputs))}"


def _distance(steps: int, relative: float) -> str:
    in_steps = f"{many(steps, 'step')} or " if steps else ""
    return f"{in_steps}{relative:.2g} of the range"


Sites = Mapping[Subgraph, Sequence[Verdict]]
"""The converted sites of each graph of an entry point."""


def by_graph(part: Part, converted: Iterable[Verdict]) -> Sites:
    """The sites of one model by their graph, which entry points may share."""
    graphs = {part.signature(name): graph for name, graph in part.model.entry_points()}
    found: dict[Subgraph, list[Verdict]] = {graph: [] for graph in graphs.values()}
    for verdict in converted:
        if verdict.signature in graphs:
            found[graphs[verdict.signature]].append(verdict)
    return found


def changed_on_purpose(model: Model, sites: Sites) -> list[str]:
    """Entry points whose graph has a site that was compared with something else, because the old region was wrong."""
    changed: list[str] = []
    for name, graph in model.entry_points():
        proofs = [verdict.proof for verdict in sites[graph] if verdict.proof is not None]
        if any(proof.check.changes_results for proof in proofs):
            changed.append(name)
    return changed


def compare_whole(
    before: ModelLike, after: ModelLike, model: Model, sites: Sites, progress: Progress | None
) -> list[WholeSignature]:
    """Compare the entry points of a model before and after; those that a pass changes on purpose are left out.

    `model` is the converted one, loaded.
    """
    graphs = dict(model.entry_points())
    changed = changed_on_purpose(model, sites)
    compared = [name for name in graphs if name not in changed]
    if not compared:
        return []
    wanted = compared if changed else None
    report = compare(before, after, signatures=wanted, locate=False, progress=progress)
    found: list[WholeSignature] = []
    for comparison in report.signatures:
        # A model without signatures is compared as `main`, whatever its subgraph is called.
        name = comparison.name if model.signatures else compared[0]
        allowed = allowance(sites[graphs[name]], graphs[name])
        found.append(WholeSignature(name, allowed, comparison))
    return found


def allowance(converted: Sequence[Verdict], graph: Subgraph) -> Allowance:
    """The allowance of the entry points that run a graph, from the sites that were converted in it."""
    counts: Counter[str] = Counter()
    error = 0.0
    for verdict in converted:
        proof = verdict.proof
        if proof is None or (proof.bitwise and isinstance(proof.check, Exact)):
            continue
        counts[verdict.pass_name] += 1
        error += proof.check.tolerance.relative or ROUNDING
    if not counts:
        return Allowance()
    bits = min(filter(None, map(_bits, graph.operators)), default=0)
    steps = _STEPS.get(bits, 0)
    because = ", ".join(f"{many(count, 'site')} of {name}" for name, count in counts.items())
    return Allowance(
        relative=max(_GROWTH * error, steps * 2.0**-bits), steps=steps, because=because
    )


def _bits(operator: Operator) -> int:
    """Return the bits of an operator's coarsest activation, or 0; float activations with integer weights count as 8."""
    coded = [one for one in operator.tensors if one.is_quantized and one.dtype in _BITS]
    moving = [_BITS[tensor.dtype] for tensor in coded if not tensor.is_constant]
    if moving:
        return min(moving)
    return 8 if coded and operator.name not in _EXACT else 0
