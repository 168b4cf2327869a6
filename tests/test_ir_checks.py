"""What is no graph is neither read nor written, with one sentence that names subgraph, operator or tensor."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import fuzz
import numpy as np
import pytest
from schema_models import int32s, pack, tfl, unpack
from syrupy.assertion import SnapshotAssertion

from edge_opt.base.errors import ModelFormatError
from edge_opt.ir import DType, Model, Signature, Subgraph, Tensor, load, to_bytes, to_tables
from edge_opt.ir.checks import DEEPEST
from edge_opt.ir.graph import OperatorCode
from edge_opt.ir.operators import BUILTIN_OPERATORS, KINDS, SUBGRAPH_FIELDS
from edge_opt.ir.parse import parse
from edge_opt.schema import TABLES, model_bytes

Change = Callable[[Any], object]

TEXT = """
signature run = #0 (x=%x) -> (y=%y)
subgraph run (%x: float32[2,3]) {
  %sum: float32[2,3] = ADD(%x, float32{0, 1, 2})
  %y: float32[2,3] = MUL(%sum, float32{1})
  return %y
}
"""


def model() -> Any:
    """Two operators after each other: `y = (x + w) * v`, as the bindings' object; tensors x, w, v, sum, y."""
    read = parse(TEXT)
    (graph,) = read.subgraphs
    (add, multiply), (x,) = graph.operators, graph.inputs
    w, v = add.input(1), multiply.input(1)
    w.name, v.name = "w", "v"
    graph.tensors = [x, w, v, add.output, multiply.output]
    made = unpack(to_bytes(read))
    made.metadata = [tfl.MetadataT(name="note", buffer=0)]
    return made


MODEL = pack(model())


def changed(*changes: Change) -> bytes:
    made = unpack(MODEL)
    for change in changes:
        change(made)
    return pack(made)


def setting(place: str, value: Any) -> Change:
    """A change of one field: `tensors[1].shape` of the subgraph, `signatureDefs[0].subgraphIndex` of the model."""

    def change(made: Any) -> None:
        head, _, field = place.rpartition(".")
        if head.startswith(("tensors", "operators")):
            head = f"graph.{head}"
        setattr(
            eval(head or "made", {"made": made, "graph": made.subgraphs[0], **vars(made)}),
            field,
            value,
        )

    return change


def quantization(**fields: Any) -> Change:
    """A tensor with these parameters."""
    return setting("tensors[3].quantization", tfl.QuantizationParametersT(**fields))


def twice(side: str) -> Change:
    """A signature that names its arguments or results twice."""
    return lambda made: setting(
        f"signatureDefs[0].{side}", 2 * getattr(made.signatureDefs[0], side)
    )(made)


