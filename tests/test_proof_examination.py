"""How a region is examined: what is asked of a worker and in which order. The worker only says what it is told to."""

from dataclasses import fields, replace
from typing import Any

import pytest
from text_parser import parse

from edge_opt.base.errors import ModelFormatError
from edge_opt.passes import Demand, Proof
from edge_opt.passes.contract import Ran
from edge_opt.proof import examination
from edge_opt.proof.examination import Examiner, Question, Region, Settings
from edge_opt.proof.rows import multiply_adds, peak_bytes
from edge_opt.runtime.errors import RuntimeCrashed, RuntimeFailed, RuntimeRefused, RuntimeTimedOut
from edge_opt.runtime.inputs import InputHint
from edge_opt.runtime.metrics import Difference
from edge_opt.runtime.pair import Outcome, OutputProof, ProofRequest

PRODUCT = """
subgraph main (%x: float32[1,64,8], %w: float32[1,8,8]) {
  %y: float32[1,64,8] = BATCH_MATMUL(%x, %w)
  return %y
}
"""
REGION = Region(parse(PRODUCT), parse(PRODUCT), "'main' up to 'y'")
QUESTION = Question(REGION, Demand(), ProofRequest())
BOTH, FIRST, SECOND = ("xnnpack", "reference"), ("xnnpack",), ("reference",)
REFUSED_BEFORE = RuntimeRefused("", "before: no kernel")
REFUSED_AFTER = RuntimeRefused("", "after: no kernel")


def asking(**request: Any) -> Question:
    return replace(QUESTION, request=ProofRequest(**request))


def answer(kernels: tuple[str, ...], differing: int = 0, seconds: float = 1.0, untold: str = "") -> Outcome:
    found = Difference(512, 512, differing, largest=1.0, max_abs=float(bool(differing)))
    return Outcome({name: (OutputProof(0, found),) for name in kernels}, seconds=seconds, untold=untold)


class Worker:
    """Gives one answer after the other: an error, or how many elements differ, or a whole outcome."""

    def __init__(self, *answers: Any) -> None:
        self.answers = list(answers)
        self.asked: list[dict[str, Any]] = []

    def prove(self, before: bytes, after: bytes, request: ProofRequest, **options: Any) -> Outcome:
        told = {field.name: getattr(request, field.name) for field in fields(request)}
        self.asked.append({"before": before, "after": after, **told, **options})
        given = self.answers.pop(0)
        if isinstance(given, Exception):
            raise given
        return given if isinstance(given, Outcome) else answer(request.kernels, given)

    def kernels(self) -> list[tuple[str, ...]]:
        return [asked["kernels"] for asked in self.asked]


def examine(worker: Worker, question: Question = QUESTION, *, covered: bool = False, **how: Any) -> Proof:
    settings = Settings(**{"seed": 3, "time_limit": None, "exhaustive": False, **how})
    proof = Examiner(worker, settings, covered=covered).examine(question)  # type: ignore[arg-type]
    assert worker.answers == [], "all that was prepared was asked for"
    return proof


def test_a_small_region_is_asked_for_once_on_both_kernel_sets() -> None:
    worker = Worker(0)
    question = asking(parts=4, at_once=True)
    proof = examine(worker, question)
    assert (proof.holds, proof.bitwise, proof.ran) == (True, True, (Ran("xnnpack"), Ran("reference")))
    (asked,) = worker.asked
    assert ((asked["before"], asked["after"]), asked["kernels"]) == (REGION.files, BOTH)
    assert asked["kind"] == "realistic"
    assert (asked["seed"], asked["parts"], asked["at_once"], asked["cut"]) == (3, 4, True, None)
    assert asked["where"] == "'main' up to 'y'"


def test_where_one_kernel_set_refuses_the_region_as_it_was_the_other_has_to_do() -> None:
    worker = Worker(REFUSED_BEFORE, REFUSED_BEFORE, 0)
    proof = examine(worker)
    assert (proof.holds, proof.ran) == (True, (Ran("reference"),))
    assert proof.note == "on reference kernels only: the others refuse the region alone"
    assert worker.kernels() == [BOTH, FIRST, SECOND]
    worker = Worker(REFUSED_BEFORE, 0)
    assert examine(worker).note.startswith("on xnnpack kernels only")
    worker = Worker(REFUSED_BEFORE, REFUSED_BEFORE, REFUSED_BEFORE)
    assert examine(worker).reason == "the runtime cannot run the region alone: before: no kernel"


def test_a_new_region_that_is_refused_fails_at_once() -> None:
    worker = Worker(REFUSED_AFTER)
    proof = examine(worker)
    assert (proof.holds, proof.open) == (False, False)
    assert proof.reason == "the runtime refuses the new region: after: no kernel"


