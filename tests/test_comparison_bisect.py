"""On a difference, `compare` says where it begins, and shows what computes it in both models."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_runs import DEMO, QUANTIZED, run, written
from text_parser import parse

from edge_opt import convert, load
from edge_opt.comparison import bisect
from edge_opt.comparison import compare as comparing
from edge_opt.comparison.compare import compare
from edge_opt.comparison.findings import FirstDifference
from edge_opt.ir import Constants, Model, Operator, save
from edge_opt.runtime.errors import RuntimeCrashed
from edge_opt.runtime.runner import Worker

CHAIN = """
signature main = #0 (x=%x) -> (y=%y)
subgraph main (%x: float32[1,8]) {{
{lines}
  return %y
}}
"""


def located(a: Any, b: Any, **options: Any) -> FirstDifference:
    report = compare(a, b, **options)
    assert not report.equal
    assert report.first_difference is not None
    return report.first_difference


def chain(length: int, wrong: int | None = None) -> Model:
    """x + 1 + 1 + ... with one link that adds more."""
    names = ["x", *(f"t{place}" for place in range(1, length)), "y"]
    lines = [
        f"  %{after}: float32[1,8] = ADD(%{before}, float32({1.5 if place == wrong else 1.0}))"
        for place, (before, after) in enumerate(pairwise(names))
    ]
    return parse(CHAIN.format(lines="\n".join(lines)))


def converted(path: Path = DEMO) -> Model:
    model = load(path)
    convert(model, verify="none")
    return model


def heads_merged(model: Model, signature: str) -> list[tuple[Any, Operator]]:
    graph = dict(model.entry_points())[signature]
    found = (op for op in graph.operators if op.name == "CONCATENATION" and "head_0" in op.input(0).name)
    return [(graph, operator) for operator in found if len(operator.inputs) == 4]


@pytest.mark.parametrize(("path", "block"), [(DEMO, 0), (QUANTIZED, 2)], ids=["float32", "int16"])
def test_swapped_heads_are_found_in_their_block(path: Path, block: int) -> None:
    model = converted(path)
    graph, merge = heads_merged(model, "decode")[block]
    first, second = merge.input(0), merge.input(1)
    graph.set_input(merge, 0, second)
    graph.set_input(merge, 1, first)
    found = located(path, model)
    assert found.signature == "decode"
    assert f"kv_cache_k_{block}" in "".join(found.equal_before)
    assert sum("SOFTMAX" in line for line in found.operators_a) == 1
    assert sum("SOFTMAX" in line for line in found.operators_b) == 4
    assert found.names[found.short_name] == found.tensor
    assert all(found.short_name in lines[-1] for lines in (found.operators_a, found.operators_b))
    assert found.reason == ""


def test_a_mask_of_another_layer_is_among_what_the_region_reads() -> None:
    model = converted()
    graph = dict(model.entry_points())["decode"]
    masks = {tensor.name: tensor for tensor in graph.inputs if "mask" in tensor.name}
    softmax = [operator for operator in graph.operators if operator.name == "SOFTMAX"][5]
    add = softmax.input(0).producer
    assert add is not None
    (other,) = (tensor for tensor in masks.values() if tensor is not add.input(1))
    graph.set_input(add, 1, other)
    found = located(DEMO, model)
    assert {"%mask_local", "%mask_global"} <= set(found.equal_before)
    assert len({line for line in found.operators_a if "%mask_global" in line or "%mask_local" in line}) == 1
    assert any("%mask_global" in line for line in found.operators_b)
    assert any("%mask_local" in line for line in found.operators_b)


@pytest.mark.parametrize("wrong", [0, 1, 98, 198, 199])
def test_it_takes_a_logarithmic_number_of_runs(wrong: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    run_plans = Worker.run_plans
    monkeypatch.setattr(Worker, "run_plans", lambda *given: asked.append(1) or run_plans(*given))
    found = located(chain(200), chain(200, wrong))
    assert found.tensor == ("y" if wrong == 199 else f"t{wrong + 1}")
    for operators, more in ((found.operators_a, 1.0), (found.operators_b, 1.5)):
        assert operators == (
            f"{found.short_name}: float32[1,8] = ADD({found.equal_before[0]}, float32({more}))",
        )
    # Twice to compare, then three times twelve cuts, and perhaps what the tensor is computed from.
    assert len(asked) <= 2 * (1 + 3 + 1)


@pytest.mark.parametrize("other", ["ABS(%t39)", "MUL(%t39, %side)"])
def test_a_branch_that_no_cut_looked_at_is_found_too(other: str) -> None:
    """A parallel branch differs early, between tensors that are equal: going back from the first finds it."""

    def model(value: str, last: str) -> Model:
        lines = ["  %early: float32[1,8] = MUL(%x, float32(2.0))"]
        lines += [f"  %side: float32[1,8] = ADD(%early, float32({value}))"]
        names = ["early", *(f"t{place}" for place in range(40))]
        lines += [f"  %{after}: float32[1,8] = ABS(%{before})" for before, after in pairwise(names)]
        lines += [f"  %late: float32[1,8] = {last}", "  %y: float32[1,8] = ADD(%late, %side)"]
        return parse(CHAIN.format(lines="\n".join(lines)))

    found = located(model("1.0", "ABS(%t39)"), model("3.0", other))
    assert found.tensor == "side"
    assert [found.names[name] for name in found.equal_before] == ["early"]


def test_models_without_common_names_are_shown_whole_and_it_says_so() -> None:
    other = chain(3, wrong=1)
    for tensor in other.subgraphs[0].tensors:
        tensor.name = f"other_{tensor.name}"
    for operator in other.subgraphs[0].operators:
        operator.output.name = f"other_{operator.output.name}"
    found = located(chain(3), other)
    assert "share no names" in found.reason
    assert (found.tensor, found.names[found.short_name]) == ("y", "y")
    assert found.equal_before == ("%x",)
    assert (len(found.operators_a), len(found.operators_b)) == (3, 3)


@pytest.mark.parametrize("names", [("weight", "weight"), ("weight", "other")])
def test_a_changed_weight_is_named(names: tuple[str, str], tmp_path: Path) -> None:
    models = []
    for name, value in zip(names, (0.25, 0.5), strict=True):
        model = parse(CHAIN.format(lines="  %h: float32[1,8] = ABS(%x)\n  %y: float32[1,8] = MUL(%h, %h)"))
        graph = model.subgraphs[0]
        *_, multiply = graph.operators
        numbers = np.full((1, 8), value, np.float32)
        weight = Constants(model).make(name, numbers, graph.outputs[0].dtype)
        graph.set_input(multiply, 1, graph.add_tensor(weight))
        models.append(tmp_path / f"{value}.tflite")
        save(model, models[-1])
    found = located(*models)
    assert (found.tensor, found.constants) == ("y", ("weight",))


def test_a_model_without_signatures_is_bisected_by_position() -> None:
    models = [chain(20), chain(20, wrong=7)]
    for model in models:
        model.signatures.clear()
    assert located(*models).tensor == "t8"


def test_within_the_tolerance_nothing_is_looked_for() -> None:
    assert compare(chain(4), chain(4, wrong=2), atol=1.0).first_difference is None
    assert compare(chain(4), chain(4, wrong=2), locate=False).first_difference is None


def test_a_search_that_fails_leaves_the_comparison_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise RuntimeCrashed("the runtime's process ended with signal 11")

    monkeypatch.setattr(comparing, "first_difference", fail)
    report = compare(chain(4), chain(4, wrong=2))
    assert not report.equal
    assert report.first_difference is not None
    assert "signal 11" in report.first_difference.reason
    assert report.first_difference.figures is None


def test_the_command_shows_both_sides(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = CHAIN.format(lines="  %h: float32[1,8] = ABS(%x)\n  %y: float32[1,8] = MUL(%h, float32(2.0))")
    a, b = written(tmp_path, plain, "a.tflite"), written(tmp_path, plain.replace("2.0", "2.5"), "b.tflite")
    ran = run(capsys, "compare", a, b)
    assert ran.code == 1
    shown = [line.strip() for line in ran.out.splitlines()]
    assert "equal before it: %0" in shown
    assert "%1: float32[1,8] = MUL(%0, float32(2.0))" in shown
    assert "%1: float32[1,8] = MUL(%0, float32(2.5))" in shown
    assert "%0 is 'h'" in shown
    said = run(capsys, "compare", a, b, "--json").json["first_difference"]
    assert (said["signature"], said["tensor"], said["equal_before"]) == ("main", "y", ["%0"])
    assert said["figures"]["max_abs"] > 0
    assert said["operators_b"] == ["%1: float32[1,8] = MUL(%0, float32(2.5))"]
    assert run(capsys, "compare", a, a, "--json").json["first_difference"] is None


def test_where_no_tensor_differs_once_it_is_an_output_that_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bisect._Search, "_look", lambda self, places: self.equal.update(places))
    found = located(chain(4), chain(4, wrong=2))
    assert found.reason.startswith("no tensor differs once it is an output itself")
    assert (found.tensor, found.figures) == ("", None)


def test_constants_are_paired_by_name_where_an_operator_has_more_inputs() -> None:
    line = "  %h: float32[1,8] = ABS(%x)\n  %y: float32[1,8] = FULLY_CONNECTED(%h, float32[8,8]{splat 0.25}{bias})"
    texts = (line.replace("{bias}", bias) for bias in ("", ", float32[8]{splat 1}"))
    ours, theirs = (parse(CHAIN.format(lines=text)).subgraphs[0].operators for text in texts)
    assert [len(one.inputs) for one in (ours[1], theirs[1])] == [2, 3]
    assert bisect._changed_constants(ours, theirs) == ()
