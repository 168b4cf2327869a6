"""Opens what users give as a model: a .tflite file, its bytes, a loaded model, or a bundle, which holds several.

Tables become a graph. What makes a graph a graph is checked: indices, one producer each, execution order.
"""

import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from edge_opt.base.errors import ModelFormatError, UsageError, unknown
from edge_opt.ir.checks import check_extent, check_references, check_subgraph
from edge_opt.ir.dtypes import DType, Quantization
from edge_opt.ir.graph import Buffer, Operator, OperatorCode, Signature, Subgraph, Tensor
from edge_opt.ir.model import Metadata, Model, check_new_key
from edge_opt.schema.data import Source
from edge_opt.schema.litertlm import is_bundle, read_bundle
from edge_opt.schema.reader import ModelFile, read_model
from edge_opt.schema.sections import Bundle
from edge_opt.schema.table import Table
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


def from_tables(file: ModelFile) -> Model:
    """The model that the file's tables describe.

    Raises:
        ModelFormatError: for indices out of range, two producers of a tensor, use before definition, constants
            whose bytes do not fit their shape, names used twice, options of another operator, subgraphs that call
            themselves, graphs far larger than their file.
    """
    root = file.root
    check_extent(root, file.max_objects)
    model = Model(table=root, file=file)
    model.operator_codes = [_operator_code(table) for table in root.get("operator_codes") or []]
    model.buffers = [Buffer(table.fields.get("data"), table) for table in root.get("buffers") or []]
    sound_scales: set[int] = set()
    for index, table in enumerate(root.get("subgraphs") or []):
        model.subgraphs.append(_read_subgraph(model, table, index, sound_scales))
    check_references(model.subgraphs)
    for table in root.get("signature_defs") or []:
        _add_signature(model, table)
    for table in root.get("metadata") or []:
        name = table.get("name") or ""
        buffer = _at(model.buffers, table.get("buffer"), f"metadata '{name}'", "buffer")
        model.metadata.append(Metadata(name, buffer, table))
    for index in _integers(root.get("metadata_buffer")):
        model.metadata_buffers.append(_at(model.buffers, index, "metadata_buffer", "buffer"))
    return model


def _operator_code(table: Table) -> OperatorCode:
    deprecated, builtin = table.get("deprecated_builtin_code"), table.get("builtin_code")
    # Writers before TFLite schema 3a fill only the deprecated field; the runtime takes the larger of the two.
    return OperatorCode(max(deprecated, builtin), table.get("version"), table.get("custom_code"), table)


def _at(items: Sequence[Any], index: int, where: str, what: str) -> Any:
    if 0 <= index < len(items):
        return items[index]
    raise ModelFormatError(f"{where}: {what} {index} does not exist, there are {len(items)}")


def _read_subgraph(model: Model, table: Table, index: int, sound_scales: set[int]) -> Subgraph:
    graph = Subgraph(table.get("name") or "", table)
    place = f"subgraph '{graph.name or f'#{index}'}'"
    graph.tensors = [
        _read_tensor(model, tensor, f"{place}, tensor {position} '{tensor.get('name') or ''}'")
        for position, tensor in enumerate(table.get("tensors") or [])
    ]
    graph.inputs = _listed(graph.tensors, table, "inputs", f"{place} inputs", "tensor")
    graph.outputs = _listed(graph.tensors, table, "outputs", f"{place} outputs", "tensor")
    operators = [
        _read_operator(model, graph.tensors, operator, f"{place}, operator {position}")
        for position, operator in enumerate(table.get("operators") or [])
    ]
    check_subgraph(graph, operators, index, sound_scales)
    for operator in operators:
        graph.append(operator)
    return graph


def _read_tensor(model: Model, table: Table, where: str) -> Tensor:
    signature, quantization = table.get("shape_signature"), table.get("quantization")
    buffer = _at(model.buffers, table.get("buffer"), where, "buffer")
    return Tensor(
        table.get("name") or "",
        _integers(table.get("shape")),
        DType(table.get("type")),
        quantization=None if quantization is None else Quantization(quantization),
        # Buffer 0 says that there are no bytes, whatever it holds: the runtime never looks into it.
        buffer=buffer if table.get("buffer") else None,
        shape_signature=None if signature is None else _integers(signature),
        is_variable=table.get("is_variable"),
        table=table,
    )


def _read_operator(model: Model, tensors: list[Tensor], table: Table, place: str) -> Operator:
    code: OperatorCode = _at(model.operator_codes, table.get("opcode_index"), place, "operator code")
    place = f"{place} ({code.name})"
    inputs: list[Tensor | None] = [
        None if index == -1 else _at(tensors, index, place, "input tensor")
        for index in _integers(table.get("inputs"))
    ]
    outputs = _listed(tensors, table, "outputs", place, "output tensor")
    intermediates = _listed(tensors, table, "intermediates", place, "intermediate tensor")
    first, second = table.get("builtin_options"), table.get("builtin_options_2")
    if first is not None and second is not None:
        raise ModelFormatError(f"{place}: has two kinds of options, {first.name} and {second.name}")
    return Operator(code, inputs, outputs, first if second is None else second, table, intermediates)


def _listed(tensors: list[Tensor], table: Table, field: str, where: str, what: str) -> list[Tensor]:
    return [_at(tensors, index, where, what) for index in _integers(table.get(field))]


def _add_signature(model: Model, table: Table) -> None:
    key = table.get("signature_key") or ""
    check_new_key(key, [signature.key for signature in model.signatures])
    where = f"signature '{key}'"
    subgraph: Subgraph = _at(model.subgraphs, table.get("subgraph_index"), where, "subgraph")

    def arguments(field: str) -> dict[str, Tensor]:
        named: dict[str, Tensor] = {}
        for entry in table.get(field) or []:
            name = entry.get("name") or ""
            if name in named:
                raise ModelFormatError(f"{where}: {field} names '{name}' twice")
            named[name] = _at(subgraph.tensors, entry.get("tensor_index"), where, f"{field}: tensor")
        return named

    model.signatures.append(Signature(key, subgraph, arguments("inputs"), arguments("outputs"), table))


def _integers(values: Sequence[int] | None) -> tuple[int, ...]:
    if values is None:
        return ()
    return tuple(values.tolist()) if isinstance(values, np.ndarray) else tuple(values)


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
