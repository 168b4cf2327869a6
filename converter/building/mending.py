"""Mends what litert-torch's stages make: exports of its second converter, windows, and ranges of sums.

It knows files and graphs, not the stages.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.errors import EdgeOptError
from edge_opt.building.sections import metadata_of, replace_file
from edge_opt.building.stages import INSTALL
from edge_opt.ir import Buffer, DType, Model, Operator, Subgraph, Tensor
from edge_opt.ir.cleanup import parts_in_use, remove_unused
from edge_opt.ir.composites import body_of, composite_name
from edge_opt.ir.opening import Opened
from edge_opt.ir.walk import only_reader
from edge_opt.schema import Data, new_table
from edge_opt.schema.litertlm import ASSUMED_WINDOW
from edge_opt.soundness import power_of_two

_FOLDED = {"ADD": np.add, "MUL": np.multiply}
_LARGEST_CODE = 32767  # of int16; a symmetric range's scale is the range divided by it


def mend_export(path: Path) -> None:
    """Make a float bundle of litert-torch's second converter like one of its first, as the quantizer expects it."""
    opened = Opened(path)
    model = opened.main().model
    join_biases(model)
    name_bodies(model)
    fold_constants(model)
    save_main(opened, path)


def save_main(opened: Opened, path: Path) -> None:
    """Write an opened bundle, whose main model has changed, over its own file."""
    opened.main().changed = True
    replace_file(path, opened.save)


def join_biases(model: Model) -> None:
    """Give products their biases, as litert-torch's first converter does: `[1,T,D] -> FULLY_CONNECTED -> [1,T,N]`.

    The second one writes `[1,T,D] -> FULLY_CONNECTED -> [T,N] -> ADD -> [T,N] -> RESHAPE`.
    """
    for graph in model.subgraphs:
        for addition in graph.operators:
            product = _product_to_join(graph, addition)
            if product is None:
                continue
            result = addition.output
            result.shape = (*product.input(0).shape[:-1], result.shape[-1])
            options = new_table("FullyConnectedOptions", keep_num_dims=True)
            operands = [*product.inputs[:2], addition.input(1)]
            whole = Operator(product.code, operands, [result], options)
            graph.replace([product, addition], {whole: graph.after(addition)})


def name_bodies(model: Model) -> None:
    """Put a composite's name before the names of the tensors that its body computes.

    litert-torch keeps norms in float by the names of their tensors, which contain `RMSNorm` or `rms_norm`. Its second
    converter names them `tfl.mul`, and norms in int16 are too coarse on LiteRT's CPU kernels (Qwen2.5-Coder-0.5B: 106
    times the checkpoint's perplexity), though not on an NPU that computes the composite as a whole.
    """
    for operator in model.operators():
        name = composite_name(operator)
        if not name:
            continue
        for inner in body_of(model, operator).operators:
            for tensor in inner.outputs:
                if not tensor.name.startswith(f"{name}/"):
                    tensor.name = f"{name}/{tensor.name}"


def fold_constants(model: Model) -> None:
    """Replace sums and products of float constants by their values, which entry points share if they share constants.

    litert-torch's second converter leaves it to each prefill and decode step to compute the weights of Gemma's norms,
    `1 + w`, and to multiply weights by a factor that it moves to them from results, such as Granite's residual
    multiplier:

        W [N,D], factor -> MUL -> FULLY_CONNECTED

    The quantizer would take the results for activations.
    """
    usage = parts_in_use(model)
    values: dict[tuple[Any, ...], Buffer] = {}
    for graph in model.subgraphs:
        for operator in graph.operators:
            compute = _FOLDED.get(operator.name)
            if compute is None or operator.has_activation:
                continue
            if graph.is_output(operator.output) or not all(map(_is_float_constant, operator.given)):
                continue
            operands = tuple((id(tensor.buffer), tensor.shape) for tensor in operator.given)
            key = (compute, operands)
            if key not in values:
                first = np.asarray(operator.input(0).array(), np.float32)
                second = np.asarray(operator.input(1).array(), np.float32)
                values[key] = Buffer(Data(compute(first, second).tobytes()))
            graph.remove(operator)
            operator.output.buffer = values[key]
    remove_unused(model, usage)


def _is_float_constant(tensor: Tensor) -> bool:
    return tensor.has_numbers and tensor.dtype is DType.FLOAT32


def _product_to_join(graph: Subgraph, addition: Operator) -> Operator | None:
    """The product whose bias an operator adds: it has no other reader, no options, and RESHAPEs read the sum."""
    if addition.name != "ADD" or addition.has_activation:
        return None
    result = addition.input(0)
    bias = addition.input(1)
    product = result.producer
    if product is None or product.name != "FULLY_CONNECTED" or any(product.inputs[2:]):
        return None
    if product.options is not None and product.options.fields:
        return None
    if not bias.is_constant or bias.shape != product.input(1).shape[:1]:
        return None
    if only_reader(graph, result) is None or graph.is_output(addition.output):
        return None
    return product if {one.name for one in addition.output.consumers} <= {"RESHAPE"} else None


def write_window(path: Path, window: int) -> None:
    """Write the window of sliding layers to the executor metadata; litert-torch 0.10 does so for ring buffers only.

    Raises:
        EdgeOptError: there is no executor metadata; LiteRT-LM would assume another window.
    """
    from litert_lm_builder.runtime.proto.executor_metadata_pb2 import ExecutorMetadata

    def write(metadata: ExecutorMetadata) -> None:
        metadata.llm_executor_metadata.attention_mask_settings.sliding_window_size = window

    if metadata_of(path, "ExecutorMetadataProto", ExecutorMetadata, edit=write) is None:
        raise EdgeOptError(
            f"the exported bundle has no executor metadata, without which LiteRT-LM assumes a window of "
            f"{ASSUMED_WINDOW} instead of {window}: {INSTALL}"
        )


def widen_sums(model: Path, ranges: Path) -> None:
    """Widen ranges of broadcasting sums that end at a power of two by 1 %: LiteRT aborts on them in int16.

    For example, the auxiliary model's mask for a ring buffer of 512 adds 1 to positions up to 511.
    """
    sums = _broadcasting_sums(model)
    for file in ranges.glob("*.json"):
        content = json.loads(file.read_text(encoding="utf-8"))
        known = content.get("model_qsvs", {})
        for name in sums & known.keys():
            ends = np.array([known[name]["min"], known[name]["max"]], np.float64)
            reach = np.abs(ends).max()
            if reach > 0 and power_of_two(reach / _LARGEST_CODE):
                known[name]["min"], known[name]["max"] = (1.01 * ends).tolist()
        file.write_text(json.dumps(content), encoding="utf-8")


def _broadcasting_sums(model: Path) -> set[str]:
    """Names of the results of all ADDs of different shapes."""
    names: set[str] = set()
    for part in Opened(model).parts:
        for graph in part.model.subgraphs:
            sums = [operator for operator in graph.operators if operator.name == "ADD"]
            names |= {one.output.name for one in sums if one.input(0).shape != one.input(1).shape}
    return names
