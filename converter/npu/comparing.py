"""Compare two models on an NPU: compile both and run them in the compiler's emulator.

The NPU's error is measured against the first model on the CPU; a large one is a warning, not part of the verdict.
"""

from collections.abc import Sequence
from dataclasses import replace

from edge_opt.base.words import Progress
from edge_opt.comparison.findings import ComparisonReport, SignatureComparison, name_of
from edge_opt.comparison.pairing import Both, Pair, both_open, checked_numbers
from edge_opt.ir.opening import ModelLike
from edge_opt.npu.emulator import check_emulator, emulating
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.sdk import CompilerFailedError
from edge_opt.runtime.inputs import array_of
from edge_opt.runtime.metrics import measure
from edge_opt.runtime.protocol import Arrays
from edge_opt.runtime.tensors import TensorInfo

_NEAR_DB = 20.0  # warn below this signal-to-noise ratio against the CPU


def compare_on_npu(
    a: ModelLike,
    b: ModelLike,
    compiler: Compiler = Compiler(),
    *,
    signatures: Sequence[str] | None = None,
    seed: int = 0,
    atol: float = 0.0,
    rtol: float = 0.0,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Compile both models for a Hexagon NPU, run them in the compiler's emulator, and compare their outputs.

    If outputs are far from the CPU's, the report's `remarks` say so; this does not affect whether the models are equal.
    Other arguments mean the same as in `edge_opt.compare`.

    Raises:
        CompilerMissingError: the compiler, its libraries or a C compiler is missing.
        UsageError: a signature does not exist.
        ModelFormatError: a model cannot be read.
    """
    check_emulator(compiler)
    begun = ComparisonReport(name_of(a, "a"), name_of(b, "b"), "npu", *checked_numbers(seed, atol, rtol))
    with both_open(a, b, begun, signatures=signatures, progress=progress) as both:
        report = both.compared(lambda pair: _emulated(both, pair, compiler))
    compiled = ", ".join([f"compiled for {compiler.chip}", *compiler.flags])
    warnings = filter(None, map(_warning, report.signatures))
    return replace(report, remarks=(*warnings, compiled, *report.remarks))


def _emulated(both: Both, pair: Pair, compiler: Compiler) -> SignatureComparison:
    """Run both entry points on the CPU and in the emulator; a model compared with itself runs once."""
    name, plans, cpu, runs = pair.signature.name, pair.plans(both.begun.seed), list[Arrays](), list[Arrays]()
    sides = "a" if both.begun.a == both.begun.b else "ab"
    for side, model, file, planned in zip(sides, both.models, both.files, plans, strict=False):
        cpu += both.worker.run_plans(file, name, planned)
        try:
            with emulating(model, name, compiler) as emulator:
                # Outputs that are an input or a constant are not compiled; they are the CPU's.
                inputs = {one.info.name: array_of(one) for one in planned[0]}
                runs.append({**cpu[-1], **emulator.run(inputs)})
        except CompilerFailedError as error:
            return SignatureComparison(name, reason=f"{side}: {error}")
    found = both.measure_all(pair, [(runs[0], {**runs[-1]})])

    def far(run: Arrays, info: TensorInfo, of_a: TensorInfo) -> float:
        return measure(cpu[0][of_a.name], run[info.name], quantized_a=of_a, quantized_b=info).snr_db

    distances = {
        one.name: (far(runs[0], one, one), far(runs[-1], other, one))
        for one, other in pair.outputs
        if one.shape == other.shape
    }
    return replace(found, outputs=tuple(replace(one, db=distances.get(one.name)) for one in found.outputs))


def _warning(compared: SignatureComparison) -> str:
    """Return a warning if an output is far from the CPU's, else an empty string."""
    distances = [(output.db, output.name) for output in compared.outputs if output.db is not None]
    db, name = min(distances, key=lambda one: min(one[0]), default=((_NEAR_DB, _NEAR_DB), ""))
    if min(db) >= _NEAR_DB:
        return ""
    return (
        f"warning: signature '{compared.name}', output '{name}': a is {db[0]:.1f} dB and b {db[1]:.1f} dB from the "
        "CPU's kernels: the NPU's arithmetic is different; this is not a difference between a and b"
    )