def test_a_worker_that_crashed_is_asked_once_more() -> None:
    assert examine(Worker(RuntimeCrashed("signal 9"), 0)).holds
    proof = examine(Worker(RuntimeCrashed("signal 9"), RuntimeCrashed("signal 11")))
    assert (proof.holds, proof.open, proof.reason) == (False, False, "the proof could not be run: signal 11")
    assert examine(Worker(RuntimeFailed("broken"))).reason == "the proof could not be run: broken"
    assert examine(Worker(ModelFormatError("bad"))).reason.startswith(
        "the region alone is no model that may be run"
    )


@pytest.mark.parametrize("answers", [[RuntimeTimedOut("late")], [REFUSED_BEFORE, RuntimeTimedOut("late")]])
def test_where_there_was_no_time_nothing_is_decided(answers: list[Any]) -> None:
    assert "; --proof-seconds 1 gives" in examine(Worker(*answers), time_limit=0.1).reason
    proof = examine(Worker(*answers), time_limit=7.0)
    assert (proof.holds, proof.open) == (False, True)
    assert proof.reason == (
        "there was no time to prove it: region 'main' up to 'y' took longer than 7 s; --proof-seconds 14 gives each "
        "run of a region longer, --verify none proves nothing"
    )


def test_a_run_may_take_a_minute_and_ten_times_what_it_took_before(monkeypatch: pytest.MonkeyPatch) -> None:
    operations = 2 * 64 * 8 * 8
    monkeypatch.setattr(examination, "_MEASURED", 2 * operations - 1)
    settings = Settings(0, None, exhaustive=False)
    worker = Worker(answer(BOTH, seconds=4.0), 0)
    for _ in range(2):
        Examiner(worker, settings, covered=False).examine(QUESTION)  # type: ignore[arg-type]
    first, second = (asked["seconds"] for asked in worker.asked)
    assert first == pytest.approx(60 + 10 * 2 * operations / 5e7)
    assert second == pytest.approx(60 + 10 * 4.0)
    assert settings.speeds[BOTH] == pytest.approx(2 * operations)
    assert settings.limit(FIRST, operations) == pytest.approx(60 + 10 * 0.5)
    settings.speeds[SECOND] = operations / 8
    assert settings.limit(FIRST, operations) == pytest.approx(60 + 10 * 8.0)
    assert settings.limit(BOTH, operations) == pytest.approx(60 + 10 * 0.5)
    assert Settings(0, 5.0, exhaustive=False).limit(BOTH, 1 << 40) == 5.0


def test_short_runs_say_nothing_of_the_machines_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_MEASURED", 2 * 2 * 64 * 8 * 8)
    settings = Settings(0, None, exhaustive=False)
    Examiner(Worker(0), settings, covered=False).examine(QUESTION)  # type: ignore[arg-type]
    assert settings.speeds == {}


def test_other_inputs_are_tried_as_long_as_results_tell_nothing() -> None:
    silent = answer(BOTH, untold="output 0 is the same value everywhere")
    question = asking(hints=(None, InputHint(spread=0.5)))
    worker = Worker(silent, silent, silent)
    proof = examine(worker, question)
    assert (proof.holds, proof.open) == (False, True)
    assert proof.reason.startswith(
        "not provable: output 0 is the same value everywhere, whatever inputs are tried"
    )
    spreads = [[hint and hint.spread for hint in asked["hints"]] for asked in worker.asked]
    assert spreads == [[None, 0.5], [None, 1.0], [None, 1.0]]
    assert [asked["kind"] for asked in worker.asked] == ["realistic", "realistic", "large"]
    worker = Worker(silent, 0)
    assert examine(worker).holds
    assert [asked["kind"] for asked in worker.asked] == ["realistic", "large"]


# Large regions


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_IN_FULL", REGION.cost - 1)


def extents(proof: Proof) -> list[tuple[str, bool]]:
    """Kernels, and whether they ran on some rows only."""
    return [(ran.kernels, bool(ran.rows)) for ran in proof.ran]


@pytest.mark.usefixtures("large")
def test_a_large_region_is_run_on_rows_and_then_in_full_on_one_kernel_set() -> None:
    worker = Worker(0, 0)
    proof = examine(worker)
    assert worker.kernels() == [BOTH, FIRST]
    assert extents(proof) == [("xnnpack", False), ("reference", True)]
    on_rows, in_full = worker.asked
    assert on_rows["at_once"]
    assert on_rows["before"] != REGION.files[0]
    assert on_rows["cut"].shapes == ((1, 64, 8), (1, 8, 8))
    assert (in_full["before"], in_full["cut"]) == (REGION.files[0], None)
    assert proof.ran[1].length == 64


