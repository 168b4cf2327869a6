"""What of a region is run: in full, at a fraction of its lengths, or not; and what is no proof though all agrees."""

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest
from attention_checks import attention_text
from fault_graphs import Size, attention
from literals import literal
from mutations import Mutant, constant, mutants, sampled, survives_checks
from pass_runs import refusal, rewrites_of, run
from toy_passes import replacing

from edge_opt.base.errors import ModelFormatError
from edge_opt.conversion import convert
from edge_opt.conversion import result as words
from edge_opt.ir import Operator, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.passes import Exact, Proof, Steps, Table, Within
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.protocol import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.targets import Target
from edge_opt.verification import examine as examination
from edge_opt.verification import region as regions
from edge_opt.verification.examine import Verifier, inconclusive
from edge_opt.verification.fraction import FACTOR, shrunk
from edge_opt.verification.region import Region, Structure, multiply_adds, structure
from edge_opt.verification.rewrite import Rewrite
from edge_opt.verification.trial import DRAWS, SCALES, Outcome, Parts, Trial
from edge_opt.verification.verdict import Ran

PRODUCT = """
subgraph main (%x: float32[1,64,8], %w: float32[1,8,8]) {
  %y: float32[1,64,8] = BATCH_MATMUL(%x, %w)
  return %y
}
"""
SUM = """
subgraph main (%x: int16[1,64,8] q(0.1, 0), %w: int16[1,64,8] q(0.1, 0)) {
  %y: int16[1,64,8] q(0.2, 0) = ADD(%x, %w)
  return %y
}
"""
REQUEST = Trial(extremes=("high",), parts=Parts(0, (8, 64), (0,)), seed=3)
QUESTION = Region(parse(PRODUCT), parse(PRODUCT), "'main' up to 'y'", Exact(), REQUEST)
FILE = to_bytes(QUESTION.before)
BOTH, FIRST, SECOND = ("xnnpack", "reference"), ("xnnpack",), ("reference",)
SMALL = Size()
SIZE = Size(queries=64, heads=4, kv_heads=2, cache=128, width=64)


class Worker:
    """Gives one answer after the other: an error, or how many elements differ on which kernels (all that are asked)."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def answer(self, before: bytes, after: bytes, request: Trial, **options: Any) -> Outcome:
        request_fields = {field.name: getattr(request, field.name) for field in fields(request)}
        self.asked.append({"before": before, "after": after, **request_fields, **options})
        given = self.answers.pop(0)
        if isinstance(given, Exception):
            raise given
        if isinstance(given, str):
            return Outcome(
                {"": dict.fromkeys(request.kernels, (Difference(512, 512, largest=1.0),))}, given
            )
        differing, kernels = given if isinstance(given, tuple) else (given, request.kernels)
        found = Difference(512, 512, differing, largest=1.0, max_abs=float(bool(differing)))
        return Outcome({"": dict.fromkeys(kernels, (found,))}, scale=0.5)

    def kernels(self) -> list[tuple[str, ...]]:
        return [asked["kernels"] for asked in self.asked]


def examine(worker: Worker, question: Region = QUESTION) -> Proof:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(examination, "run_versions", Worker.answer)
        proof = examination.examine(worker, question)  # type: ignore[arg-type]
    assert worker.answers == [], "all that was prepared was asked for"
    return proof


def test_a_small_region_is_asked_for_once_on_both_kernel_sets() -> None:
    worker = Worker(0)
    proof = examine(worker)
    assert (proof.holds, proof.bitwise, proof.ran) == (
        True,
        True,
        (Ran("xnnpack"), Ran("reference")),
    )
    (asked,) = worker.asked
    assert (asked["before"], asked["after"], asked["kernels"]) == (FILE, FILE, BOTH)
    assert (asked["seed"], asked["parts"]) == (3, REQUEST.parts)
    runs = 2 * (len(SCALES) + DRAWS)
    assert (asked["where"], asked["seconds"]) == (
        "region 'main' up to 'y'",
        60 + runs * QUESTION.cost / 2e7,
    )


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([RuntimeRefused("", "before: no")], "the runtime cannot run the region alone: no"),
        ([RuntimeRefused("", "after: no")], "the runtime refuses the new region: no"),
        ([RuntimeRefused("", "no numbers for 'x': bits")], "no numbers for 'x': bits"),
        ([RuntimeCrashed("signal 9"), 0, 0, 0], ""),
        ([RuntimeCrashed("signal 9"), 0, RuntimeCrashed("signal 9"), 0], ""),
        ([RuntimeCrashed("signal 9"), 0, 0, RuntimeCrashed("again")], "the verification could not be run: again"),
        ([RuntimeCrashed("signal 9")] * 3, "the verification could not be run: LiteRT aborts on the operators as"),
        ([RuntimeFailed("broken")], "the verification could not be run: broken"),
        ([ModelFormatError("bad")], "the region alone is not a valid model"),
        ([RuntimeTimedOut("late")], "verification timed out: late, or skip"),
    ],
)  # fmt: skip
def test_kernels_that_refuse_and_workers_that_crash(answers: list[Any], said: str) -> None:
    worker = Worker(*answers)
    proof = examine(worker)
    left = FIRST if isinstance(answers[-2:][0], RuntimeCrashed) else BOTH
    assert worker.kernels() == [BOTH, FIRST, SECOND, left][: len(answers)]
    assert proof.reason.startswith(said)
    assert proof.holds is (answers[-1] == 0)
    is_finished = isinstance(answers[-1], int | RuntimeRefused | ModelFormatError)
    assert proof.is_inconclusive is not is_finished, "that says nothing of the region"


ROUNDING = replace(QUESTION, before=parse(SUM), after=parse(SUM))
# No fraction of these: a tolerance, limits, a length that does not divide.
WHOLE = [
    replace(QUESTION, check=Within(1.0)),
    replace(QUESTION, check=Steps(1, clipped=(-5, 5))),
    replace(QUESTION, before=parse(PRODUCT.replace("64", "65"))),
]


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every region counts as a large one."""
    monkeypatch.setattr(examination, "_IN_FULL", 0)


