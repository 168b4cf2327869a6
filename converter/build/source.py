"""What a build starts from: a checkpoint, a float bundle or a quantized one.

Looks at files only, so that what cannot work is said before anything heavy is loaded.
"""

import json
import re
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from edge_opt.inspection.holdings import Caches, find_caches
from edge_opt.ir import Model
from edge_opt.ir.opening import MAIN_SECTION, Opened
from edge_opt.output.errors import ModelFormatError, UsageError
from edge_opt.schema.litertlm import is_bundle

CONFIG = "config.json"
"""What a checkpoint says of its architecture."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_WEIGHTS = (".safetensors", ".bin")
_INDEX = "model.safetensors.index.json"
# What a checkpoint is made of; a folder of a training run holds much more.
_PARTS = (*_WEIGHTS, ".json", ".model", ".jinja", ".txt", ".py")
_MATMULS = ("BATCH_MATMUL", "FULLY_CONNECTED")


class Kind(StrEnum):
    """What was given, and so where the build starts."""

    CHECKPOINT = "checkpoint"
    FLOAT = "float bundle"
    QUANTIZED = "quantized bundle"


@dataclass(frozen=True, slots=True)
class Given:
    """The input: `files` are those that a result depends on.

    `model_type`: a checkpoint's, as transformers calls it. `cache_shape`: a bundle's, the largest sizes of its key
    caches. `caches`: what is known of a bundle's.
    """

    path: Path
    kind: Kind
    files: tuple[Path, ...]
    model_type: str = ""
    cache_shape: tuple[int, ...] = ()
    caches: Caches = field(default_factory=Caches)


def look_at(path: Path) -> Given:
    """What was given; UsageError or ModelFormatError where no build can start from it."""
    if path.is_dir():
        model_type, files = _checkpoint(path)
        return Given(path, Kind.CHECKPOINT, files, model_type=model_type)
    if not path.exists():
        raise ModelFormatError(f"{path} does not exist: give a Hugging Face folder or a .litertlm bundle")
    if not is_bundle(path):
        raise UsageError(f"{path} is neither a Hugging Face folder nor a .litertlm bundle")
    return _bundle(path)


def _checkpoint(path: Path) -> tuple[str, tuple[Path, ...]]:
    """The model type, as transformers calls it, and the files that a result depends on, after a look at them."""
    config = path / CONFIG
    if not config.is_file():
        raise UsageError(f"{path} is no Hugging Face checkpoint: it has no {CONFIG}")
    settings = read_json(config)
    model_type = settings.get("model_type") if isinstance(settings, dict) else None
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
    for file in dict.fromkeys((*tokenizers, *files)):
        if file.suffix == ".safetensors":
            _check_whole(file)
        elif file in tokenizers and file.suffix == ".json":
            read_json(file)
    _check_shards(path)
    return model_type, files


def read_json(path: Path) -> Any:
    """The value that a file holds; UsageError where it cannot be read, or is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path} cannot be read: {reason}") from error


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
    index = read_json(path / _INDEX) if (path / _INDEX).is_file() else {}
    shards = index.get("weight_map") if isinstance(index, dict) else None
    lost = sorted({str(shard) for shard in (shards or {}).values() if not (path / str(shard)).is_file()})
    if lost:
        raise UsageError(f"{path} has no {lost[0]}, which {_INDEX} names: copy it too")


def _bundle(path: Path) -> Given:
    opened = Opened(path)
    model = opened.main()
    shapes = [
        tensor.shape
        for signature in model.signatures
        for name, tensor in signature.inputs.items()
        if re.fullmatch(r"kv_cache_k_\d+", name)
    ]
    if not shapes:
        raise UsageError(
            f"{path} is not exported for an NPU: its {MAIN_SECTION} model takes no kv_cache_k_0 beside the new keys; "
            f"export it with split_cache, or give the checkpoint"
        )
    longest = tuple(int(max(sizes)) for sizes in zip(*shapes, strict=True))
    kind = Kind.QUANTIZED if _is_quantized(model) else Kind.FLOAT
    return Given(path, kind, (path,), cache_shape=longest, caches=find_caches(model, opened.bundle))


def _is_quantized(model: Model) -> bool:
    """Whether activations are integers; weights alone are in what the exporter writes."""
    return any(
        operator.inputs[0] is not None and operator.inputs[0].dtype.name in ("INT8", "INT16")
        for graph in model.subgraphs
        for operator in graph.operators
        if operator.name in _MATMULS
    )
