"""What tests of the attention passes do with a model: convert it, and run it before and after."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.attention.block import Block
from edge_opt.attention.find import find_blocks
from edge_opt.ir import Constants, Model, Subgraph, to_bytes
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.passes import Context, Verdict, run_pass
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.runtime.native import Session
from edge_opt.targets import Target
from edge_opt.verification.audit import Audit

GIVEN = "%q: float32[1,4,6,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5]"
MERGED = """  %t: float32[1,6,4,5] = TRANSPOSE(%o, int32{0, 2, 1, 3})
  %r: float32[1,6,20] = RESHAPE(%t, int32{1, 6, 20})"""


def attention_text(
    *,
    scores: str = "  %l: float32[1,4,6,8] = BATCH_MATMUL(%q, %k) {adj_y: true}",
    softmax: str = "  %p: float32[1,4,6,8] = SOFTMAX(%l) {beta: 1.0}",
    then: str = "",
    values: str | None = None,
    tail: str = MERGED,
    inputs: str = "",
    returned: str = "%r",
    name: str = "main",
) -> str:
    """Four heads of size 5, six queries, eight keys; values are weighed by %w where `then` makes it, else by %p."""
    weights = "%w" if "%w:" in then else "%p"
    product = f"  %o: float32[1,4,6,5] = BATCH_MATMUL({weights}, %v)" if values is None else values
    lines = "\n".join(line for line in (scores, softmax, then, product, tail) if line)
    return f"subgraph {name} ({GIVEN}{inputs}) {{\n{lines}\n  return {returned}\n}}\n"


def masked_text(mask: str = "%mask", **parts: str) -> str:
    """The same, with a mask added to the logits."""
    softmax = f"""  %m: float32[1,4,6,8] = ADD(%l, {mask})
  %p: float32[1,4,6,8] = SOFTMAX(%m) {{beta: 1.0}}"""
    return attention_text(softmax=softmax, inputs=", %mask: float32[1,1,6,8]", **parts)


def of_one_head(text: str) -> str:
    """The attention with one head instead of four."""
    return text.replace("[1,4,", "[1,1,").replace("[1,6,4,5]", "[1,6,1,5]").replace("20", "5")


TWO_SOFTMAXES = attention_text(
    then="""%l2: float32[1,4,6,8] = BATCH_MATMUL(%q2, %k2) {adj_y: true}
            %p2: float32[1,4,6,8] = SOFTMAX(%l2) {beta: 1.0}
            %s2: float32[1,4,6,8] = MUL(%p2, float32(0.3))
            %w: float32[1,4,6,8] = SUB(%p, %s2)""",
    inputs=", %q2: float32[1,4,6,5], %k2: float32[1,4,8,5]",
)
"""Their difference weighs the values."""


def convert(
    model: Model, form: str, *, rows_per_tile: int | None = None, later: bool = False
) -> list[Verdict]:
    """Split every block of the model by head, and by rows where asked to: in the same go, or `later`.

    The reports are those of the last pass.
    """
    usage = parts_in_use(model)
    reports: list[Verdict] = []
    target = Target(form, form, form=form, rows_per_tile=rows_per_tile)
    audit = Audit(model)
    for key, graph in model.entry_points():
        whole = replace(target, rows_per_tile=None)
        chosen = whole if later else target
        context = Context(model, graph, key, chosen, Constants(model), audit=audit)
        last = run_pass(MhaToSha(), context)
        context.target = target
        reports += run_pass(MhaToSha(), context) if later else last
    remove_unused(model, usage)
    audit.check()
    return reports


def only_block(graph: Subgraph) -> Block:
    """The only attention of a graph, which matches."""
    (match,) = find_blocks(graph)
    assert isinstance(match, Block)
    return match


def random_inputs(model: Model) -> dict[str, NDArray[Any]]:
    """Numbers for every input, over the whole range of integers."""
    rng = np.random.default_rng(1)
    values: dict[str, NDArray[Any]] = {}
    for name, tensor in model.inputs()[0][1].items():
        dtype = tensor.dtype.numpy
        if dtype == np.bool_:
            drawn: NDArray[Any] = rng.random(tensor.shape) < 0.7
        elif np.issubdtype(dtype, np.integer):
            limits = np.iinfo(str(dtype))
            drawn = rng.integers(limits.min, limits.max, tensor.shape, endpoint=True)
        else:
            drawn = rng.normal(size=tensor.shape)
        values[name] = drawn.astype(dtype)
    return values


def assert_same_bits(
    before: bytes, after: Model, kernels: Iterable[Any] = ("xnnpack", "reference")
) -> None:
    """Both models have the same outputs, and give the same bytes for each on random inputs."""
    inputs, content = random_inputs(after), to_bytes(after)
    for each in kernels:
        old, new = (Session(model, each).run(None, inputs) for model in (before, content))
        kinds = [[(k, v.dtype, v.shape) for k, v in results.items()] for results in (old, new)]
        assert kinds[0] == kinds[1]
        for name, expected in old.items():
            assert new[name].tobytes() == expected.tobytes(), (
                name,
                each,
                np.abs(new[name] - expected).max(),
            )