@pytest.mark.usefixtures("large")
def test_a_large_region_is_run_at_a_fraction_and_then_in_full_on_one_kernel_set() -> None:
    worker = Worker(0, 0)
    proof = examine(worker)
    assert worker.kernels() == [BOTH, FIRST]
    assert proof.ran == (Ran("xnnpack"), Ran("reference", FACTOR))
    in_part, in_full = worker.asked
    assert (in_part["extremes"], in_part["scales"], in_part["parts"]) == (("high",), SCALES, None)
    assert (in_full["extremes"], in_full["scales"]) == ((), (0.5 / FACTOR**0.25,))
    assert (in_full["before"], in_full["parts"]) == (FILE, REQUEST.parts)
    assert in_part["before"] != FILE


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("question", "answers", "asked", "holds"),
    [
        (QUESTION, [1, 1], [BOTH, FIRST], False),
        (QUESTION, [1, 0, 0], [BOTH, FIRST, BOTH], True),
        (QUESTION, [1, 0, 1], [BOTH, FIRST, BOTH], False),
        (QUESTION, [0, 1], [BOTH, FIRST], False),
        (QUESTION, [(0, SECOND), 0], [BOTH, SECOND], True),
        (QUESTION, [(0, FIRST), 0], [BOTH, FIRST], True),
        (QUESTION, [RuntimeRefused("", "after: shapes"), 0], [BOTH, BOTH], True),
        (QUESTION, ["one value everywhere", 0], [BOTH, BOTH], True),
        (QUESTION, ["one value everywhere", "one value everywhere"], [BOTH, BOTH], False),
        (QUESTION, [*[RuntimeCrashed("9")] * 3, 1], [BOTH, FIRST, SECOND, BOTH], False),
        (ROUNDING, [0, 0], [BOTH, SECOND], True),
        (ROUNDING, [(0, FIRST), 0], [BOTH, FIRST], True),
        *[(question, [0], [BOTH], True) for question in WHOLE],
    ],
)
def test_only_a_difference_in_full_decides(
    question: Region, answers: list[Any], asked: list[Any], holds: bool
) -> None:
    worker = Worker(*answers)
    proof = examine(worker, question)
    assert (proof.holds, worker.kernels()) == (holds, asked)
    if question in WHOLE:
        assert worker.asked[0]["before"] == to_bytes(question.before)
        assert proof.ran == (Ran("xnnpack"), Ran("reference"))


