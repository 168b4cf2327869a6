"""The frame rule: what a rewrite must leave alone, and that a pass which changes the graph by the way is stopped."""

from collections.abc import Callable, Iterable

import numpy as np
import pytest
from pass_runs import Says, convert_text, refusal, run
from text_parser import parse
from toy_passes import CHAIN, TWO_RESULTS, Double, fresh, graph_of, op, replacing

from edge_opt.ir import Constants, DType, Model, Operator, Quantization, Tensor
from edge_opt.ir.dtypes import same_quantization
from edge_opt.ir.graph import Buffer
from edge_opt.ir.refusal import RefusedError
from edge_opt.ir.text import to_text
from edge_opt.passes import Context, Pass
from edge_opt.passes.contract import BrokenFrameError, Site, SkippedSite
from edge_opt.passes.frame import check_frame
from edge_opt.passes.rewrite import Rewrite, commit
from edge_opt.schema.table import new_table

# The frame rule

WAITING = "what others read of the old region comes back into it, or cannot wait for the new one"


def rewrite_of(change: Callable[[Model, dict[str, Tensor], dict[str, Operator]], Rewrite]) -> str | None:
    model, tensors, operators = graph_of(CHAIN)
    before = to_text(model)
    violation = refusal(check_frame, change(model, tensors, operators))
    assert to_text(model) == before
    return violation


def two(model: Model) -> Tensor:
    return Constants(model).make("two", np.array(2, np.float32), DType.FLOAT32)


@pytest.mark.parametrize(
    "change",
    [
        lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"])),
        lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "MUL", [t["x"], two(m)], t["b"])),
        lambda m, t, o: replacing(m, [o["a"], o["b"]], o["a"], op(m, "NEG", [t["a"]], t["b"])),
    ],
    ids=["reads what was read", "reads a new constant", "keeps an old operator"],
)
def test_a_rewrite_within_its_frame(
    change: Callable[[Model, dict[str, Tensor], dict[str, Operator]], Rewrite],
) -> None:
    assert rewrite_of(change) is None


def test_a_region_holds_no_weights_whose_scales_are_named_by_place() -> None:
    """Cut out, copied or moved to another subgraph, the place would be another tensor's."""

    def change(model: Model, t: dict[str, Tensor], o: dict[str, Operator]) -> Rewrite:
        weights = two(model)
        table = new_table("QuantizationParameters")
        table.set("details", new_table("BlockwiseQuantization", scales=3, block_size=32))
        weights.quantization = Quantization(table)
        assert not same_quantization(weights.quantization, Quantization(table))
        return replacing(model, [o["a"], o["b"]], op(model, "MUL", [t["x"], weights], t["b"]))

    message = "'two' is quantized by blocks: its scales are named by a place in its own subgraph"
    assert rewrite_of(change) == message


def test_what_reads_state_may_not_move_past_other_operators() -> None:
    """`other` stands inside the region and would run before what stood in front of it."""

    def of_variable(model: Model, operators: list[Operator], anchor: Tensor) -> Rewrite:
        new = op(model, "READ_VARIABLE", [Tensor("handle", (), DType.RESOURCE)], anchor)
        return replacing(model, operators, new)

    model, t, o = graph_of(CHAIN)
    reads = "READ_VARIABLE of the region would run after operators that it stood before"
    assert refusal(check_frame, of_variable(model, [o["a"], o["b"], o["c"]], t["c"])) == reads
    assert refusal(check_frame, of_variable(model, [o["a"], o["b"]], t["b"])) != reads


