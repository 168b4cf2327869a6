"""Quantize .tflite models of the test data with ai-edge-quantizer, as a user would before edge-opt.

Calibration data is random: the graphs are right, the accuracy means nothing.

    quantize_model.py RECIPE MODEL.tflite ... [--out DIR] [--samples 1]

Each MODEL.tflite becomes MODEL.RECIPE.tflite. Needs the extra `quantizer`, and `torch` for the NPU recipes.
"""

import argparse
import importlib
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class NpuRecipe:
    """A choice in litert-torch's recipe for NPUs: activation bits, norms in float, bits of products and caches."""

    wide: bool
    float_norms: bool = True
    product_bits: int = 0
    narrow_caches: bool = False


# `-int` quantizes the norms too; `-bmmN` gives BATCH_MATMUL other bits, which puts a QUANTIZE on either side of it;
# `-kv8` keeps keys and values in int8, as Gemma4-E4B's export for NPUs does.
NPU_RECIPES = {
    "a16w8": NpuRecipe(wide=True),
    "a8w8": NpuRecipe(wide=False),
    "a16w8-int": NpuRecipe(wide=True, float_norms=False),
    "a8w8-int": NpuRecipe(wide=False, float_norms=False),
    "a16w8-bmm8": NpuRecipe(wide=True, product_bits=8),
    "a16w8-kv8": NpuRecipe(wide=True, narrow_caches=True),
    "a8w8-bmm16": NpuRecipe(wide=False, product_bits=16),
}
# names in ai_edge_quantizer.recipe
LIBRARY_RECIPES = {
    "dynamic": "dynamic_wi8_afp32",
    "int4-blocks": "dynamic_wi4b32_afp32",
    "weight-only": "weight_only_wi8_afp32",
    "static8": "static_wi8_ai8",
    "static16": "static_wi8_ai16",
}
CACHES = (["kv_cache_k_{}", "kv_slice_k_{}"], ["kv_cache_v_{}", "kv_slice_v_{}"])


def lib(name: str) -> Any:
    """Import a heavy library at the moment it is needed."""
    return importlib.import_module(name)


def random_input(name: str, details: dict[str, Any], rng: np.random.Generator) -> Array:
    """Values that an input of this name and type can take; a mask leaves column 0 and the row's own token visible."""
    shape, dtype = [max(1, int(n)) for n in details["shape"]], np.dtype(details["dtype"])
    is_mask = "mask" in name
    rows, columns = shape[-2:] if len(shape) > 1 else (1, shape[-1] if shape else 1)
    shown = np.eye(rows, columns, columns - rows, dtype=bool)
    shown[:, 0] = True
    if dtype == np.bool_ or (is_mask and dtype.kind in "iu"):
        return ((rng.random(shape) < 0.7) | shown).astype(dtype)
    if is_mask and dtype.kind == "f":
        return np.where((rng.random(shape) < 0.4) & ~shown, -100.0, 0.0).astype(dtype)
    if dtype.kind == "f":
        return rng.standard_normal(shape).astype(dtype)
    if "pos" in name:
        return np.arange(np.prod(shape), dtype=dtype).reshape(shape)
    return rng.integers(1, 8, shape).astype(dtype)


def calibration_data(path: Path, samples: int) -> dict[str, list[dict[str, Array]]]:
    """Random inputs for every signature of the model, the same on every run."""
    interpreter = lib("ai_edge_litert.interpreter").Interpreter(model_path=str(path))
    rng = np.random.default_rng(0)
    data = {}
    for key in interpreter.get_signature_list():
        inputs = interpreter.get_signature_runner(key).get_input_details()
        data[key] = [
            {name: random_input(name, details, rng) for name, details in inputs.items()}
            for _ in range(samples)
        ]
    return data


def extremes(quantizer: Any, data: dict[str, list[dict[str, Array]]]) -> dict[str, dict[str, Any]]:
    """The smallest and the largest value of every tensor; the quantizer's own `calibrate` averages over the samples."""
    total: dict[str, dict[str, Any]] = {}
    for signature, samples in data.items():
        for inputs in samples:
            for name, found in quantizer.calibrate({signature: [inputs]}).items():
                known = total.setdefault(name, dict(found))
                for key, choose in (("min", np.minimum), ("max", np.maximum)):
                    if key in found and key in known:
                        known[key] = choose(known[key], found[key])
    return total


def _keep_embeddings_float() -> None:
    """Teach the quantizer that an input named *embeddings* stays float, as NPU pipelines want it."""
    manager, types = lib("ai_edge_quantizer.algorithm_manager"), lib("ai_edge_quantizer.qtyping")
    minmax = lib("ai_edge_quantizer.algorithms.uniform_quantize.naive_min_max_quantize")
    calibration = lib("litert_torch.generative.export_hf.experimental.calib.quant_utils")
    manager.register_quantized_op(
        algorithm_key=manager.AlgorithmName.MIN_MAX_UNIFORM_QUANT,
        tfl_op_name=types.TFLOperationName.INPUT,
        init_qsv_func=minmax.init_qsvs,
        calibration_func=minmax.min_max_calibrate,
        materialize_func=calibration.get_custom_materialize_input(".*embeddings"),
    )


