"""Opens what users give as a model: a .tflite file, its bytes, a loaded model, or a bundle, which holds several."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from edge_opt.base.errors import ModelFormatError, UsageError, unknown
from edge_opt.ir.model import Model
from edge_opt.ir.read import from_tables
from edge_opt.schema.data import Source
from edge_opt.schema.litertlm import is_bundle, read_bundle
from edge_opt.schema.reader import read_model
from edge_opt.schema.sections import Bundle
from edge_opt.schema.task import is_task, read_task

# A model of 10,000 operators is half a million objects that all stay; the regions cut out of it are a few thousand
# that soon go, and are still found among the young ones.
_THRESHOLDS = (50_000, 20, 100)
# Blocks of several threads may overlap: the first one sets the thresholds, and the last one takes them back.
_collector = threading.Lock()
_inside, _before = 0, gc.get_threshold()


@contextmanager
def rare_collections() -> Iterator[None]:
    """Within the block, Python's cycle collector looks through large models less often; then as often as before."""
    global _before, _inside  # noqa: PLW0603  the collector is the process's
    with _collector:
        _inside += 1
        if _inside == 1:
            _before = gc.get_threshold()
            if _before[0]:  # 0: the caller has turned it off
                gc.set_threshold(*_THRESHOLDS)
    try:
        yield
    finally:
        with _collector:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_before)


def load(source: str | os.PathLike[str] | bytes | Source, *, model: str | None = None) -> Model:
    """Read a .tflite file or its bytes. Weights stay on disk until their numbers are needed.

    Of a bundle, `model` names the one to read: `prefill_decode`, `embedder`, `aux`.

    Raises:
        UsageError: the source is no bundle, or holds no such model.
        ModelFormatError: where the file is not a valid model; names table, field and byte offset, or subgraph,
            operator and tensor.
    """
    section = source if model is None else _section(source, model)
    with rare_collections():
        try:
            return from_tables(read_model(section))
        except ModelFormatError as error:
            path = section.path if isinstance(section, Source) else section
            name = os.fspath(path) if isinstance(path, str | os.PathLike) else ""
            if not str(error).startswith(name):
                error.args = (f"{name}: {error}",)
            raise


def _section(source: object, model: str) -> Source:
    bundle = open_bundle(source) if isinstance(source, str | os.PathLike) else None
    if bundle is None:
        what = source if isinstance(source, str | os.PathLike) else "what was given"
        raise UsageError(f"{what} is no bundle: leave model={model!r} out")
    indices = {kind: index for index, kind in bundle.models.items()}
    if model not in indices:
        raise unknown("model", model, indices)
    return bundle.content(indices[model])


CALL = "DISPATCH_OP"
"""The custom operator that is one call of the NPU, as LiteRT names it."""
WORK = ".work"
"""Ending of the folder beside a bundle in which `edge-opt build` keeps what its stages wrote."""


def is_compiled(model: Model) -> bool:
    """Whether an NPU is called anywhere."""
    return any(op.code.custom_code == CALL for graph in model.subgraphs for op in graph.operators)


def made_from(path: str | os.PathLike[str] | None) -> Path | None:
    """The quantized bundle that a compiled one was made from, where the work folder beside it has one."""
    if path is None:
        return None
    quantized = Path(path).with_suffix(WORK) / "quantize" / f"model{Path(path).suffix}"
    return quantized if quantized.is_file() else None


def check_not_compiled(model: Model, path: str | os.PathLike[str] | None) -> None:
    """UsageError for a compiled model; it names the bundle to give instead, if that can be told."""
    if not is_compiled(model):
        return
    instead = made_from(path) or "the bundle that it was made from"
    what = "the model" if path is None else os.fspath(path)
    raise UsageError(f"{what} is compiled for an NPU already: give {instead}")


def open_bundle(path: str | os.PathLike[str]) -> Bundle | None:
    """A .litertlm or .task bundle; None where the file begins like neither.

    Raises:
        ModelFormatError: it is a damaged one.
    """
    if is_bundle(path):
        return read_bundle(path)
    return read_task(path) if is_task(path) else None


@runtime_checkable
class ExportedModel(Protocol):
    """What `litert_torch.convert` returns: a model that can be called, and written with `export`."""

    def export(self, path: str) -> None:
        """Write the .tflite file."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run it."""


Readable = str | os.PathLike[str] | bytes | Model
ModelLike = Readable | ExportedModel


def readable(given: ModelLike) -> Readable:
    """What was given, of an exported model its .tflite bytes.

    Raises:
        UsageError: it is neither.
    """
    if isinstance(given, str | os.PathLike | bytes | Model):
        return given
    if isinstance(given, bytearray | memoryview):
        return bytes(given)
    # litert-torch has `model_content`, ai-edge-torch had `tflite_model`.
    for name in ("model_content", "tflite_model"):
        reader = getattr(given, name, None)
        if callable(reader):
            return bytes(reader())
    raise UsageError(
        f"a {type(given).__module__}.{type(given).__qualname__} is no model: give a .tflite file, its bytes, a Model, "
        "or what litert_torch.convert returns"
    )


MAIN_SECTION, EMBEDDER_SECTION, AUXILIARY_SECTION = "prefill_decode", "embedder", "aux"
"""What models of a LiteRT-LM bundle are for, as their sections say."""


class Opened:
    """A model alone, or a .litertlm or .task bundle; each model is read when it is first needed.

    `bundle` is None for a model alone. `kinds` says by its index in the bundle what each model is for; that of a model
    alone is {0: ""}.

    Raises:
        ModelFormatError: the file is a damaged bundle.
    """

    def __init__(self, source: ModelLike) -> None:
        self.source = source = readable(source)
        self.path = None if isinstance(source, bytes | Model) else os.fspath(source)
        self.bundle = None if self.path is None else open_bundle(self.path)
        self.kinds = {0: ""} if self.bundle is None else self.bundle.models
        self._models = {0: source} if isinstance(source, Model) else dict[int, Model]()

    def model(self, index: int) -> Model:
        """The model at an index of `kinds`.

        Raises:
            ModelFormatError: it is no valid model.
        """
        if index not in self._models:
            assert not isinstance(self.source, Model)
            content = self.source if self.bundle is None else self.bundle.content(index)
            self._models[index] = load(content)
        return self._models[index]

    def find(self, kind: str) -> Model | None:
        """The model of a bundle that is for `kind`; None where there is none."""
        return next((self.model(index) for index in self.kinds if self.kinds[index] == kind), None)

    def main(self, *, compiled: bool = False) -> Model:
        """The model alone, or a bundle's prefill/decode model; one that is compiled for an NPU only if `compiled`.

        Raises:
            ModelFormatError: it is no valid model.
            UsageError: the bundle has no such model, or it is compiled.
        """
        model = self.model(0) if self.bundle is None else self.find(MAIN_SECTION)
        if model is None:
            held = ", ".join(kind or "unnamed" for kind in self.kinds.values()) or "none"
            raise UsageError(f"{self.path} has no {MAIN_SECTION} model, its models are: {held}")
        if not compiled:
            check_not_compiled(model, self.path)
        return model
