"""The tiny models that the tests of `edge_opt.proof` share: an adder, a projection, an endless loop, a crash."""

import numpy as np
from text_parser import parse
from tiny_models import Graph, Op, T, build, options

from edge_opt.ir import Signature, to_bytes
from edge_opt.runtime.tensors import TensorInfo


def tensor(
    name: str, *shape: int, dtype: str = "float32", scale: float | None = None, zero: int = 0
) -> TensorInfo:
    """What the runtime says of an input or output."""
    scales, zeros = ((), ()) if scale is None else ((scale,), (zero,))
    return TensorInfo(name, name, shape, shape, dtype, scales, zeros)


def written(text: str, key: str = "main") -> bytes:
    """The bytes of a graph in the text form; with a signature of all that goes in and out, if it has a `key`."""
    model = parse(text)
    (graph,) = model.subgraphs
    if key:
        inputs, outputs = ({tensor.name: tensor for tensor in side} for side in (graph.inputs, graph.outputs))
        model.signatures.append(Signature(key, graph, inputs, outputs))
    return to_bytes(model)


def adder(
    *, key: str = "main", shape: tuple[int, ...] = (2, 4), other: tuple[int, ...] | None = None
) -> bytes:
    """z = x + y; a different shape of y makes the runtime refuse where the two do not broadcast."""
    x, y = (f"float32[{','.join(map(str, sizes))}]" for sizes in (shape, other or shape))
    return written(f"subgraph main (%x: {x}, %y: {y}) {{ %z: {x} = ADD(%x, %y) return %z }}", key)


def projection(weight: np.ndarray, *, key: str = "main", name: str = "logits", rows: int = 3) -> bytes:
    """`name` [rows, n] = embeddings [rows, k] x weight [n, k]^T, as FULLY_CONNECTED."""
    units, depth = weight.shape
    tensors = [T("embeddings", (rows, depth)), T("w", weight.shape, value=weight), T(name, (rows, units))]
    operator = Op("FULLY_CONNECTED", ["embeddings", "w", None], [name], options("FullyConnectedOptions"))
    return build(Graph(tensors, [operator], ["embeddings"], [name], key))


def softmax(*, shape: tuple[int, ...] = (1, 4, 8), scale: float = 1.0) -> bytes:
    """z = softmax(x * scale + mask) over the last axis."""
    kind = f"float32[{','.join(map(str, shape))}]"
    return written(f"""subgraph main (%x: {kind}, %mask: {kind}) {{
      %scaled: {kind} = MUL(%x, float32({scale}))
      %masked: {kind} = ADD(%scaled, %mask)
      %z: {kind} = SOFTMAX(%masked) {{beta: 1.0}}
      return %z
    }}""")


def requantized(*, scale: float = 0.5) -> bytes:
    """An int8 tensor through one QUANTIZE."""
    kind = "int8[1,64]"
    return written(
        f"subgraph main (%x: {kind} q(0.5, 0)) {{ %z: {kind} q({scale}, 0) = QUANTIZE(%x) return %z }}"
    )


def endless() -> bytes:
    """While a == a: a = a + a. Well-formed, and never done for a number."""
    one = (1,)
    return build(
        Graph(
            [T("x", one), T("z", one)],
            [Op("WHILE", ["x"], ["z"], options("WhileOptions", condSubgraphIndex=1, bodySubgraphIndex=2))],
            ["x"],
            ["z"],
            "main",
        ),
        Graph([T("a", one), T("c", one, "bool")], [Op("EQUAL", ["a", "a"], ["c"])], ["a"], ["c"]),
        Graph(
            [T("a", one), T("c", one)], [Op("ADD", ["a", "a"], ["c"], options("AddOptions"))], ["a"], ["c"]
        ),
    )


def crashing() -> bytes:
    """A SPLIT into no parts that has one: the reference kernels refuse it, XNNPACK divides by zero."""
    tensors = [T("axis", (), "int32", np.array(0)), T("x", (1,)), T("z", (1,))]
    split = Op("SPLIT", ["axis", "x"], ["z"], options("SplitOptions", numSplits=0))
    return build(Graph(tensors, [split], ["x"], ["z"], "main"))


def recursive() -> bytes:
    """An IF whose branch is a subgraph with an IF whose branch is that subgraph: the runtime's stack overflows."""
    one = (1,)
    branch = options("IfOptions", thenSubgraphIndex=1, elseSubgraphIndex=1)
    return build(
        Graph(
            [T("c", one, "bool"), T("x", one), T("z", one)],
            [Op("IF", ["c", "x"], ["z"], branch)],
            ["c", "x"],
            ["z"],
            "main",
        ),
        Graph(
            [T("c", one, "bool", value=np.array([True])), T("x", one), T("z", one)],
            [Op("IF", ["c", "x"], ["z"], branch)],
            ["x"],
            ["z"],
        ),
    )


def greedy() -> bytes:
    """A scalar in and out, and 384 MB between."""
    tensors = [
        T("x", (2, 3)),
        T("times", (2,), "int32", np.array([4000, 4000])),
        T("large", (2, 3)),
        T("axes", (2,), "int32", np.array([0, 1])),
        T("z", ()),
    ]
    operators = [
        Op("TILE", ["x", "times"], ["large"]),
        Op("SUM", ["large", "axes"], ["z"], options("ReducerOptions")),
    ]
    return build(Graph(tensors, operators, ["x"], ["z"], "main"))