def test_lengths_are_divided_in_shapes_steering_constants_and_options() -> None:
    model = shrunk(
        parse("""subgraph main (%x: float32[1,128,4]) {
          %s: float32[1,64,4] = SLICE(%x, int32{0, 64, 0}, int32{1, 64, 4})
          %m: float32[1,64,4] = MUL(%s, float32(2.0))
          %y: float32[256] = RESHAPE(%m, int32{256}) {new_shape: [256]}
          return %y
        }""")
    )
    cut, _, shape = model.subgraphs[0].operators
    assert [cut.input(0).shape, cut.output.shape, shape.output.shape] == [
        (1, 16, 4),
        (1, 8, 4),
        (32,),
    ]
    assert [cut.input(1).array().tolist(), cut.input(2).array().tolist()] == [[0, 8, 0], [1, 8, 4]]
    assert list(shape.options.get("new_shape")) == [32]


@pytest.mark.parametrize("begin", [65, 100])
def test_a_place_that_does_not_divide_has_no_fraction(begin: int) -> None:
    given = "%y: float32[1,64,4] = SLICE(%x, int32{0, BEGIN, 0}, int32{1, 64, 4})"
    line = given.replace("BEGIN", str(begin))
    model = parse(f"subgraph main (%x: float32[1,256,4]) {{ {line} return %y }}")
    assert str(begin) in refusal(shrunk, model).text


@pytest.mark.parametrize(("units", "whole"), [(2, True), (64, False)])
def test_weights_with_a_scale_for_each_row_have_a_fraction_only_if_all_rows_stay(
    units: int, whole: bool
) -> None:
    scales, points = (str([each] * units) for each in (0.1, 0))
    weight = f"int8[{units},64]{{splat 3}} q({scales}, {points}, axis 0)"
    model = parse(f"""subgraph main (%x: float32[64,64]) {{
      %y: float32[64,{units}] = FULLY_CONNECTED(%x, {weight}, none)
      return %y
    }}""")
    assert (refusal(shrunk, model) is None) is whole


def shortened(values: np.ndarray) -> np.ndarray:
    """What is left of a constant at a fraction of its lengths."""
    text = f"subgraph main (%x: {values.dtype}[1]) {{ %y: {values.dtype}{list(values.shape)} = ADD(%x, C) return %y }}"
    model = shrunk(parse(text.replace("C", literal(values))))
    return model.subgraphs[0].operators[0].input(1).array()


def test_a_constant_and_its_parts_keep_the_same_elements() -> None:
    """Heads beside their features, heads beside rows, and the cached and new keys of a mask."""
    numbers = np.random.default_rng(0).random((4, 64, 192), np.float32)
    whole = shortened(numbers)
    assert whole.shape == (4, 8, 24)
    assert np.array_equal(shortened(numbers.reshape(1, 256, 192)), whole.reshape(1, 32, 24))
    assert np.array_equal(shortened(numbers[2]), whole[2])
    assert np.array_equal(shortened(numbers[..., :128]), whole[..., :16])
    assert np.array_equal(shortened(numbers[..., 128:]), whole[..., 16:])


@pytest.mark.parametrize("place", [0, 77, 4095])
def test_a_single_wrong_element_is_kept(place: int) -> None:
    numbers = np.zeros((64, 64), np.int8)
    numbers.reshape(-1)[place] = 1
    assert shortened(numbers.astype(np.float32)).max() == (place > 0)


def test_sizes_that_no_longer_fit_have_no_fraction() -> None:
    """64 times 64 elements become 8 times 8, where 512 are read."""
    text = """subgraph main (%x: float32[4096]) {
      %r: float32[4096] = RESHAPE(float32[64,64]{splat 1}, int32{4096})
      %y: float32[4096] = ADD(%x, %r)
      return %y
    }"""
    assert "[512]" in refusal(shrunk, parse(text)).text


@pytest.mark.parametrize(("last", "expected"), [(63, 7), (127, 15), (40, 40)])
def test_a_long_table_of_places_is_divided_if_it_reaches_the_end_of_a_long_axis(
    last: int, expected: int
) -> None:
    places = np.full(64, last, np.int32)
    places[:8] = 0
    assert shortened(places).tolist() == [0, *[expected] * 7]


def test_products_cost_their_multiply_adds_and_an_element_of_all_else_eight() -> None:
    model = parse("""subgraph main (%a: float32[2,5,3], %b: float32[2,4,5], %w: float32[6,5]) {
      %p: float32[2,3,4] = BATCH_MATMUL(%a, %b) {adj_x: true, adj_y: true}
      %q: float32[2,3,5] = BATCH_MATMUL(%p, %b)
      %f: float32[2,3,6] = FULLY_CONNECTED(%q, %w, none)
      %y: float32[2,3,6] = ADD(%f, %f)
      return %y
    }""")
    assert multiply_adds(model) == 24 * 5 + 30 * 4 + 36 * 5 + 36 * 8


