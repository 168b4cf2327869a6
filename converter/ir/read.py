"""Tables -> IR. Checks what makes a graph a graph (indices, one producer each, execution order); edits nothing."""

import gc
import math
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from edge_opt.ir.dtypes import DType
from edge_opt.ir.extent import check_extent
from edge_opt.ir.graph import Buffer, Operator, OperatorCode, Subgraph, Tensor
from edge_opt.ir.model import Metadata, Model, Signature
from edge_opt.ir.operators import misformed
from edge_opt.ir.options import options_table
from edge_opt.ir.quantization import Quantization
from edge_opt.ir.references import SUBGRAPH_FIELDS, check_references
from edge_opt.schema.bundle import open_bundle
from edge_opt.schema.data import Source
from edge_opt.schema.errors import ModelFormatError, UsageError, unknown
from edge_opt.schema.reader import ModelFile, read_model
from edge_opt.schema.table import Table

_MAX_ELEMENTS = 1 << 48
_MAX_RANK = 32  # of a numpy array, in its older versions


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
        return from_tables(read_model(section))


def _section(source: object, model: str) -> Source:
    bundle = open_bundle(source) if isinstance(source, str | os.PathLike) else None
    if bundle is None:
        what = source if isinstance(source, str | os.PathLike) else "what was given"
        raise UsageError(f"{what} is no bundle: leave model={model!r} out")
    sections = {
        section.model_type: place for place, section in enumerate(bundle.sections) if section.is_model
    }
    if model not in sections:
        raise unknown("model", model, sections)
    return bundle.content(sections[model])


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
        model.subgraphs.append(_SubgraphReader(model, table, index, sound_scales).read())
    if not model.subgraphs:
        raise ModelFormatError("expected at least one subgraph, found none", table="Model", field="subgraphs")
    for table in root.get("signature_defs") or []:
        _add_signature(model, table)
    for table in root.get("metadata") or []:
        name = table.get("name") or ""
        buffer = _at(model.buffers, table.get("buffer"), f"metadata '{name}'", "buffer")
        model.metadata.append(Metadata(name, buffer, table))
    for index in _integers(root.get("metadata_buffer")):
        model.metadata_buffers.append(_at(model.buffers, index, "metadata_buffer", "buffer"))
    check_references(model)
    return model


def _operator_code(table: Table) -> OperatorCode:
    deprecated, builtin = table.get("deprecated_builtin_code"), table.get("builtin_code")
    # Writers before TFLite schema 3a fill only the deprecated field; the runtime takes the larger of the two.
    return OperatorCode(max(deprecated, builtin), table.get("version"), table.get("custom_code"), table)


def _at(items: Sequence[Any], index: int, where: str, what: str) -> Any:
    if 0 <= index < len(items):
        return items[index]
    raise ModelFormatError(f"{where}: {what} {index} does not exist, there are {len(items)}")


