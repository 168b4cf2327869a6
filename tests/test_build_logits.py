"""Logits whose weights are in 4 bits: the frequent rows are what they were, and the others as near as 4 bits allow."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from cli_runs import Patch

from edge_opt.base.errors import UsageError
from edge_opt.building import logits as logits_module
from edge_opt.building.gptq import Moments, Rounder
from edge_opt.building.logits import moments_of, narrow_logits
from edge_opt.building.rotation import prepare
from edge_opt.ir import Model, to_bytes
from edge_opt.ir.parse import parse

HIDDEN, ROWS, KEPT = 33, 97, 40
RNG = np.random.default_rng(5)
MIX = RNG.standard_normal((HIDDEN, HIDDEN)) * (0.1 + 3 * RNG.random(HIDDEN))
INPUTS = (RNG.standard_normal((500, HIDDEN)) @ MIX).astype(np.float32)
MOMENTS = INPUTS.T @ INPUTS
CODES = np.clip(RNG.normal(0, 40, (ROWS, HIDDEN)), -127, 127).round().astype(np.int8)
SCALES = np.full(ROWS, 0.01, np.float32)


def model(tail: str = "%logits: int16[1,1,97] q(0.05, 0) = RESHAPE(%y, int32{1, 1, 97})") -> Model:
    """One product with int8 weights in front of the logits, and one operator between."""
    codes, scales = ", ".join(map(str, CODES.ravel())), ", ".join(map(str, SCALES))
    return parse(
        "signature decode = #0 (x=%x) -> (logits=%logits)\n"
        f"subgraph decode (%x: int16[1,1,{HIDDEN}] q(0.001, 0)) {{\n"
        f"  %y: int16[1,1,{ROWS}] q(0.05, 0) = FULLY_CONNECTED(%x, int8[{ROWS},{HIDDEN}]{{{codes}}} "
        f"q([{scales}], [{', '.join('0' * ROWS)}], axis 0), none) {{keep_num_dims: true}}\n"
        f"  {tail}\n  return %logits\n}}"
    )


def logits(found: Model, codes: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    plain = OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES
    runner = Interpreter(model_content=to_bytes(found), experimental_op_resolver_type=plain)
    return np.asarray(runner.get_signature_runner("decode")(x=codes)["logits"], np.float64)[0, 0]


def test_moments_are_summed_over_texts_on_both_sides_of_the_diagonal() -> None:
    moments = Moments()
    for text in (INPUTS[:200], INPUTS[200:]):
        moments.add(text)
    assert np.allclose(moments.whole(), MOMENTS, rtol=1e-4, atol=1e-2 * np.abs(MOMENTS).mean())


def test_frequent_rows_give_the_same_numbers_and_the_others_near_ones(monkeypatch: Patch) -> None:
    old, new = model(), model()
    monkeypatch.setattr(logits_module, "KEPT_ROWS", KEPT)
    narrow_logits(new, MOMENTS, print)
    names = [operator.name for operator in new.subgraphs[0]]
    assert names == ["FULLY_CONNECTED", "FULLY_CONNECTED", "CONCATENATION", "RESHAPE"]
    kinds = [(op.input(1).shape, op.input(1).dtype.name) for op in list(new.subgraphs[0])[:2]]
    assert kinds == [((KEPT, HIDDEN), "INT8"), ((ROWS - KEPT, HIDDEN), "INT4")]
    for x in (INPUTS[:8] * 300).clip(-32767, 32767).astype(np.int16):
        before, after = logits(old, x[None, None]), logits(new, x[None, None])
        assert (before[:KEPT] == after[:KEPT]).all()
        error = np.abs(before - after)[KEPT:]
        assert 0 < error.mean() < 0.15 * np.abs(before).mean(), "runtime and rounding differ"


def test_an_error_is_made_up_for_by_the_columns_that_follow() -> None:
    """Against nearest codes of the same scales, in the numbers that the product gives."""
    weights = CODES * SCALES[:, None]
    grid = Rounder(MOMENTS).rounded(weights)
    narrow, scales = grid.codes, grid.scales
    assert (narrow.min(), narrow.max()) == (-8, 7)
    nearest = np.clip(np.rint(weights / scales[:, None]), -8, 7)
    wanted = INPUTS @ weights.T
    errors = [
        np.square(INPUTS @ (one * scales[:, None]).T - wanted).sum() for one in (narrow, nearest)
    ]
    assert errors[0] < 0.6 * errors[1]


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (
            model("%logits: int16[1,1,97] q(0.05, 0) = ADD(%y, %y)"),
            "4-bit logits need int8 weights",
        ),
    ],
)
def test_what_cannot_be_narrowed_is_refused(found: Model, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        narrow_logits(found, MOMENTS, print)


def test_a_small_vocabulary_stays_at_8_bits_with_a_note(monkeypatch: Patch) -> None:
    found = model()
    monkeypatch.setattr(logits_module, "KEPT_ROWS", ROWS)
    note = narrow_logits(found, MOMENTS, print)
    assert note == "Weights of the logits are in 8 bits, as those of the first 97 tokens always are"
    assert to_bytes(found) == to_bytes(model())


@pytest.mark.slow
@pytest.mark.parametrize("turned", [False, True])
def test_moments_are_of_what_the_logits_product_reads(
    tmp_path: Path, monkeypatch: Patch, turned: bool
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_attention_heads": 2,
        "num_hidden_layers": 2,
    }
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=1, head_dim=8, vocab_size=50)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    torch.nn.init.normal_(model.model.norm.weight)
    model.model.embed_tokens.weight.data[:, 5] *= 1000
    model.save_pretrained(tmp_path / "model")
    assert prepare(tmp_path / "model", tmp_path / "turned", rotate=turned).rotated is turned
    if turned:
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "turned").eval()
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(f'"{"x" * 2000}"\n"{"y" * 2001}"\n')
    ids = {"x": [7] * 2000, "y": [*range(40), *[9] * 1961]}
    wording = SimpleNamespace(
        tokenizer=SimpleNamespace(tokenize=lambda text: ids[text[0]]), text=str
    )
    monkeypatch.setattr(logits_module, "wording_of", lambda _: wording)
    found = moments_of(tmp_path / "model", prompts, print, rotated=turned)
    inputs: list[Any] = []
    model.get_output_embeddings().register_forward_pre_hook(
        lambda _, given: inputs.append(given[0][0])
    )
    with torch.no_grad():
        for one in ids.values():
            model(torch.tensor([one]))
    read = torch.cat(inputs).double().numpy()
    assert len(read) == 4001
    wanted = read.T @ read
    np.testing.assert_allclose(found, wanted, atol=1e-4 * np.abs(wanted).max())