@pytest.fixture(scope="module")
def at_size() -> Iterator[Verifier]:
    """One that takes every region for a large one."""
    with pytest.MonkeyPatch.context() as patch, Verifier() as made:
        patch.setattr(examination, "_IN_FULL", 0)
        yield made


def layers(dtype: str, *exchanged: str, size: Size = SIZE) -> list[Rewrite]:
    """Two layers that are alike but for their numbers; in the second one number may be exchanged for another."""
    text = attention(dtype, size)
    second = text.index("%scaled2: ")
    return rewrites_of(
        "mha_to_sha", parse(text[:second] + text[second:].replace(*exchanged or ("", "")))
    )


@pytest.mark.parametrize("dtype", ["float32", "int16", "int8"])
def test_a_layer_with_other_numbers_is_not_run(dtype: str) -> None:
    first, second = layers(dtype, size=SMALL)
    with Verifier() as verifier:
        proofs = [verifier.verify(each, Exact()) for each in (first, second, first)]
    assert [proof.like for proof in proofs] == ["", "'main' up to 'out1'", "'main' up to 'out1'"]
    assert all(proof.holds and proof.ran == proofs[0].ran for proof in proofs)


@pytest.mark.parametrize("order", [1, -1])
def test_fewer_numbers_may_be_equal_in_what_covers_and_not_more(order: int) -> None:
    """What is equal in one may have been mixed up there without any difference."""
    with_two_equal_scales = layers("int16", "q(0.00013, 0)", "q(0.00012, 0)", size=SMALL)
    with Verifier() as verifier:
        proofs = [verifier.verify(each, Exact()) for each in with_two_equal_scales[::order]]
    assert [bool(proof.like) for proof in proofs] == [False, order == 1]


def test_composites_of_each_head_are_covered_by_what_they_compute_and_mistakes_behind_them_are_not() -> (
    None
):
    text = attention("float32")
    for layer in "12":
        scaled = f"  %scaled{layer}: float32[1,4,4,8] = MUL(%q{layer},"
        norm = f"  %n{layer}: float32[1,4,4,8] = STABLEHLO_COMPOSITE(%q{layer}) {{OPTIONS}}\n"
        text = text.replace(scaled, norm + scaled.replace(f"%q{layer}", f"%n{layer}"))
    body = "decomposition_subgraph_index: 1, composite_attributes: [0, 0, 1]"
    text = text.replace("OPTIONS", f"name: 'norm', {body}")
    text += """subgraph norm (%x: float32[1,4,4,8]) {
      %square: float32[1,4,4,8] = MUL(%x, %x)
      %mean: float32[1,4,4,1] = MEAN(%square, int32{3}) {keep_dims: true}
      %root: float32[1,4,4,1] = RSQRT(%mean)
      %y: float32[1,4,4,8] = MUL(%x, %root)
      return %y
    }"""
    first, second = rewrites_of("mha_to_sha", parse(text), Target("above", "", form="split-above"))
    assert sum(op.name == "STABLEHLO_COMPOSITE" for op in second.added()) == 4
    kinds = "operands or results swapped", "another operand", "another constant", "one element off"
    wrong = [mutant.rewrite for mutant in sampled(second, 4) if mutant.kind in kinds]
    with Verifier() as verifier:
        proofs = [verifier.verify(each, Exact()) for each in (first, second, *wrong)]
    assert [bool(proof.like) for proof in proofs] == [False, True] + [False] * len(wrong)
    assert [proof.holds for proof in proofs[:2]] == [True, True]
    assert not all(proof.holds for proof in proofs[2:])


@pytest.mark.parametrize(
    ("new", "covers"),
    [("RESHAPE(%a, int32{4}) {new_shape: [4]}", True), ("NEG(%a)", False), ("ADD(%a, %x)", False)],
)
def test_a_new_version_that_computes_in_another_way_covers_nothing(new: str, covers: bool) -> None:
    text = (
        "subgraph main (%x: float32[4]) { %a: float32[4] = ABS(%x) %y: float32[4] = NEW return %y }"
    )
    made = structure(parse(text.replace("NEW", "ABS(%a)")), parse(text.replace("NEW", new)))
    assert made.covers(made) is covers


