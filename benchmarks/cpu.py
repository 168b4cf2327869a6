"""Time of two models on the CPU, run in turn: what the rewrite costs somebody who has no NPU.

    python benchmarks/cpu.py BEFORE.tflite AFTER.tflite [--signatures prefill_128,decode] [--threads 1,2] [--runs 10]

Prints the ratio AFTER / BEFORE of the fastest and of the median run. Both models stay loaded and take turns, so that
whatever else the machine does hits both alike; inputs are random and the same.
"""

from __future__ import annotations

import argparse
import time
from statistics import median
from typing import Any

import numpy as np
from ai_edge_litert.interpreter import Interpreter


def inputs_of(runner: Any) -> dict[str, np.ndarray[Any, Any]]:
    """The same random numbers for every model with the same signature."""
    rng = np.random.default_rng(0)
    values = {}
    for name, detail in sorted(runner.get_input_details().items()):
        shape, dtype = tuple(detail["shape"]), np.dtype(detail["dtype"])
        if dtype.kind == "f":
            values[name] = rng.standard_normal(shape).astype(dtype)
        else:
            values[name] = rng.integers(0, 2 if dtype.kind == "b" else 100, shape).astype(dtype)
    return values


def seconds(runner: Any, values: dict[str, np.ndarray[Any, Any]]) -> float:
    """One run."""
    started = time.perf_counter()
    runner(**values)
    return time.perf_counter() - started


def compare(paths: tuple[str, str], signature: str, threads: int, runs: int) -> str:
    """One line of the table."""
    interpreters = [Interpreter(path, num_threads=threads) for path in paths]
    runners = [interpreter.get_signature_runner(signature) for interpreter in interpreters]
    values = inputs_of(runners[0])
    for runner in runners:
        seconds(runner, values)
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(runs):
        # Whoever comes second finds a warmer machine, so they take turns at that too.
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            times[which].append(seconds(runners[which], values))
    fastest, middle = min(times[1]) / min(times[0]), median(times[1]) / median(times[0])
    pairs = median(b / a for a, b in zip(*times, strict=True))
    return (
        f"{signature:14} {threads:7} {min(times[0]) * 1e3:10.1f} {min(times[1]) * 1e3:10.1f} "
        f"{fastest:8.3f} {middle:8.3f} {pairs:8.3f}"
    )


def main() -> None:
    """The table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--signatures", default="prefill_128,decode")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--runs", type=int, default=10)
    given = parser.parse_args()
    print(f"{'signature':14} threads  before ms   after ms  fastest   median    pairs")
    for signature in given.signatures.split(","):
        for threads in given.threads.split(","):
            print(compare((given.before, given.after), signature, int(threads), given.runs), flush=True)


if __name__ == "__main__":
    main()
