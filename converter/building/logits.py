"""Stores the weights of the logits in 4 bits, and those of frequent tokens in 8.

The product of the logits reads `[vocabulary, hidden]` weights for each generated token, most of what a decode step of a
small model reads. It is cut by rows, which is exact, and the weights of the second part are rounded to 4 bits:

    x [1,1,hidden] -> FULLY_CONNECTED int8 [kept,hidden]         -> [1,1,kept]
                   -> FULLY_CONNECTED int4 [vocabulary-kept,...] -> [1,1,the rest] -> CONCATENATION of both -> logits

Tokenizers number frequent tokens first.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress
from edge_opt.building.checkpoint import load
from edge_opt.building.gptq import ROWS_AT_ONCE, Floats, Grid, Rounder
from edge_opt.building.prompts import read_prompts, wording_of
from edge_opt.building.rotation import NORM, orthogonal
from edge_opt.ir import Buffer, DType, Model, Operator, Quantization, Tensor
from edge_opt.schema import Data, new_table

KEPT_ROWS = 16_384
"""Rows that stay at 8 bits, those of the most frequent tokens."""
_LONGEST = 4096  # tokens read of a prompt
_LEAST_TOKENS = 4000
"""With no rows at 8 bits, Gemma 3 270M's perplexity rises by 6.9 % with 4,800 tokens, by 4.9 % with 18,000."""


def moments_of(checkpoint: Path, prompts: Path, progress: Progress, *, rotated: bool) -> Floats:
    """The sum of `x x'`, `[hidden, hidden]`, over inputs x of the checkpoint's logits product on the prompts.

    If `rotated`, of the product in the checkpoint as `rotation.prepare` writes it: inputs x become x Q, with ones as
    the final norm's weights.
    """
    import torch

    wording = wording_of(checkpoint)
    texts = [wording.tokenizer.tokenize(wording.text(prompt)) for prompt in read_prompts(prompts)]
    tokens = sum(map(len, texts))
    if tokens < _LEAST_TOKENS:
        raise UsageError(
            f"the prompts have {tokens} tokens, and 4-bit logits need {_LEAST_TOKENS}: give "
            f"{_LEAST_TOKENS - tokens} more, or weights='8'"
        )
    model = load(checkpoint).model
    if rotated:
        norm = model.get_submodule(NORM.removesuffix(".weight"))
        norm.weight = torch.nn.Parameter(torch.ones(norm.weight.shape))
    total: Any = 0
    for done, text in enumerate(texts):
        progress("reading", done, len(texts))
        with torch.no_grad():
            inputs = model.base_model(torch.tensor([text[:_LONGEST]])).last_hidden_state[0].double()
        total = total + inputs.T @ inputs
    if rotated:
        turn = torch.tensor(orthogonal(model.config.hidden_size))
        total = turn.T @ total @ turn
    return np.asarray(total.numpy(), np.float32)


def narrow_logits(model: Model, moments: Floats, progress: Progress) -> str:
    """Cut the int8 product of every signature's logits behind `KEPT_ROWS` and round the later rows to 4 bits, in place.

    With no more rows, nothing changes.

    `moments` `[hidden, hidden]` is the sum of `x x'` over inputs x of the product, from text typical of real use.

    Returns:
        A note for the user.

    Raises:
        UsageError: the model has no such product.
    """
    found = [_logits_product(signature.outputs) for signature in model.signatures]
    products = dict.fromkeys(filter(None, found))
    if not products:
        raise UsageError("4-bit logits need int8 weights without a bias: use weights='8'")
    parts: dict[int, list[Tensor]] = {}  # by the weights' bytes, which signatures share
    for product in products:
        weights = product.input(1)
        rows, hidden = weights.shape
        if rows <= KEPT_ROWS:
            return f"Weights of the logits are in 8 bits, as those of the first {KEPT_ROWS} tokens always are"
        assert moments.shape == (hidden, hidden)
        key = id(weights.buffer)
        if key not in parts:
            parts[key] = _parts(weights, moments, progress)
        _cut(model, product, parts[key])
    return f"Weights of the logits are in 4 bits, those of the first {KEPT_ROWS} tokens in 8"


