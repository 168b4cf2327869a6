"""Small valid models to make mutants of: every kind of table, quantization, control flow, variable and attention."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from bundles import GENERIC, bundle, model_part
from schema_models import everything, pack, with_data_after, with_options_after
from text_parser import parse

from edge_opt.ir import Buffer, DType, Model, Operator, Quantization, Subgraph, load, to_bytes
from edge_opt.ir.operators import subgraph_indices
from edge_opt.ir.walk import cut_out, read_outside, reads
from edge_opt.schema import Data, Table, new_table, read_model

BUNDLED = Path(__file__).parent.parent / "testdata"
_BEFORE, _BEHIND = 24, 14
_LARGEST_CONSTANT = 4096

_TEXTS = {
    "control flow": """
        signature main = #0 (c=%c, x=%x) -> (y=%y, z=%z, n=%n)
        subgraph main (%c: bool[1], %x: float32[1,4]) {
          %y: float32[1,4] = IF(%c, %x) {then_subgraph_index: 1, else_subgraph_index: 2}
          %z: float32[1,4] = STABLEHLO_COMPOSITE(%y) {name: 'odml.rms_norm', decomposition_subgraph_index: 1}
          %n: float32[1,4] = WHILE(%z) {cond_subgraph_index: 3, body_subgraph_index: 2}
          return %y, %z, %n
        }
        subgraph then (%a: float32[1,4]) {
          %b: float32[1,4] = MUL(%a, %a)
          return %b
        }
        subgraph else (%a: float32[1,4]) {
          %b: float32[1,4] = STABLEHLO_COMPOSITE(%a) {name: 'inner', decomposition_subgraph_index: 1}
          return %b
        }
        subgraph cond (%a: float32[1,4]) {
          %s: float32[1] = SUM(%a, int32{1})
          %b: bool[1] = LESS(%s, float32(9.0))
          return %b
        }
    """,
    "dynamic": """
        signature main = #0 (x=%x) -> (y=%y, w=%w)
        subgraph main (%x: float32[?,4,8]) {
          %s: int32[3] = SHAPE(%x) {out_type: 2}
          %n: int32[1] = STRIDED_SLICE(%s, int32{0}, int32{1}, int32{1})
          %t: int32[4] = CONCATENATION(%n, int32{8, 2, 2})
          %y: float32[?,8,2,2] = RESHAPE(%x, %t)
          %k: float32[?,4,8] = CONCATENATION(%x, %x) {axis: 0}
          %w: float32[?,8,4] = TRANSPOSE(%k, int32{0, 2, 1})
          return %y, %w
        }
    """,
    "quantized attention": """
        signature decode = #0 (q=%q, k=%k, v=%v, mask=%mask) -> (o=%o)
        subgraph decode (%q: int16[1,1,4,8] q(0.01, 0), %k: int8[1,1,6,8] q(0.02, 0), %v: int8[1,1,8,6] q(0.02, 0),
                         %mask: int16[1,1,1,6] q(0.003, 0)) {
          %s: int16[1,1,4,8] q(0.001, 0) = MUL(%q, int16(32767) q(0.00001, 0))
          %t: int16[1,4,1,8] q(0.001, 0) = TRANSPOSE(%s, int32{0, 2, 1, 3})
          %r: int16[1,1,4,8] q(0.001, 0) = RESHAPE(%t, int32{1, 1, 4, 8}) {new_shape: [1, 1, 4, 8]}
          %l: int16[1,1,4,6] q(0.003, 0) = BATCH_MATMUL(%r, %k) {adj_y: true}
          %a: int16[1,1,4,6] q(0.003, 0) = ADD(%l, %mask)
          %p: int16[1,1,4,6] q(0.000030517578, 0) = SOFTMAX(%a) {beta: 1.0}
          %w: int16[1,1,4,8] q(0.02, 0) = BATCH_MATMUL(%p, %v) {adj_y: true}
          %o: int16[1,1,32] q(0.02, 0) = RESHAPE(%w, int32{1, 1, 32}) {new_shape: [1, 1, 32]}
          return %o
        }
    """,
    "quantized layers": """
        subgraph main (%x: int8[1,4,4,2] q(0.5, -3), %f: float32[1,8]) {
          %c: int8[1,4,4,2] q(0.25, 1) = CONV_2D(%x, int8[2,1,1,2]{1, -2, 3, 4} q([0.5, 0.25], [0, 0], axis 0),
            int32{10, 20} q([0.25, 0.125], [0, 0], axis 0)) {stride_w: 1, stride_h: 1}
          %d: float32[1,4,4,2] = DEQUANTIZE(%c)
          %r: float32[1,32] = RESHAPE(%d, int32{-1, 32}) {new_shape: [-1, 32]}
          %y: float32[1,2] = FULLY_CONNECTED(%f, int8[2,8]{splat 3} q([0.1, 0.2], [0, 0], axis 0), none)
          %e: int16[1,2] q(0.1, 0) = QUANTIZE(%y)
          %p: float32[1,2] = PAD(%y, int32[2,2]{0, 0, 0, 0})
          return %r, %e, %p
        }
    """,
    "variables": """
        subgraph main () {
          CALL_ONCE() {init_subgraph_index: 1}
          %handle: resource[] = VAR_HANDLE() {container: 'c', shared_name: 'state'}
          %value: float32[4] = READ_VARIABLE(%handle)
          return %value
        }
        subgraph init () {
          %handle: resource[] = VAR_HANDLE() {container: 'c', shared_name: 'state'}
          ASSIGN_VARIABLE(%handle, float32{0, 0, 0, 0})
          return
        }
    """,
    # Raised IndexError, ZeroDivisionError or TypeError once
    "GATHER from an axis of size 0": """
    subgraph main (%q: float32[1,2,4,8], %e: float32[1,0,6,8], %v: float32[1,2,6,8]) {
      %g: float32[1,2,6,8] = GATHER(%e, int32{0, 0}) {axis: 1}
      %l: float32[1,2,4,6] = BATCH_MATMUL(%q, %g) {adj_y: true}
      %p: float32[1,2,4,6] = SOFTMAX(%l) {beta: 1.0}
      %o: float32[1,2,4,8] = BATCH_MATMUL(%p, %v)
      return %o
    }""",
    "GATHER with real numbers as indices": """
    subgraph main (%x: int32[1]) {
      %g: int32[1] = GATHER(int32{1, 2, 3}, float32{0.5}) {axis: 0}
      %y: int32[1] = ADD(%x, %g)
      return %y
    }""",
    "int8 products of vectors before QUANTIZE": """
    subgraph main (%a: int8[5] q(0.1, 0), %b: int8[5] q(0.1, 0)) {
      %l: int8[] q(0.001, 0) = BATCH_MATMUL(%a, %b) {adj_x: true}
      %m: int8[] q(0.5, 0) = QUANTIZE(%l)
      return %m
    }""",
    "a composite whose body multiplies vectors": """
    subgraph main (%a: float32[5], %b: float32[5]) {
      %l: float32[] = STABLEHLO_COMPOSITE(%a, %b) {name: 'x', decomposition_subgraph_index: 1}
      return %l
    }
    subgraph body (%a: float32[5], %b: float32[5]) { %l: float32[] = BATCH_MATMUL(%a, %b) {adj_x: true} return %l }
    """,
    **{
        f"two products of one softmax, {what}": f"""
        subgraph main (%x: float32[1,2,4,8], %k: float32[1,2,6,{width}], %v: float32[1,2,6,8]) {{
          {query}
          %l: float32[1,2,4,6] = BATCH_MATMUL(%q, %k) {{adj_y: true}}
          %p: float32[1,2,4,6] = SOFTMAX(%l)
          %w: float32[1,2,4,8] = BATCH_MATMUL(%p, %v)
          %u: float32[1,2,4,8] = BATCH_MATMUL(%p, %v)
          %s: {result} = ADD(%w, %u)
          return %s
        }}"""
        for what, width, query, result in (
            ("a scalar query", 8, "%q: float32[] = SUM(%x, int32{0, 1, 2, 3})", "float32[1,2,4,8]"),
            (
                "no width",
                0,
                "%q: float32[1,2,4,0] = RESHAPE(%x, int32{1, 2, 4, 0})",
                "float32[1,2,4,8]",
            ),
            ("a sum that is no scalar", 8, "%q: float32[1,2,4,8] = NEG(%x)", "float32[]"),
        )
    },
    "a SUM of a scalar, of which TFLite takes any axes": """
    subgraph main (%x: float32[]) { %y: float32[] = SUM(%x, int32{0}) return %y }""",
}


@dataclass(frozen=True)
class Seed:
    """A valid model: its bytes, and its tables to mutate."""

    name: str
    content: bytes
    root: Table | None


def seed(name: str, content: bytes) -> Seed:
    """A seed of that name; its tables are read now."""
    return Seed(name, content, read_model(content))


def handmade() -> list[Seed]:
    """The seeds that the quick tests use: texts, odd tables, variables, and cuts of the bundled models."""
    made = [seed(name, to_bytes(parse(text))) for name, text in _TEXTS.items()]
    texts = [
        path for path in sorted(BUNDLED.glob("reference_*.txt")) if "prefill_sha" not in path.name
    ]
    made += [seed(path.stem, to_bytes(parse(path.read_text()))) for path in texts]
    made.append(seed("everything", pack(everything())))
    made.append(seed("weights behind", with_data_after(everything(), b"weights" * 9, b"more")))
    made.append(seed("options behind", with_options_after(everything(), b"large options")))
    made.append(seed("odd tensors", to_bytes(_odd_tensors())))
    for path in sorted(BUNDLED.glob("*.tflite")):
        made += list(cuts(path))[:1]
    attention = next(seed for seed in made if seed.name == "quantized attention")
    parts = [
        model_part("prefill_decode", attention.content),
        (GENERIC, {"name": "words"}, b"text" * 9),
    ]
    made.append(Seed("bundle", bundle([*parts, model_part("embedder", made[1].content)]), None))
    return made


def cuts(path: Path) -> Iterator[Seed]:
    """The operators around each SOFTMAX of a model, as models of their own; large weights become inputs."""
    for graph in load(path).subgraphs:
        operators = list(graph.operators)
        for position, operator in enumerate(operators):
            if operator.name == "SOFTMAX":
                window = operators[max(0, position - _BEFORE) : position + _BEHIND]
                cut = _cut(graph, [op for op in window if not _is_large(op)])
                yield seed(f"{path.name}: {graph.name} {position}", to_bytes(cut))


def _is_large(operator: Operator) -> bool:
    constants = [tensor for tensor in operator.inputs if tensor is not None and tensor.is_constant]
    sizes = (tensor.dtype.byte_size(tensor.elements) or 0 for tensor in constants)
    return bool(subgraph_indices(operator.options)) or any(
        size > _LARGEST_CONSTANT for size in sizes
    )


def _cut(graph: Subgraph, window: list[Operator]) -> Model:
    inputs = [tensor for tensor in reads(window) if not tensor.is_constant]
    made = [tensor for operator in window for tensor in operator.outputs]
    return cut_out(
        Model(), window, inputs, [one for one in made if read_outside(graph, one, window)]
    )


def _odd_tensors() -> Model:
    """Packed and sparse constants, strings, blockwise and calibration-only parameters, a state, an empty tensor."""
    model = parse("""
        subgraph main (%x: float32[1,4]) {
          variable %state: float32[1,4]
          unset %empty: int32[0]
          %y: float32[1,4] = FULLY_CONNECTED(%x, float32[4,4]{splat 0.0}, none)
          %z: float32[1,4] = FULLY_CONNECTED(%y, float32[4,4]{splat 0.0}, none)
          %s: float32[1,4] = ADD(%z, %state)
          %o: float32[1,4] = CUSTOM 'Mine' (%s, int32{0}, %empty, float16{1, 1, 1, 1})
          return %o
        }
    """)
    (graph,) = model.subgraphs
    (x,), (first, second, _, custom) = graph.inputs, graph.operators
    packed, few, text = first.input(1), second.input(1), custom.input(1)
    blockwise = new_table("BlockwiseQuantization", scales=2, block_size=32)
    ranges = {"min": np.array([-1], np.float32), "max": np.array([1], np.float32)}
    x.quantization = Quantization(new_table("QuantizationParameters", **ranges))
    packed.dtype, packed.buffer = DType.INT4, Buffer(Data(bytes(8)))
    packed.quantization = Quantization(new_table("QuantizationParameters", details=blockwise))
    sizes = [new_table("DimensionMetadata", dense_size=4), new_table("DimensionMetadata", format=1)]
    sparsity = new_table("SparsityParameters", traversal_order=[0, 1], dim_metadata=sizes)
    few.table, few.buffer = new_table("Tensor", sparsity=sparsity), Buffer(Data(bytes(12)))
    text.dtype, text.buffer = DType.STRING, Buffer(Data(b"\1\0\0\0\x0c\0\0\0\x0d\0\0\0a"))
    return model