class _SubgraphReader:
    def __init__(self, model: Model, table: Table, index: int, sound_scales: set[int]) -> None:
        self._model = model
        self._sound_scales = sound_scales
        self._table = table
        self._place = f"subgraph '{table.get('name') or f'#{index}'}'"
        self._graph = Subgraph(table.get("name") or "", table)
        self._defined: set[int] = set()
        self._scratch: list[tuple[str, Tensor]] = []

    def read(self) -> Subgraph:
        graph, table = self._graph, self._table
        graph.tensors = [self._tensor(t, i) for i, t in enumerate(table.get("tensors") or [])]
        graph.inputs = self._tensors(table, "inputs", f"{self._place} inputs", "tensor")
        graph.outputs = self._tensors(table, "outputs", f"{self._place} outputs", "tensor")
        self._defined.update(id(tensor) for tensor in graph.inputs)
        for position, operator in enumerate(table.get("operators") or []):
            self._read_operator(operator, position)
        for where, tensor in self._scratch:
            if id(tensor) in self._defined:
                raise self._too_early(where, tensor)
        return graph

    def _fail(self, message: str) -> ModelFormatError:
        return ModelFormatError(f"{self._place}, {message}")

    def _tensors(self, table: Table, field: str, where: str, what: str) -> list[Tensor]:
        return [_at(self._graph.tensors, index, where, what) for index in _integers(table.get(field))]

    def _tensor(self, table: Table, index: int) -> Tensor:
        name = table.get("name") or ""
        where = f"tensor {index} '{name}'"
        signature, quantization = table.get("shape_signature"), table.get("quantization")
        shape = self._shape(table.get("shape"), where, 0)
        # Buffer 0 says that there are no bytes, whatever it holds: the runtime never looks into it.
        buffer = _at(self._model.buffers, table.get("buffer"), f"{self._place}, {where}", "buffer")
        tensor = Tensor(
            name,
            shape,
            DType(table.get("type")),
            quantization=None if quantization is None else Quantization(quantization),
            buffer=buffer if table.get("buffer") else None,
            shape_signature=None if signature is None else self._shape(signature, where, -1),
            is_variable=table.get("is_variable"),
            table=table,
        )
        if tensor.wrong_size is not None:
            raise self._fail(f"{where}: {tensor.wrong_size}")
        self._check_quantization(tensor, where)
        return tensor

    def _shape(self, sizes: Sequence[int] | None, where: str, least: int) -> tuple[int, ...]:
        if sizes is not None and len(sizes) > _MAX_RANK:
            raise self._fail(f"{where}: {len(sizes)} dimensions, expected at most {_MAX_RANK}")
        shape = _integers(sizes)
        if any(size < least for size in shape) or math.prod(max(size, 1) for size in shape) > _MAX_ELEMENTS:
            raise self._fail(f"{where}: shape {list(shape)} is not one that memory can hold")
        return shape

    def _check_quantization(self, tensor: Tensor, where: str) -> None:
        parameters = tensor.quantization
        if parameters is None or not parameters.is_affine:
            return
        scale = parameters.scale
        if id(scale) not in self._sound_scales:
            if not np.isfinite(scale).all() or (scale < 0).any():
                raise self._fail(f"{where}: quantization scales must be finite and not negative")
            # A long vector that many tensors share is looked through once.
            self._sound_scales.add(id(scale))
        if len(parameters.zero_point) not in (1, len(scale)):
            raise self._fail(f"{where}: {len(scale)} scales but {len(parameters.zero_point)} zero points")
        if not parameters.is_per_axis or not tensor.shape:
            return
        axis = parameters.dimension
        if not 0 <= axis < len(tensor.shape) or tensor.shape[axis] != len(scale):
            raise self._fail(f"{where}: {len(scale)} scales do not fit axis {axis} of {list(tensor.shape)}")

    def _read_operator(self, table: Table, position: int) -> None:
        place = f"{self._place}, operator {position}"
        codes = self._model.operator_codes
        code: OperatorCode = _at(codes, table.get("opcode_index"), place, "operator code")
        where, place = f"operator {position} ({code.name})", f"{place} ({code.name})"
        tensors = self._graph.tensors
        inputs: list[Tensor | None] = [
            None if index == -1 else _at(tensors, index, place, "input tensor")
            for index in _integers(table.get("inputs"))
        ]
        outputs = self._tensors(table, "outputs", place, "output tensor")
        for tensor in inputs:
            if tensor is None or id(tensor) in self._defined or _stands_alone(tensor):
                continue
            if code.name != "CUSTOM":
                raise self._too_early(where, tensor)
            # What nobody defines later on either is scratch memory that a custom operator asks for.
            self._scratch.append((where, tensor))
        for output in outputs:
            if id(output) in self._defined or output.is_constant:
                raise self._fail(f"{where}: defines '{output.name}', which is already defined")
            self._defined.add(id(output))
        intermediates = self._tensors(table, "intermediates", place, "intermediate tensor")
        reason = misformed(code.name, inputs, outputs)
        if reason is not None:
            raise self._fail(f"{where}: {reason}")
        options = self._options(table, code, where)
        self._graph.append(Operator(code, inputs, outputs, options, table, intermediates))

    def _too_early(self, where: str, tensor: Tensor) -> ModelFormatError:
        why = "cyclic, out of order, or by nobody"
        return self._fail(f"{where}: reads '{tensor.name}' before it is defined ({why})")

    def _options(self, table: Table, code: OperatorCode, where: str) -> Table | None:
        """Options of another operator are refused: the runtime would not look at them, or take them for its own."""
        first, second = table.get("builtin_options"), table.get("builtin_options_2")
        if first is not None and second is not None:
            raise self._fail(f"{where}: has two kinds of options, {first.name} and {second.name}")
        options: Table | None = first if second is None else second
        expected = options_table(code.name)
        if options is not None and expected is not None and options.name != expected:
            raise self._fail(f"{where}: has {options.name}, expected {expected}")
        if options is None and expected in SUBGRAPH_FIELDS:
            raise self._fail(f"{where}: has no options, which say what subgraph to run")
        return options


def _stands_alone(tensor: Tensor) -> bool:
    """Whether there is something to read without an operator that defines it.

    Source: TFLite, tools/verifier.cc, VerifySubGraphConsistency; a tensor without elements needs no bytes.
    """
    assert tensor.table is not None
    stored = tensor.is_constant or bool(tensor.table.get("external_buffer"))
    return stored or tensor.is_variable or not tensor.elements


def _add_signature(model: Model, table: Table) -> None:
    key = table.get("signature_key") or ""
    if any(signature.key == key for signature in model.signatures):
        raise ModelFormatError(f"signature '{key}' is there twice", table="Model", field="signature_defs")
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
