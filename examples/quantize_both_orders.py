"""Quantize a language model before and after its heads are split, with the same calibration data, and compare.

    python examples/quantize_both_orders.py MODEL.tflite OUT_DIR [--recipe a16w8] [--samples 4] [--judged 16]
        [--average] [--json]

Writes OUT_DIR/split.tflite and quantized.tflite, and of both orders split_then_quantized.tflite and
quantized_then_split.tflite. Needs the extra `quantizer`, and `torch` for the NPU recipes (a16w8, a8w8, ...).

Inputs are random, with different seeds for calibration and for judging: put your own data into `inputs_of`.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

import edge_opt
from edge_opt.runtime.description import describe
from edge_opt.runtime.inputs import array_of, converted, plan
from edge_opt.runtime.runner import Worker

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "testdata"))
from quantize_model import (
    LIBRARY_RECIPES,
    NPU_RECIPES,
    extremes,
    quantize,
)  # a script of this checkout

Array = np.ndarray[Any, np.dtype[Any]]
Inputs = dict[str, Array]
JUDGED_FROM = 1000  # seeds of the inputs that no calibration has seen
ORDERS = ("split_then_quantized", "quantized_then_split")


def inputs_of(model: Path, seeds: range) -> dict[str, list[Inputs]]:
    """For each signature, inputs as its callers would give them."""
    return {
        signature.name: [
            {made.info.name: array_of(made) for made in plan(signature, seed=seed)}
            for seed in seeds
        ]
        for signature in describe(edge_opt.load(model)).values()
    }


def make_both(
    model: Path, folder: Path, recipe: str, data: dict[str, list[Inputs]], calibrate: Any
) -> None:
    """The two orders, from the same data."""
    split, quantized = folder / "split.tflite", folder / "quantized.tflite"
    edge_opt.convert(model, split, overwrite=True)
    quantize(split, folder / f"{ORDERS[0]}.tflite", recipe, data=data, calibrate=calibrate)
    quantize(model, quantized, recipe, data=data, calibrate=calibrate)
    edge_opt.convert(quantized, folder / f"{ORDERS[1]}.tflite", overwrite=True)


def averages(quantizer: Any, data: dict[str, list[Inputs]]) -> Any:
    """Ranges as the quantizer makes them: a moving average over the samples, which later extremes hardly move."""
    return quantizer.calibrate(data)


def judge(
    worker: Worker, model: Path, other: Path, data: dict[str, list[Inputs]]
) -> dict[str, dict[str, float]]:
    """How far `other` is from the float model, by output: noise over all inputs, and for logits the best token."""
    described = describe(edge_opt.load(other))
    found: dict[str, dict[str, float]] = {}
    for signature in describe(edge_opt.load(model)).values():
        takes = {info.name: info for info in described[signature.name].inputs}
        gives = {info.name: info for info in described[signature.name].outputs}
        pairs: dict[str, list[tuple[Array, Array]]] = {info.name: [] for info in signature.outputs}
        for inputs in data[signature.name]:
            coded = {
                info.name: converted(inputs[info.name], info, takes[info.name])
                for info in signature.inputs
            }
            reference = worker.run(model, signature.name, inputs)
            results = worker.run(other, signature.name, coded)
            for info in signature.outputs:
                pairs[info.name].append(
                    (reference[info.name], converted(results[info.name], gives[info.name], info))
                )
        for name, both in pairs.items():
            found[f"{signature.name}/{name}"] = figures(name, both)
    return found


def figures(name: str, pairs: list[tuple[Array, Array]]) -> dict[str, float]:
    """Signal to noise in dB; for logits also the share of rows whose best token is the same."""
    a, b = (np.stack(side).astype(np.float64) for side in zip(*pairs, strict=True))
    noise = float(np.square(a - b).sum())
    made = {"snr_db": float(10 * np.log10(np.square(a).sum() / noise)) if noise else float("inf")}
    if "logits" in name:
        made["top1"] = float(np.mean(a.argmax(-1) == b.argmax(-1)))
        made["rows"] = float(a.size // a.shape[-1])
    return made


def scales(model: Path) -> int:
    """Different scales among what SOFTMAX reads, of all signatures: one for each block, or one for each head."""
    found = {
        operator.inputs[0].quantization.scale[0]
        for _, graph in edge_opt.load(model).entry_points()
        for operator in graph.operators
        if operator.name == "SOFTMAX"
        and operator.inputs[0] is not None
        and operator.inputs[0].quantization
    }
    return len(found)


def report(
    worker: Worker, model: Path, folder: Path, data: dict[str, list[Inputs]]
) -> dict[str, Any]:
    """Both orders against the float model, and what splitting last did to the quantized one."""
    same = edge_opt.compare(
        folder / "quantized.tflite", folder / f"{ORDERS[1]}.tflite", locate=False
    )
    made: dict[str, Any] = {"splitting_last_is_bitwise": same.bitwise}
    for order in ORDERS:
        path = folder / f"{order}.tflite"
        outputs = judge(worker, model, path, data)
        logits = {name: entry for name, entry in outputs.items() if "top1" in entry}
        others = [entry["snr_db"] for name, entry in outputs.items() if name not in logits]
        made[order] = {
            "softmax_scales": scales(path),
            "logits": logits,
            "other_outputs_snr_db": {
                "lowest": round(min(others), 2),
                "median": round(float(np.median(others)), 2),
            }
            if others
            else None,
        }
    return made


def main() -> int:
    """Parse the command line, make both and say how they compare."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument(
        "--recipe", default="a16w8", choices=sorted([*NPU_RECIPES, *LIBRARY_RECIPES])
    )
    parser.add_argument("--samples", type=int, default=4, help="inputs for the calibration")
    parser.add_argument("--judged", type=int, default=16, help="inputs for judging")
    parser.add_argument(
        "--average", action="store_true", help="ranges as `Quantizer.calibrate` makes them"
    )
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    with Worker() as worker:
        calibration = inputs_of(arguments.model, range(arguments.samples))
        calibrate = averages if arguments.average else extremes
        make_both(arguments.model, arguments.folder, arguments.recipe, calibration, calibrate)
        judged = inputs_of(arguments.model, range(JUDGED_FROM, JUDGED_FROM + arguments.judged))
        found = report(worker, arguments.model, arguments.folder, judged)
    if arguments.json:
        print(json.dumps(found))
        return 0
    print(f"splitting last changed no bit: {found['splitting_last_is_bitwise']}")
    for order in ORDERS:
        entry = found[order]
        print(
            f"{order}: {entry['softmax_scales']} scales of logits, other outputs {entry['other_outputs_snr_db']}"
        )
        for name, values in entry["logits"].items():
            print(
                f"  {name}: SNR {values['snr_db']:.2f} dB, the same best token in {values['top1']:.1%} of rows"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