OUTSIDE = {
    "reads another input": (
        lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["o"]], t["b"])),
        "the new region reads 'o', which the old one did not",
    ),
    "reads a later tensor": (
        lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["c"]], t["b"])),
        "the new region reads 'c', which the old one did not",
    ),
    "reads what it removes": (
        lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["a"]], t["b"])),
        "the new region reads 'a', which the old one did not",
    ),
    "defines another tensor of that name": (
        lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], fresh("b"))),
        "the new region leaves 'b' undefined",
    ),
    "drops a graph output": (
        lambda m, t, o: replacing(m, [o["c"], o["y"]]),
        "the new region leaves 'y' undefined",
    ),
    "defines twice": (
        lambda m, t, o: replacing(
            m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), op(m, "ABS", [t["x"]], t["b"])
        ),
        "the new region defines 'b' twice",
    ),
    "defines somebody else's": (
        lambda m, t, o: replacing(
            m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), op(m, "ABS", [t["x"]], t["other"])
        ),
        "the new region defines 'other', which is not the old one's",
    ),
    "defines a graph input": (
        lambda m, t, o: replacing(
            m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), op(m, "ABS", [t["x"]], t["o"])
        ),
        "the new region defines 'o', which is not the old one's",
    ),
    "out of order": (
        lambda m, t, o: replacing(
            m, [o["a"], o["b"]], op(m, "ABS", [late := fresh("late")], t["b"]), op(m, "NEG", [t["x"]], late)
        ),
        "the new region reads 'late' before defining it",
    ),
    "cyclic": (
        lambda m, t, o: replacing(
            m, [o["a"], o["b"]], op(m, "ABS", [loop := fresh("loop")], t["b"]), op(m, "NEG", [t["b"]], loop)
        ),
        "the new region reads 'loop' before defining it",
    ),
    "stands elsewhere": (
        lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), anchor=o["other"]),
        "the new region is to stand at 'EXP', which is not part of the old one",
    ),
    "stands too early": (
        lambda m, t, o: replacing(m, [o["a"], o["b"]], op(m, "NEG", [t["x"]], t["b"]), anchor=o["a"]),
        "the old region goes on behind 'a', where the new one is to stand",
    ),
    "takes in an operator of others": (
        lambda m, t, o: replacing(
            m, [o["b"], o["c"], o["y"]], op(m, "ABS", [t["a"]], t["y"]), o["other"]
        ),
        "the operator EXP that defines 'other' belongs to the graph already",
    ),
    "replaces what is gone": (
        lambda m, t, o: replacing(m, [op(m, "ABS", [t["x"]], fresh("n")), o["b"]], op(m, "NEG", [t["x"]], t["b"])),
        "the operator ABS that defines 'n' is not in the graph any more",
    ),
    "defines a constant": (
        lambda m, t, o: replacing(
            m, [o["a"], o["b"]], op(m, "ABS", [t["x"]], c := two(m)), op(m, "MUL", [t["x"], c], t["b"])
        ),
        "the new region defines the constant 'two'",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("change", "reason"), OUTSIDE.values(), ids=OUTSIDE)
def test_a_rewrite_outside_its_frame(
    change: Callable[[Model, dict[str, Tensor], dict[str, Operator]], Rewrite], reason: str
) -> None:
    assert rewrite_of(change) == reason


def test_what_others_read_before_the_anchor_may_be_defined_there_and_they_go_behind_it() -> None:
    model, t, o = graph_of(TWO_RESULTS)
    new = (op(model, "SQUARE", [t["x"]], t["a"]), op(model, "NEG", [t["a"]], t["b"]))
    moved = replacing(model, [o["a"], o["b"]], *new)
    assert refusal(check_frame, moved) is None
    commit(moved)
    assert [operator.name for operator in model.subgraphs[0].operators] == ["SQUARE", "NEG", "EXP"]
    for first in model.subgraphs[0].operators:
        assert all(tensor is None or tensor.producer is not first for tensor in first.inputs)


def test_others_cannot_go_behind_a_region_that_needs_them() -> None:
    model, t, o = graph_of(TWO_RESULTS.replace("NEG(%a)", "ADD(%a, %reader)"))
    new = (op(model, "SQUARE", [t["x"]], t["a"]), op(model, "ADD", [t["a"], t["reader"]], t["b"]))
    assert refusal(check_frame, replacing(model, [o["a"], o["b"]], *new)) == WAITING
    kept = replacing(model, [o["a"], o["b"]], o["a"], new[1])
    assert refusal(check_frame, kept) is None


def test_what_does_more_than_compute_is_not_moved() -> None:
    model, t, o = graph_of(TWO_RESULTS.replace("EXP(", "CUSTOM 'print' ("))
    new = (op(model, "SQUARE", [t["x"]], t["a"]), op(model, "NEG", [t["a"]], t["b"]))
    assert refusal(check_frame, replacing(model, [o["a"], o["b"]], *new)) == WAITING


def test_an_operator_that_stays_cannot_read_what_is_new() -> None:
    model, t, o = graph_of(TWO_RESULTS)
    text = TWO_RESULTS.replace("return %reader, %b", "return %reader, %b, %a")
    model, t, o = graph_of(text)
    renewed = op(model, "SQUARE", [t["x"]], t["a"])
    listed_first = replacing(
        model, [o["a"], o["reader"], o["b"]], renewed, o["reader"], op(model, "NEG", [t["a"]], t["b"])
    )
    assert refusal(check_frame, listed_first) == WAITING


