"""A checkpoint whose weights stay on disk: a module has them in memory, in float32, only while it runs.

Reads and writes safetensors files one matrix at a time. Other files, and weights under other names than the model's,
are loaded as a whole by transformers.
"""

import copy
import json
import math
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from edge_opt.base.errors import ModelFormatError, UsageError
from edge_opt.building.gptq import ROWS_AT_ONCE, Floats

_TYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I8": np.int8}
Layout = tuple[str, tuple[int, ...]]
"""A tensor's type, by the file's name for it, and its shape."""
DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError)
"""Errors of reading a damaged file."""
_FILE = "model.safetensors"
_INDEX = f"{_FILE}.index.json"
TEXTS = {".json", ".model", ".jinja", ".txt"}
"""Endings of a checkpoint's files beside its weights."""


class Stored(NamedTuple):
    """A tensor in a safetensors file, whose bytes begin at `start`; `dtype` is the file's name for its type."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    start: int

    @property
    def bytes(self) -> int:
        """The size of its numbers."""
        return np.dtype(_TYPES[self.dtype]).itemsize * math.prod(self.shape)

    def codes(self, mode: Literal["c", "r+"] = "c") -> NDArray[Any]:
        """Its numbers as they are stored; in mode `r+`, changes to them reach the file."""
        return np.memmap(self.path, _TYPES[self.dtype], mode, self.start, self.shape)

    def read(self, rows: slice = slice(None)) -> Floats:
        """Its numbers, or those of some rows, in float32; changes to them do not reach the file."""
        codes = self.codes()[rows]
        if self.dtype == "BF16":
            wide = codes.astype(np.uint32)
            wide <<= 16
            return wide.view(np.float32)
        return np.require(codes, np.float32, ["ALIGNED"])


def stored_in(path: Path) -> dict[str, Stored]:
    """The tensors of a safetensors file by name; one of `DAMAGED` if it is damaged or has other types."""
    end = path.stat().st_size
    with path.open("rb") as file:
        size = min(int.from_bytes(file.read(8), "little"), end)
        header = json.loads(file.read(size))
    found: dict[str, Stored] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        first, last = entry["data_offsets"]
        one = Stored(path, entry["dtype"], tuple(entry["shape"]), 8 + size + first)
        if first < 0 or last - first != one.bytes:
            raise ValueError(f"'{name}' has wrong offsets, {first} and {last}")
        if one.start + one.bytes > end:
            raise ValueError(f"'{name}' is cut off")
        found[name] = one
    return found


def create(path: Path, tensors: Mapping[str, Layout]) -> dict[str, Stored]:
    """A new safetensors file with room for these tensors, by name."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in sorted(tensors.items(), key=_by_width):
        size = Stored(path, dtype, shape, 0).bytes
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
        if hasattr(os, "posix_fallocate"):  # macOS has none
            # A disk that is full when a mapped page is written would end the process.
            os.posix_fallocate(file.fileno(), 0, 8 + len(text) + end)
    return stored_in(path)


def _by_width(tensor: tuple[str, Layout]) -> tuple[int, str]:
    """The order of safetensors' own files: wide types first, so that all are aligned."""
    name, (dtype, _) = tensor
    return -np.dtype(_TYPES[dtype]).itemsize, name


