"""Make the models of `benchmarks/npu.py`: real shapes, random weights, through litert-torch's NPU pipeline.

    npu_models.py FOLDER [NAME ...] [--list]

Each becomes FOLDER/NAME.tflite: the model with prefill and decode, exported, calibrated and quantized (int16
activations, int8 weights, all integer) by `litert_torch.generative.export_hf.experimental.npu_export`. NAME.float32 is
the same model before quantization. Existing models are not made again, so an interrupted run can be repeated. Each
model is made in its own process, in a folder that is removed afterwards. The vocabulary is small unless the name says
otherwise: its share of the time is the same before and after. Needs the extras `torch`, `quantizer` and `lm`, no
network, up to 12 GiB, and two to ten minutes per model.
"""

import argparse
import importlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edge_opt.ir import save
from edge_opt.ir.opening import Opened

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY, WINDOW = 8192, 512
CALIBRATION_STEPS = 4
RING, RECIPE = "sliding_window_ring_buffer_size", "weight_quantization_recipe"


@dataclass(frozen=True)
class Architecture:
    """What a family of models has in common, under the field's names (N, K, H: heads, kv_heads, head_size)."""

    family: str
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int


GEMMA3_270M = Architecture("gemma3", 640, 2048, 4, 1, 256)
GEMMA3_1B = Architecture("gemma3", 1152, 6912, 4, 1, 256)
GEMMA3_4B = Architecture("gemma3", 2560, 10240, 8, 4, 256)
QWEN3_600M = Architecture("qwen3", 1024, 3072, 16, 8, 128)


@dataclass(frozen=True)
class Shape:
    """One model: so many layers, T tokens in a prefill (also others), S in the cache; one layer in `pattern` is global.

    `settings` are those of the pipeline, with recipes of `edge-opt build`, too.
    """

    architecture: Architecture
    layers: int
    prefill: int
    cache: int
    vocabulary: int = VOCABULARY
    pattern: int = 3
    prefills: tuple[int, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)


# Six layers cost what six of the whole model's do, and are made and compiled in minutes.
SHAPES = {
    "6l_128_1024": Shape(GEMMA3_270M, 6, 128, 1024),
    "6l_512_4096": Shape(GEMMA3_270M, 6, 512, 4096),
    "1b_1024_4096": Shape(GEMMA3_1B, 6, 1024, 4096),
    "4b_128_1280": Shape(GEMMA3_4B, 6, 128, 1280),
    "270m_128_1024": Shape(GEMMA3_270M, 18, 128, 1024),
    "qwen_128_1280": Shape(QWEN3_600M, 6, 128, 1280),
    "1b_128_1280": Shape(GEMMA3_1B, 6, 128, 1280),
    "1b_512_4096": Shape(GEMMA3_1B, 6, 512, 4096),
    "4b_1024_4096": Shape(GEMMA3_4B, 6, 1024, 4096),
    "4b_1024_4096_ring": Shape(GEMMA3_4B, 6, 1024, 4096, pattern=6, settings={RING: 1024}),
    "270m_128_1280": Shape(GEMMA3_270M, 18, 128, 1280),
    "1b_26l_1024_4096": Shape(GEMMA3_1B, 26, 1024, 4096),
    "6l_512_4096_ring": Shape(GEMMA3_270M, 6, 512, 4096, settings={RING: 512}),
    "6l_512_4096_ring_5_of_6": Shape(GEMMA3_270M, 6, 512, 4096, pattern=6, settings={RING: 512}),
    "6l_prefills_4096_ring": Shape(
        GEMMA3_270M, 6, 128, 4096, prefills=(256, 512, 1024), settings={RING: 1024}
    ),
    "3l_vocabulary": Shape(GEMMA3_270M, 3, 128, 1024, vocabulary=262144),
    "3l_vocabulary_4_bits": Shape(
        GEMMA3_270M, 3, 128, 1024, vocabulary=262144, settings={RECIPE: "dynamic_wi4_afp32"}
    ),
}
FLOAT = ".float32"


def lib(name: str) -> Any:
    """Import a heavy library when it is needed; typed Any, for none of them ships complete types."""
    return importlib.import_module(name)


def checkpoint(shape: Shape, folder: Path) -> None:
    """A random checkpoint of the shape; one of three layers attends to everything, as in small Gemma3 models."""
    sys.path.insert(0, str(ROOT / "testdata"))
    families, own = lib("checkpoints"), shape.architecture
    sizes = families.Sizes(
        layers=shape.layers,
        heads=own.heads,
        kv_heads=own.kv_heads,
        head_size=own.head_size,
        hidden=own.hidden,
        ffn=own.ffn,
        vocab=shape.vocabulary,
        prefill=shape.prefill,
        cache=shape.cache,
        window=WINDOW,
    )
    config: dict[str, Any] = {"max_position_embeddings": 2 * shape.cache, "initializer_range": 0.02}
    if own.family == "gemma3":
        config["layer_types"] = [
            "sliding_attention" if (layer + 1) % shape.pattern else "full_attention"
            for layer in range(shape.layers)
        ]
    families.save_checkpoint(own.family, sizes, folder, **config)


