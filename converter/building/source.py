"""A build's input (a checkpoint, a float bundle or a quantized one) and the lengths of its layers' caches.

Reads files without any framework, so that unusable inputs are rejected before anything heavy is loaded.
"""

import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.base.words import listed
from edge_opt.building.sections import check_words
from edge_opt.inspection.caches import Caches, find_caches
from edge_opt.ir import DType
from edge_opt.ir.opening import MAIN_SECTION, Opened, check_not_compiled
from edge_opt.schema.litertlm import is_bundle

SETTING = "sliding_window_ring_buffer_size"
"""litert-torch's name for the length of a ring buffer."""
_RUNTIME = "0.18"  # the first LiteRT-LM that reads the lengths of windows and rings from a bundle
_CONFIG = "config.json"
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_WEIGHTS = (".safetensors", ".bin")
# Files of a checkpoint; a training run's folder holds many others.
_PARTS = (*_WEIGHTS, ".json", ".model", ".jinja", ".txt", ".py")
_INDEX = ".index.json"
_STEP = 64


class Kind(StrEnum):
    """The kind of input, which determines the first stage."""

    CHECKPOINT = "checkpoint"
    FLOAT = "float bundle"
    QUANTIZED = "quantized bundle"


class Given(NamedTuple):
    """The input: `files` are those that results depend on, `cache` is the length of a bundle's longest cache."""

    path: Path
    kind: Kind
    files: tuple[Path, ...]
    caches: Caches = Caches()
    cache: int = 0

    @property
    def weights(self) -> list[Path]:
        """The files of a checkpoint's weights."""
        return [file for file in self.files if file.suffix in _WEIGHTS]


def look_at(path: Path) -> Given:
    """Inspect a build's input; UsageError or ModelFormatError if no build can start from it."""
    if path.is_dir():
        return _checkpoint(path)
    if not path.exists():
        raise ModelFormatError(
            f"{path} does not exist: give a Hugging Face folder or a .litertlm bundle"
        )
    if not is_bundle(path):
        raise UsageError(
            f"{path} is neither a Hugging Face folder nor a .litertlm bundle: give one of these"
        )
    opened = Opened(path)
    if opened.bundle is not None:
        check_words(opened.bundle)
    part = opened.find(MAIN_SECTION)
    if part is None:
        held = listed([part.name for part in opened.parts]) or "none"
        raise UsageError(f"{path} has no {MAIN_SECTION} model, its models are: {held}")
    check_not_compiled(part.model, path)
    model = part.model
    caches = find_caches(model, opened.bundle)
    if not caches.caches:
        raise UsageError(
            f"{path} is not exported for an NPU: its {MAIN_SECTION} model has no cache whose new keys are an output of "
            f"their own; export it with split_cache, or give the checkpoint"
        )
    longest = max(one.positions for one in caches.caches)
    names = {one.name for one in caches.caches}
    types: set[DType] = set()
    for signature in model.signatures:
        types |= {tensor.dtype for name, tensor in signature.inputs.items() if name in names}
    is_quantized = not types.isdisjoint({DType.INT8, DType.INT16})
    return Given(path, Kind.QUANTIZED if is_quantized else Kind.FLOAT, (path,), caches, longest)


def _checkpoint(path: Path) -> Given:
    if not (path / _CONFIG).is_file():
        raise UsageError(f"{path} is not a Hugging Face checkpoint: it has no {_CONFIG}")
    try:
        config = json.loads((path / _CONFIG).read_text(encoding="utf-8"))
        quantized = config.get("quantization_config")
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        raise UsageError(f"{path / _CONFIG} cannot be read: {error}") from error
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UsageError(
            f"{path} is quantized already ({method}, as its {_CONFIG} says), but litert-torch exports only float "
            f"checkpoints: give the one that it was made from"
        )
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise UsageError(
            f"{path} has no {_TOKENIZERS[0]} or {_TOKENIZERS[1]}: copy it from the base model"
        )
    files = sorted(file for file in path.iterdir() if file.suffix in _PARTS and file.is_file())
    for file in files:
        if file.name.endswith(_INDEX):
            _check_index(file)
    if not any(file.suffix in _WEIGHTS for file in files):
        raise UsageError(f"{path} has no weights (*.safetensors)")
    return Given(path, Kind.CHECKPOINT, tuple(files))


def _check_index(path: Path) -> None:
    """Raise UsageError if an index of weights names anything but a file beside it."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        outside = [name for name in names if not name or Path(name).name != name]
    except (
        OSError,
        ValueError,
        LookupError,
        TypeError,
        AttributeError,
        RecursionError,
    ) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if outside:
        raise UsageError(
            f"{path} names {outside[0]!r:.80}, which is not a file of the checkpoint's folder"
        )


def plan_caches(
    config: Mapping[str, Any],
    prefill: Sequence[int],
    cache: int,
    chosen: int | None,
    *,
    whole: bool,
) -> dict[str, Any]:
    """The `window` of a checkpoint's sliding layers, the length of their `ring` buffers, and `notes` for the user.

    `config` is the checkpoint's, completed by transformers. `ring` is None for whole caches, including on request
    (`whole`), `window` is None if no layer slides.

    The shortest ring buffer that keeps all visible keys is `max(window, longest prefill)`, in steps of 64. A prefill of
    T tokens reads the caches before their update, in addition to its own keys: its first row needs window - 1 keys of
    the ring, later rows fewer. LiteRT-LM may take one token back, which needs one more. Then the T new keys enter the
    ring, which LiteRT-LM requires to hold them all. litert-torch rounds to 32, and older LiteRT-LM releases guess
    lengths as multiples of 64.

    Raises:
        UsageError: the chosen length is invalid.
    """
    kinds = config.get("layer_types") or ()
    sliding = sum(kind == "sliding_attention" for kind in kinds)
    window = (config.get("sliding_window") or 0) if sliding else 0
    longest = max(prefill)
    ring = chosen
    notes: list[str] = []
    least = -(-max(window, longest) // _STEP) * _STEP
    if chosen is None and window and sliding < len(kinds) and least < cache and not whole:
        ring = least
    elif chosen is not None and not window:
        raise UsageError(
            f"{SETTING} {chosen}: the checkpoint has no sliding layers, so leave it out"
        )
    elif chosen is not None and (
        type(chosen) is not int or not least <= chosen < cache or chosen % _STEP
    ):
        raise UsageError(
            f"{SETTING} {chosen} must be a multiple of {_STEP}, at least {least} for a window of {window} positions "
            f"and a prefill of {longest} tokens, and less than the cache, {cache} positions"
        )
    if ring is not None:
        notes.append(
            f"{sliding} of {len(kinds)} layers see {window} positions back and keep a ring buffer of {ring}; this "
            f"needs LiteRT-LM {_RUNTIME} or newer, an older one silently generates different text (--set "
            f"{SETTING}=null builds without rings)"
        )
    if window and longest > window:
        notes.append(
            f"a prefill of {longest} tokens is longer than the window of {window}: LiteRT-LM {_RUNTIME} does "
            f"not apply the window within one prefill, so tokens see up to {longest} positions back; give --prefill "
            f"{window} or less"
        )
    return {"window": window or None, "ring": ring, "notes": notes}