@pytest.mark.usefixtures("large")
def test_a_difference_on_rows_is_the_answer() -> None:
    worker = Worker(1)
    assert not examine(worker).holds
    assert worker.kernels() == [BOTH]


@pytest.mark.usefixtures("large")
def test_a_difference_in_full_is_looked_at_on_both_kernel_sets() -> None:
    worker = Worker(0, 1, 1)
    proof = examine(worker)
    assert not proof.holds
    assert worker.kernels() == [BOTH, FIRST, BOTH]
    worker = Worker(0, 1, 0)
    assert extents(examine(worker)) == [("xnnpack", False), ("reference", False)]
    worker = Worker(REFUSED_BEFORE, 0, 1)
    assert not examine(worker).holds
    assert worker.kernels() == [BOTH, FIRST, FIRST]


@pytest.mark.usefixtures("large")
def test_where_the_structure_is_proved_rows_on_one_kernel_set_are_enough() -> None:
    worker = Worker(0)
    assert extents(examine(worker, covered=True)) == [("xnnpack", True)]
    worker = Worker(1, 0)
    assert extents(examine(worker, covered=True)) == [("xnnpack", True), ("reference", True)]
    assert worker.kernels() == [FIRST, BOTH]
    worker = Worker(REFUSED_BEFORE, REFUSED_BEFORE, REFUSED_BEFORE, 0)
    assert extents(examine(worker, covered=True)) == [("reference", True)]


@pytest.mark.usefixtures("large")
@pytest.mark.parametrize(
    ("question", "exhaustive"),
    [
        (QUESTION, True),
        (replace(QUESTION, demand=Demand("steps", 1)), False),
        (asking(limits=(-5, 5)), False),
        (asking(row_axes=(1,)), False),
    ],
)
def test_rows_stand_for_all_only_where_all_rows_are_alike(question: Question, exhaustive: bool) -> None:
    found = Difference(512, 512, steps=0, largest=1.0)
    told = Outcome({name: (OutputProof(0, found),) for name in BOTH}, seconds=1.0)
    proof = examine(Worker(told), question, exhaustive=exhaustive)
    assert extents(proof) == [("xnnpack", False), ("reference", False)]


def test_a_region_of_just_the_size_is_run_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(examination, "_IN_FULL", REGION.cost)
    assert extents(examine(Worker(0))) == [("xnnpack", False), ("reference", False)]


# What a region costs


@pytest.mark.parametrize(
    ("inputs", "line", "cost"),
    [
        ("%a: float32[2,3,5], %b: float32[2,5,4]", "float32[2,3,4] = BATCH_MATMUL(%a, %b)", 120),
        (
            "%a: float32[2,5,3], %b: float32[2,5,4]",
            "float32[2,3,4] = BATCH_MATMUL(%a, %b) {adj_x: true}",
            120,
        ),
        ("%a: float32[6,5], %b: float32[4,5]", "float32[6,4] = FULLY_CONNECTED(%a, %b, none)", 120),
        ("%a: float32[6,5], %b: float32[6,5]", "float32[6,5] = ADD(%a, %b)", 30),
    ],
)
def test_products_cost_their_multiply_adds_and_all_else_its_elements(
    inputs: str, line: str, cost: int
) -> None:
    model = parse(f"subgraph main ({inputs}) {{ %y: {line} return %y }}")
    assert multiply_adds(model) == cost
    assert Region(model, model, "").cost == 2 * cost


@pytest.mark.parametrize(
    ("lines", "most"),
    [
        ("%a: float32[4] = ABS(%x) %b: float32[4] = ABS(%a) %y: float32[4] = ABS(%b)", 32),
        ("%a: float32[4] = ABS(%x) %b: float32[4] = ABS(%a) %y: float32[4] = ADD(%a, %b)", 48),
        (
            "%a: float32[4] = ABS(%x) %b: float32[4] = ABS(%x) %y: float32[8] = CONCATENATION(%a, %b) {axis: 0}",
            64,
        ),
        (
            "%a: float32[2], %b: float32[2] = SPLIT(int32(0), %x) {num_splits: 2} %y: float32[2] = ADD(%a, %b)",
            24,
        ),
        ("%a: float32[4] = ABS(%x) %unread: float32[4] = ABS(%x) %y: float32[4] = ABS(%a)", 48),
    ],
)
def test_what_a_region_needs_at_once_is_freed_where_it_is_read_last(lines: str, most: int) -> None:
    shape = "8" if "float32[8]" in lines else "2" if "%y: float32[2]" in lines else "4"
    model = parse(f"subgraph main (%x: float32[4]) {{ {lines} return %y }}")
    assert model.subgraphs[0].outputs[0].shape == (int(shape),)
    assert peak_bytes(model) == most