# Changes outside a rewrite


@pytest.mark.parametrize(
    ("harm", "found"),
    [
        (lambda c, f, s: setattr(s.output, "name", "renamed"), "the tensor 'renamed' has another name"),
        (lambda c, f, s: setattr(f.input(0), "quantization", Quantization.affine(1.0)), "the tensor 'x' has another"),
        (lambda c, f, s: setattr(c.subgraph.tensors[1], "shape", (2, 2)), "the tensor 'o' has another"),
        (lambda c, f, s: setattr(c.subgraph.tensors[1], "dtype", DType.INT32), "the tensor 'o' has another"),
        (lambda c, f, s: setattr(c.subgraph.tensors[1], "buffer", Buffer()), "the tensor 'o' has another"),
        (lambda c, f, s: c.subgraph.outputs.reverse(), "the graph's inputs, outputs or signatures are others"),
        (lambda c, f, s: c.subgraph.inputs.pop(), "the graph's inputs, outputs or signatures are others"),
        (lambda c, f, s: c.subgraph.set_input(f, 0, c.subgraph.inputs[1]), "ABS that defines 'a' has other inputs"),
        (lambda c, f, s: c.subgraph.remove(list(c.subgraph.operators)[2]), "EXP that defines 'other' is gone"),
        (lambda c, f, s: c.subgraph.append(op(c.model, "ABS", [f.input(0)], fresh("n"))), "that defines 'n' is new"),
        (lambda c, f, s: setattr(f, "options", new_table("AbsOptions")), "ABS that defines 'a' has other"),
    ],
    ids=[
        "name", "quantization", "shape", "type", "bytes", "outputs", "inputs", "operand", "removed", "added", "options",
    ],
)  # fmt: skip
@pytest.mark.parametrize("holds", [True, False])
def test_a_pass_that_changes_the_graph_by_the_way_is_stopped(
    harm: Callable[[Context, Operator, Operator], object], found: str, holds: bool
) -> None:
    """The proof cannot see it: it runs both regions as they then are."""

    def make(context: Context, first: Operator, last: Operator) -> Rewrite:
        if first.output.name != "a":
            raise RefusedError("only the first")
        rewrite = Double._replace(context, first, last)
        harm(context, first, last)
        return rewrite

    with pytest.raises(BrokenFrameError, match=found) as caught:
        convert_text(CHAIN, Double(make), prover=Says(holds))
    assert "skip='double'" in str(caught.value)


def test_a_tensors_own_quantization_may_not_be_edited() -> None:
    """The object stays the same one; what it says does not."""

    def make(context: Context, first: Operator, last: Operator) -> Rewrite:
        rewrite = Double._replace(context, first, last)
        parameters = context.subgraph.inputs[0].quantization
        assert parameters is not None
        parameters.scale = np.array([0.25], np.float32)
        return rewrite

    text = CHAIN.replace("%x: float32[4]", "%x: float32[4] q(0.5, 0)", 1)
    with pytest.raises(BrokenFrameError, match="the tensor 'x' has another"):
        convert_text(text, Double(make), prover=Says(True))


def test_options_that_old_and_new_operators_share_may_not_be_edited() -> None:
    text = CHAIN.replace("NEG(%c)", "SOFTMAX(%c) {beta: 1.0}")

    class Sharp(Pass):
        name = "sharp"
        summary = "for tests"

        def sites(self, context: Context) -> Iterable[Site | SkippedSite]:
            for operator in context.subgraph.operators:
                if operator.name == "SOFTMAX":
                    yield Site(operator, lambda operator=operator: self._build(context, operator))  # type: ignore[misc]

        @staticmethod
        def _build(context: Context, operator: Operator) -> Rewrite:
            assert operator.options is not None
            operator.options.set("beta", 2.0)
            new = Operator(operator.code, operator.inputs, operator.outputs, operator.options)
            return Rewrite(context.subgraph, (operator,), (new,), operator)

    with pytest.raises(
        BrokenFrameError, match="SOFTMAX that defines 'y' has other inputs, outputs or options"
    ):
        convert_text(text, Sharp())


def test_signatures_may_not_be_edited() -> None:
    model = parse("signature run = #0 (x=%x, o=%o) -> (y=%y, other=%other)\n" + CHAIN)

    def make(context: Context, first: Operator, last: Operator) -> Rewrite:
        context.model.signatures[0].outputs.popitem()
        return Double._replace(context, first, last)

    with pytest.raises(BrokenFrameError, match="signatures are others"):
        run(model, Double(make))
