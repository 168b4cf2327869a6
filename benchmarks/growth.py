"""Measure how time grows with layers: models of 6, 12, 24 and 48 layers, and one of 10,000 operators; none is run.

    python benchmarks/growth.py [--rounds 5] [--json]

The models are decoders with the operators of an exported Gemma3 layer and one small weight that all layers share, so
that bytes take no time. Measured is a conversion without verification, as processor time of this process, the least of
the rounds: read, match, split and infer shapes, write. Hostile graphs (tests/growth_shapes.py) are measured in visits,
the Python calls of a conversion, an inspection and a description of inputs, which are the same on every machine. The
exit status is 1 if a bar is missed: twice the layers take at most 2.1 times as long, 10,000 operators under 5 s, and
twice a hostile graph at most 2.2 times the visits.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

import numpy as np
from growth_shapes import SHAPES, visits

from edge_opt.attention.find import find_blocks
from edge_opt.conversion import convert
from edge_opt.inspection import inspect
from edge_opt.ir import Buffer, Subgraph, load, save, to_bytes
from edge_opt.ir.parse import parse
from edge_opt.passes import PASSES
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.runtime.description import describe
from edge_opt.schema.data import Data

LAYERS = (6, 12, 24, 48)
LARGE = 10_000
MOST_GROWTH = 2.1
MOST_SECONDS = 5.0  # 0.5 s for each 1,000 operators, as in benchmarks/convert.py
HOSTILE = 300
MOST_MORE_VISITS = 2.2

# T = 8, N = 4, K = 1, H = 16, S = 32; 53 operators.
_LAYER = """
  %l{i}_square: float32[1,8,64] = MUL(%l{i}, %l{i})
  %l{i}_mean: float32[1,8,1] = MEAN(%l{i}_square, int32{{2}}) {{keep_dims: true}}
  %l{i}_eps: float32[1,8,1] = ADD(%l{i}_mean, float32(0.000001))
  %l{i}_rsqrt: float32[1,8,1] = RSQRT(%l{i}_eps)
  %l{i}_normed: float32[1,8,64] = MUL(%l{i}, %l{i}_rsqrt)
  %l{i}_q: float32[1,8,64] = FULLY_CONNECTED(%l{i}_normed, %w, none) {{keep_num_dims: true}}
  %l{i}_k: float32[1,8,16] = FULLY_CONNECTED(%l{i}_normed, %wk, none) {{keep_num_dims: true}}
  %l{i}_v: float32[1,8,16] = FULLY_CONNECTED(%l{i}_normed, %wk, none) {{keep_num_dims: true}}
  %l{i}_q4: float32[1,8,4,16] = RESHAPE(%l{i}_q, int32{{1, 8, 4, 16}}) {{new_shape: [1, 8, 4, 16]}}
  %l{i}_k4: float32[1,8,1,16] = RESHAPE(%l{i}_k, int32{{1, 8, 1, 16}}) {{new_shape: [1, 8, 1, 16]}}
  %l{i}_v4: float32[1,8,1,16] = RESHAPE(%l{i}_v, int32{{1, 8, 1, 16}}) {{new_shape: [1, 8, 1, 16]}}
  %l{i}_qc: float32[1,8,4,16] = MUL(%l{i}_q4, %cos)
  %l{i}_q1: float32[1,8,4,8] = SLICE(%l{i}_q4, int32{{0, 0, 0, 0}}, int32{{1, 8, 4, 8}})
  %l{i}_q2: float32[1,8,4,8] = SLICE(%l{i}_q4, int32{{0, 0, 0, 8}}, int32{{1, 8, 4, 8}})
  %l{i}_qn: float32[1,8,4,8] = NEG(%l{i}_q2)
  %l{i}_qr: float32[1,8,4,16] = CONCATENATION(%l{i}_qn, %l{i}_q1) {{axis: 3}}
  %l{i}_qs: float32[1,8,4,16] = MUL(%l{i}_qr, %sin)
  %l{i}_rope: float32[1,8,4,16] = ADD(%l{i}_qc, %l{i}_qs)
  %l{i}_kc: float32[1,8,1,16] = MUL(%l{i}_k4, %cos)
  %l{i}_k1: float32[1,8,1,8] = SLICE(%l{i}_k4, int32{{0, 0, 0, 0}}, int32{{1, 8, 1, 8}})
  %l{i}_k2: float32[1,8,1,8] = SLICE(%l{i}_k4, int32{{0, 0, 0, 8}}, int32{{1, 8, 1, 8}})
  %l{i}_kn: float32[1,8,1,8] = NEG(%l{i}_k2)
  %l{i}_kr: float32[1,8,1,16] = CONCATENATION(%l{i}_kn, %l{i}_k1) {{axis: 3}}
  %l{i}_ks: float32[1,8,1,16] = MUL(%l{i}_kr, %sin)
  %l{i}_krope: float32[1,8,1,16] = ADD(%l{i}_kc, %l{i}_ks)
  %l{i}_kslice: float32[1,1,8,16] = RESHAPE(%l{i}_krope, int32{{1, 1, 8, 16}}) {{new_shape: [1, 1, 8, 16]}}
  %l{i}_vslice: float32[1,1,16,8] = TRANSPOSE(%l{i}_v4, int32{{0, 2, 3, 1}})
  %l{i}_scaled: float32[1,8,4,16] = MUL(%l{i}_rope, float32(0.25))
  %l{i}_turned: float32[1,4,8,16] = TRANSPOSE(%l{i}_scaled, int32{{0, 2, 1, 3}})
  %l{i}_rows: float32[1,1,32,16] = RESHAPE(%l{i}_turned, int32{{1, 1, 32, 16}}) {{new_shape: [1, 1, 32, 16]}}
  %l{i}_cached: float32[1,1,32,32] = BATCH_MATMUL(%l{i}_rows, %kcache) {{adj_y: true}}
  %l{i}_fresh: float32[1,1,32,8] = BATCH_MATMUL(%l{i}_rows, %l{i}_kslice) {{adj_y: true}}
  %l{i}_logits: float32[1,1,32,40] = CONCATENATION(%l{i}_cached, %l{i}_fresh) {{axis: 3}}
  %l{i}_apart: float32[1,4,8,40] = RESHAPE(%l{i}_logits, int32{{1, 4, 8, 40}}) {{new_shape: [1, 4, 8, 40]}}
  %l{i}_masked: float32[1,4,8,40] = ADD(%l{i}_apart, %mask)
  %l{i}_joined: float32[1,1,32,40] = RESHAPE(%l{i}_masked, int32{{1, 1, 32, 40}}) {{new_shape: [1, 1, 32, 40]}}
  %l{i}_softmax: float32[1,1,32,40] = SOFTMAX(%l{i}_joined) {{beta: 1.0}}
  %l{i}_p1: float32[1,1,32,32] = SLICE(%l{i}_softmax, int32{{0, 0, 0, 0}}, int32{{1, 1, 32, 32}})
  %l{i}_p2: float32[1,1,32,8] = SLICE(%l{i}_softmax, int32{{0, 0, 0, 32}}, int32{{1, 1, 32, 8}})
  %l{i}_o1: float32[1,1,32,16] = BATCH_MATMUL(%l{i}_p1, %vcache) {{adj_y: true}}
  %l{i}_o2: float32[1,1,32,16] = BATCH_MATMUL(%l{i}_p2, %l{i}_vslice) {{adj_y: true}}
  %l{i}_o: float32[1,1,32,16] = ADD(%l{i}_o1, %l{i}_o2)
  %l{i}_heads: float32[1,4,8,16] = RESHAPE(%l{i}_o, int32{{1, 4, 8, 16}}) {{new_shape: [1, 4, 8, 16]}}
  %l{i}_back: float32[1,8,4,16] = TRANSPOSE(%l{i}_heads, int32{{0, 2, 1, 3}})
  %l{i}_merged: float32[1,8,64] = RESHAPE(%l{i}_back, int32{{1, 8, 64}}) {{new_shape: [1, 8, 64]}}
  %l{i}_projected: float32[1,8,64] = FULLY_CONNECTED(%l{i}_merged, %w, none) {{keep_num_dims: true}}
  %l{i}_residual: float32[1,8,64] = ADD(%l{i}, %l{i}_projected)
  %l{i}_gate: float32[1,8,64] = FULLY_CONNECTED(%l{i}_residual, %w, none) {{keep_num_dims: true}}
  %l{i}_gelu: float32[1,8,64] = GELU(%l{i}_gate)
  %l{i}_up: float32[1,8,64] = FULLY_CONNECTED(%l{i}_residual, %w, none) {{keep_num_dims: true}}
  %l{i}_gated: float32[1,8,64] = MUL(%l{i}_gelu, %l{i}_up)
  %l{i}_down: float32[1,8,64] = FULLY_CONNECTED(%l{i}_gated, %w, none) {{keep_num_dims: true}}
  %l{next}: float32[1,8,64] = ADD(%l{i}_residual, %l{i}_down)