@pytest.mark.parametrize(
    ("run", "other", "covers"),
    [
        ("ab ab", "cd cd", True),
        ("ab ab", "cd dc", False),
        ("ab ab", "cc cc", True),
        ("ab ab", "cd ce", False),
        # Numbers that are equal in one region alone may be mixed up there.
        ("aa a", "cd c", False),
        ("aa a", "cd d", False),
    ],
)
def test_a_region_covers_another_if_each_number_has_the_same_counterpart(
    run: str, other: str, covers: bool
) -> None:
    """The numbers that the old and the new region read."""
    made, asked = (
        Structure((), *map(tuple, both.split()), moves_only=True) for both in (run, other)
    )
    assert made.covers(asked) is covers


def test_the_provers_seed_decides_the_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    never = inconclusive(Exact(), "")
    monkeypatch.setattr(
        examination, "examine", lambda _, one: asked.append(one.trial.seed) or never
    )
    for seed in (0, 5):
        Verifier(seed=seed).verify(layers("int8")[0], Exact())
    assert asked == [0, 5]


def test_an_inputs_side_is_where_it_meets_the_logits() -> None:
    graph = parse(attention("float32")).subgraphs[0]
    given = {
        tensor.name: side
        for tensor, side in regions._sides(graph).items()
        if tensor in graph.inputs
    }
    kinds = {"q": "left", "k": "right", "k_cache": "right"}
    expected = {f"{name}{layer}": side for name, side in kinds.items() for layer in "12"}
    assert given == {**expected, "mask_local": "added", "mask_global": "added"}


def test_a_proof_to_one_demand_stands_for_no_other() -> None:
    first, second = layers("int8", size=SMALL)
    with Verifier() as verifier:
        demands = (first, Exact()), (second, Steps(1)), (first, Steps(1))
        assert [bool(verifier.verify(*each).like) for each in demands] == [False, False, True]


def corrupted(rewrites: list[Rewrite], kind: str, place: str) -> list[Rewrite]:
    """Each layer with the first mistake of a kind, where a layer's tensor has such a name."""
    found = []
    for layer, rewrite in enumerate(rewrites, 1):
        name = place.format(layer)
        found.append(next(m.rewrite for m in mutants(rewrite) if (m.kind, m.place) == (kind, name)))
    return found


@pytest.mark.parametrize("code", [20000, 30000])
def test_what_the_new_version_computes_by_itself_is_run_in_every_layer(code: int) -> None:
    """Logits are clamped at a code that no input of the first layer reaches, and many of the second do."""
    text = attention("int16")
    second = text.index("%scaled2: ")
    tight = (
        text[second:]
        .replace("q(0.0033, 0)", "q(0.0032, 0)")
        .replace("q(0.0003, 0)", "q(0.00002, 0)")
    )
    model = parse(text[:second].replace("q(0.0003, 0)", "q(0.01, 0)") + tight)
    wrong = corrupted(rewrites_of("mha_to_sha", model), "a clamp", "logits{}/head_1")
    for rewrite in wrong:
        clamp = next(op for op in rewrite.new if op.name == "MINIMUM")
        limit = clamp.input(1)
        clamp.inputs = (clamp.input(0), constant(code, limit.dtype, limit.quantization))
    with Verifier() as verifier:
        proofs = [verifier.verify(each, Exact()) for each in wrong]
    assert not proofs[1].holds
    assert proofs[1].like == ""


@pytest.mark.usefixtures("large")
def test_a_region_that_failed_stands_for_equal_ones_and_for_no_others() -> None:
    kind, place = "operands or results swapped", "out{}/heads"
    wrong = [each for dtype in ("int16", "int8") for each in corrupted(layers(dtype), kind, place)]
    with Verifier() as verifier:
        proofs = [verifier.verify(each, Exact()) for each in (*wrong, wrong[0])]
    assert [proof.holds for proof in proofs] == [False] * 5
    assert [bool(proof.like) for proof in proofs] == [False, False, False, False, True]