HUGE = 2**31 - 1
REFUSED: list[tuple[Change, str]] = [
    (
        lambda made: (made.subgraphs.clear(), made.signatureDefs.clear()), "at least one subgraph, found none",
    ),
    # Operators: what they define, and when
    *(
        (
            setting(f"operators[{at}].outputs", int32s(*outputs)),
            f"operator {at} ({code}): defines '{tensor}'",
        )
        for at, code, outputs, tensor in [
            (1, "MUL", [3], "sum"), (0, "ADD", [0], "x"), (0, "ADD", [1], "w"), (1, "MUL", [4, 4], "y"),
        ]
    ),
    (setting("operators[0].inputs", int32s(4, 1)), "operator 0 (ADD): reads 'y'"),
    (setting("operators[0].inputs", int32s(3, 1)), "operator 0 (ADD): reads 'sum'"),
    (lambda made: made.subgraphs[0].operators.reverse(), "operator 0 (MUL): reads 'sum'"),
    (setting("graph.inputs", int32s()), "operator 0 (ADD): reads 'x'"),
    (
        setting("operators[0].builtinOptionsType", tfl.BuiltinOptions.MulOptions),
        "operator 0 (ADD): has MulOptions, expected AddOptions",
    ),
    # Indices
    (setting("operators[1].opcodeIndex", 7), "subgraph 'run', operator 1: operator code 7 does not exist"),
    *(
        (
            setting(f"operators[1].{side}s", int32s(*before, index)),
            f"operator 1 (MUL): {side} tensor {index} ",
        )
        for side, before, indices in [
            ("input", [3], [5, -2, -(2**31)]), ("output", [], [5, -1, HUGE]), ("intermediate", [], [99]),
        ]
        for index in indices
    ),
    (setting("graph.inputs", int32s(9)), "inputs: tensor 9"),
    (setting("graph.outputs", int32s(-1)), "outputs: tensor -1"),
    (setting("tensors[1].buffer", 3), "subgraph 'run', tensor 1 'w': buffer 3 does not exist, there are 3"),
    # Signatures
    (setting("signatureDefs[0].subgraphIndex", 1), "signature 'run': subgraph 1 does not exist, there are 1"),
    *(
        (
            setting("signatureDefs[0].outputs[0].tensorIndex", index),
            f"signature 'run': outputs: tensor {index}",
        )
        for index in (5, 4_000_000_000)
    ),
    (lambda made: made.signatureDefs.append(made.signatureDefs[0]), "signature 'run' is defined twice"),
    (twice("inputs"), "signature 'run': inputs names 'x' twice"),
    (twice("outputs"), "signature 'run': outputs names 'y' twice"),
    # Tensors
    *(
        (
            setting("buffers[1].data", np.zeros(size, np.uint8)),
            f"tensor 1 'w': FLOAT32[3] needs 12 bytes, its buffer holds {size}",
        )
        for size in (0, 11, 13)
    ),
    (setting("tensors[1].type", tfl.TensorType.INT4), "tensor 1 'w': INT4[3] needs 2 bytes, its buffer holds 12"),
    *(
        (setting(f"tensors[3].{field}", int32s(*sizes)), f"tensor 3 'sum': {named}")
        for field, negative in (("shape", -1), ("shapeSignature", -2))
        for sizes, named in [
            ([2, negative], f"shape [2, {negative}]"),
            ([2, -(2**31)], "shape [2, -2147483648]"),
            ([HUGE, HUGE], "shape [2147483647, 2147483647]"),
            ([0, HUGE, HUGE], "shape [0, 2147483647, 2147483647]"),
            ([1] * 33, "33 dimensions"),
            ([1] * 100_000, "100000 dimensions"),
        ]
    ),
    *(
        (
            quantization(scale=[0.5, scale], zeroPoint=[0]),
            "tensor 3 'sum': quantization scales",
        )
        for scale in (float("nan"), float("inf"), -0.5)
    ),
    *(
        (quantization(scale=scales, zeroPoint=points, quantizedDimension=axis), f"tensor 3 'sum': {named}")
        for scales, points, axis, named in [
            ([1.0] * 3, [0] * 2, 1, "3 scales but 2 zero points"),
            ([1.0] * 2, [0] * 2, 1, "2 scales do not fit axis 1"),
            ([1.0] * 2, [0] * 2, 2, "2 scales do not fit axis 2"),
        ]
    ),
]  # fmt: skip


@pytest.mark.parametrize(("change", "named"), REFUSED)
def test_what_is_no_graph_is_refused(change: Change, named: str) -> None:
    """The sentence names the place and the number."""
    with fuzz.time_limit(), pytest.raises(ModelFormatError) as caught:
        load(changed(change))
    assert named in str(caught.value)
    assert "\n" not in str(caught.value)


READ: dict[str, Change] = {
    "one zero point for many scales": quantization(
        scale=[1.0] * 3, zeroPoint=[0], quantizedDimension=1
    ),
    "scales without zero points": quantization(scale=[0.5]),
    "two signatures of one subgraph": lambda made: made.signatureDefs.append(
        tfl.SignatureDefT(signatureKey="again", subgraphIndex=0, inputs=[], outputs=[])
    ),
    "a string constant": setting("tensors[1].type", tfl.TensorType.STRING),
}


@pytest.mark.parametrize("case", READ)
def test_what_only_looks_odd_is_read(case: str) -> None:
    assert load(changed(READ[case])).subgraphs[0].name == "run"


