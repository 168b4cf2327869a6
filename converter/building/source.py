"""A build's input: a checkpoint, a float bundle or a quantized one.

Its files are read without any framework, so that unusable inputs are rejected before anything heavy is loaded.
"""

import json
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.base.mistaken import ENOUGH, recognized
from edge_opt.base.words import listed
from edge_opt.building.checkpoint import DAMAGED
from edge_opt.building.sections import check_words
from edge_opt.inspection.caches import NOT_FOR_NPUS, Caches, find_caches
from edge_opt.ir import DType
from edge_opt.ir.opening import MAIN_SECTION, Opened, check_not_compiled
from edge_opt.schema.data import Source

CONFIG = "config.json"
"""The file with a checkpoint's settings."""
_END = "eos_token_id"
_GENERATION = "generation_config.json"
_TEMPLATE = "chat_template"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
"""The weights and the settings of a LoRA adapter, in its folder."""
_TOKENIZERS = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json")
_WEIGHTS = (".safetensors", ".bin")
# Files of a checkpoint; a training run's folder holds many others.
_PARTS = (*_WEIGHTS, ".json", ".model", ".jinja", ".txt", ".py")
_INDEX = ".index.json"
_MERGE_IT = "merge it with the tool that made it, and give the result"
_AGAIN = "copy it again, or run `git lfs pull`"


class Kind(StrEnum):
    """The kind of input, which determines the first stage."""

    CHECKPOINT = "checkpoint"
    FLOAT = "float bundle"
    QUANTIZED = "quantized bundle"


class Given(NamedTuple):
    """The input: `files` are those that results depend on, `cache` is the length of a bundle's longest cache.

    `adapter` has the files of a LoRA adapter to merge with the checkpoint first; empty if there is none.
    """

    path: Path
    kind: Kind
    files: tuple[Path, ...]
    caches: Caches = Caches()
    cache: int = 0
    adapter: tuple[Path, ...] = ()

    @property
    def weights(self) -> list[Path]:
        """The files of a checkpoint's weights."""
        return [file for file in self.files if file.suffix in _WEIGHTS]


def look_at(path: Path, base: Path | None = None) -> Given:
    """Inspect a build's input; UsageError or ModelFormatError if no build can start from it.

    `base` is the checkpoint that a LoRA folder belongs to; None to look for it.
    """
    if (path / ADAPTER_CONFIG).is_file():
        return _adapted(path, base)
    if base is not None:
        raise UsageError(
            f"base=... is for a LoRA folder, and {path} has no {ADAPTER_CONFIG}: leave it out"
        )
    if path.is_dir():
        return _checkpoint(path)
    return _bundle(path)


def _bundle(path: Path) -> Given:
    opened = Opened(path)
    if opened.bundle is None:
        source = Source.open(path)  # raises if there is no file
        known = recognized(source.read(0, min(ENOUGH, source.size)))
        what = "neither a Hugging Face folder nor a .litertlm bundle: give one of these"
        raise UsageError(f"{path} is {known or what}")
    check_words(opened.bundle)
    part = opened.find(MAIN_SECTION)
    if part is None:
        held = listed([part.name for part in opened.parts]) or "none"
        raise UsageError(f"{path} has no {MAIN_SECTION} model, its models are: {held}")
    model = part.model
    check_not_compiled(model, path)
    caches = find_caches(model, opened.bundle)
    if not caches.caches:
        raise UsageError(f"{path} is {NOT_FOR_NPUS}")
    longest = max(one.positions for one in caches.caches)
    names = {one.name for one in caches.caches}
    kind = Kind.FLOAT
    for signature in model.signatures:
        for name, tensor in signature.inputs.items():
            if name in names and tensor.dtype in {DType.INT8, DType.INT16}:
                kind = Kind.QUANTIZED
    return Given(path, kind, (path,), caches, longest)