def quantize(
    model: Path,
    out: Path,
    recipe: str,
    samples: int = 1,
    data: dict[str, list[dict[str, Array]]] | None = None,
    calibrate: Callable[[Any, dict[str, list[dict[str, Array]]]], Any] = lambda tool, data: (
        tool.calibrate(data)
    ),
) -> None:
    """Write `out`, the model quantized by a recipe of NPU_RECIPES or LIBRARY_RECIPES.

    `data` holds inputs for the calibration, by signature; random ones are made where it is None. `calibrate` makes
    ranges of them: the quantizer's own way, or `extremes`.
    """
    quantizer = lib("ai_edge_quantizer.quantizer").Quantizer(str(model))
    data = calibration_data(model, samples) if data is None else data
    npu = NPU_RECIPES.get(recipe)
    if npu is None:
        quantizer.load_quantization_recipe(
            getattr(lib("ai_edge_quantizer.recipe"), LIBRARY_RECIPES[recipe])()
        )
        statistics = calibrate(quantizer, data) if quantizer.need_calibration else None
    else:
        calibration = lib("litert_torch.generative.export_hf.experimental.calib.quant_utils")
        _keep_embeddings_float()
        quantizer = calibration.add_main_model_quant_recipe(
            quantizer,
            allow_float_operations=npu.float_norms,
            a16w8=npu.wide,
        )
        if npu.product_bits:
            quantizer.add_static_config(
                regex=".*",
                operation_name=lib("ai_edge_quantizer.qtyping").TFLOperationName.BATCH_MATMUL,
                activation_num_bits=npu.product_bits,
                weight_num_bits=8,
            )
        statistics = calibrate(quantizer, data)
        calibration.align_kv_cache_params(statistics, str(model), *CACHES)
    quantizer.quantize(statistics).export_model(str(out), overwrite=True)
    if npu is not None and npu.narrow_caches:
        narrow_caches(out)


def narrow_caches(path: Path) -> None:
    """Keep int16 caches in int8: a QUANTIZE behind each cache that is read, and two behind new keys and values."""
    ir = lib("edge_opt.ir")
    model = ir.load(path)
    code = next(
        one.code for graph in model.subgraphs for one in graph.operators if one.name == "QUANTIZE"
    )

    def like(tensor: Any, name: str, *, narrow: bool) -> Any:
        scale = float(tensor.quantization.scale[0]) * (258 if narrow else 1)  # 32767 / 127
        dtype = ir.DType.INT8 if narrow else tensor.dtype
        return ir.Tensor(name, tensor.shape, dtype, quantization=ir.Quantization.affine(scale))

    for signature in model.signatures:
        graph, front, behind = signature.subgraph, [], {}
        for names, listed in ((signature.inputs, graph.inputs), (signature.outputs, graph.outputs)):
            for name, tensor in names.items():
                if (
                    not name.startswith("kv_")
                    or tensor.dtype is not ir.DType.INT16
                    or not tensor.consumers
                ):
                    continue
                narrow = graph.add_tensor(like(tensor, f"{tensor.name}/narrow", narrow=True))
                if tensor.producer is None:
                    front.append(ir.Operator(code, [narrow], [tensor]))
                else:
                    wide = graph.add_tensor(like(tensor, f"{tensor.name}/wide", narrow=False))
                    graph.replace_uses(tensor, wide)
                    behind[tensor.producer] = [
                        ir.Operator(code, [tensor], [narrow]),
                        ir.Operator(code, [narrow], [wide]),
                    ]
                names[name] = listed[listed.index(tensor)] = narrow
        graph.arrange([*front, *(new for one in graph for new in (one, *behind.get(one, ())))])
    path.write_bytes(ir.to_bytes(model))


def quantize_in_child(model: Path, out: Path, recipe: str, samples: int) -> bool:
    """Quantize in a process of its own, for calibration runs the model and may crash; True if it was written."""
    command = [
        sys.executable,
        str(Path(__file__).resolve()),
        recipe,
        str(model),
        "--out",
        str(out.parent),
    ]
    result = subprocess.run(
        [*command, "--samples", str(samples)],
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if result.returncode == 0:
        print(f"{model.name}: {out.name}, {out.stat().st_size:,} bytes", flush=True)
        return True
    reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
    print(f"{model.name}: FAILED with exit code {result.returncode}: {reason}", flush=True)
    return False


def main() -> int:
    """Parse the command line and quantize each model; 1 if any of them could not be."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", choices=sorted([*NPU_RECIPES, *LIBRARY_RECIPES]))
    parser.add_argument("models", type=Path, nargs="+", metavar="MODEL.tflite")
    parser.add_argument(
        "--out", type=Path, help="folder of the results; default: beside each model"
    )
    parser.add_argument("--samples", type=int, default=1)
    arguments = parser.parse_args()
    jobs = [
        (model, (arguments.out or model.parent) / f"{model.stem}.{arguments.recipe}.tflite")
        for model in arguments.models
    ]
    if len(jobs) == 1:
        quantize(*jobs[0], arguments.recipe, arguments.samples)
        return 0
    made = [
        quantize_in_child(model, out, arguments.recipe, arguments.samples) for model, out in jobs
    ]
    return 0 if all(made) else 1


if __name__ == "__main__":
    sys.exit(main())
