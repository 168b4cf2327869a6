"""Run two models on the same inputs, signature by signature, and measure how far apart their outputs are.

At most one of the two is loaded at a time.
"""

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from edge_opt.base.errors import EdgeOptError, unknown
from edge_opt.base.words import Progress
from edge_opt.comparison.findings import ComparisonReport, FirstDifference, SignatureComparison, name_of
from edge_opt.comparison.generate import compare_generation
from edge_opt.comparison.locate import first_difference
from edge_opt.comparison.pairing import Pair, both_open, checked_numbers, runs_of
from edge_opt.ir.opening import ModelLike
from edge_opt.runtime.protocol import Arrays
from edge_opt.runtime.tensors import Kernels

Place = Literal["cpu", "reference"]

KERNELS: dict[str, Kernels] = {"cpu": "xnnpack", "reference": "reference"}


def compare(
    a: ModelLike,
    b: ModelLike,
    *,
    on: Place = "cpu",
    signatures: Sequence[str] | None = None,
    seed: int = 0,
    atol: float = 0.0,
    rtol: float = 0.0,
    shapes: Mapping[str, Sequence[int]] | None = None,
    generate: int | None = None,
    locate: bool = True,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Run every signature of both models on the same random inputs and measure the outputs.

    Inputs are matched by name, or by position if neither model has signatures (then the signature is `main`). A
    quantized input gets the same real numbers as its float counterpart. Caches are random, too; `generate` fills them
    with a prefill. An input, output or signature that only one model has is a difference. Stateful models run twice and
    keep their state between runs.

    Args:
        a: the reference: a path, the bytes of a model, a `Model`, or what `litert_torch.convert` returns.
        b: the model to compare with it.
        on: "cpu" for the runtime's default kernels, or "reference" for its reference kernels.
        signatures: signatures to compare; default: all of both models.
        seed: seed of the random inputs.
        atol: `equal` means |a-b| <= atol + rtol*|a|, element by element.
        rtol: see `atol`.
        shapes: sizes for inputs with dynamic lengths in both models, by `NAME` or `signature/NAME`; default: 1.
        generate: number of tokens to also generate greedily, through prefill and decode, from a random prompt.
        locate: on a difference, look for the first tensor that differs (`first_difference` of the report).
        progress: called with (stage, done, total).

    Raises:
        UsageError: an argument is invalid, or neither model has a chosen signature.
        ModelFormatError: a model cannot be read.
        RuntimeFailed: a model was rejected, crashed or timed out; names model and signature.
    """
    if on not in KERNELS:
        raise unknown("place to run on", on, KERNELS)
    seed, atol, rtol = checked_numbers(seed, atol, rtol)
    kernels = KERNELS[on]
    report = ComparisonReport(name_of(a, "a"), name_of(b, "b"), on, seed, atol, rtol)
    if generate is not None:
        # First, so that missing parts are reported before the long work.
        report = replace(report, generation=compare_generation(a, b, generate, seed, kernels))
    with both_open(a, b, report, signatures=signatures, shapes=shapes, progress=progress) as both:
        runs = runs_of(*both.models)

        def compared(pair: Pair) -> SignatureComparison:
            """Run one model after the other, and measure the outputs that both have."""
            name, (ours, theirs) = pair.signature.name, pair.plans(seed, runs)
            with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
                results = both.worker.run_plans(both.files[0], name, ours, kernels)
                for run, arrays in enumerate(results):
                    _move(arrays, f"{folder}/{run}")
                others = both.worker.run_plans(both.files[1], name, theirs, kernels)
                return both.measure_all(pair, [*zip(results, others, strict=True)])

        report = both.compared(compared)
        outside = [(one.name, each.name) for one in report.signatures for each in one.outputs if each.outside]
        if not outside or not locate:
            return report
        name, output = outside[0]
        try:
            found = first_difference(both, both.pairs[name], output, kernels, runs)
        except EdgeOptError as error:
            # Keep the result of the finished comparison.
            found = FirstDifference(name, reason=f"the search failed: {error}")
        return replace(report, first_difference=found)


def _move(arrays: Arrays, stem: str) -> None:
    """Replace arrays by memory-mapped files, whose names begin with `stem`."""
    for place, name in enumerate(arrays):
        np.save(path := f"{stem}.{place}.npy", arrays[name])
        arrays[name] = np.load(path, mmap_mode="r")
