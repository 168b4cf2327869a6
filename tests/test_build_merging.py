"""A LoRA adapter is merged with its base: every changed weight is W + (alpha / r) B A, the others stay."""

import json
from pathlib import Path
from typing import Any

import pytest

from edge_opt.base.errors import UsageError
from edge_opt.building.merging import merge
from edge_opt.building.source import look_at
from edge_opt.building.stages import Job

RANK = 3
ALPHA = 12
SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
pytestmark = pytest.mark.slow


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A random base, and a random adapter for two of its products."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    peft = pytest.importorskip("peft", reason="peft is not installed (extra build)")
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(base)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (base / name).write_text('{"of": "base"}')
    settings = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(model, settings)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight)
    adapted.save_pretrained(tuned)
    (tuned / "tokenizer_config.json").write_text('{"of": "tuned"}')
    return base, tuned


def merged(base: Path, tuned: Path) -> Path:
    """The merged checkpoint, as the stage writes it."""
    output = tuned.parent / "output"
    output.mkdir()
    merge(Job("merge", str(output), {"source": str(base), "adapter": str(tuned)}), lambda *_: None)
    return output / "checkpoint"


def weights(path: Path) -> dict[str, Any]:
    """The tensors of a file."""
    from safetensors.torch import load_file

    return load_file(path)


def test_a_merged_weight_is_the_base_s_plus_the_scaled_product(folders: tuple[Path, Path]) -> None:
    base, tuned = folders
    output = merged(base, tuned)
    before, after = (weights(folder / "model.safetensors") for folder in (base, output))
    lora = weights(tuned / "adapter_model.safetensors")
    assert before.keys() == after.keys()
    changed = {name for name in before if not before[name].equal(after[name])}
    assert len(changed) == 2 * SIZES["num_hidden_layers"]
    for name in changed:
        place = f"base_model.model.{name.removesuffix('.weight')}"
        a, b = (lora[f"{place}.lora_{side}.weight"] for side in "AB")
        expected = before[name] + ALPHA / RANK * b @ a
        assert after[name].sub(expected).abs().max() < 1e-5
    assert look_at(output).files, "a checkpoint like any other"
    assert json.loads((output / "tokenizer_config.json").read_text()) == {"of": "tuned"}
    assert json.loads((output / "tokenizer.json").read_text()) == {"of": "base"}


@pytest.mark.parametrize("kept", [True, False], ids=["too many", "too few"])
def test_an_adapter_of_another_model_is_refused(folders: tuple[Path, Path], kept: bool) -> None:
    from safetensors.torch import save_file

    base, tuned = folders
    path = tuned / "adapter_model.safetensors"
    lora = weights(path)
    other = {name.replace("layers.1", "layers.7"): one.clone() for name, one in lora.items()}
    layer = {name: one for name, one in lora.items() if "layers.0" in name}
    save_file({**lora, **other} if kept else layer, path)
    with pytest.raises(UsageError, match=r"does not fit .*base: only one of them has .*layers"):
        merged(base, tuned)


def test_an_adapter_that_peft_cannot_read_is_refused(folders: tuple[Path, Path]) -> None:
    base, tuned = folders
    (tuned / "adapter_model.safetensors").write_bytes(b"half")
    with pytest.raises(UsageError, match=r"tuned cannot be merged with .*base: "):
        merged(base, tuned)


def test_an_adapter_of_the_head_alone_is_refused_if_the_embedding_shares_it(tmp_path: Path) -> None:
    transformers, peft = pytest.importorskip("transformers"), pytest.importorskip("peft")
    base, tuned = tmp_path / "base", tmp_path / "tuned"
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SIZES, tie_word_embeddings=True)
    )
    model.save_pretrained(base)
    settings = peft.LoraConfig(r=RANK, target_modules=["lm_head"], init_lora_weights=False)
    peft.get_peft_model(model, settings).save_pretrained(tuned, save_embedding_layers=False)
    with pytest.raises(UsageError, match=r"its logits would change by .* that the logits share"):
        merged(base, tuned)
