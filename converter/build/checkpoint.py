"""Looks at a Hugging Face folder: whether all that the exporter reads is there and whole, before it takes minutes."""

import json
from pathlib import Path
from typing import Any

from edge_opt.schema.errors import UsageError

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_WEIGHTS = (".safetensors", ".bin")
_INDEX = "model.safetensors.index.json"
# What a checkpoint is made of; a folder of a training run holds much more.
_PARTS = (*_WEIGHTS, ".json", ".model", ".jinja", ".txt", ".py")


def check_checkpoint(path: Path) -> tuple[str, tuple[Path, ...]]:
    """The model type, as transformers calls it, and the files that a result depends on.

    Raises:
        UsageError: something is missing or broken.
    """
    config = path / "config.json"
    if not config.is_file():
        raise UsageError(f"{path} is no Hugging Face checkpoint: it has no config.json")
    told = read_json(config)
    model_type = told.get("model_type") if isinstance(told, dict) else None
    if not isinstance(model_type, str):
        raise UsageError(f"{config} names no model_type: without it nobody knows which architecture this is")
    tokenizers = [path / name for name in _TOKENIZERS if (path / name).is_file()]
    if not tokenizers:
        raise UsageError(
            f"{path} has no tokenizer ({_TOKENIZERS[0]} or {_TOKENIZERS[1]}): copy it from the model that was tuned"
        )
    files = tuple(sorted(file for file in path.iterdir() if file.suffix in _PARTS and file.is_file()))
    if not any(file.suffix in _WEIGHTS for file in files):
        raise UsageError(f"{path} has no weights (*.safetensors)")
    for file in tokenizers:
        if file.suffix == ".json":
            read_json(file)
    for file in files:
        if file.suffix == ".safetensors":
            _check_whole(file)
    _check_shards(path)
    return model_type, files


def read_json(path: Path) -> Any:
    """The value that a file holds.

    Raises:
        UsageError: it cannot be read, or is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _check_whole(path: Path) -> None:
    """A safetensors file: its header's length in 8 bytes, the header, which says where tensors end, the tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= size - 8 else b""
    try:
        tensors = json.loads(header)
        tensors.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (ValueError, RecursionError, AttributeError, LookupError, TypeError):
        raise UsageError(
            f"{path} is no safetensors file: it is broken, or the few lines that stand for it where git lfs did not "
            f"fetch it"
        ) from None
    if end > size:
        raise UsageError(f"{path} has {size:,} bytes of {end:,}: copy it again")


def _check_shards(path: Path) -> None:
    index = path / _INDEX
    told = read_json(index) if index.is_file() else {}
    shards = told.get("weight_map") if isinstance(told, dict) else None
    lost = sorted({str(shard) for shard in (shards or {}).values() if not (path / str(shard)).is_file()})
    if lost:
        raise UsageError(f"{path} has no {lost[0]}, which {_INDEX} names: copy it too")
