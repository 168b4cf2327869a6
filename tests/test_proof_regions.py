"""What of a region is run: in full, or on rows once its structure is proved; and what is no proof though all agrees."""

import re
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import proof_models
import pytest
from fault_graphs import Edit, Size, attention, number
from faults import FAULTS, PROOF, Fault
from pass_runs import rewrites_of, run
from text_parser import parse
from toy_passes import replacing

from edge_opt.conversion import convert
from edge_opt.conversion import result as words
from edge_opt.ir import Constants, Model, Operator, Tensor, load, to_bytes
from edge_opt.passes import Demand, Proof, SiteReport, Status
from edge_opt.passes.contract import Ran
from edge_opt.passes.rewrite import Rewrite
from edge_opt.proof import examination
from edge_opt.proof.examination import Question, Region
from edge_opt.proof.regions import RegionProver, _places
from edge_opt.runtime.pair import ProofRequest
from edge_opt.runtime.runner import Worker, WorkerPool
from edge_opt.targets import Target

SIZE = Size(queries=64, heads=4, kv_heads=2, cache=96, width=16)
TILES = Target("tiles", "", rows_per_tile=16)
AT_SIZE = [each for each in FAULTS if each.caught == PROOF and each.pass_name == "mha_to_sha"]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small regions are proved as large ones are."""
    monkeypatch.setattr(examination, "_IN_FULL", 0)


@pytest.fixture(scope="module")
def at_size() -> Iterator[RegionProver]:
    """One that takes every region for a large one."""
    with pytest.MonkeyPatch.context() as patch, RegionProver() as made:
        patch.setattr(examination, "_IN_FULL", 0)
        yield made


def layers(dtype: str, target: Target | None = None, size: Size = SIZE) -> tuple[Model, list[Rewrite]]:
    model = parse(attention(dtype, size))
    return model, rewrites_of("mha_to_sha", model, target)


def extent(proof: Proof) -> list[tuple[str, int]]:
    assert proof.holds, proof.reason
    return [(ran.kernels, len(ran.rows)) for ran in proof.ran]


def test_a_small_region_is_run_in_full_on_both_kernel_sets(prover: RegionProver) -> None:
    for rewrite in layers("int16")[1]:
        assert extent(prover.prove(rewrite, Demand())) == [("xnnpack", 0), ("reference", 0)]


@pytest.mark.usefixtures("large")
def test_of_large_regions_of_one_structure_the_first_is_run_in_full() -> None:
    first, second = layers("int16")[1]
    with RegionProver() as prover:
        assert extent(prover.prove(first, Demand())) == [("xnnpack", 0), ("reference", 6)]
        assert extent(prover.prove(second, Demand())) == [("xnnpack", 6)]
        assert prover.prove(first, Demand()).repeated
    with RegionProver(exhaustive=True) as prover:
        for rewrite in (first, second):
            assert extent(prover.prove(rewrite, Demand())) == [("xnnpack", 0), ("reference", 0)]


def with_two_equal_scales() -> tuple[Rewrite, Rewrite]:
    """Two layers that are alike, but for two scales that differ in the first and are equal in the second."""
    text = attention("int16", SIZE)
    second = text.index("%scaled2: ")
    text = text[:second] + text[second:].replace("q(0.00013, 0)", "q(0.00012, 0)")
    first, other = rewrites_of("mha_to_sha", parse(text))
    return first, other


@pytest.mark.usefixtures("large")
def test_a_layer_in_which_more_numbers_are_equal_is_one_with_other_numbers() -> None:
    with RegionProver() as prover:
        proofs = [prover.prove(each, Demand()) for each in with_two_equal_scales()]
    assert [extent(proof)[0] for proof in proofs] == [("xnnpack", 0), ("xnnpack", 6)]


@pytest.mark.usefixtures("large")
def test_a_layer_in_which_fewer_numbers_are_equal_is_proved_in_full() -> None:
    """What is equal in the first may have been mixed up there without any difference."""
    with RegionProver() as prover:
        proofs = [prover.prove(each, Demand()) for each in reversed(with_two_equal_scales())]
    assert [extent(proof)[0] for proof in proofs] == [("xnnpack", 0), ("xnnpack", 0)]


def test_a_proof_to_one_demand_stands_for_no_other(prover: RegionProver) -> None:
    first, second = layers("int8")[1]
    steps = Demand("steps", 1)
    proofs = [
        prover.prove(one, demand) for one, demand in ((first, Demand()), (second, steps), (first, steps))
    ]
    assert [(proof.extremes, proof.repeated) for proof in proofs] == [
        (True, False),
        (True, False),
        (False, False),
    ]


def one_number_wrong(dtype: str = "int16") -> list[Rewrite]:
    """Both layers with the same fault, which shows in one number of one row."""
    model, rewrites = layers(dtype)
    wrong = []
    for layer, rewrite in enumerate(rewrites, 1):
        edit = Edit(model, rewrite, SIZE)
        total = edit.find(f"sum{layer}/head_1")
        result = total.output
        step = np.zeros(result.shape)
        step[0, 0, 33, 5] = 1
        edit.behind(total, "ADD", number(step, result.dtype, result.quantization))
        wrong.append(edit.finish())
    return wrong


@pytest.mark.usefixtures("large")
def test_a_structure_that_failed_is_not_taken_for_proved() -> None:
    with RegionProver() as prover:
        proofs = [prover.prove(each, Demand()) for each in one_number_wrong()]
    assert [proof.holds for proof in proofs] == [False, False]
    assert "1 of 4096 elements" in proofs[1].reason


def corrupted(fault: Fault, dtype: str, target: Target | None) -> tuple[Rewrite, Rewrite]:
    """The second layer as it should be, and the first one corrupted."""
    model, (first, second) = layers(dtype, target)
    edit = Edit(model, first, SIZE)
    fault.apply(edit)
    return second, edit.finish()


@pytest.mark.parametrize("fault", AT_SIZE, ids=[each.name for each in AT_SIZE])
def test_a_corrupted_layer_is_caught_although_one_like_it_was_proved(
    fault: Fault, at_size: RegionProver
) -> None:
    tiled, _, dtype = fault.graphs[0].partition(" ")
    second, wrong = corrupted(fault, dtype, TILES if tiled == "tiled" else None)
    assert at_size.prove(second, Demand()).holds
    proof = at_size.prove(wrong, Demand())
    assert not proof.holds
    assert not proof.open


ENDS = [each for each in AT_SIZE if each.graphs == ("attention int8",) and "one code less" in each.name]


@pytest.mark.parametrize("fault", ENDS, ids=[each.name for each in ENDS])
def test_ends_of_integers_show_on_the_rows_of_a_region_with_many_keys(
    fault: Fault, at_size: RegionProver
) -> None:
    """Where no weight is as large as a step, all results are 0 whatever the logits are."""
    size = Size(queries=32, heads=4, kv_heads=2, cache=2048, width=64)
    model, (first, _) = layers("int8", size=size)
    edit = Edit(model, first, size)
    fault.apply(edit)
    proof = at_size.prove(edit.finish(), Demand())
    assert not proof.holds
    assert all(ran.rows for ran in proof.ran)


# Several workers


@pytest.fixture
def eager(large: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is expected is begun whatever the size."""
    monkeypatch.setattr("edge_opt.proof.regions._LARGE", 0)


