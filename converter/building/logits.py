"""Stores the weights of the logits in 4 bits, and those of frequent tokens in 8.

The product of the logits reads `[vocabulary, hidden]` weights for each generated token, most of what a decode step of a
small model reads. It is cut by rows, which is exact, and the weights of the second part are rounded to 4 bits:

    x [1,1,hidden] -> FULLY_CONNECTED int8 [kept,hidden]         -> [1,1,kept]
                   -> FULLY_CONNECTED int4 [vocabulary-kept,...] -> [1,1,the rest] -> CONCATENATION of both -> logits

Tokenizers number frequent tokens first. The rounding is GPTQ's (Frantar et al. 2022, https://arxiv.org/abs/2210.17323):
column by column; later columns compensate for each column's error, based on the inputs' second moments.
"""

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress
from edge_opt.building.prompts import read_prompts, wording_of
from edge_opt.building.rotation import NORM, orthogonal
from edge_opt.building.stages import Job
from edge_opt.ir import Buffer, DType, Model, Operator, Quantization, Tensor
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.opening import Opened
from edge_opt.schema import Data, new_table

KEPT_ROWS = 16_384
"""Rows that stay at 8 bits, those of the most frequent tokens."""
_TOP = 7
_SCALES = np.linspace(0.4, 1, 16, dtype=np.float32)
_ROWS, _COLUMNS = 8192, 128  # block sizes that fit a core's cache
_DAMPING = 0.01
_LONGEST = 4096  # tokens read of a prompt
_LEAST_TOKENS = 4000
"""With no rows at 8 bits, Gemma 3 270M's perplexity rises by 6.9 % with 4,800 tokens, by 4.9 % with 18,000."""

Floats = NDArray[np.float32]
Codes = NDArray[np.int8]


def narrow(job: Job, progress: Progress) -> dict[str, Any]:
    """Run the stage: round the weights of a quantized bundle's logits to 4 bits, for the inputs on the prompts."""
    checkpoint, prompts = Path(job.inputs["checkpoint"]), Path(job.inputs["prompts"])
    moments = moments_of(checkpoint, prompts, progress, rotated=job.options["rotated"])
    opened = Opened(job.inputs["model"])
    part = opened.main()
    usage = parts_in_use(part.model)
    narrow_logits(part.model, moments, progress)
    remove_unused(part.model, usage)
    part.changed = True
    opened.save(job.model)
    return {"notes": [f"Weights of the logits are in 4 bits, those of the first {KEPT_ROWS} tokens in 8"]}


def moments_of(checkpoint: Path, prompts: Path, progress: Progress, *, rotated: bool) -> Floats:
    """The sum of `x x'` over inputs x of the checkpoint's logits product on the prompts.

    If `rotated`, of the product in the checkpoint as `rotation.prepare` writes it: inputs x become x Q, with ones as
    the final norm's weights.
    """
    torch, transformers = importlib.import_module("torch"), importlib.import_module("transformers")
    wording = wording_of(checkpoint)
    texts = [wording.tokenizer.tokenize(wording.text(prompt)) for prompt in read_prompts(prompts)]
    tokens = sum(map(len, texts))
    if tokens < _LEAST_TOKENS:
        raise UsageError(
            f"the prompts have {tokens} tokens, and 4-bit logits need {_LEAST_TOKENS}: give "
            f"{_LEAST_TOKENS - tokens} more, or weights='8'"
        )
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    if rotated:
        model.get_parameter(NORM).data.fill_(1)
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


def narrow_logits(model: Model, moments: Floats, progress: Progress, kept: int = KEPT_ROWS) -> None:
    """Cut the int8 product of every signature's logits after row `kept` and round the later rows to 4 bits, in place.

    `moments` `[hidden, hidden]` is the sum of `x x'` over inputs x of the product, from text typical of real use.

    Raises:
        UsageError: the model has no such product, or at most `kept` rows.
    """
    products = (_product(signature.outputs) for signature in model.signatures)
    found = dict.fromkeys(product for product in products if product is not None)
    if not found:
        raise UsageError("4-bit logits need int8 weights without a bias: use weights='8'")
    narrowed: dict[int, list[Tensor]] = {}
    for product in found:
        weights = product.input(1)
        rows, hidden = weights.shape
        if rows <= kept:
            raise UsageError(
                f"all {rows} tokens would stay at 8 bits, as the first {kept} do: use weights='8'"
            )
        assert moments.shape == (hidden, hidden)
        key = id(weights.buffer)
        if key not in narrowed:
            narrowed[key] = _parts(weights, moments, kept, progress)
        _cut(model, product, narrowed[key])


def _product(outputs: dict[str, Tensor]) -> Operator | None:
    """The nearest FULLY_CONNECTED above the logits, if its weights are int8 constants and it has no bias."""
    tensor = outputs.get("logits")
    while tensor is not None and (operator := tensor.producer) is not None:
        if operator.name == "FULLY_CONNECTED":
            weights, bias = operator.input(1), operator.inputs[2:]
            fits = weights.is_constant and weights.dtype is DType.INT8 and not any(bias)
            return operator if fits else None
        above = [one for one in operator.inputs if one is not None and not one.is_constant]
        tensor = above[0] if len(above) == 1 else None
    return None