@pytest.mark.parametrize(
    ("dtype", "place", "name", "limit"),
    [("int16", "p1/head_1", "MINIMUM", 32700), ("float32", "k1/group_0", "MAXIMUM", -20.0)],
)
def test_a_weight_of_one_and_large_negative_keys_are_among_the_extremes(
    dtype: str, place: str, name: str, limit: float, verifier: Verifier
) -> None:
    (rewrite, _) = rewrites_of("mha_to_sha", parse(attention(dtype)))
    clamped = (m.rewrite for m in mutants(rewrite) if (m.kind, m.place) == ("a clamp", place))
    wrong = next(each for each in clamped if name in [operator.name for operator in each.new])
    clamp = next(operator for operator in wrong.new if operator.name == name)
    stored = clamp.input(1)
    clamp.inputs = (clamp.input(0), constant(limit, stored.dtype, stored.quantization))
    assert not verifier.verify(wrong, Exact()).holds


def test_a_run_without_a_result_stands_for_no_other_region(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that was busy, or without memory, may have time and memory for the next."""
    (first, _), answers = (
        layers("int8", size=SMALL),
        [RuntimeTimedOut("late"), *[RuntimeCrashed("signal 9")] * 3],
    )
    ask = examination.run_versions

    def answered(*given: Any, **options: Any) -> Outcome:
        if answers:
            raise answers.pop(0)
        return ask(*given, **options)

    monkeypatch.setattr(examination, "run_versions", answered)
    with Verifier() as verifier:
        proofs = [verifier.verify(first, Exact()) for _ in range(4)]
    assert [(proof.holds, proof.is_inconclusive) for proof in proofs] == [(False, True)] * 2 + [
        (True, False)
    ] * 2
    assert [bool(proof.like) for proof in proofs] == [False] * 3 + [True]


AT_SIZE = [
    pytest.param(dtype, mutant, id=f"{dtype} {mutant.kind} {mutant.place}")
    for dtype in ("float32", "int16", "int8")
    for mutant in sampled(layers(dtype)[0], 2)
    if mutant.kind not in {"another option", "a clamp"} and survives_checks(mutant.rewrite)
]


@pytest.mark.parametrize(("dtype", "mutant"), AT_SIZE)
def test_a_corrupted_layer_like_a_good_one_fails(
    dtype: str, mutant: Mutant, at_size: Verifier
) -> None:
    """What the proof at size lets pass is so small a mistake that a proof in full lets it pass, too."""
    assert at_size.verify(layers(dtype)[1], Exact()).holds
    if at_size.verify(mutant.rewrite, Exact()).holds:
        with pytest.MonkeyPatch.context() as patch, Verifier(seed=1) as thorough:
            patch.setattr(examination, "_IN_FULL", 1 << 60)
            assert thorough.verify(mutant.rewrite, Exact()).holds


def of_long_heads(
    above: str = "ABS(%x)", logits: str = "%m: float32[1,2,64,128] = ABS(%l)"
) -> Rewrite:
    """Two heads of size 64, 64 queries, 128 keys; what is above the heads, and what is below the logits."""
    text = """subgraph main (%x: float32[1,64,128], %k: float32[1,2,128,64], %v: float32[1,2,128,64]) {
      %a: float32[1,64,128] = ABOVE
      %h: float32[1,64,2,64] = RESHAPE(%a, int32{1, 64, 2, 64})
      %q: float32[1,2,64,64] = TRANSPOSE(%h, int32{0, 2, 1, 3})
      %l: float32[1,2,64,128] = BATCH_MATMUL(%q, %k) {adj_y: true}
      LOGITS
      %p: float32[1,2,64,128] = SOFTMAX(%m) {beta: 1.0}
      %o: float32[1,2,64,64] = BATCH_MATMUL(%p, %v)
      %b: float32[1,64,2,64] = TRANSPOSE(%o, int32{0, 2, 1, 3})
      %y: float32[1,64,128] = RESHAPE(%b, int32{1, 64, 128})
      return %y
    }"""
    model = parse(text.replace("ABOVE", above).replace("LOGITS", logits))
    (rewrite,) = rewrites_of("mha_to_sha", model, Target("above", "", form="split-above"))
    return rewrite


def numbers(*shape: int) -> str:
    return literal(np.random.default_rng(0).random(shape, np.float32))


@pytest.mark.parametrize(
    "parts",
    [
        {"above": f"ADD(%x, {numbers(128)})"},
        {"above": f"MUL(%x, {numbers(64, 128)})"},
        {"logits": f"%m: float32[1,2,64,128] = ADD(%l, {numbers(2, 1, 128)})"},
        {"logits": f"%m: float32[1,2,64,128] = ADD(%l, {numbers(2, 64, 128)})"},
        {"logits": f"%m: float32[1,2,64,128] = ADD(%l, {numbers(64, 128)})"},
    ],
    ids=["bias of heads", "table of heads", "slopes", "bias of logits", "mask"],
)
def test_constants_that_carry_heads_have_a_fraction(
    parts: dict[str, str], at_size: Verifier
) -> None:
    proof = at_size.verify(of_long_heads(**parts), Exact())
    assert (proof.holds, proof.ran) == (True, (Ran("xnnpack"), Ran("reference", FACTOR)))


def test_rows_that_count_tokens_and_then_heads_are_verified_in_full(at_size: Verifier) -> None:
    """Their blocks of 8 are no rows of one head."""
    turned = f"""%m0: float32[1,64,2,128] = RESHAPE({numbers(128, 128)}, int32{{1, 64, 2, 128}})
      %t: float32[1,2,64,128] = TRANSPOSE(%m0, int32{{0, 2, 1, 3}})
      %m: float32[1,2,64,128] = ADD(%l, %t)"""
    rewrite = of_long_heads(logits=turned)
    proof = at_size.verify(rewrite, Exact())
    assert (proof.holds, proof.ran) == (True, (Ran("xnnpack"), Ran("reference")))


def test_where_nothing_reads_the_results_nothing_is_proved(verifier: Verifier) -> None:
    text = "subgraph main (%x: float32[4,8]) { %u: float32[4,8] = ABS(%x) %y: float32[4,8] = NEG(%x) return %y }"
    model = parse(text)
    unread = model.subgraphs[0].operators[0]
    same = Operator(unread.code, unread.inputs, unread.outputs)
    proof = verifier.verify(replacing(model, [unread], same), Exact())
    assert (proof.holds, proof.is_inconclusive) == (False, True)
    assert "nothing reads" in proof.reason


@pytest.mark.parametrize("alike", ["heads", "rows"])
def test_equal_heads_prove_nothing_and_equal_rows_do_not_matter(
    alike: str, verifier: Verifier
) -> None:
    """Heads that all read one query: swapped or not, the result is the same."""
    size, axis, count = ("1,1,6,5", 1, 4) if alike == "heads" else ("1,4,1,5", 2, 6)
    joined = f"CONCATENATION({', '.join(['%one'] * count)}) {{axis: {axis}}}"
    scores = f"""  %all: float32[1,4,6,5] = {joined}
      %l: float32[1,4,6,8] = BATCH_MATMUL(%all, %k) {{adj_y: true}}"""
    text = attention_text(scores=scores, inputs=f", %one: float32[{size}]")
    text = text.replace("%k: float32[1,4,", "%k: float32[1,1,").replace(
        "%v: float32[1,4,", "%v: float32[1,1,"
    )
    (report,) = run(parse(text), "mha_to_sha", verifier=verifier)
    assert report.why == ("" if alike == "rows" else "inconclusive"), report


def test_the_console_names_kernels_that_ran_and_sums_that_round_by_shape() -> None:
    """The reference kernels multiply no float16."""
    result = convert(to_bytes(parse(attention("float32").replace("float32", "float16"))))
    assert "run in full on XNNPACK;" in words.proof_text(result.converted[0])
    lines = convert(to_bytes(parse(attention("int16")))).summary().splitlines()
    assert "on the reference kernels; optimized kernels round int16 ADD" in lines[0]


@pytest.mark.usefixtures("large")
def test_the_console_says_what_was_not_run() -> None:
    result = convert(to_bytes(parse(attention("int8", SIZE))))
    assert "(1 run; 1 repeat their structure)" in result.summary()
    one, other = map(words.proof_text, result.converted)
    assert "run in full on XNNPACK, with lengths divided by " in one
    assert "same structure as 'main' up to 'out1', not run" in other
    ran = (Ran("xnnpack"), Ran("reference", 16))
    assert (
        words.extent(ran)
        == "run in full on XNNPACK, with lengths divided by 16 on the reference kernels"
    )


@pytest.mark.parametrize("check", [Table(0.5), Table(0.5, 4)])
def test_a_table_without_a_reference_or_a_number_of_values_is_no_proof(check: Table) -> None:
    model = parse(PRODUCT)
    (old,) = model.subgraphs[0].operators
    with Verifier() as verifier:
        found = verifier.verify(replacing(model, [old], old.on(lambda tensor: tensor)), check)
    assert (found.holds, found.is_inconclusive) == (False, True)
    assert "no reference" in found.reason
