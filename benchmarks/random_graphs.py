"""Convert random static graphs of attention, and compare results in LiteRT's interpreter.

    python benchmarks/random_graphs.py [--count 10000] [--seed 0] [--first 0] [--seconds S] [--prove-one-in 1]

The graphs are those of the tests (tests/attention_graphs.py): sizes, types, masks and layouts mixed freely. Half of
them have a SELECT mask, most of these behind another mask (mask_graphs.py). All passes with bit-identical results
run on each, in every form in turn, some with tiles of rows. Results do not come from `edge_opt.compare`: the
interpreter runs the original and the converted graph on XNNPACK and on the reference kernels, on random numbers, on
large ones, and with rows that only both masks together hide. Every byte must be equal (NaN equals NaN); products by
FULLY_CONNECTED may be rounded on XNNPACK, and are not compared there if later blocks enlarge that. Where the reference
kernels differ, both graphs run again with memory of its own for each tensor: if they are equal then, the interpreter
overwrote a tensor that is still read, which is counted apart. Prints the outcomes of the sites, and the number
of each wrong graph: the exit status is 1 if there are any. A skipped or reverted site is
not wrong; its reason is counted. But a graph is wrong if no attention was skipped and a product of activations still
has more than one head's elements, counted in the converted graph by sizes alone.
"""

import argparse
import math
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from attention_checks import random_inputs
from attention_graphs import Case, cases
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from mask_graphs import build, cases_masked_twice, inputs_masked_twice

from edge_opt.attention.block import FORM_NAMES
from edge_opt.ir import Constants, Model, Operator, load, to_bytes
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.passes import PASSES, Context, Exact, Status, Verdict, run_pass
from edge_opt.passes.mha_to_sha import MhaToSha, left_over
from edge_opt.runtime.native import Session
from edge_opt.runtime.protocol import Arrays
from edge_opt.targets import Target
from edge_opt.verification.audit import Audit
from edge_opt.verification.examine import Verifier

_PROVED = (
    500  # graphs after which the verifier starts anew, because it remembers all that it proved
)
_LARGE = 30
KERNELS = ("xnnpack", "reference")


def drawn(count: int, number: int) -> list[Case]:
    """So many cases, always the same ones for a number."""
    found: list[Case] = []
    checks = list(HealthCheck)

    @seed(number)
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        suppress_health_check=checks,
        phases=[Phase.generate],
    )
    @given(st.one_of(cases(), cases_masked_twice()))
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return found


def convert(model: Model, target: Target, verifier: Verifier | None) -> list[Verdict]:
    """All passes on every signature of the model, with their proofs if there is a verifier."""
    usage, reports = parts_in_use(model), []
    audit = Audit(model)
    for key, graph in model.entry_points():
        context = Context(model, graph, key, target, Constants(model), verifier, audit=audit)
        for chosen in PASSES.values():
            # What is allowed to differ by a step is judged by its own proof, not by bits.
            if isinstance(chosen.check, Exact):
                operators = set(graph.operators)
                verdicts = run_pass(chosen, context)
                reports += verdicts
                if chosen.name == MhaToSha.name:
                    reports += left_over(context, verdicts, operators)
    remove_unused(model, usage)
    audit.check()
    return reports


def several_heads(model: Model, case: Case) -> list[str]:
    """Products of two activations that still hold several heads.

    With one key, a value product that is written as MUL and SUM sums nothing: it is a scaling, and no product.
    """
    if case.written == "sums" and sum(case.segments) == 1:
        return []
    return [
        f"{operator.name} {list(operator.outputs[0].shape)} holds several heads"
        for operator in model.subgraphs[0].operators
        if _multiplies(operator) and not _fits_one_head(operator.outputs[0].shape, case)
    ]


def _multiplies(operator: Operator) -> bool:
    """True for a product of two matrices of which no part is stored, also for one written as MUL and SUM."""
    factors = list(operator.inputs[:2])
    if operator.name == "SUM":
        maker = operator.input(0).producer
        factors = [] if maker is None or maker.name != "MUL" else list(maker.inputs)
        if operator.input(0).elements == operator.outputs[0].elements:
            return False  # nothing is summed
        if len({tensor.shape for tensor in factors if tensor is not None}) < 2:
            return False
    elif operator.name not in ("BATCH_MATMUL", "FULLY_CONNECTED"):
        return False
    return not any(tensor is None or tensor.is_constant for tensor in factors)


def _fits_one_head(shape: tuple[int, ...], case: Case) -> bool:
    """True if the result may be `[B, T, S]` or `[B, T, H]` of a single head, or of some of its rows."""
    *lead, first, second = (1, *shape)
    lengths = {case.head_size, *case.segments}
    rows = [other for own, other in ((first, second), (second, first)) if own in lengths]
    return math.prod(lead) <= case.batch and min(rows, default=0) <= case.length


class Differing(NamedTuple):
    """An output whose bytes differ: on which kernels and inputs.

    `is_fault`: only because the reference kernels overwrite a tensor that is still read. Then no output differs once
    each tensor has memory of its own.
    """

    where: str
    is_fault: bool