class Streamed:
    """A model in float32; its weights that are `stored` are in memory only while a module needs them.

    Args:
        model: its weights are on the meta device if they are stored.
        stored: by the names of the model's weights.
    """

    def __init__(self, model: Any, stored: Mapping[str, Stored]) -> None:
        self.model = model
        self.streamed = bool(stored)
        """False if all weights are in memory."""
        self._stored: dict[Any, Stored] = {}
        for name, weight in model.named_parameters():
            if name in stored:
                self._stored[weight] = stored[name]
        for module in model.modules():
            if any(weight in self._stored for weight in module.parameters(recurse=False)):
                self._fill_while_it_runs(module)

    def _fill_while_it_runs(self, module: Any) -> None:
        forward = module.forward

        def run(*given: Any, **named: Any) -> Any:
            with self.filled(module):
                return forward(*given, **named)

        module.forward = run

    @contextmanager
    def filled(self, module: Any) -> Iterator[None]:
        """The weights of a module and its parts are in memory for the duration; changes to them are then lost."""
        import torch

        emptied = []
        for owner in module.modules():
            for name, weight in [*owner.named_parameters(recurse=False)]:
                if weight in self._stored:
                    values = torch.from_numpy(self._stored[weight].read())
                    setattr(owner, name, torch.nn.Parameter(values, requires_grad=False))
                    emptied.append((owner, name, weight))
        try:
            yield
        finally:
            for owner, name, weight in emptied:
                setattr(owner, name, weight)

    @property
    def names(self) -> list[str]:
        """The names of all weights, in order; tied weights have several."""
        return [*self.model.state_dict()]

    def read(self, name: str, rows: slice = slice(None)) -> Floats:
        """A weight's numbers, or those of some rows, in float32; changes to them do not reach the model."""
        weight = self.model.state_dict(keep_vars=True)[name]
        stored = self._stored.get(weight)
        if stored is not None:
            return stored.read(rows)
        return np.array(np.atleast_1d(weight.detach().numpy())[rows])

    def blocks(self, name: str) -> Iterator[tuple[int, Floats]]:
        """A weight's numbers, some rows at a time, each with the number of its first row."""
        shape = tuple(self.model.state_dict()[name].shape)
        for first in range(0, (shape or (1,))[0], ROWS_AT_ONCE):
            yield first, self.read(name, slice(first, first + ROWS_AT_ONCE))

    def prepare_copy(
        self, source: Path, output: Path, wide: Sequence[str], *, untie: bool = False
    ) -> dict[str, Stored]:
        """Write a new folder with everything but the numbers of the weights, and return their places.

        The weights in `wide` are in float32, others have their type in `source`. If `untie`, tied weights get a place
        each.
        """
        output.mkdir(parents=True)
        config = copy.deepcopy(self.model.config)
        if untie:
            config.tie_word_embeddings = False
        config.save_pretrained(output)
        for file in source.iterdir():
            is_text = file.suffix in TEXTS and not file.name.endswith(_INDEX)
            if is_text and file.is_file() and not (output / file.name).exists():
                shutil.copy(file, output)
        tensors: dict[str, Layout] = {}
        written: set[Any] = set()
        # Not `named_parameters`: Gemma 4 has a trained buffer, `layer_scalar`.
        for name, weight in self.model.state_dict(keep_vars=True).items():
            if weight in written and not untie:
                continue
            written.add(weight)
            stored = self._stored.get(weight)
            dtype = "F32" if stored is None or name in wide else stored.dtype
            tensors[name] = dtype, tuple(weight.shape)
        return create(output / _FILE, tensors)

    def copy_to(self, places: Mapping[str, Stored]) -> None:
        """Write weights to places of the same names and types."""
        weights = self.model.state_dict(keep_vars=True)
        for name, place in places.items():
            stored = self._stored.get(weights[name])
            place.codes("r+")[:] = weights[name].detach() if stored is None else stored.codes()


def load(source: Path, *, stream: bool = True) -> Streamed:
    """The model in float32, checked: transformers fills missing weights with random numbers.

    Without `stream`, all weights are in memory.

    Raises:
        ModelFormatError: weights are truncated.
        UsageError: weights are missing, of another shape, NaN or infinite; or transformers refuses the generation
            settings.
    """
    import safetensors

    try:
        weights = _streamed(source) if stream else None
        if weights is None or not _runs(weights.model):
            weights = _in_memory(source)
    # The last three are torch's for damaged .bin files.
    except (
        safetensors.SafetensorError,
        pickle.UnpicklingError,
        EOFError,
        RuntimeError,
    ) as error:
        cause, _, _ = (str(error) or "they are empty").partition("\n")
        if "allocate memory" in cause:
            raise
        raise ModelFormatError(
            f"weights in {source} are damaged or incomplete ({cause}): copy them again, or run `git lfs pull`"
        ) from error
    except ValueError as error:
        what = f"transformers cannot load {source} ({str(error).rstrip('.')})"
        raise UsageError(f"{what}: correct its generation_config.json or config.json") from error
    for name in weights.names:
        for _, numbers in weights.blocks(name):
            if not np.isfinite(numbers).all():
                raise UsageError(
                    f"{source}: '{name}' holds NaN or infinity, as when training diverges: give an earlier checkpoint"
                )
    weights.model.eval()
    return weights