def prompts(folder: Path, shape: Shape) -> None:
    """Calibration prompts where the pipeline looks for them: a JSON string a line, in the file of the task `ALL`.

    For each prefill one is shorter and one goes on beyond it, one nearly fills the cache: a word is a token.
    """
    folder.mkdir(exist_ok=True)
    reaching = [
        half * length // 2 for length in (shape.prefill, *shape.prefills) for half in (1, 3)
    ]
    lines = (
        " ".join(f"w{(7 * line + 13 * word) % 400 + 4}" for word in range(words))
        for line, words in enumerate([*reaching, 7 * shape.cache // 8])
    )
    (folder / "ALL.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def make(name: str, folder: Path) -> None:
    """Run every stage that has no result yet, then move the model to its place."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    shape, scratch = SHAPES[name.removesuffix(FLOAT)], folder / f"{name}.making"
    scratch.mkdir(parents=True, exist_ok=True)
    source, exported = scratch / "checkpoint", scratch / "exported"
    stage(source, lambda to: checkpoint(shape, to))
    pipeline = "litert_torch.generative.export_hf.experimental.npu_export"
    stages, config = (
        lib(f"{pipeline}.stages"),
        lib(f"{pipeline}.config_manager").build_pipeline_config(
            str(source),
            "qualcomm",
            "SM8750",
            prefill_lengths=[shape.prefill, *shape.prefills],
            cache_length=shape.cache,
            max_calibration_decode_steps=CALIBRATION_STEPS,
            **shape.settings,
        ),
    )
    bundle, made = str(exported / "model.litertlm"), folder / f"{name}.tflite"
    if name.endswith(FLOAT):
        stage(exported, lambda to: stages.npu_export(config, str(to), quantization_recipe="none"))
        save(Opened(bundle).main(may_be_compiled=True).model, made)
    else:
        stage(exported, lambda to: stages.npu_export(config, str(to)))
        prompts(scratch / "prompts", shape)
        calibrate_and_quantize(stages, config, bundle, scratch).replace(made)
    shutil.rmtree(scratch)


def calibrate_and_quantize(stages: Any, config: Any, bundle: str, scratch: Path) -> Path:
    """The quantized model that holds prefill and decode."""
    ranges, quantized = scratch / "calibrated", scratch / "quantized.litertlm"
    stage(
        ranges, lambda to: stages.npu_calibrate(config, bundle, str(scratch / "prompts"), str(to))
    )
    stages.npu_quantize(config, bundle, str(quantized), str(ranges))
    return Path(f"{quantized}.intermediate.tflite")


def stage(result: Path, run: Callable[[Path], None]) -> None:
    """Run one stage into a folder that gets its name when it is complete; skip it where it is there."""
    if result.exists():
        return
    started, partial = time.perf_counter(), result.with_name(result.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    run(partial)
    partial.rename(result)
    print(f"{result.name}: {time.perf_counter() - started:.0f} s", flush=True)


def main() -> int:
    """Make each model in a process of its own, for the exporter keeps its memory; 1 where one failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("names", nargs="*", metavar="NAME", help="default: all, in this order")
    parser.add_argument("--list", action="store_true", help="print the names and shapes")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.list:
        print("\n".join(f"{name:15} {shape}" for name, shape in SHAPES.items()))
        return 0
    unknown = sorted({name.removesuffix(FLOAT) for name in options.names} - set(SHAPES))
    if options.folder is None or unknown:
        parser.error(
            f"no such model: {', '.join(unknown)}" if unknown else "name the folder to write to"
        )
    options.folder.mkdir(parents=True, exist_ok=True)
    missing = [
        name for name in options.names or SHAPES if not (options.folder / f"{name}.tflite").exists()
    ]
    if options.here:
        for name in missing:
            make(name, options.folder)
        return 0
    return max((_in_a_process(name, options.folder) for name in missing), default=0)


def _in_a_process(name: str, folder: Path) -> int:
    log, started = folder / f"{name}.log", time.perf_counter()
    with log.open("w") as out:
        done = subprocess.run(
            [sys.executable, __file__, folder, name, "--here"],
            stdout=out,
            stderr=subprocess.STDOUT,
            check=False,
        )
    told = f"failed, see {log}" if done.returncode else "made"
    print(f"{name}: {told}, {time.perf_counter() - started:.0f} s", flush=True)
    return int(done.returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
