"""Scores text with a bundle in LiteRT-LM's executor for NPUs, on CPU kernels. The only module that knows LiteRT-LM."""

import tempfile
import time
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base.atomic import AnyPath
from edge_opt.building.held_out import Halves
from edge_opt.building.stages import StageFailedError
from edge_opt.ir import DType, Model, Operator, Subgraph, Tensor
from edge_opt.ir.opening import Opened
from edge_opt.npu.scoring import Text

_MOST_SECONDS = 600  # that LiteRT-LM lets a session score one text


@lru_cache(maxsize=1)
def _loaded(bundle: str) -> tuple[Any, int]:
    """LiteRT-LM's NPU executor on CPU kernels, with SOFTMAX in float, see `float_softmax`; and the cache's length."""
    import litert_lm as lm

    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, Path(bundle).name)
        float_softmax(bundle, copy)
        engine = lm.Engine(str(copy), backend=lm.Backend.NPU(litert_dispatch_lib_dir=""))
    return engine, lm.ModelInfo(bundle).max_context_tokens


class Scored(NamedTuple):
    """A prompt as a bundle's tokens, and the log-likelihoods of those scored; None for one that cannot be."""

    text: Text
    likelihoods: list[float | None]


def score_text(bundle: str, halves: Halves) -> Scored | None:
    """Score the second half after the first; None if they do not fit into the cache.

    A process keeps the last bundle loaded.
    """
    try:
        engine, room = _loaded(bundle)
        # `tokenize` omits the BOS token.
        before, scored = (tuple(engine.tokenize(text)) for text in halves)
        if 1 + len(before) + len(scored) >= room:
            return None
        began = time.monotonic()
        try:
            likelihoods = _likelihoods(engine, halves)
        except RuntimeError as error:  # LiteRT-LM 0.19 scores no more than one token in a session
            if time.monotonic() - began >= _MOST_SECONDS:
                raise TimeoutError(
                    f"scoring {len(scored)} tokens after {len(before)} took ten minutes, LiteRT-LM's limit: end other "
                    f"programs and run the same command again, or give shorter held-out texts"
                ) from error
            likelihoods = _one_by_one(engine, halves, before, scored)
        if engine.bos_token_id is not None:
            before = (engine.bos_token_id, *before)
    except Exception as error:  # LiteRT-LM's
        raise StageFailedError(f"{Path(bundle).name} did not run: {error}") from error
    return Scored(Text(before, scored), likelihoods)


def _likelihoods(engine: Any, halves: Halves) -> list[float | None]:
    """The log-likelihoods of the second half's tokens, in one session."""
    with engine.create_session(apply_prompt_template=False) as session:
        session.run_prefill([halves[0]])
        return [*session.run_text_scoring([halves[1]]).token_scores[0]]


def _one_by_one(
    engine: Any, halves: Halves, before: Sequence[int], scored: Sequence[int]
) -> list[float | None]:
    """Score each token in a session of its own; None where the text cannot be cut around it without changing tokens."""
    read, text = halves
    whole = [*before, *scored]
    ends: dict[int, int] = {}
    for end in range(len(text) + 1):
        tokens = engine.tokenize(read + text[:end])
        if tokens == whole[: len(tokens)]:
            ends.setdefault(len(tokens) - len(before), end)
    found: list[float | None] = []
    for place, token in enumerate(scored):
        start = ends.get(place)
        alone = text[start : ends.get(place + 1)]
        if start is not None and engine.tokenize(alone) == [token]:
            found += _likelihoods(engine, (read + text[:start], alone))
        else:
            found.append(None)
    return found


def float_softmax(bundle: AnyPath, output: AnyPath) -> None:
    """Write a copy of a bundle in which each SOFTMAX is DEQUANTIZE, SOFTMAX and QUANTIZE.

    LiteRT's int16 SOFTMAX gives each masked key 1/32768, about 3 % of the attention in SmolLM2-135M with a cache of
    1280; Qualcomm's emulator gives 0, see docs/research/faults.md.
    """
    opened = Opened(bundle)
    part = opened.main()
    for graph in part.model.subgraphs:
        operators: list[Operator] = []
        for operator in graph.operators:
            if operator.name == "SOFTMAX" and operator.input(0).dtype is not DType.FLOAT32:
                operators += _in_float(part.model, graph, operator)
            else:
                operators.append(operator)
        graph.arrange(operators)
    part.changed = True
    opened.save(output)


def _in_float(model: Model, graph: Subgraph, softmax: Operator) -> list[Operator]:
    """A SOFTMAX in float, between DEQUANTIZE and QUANTIZE; their tensors are added to the graph."""
    logits = softmax.input(0)
    given, made = (
        graph.add_tensor(Tensor(f"{one.name}/float", one.shape, DType.FLOAT32))
        for one in (logits, softmax.output)
    )
    return [
        model.new_operator("DEQUANTIZE", [logits], [given]),
        model.new_operator("SOFTMAX", [given], [made], beta=softmax.option("beta")),
        model.new_operator("QUANTIZE", [made], [softmax.output]),
    ]
