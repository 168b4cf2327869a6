"""Compares two models as an NPU computes them: both are compiled, and run in the compiler's emulator.

The NPU's error is measured against the first model on the CPU; a large one is a warning, not part of the verdict.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress
from edge_opt.comparison.findings import ComparisonReport, SignatureComparison, name_of
from edge_opt.comparison.pairing import Both, Pair, Shapes, both_open, checked_numbers
from edge_opt.ir.opening import ModelLike, Part
from edge_opt.npu.compiler import Compiler, CompilerFailedError
from edge_opt.npu.profiling import still_open
from edge_opt.npu.vendors import backend_of
from edge_opt.runtime.inputs import array_of
from edge_opt.runtime.metrics import measure
from edge_opt.runtime.protocol import Arrays

_NEAR_DB = 20.0  # warn below this signal-to-noise ratio against the CPU


def compare_on_npu(
    a: ModelLike,
    b: ModelLike,
    compiler: Compiler = Compiler(),
    *,
    signatures: Sequence[str] | None = None,
    shapes: Shapes | None = None,
    seed: int = 0,
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Compile both models for an NPU, run them in the compiler's emulator, and compare their outputs.

    If outputs are far from the CPU's, the report's `remarks` say so; this does not affect whether the models are equal.
    Other arguments mean the same as in `edge_opt.compare`.

    Raises:
        CompilerMissingError: the compiler, its libraries or a C compiler is missing, or it has no emulator.
        UsageError: a signature does not exist, an input's length is open, or edge-opt cannot run the chip's compiler.
        ModelFormatError: a model cannot be read.
    """
    backend_of(compiler.chip).check_emulator(compiler)
    begun = ComparisonReport(
        name_of(a, "a"), name_of(b, "b"), "npu", *checked_numbers(seed, atol, rtol)
    )
    with both_open(a, b, begun, signatures=signatures, shapes=shapes, progress=progress) as both:
        for model in both.models:
            options = still_open(Part(model), shapes)
            if options:
                raise UsageError(f"open lengths are compiled as 1: give {options}")
        report = both.compared(
            lambda session: [_emulated(both, pair, compiler) for pair in session.pairs.values()]
        )
        stateful = [name for name, pair in both.pairs.items() if pair.signature.keeps_state]
    settings = ", ".join([f"compiled for {compiler.chip}", *compiler.flags])
    remarks = [*filter(None, map(_warning, report.signatures)), settings, *report.remarks]
    if stateful:
        remarks.append(
            f"state is not carried over here, each signature ran once: {', '.join(stateful)}"
        )
    return replace(report, remarks=tuple(remarks))


class _Outputs(NamedTuple):
    """One model's outputs on the CPU and in the emulator."""

    cpu: Arrays
    npu: Arrays


def _emulated(both: Both, pair: Pair, compiler: Compiler) -> SignatureComparison:
    """Run both entry points on the CPU and in the emulator; a model compared with itself runs once.

    a in the emulator, b in the emulator -> the difference
    a on the CPU, each in the emulator   -> how far each is from the CPU, `db`
    """
    ran: list[_Outputs] = []
    for place, title in enumerate("a" if both.begun.a == both.begun.b else "ab"):
        try:
            ran.append(_run(both, place, pair, compiler))
        except CompilerFailedError as error:
            return SignatureComparison(pair.signature.name, reason=f"{title}: {error}")
    a = ran[0]
    b = ran[-1]
    found = both.measure_all(pair, [(a.npu, {**b.npu})])
    distances = _distances(pair, a.cpu, a.npu, b.npu)
    compared = [replace(one, db=distances.get(one.name)) for one in found.outputs]
    return replace(found, outputs=tuple(compared))


def _run(both: Both, place: int, pair: Pair, compiler: Compiler) -> _Outputs:
    """Run an entry point of the first or the second model, by its place."""
    name = pair.signature.name
    model = both.models[place]
    plan = pair.plans(both.begun.seed)[place]
    (cpu,) = both.worker.run_calls(both.files[place], [(name, plan)])
    inputs = {one.info.name: array_of(one) for one in plan}
    with backend_of(compiler.chip).emulating(model, name, compiler) as emulator:
        npu = emulator.run(inputs)
    # Outputs that are an input or a constant are not compiled; they are the CPU's.
    for key, tensor in model.arguments(name).outputs.items():
        if tensor.producer is None:
            npu.setdefault(key, cpu[key])
    return _Outputs(cpu, npu)


def _distances(pair: Pair, cpu: Arrays, a: Arrays, b: Arrays) -> dict[str, tuple[float, float]]:
    """Signal-to-noise ratios of both models' outputs against the CPU's of `a`, in dB, by the output's name in `a`."""
    distances: dict[str, tuple[float, float]] = {}
    for of_a, of_b in pair.outputs:
        if of_a.shape != of_b.shape:
            continue
        reference = cpu[of_a.name]
        ours = measure(reference, a[of_a.name], (of_a, of_a))
        theirs = measure(reference, b[of_b.name], (of_a, of_b))
        distances[of_a.name] = (ours.snr_db, theirs.snr_db)
    return distances


def _warning(compared: SignatureComparison) -> str:
    """Return a warning if an output is far from the CPU's, else an empty string."""
    far: dict[str, tuple[float, float]] = {}
    for one in compared.outputs:
        if one.db is not None and not min(one.db) >= _NEAR_DB:  # NaN, too
            far[one.name] = one.db
    if not far:
        return ""
    farthest = min(far, key=lambda name: min(far[name]))
    a, b = far[farthest]
    return (
        f"warning: signature '{compared.name}', output '{farthest}': a is {a:.1f} dB and b {b:.1f} dB from the CPU's "
        "kernels: the NPU's arithmetic is different; this is not a difference between a and b"
    )