def test_numbers_can_be_read_of_constants_alone_and_not_written() -> None:
    x, w, *_ = load(MODEL).subgraphs[0].tensors
    assert w.array().tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        w.array()[0] = 5
    text = load(changed(READ["a string constant"])).subgraphs[0].tensors[1]
    for tensor, dtype in ((x, "FLOAT32"), (text, "STRING")):
        with pytest.raises(ValueError, match=rf"tensor '.' \({dtype}\) has no numbers to read"):
            tensor.array()
    with pytest.raises(ModelFormatError, match="subgraph '#0', operator 0"):
        load(
            changed(setting("graph.name", None), lambda made: made.subgraphs[0].operators.reverse())
        )


def test_facts_are_known_for_the_schemas_operators() -> None:
    assert set(KINDS) == set(BUILTIN_OPERATORS)


@pytest.mark.parametrize(
    ("name", "data"),
    {
        "SPLIT": [1],
        "SELECT_V2": [1, 2],
        "PADV2": [0, 2],
        "CONCATENATION": [0, 1, 2],
        "TOPK_V2": [0],
    }.items(),
)
def test_a_record_says_which_inputs_the_results_are_made_of(name: str, data: list[int]) -> None:
    assert KINDS[name].data_operands([0, 1, 2]) == data
    assert KINDS[name].data_results([0, 1, 2]) == ([0, 1, 2] if name == "SPLIT" else [0])


@pytest.mark.parametrize(
    ("name", "inputs", "outputs", "reason"),
    [
        ("SOFTMAX", "", 1, "has 0 inputs, expected 1"),
        ("ADD", "xxx", 1, "has 3 inputs, expected 2"),
        ("CONV_2D", "xxxx", 1, "has 4 inputs, expected 2 or 3"),
        ("PACK", "", 1, "has 0 inputs, expected 1 or more"),
        ("SOFTMAX", "x", 0, "has 0 outputs, expected 1"),
        ("SPLIT", "xx", 0, "has 0 outputs, expected 1 or more"),
        ("ADD", "x-", 1, "leaves out an input that it needs"),
        ("CONCATENATION", "xx-", 1, "leaves out an input that it needs"),
        ("IF", "-", 0, "leaves out an input that it needs"),
        ("FULLY_CONNECTED", "xx-", 1, None),
        ("STABLEHLO_COMPOSITE", "--", 0, None),
        ("SPLIT", "xx", 3, None),
        ("CUSTOM", "", 0, None),
    ],
)
def test_a_misfit_operator_is_refused(
    name: str, inputs: str, outputs: int, reason: str | None
) -> None:
    """Inputs that may be left out, of subgraphs that are run any, and operators that nobody knows, pass."""
    given = [None if one == "-" else one for one in inputs]
    assert KINDS[name].misfit(given, ["y"] * outputs) == reason


def test_versions_of_new_operators_change_only_on_purpose(snapshot: SnapshotAssertion) -> None:
    """By type of the data operand and rank; their source is the runtime's GetBuiltinOperatorVersion."""
    lines = []
    for name, rank in product((name for name in KINDS if KINDS[name].versions), (4, 5, 6)):
        versions = {dtype.name: KINDS[name].version_for(dtype, rank=rank) for dtype in DType}
        later = ", ".join(f"{dtype} {number}" for dtype, number in versions.items() if number > 1)
        lines.append(f"{name}, rank {rank}: {later or 1}")
    assert "\n".join(lines) == snapshot
    assert KINDS["CAST"].version_for(DType.BOOL, DType.FLOAT16) == 5


# Of the runtime's flatbuffer_conversions.cc, which reads them.
@pytest.mark.parametrize(
    ("table", "operators"),
    [
        ("L2NormOptions", "L2_NORMALIZATION"),
        ("MaximumMinimumOptions", "MAXIMUM MINIMUM"),
        ("Pool2DOptions", "AVERAGE_POOL_2D MAX_POOL_2D L2_POOL_2D"),
        ("RandomOptions", "RANDOM_UNIFORM RANDOM_STANDARD_NORMAL MULTINOMIAL"),
        ("ReducerOptions", "SUM MEAN REDUCE_MAX REDUCE_MIN REDUCE_PROD REDUCE_ANY REDUCE_ALL"),
        ("Conv3DOptions", "CONV_3D CONV_3D_TRANSPOSE"),
        ("SequenceRNNOptions", "UNIDIRECTIONAL_SEQUENCE_RNN"),
        ("BatchMatMulOptions", "BATCH_MATMUL"),
        ("StableHLOCompositeOptions", "STABLEHLO_COMPOSITE"),
        (None, "LOGISTIC"),
    ],
)
def test_options_lie_in_the_table_that_the_runtime_reads(table: str | None, operators: str) -> None:
    assert {KINDS[name].options for name in operators.split()} == {table}