def _parts(weights: Tensor, moments: Floats, kept: int, progress: Progress) -> list[Tensor]:
    """The weights as two constants: the first `kept` rows unchanged, the others in 4 bits."""
    quantization, codes = weights.quantization, np.asarray(weights.array(), np.int8)
    assert quantization is not None
    scale = np.broadcast_to(quantization.scale, len(codes)).astype(np.float32)
    narrow, scales = gptq(codes[kept:], scale[kept:], moments, progress)
    pairs = np.resize(narrow, (narrow.size + 1) // 2 * 2).reshape(-1, 2)
    packed = (pairs[:, 0] & 15) | (pairs[:, 1] << 4)
    return [
        _constant(f"{weights.name}/frequent", codes[:kept], DType.INT8, scale[:kept], codes[:kept]),
        _constant(f"{weights.name}/rest", narrow, DType.INT4, scales, packed),
    ]


def _constant(name: str, codes: Codes, dtype: DType, scales: Floats, stored: Codes) -> Tensor:
    zeros = np.zeros(len(scales), np.int64)
    table = new_table("QuantizationParameters", scale=scales, zero_point=zeros, quantized_dimension=0)
    data = Data(stored.tobytes())
    return Tensor(name, codes.shape, dtype, quantization=Quantization(table), buffer=Buffer(data))


def _cut(model: Model, product: Operator, parts: Sequence[Tensor]) -> None:
    """Replace a product by one for each part, and a CONCATENATION."""
    graph, whole = product.subgraph, product.output
    assert graph is not None
    new, joined = [], []
    for part in parts:
        if not graph.lists(part):  # already there if products in one graph share weights
            graph.add_tensor(part)
        shape = (*whole.shape[:-1], part.shape[0])
        output = Tensor(f"{whole.name}/{part.shape[0]}", shape, whole.dtype, quantization=whole.quantization)
        joined.append(graph.add_tensor(output))
        new.append(
            Operator(product.code, [product.input(0), part, *product.inputs[2:]], [output], product.options)
        )
    new.append(model.new_operator("CONCATENATION", joined, [whole], axis=len(whole.shape) - 1))
    operators = list(graph)
    at = operators.index(product)
    graph.arrange([*operators[:at], *new, *operators[at + 1 :]])


def gptq(codes: Codes, scale: Floats, moments: Floats, progress: Progress) -> tuple[Codes, Floats]:
    """Round weights `codes * scale` `[rows, columns]` to 4 bits: codes from -7 to 7, and a scale for each row.

    A row's scale is the one of 16 candidates with the least squared error before compensation.
    """
    count = codes.shape[1]
    order = np.argsort(-np.diag(moments), kind="stable")
    hessian = moments[np.ix_(order, order)].astype(np.float64)
    hessian += np.eye(count) * (_DAMPING * np.diag(hessian).mean())
    # Row k tells how later columns compensate for an error in column k.
    upper = np.linalg.cholesky(np.linalg.inv(hessian)).T.astype(np.float32)
    narrow, scales = np.empty_like(codes), np.empty(len(codes), np.float32)
    for start in range(0, len(codes), _ROWS):
        progress("narrowing", start, len(codes))
        rows = slice(start, start + _ROWS)
        weights = codes[rows].astype(np.float32) * scale[rows, None]
        scales[rows] = _least_error(weights)
        narrow[rows, order] = _rounded(weights[:, order], scales[rows, None], upper)
    return narrow, scales


def _nearest(weights: Floats, scale: Floats) -> Floats:
    codes: Floats = np.clip(np.rint(weights / scale), -_TOP, _TOP)
    return codes


def _least_error(weights: Floats) -> Floats:
    most: Floats = np.maximum(np.abs(weights).max(axis=1), np.float32(1e-9)) / np.float32(_TOP)
    scales = [(most * part)[:, None] for part in _SCALES]
    errors = [np.square(_nearest(weights, one) * one - weights).sum(axis=1) for one in scales]
    best: Floats = np.choose(np.argmin(errors, axis=0), np.hstack(scales).T)
    return best


def _rounded(left: Floats, scale: Floats, upper: Floats) -> Floats:
    """The codes of all columns; overwrites `left`."""
    codes = np.empty_like(left)
    for start in range(0, left.shape[1], _COLUMNS):
        block = np.ascontiguousarray(left[:, start : start + _COLUMNS])
        stop = start + block.shape[1]
        errors = np.empty_like(block)
        for column in range(block.shape[1]):
            now, at = block[:, column], start + column
            codes[:, at] = _nearest(now, scale[:, 0])
            errors[:, column] = (now - codes[:, at] * scale[:, 0]) / upper[at, at]
            block[:, column + 1 :] -= errors[:, column, None] * upper[at, at + 1 : stop]
        left[:, stop:] -= errors @ upper[start:stop, stop:]
    return codes
