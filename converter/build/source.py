"""What a build starts from: a checkpoint, a float bundle or a quantized one; and the prompts to calibrate with.

Looks at files only, so that what cannot work is said before anything heavy is loaded.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from edge_opt.build.sections import MAIN, is_compiled, model_of
from edge_opt.schema.errors import ModelFormatError, UsageError
from edge_opt.schema.litertlm import is_bundle, read_bundle

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    from edge_opt.ir import Model

_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_WEIGHTS = (".safetensors", ".bin")
# What a checkpoint is made of; a folder of a training run holds much more.
_PARTS = (*_WEIGHTS, ".json", ".model", ".jinja", ".txt", ".py")
_MATMULS = ("BATCH_MATMUL", "FULLY_CONNECTED")
# Where litert-torch's calibration looks for the text of a prompt.
_TEXTS = ("text", "prompt", "inputs")


class Kind(StrEnum):
    """What was given, and so where the build starts."""

    CHECKPOINT = "checkpoint"
    FLOAT = "float bundle"
    QUANTIZED = "quantized bundle"


@dataclass(frozen=True, slots=True)
class Given:
    """The input: `files` are those that a result depends on.

    `model_type`: a checkpoint's, as transformers calls it. `cache_shape`: a bundle's, of the first key cache.
    """

    path: Path
    kind: Kind
    files: tuple[Path, ...]
    model_type: str = ""
    cache_shape: tuple[int, ...] = ()


def look_at(path: Path) -> Given:
    """What was given.

    Raises:
        UsageError: it is nothing that a build can start from.
        ModelFormatError: it is missing, or a damaged bundle.
    """
    if path.is_dir():
        return _checkpoint(path)
    if not path.exists():
        raise ModelFormatError(f"{path} does not exist: give a Hugging Face folder or a .litertlm bundle")
    if not is_bundle(path):
        raise UsageError(f"{path} is neither a Hugging Face folder nor a .litertlm bundle")
    return _bundle(path)


def _checkpoint(path: Path) -> Given:
    config = path / "config.json"
    if not config.is_file():
        raise UsageError(f"{path} is no Hugging Face checkpoint: it has no config.json")
    try:
        told = json.loads(config.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{config} cannot be read: {error}") from error
    model_type = told.get("model_type") if isinstance(told, dict) else None
    if not isinstance(model_type, str):
        raise UsageError(f"{config} names no model_type: without it nobody knows which architecture this is")
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise UsageError(
            f"{path} has no tokenizer ({_TOKENIZERS[0]} or {_TOKENIZERS[1]}): copy it from the model that was tuned"
        )
    files = tuple(sorted(file for file in path.iterdir() if file.suffix in _PARTS and file.is_file()))
    if not any(file.suffix in _WEIGHTS for file in files):
        raise UsageError(f"{path} has no weights (*.safetensors)")
    return Given(path, Kind.CHECKPOINT, files, model_type=model_type)


def _bundle(path: Path) -> Given:
    bundle = read_bundle(path)
    model = model_of(bundle, MAIN)
    if model is None:
        held = ", ".join(section.model_type for section in bundle.sections if section.is_model) or "none"
        raise UsageError(f"{path} has no {MAIN} model, its models are: {held}")
    if is_compiled(model):
        raise UsageError(f"{path} is compiled for an NPU already: give the bundle that it was made from")
    shapes = [
        tensor.shape
        for signature in model.signatures
        for name, tensor in signature.inputs.items()
        if re.fullmatch(r"kv_cache_k_\d+", name)
    ]
    if not shapes:
        raise UsageError(
            f"{path} is not exported for an NPU: its {MAIN} model takes no kv_cache_k_0 beside the new keys; export it "
            f"with split_cache, or give the checkpoint"
        )
    kind = Kind.QUANTIZED if _is_quantized(model) else Kind.FLOAT
    return Given(path, kind, (path,), cache_shape=tuple(int(size) for size in shapes[0]))


def _is_quantized(model: Model) -> bool:
    """Whether activations are integers; weights alone are in what the exporter writes."""
    return any(
        operator.inputs[0] is not None and operator.inputs[0].dtype.name in ("INT8", "INT16")
        for graph in model.subgraphs
        for operator in graph.operators
        if operator.name in _MATMULS
    )


def check_prompts(path: Path) -> int:
    """How many prompts a file has: one JSON value a line.

    Raises:
        UsageError: it cannot be read, has none, or a line is no prompt.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
        raise UsageError(f"prompts {path} cannot be read: {reason}") from error
    found = list(_prompts(path, lines))
    if not found:
        raise UsageError(f"prompts {path} is empty: give some ten that are like what the model will be asked")
    return len(found)


def _prompts(path: Path, lines: Iterable[str]) -> Iterable[Any]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            prompt = json.loads(line)
        except ValueError:
            raise UsageError(
                f'prompts {path}, line {number} is no JSON: write "a prompt" or {{"prompt": "..."}}, one a line'
            ) from None
        texts = [prompt] if isinstance(prompt, str) else _texts(prompt)
        if not any(isinstance(text, str | list) and text for text in texts):
            raise UsageError(
                f"prompts {path}, line {number} is no prompt: write a string, or an object with {', '.join(_TEXTS)} or "
                f"messages"
            )
        yield prompt


def _texts(prompt: object) -> list[Any]:
    return [prompt.get(key) for key in (*_TEXTS, "messages")] if isinstance(prompt, dict) else []