def differences(
    before: bytes,
    after: bytes,
    sets: Sequence[str] = KERNELS,
    *,
    rounded: bool = False,
    enlarged: bool = False,
) -> Iterator[Differing]:
    """Where the interpreter gives other bytes for the second model; `rounded` ones may differ a little on XNNPACK.

    If later blocks have `enlarged` the rounding, large numbers are not compared there.
    """
    given_inputs = random_inputs(load(before))
    large = {
        name: (array * _LARGE).astype(array.dtype) if array.dtype.kind == "f" else array
        for name, array in given_inputs.items()
    }
    twice = inputs_masked_twice(load(before))
    for kernels in sets:
        sessions = [Session(model, kernels) for model in (before, after)]
        for what, values in (("random", given_inputs), ("large", large), ("doubly masked", twice)):
            if enlarged and what == "large" and kernels == "xnnpack":
                continue
            old, new = (session.run(None, values) for session in sessions)
            differing = [*_differing(old, new, is_close=rounded and kernels == "xnnpack")]
            if not differing:
                continue
            is_fault = kernels == "reference" and not any(
                _differing(*(preserving_all(model, values) for model in (before, after)))
            )
            for name in differing:
                yield Differing(f"{name} on {kernels}, {what} numbers", is_fault)


def _differing(old: Arrays, new: Arrays, *, is_close: bool = False) -> Iterator[str]:
    """The outputs that are not the same; `is_close`: or close to it."""
    for name, expected in old.items():
        may_be_close = is_close and _close(expected, new[name])
        if list(old) != list(new) or not (may_be_close or _same(expected, new[name])):
            yield name


def report_faults(found: Sequence[Differing], graph: str) -> bool:
    """Print the differences that are the interpreter's fault; True if there are any."""
    faults = [one.where for one in found if one.is_fault]
    for where in faults:
        print(f"the interpreter's fault: {graph}: {where}", flush=True)
    return bool(faults)


def preserving_all(model: bytes, values: Arrays) -> Arrays:
    """A graph's outputs on the reference kernels, with memory of its own for each tensor."""
    interpreter = Interpreter(
        model_content=model,
        experimental_op_resolver_type=OpResolverType.BUILTIN_REF,
        experimental_preserve_all_tensors=True,
    )
    (signature,) = interpreter.get_signature_list()
    return dict(interpreter.get_signature_runner(signature)(**values))


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    numbers = (
        ~(np.isnan(one) & np.isnan(other)) if one.dtype.kind == "f" else np.ones(one.shape, bool)
    )
    return one[numbers].tobytes() == other[numbers].tobytes()


def _close(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype.kind != "f":
        return False
    largest = float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
    return bool(np.allclose(one, other, rtol=1e-4, atol=1e-5 * largest, equal_nan=True))


def main() -> int:
    """Runs the graphs and prints what became of them."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0, help="another seed, other graphs")
    parser.add_argument("--first", type=int, default=0, help="number of the first graph to run")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument(
        "--prove-one-in",
        type=int,
        default=1,
        help="the others are converted without proofs; default: 1",
    )
    options = parser.parse_args()
    told: Counter[str] = Counter()
    wrong: list[int] = []
    faults = 0
    started, done, verifier = time.monotonic(), 0, Verifier()
    for number, case in enumerate(drawn(options.count, options.seed)):
        if number < options.first:
            continue
        if time.monotonic() - started > options.seconds:
            break
        if done % _PROVED == _PROVED - 1:
            verifier.__exit__()
            verifier = Verifier()
        form = FORM_NAMES[number % len(FORM_NAMES)]
        tiles = 2 if number % 5 == 4 and case.length > 1 else None
        before = to_bytes(build(case))
        model = load(before)
        proves = verifier if number % options.prove_one_in == 0 else None
        sites = convert(model, Target(form, "", form=form, rows_per_tile=tiles), proves)
        for site in sites:
            told[f"{site.pass_name} {site.status}: {site.reason.partition(',')[0][:100]}"] += (
                site.status != "nothing to do"
            )
        rounded = case.written == "FULLY_CONNECTED"
        # EXP without a sum behind it enlarges what an earlier block rounds, without a limit.
        kernels = KERNELS[1:] if rounded and case.weights == "exp" and case.blocks > 1 else KERNELS
        enlarged = rounded and case.blocks > 1
        found = list(
            differences(before, to_bytes(model), kernels, rounded=rounded, enlarged=enlarged)
        )
        wrongs = [one.where for one in found if not one.is_fault]
        faults += report_faults(found, f"graph {number} of seed {options.seed}")
        skipped = [site for site in sites if site.status in (Status.SKIPPED, Status.REVERTED)]
        if not any(site.pass_name == MhaToSha.name for site in skipped):
            wrongs += several_heads(model, case)
        for where in wrongs:
            print(
                f"WRONG: graph {number} of seed {options.seed}, form {form}: {where}\n  {case}",
                flush=True,
            )
            wrong.append(number)
        done += 1
        if done % 100 == 0:
            print(f"{done} graphs, {len(set(wrong))} wrong", file=sys.stderr, flush=True)
    verifier.__exit__()
    seconds = time.monotonic() - started
    print(
        f"{done} graphs, {len(set(wrong))} wrong, {faults} the interpreter's fault; {seconds:.0f} s"
    )
    for text, count in told.most_common():
        print(f"{count:7}  {text}")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
