"""Time one conversion, stage by stage.

    python benchmarks/stages.py MODEL.tflite [--verify none] [--json]

Times are exclusive: a listed stage that another one calls counts only for itself. The worker of the verification loads
the runtime while the model is read, so `prove` is only the time that the conversion waits for it.
"""

import argparse
import importlib
import json
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

# Stage -> what does it: (module, object in it).
STAGES = {
    "read the tables": [("edge_opt.ir.opening", "read_model")],
    "build the graph": [("edge_opt.ir.opening", "from_tables")],
    "match": [("edge_opt.passes.mha_to_sha", "find_blocks")],
    "split, check shapes and frames": [("edge_opt.conversion.run", "run_pass")],
    "cut the regions out": [
        ("edge_opt.verification.region", "cut_out"),
        ("edge_opt.verification.examine", "model_bytes"),
    ],
    "check them before they run": [("edge_opt.runtime.runner", "check_model")],
    "prove: wait for the runtime": [("edge_opt.runtime.runner", "Worker.prove")],
    "tables from the graph": [("edge_opt.ir.model", "to_tables")],
    "flatbuffer from the tables": [("edge_opt.ir.model", "lay_out")],
    "copy the weights": [("edge_opt.schema.data", "Data.write")],
    "flush to the disk": [("os", "fsync")],
}


class Clock:
    """Exclusive wall and processor time by stage."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = defaultdict(float)
        self.processor: dict[str, float] = defaultdict(float)
        self._stack = ["everything else"]
        self._since = (time.perf_counter(), time.process_time())

    def enter(self, stage: str) -> None:
        """The time since the last call goes to the stage that was on."""
        self._settle()
        self._stack.append(stage)

    def leave(self) -> None:
        """Back to the stage before."""
        self._settle()
        self._stack.pop()

    def _settle(self) -> None:
        now = (time.perf_counter(), time.process_time())
        self.wall[self._stack[-1]] += now[0] - self._since[0]
        self.processor[self._stack[-1]] += now[1] - self._since[1]
        self._since = now


def watch(clock: Clock) -> None:
    """Put the clock around every stage."""
    for stage, places in STAGES.items():
        for module, path in places:
            owner: Any = importlib.import_module(module)
            *outer, name = path.split(".")
            for part in outer:
                owner = getattr(owner, part)
            setattr(owner, name, _timed(getattr(owner, name), clock, stage))


def _timed(function: Callable[..., Any], clock: Clock, stage: str) -> Callable[..., Any]:
    @wraps(function)
    def timed(*arguments: Any, **options: Any) -> Any:
        clock.enter(stage)
        try:
            result = function(*arguments, **options)
            # A generator has done nothing yet.
            return list(result) if hasattr(result, "__next__") else result
        finally:
            clock.leave()

    return timed


def main() -> int:
    """Convert once, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--verify", choices=("regions", "none"), default="regions")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    clock = Clock()
    clock.enter("load the library")
    from edge_opt.conversion import convert  # noqa: PLC0415 - its loading is a stage

    watch(clock)
    clock.leave()
    with tempfile.TemporaryDirectory(dir=options.model.resolve().parent) as folder:
        result = convert(options.model, Path(folder) / "out.tflite", verify=options.verify)
        clock.enter("done")  # removing the output is no stage
    total = sum(clock.wall.values())
    if options.json:
        print(json.dumps({"wall": clock.wall, "processor": clock.processor, "total": total}))
        return 0
    print(
        f"{options.model.name}: {len(result.converted)} of {len(result.sites)} sites, {total:.2f} s"
    )
    print(f"{'stage':32}{'wall':>9}{'of all':>8}{'processor':>12}")
    for stage in ["load the library", *STAGES, "everything else"]:
        if clock.wall[stage]:
            share = clock.wall[stage] / total
            print(
                f"{stage:32}{clock.wall[stage]:7.3f} s{share:7.0%}{clock.processor[stage]:10.3f} s"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
