"""A rotated checkpoint computes the same, with no channel of its residual stream far above the others."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.building import rotation
from edge_opt.building.checkpoint import Streamed, load
from edge_opt.building.rotation import Prepared, orthogonal, prepare, rotate_stream

SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
NAME = "model.layers.1.mlp.up_proj.weight"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 1072419256\n"


@pytest.mark.parametrize("width", [1, 7, 64, 576, 960])
def test_the_rotation_is_orthogonal_and_spreads_one_channel_over_all(width: int) -> None:
    matrix = orthogonal(width)
    np.testing.assert_allclose(matrix @ matrix.T, np.eye(width), atol=1e-13)
    assert np.abs(matrix).max() < 1.5 / np.sqrt(width)


def rotated(
    folder: Path, family: str, spike: float, *, rotate: bool = True, **settings: Any
) -> tuple[Prepared, Path, Path]:
    """What is done with a checkpoint of random weights, and the folders before and after."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(
                torch.randn_like(weight) * (0.5 if "norm" in name else 0.1) + ("norm" in name)
            )
        model.get_input_embeddings().weight[:, 5] *= spike
    before, after = folder / "before", folder / "after"
    model.save_pretrained(before)
    return prepare(before, after, rotate=rotate), before, after


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("Llama", {"tie_word_embeddings": True, "attention_bias": True}),
        ("Qwen3", {}),
        ("Qwen2", {}),
    ],
)
def test_a_checkpoint_with_norms_in_front_is_rotated(
    tmp_path: Path, family: str, settings: Any
) -> None:
    done, before, after = rotated(tmp_path, family, 1000, **settings)
    assert done.rotated
    assert done.note.startswith("Rotated the residual stream")
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    ids, largest, logits = torch.arange(20)[None], [], []
    for folder in (before, after):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with torch.no_grad():
            found = model(ids, output_hidden_states=True)
        largest.append(float(found.hidden_states[1].abs().max()))
        logits.append(found.logits.numpy())
    np.testing.assert_allclose(logits[1], logits[0], atol=1e-4 * np.abs(logits[0]).max())
    assert largest[0] > 3 * largest[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "spike", "reason"),
    [
        ("Gemma", 1000, "'model.layers.0.input_layernorm' does not compute `weight * x / rms(x)`"),
        ("Olmo", 1000, "'model.layers.0.input_layernorm' does not compute `weight * x / rms(x)`"),
        ("Cohere", 1000, "'model.layers.0.input_layernorm' does not compute `weight * x / rms(x)`"),
        (
            "Cohere2",
            1000,
            "'model.layers.0.input_layernorm' does not compute `weight * x / rms(x)`",
        ),
        (
            "Gemma2",
            1000,
            "edge-opt has no rule for 'model.layers.0.pre_feedforward_layernorm.weight'",
        ),
        ("StableLm", 1000, "edge-opt has no rule for 'model.layers.0.input_layernorm.bias'"),
        ("GPT2", 1000, "edge-opt has no rule for 'transformer.wte.weight'"),
        ("Llama", 1, "its largest number would change from "),
    ],
)
def test_a_checkpoint_that_is_not_rotated_stays_and_the_reason_is_told(
    tmp_path: Path, family: str, spike: float, reason: str
) -> None:
    settings = (
        {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
        if family.startswith("Cohere")
        else {}
    )
    done, _, after = rotated(tmp_path, family, spike, **settings)
    assert not done.rotated
    assert done.note.startswith(f"The residual stream is not rotated: {reason}")
    assert not after.exists()


@pytest.mark.slow
def test_a_rotation_that_makes_the_stream_larger_is_no_use_for_rounding(tmp_path: Path) -> None:
    _, before, after = rotated(tmp_path, "Llama", 1000)
    twice = rotate_stream(load(after), after, tmp_path / "twice", least_gain=1)
    assert not twice.rotated
    assert "its largest number would change from" in twice.note
    plain = rotate_stream(load(before), before, tmp_path / "again", least_gain=1)
    assert "its largest number changes from" in plain.note


@pytest.mark.slow
def test_a_model_whose_logits_are_zero_is_told_in_numbers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    _, before, _ = rotated(tmp_path, "Llama", 1, rotate=False)
    safetensors, file = pytest.importorskip("safetensors.torch"), before / "model.safetensors"
    weights = {name: torch.zeros_like(one) for name, one in safetensors.load_file(file).items()}
    weights |= {name: torch.ones_like(one) for name, one in weights.items() if "norm" in name}
    safetensors.save_file(weights, file, {"format": "pt"})
    done = rotate_stream(load(before), before, tmp_path / "after", least_gain=1)
    assert not done.rotated
    assert done.note.endswith("its largest number would change from 0.0 to 0.0")


@pytest.mark.slow
def test_no_reason_is_told_if_rotation_is_switched_off(tmp_path: Path) -> None:
    done, _, after = rotated(tmp_path, "Llama", 1000, rotate=False)
    assert (done.rotated, done.note, after.exists()) == (False, "", False)


def last_norm_subtracts_the_mean(torch: Any, model: Any) -> None:
    norm = torch.nn.LayerNorm(SIZES["hidden_size"], bias=False)
    norm.weight = model.model.norm.weight
    model.model.norm = norm


def stream_is_clipped(torch: Any, model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda _, __, given: given.clamp(-3, 3))


def logits_are_not_numbers(torch: Any, model: Any) -> None:
    model.lm_head.register_forward_hook(lambda _, __, given: given * math.nan)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (last_norm_subtracts_the_mean, "'model.norm' does not compute `weight * x / rms(x)`"),
        (stream_is_clipped, "its logits would change by "),
        (logits_are_not_numbers, "its logits would change by nan"),
    ],
)
def test_what_names_of_weights_do_not_show_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[Any, Any], None], reason: str
) -> None:
    loaded = load

    def changed(source: Path) -> Streamed:
        weights = loaded(source)
        change(pytest.importorskip("torch"), weights.model)
        return weights

    monkeypatch.setattr(rotation, "load", changed)
    done, _, after = rotated(tmp_path, "Llama", 1000)
    assert done.note.startswith(f"The residual stream is not rotated: {reason}")
    assert not after.exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "damage", "sentence"),
    [
        (lambda weights: weights.pop(NAME), bytes, "do not fit its config.json: {} is missing, the first of 1;"),
        (lambda weights: weights.update({NAME: weights[NAME][:7].clone()}), bytes, "{} has another shape, the"),
        (lambda weights: weights[NAME].fill_(math.nan), bytes, "'{}' holds NaN or infinity"),
        (lambda weights: weights[NAME][:1].fill_(math.inf), bytes, "'{}' holds NaN or infinity"),
        *((len, damage, r"weights in .* are damaged or incomplete .*: copy them again")
          for damage in (lambda data: data[:-100], lambda _: b"", lambda _: POINTER)),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["safetensors", "bin"])