def test_every_option_that_names_a_subgraph_is_known() -> None:
    """By name: the schema says of no integer what it indexes."""
    named = {
        (table, field.name)
        for table, spec in TABLES.items()
        for field in spec.fields
        if "subgraph" in field.name or "computation" in field.name
    }
    others = {
        ("Model", "subgraphs"),
        ("SignatureDef", "subgraph_index"),
        ("StablehloScatterOptions", ""),
    }
    assert {
        (table, name) for table, names in SUBGRAPH_FIELDS.items() for name in names
    } == named - others


def chain(length: int, last: int) -> bytes:
    """Subgraph i calls i + 1; the last one calls `last`."""
    called = [*range(1, length), last]
    calls = (f"CALL_ONCE() {{init_subgraph_index: {index}}}" for index in called)
    graphs = [f"subgraph g{at} () {{ {call} return }}" for at, call in enumerate(calls)]
    return model_bytes(to_tables(parse("".join([*graphs, "subgraph end () { return }"]))))


def test_subgraphs_may_call_others_but_neither_too_deep_nor_in_a_circle() -> None:
    load(chain(DEEPEST - 1, DEEPEST - 1))
    for length, last in ((DEEPEST, DEEPEST), (1500, 1500), (3, 0), (3, 1), (3, 2)):
        with pytest.raises(ModelFormatError, match="subgraph 0 'g0': its calls"):
            load(chain(length, last))
    for index in (-1, 3):
        with pytest.raises(
            ModelFormatError, match=rf"'g1', operator 0 \(CALL_ONCE\): subgraph {index} does"
        ):
            load(chain(2, index))


@pytest.mark.parametrize("name", ["STABLEHLO_COMPOSITE", "IF", "WHILE", "CALL"])
def test_an_operator_that_names_no_subgraph_to_run_is_refused(name: str) -> None:
    model = parse("subgraph main (%x: float32[2]) { %y: float32[2] = ABS(%x) return %y }")
    (operator,) = model.subgraphs[0].operators
    operator.code = OperatorCode(BUILTIN_OPERATORS[name])
    operator.options = None
    with pytest.raises(ModelFormatError, match=f"operator 0 \\({name}\\): has no options"):
        to_bytes(model)


NEW = Tensor("z", (1,), DType.FLOAT32)
UNWRITABLE: list[tuple[Callable[[Model, Subgraph], object], str]] = [
    (
        lambda m, g: m.signatures.append(Signature("other", Subgraph("other"), {}, {})),
        "signature 'other': its subgraph",
    ),
    (
        lambda m, g: m.signatures[0].inputs.update(z=NEW),
        "signature 'run': .* 'z'",
    ),
    (
        lambda m, g: m.signatures[0].outputs.update(late=g.add_tensor(replace(NEW))),
        "signature 'run': .* output 'late'",
    ),
    (lambda m, g: g.outputs.append(NEW), "subgraph 'run': .* output 'z'"),
    (
        lambda m, g: g.outputs.insert(0, replace(NEW, name="y")),
        "subgraph 'run': .* output 'y'",
    ),
]


@pytest.mark.parametrize(("change", "named"), UNWRITABLE)
def test_what_load_refuses_is_not_written(
    change: Callable[[Model, Subgraph], object], named: str, tmp_path: Path
) -> None:
    model = parse(TEXT)
    change(model, model.subgraphs[0])
    with pytest.raises(ModelFormatError, match=named):
        model.save(tmp_path / "model.tflite")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ModelFormatError, match=named):
        to_bytes(model)
