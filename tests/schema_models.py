"""Small models for the tests of edge_opt.schema, made with TFLite's object API, and a comparison with it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flatbuffers
import numpy as np
from ai_edge_litert import schema_py_generated as tfl

from edge_opt.schema import Data, Table


def pack(model: Any) -> bytes:
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), file_identifier=b"TFL3")
    return bytes(builder.Output())


def unpack(content: bytes) -> Any:
    return tfl.ModelT.InitFromObj(tfl.Model.GetRootAs(content, 0))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def int32s(*values: int) -> Any:
    return np.array(values, np.int32)


def quantizations() -> dict[str, Any]:
    """One of every kind."""
    made = {}
    made["per_tensor"] = tfl.QuantizationParametersT(
        min=np.array([-1.5], np.float32),
        max=np.array([1.5], np.float32),
        scale=np.array([0.25], np.float32),
        zeroPoint=np.array([-3], np.int64),
    )
    made["per_axis"] = tfl.QuantizationParametersT(
        scale=np.array([0.5, 0.25], np.float32), zeroPoint=np.array([0, 1], np.int64), quantizedDimension=1
    )
    made["empty"] = tfl.QuantizationParametersT(scale=np.array([], np.float32))
    made["blockwise"] = tfl.QuantizationParametersT(
        detailsType=tfl.QuantizationDetails.BlockwiseQuantization,
        details=tfl.BlockwiseQuantizationT(scales=3, zeroPoints=-1, blockSize=32, blockShape=int32s(1, 32)),
    )
    made["custom"] = tfl.QuantizationParametersT(
        detailsType=tfl.QuantizationDetails.CustomQuantization,
        details=tfl.CustomQuantizationT(custom=np.arange(5, dtype=np.uint8)),
    )
    return made


def sparsity() -> Any:
    dense = tfl.DimensionMetadataT(format=tfl.DimensionType.DENSE, denseSize=4)
    sparse = tfl.DimensionMetadataT(
        format=tfl.DimensionType.SPARSE_CSR,
        arraySegmentsType=tfl.SparseIndexVector.Uint8Vector,
        arraySegments=tfl.Uint8VectorT(values=np.array([0, 2], np.uint8)),
        arrayIndicesType=tfl.SparseIndexVector.Uint16Vector,
        arrayIndices=tfl.Uint16VectorT(values=np.array([1, 3], np.uint16)),
    )
    return tfl.SparsityParametersT(
        traversalOrder=int32s(0, 1), blockMap=int32s(), dimMetadata=[dense, sparse]
    )


def tensors() -> list[Any]:
    made = [
        tfl.TensorT(
            name=name, shape=int32s(2, 2), type=tfl.TensorType.INT8, buffer=1, quantization=parameters
        )
        for name, parameters in quantizations().items()
    ]
    made.append(tfl.TensorT(name="scalar", shape=int32s(), type=tfl.TensorType.FLOAT32, hasRank=True))
    made.append(tfl.TensorT(name="state", shape=int32s(1), isVariable=True, shapeSignature=int32s(-1)))
    made.append(
        tfl.TensorT(name="sparse", shape=int32s(4, 4), buffer=2, sparsity=sparsity(), externalBuffer=7)
    )
    kind = tfl.VariantSubTypeT(shape=int32s(3), type=tfl.TensorType.INT4, hasRank=True)
    made.append(tfl.TensorT(name="вариант", shape=None, type=tfl.TensorType.VARIANT, variantTensors=[kind]))
    return made


def operators() -> list[Any]:
    reshape = tfl.OperatorT(
        opcodeIndex=0,
        inputs=int32s(0, -1),
        outputs=int32s(1),
        builtinOptionsType=tfl.BuiltinOptions.ReshapeOptions,
        builtinOptions=tfl.ReshapeOptionsT(newShape=int32s(4)),
        mutatingVariableInputs=np.array([True, False]),
        intermediates=int32s(),
        debugMetadataIndex=3,
    )
    custom = tfl.OperatorT(
        opcodeIndex=1, inputs=int32s(1), outputs=int32s(2), customOptions=np.arange(9, dtype=np.uint8)
    )
    composite = tfl.OperatorT(
        opcodeIndex=2,
        inputs=int32s(2),
        outputs=int32s(3),
        builtinOptions2Type=tfl.BuiltinOptions2.StableHLOCompositeOptions,
        builtinOptions2=tfl.StableHLOCompositeOptionsT(
            name="odml.rms_norm",
            decompositionSubgraphIndex=1,
            compositeAttributes=np.arange(7, dtype=np.uint8),
            version=1,
        ),
    )
    return [reshape, custom, composite]


def everything() -> Any:
    """A model with a bit of everything; it makes no sense to run it."""
    codes = [
        tfl.OperatorCodeT(builtinCode=tfl.BuiltinOperator.RESHAPE, deprecatedBuiltinCode=22),
        tfl.OperatorCodeT(builtinCode=32, deprecatedBuiltinCode=32, customCode="MyOp", version=2),
        tfl.OperatorCodeT(builtinCode=tfl.BuiltinOperator.STABLEHLO_COMPOSITE, deprecatedBuiltinCode=127),
    ]
    main = tfl.SubGraphT(
        tensors=tensors(), inputs=int32s(0), outputs=int32s(3), operators=operators(), name="main"
    )
    body = tfl.SubGraphT(tensors=[], inputs=int32s(), outputs=int32s(), operators=[], name="")
    signature = tfl.SignatureDefT(
        inputs=[tfl.TensorMapT(name="x", tensorIndex=0)],
        outputs=[tfl.TensorMapT(name="y", tensorIndex=3)],
        signatureKey="serving_default",
        subgraphIndex=0,
    )
    return tfl.ModelT(
        version=3,
        operatorCodes=codes,
        subgraphs=[main, body],
        description="everything",
        buffers=[
            tfl.BufferT(),
            tfl.BufferT(data=np.arange(40, dtype=np.uint8)),
            tfl.BufferT(data=np.arange(7, dtype=np.uint8)),
            tfl.BufferT(data=np.array([], np.uint8)),
            tfl.BufferT(offset=1, size=1),
        ],
        metadataBuffer=int32s(3),
        metadata=[tfl.MetadataT(name="min_runtime_version", buffer=2)],
        signatureDefs=[signature],
        externalBufferGroups=[tfl.ExternalBufferGroupT(name="weights.bin")],
        externalBuffers=[tfl.ExternalBufferT(id=7, group=0, offset=64, length=128, packing="raw")],
    )


def with_data_after(model: Any, *payloads: bytes, alignments: Sequence[int] = ()) -> bytes:
    """The model with these buffers stored after the flatbuffer, as ai-edge-quantizer writes them."""
    first = len(model.buffers)
    model.buffers += [tfl.BufferT(offset=2, size=len(payload)) for payload in payloads]
    content = bytearray(pack(model))
    for index, payload in enumerate(payloads, first):
        content += bytes(-len(content) % (alignments[index - first] if alignments else 16))
        _patch(content, tfl.Model.GetRootAs(content, 0).Buffers(index)._tab, 6, len(content))
        content += payload
    return bytes(content)


def with_options_after(model: Any, options: bytes) -> bytes:
    """The model with its first operator's custom options stored after the flatbuffer."""
    model.subgraphs[0].operators[0].largeCustomOptionsOffset = 2
    model.subgraphs[0].operators[0].largeCustomOptionsSize = len(options)
    content = bytearray(pack(model))
    operator = tfl.Model.GetRootAs(content, 0).Subgraphs(0).Operators(0)
    _patch(content, operator._tab, 22, len(content))
    return bytes(content) + options