def _adapted(path: Path, base: Path | None) -> Given:
    """The base of a LoRA folder, with the adapter: the given one, or that which the adapter names, or one beside it."""
    config = read_object(path / ADAPTER_CONFIG)
    kind = config.get("peft_type")
    if kind != "LORA":
        raise UsageError(
            f"{path} is an adapter of type {kind!r:.40}, and only LORA is merged: {_MERGE_IT}"
        )
    if config.get("layer_replication"):
        raise UsageError(
            f"{path} repeats layers of its base model (layer_replication), which is not merged: {_MERGE_IT}"
        )
    if not (path / ADAPTER_WEIGHTS).is_file():
        raise UsageError(f"{path} has no {ADAPTER_WEIGHTS}: copy it from the training run")
    named = Path(str(config.get("base_model_name_or_path"))[:200])
    places = [named, path.parent / named.name] if base is None else [base]
    found = [place for place in places if place.is_dir()]
    if not found:
        raise UsageError(
            f"{path} is a LoRA adapter, and there is no folder {listed([*map(str, places)])} with its base model: give "
            f"its folder with base=..."
        )
    return _checkpoint(found[0])._replace(adapter=_parts(path))


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; UsageError if there is none."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        cause = getattr(error, "strerror", None) or error
        raise UsageError(f"{path} cannot be read: {cause}") from error
    if not isinstance(values, dict):
        raise UsageError(f"{path} cannot be read: it is not a JSON object")
    return values


def _parts(folder: Path) -> tuple[Path, ...]:
    files = [file for file in folder.iterdir() if file.suffix in _PARTS and file.is_file()]
    return tuple(sorted(files))


def _checkpoint(path: Path) -> Given:
    if not (path / CONFIG).is_file():
        inner = sorted(path.glob(f"*/{CONFIG}"))
        remedy = f", but {inner[0].parent} has one: give that folder" if inner else ""
        raise UsageError(f"{path} is not a Hugging Face checkpoint: it has no {CONFIG}{remedy}")
    quantized = read_object(path / CONFIG).get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, dict) else quantized
        raise UsageError(
            f"{path} is quantized already ({method}, as its {CONFIG} says), but litert-torch exports only float "
            f"checkpoints: give the one that it was made from"
        )
    if not any((path / name).is_file() for name in _TOKENIZERS):
        raise UsageError(
            f"{path} has no {_TOKENIZERS[0]} or {_TOKENIZERS[1]}: copy it from the base model"
        )
    files = _parts(path)
    for file in files:
        if file.name.endswith(_INDEX):
            _check_index(file)
    given = Given(path, Kind.CHECKPOINT, files)
    if not given.weights:
        raise UsageError(f"{path} has no weights (*.safetensors)")
    for file in given.weights:
        if file.suffix == ".safetensors":
            _check_length(file)
    return given


def check_end(path: Path, of_model: Any) -> None:
    """Raise UsageError if nothing says which token ends a text: LiteRT-LM does not start without one.

    litert-torch takes it from the generation settings, or else `of_model`, from the model's configuration, and from a
    chat template.
    """
    settings = path / _GENERATION
    tokenizer = path / "tokenizer_config.json"
    has_template = (path / f"{_TEMPLATE}.jinja").is_file() or (
        tokenizer.is_file() and _TEMPLATE in read_object(tokenizer)
    )
    own = read_object(settings).get(_END) if settings.is_file() else None
    if own is None and of_model is None and not has_template:
        raise UsageError(
            f"{path} names no token that ends a text, and LiteRT-LM does not start without one: add {_END} to "
            f"{_GENERATION}, for example that of the base model"
        )


def _check_length(path: Path) -> None:
    """Raise ModelFormatError unless a .safetensors file is as long as its header says."""
    source = Source.open(path)
    length = int.from_bytes(source.read(0, min(8, source.size)), "little")
    if 8 + length <= source.size:
        try:
            header = json.loads(source.read(8, length))
            ends = [
                one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"
            ]
            wanted = 8 + length + max(ends, default=0)
        except DAMAGED as error:
            raise ModelFormatError(f"{path} has a damaged header ({error}): {_AGAIN}") from error
        if source.size == wanted:
            return
    raise ModelFormatError(f"{path} is truncated, it has {source.size:,} bytes: {_AGAIN}")


def _check_index(path: Path) -> None:
    """Raise UsageError if an index of weights names anything but a file beside it, or if some of these are missing."""
    try:
        names = json.loads(path.read_text(encoding="utf-8"))["weight_map"].values()
        outside = [name for name in names if not name or Path(name).name != name]
    except DAMAGED as error:
        raise UsageError(f"{path} cannot be read: {error}") from error
    if outside:
        raise UsageError(
            f"{path} names {outside[0]!r:.80}, which is not a file of the checkpoint's folder"
        )
    missing = {name for name in names if not (path.parent / name).is_file()}
    # If all are, the checkpoint has its weights in another format.
    if missing and not missing.issuperset(names):
        raise UsageError(f"{path} names {min(missing)}, which is missing: {_AGAIN}")
