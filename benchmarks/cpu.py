"""Time two models on the CPU, in turn: what a rewrite costs without an NPU.

    python benchmarks/cpu.py BEFORE.tflite AFTER.tflite [--signatures prefill_128,decode] [--threads 1,2] [--runs 10]

Prints ratios AFTER / BEFORE: of the fastest run, of the median run, the median of the ratios of neighbouring runs, and
that of processor time, which other processes on the machine do not affect. Both models stay loaded and take turns, so
that other load affects both equally. Inputs are random, and the same for both.
"""

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


def seconds(runner: Any, values: dict[str, np.ndarray[Any, Any]]) -> tuple[float, float]:
    """One run: time on the clock, and processor time of all threads."""
    started, worked = time.perf_counter(), time.process_time()
    runner(**values)
    return time.perf_counter() - started, time.process_time() - worked


def compare(paths: tuple[str, str], signature: str, threads: int, runs: int) -> str:
    """One line of the table."""
    interpreters = [Interpreter(path, num_threads=threads) for path in paths]
    runners = [interpreter.get_signature_runner(signature) for interpreter in interpreters]
    values = inputs_of(runners[0])
    for runner in runners:
        seconds(runner, values)
    taken: tuple[list[tuple[float, float]], list[tuple[float, float]]] = ([], [])
    for turn in range(runs):
        # Whoever comes second finds a warmer machine, so they take turns at that too.
        for which in (0, 1) if turn % 2 == 0 else (1, 0):
            taken[which].append(seconds(runners[which], values))
    clock, worked = ([[run[kind] for run in own] for own in taken] for kind in (0, 1))
    ratios = [
        min(clock[1]) / min(clock[0]),
        median(clock[1]) / median(clock[0]),
        median(b / a for a, b in zip(*clock, strict=True)),
        median(b / a for a, b in zip(*worked, strict=True)),
    ]
    figures = " ".join(f"{ratio:8.3f}" for ratio in ratios)
    return f"{signature:14} {threads:7} {min(clock[0]) * 1e3:10.1f} {min(clock[1]) * 1e3:10.1f} {figures}"


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
    print(f"{'signature':14} threads  before ms   after ms  fastest   median    pairs  cpu time")
    for signature in given.signatures.split(","):
        for threads in given.threads.split(","):
            print(
                compare((given.before, given.after), signature, int(threads), given.runs),
                flush=True,
            )


if __name__ == "__main__":
    main()
