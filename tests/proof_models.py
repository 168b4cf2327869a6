"""The tiny models that the tests of `edge_opt.proof` share: an adder, a projection, an endless loop, a crash."""

import numpy as np

from edge_opt.ir import Buffer, Model, Signature, to_tables
from edge_opt.ir.parse import parse
from edge_opt.runtime.tensors import TensorInfo
from edge_opt.schema import Data, model_bytes


def tensor(
    name: str, *shape: int, dtype: str = "float32", scale: float = 0, zero: int = 0
) -> TensorInfo:
    """What the runtime says of an input or output; without a scale it is not quantized."""
    scales, zeros = ((scale,), (zero,)) if scale else ((), ())
    return TensorInfo(name, name, shape, shape, dtype, scales, zeros)


def written(text: str, key: str = "main") -> bytes:
    """The bytes of graphs in the text form, unchecked; the first gets a signature if there is a `key`."""
    return signed(parse(text), key)


def signed(model: Model, key: str) -> bytes:
    """The bytes of a model whose first graph gets a signature if there is a `key`."""
    graph = model.subgraphs[0]
    if key:
        inputs, outputs = (
            {tensor.name: tensor for tensor in side} for side in (graph.inputs, graph.outputs)
        )
        model.signatures.append(Signature(key, graph, inputs, outputs))
    return model_bytes(to_tables(model))


def adder(
    *, key: str = "main", shape: tuple[int, ...] = (2, 4), other: tuple[int, ...] = ()
) -> bytes:
    """z = x + y; a different shape of y makes the runtime refuse where the two do not broadcast."""
    x, y = (f"float32[{','.join(map(str, sizes))}]" for sizes in (shape, other or shape))
    return written(f"subgraph main (%x: {x}, %y: {y}) {{ %z: {x} = ADD(%x, %y) return %z }}", key)


WEIGHT = np.random.default_rng(0).standard_normal((12, 5)).astype(np.float32)


def projection(
    weight: np.ndarray = WEIGHT,
    *,
    key: str = "main",
    name: str = "logits",
    off: float = 0,
    unit: int = 7,
) -> bytes:
    """`name` [3, n] = embeddings [3, k] x weight [n, k]^T, as FULLY_CONNECTED; the weights of one unit may be off."""
    rows, (units, depth), weight = 3, weight.shape, weight.copy()
    weight[unit] += np.float32(off)
    model = parse(f"""subgraph main (%embeddings: float32[{rows},{depth}]) {{
      %{name}: float32[{rows},{units}] = FULLY_CONNECTED(%embeddings, float32[{units},{depth}]{{splat 0}}, none)
      return %{name}
    }}""")
    # As text, large weights would take seconds.
    model.subgraphs[0].operators[0].input(1).buffer = Buffer(Data(weight.tobytes()))
    return signed(model, key)


def requantized(*, scale: float = 0.5) -> bytes:
    """An int8 tensor through one QUANTIZE."""
    kind = f"int8[1,64] q({scale}, 0)"
    return written(
        f"subgraph main (%x: int8[1,64] q(0.5, 0)) {{ %z: {kind} = QUANTIZE(%x) return %z }}"
    )


def endless() -> bytes:
    """While a == a: a = a + a. Well-formed, and never done for a number."""
    return written("""
        subgraph main (%x: float32[1]) {
          %z: float32[1] = WHILE(%x) {cond_subgraph_index: 1, body_subgraph_index: 2}
          return %z
        }
        subgraph main (%a: float32[1]) { %c: bool[1] = EQUAL(%a, %a) return %c }
        subgraph main (%a: float32[1]) { %c: float32[1] = ADD(%a, %a) return %c }
    """)


def crashing() -> bytes:
    """A SPLIT into no parts that has one: the reference kernels refuse it, XNNPACK divides by zero."""
    return written("""subgraph main (%x: float32[1]) {
      %z: float32[1] = SPLIT(int32(0), %x) {num_splits: 0}
      return %z
    }""")


def recursive() -> bytes:
    """An IF whose branch is a subgraph with an IF whose branch is that subgraph: the runtime's stack overflows."""
    to_one = "{then_subgraph_index: 1, else_subgraph_index: 1}"
    to_two = "{then_subgraph_index: 2, else_subgraph_index: 2}"
    model = parse(f"""
        signature main = #0 (c=%c, x=%x) -> (z=%z)
        subgraph main (%c: bool[1], %x: float32[1]) {{ %z: float32[1] = IF(%c, %x) {to_one} return %z }}
        subgraph main (%x: float32[1]) {{ %z: float32[1] = IF(bool{{true}}, %x) {to_two} return %z }}
        subgraph last (%x: float32[1]) {{ return %x }}
    """)
    model.subgraphs[1].operators[0].options = model.subgraphs[0].operators[0].options
    return model_bytes(to_tables(model))


def greedy() -> bytes:
    """A scalar in and out, and 384 MB between."""
    return written("""subgraph main (%x: float32[2,3]) {
      %large: float32[2,3] = TILE(%x, int32{4000, 4000})
      %z: float32[] = SUM(%large, int32{0, 1})
      return %z
    }""")