def told(reports: list[SiteReport]) -> list[dict[str, Any]]:
    return [report.to_dict() for report in reports]


def many_layers(dtype: str, count: int) -> str:
    """Layers whose numbers differ, in one graph."""
    texts = [attention(dtype, SIZE) for _ in range(count // 2)]
    pairs = [text.replace("500)", f"5{place}0)").splitlines() for place, text in enumerate(texts)]
    inputs, lines, outputs = [], [], []
    for place, pair in enumerate(pairs):
        named = [re.sub(r"%(\w+)", rf"%pair{place}_\1", line) for line in pair]
        inputs.append(named[1].partition("(")[2].rpartition(")")[0])
        lines += named[2:-2]
        outputs += [f"%pair{place}_out1", f"%pair{place}_out2"]
    body = "\n".join(lines)
    return f"subgraph main ({', '.join(inputs)}) {{\n{body}\n  return {', '.join(outputs)}\n}}\n"


@pytest.mark.usefixtures("eager")
def test_reports_do_not_depend_on_how_many_workers_there_are() -> None:
    text = many_layers("int16", 4)
    found = []
    for workers in (1, 3):
        with RegionProver(workers=workers) as prover:
            model = parse(text)
            found.append((told(run(model, "mha_to_sha", prover=prover)), to_bytes(model)))
    assert found[0] == found[1]
    in_full = [any(ran["rows"] is None for ran in site["proof"]["ran"]) for site in found[0][0]]
    assert in_full == [True] + [False] * 3


@pytest.mark.usefixtures("eager")
def test_what_was_expected_and_not_asked_for_proves_nothing_of_others() -> None:
    """The first that is asked for is run in full, although one like it was begun before."""
    first, second = layers("int16")[1]
    other = rewrites_of("mha_to_sha", parse(attention("float32", SIZE)))[0]
    with RegionProver(workers=3) as prover:
        prover.expect(iter([(first, Demand()), (second, Demand())]))
        prover.prove(other, Demand())
        assert extent(prover.prove(second, Demand())) == [("xnnpack", 0), ("reference", 6)]


@pytest.mark.usefixtures("eager")
def test_a_proof_that_was_begun_because_of_one_that_fails_is_made_in_full() -> None:
    wrong = one_number_wrong()
    with RegionProver(workers=3) as prover:
        prover.expect(iter([(wrong[1], Demand())]))
        proofs = [prover.prove(each, Demand()) for each in wrong]
    assert [proof.holds for proof in proofs] == [False, False]


def test_small_regions_share_a_worker_and_large_ones_do_not() -> None:
    met = threading.Barrier(2, timeout=30)

    def both(pool: WorkerPool, *, alone: bool) -> int:
        """How many workers two things have that run at the same time."""

        def do(worker: Worker) -> int:
            met.wait()
            return id(worker)

        return len({future.result() for future in [pool.submit(do, alone=alone) for _ in range(2)]})

    pool = WorkerPool(2)
    try:
        pool.start()
        assert both(pool, alone=False) == 1
        assert both(pool, alone=True) == 2
    finally:
        pool.close()


def test_the_next_small_region_is_begun_while_one_is_proved() -> None:
    first, second = layers("int16")[1]
    with RegionProver(workers=2) as prover:
        prover.expect(iter([(second, Demand())]))
        prover.prove(first, Demand())
        (begun,) = [each for each in prover._examinations.values() if each.proof is None]
        assert begun.running.result().ran == prover.prove(second, Demand()).ran
        assert all(each.proof for each in prover._examinations.values())
        assert [worker.pid is not None for worker in prover._pool.workers] == [True, False]


def test_closing_ends_what_still_runs() -> None:
    model = load(proof_models.endless())
    with RegionProver(workers=2, time_limit=600) as prover:
        endless = Question(Region(model, model, "endless"), Demand(), ProofRequest(row_axes=(None,)))
        future = prover._begin(endless).running
        with pytest.raises(TimeoutError):
            future.result(timeout=0.5)
    assert future.done()


# No proof


NEGATIVE = """
subgraph main (%x: float32[4,8]) {
  %s: float32[4,8] = MUL(%x, %x) {fused_activation_function: 0}
  %n: float32[4,8] = SUB(float32(-1.0), %s)
  %y: float32[4,8] = LOG(%n)
  return %y
}
"""


def test_where_all_is_nan_nothing_is_proved(prover: RegionProver) -> None:
    model = parse(NEGATIVE)
    *others, old = model.subgraphs[0].operators
    made = Operator(model.operator_code("SQRT"), old.inputs, old.outputs)
    proof = prover.prove(replacing(model, [*others, old], *others, made), Demand())
    assert (proof.holds, proof.open) == (False, True)
    assert "not provable: output 0 is nowhere a finite number" in proof.reason


def test_where_all_is_one_value_heads_may_be_swapped_and_nothing_is_proved(prover: RegionProver) -> None:
    text = attention("int16").replace("q(0.00015, 0)", "q(1000.0, 0)")
    model = parse(text)
    edit = Edit(model, rewrites_of("mha_to_sha", model)[0])
    edit.swap(edit.find("out1/heads"), 0, 1)
    proof = prover.prove(edit.finish(), Demand())
    assert (proof.holds, proof.open) == (False, True)
    assert "the same value everywhere" in proof.reason
    reports = run(parse(text), "mha_to_sha", prover=prover)
    assert {report.status for report in reports} == {Status.SKIPPED}


def test_heads_that_are_alike_prove_nothing(prover: RegionProver) -> None:
    """Four heads that all read one query: swapped or not, the result is the same."""
    text = """
signature main = #0 (q=%q, k=%k, v=%v) -> (out=%out)
subgraph main (%q: float32[1,1,4,8], %k: float32[1,1,8,8], %v: float32[1,1,8,8]) {
  %all: float32[1,4,4,8] = CONCATENATION(%q, %q, %q, %q) {axis: 1}
  %rows: float32[1,1,16,8] = RESHAPE(%all, int32{1, 1, 16, 8}) {new_shape: [1, 1, 16, 8]}
  %logits: float32[1,1,16,8] = BATCH_MATMUL(%rows, %k) {adj_y: true}
  %p: float32[1,1,16,8] = SOFTMAX(%logits) {beta: 1.0}
  %sum: float32[1,1,16,8] = BATCH_MATMUL(%p, %v)
  %heads: float32[1,4,4,8] = RESHAPE(%sum, int32{1, 4, 4, 8}) {new_shape: [1, 4, 4, 8]}
  %back: float32[1,4,4,8] = TRANSPOSE(%heads, int32{0, 2, 1, 3})
  %out: float32[1,4,32] = RESHAPE(%back, int32{1, 4, 32}) {new_shape: [1, 4, 32]}
  return %out
}
"""
    (report,) = run(parse(text), "mha_to_sha", prover=prover)
    assert report.status is Status.SKIPPED, report
    assert "of the 4 parts of output 0 along axis 2 some are equal" in report.reason


COARSE = """
signature main = #0 (a=%a, b=%b) -> (y=%y)
subgraph main (%a: int8[1,4,8] q(0.01, 0), %b: int8[1,4,8] q(0.01, 0)) {
  %y: int8[1,4,8] q(0.4, 0) = MUL(%a, %b)
  return %y
}
"""


def test_other_inputs_are_tried_where_the_first_tell_nothing(
    prover: RegionProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spread over a thousandth of their range, products are all zero; over all of it, they are not."""
    kinds = []
    prove = Worker.prove

    def watching(
        self: Worker, before: bytes, after: bytes, request: ProofRequest, **options: object
    ) -> object:
        kinds.append([hint and hint.spread for hint in request.hints])
        return prove(self, before, after, request, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Worker, "prove", watching)
    model = parse(COARSE)
    (old,) = model.subgraphs[0].operators
    made = Operator(old.code, old.inputs, old.outputs, old.options)
    a, b = model.subgraphs[0].inputs
    rewrite = replacing(model, [old], made, spreads=({a: 0.001, b: 0.001},))
    assert prover.prove(rewrite, Demand()).holds
    assert kinds == [[0.001, 0.001], [1.0, 1.0]]


SUM = """
subgraph main (%a: int16[1,2,512,512] q(0.0003, 0), %m: int16[1,1,512,512] q(0.00305185, 0)) {
  %y: int16[1,2,512,512] q(0.0033, 0) = ADD(%a, %m)
  return %y
}
"""
FINER_SUM = SUM.replace("%y:", "%s:", 1).replace(
    "return",
    "%y: int16[1,2,512,512] q(0.0011, 0) = QUANTIZE(%s)\n  return",
)


def summed_per_head(off: int = 0) -> Rewrite:
    """A mask that both heads share gets joined to one for each, and one code of it `off`."""
    model = parse(FINER_SUM)
    summing, finer = model.subgraphs[0].operators
    a, mask = model.subgraphs[0].inputs
    both, shifted = (
        Tensor(name, a.shape, mask.dtype, quantization=mask.quantization) for name in ("both", "shifted")
    )
    codes = np.zeros(a.shape, np.int16)
    codes[0, 1, 200, 100] = off  # A row that is not among the sampled ones.
    shift = Constants(model).make("shift", codes, mask.dtype, mask.quantization)
    new = (
        model.new_operator("CONCATENATION", [mask, mask], [both], axis=1),
        Operator(summing.code, [both, shift], [shifted], summing.options),
        Operator(summing.code, [a, shifted], summing.outputs, summing.options),
        finer,
    )
    return replacing(model, [summing, finer], *new)


def test_a_large_region_whose_sums_get_the_runtimes_other_kernel_runs_with_one(
    at_size: RegionProver,
) -> None:
    """On processors with AVX2 a sum of operands of one shape has other codes for one element in a million."""
    proof = at_size.prove(summed_per_head(), Demand())
    assert (extent(proof), proof.bitwise, proof.max_abs) == ([("xnnpack", 0), ("reference", 6)], False, 0.0)
    assert proof.note.startswith("bitwise where one kernel computes the sums of int16")
    assert not at_size.prove(summed_per_head(off=1), Demand()).holds


def test_of_a_small_region_it_is_told_what_the_other_kernel_changes(
    prover: RegionProver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(examination, "_IN_FULL", 1 << 26)
    proof = prover.prove(summed_per_head(), Demand())
    assert proof.holds, proof.reason
    assert proof.bitwise or proof.note.endswith("as it runs them, results differ by 3 steps")
    assert not prover.prove(summed_per_head(off=1), Demand()).holds


def test_a_step_on_the_reference_kernels_is_a_difference(prover: RegionProver) -> None:
    model = parse(SUM.replace("512", "8"))
    (old,) = model.subgraphs[0].operators
    a, mask = model.subgraphs[0].inputs
    one = number(1, a.dtype, old.output.quantization)
    before = Tensor("before", a.shape, a.dtype, quantization=old.output.quantization)
    summed = Operator(old.code, [a, mask], [before], old.options)
    added = Operator(old.code, [before, one], old.outputs, old.options)
    proof = prover.prove(replacing(model, [old], summed, added), Demand())
    assert not proof.holds
    assert "1 steps" in proof.reason


def test_sums_that_the_other_kernel_aborts_on_stay_a_difference(prover: RegionProver) -> None:
    """LiteRT's sum with broadcasting ends the process where all scales are powers of two."""
    powers = SUM.replace("[1,1,512,512]", "[1,2,512,512]").replace("512", "8")
    model = parse(
        powers.replace("0.0003,", "0.0009765625,")
        .replace("0.00305185", "0.001953125")
        .replace("0.0033", "0.001953125")
    )
    (old,) = model.subgraphs[0].operators
    _, b = model.subgraphs[0].inputs
    proof = prover.prove(
        replacing(model, [old], Operator(old.code, [b, b], old.outputs, old.options)), Demand()
    )
    assert not proof.holds
    assert proof.reason.startswith("the new region differs"), proof.reason


def test_only_kernels_that_ran_are_named() -> None:
    """The reference kernels multiply no float16."""
    result = convert(to_bytes(parse(attention("float32").replace("float32", "float16"))))
    assert result.summary().splitlines()[0] == "2 of 2 sites converted, each proved bit for bit on XNNPACK."
    assert [words.extent(site.proof.ran) for site in result.converted if site.proof] == [
        "in full on XNNPACK"
    ] * 2


def test_rows_are_told_in_sentences_and_data() -> None:
    ran = (Ran("xnnpack"), Ran("reference", (0, 31, 32), 64))
    assert words.extent(ran) == "in full on XNNPACK, rows 0, 31, 32 of 64 on the reference kernels"
    assert [each.to_dict() for each in ran] == [
        {"kernels": "xnnpack", "rows": None, "of": None},
        {"kernels": "reference", "rows": [0, 31, 32], "of": 64},
    ]
    many = Ran("reference", tuple(range(40)), 64)
    assert words.extent((many,)).endswith(", 15 and 24 more of 64 on the reference kernels")


@pytest.mark.usefixtures("large")
def test_the_console_says_that_rows_stood_for_all() -> None:
    result = convert(to_bytes(parse(attention("int16", SIZE))))
    assert (
        result.summary()
        .splitlines()[1]
        .startswith("  2 large sites: 1 in full on one kernel set, the others")
    )
    whole = convert(to_bytes(parse(attention("int16", SIZE))), verify="exhaustive")
    assert not any("large site" in line for line in whole.summary().splitlines())


PRODUCT = """subgraph main (%q: int8[1,2,3,{0}] q(0.05, 0), %k: int8[1,2,6,{0}] q(0.05, 0)) {{
  %l: int8[1,2,3,6] q(0.5, 0) = BATCH_MATMUL(%q, %k) {{adj_y: true}}
  %s: int8[1,2,3,6] q(0.05, 0) = MUL(%l, int8(64) q(0.001953125, 0))
  %p: int8[1,2,3,6] q(0.00390625, -128) = SOFTMAX(%s) {{beta: 1.0}}
  return %p
}}
"""


def test_extreme_codes_follow_from_what_the_logits_are_multiplied_by() -> None:
    graph = parse(PRODUCT.format(8)).subgraphs[0]
    place = _places(graph)[graph.inputs[0]]
    assert (place.side, place.keys) == ("left", 6)
    assert place.reach == pytest.approx(8.0 / 0.125 / (6.4 * 6.4 * 8))


def test_a_product_over_no_element_has_extreme_codes_too() -> None:
    graph = parse(PRODUCT.format(0)).subgraphs[0]
    assert _places(graph)[graph.inputs[0]].reach == 1.0