def test_weights_that_do_not_fit_are_no_numbers_or_damaged_are_said(
    tmp_path: Path, change: Any, damage: Callable[[bytes], bytes], sentence: str, kind: str
) -> None:
    """transformers fills what is missing with random numbers, and warns; calibration fails on NaN much later."""
    _, before, _ = rotated(tmp_path, "Gemma", 1)
    safetensors, file = pytest.importorskip("safetensors.torch"), before / "model.safetensors"
    weights = safetensors.load_file(file)
    change(weights)
    if kind == "bin":
        file.unlink()
        file = before / "pytorch_model.bin"
        pytest.importorskip("torch").save(weights, file)
    else:
        safetensors.save_file(weights, file, {"format": "pt"})
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises((UsageError, ModelFormatError), match=sentence.format(re.escape(NAME))):
        prepare(before, tmp_path / "again", rotate=False)


@pytest.mark.slow
def test_memory_and_settings_that_stop_the_loading_are_not_called_damaged(tmp_path: Path) -> None:
    _, before, _ = rotated(tmp_path, "Gemma", 1)
    (before / "generation_config.json").write_text('{"num_return_sequences": 3}')
    with pytest.raises(
        UsageError, match=r"transformers cannot load .*got 3\)\): correct its generation_config"
    ):
        prepare(before, tmp_path / "again", rotate=False)
    cause = (
        "unable to mmap 234662880 bytes from file <model.safetensors>: Cannot allocate memory (12)"
    )
    (before / "generation_config.json").unlink()
    transformers = pytest.importorskip("transformers")
    with (
        patch.object(
            transformers.AutoModelForCausalLM, "from_config", side_effect=RuntimeError(cause)
        ),
        pytest.raises(RuntimeError, match="234662880 bytes"),
    ):
        prepare(before, tmp_path / "again", rotate=False)
