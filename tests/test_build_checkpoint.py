"""Weights of a checkpoint stay on disk; what is read, changed and written are the same numbers as in memory."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_opt.building.checkpoint import DAMAGED, Stored, create, load, stored_in

NUMBERS = np.arange(-6, 6, dtype=np.float32).reshape(4, 3) / 4
TYPES = {"wide": "F32", "half": "F16", "brain": "BF16"}


def written(path: Path) -> dict[str, Stored]:
    places = create(path, {name: (dtype, (4, 3)) for name, dtype in TYPES.items()})
    for place in places.values():
        codes = NUMBERS.view(np.uint32) >> 16 if place.dtype == "BF16" else NUMBERS
        place.codes("r+")[:2] = codes[:2]
        place.codes("r+")[2:] = codes[2:]
    return places


def test_numbers_are_read_as_they_were_written_whole_and_by_rows(tmp_path: Path) -> None:
    for place in written(tmp_path / "new").values():
        np.testing.assert_array_equal(place.read(), NUMBERS)
        rows = place.read(slice(1, 3))
        np.testing.assert_array_equal(rows, NUMBERS[1:3])
        rows[:] = 7
        np.testing.assert_array_equal(place.read(), NUMBERS, "the file is not changed")


def test_a_new_file_is_the_one_that_safetensors_writes(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    places = create(tmp_path / "ours", {"b": ("F32", (4, 3)), "a": ("F32", (2,))})
    places["b"].codes("r+")[:] = NUMBERS
    places["a"].codes("r+")[:] = [1, 2]
    arrays = {"a": np.array([1, 2], np.float32), "b": NUMBERS}
    safetensors.save_file(arrays, tmp_path / "theirs", {"format": "pt"})
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


@pytest.mark.parametrize("kept", [0, 7, 40, -1])
def test_a_damaged_file_is_an_error(tmp_path: Path, kept: int) -> None:
    written(tmp_path / "new")
    content = (tmp_path / "new").read_bytes()
    (tmp_path / "new").write_bytes(content[:kept])
    with pytest.raises(DAMAGED):
        stored_in(tmp_path / "new")


@pytest.mark.parametrize("offsets", [(-8, 0), (0, 4), (0, 16)])
def test_offsets_outside_the_weights_or_of_another_size_are_an_error(
    tmp_path: Path, offsets: tuple[int, int]
) -> None:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": offsets}}).encode()
    path = tmp_path / "new"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    with pytest.raises(DAMAGED, match="wrong offsets"):
        stored_in(path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["Llama", "Gemma3Text", "Gemma4Text"])
@pytest.mark.parametrize("shard", ["1GB", "10KB"])
def test_a_model_whose_weights_stay_on_disk_gives_the_same_bits(
    tmp_path: Path, family: str, shard: str
) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50}
    others = {"tie_word_embeddings": True, "hidden_size_per_layer_input": 0}
    config = getattr(transformers, f"{family}Config")(**sizes, **heads, **others)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    for name, buffer in made.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.fill_(0.5)
    made.save_pretrained(tmp_path / "model", max_shard_size=shard)
    auto = transformers.AutoModelForCausalLM
    whole = auto.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    weights = load(tmp_path / "model")
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(weights.model(ids).logits, whole(ids).logits)
        with weights.filled(weights.model.model.layers[0]) as _:
            weights.model.model.layers[0].mlp.up_proj.weight.zero_()
            assert not torch.equal(weights.model(ids).logits, whole(ids).logits)
        assert torch.equal(weights.model(ids).logits, whole(ids).logits)
    assert all(weight.is_meta for weight in weights.model.parameters()), "nothing stays in memory"
    places = weights.prepare_copy(tmp_path / "model", tmp_path / "copy", ["model.norm.weight"])
    assert places["model.norm.weight"].dtype == "F32"
    assert places["model.layers.0.mlp.up_proj.weight"].dtype == "BF16"
    places.pop("model.norm.weight").codes("r+")[:] = weights.read("model.norm.weight")
    weights.copy_to(places)
    copied = auto.from_pretrained(tmp_path / "copy", dtype=torch.float32).eval()
    with torch.no_grad():
        assert torch.equal(copied(ids).logits, whole(ids).logits)


@pytest.mark.slow
def test_weights_under_other_names_or_in_other_files_are_loaded_as_a_whole(tmp_path: Path) -> None:
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = safetensors.load_file(file)
    ids = torch.arange(20)[None]
    wanted = model(ids).logits.detach()

    def check() -> None:
        found: Any = load(tmp_path)
        assert not any(weight.is_meta for weight in found.model.parameters())
        assert torch.equal(found.model(ids).logits.detach(), wanted)
        np.testing.assert_array_equal(
            found.read("model.norm.weight"), weights["model.norm.weight"].numpy()
        )

    file.unlink()
    torch.save(weights, tmp_path / "pytorch_model.bin")
    check()
    (tmp_path / "pytorch_model.bin").unlink()
    half = {name: weight for name, weight in weights.items() if "layers" in name}
    named = {name: "0.safetensors" if name in half else "1.safetensors" for name in weights}
    safetensors.save_file(half, tmp_path / "0.safetensors", {"format": "pt"})
    others = {name: weight for name, weight in weights.items() if name not in half}
    others["model.embed_tokens.weight"] = others["model.embed_tokens.weight"].double()
    safetensors.save_file(others, tmp_path / "1.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": named}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check()


@pytest.mark.slow
def test_a_model_that_reads_a_weight_while_its_module_does_not_run_is_loaded_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So does Gemma 4 with the embedding of the padding token, if it also takes images."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    assert load(tmp_path).streamed
    forward = transformers.LlamaModel.forward

    def reads_embedding(self: Any, *given: Any, **named: Any) -> Any:
        found = forward(self, *given, **named)
        found.last_hidden_state = found.last_hidden_state + self.embed_tokens.weight[0]
        return found

    monkeypatch.setattr(transformers.LlamaModel, "forward", reads_embedding)
    weights = load(tmp_path)
    assert not weights.streamed
    assert weights.model(torch.arange(20)[None]).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("other", ["an index", "a file without an index"])
def test_weights_are_not_streamed_if_litert_torch_would_read_them_from_another_file(
    tmp_path: Path, other: str
) -> None:
    """transformers reads model.safetensors, litert-torch an index or else all files."""
    transformers = pytest.importorskip("transformers")
    safetensors = pytest.importorskip("safetensors.torch")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "vocab_size": 50}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).save_pretrained(tmp_path)
    assert load(tmp_path).streamed
    weights = safetensors.load_file(tmp_path / "model.safetensors")
    renamed = {f"other.{name}": weight for name, weight in weights.items()}
    safetensors.save_file(renamed, tmp_path / "consolidated.safetensors", {"format": "pt"})
    assert load(tmp_path).streamed, "other names"
    earlier = {name: weight / 2 for name, weight in weights.items()}
    safetensors.save_file(earlier, tmp_path / "earlier.safetensors", {"format": "pt"})
    if other == "an index":
        index = {"weight_map": dict.fromkeys(weights, "earlier.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    found = load(tmp_path)
    assert not found.streamed
    for name, weight in weights.items():
        np.testing.assert_array_equal(found.read(name), weight.numpy())