"""
_INPUTS = {
    "l0": "[1,8,64]",
    "kcache": "[1,1,32,16]",
    "vcache": "[1,1,16,32]",
    "mask": "[1,1,8,40]",
    "cos": "[1,8,1,16]",
    "sin": "[1,8,1,16]",
}
_WEIGHTS = {"w": "[64,64]", "wk": "[16,64]"}


@dataclass(frozen=True)
class Measured:
    """Processor seconds of each step, the least of the rounds; `operators` before the conversion."""

    layers: int
    operators: int
    read: float
    match: float
    convert: float

    @property
    def rewriting(self) -> float:
        """A conversion less the reading that it begins with."""
        return self.convert - self.read


def written(folder: Path, layers: int) -> Path:
    """The model of that many layers; every one gives its new keys and values to the caller."""
    inputs = ", ".join(
        f"%{name}: float32{shape}" for name, shape in {**_INPUTS, **_WEIGHTS}.items()
    )
    body = "".join(_LAYER.format(i=i, next=i + 1) for i in range(layers))
    slices = ", ".join(f"%l{i}_{name}" for i in range(layers) for name in ("kslice", "vslice"))
    path = folder / f"{layers}.tflite"
    model = parse(f"subgraph prefill_8 ({inputs}) {{{body}return %l{layers}, {slices} }}")
    _store_weights(model.subgraphs[0])
    save(model, path)
    return path


def _store_weights(graph: Subgraph) -> None:
    """Make constants of the weights that the text has as inputs, where one name serves all layers."""
    for tensor in list(graph.inputs):
        if tensor.name in _WEIGHTS:
            graph.inputs.remove(tensor)
            tensor.buffer = Buffer(Data(np.ones(tensor.shape, np.float32).tobytes()))


def measured(path: Path, layers: int, rounds: int) -> Measured:
    """The least processor time of each step."""
    output = path.with_suffix(".opt.tflite")

    def converted() -> None:
        others = [name for name in PASSES if name != "mha_to_sha"]
        result = convert(path, output, verify="none", skip=others, overwrite=True)
        blocks = sum(site.pass_name == MhaToSha.name for site in result.converted)
        assert blocks == layers, f"{blocks} of {layers} blocks converted"

    graph = load(path).subgraphs[0]
    return Measured(
        layers=layers,
        operators=len(graph),
        read=min(_seconds(lambda: load(path)) for _ in range(rounds)),
        match=min(_seconds(lambda: list(find_blocks(graph))) for _ in range(rounds)),
        convert=min(_seconds(converted) for _ in range(rounds)),
    )


def _seconds(work: object) -> float:
    assert callable(work)
    gc.collect()  # what the round before left behind is not this one's work
    started = time.process_time()
    work()
    return time.process_time() - started


def more_visits(shape: str) -> float:
    """How many times the visits of a hostile graph a graph of twice its size takes."""

    def work(content: bytes) -> None:
        convert(content, verify="none", dry_run=True)
        inspect(content, target="qualcomm-htp")
        describe(load(content))

    small, large = (to_bytes(parse(SHAPES[shape](count))) for count in (HOSTILE, 2 * HOSTILE))
    return visits(lambda: work(large)) / visits(lambda: work(small))


def report(found: list[Measured]) -> str:
    """One line a model; growth is against the line before, where the layers doubled."""
    lines = [f"{'layers':>6} {'operators':>9} {'read':>8} {'match':>8} {'convert':>8}  growth"]
    for before, now in pairwise([found[0], *found]):
        growth = f"{now.convert / before.convert:.2f}" if now.layers == 2 * before.layers else ""
        lines.append(
            f"{now.layers:>6} {now.operators:>9} {now.read:>6.3f} s {now.match:>6.3f} s {now.convert:>6.3f} s  {growth}"
        )
    return "\n".join(lines)


def main() -> int:
    """Measure, print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        sizes = (*LAYERS, -(-LARGE // _LAYER.count(" = ")))
        paths = [(written(Path(folder), layers), layers) for layers in sizes]
        found = [measured(path, layers, options.rounds) for path, layers in paths]
    grown = max(after.convert / before.convert for before, after in pairwise(found[: len(LAYERS)]))
    hostile = {shape: more_visits(shape) for shape in SHAPES}
    within = grown <= MOST_GROWTH and found[-1].convert <= MOST_SECONDS
    within = within and max(hostile.values()) <= MOST_MORE_VISITS
    if options.json:
        print(
            json.dumps(
                {
                    "models": [asdict(each) for each in found],
                    "growth": grown,
                    "hostile": hostile,
                    "within": within,
                }
            )
        )
    else:
        print(report(found))
        print(f"twice the layers: at most {grown:.2f} times as long (bar: {MOST_GROWTH})")
        for shape, growth in hostile.items():
            print(f"twice the {shape}: {growth:.2f} times the visits (bar: {MOST_MORE_VISITS})")
        print(f"{found[-1].operators} operators: {found[-1].convert:.2f} s (bar: {MOST_SECONDS} s)")
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
