"""A build's input (a checkpoint, a float bundle or a quantized one) and the lengths of its layers' caches.

Reads files without any framework, so that unusable inputs are rejected before anything heavy is loaded.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.inspection import Caches, find_caches
from edge_opt.ir.opening import MAIN_SECTION, Opened
from edge_opt.schema.litertlm import is_bundle

CONFIG = "config.json"
"""The file with a checkpoint's architecture."""
SETTING = "sliding_window_ring_buffer_size"
"""litert-torch's name for the length of a ring buffer."""
RUNTIME = "0.18"
"""The first LiteRT-LM release that reads the window and ring buffer lengths from a bundle's executor metadata."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_WEIGHTS = (".safetensors", ".bin")
# Files of a checkpoint; a training run's folder holds many others.
_PARTS = (*_WEIGHTS, ".json", ".model", ".jinja", ".txt", ".py")
_STEP = 64


class Kind(StrEnum):
    """The kind of input, which determines the first stage."""

    CHECKPOINT = "checkpoint"
    FLOAT = "float bundle"
    QUANTIZED = "quantized bundle"


class Given(NamedTuple):
    """The input: `files` are those that results depend on, `cache_shape` holds its key caches' largest sizes."""

    path: Path
    kind: Kind
    files: tuple[Path, ...]
    cache_shape: tuple[int, ...] = ()
    caches: Caches = Caches()


def look_at(path: Path) -> Given:
    """Inspect a build's input; UsageError or ModelFormatError if no build can start from it."""
    if path.is_dir():
        return _checkpoint(path)
    if not path.exists():
        raise ModelFormatError(f"{path} does not exist: give a Hugging Face folder or a .litertlm bundle")
    if not is_bundle(path):
        raise UsageError(f"{path} is neither a Hugging Face folder nor a .litertlm bundle")
    opened = Opened(path)
    model = opened.main().model
    inputs = [entry for signature in model.signatures for entry in signature.inputs.items()]
    shapes = [tensor.shape for name, tensor in inputs if re.fullmatch(r"kv_cache_k_\d+", name)]
    if not shapes:
        raise UsageError(
            f"{path} is not exported for an NPU: its {MAIN_SECTION} model takes no kv_cache_k_0 beside the new keys; "
            f"export it with split_cache, or give the checkpoint"
        )
    longest = tuple(int(max(sizes)) for sizes in zip(*shapes, strict=True))
    # Check activations: the exporter may write integer weights in a float bundle.
    quantized = any(
        operator.inputs[0] is not None and operator.inputs[0].dtype.name in ("INT8", "INT16")
        for graph in model.subgraphs
        for operator in graph.operators
        if operator.name in ("BATCH_MATMUL", "FULLY_CONNECTED")
    )
    kind = Kind.QUANTIZED if quantized else Kind.FLOAT
    return Given(path, kind, (path,), longest, find_caches(model, opened.bundle))


def _checkpoint(path: Path) -> Given:
    """A Hugging Face folder with the files that results depend on."""
    if not (path / CONFIG).is_file():
        raise UsageError(f"{path} is not a Hugging Face checkpoint: it has no {CONFIG}")
    quantized = read_json(path / CONFIG).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UsageError(
            f"{path} is quantized already ({method}, as its {CONFIG} says), but litert-torch exports floats only: "
            f"give the checkpoint that it was made from"
        )
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise UsageError(
            f"{path} has no tokenizer ({_TOKENIZERS[0]} or {_TOKENIZERS[1]}): copy it from the base model"
        )
    files = tuple(sorted(file for file in path.iterdir() if file.suffix in _PARTS and file.is_file()))
    if not any(file.suffix in _WEIGHTS for file in files):
        raise UsageError(f"{path} has no weights (*.safetensors)")
    return Given(path, Kind.CHECKPOINT, files)


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UsageError if it cannot be read or is not one."""
    try:
        return {**json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, RecursionError, TypeError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


@dataclass(frozen=True, slots=True)
class SlidingLayers:
    """A checkpoint's number of sliding layers out of `count`, and their window in positions; 0 if none slides."""

    window: int = 0
    sliding: int = 0
    count: int = 0

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "SlidingLayers":
        """Read a configuration as completed by transformers."""
        kinds = config.get("layer_types") or ()
        sliding = sum(kind == "sliding_attention" for kind in kinds)
        window = config.get("sliding_window") or 0
        return cls(window, sliding, len(kinds)) if sliding and window else cls(0, 0, len(kinds))

    def ring(self, prefill: Sequence[int], cache: int, chosen: int | None, *, whole: bool) -> int | None:
        """The ring buffer length to export with a cache; None for whole caches, including on request (`whole`).

        The shortest ring buffer that keeps all visible keys is `max(window, longest prefill)`, in steps of 64. A
        prefill of T tokens reads the caches before their update, in addition to its own keys: its first row needs
        window - 1 keys of the ring, later rows fewer. LiteRT-LM may take one token back, which needs one more. Then
        the T new keys enter the ring, which LiteRT-LM requires to hold them all. litert-torch rounds to 32, and older
        LiteRT-LM releases guess lengths as multiples of 64.

        Raises:
            UsageError: the chosen length is invalid.
        """
        least = -(-max(self.window, *prefill) // _STEP) * _STEP
        if chosen is None:
            return least if 0 < self.sliding < self.count and least < cache and not whole else None
        if not self.sliding:
            raise UsageError(f"{SETTING} {chosen}: the checkpoint has no sliding layers, so leave it out")
        if not least <= chosen < cache or chosen % _STEP:
            raise UsageError(
                f"{SETTING} {chosen} must be a multiple of {_STEP}, at least {least} for a window of {self.window} "
                f"positions and a prefill of {max(prefill)} tokens, and less than the cache, {cache} positions"
            )
        return chosen

    def notes(self, ring: int | None, prefill: Sequence[int]) -> list[str]:
        """Notes on the caches for the user."""
        sentences = []
        if ring is not None:
            sentences.append(
                f"{self.sliding} of {self.count} layers see {self.window} positions back and keep a ring of {ring}; "
                f"this needs LiteRT-LM {RUNTIME} or newer, an older one silently generates different text "
                f"(--set {SETTING}=null builds without rings)"
            )
        if self.window and max(prefill) > self.window:
            sentences.append(
                f"a prefill of {max(prefill)} tokens is longer than the window of {self.window}: LiteRT-LM 0.18 "
                f"applies no window within one chunk, so its rows see up to {max(prefill)} positions back; give "
                f"--prefill {self.window} or less to keep what the checkpoint says"
            )
        return sentences