def _patch(content: bytearray, table: Any, slot: int, value: int) -> None:
    at = table.Pos + table.Offset(slot)
    content[at : at + 8] = value.to_bytes(8, "little")


def assert_same(table: Table, expected: Any, file: bytes, path: str = "Model") -> None:
    """Every field of `table` is that of the object that the generated bindings read from `file`."""
    camel = {name.lower(): name for name in vars(expected)}
    fields = {name: camel[name.replace("_", "")] for name in table.spec.by_name}
    assert len(fields) == len(camel), path
    for name, theirs in fields.items():
        _assert_same_value(table, name, getattr(expected, theirs), file, f"{path}.{name}")


def _assert_same_value(table: Table, name: str, expected: Any, file: bytes, path: str) -> None:
    value = table.get(name)
    if isinstance(value, Data):
        stored = expected
        if value.external:
            stored = file[value.offset : value.offset + value.length]
        assert bytes(value.view()) == bytes(stored), path
    elif isinstance(value, Table):
        assert_same(value, expected, file, path)
    elif isinstance(value, list):
        assert len(value) == len(expected), path
        for index, item in enumerate(value):
            if isinstance(item, Table):
                assert_same(item, expected[index], file, f"{path}[{index}]")
            else:
                assert item == expected[index].decode(), path
    elif isinstance(value, str):
        assert value == expected.decode(), path
    elif isinstance(value, np.ndarray):
        assert value.dtype == expected.dtype, path
        assert value.tobytes() == expected.tobytes(), path
    elif not _says_where(table, name):
        assert value == expected, path


def _says_where(table: Table, name: str) -> bool:
    """Whether the field says where bytes lie that the reader has turned into `Data`."""
    if name in {"offset", "size"} and table.name == "Buffer":
        return "data" in table.fields
    return name.startswith("large_custom_options") and isinstance(table.get("custom_options"), Data)