def _runs(model: Any) -> bool:
    """True if a streamed model reads each weight only while its module runs; Gemma 4 reads one at another time."""
    import torch

    try:
        with torch.no_grad():
            return not model(torch.zeros(1, 1, dtype=torch.int64)).logits.is_meta
    except RuntimeError:
        return False


def _in_memory(source: Path) -> Streamed:
    """The model, with all weights in memory; UsageError if some are missing or have another shape."""
    import torch
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        source,
        dtype=torch.float32,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    wrong = dict.fromkeys(info["missing_keys"], "is missing")
    wrong |= {name: "has another shape" for name, *_ in info["mismatched_keys"]}
    if wrong:
        name = min(wrong)
        raise UsageError(
            f"the checkpoint's weights do not fit its config.json: {name} {wrong[name]}, the first of {len(wrong)}; "
            f"compare both with the base model"
        )
    return Streamed(model, {})


def _streamed(source: Path) -> Streamed | None:
    """The model, if its safetensors files have each of its weights once, under its name; else None."""
    import torch
    import transformers

    try:
        stored = _tensors_of(source)
    except DAMAGED:
        return None
    config = transformers.AutoConfig.from_pretrained(source)
    with _weights_on_meta():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tensors = model.state_dict(keep_vars=True)
    buffers = {name: one for name, one in tensors.items() if not one.is_meta}
    written = buffers | dict(model.named_parameters())
    wanted = {name: tuple(one.shape) for name, one in written.items()}
    found = {name: one.shape for name, one in stored.items() if name in tensors}
    if found != wanted or () in wanted.values():  # a single number has no rows to read
        return None
    for name, buffer in buffers.items():
        buffer.copy_(torch.from_numpy(stored[name].read()))
    if (source / transformers.utils.GENERATION_CONFIG_NAME).is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(source)
    return Streamed(model, stored)


def _tensors_of(source: Path) -> dict[str, Stored]:
    """The tensors of the files that transformers would read; ValueError if litert-torch might stream other ones.

    transformers reads `model.safetensors`, or else the files of an index. litert-torch reads the files of an index, or
    else all in the folder: also those of an earlier training.
    """
    index = source / _INDEX
    if (source / _FILE).is_file():
        if index.is_file():
            raise ValueError(f"both {_FILE} and {_INDEX} hold weights")
        return _stored_in_all(source.glob("*.safetensors"))
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    found = _stored_in_all({source / file for file in names.values()})
    return {name: found[name] for name in names}


def _stored_in_all(files: Iterable[Path]) -> dict[str, Stored]:
    """The tensors of several safetensors files; ValueError if two have the same name."""
    found: dict[str, Stored] = {}
    for file in files:
        tensors = stored_in(file)
        if not found.keys().isdisjoint(tensors):
            raise ValueError(f"another file than {file} has a tensor of the same name")
        found |= tensors
    return found


@contextmanager
def _weights_on_meta() -> Iterator[None]:
    """Modules that are made meanwhile have no numbers for their weights; buffers have theirs."""
    import torch

    register = torch.nn.Module.register_parameter

    def register_on_meta(module: Any, name: str, weight: Any) -> None:
        if weight is not None and not weight.is_meta:
            weight = torch.nn.Parameter(weight.to("meta"), requires_grad=False)
        register(module, name, weight)

    torch.nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register
