"""Run `edge-opt build` on a real checkpoint: the figures at the top of README, a row for each `--weights`.

    python benchmarks/real.py CHECKPOINT --prompts calibration.jsonl --held-out held.jsonl
                              [--weights 8 4-logits] [--max-perplexity-ratio 1.05]
                              [--soc SM8750] [--sdk DIR] [--work DIR] [--json]

README's rows are of Gemma 3 270M, SmolLM2-135M-Instruct and Qwen2.5-Coder-0.5B-Instruct; Qwen2.5-Coder-1.5B-Instruct
takes 14 GB with tf-nightly, else 23. CHECKPOINT is a Hugging Face folder; `testdata/make_checkpoint.py` makes one with
random weights. The builds use the default settings and include the evaluation. Results of an earlier run in DIR are
reused, with their times. Needs the extras `build` and `lm`, Qualcomm's libraries and, for the first three, about
12 GiB, no network.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from edge_opt.building import BuildResult, StageReport, build
from edge_opt.building.evaluation import Evaluation

_MEBI, _GIBI = 1 << 20, 1 << 30
_SIDE_BY_SIDE = {"evaluate", "emulate", "compile"}
"""Stages that a build runs at once."""


def stage_line(stage: StageReport) -> str:
    """Seconds, memory of the largest process and size of a stage's result."""
    peak = stage.peak_bytes / _GIBI
    return (
        f"  {stage.name:10} {stage.seconds:8.1f} s {peak:7.2f} GiB {stage.bytes / _MEBI:8.1f} MiB"
    )


def times(result: BuildResult) -> Iterator[tuple[str, float, float]]:
    """Estimated ms of each signature as the pipeline makes it, and as delivered."""
    for entry in result.optimized["signatures"]:
        found = [(entry[side] or {}).get("time") for side in ("before", "after")]
        if all(found):
            yield entry["signature"], found[0]["us"] / 1000, found[1]["us"] / 1000


def seconds_of(result: BuildResult) -> float:
    """Time of a whole build, including stages that an earlier run made."""
    last = [stage.seconds for stage in result.stages if stage.name in _SIDE_BY_SIDE]
    return sum(stage.seconds for stage in result.stages) - sum(last) + max(last, default=0)


def row(weights: str, result: BuildResult) -> dict[str, Any]:
    """The figures of one build."""
    evaluation = result.evaluation or Evaluation([], 0)
    delivered = Path(str(result.output)).stat().st_size
    models = evaluation.models
    return {
        "weights": weights,
        "estimated_ms": {
            name: {"exported": old, "delivered": new} for name, old, new in times(result)
        },
        "bundle_mib": delivered / _MEBI,
        # The checkpoint is the first; behind the bundle on CPU kernels, it may be scored in the emulator, too.
        "perplexity_ratio": models[1].ratio if models else None,
        "perplexity_ratio_error": models[1].ratio_error if models else None,
        "evaluation": evaluation.to_dict(),
        "seconds": seconds_of(result),
        "stages": [stage.to_dict() for stage in result.stages],
    }


def main() -> int:
    """Build once for each choice of weights, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--held-out", type=Path, required=True)
    parser.add_argument("--weights", nargs="+", default=["8"])
    parser.add_argument("--max-perplexity-ratio", type=float)
    parser.add_argument("--soc", default="SM8750")
    parser.add_argument("--sdk")
    parser.add_argument("--work", type=Path, help="folder of all results; default: CHECKPOINT.real")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = options.work or options.checkpoint.with_suffix(".real")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for weights in options.weights:
        result = build(
            options.checkpoint,
            folder / f"{weights}.litertlm",
            soc=options.soc,
            prompts=options.prompts,
            held_out=options.held_out,
            sdk=options.sdk,
            weights=weights,
            max_perplexity_ratio=options.max_perplexity_ratio,
            work=folder / "work",
            overwrite=True,
            on_stage=None if options.json else lambda stage: print(stage_line(stage), flush=True),
        )
        rows.append(row(weights, result))
        if not options.json:
            ms = ", ".join(f"{name} {old:.2f} -> {new:.2f} ms" for name, old, new in times(result))
            ratio = rows[-1]["perplexity_ratio"]
            error = rows[-1]["perplexity_ratio_error"]
            text = (
                "not evaluated"
                if ratio is None
                else f"perplexity {ratio:.3f} +- {error:.3f} of the checkpoint's"
            )
            size, seconds = rows[-1]["bundle_mib"], rows[-1]["seconds"]
            print(f"weights {weights}: {ms}, {size:.0f} MiB, {text}, {seconds:.0f} s", flush=True)
    if options.json:
        print(json.dumps(rows, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
