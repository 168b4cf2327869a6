"""What each stage of `edge-opt build` takes: time, memory of its largest process, and room, on Gemma3-270M's shape.

    build.py FOLDER [--layers 18] [--vocab 262144] [--prefill 128] [--cache 1024] [--whole-caches]
                    [--soc SM8750] [--sdk DIR] [--json]

Makes a checkpoint with random weights in FOLDER, then builds it there; what an earlier run left is kept, and its time
with it. Exit status 1 where the prefill is estimated to take more than 0.53 of what the same pipeline's takes without
edge-opt (for the default shape, with whole caches: what rings gain is in both). Needs the extra `build` and Qualcomm's
libraries, no network, some 12 GiB.
"""

import argparse
import importlib
import json
import platform
import sys
from pathlib import Path
from typing import Any

from edge_opt.build import BuildResult, StageReport, build

ROOT = Path(__file__).resolve().parent.parent
BAR = 0.53
MEBI, GIBI = 1 << 20, 1 << 30
STEPS = 4


def made(folder: Path, **sizes: int) -> tuple[Path, Path]:
    """The checkpoint and its prompts."""
    checkpoint = folder / "checkpoint"
    prompts = checkpoint.with_suffix(".jsonl")
    if not (checkpoint.exists() and prompts.exists()):
        sys.path.insert(0, str(ROOT / "testdata"))
        importlib.import_module("make_checkpoint").make(checkpoint, **sizes)
    return checkpoint, prompts


def told(stage: StageReport) -> str:
    """One line of the table."""
    peak = "" if stage.peak_bytes is None else f"{stage.peak_bytes / GIBI:9.2f}"
    return f"{stage.name:10} {stage.seconds:9.1f} {peak} {stage.bytes / MEBI:10.1f}"


def ratios(result: BuildResult) -> dict[str, float]:
    """Estimated time as converted over as exported, where both were estimated."""
    found = {}
    for entry in result.optimized["signatures"]:
        times = [(entry[side] or {}).get("time") for side in ("before", "after")]
        if all(times):
            found[entry["signature"]] = times[1]["us"] / times[0]["us"]
    return found


def main() -> int:
    """Build, and print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    for name, default in {"layers": 18, "vocab": 262144, "prefill": 128, "cache": 1024}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--whole-caches", action="store_true")
    parser.add_argument("--soc", default="SM8750")
    parser.add_argument("--sdk")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    checkpoint, prompts = made(options.folder, layers=options.layers, vocab=options.vocab)
    heads = f"{'stage':10} {'seconds':>9} {'GiB':>9} {'result MiB':>10}"
    if not options.json:
        print(f"{platform.processor() or platform.machine()}, {options.layers} layers\n{heads}", flush=True)
    result = build(
        checkpoint,
        options.folder / "npu.litertlm",
        soc=options.soc,
        prompts=prompts,
        sdk=options.sdk,
        prefill=[options.prefill],
        cache=options.cache,
        whole_caches=options.whole_caches,
        settings={"max_calibration_decode_steps": STEPS},
        overwrite=True,
        on_stage=None if options.json else lambda stage: print(told(stage), flush=True),
    )
    found = ratios(result)
    if options.json:
        values: dict[str, Any] = {**result.to_dict(), "ratios": found}
        print(json.dumps(values, indent=2))
    else:
        print(f"{'in all':10} {sum(stage.seconds for stage in result.stages):9.1f}")
        for entry in result.optimized["signatures"]:
            print(f"{entry['signature']}: {entry['kept']}, {entry['why']}")
    asked = options.whole_caches and options.layers == parser.get_default("layers")
    return int(asked and any(found[name] > BAR for name in found if "prefill" in name))


if __name__ == "__main__":
    sys.exit(main())
