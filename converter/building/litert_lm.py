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
_PIECE = 32  # tokens of a text for which these seconds are not enough


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
        before = tuple(engine.tokenize(halves[0]))
        scored = tuple(engine.tokenize(halves[1]))
        if 1 + len(before) + len(scored) >= room:
            return None
        try:
            likelihoods = _likelihoods(engine, halves)
        except TimeoutError:
            likelihoods = _in_pieces(engine, halves, before, scored, _PIECE)
        except RuntimeError:  # LiteRT-LM 0.19 scores no more than one token in a session
            likelihoods = _in_pieces(engine, halves, before, scored, 1)
        if engine.bos_token_id is not None:
            before = (engine.bos_token_id, *before)
    except Exception as error:  # LiteRT-LM's
        raise StageFailedError(f"{Path(bundle).name} did not run: {error}") from error
    return Scored(Text(before, scored), likelihoods)


def _likelihoods(engine: Any, halves: Halves) -> list[float | None]:
    """The log-likelihoods of the second half's tokens, in one session; TimeoutError if LiteRT-LM gives up on it."""
    began = time.monotonic()
    try:
        with engine.create_session(apply_prompt_template=False) as session:
            session.run_prefill([halves[0]])
            return [*session.run_text_scoring([halves[1]]).token_scores[0]]
    except RuntimeError as error:
        if time.monotonic() - began < _MOST_SECONDS:
            raise
        raise TimeoutError(
            "scoring a text took ten minutes, LiteRT-LM's limit: end other programs and run the same command again"
        ) from error


def _in_pieces(
    engine: Any, halves: Halves, before: Sequence[int], scored: Sequence[int], length: int
) -> list[float | None]:
    """Score pieces of so many tokens, each in its own session; a piece is None if cutting it out changes tokens."""
    read, text = halves
    whole = [*before, *scored]
    # By the number of scored tokens: the characters of the text that are just these, if it can be cut there.
    cuts: dict[int, int] = {}
    for end in range(len(text) + 1):
        tokens = engine.tokenize(read + text[:end])
        if tokens == whole[: len(tokens)]:
            cuts.setdefault(len(tokens) - len(before), end)
    found: list[float | None] = []
    for place in range(0, len(scored), length):
        piece = scored[place : place + length]
        start = cuts.get(place)
        alone = text[start : cuts.get(place + len(piece))]
        if start is not None and engine.tokenize(alone) == [*piece]:
            found += _likelihoods(engine, (read + text[:start], alone))
        else:
            found += [None] * len(piece)
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
    result = softmax.output
    given = graph.add_tensor(Tensor(f"{logits.name}/float", logits.shape, DType.FLOAT32))
    made = graph.add_tensor(Tensor(f"{result.name}/float", result.shape, DType.FLOAT32))
    return [
        model.new_operator("DEQUANTIZE", [logits], [given]),
        model.new_operator("SOFTMAX", [given], [made], beta=softmax.option("beta")),
        model.new_operator("QUANTIZE", [made], [result]),
    ]