def _logits_product(outputs: dict[str, Tensor]) -> Operator | None:
    """The nearest FULLY_CONNECTED above the logits, if its weights are int8 constants and it has no bias."""
    tensor = outputs.get("logits")
    while tensor is not None and tensor.producer is not None:
        operator = tensor.producer
        if operator.name == "FULLY_CONNECTED":
            weights = operator.input(1)
            is_int8 = weights.is_constant and weights.dtype is DType.INT8
            return operator if is_int8 and not any(operator.inputs[2:]) else None
        above = operator.computed
        tensor = above[0] if len(above) == 1 else None
    return None


def _parts(weights: Tensor, moments: Floats, progress: Progress) -> list[Tensor]:
    """The weights as two constants: the first `KEPT_ROWS` unchanged, the others in 4 bits."""
    codes = np.asarray(weights.array(), np.int8)
    scales = row_scales(weights)
    frequent = constant(f"{weights.name}/frequent", codes[:KEPT_ROWS], scales[:KEPT_ROWS])
    rounder = Rounder(moments)
    grids = []
    for start in range(KEPT_ROWS, len(codes), ROWS_AT_ONCE):
        progress("narrowing", start - KEPT_ROWS, len(codes) - KEPT_ROWS)
        rows = slice(start, start + ROWS_AT_ONCE)
        grids.append(rounder.rounded(codes[rows].astype(np.float32) * scales[rows, None]))
    return [frequent, four_bits(f"{weights.name}/rest", Grid.joined(grids))]


def four_bits(name: str, grid: Grid) -> Tensor:
    """A constant of 4-bit codes, two in a byte, the first in the lower half; an odd count is padded with any code."""
    pairs = np.resize(grid.codes, (grid.codes.size + 1) // 2 * 2).reshape(-1, 2)
    packed = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    buffer = Buffer(Data(packed.tobytes()))
    return Tensor(
        name, grid.codes.shape, DType.INT4, quantization=by_row(grid.scales), buffer=buffer
    )


def constant(name: str, codes: NDArray[Any], scales: Floats) -> Tensor:
    """A constant of whole numbers, with one scale for each row."""
    dtype = DType[codes.dtype.name.upper()]
    buffer = Buffer(Data(codes.tobytes()))
    return Tensor(name, codes.shape, dtype, quantization=by_row(scales), buffer=buffer)


def row_scales(constant: Tensor) -> Floats:
    """The scale of each row of a quantized constant `[rows, ..]`, which may be the same for all."""
    assert constant.quantization is not None
    return np.broadcast_to(constant.quantization.scale, constant.shape[0]).astype(np.float32)


def by_row(scales: Floats) -> Quantization:
    """Symmetric parameters with one scale for each row."""
    zeros = np.zeros(len(scales), np.int64)
    table = new_table(
        "QuantizationParameters", scale=scales, zero_point=zeros, quantized_dimension=0
    )
    return Quantization(table)


def _cut(model: Model, product: Operator, parts: Sequence[Tensor]) -> None:
    """Replace a product by one for each part, and a CONCATENATION."""
    graph = product.subgraph
    whole = product.output
    assert graph is not None
    new: list[Operator] = []
    for part in parts:
        if not graph.lists(part):  # already there if products in one graph share weights
            graph.add_tensor(part)
        rows = part.shape[0]
        shape = (*whole.shape[:-1], rows)
        name = f"{whole.name}/{rows}"
        output = Tensor(name, shape, whole.dtype, quantization=whole.quantization)
        inputs = [product.input(0), part, *product.inputs[2:]]
        outputs = [graph.add_tensor(output)]
        new.append(Operator(product.code, inputs, outputs, product.options))
    joined = [operator.output for operator in new]
    new.append(model.new_operator("CONCATENATION", joined, [whole], axis=len(whole.shape) - 1))
    graph.replace([product], dict.fromkeys(new, graph.after(product)))
