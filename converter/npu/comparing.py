"""Compares two models as the NPU computes them: both are compiled, and run in the compiler's own emulator.

The inputs are those of `edge_opt.compare`: caches filled by the prefill, masks that fit. How exact the NPU is, is
measured against the first model on the CPU.
"""

import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress
from edge_opt.comparison.compare import choose
from edge_opt.comparison.findings import ComparisonReport, OutputComparison, SignatureComparison, measured
from edge_opt.comparison.generate import FilledCaches
from edge_opt.comparison.models import name_of
from edge_opt.ir import Model, load, save
from edge_opt.ir.opening import ModelLike, Opened
from edge_opt.npu.hexagon import Compiler, emulate
from edge_opt.npu.layers import cut_entry_point, layer_ends
from edge_opt.npu.sdk import CompilerFailedError, CompilerMissingError, find_sdk
from edge_opt.runtime.inputs import InputPlan, array_of, pair
from edge_opt.runtime.metrics import measure
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo
from edge_opt.targets.chips import DEFAULT_CHIP

LEAST_DB = 20.0
"""Signal to noise against the CPU that a compiled model must keep, in dB."""

SECONDS = 3600.0
"""How long one model and signature may take, where nobody says otherwise."""


def compare_on_npu(
    a: ModelLike,
    b: ModelLike,
    *,
    sdk: AnyPath | None = None,
    chip: str | None = None,
    flags: Sequence[str] = (),
    signatures: Sequence[str] | None = None,
    layers: int | None = None,
    seed: int = 0,
    atol: float = 0.0,
    rtol: float = 0.0,
    least_db: float = LEAST_DB,
    seconds: float | None = SECONDS,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Compile both models for a Hexagon NPU, run them in the compiler's emulator, and compare what comes out.

    Args:
        a: the model as it was: a path (also of a bundle), the bytes of a model, or a `Model`.
        b: the model as it is.
        sdk: folder with Qualcomm's libraries; None takes it from EDGE_OPT_QNN or QNN_SDK_ROOT.
        chip: the compiler's word for the chip; None is SM8750.
        flags: for the compiler, for both models.
        signatures: only these; all by default. One that only one model has is a difference.
        layers: cut both models behind so many layers first, where whole ones take too long.
        seed: decides the inputs.
        atol: B may differ from A by |a-b| <= atol + rtol*|a|, element by element.
        rtol: see `atol`.
        least_db: signal to noise against the CPU that both must keep.
        seconds: after so long the compiler and the emulator are stopped, for each model and signature; None never.
        progress: called with (stage, done, total).

    Raises:
        CompilerMissingError: the compiler, its libraries or a C compiler are not on this machine.
        UsageError: no such signature, or no attention to count layers by.
        ModelFormatError: a model cannot be read.
    """
    no_probe = find_sdk(sdk).no_probe
    if no_probe:
        raise CompilerMissingError(no_probe)
    compiler = Compiler(chip or DEFAULT_CHIP, tuple(flags), sdk, seconds)
    tell = progress or (lambda *_: None)
    with ExitStack() as stack:
        worker = stack.enter_context(Worker())
        worker.start()
        files = [stack.enter_context(Opened(model).main().file()) for model in (a, b)]
        models = [load(file) for file in files]
        if name_of(a, "a") == name_of(b, "b"):
            del models[1]  # one file is run once: how far is it from the CPU?
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="edge-opt-")))
        ours, theirs = ({entry.name: entry for entry in worker.describe(file)} for file in files)
        names = choose([*dict.fromkeys([*ours, *theirs])], signatures)
        common = [name for name in names if name in ours and name in theirs]
        tell("filling caches", 0, 2 * len(names))
        caches = FilledCaches(worker, files[0], ours, seed, folder)
        caches.fill(common)
        compared: list[SignatureComparison] = []
        for place, name in enumerate(names):
            if name not in common:
                only = name_of(a, "a") if name in ours else name_of(b, "b")
                compared.append(SignatureComparison(name, reason=f"only in {only}"))
                continue
            tell(f"{name}: emulating", 2 * place, 2 * len(names))
            ends = () if layers is None else layer_ends(models[0], name, layers)
            cuts = [cut_entry_point(model, name, ends) for model in models]
            plans = _plans(caches, name, theirs[name])
            demands = {"atol": atol, "rtol": rtol, "least_db": least_db}
            compared.append(_compared(cuts, plans, compiler, worker, folder, **demands))
        tell("compared", 2 * len(names), 2 * len(names))
    return ComparisonReport(
        name_of(a, "a"),
        name_of(b, "b"),
        "npu",
        seed,
        atol,
        rtol,
        signatures=tuple(compared),
        caches=tuple(caches.notes),
        settings={"chip": compiler.chip, "flags": list(flags), "layers": layers, "least_db": least_db},
    )


def _plans(caches: FilledCaches, name: str, theirs: SignatureInfo) -> list[dict[str, InputPlan]]:
    """The same real numbers for both models, by input name."""
    infos = {info.name: info for info in theirs.inputs}
    plans = caches.plan(name, 0)
    missing = [plan.info.name for plan in plans if plan.info.name not in infos]
    if missing:
        raise UsageError(f"signature '{name}': input '{missing[0]}' is in the first model only")
    pairs = [pair(plan, infos[plan.info.name]) for plan in plans]
    return [{both[side].info.name: both[side] for both in pairs} for side in range(2)]


class _Emulated(NamedTuple):
    """One model in the emulator: what its outputs are, and their numbers, by the signature's names."""

    infos: Mapping[str, TensorInfo]
    outputs: Mapping[str, Array]
    seconds: float


def _compared(
    cuts: Sequence[Model],
    plans: Sequence[Mapping[str, InputPlan]],
    compiler: Compiler,
    worker: Worker,
    folder: Path,
    *,
    least_db: float,
    **tolerances: float,
) -> SignatureComparison:
    """The models, of one entry point each, in the emulator, and the first one on the CPU; both are the one if alone."""
    (signature,) = cuts[0].signatures
    emulated = []
    for side, cut, planned in zip("ab", cuts, plans, strict=False):
        path, tensors = folder / f"{side}.tflite", cut.signatures[0]
        save(cut, path, overwrite=True)
        (described,) = worker.describe(path)
        inputs = {tensor.name: array_of(planned[key]) for key, tensor in tensors.inputs.items()}
        try:
            arrays, seconds = emulate(path, tensors.subgraph, inputs, compiler)
        except CompilerFailedError as error:
            return SignatureComparison(signature.key, reason=f"{side}: {error}")
        outputs = {key: arrays[tensor.name] for key, tensor in tensors.outputs.items()}
        emulated.append(_Emulated({info.name: info for info in described.outputs}, outputs, seconds))
    a, b = emulated[0], emulated[-1]
    numbers = [plans[0][key] for key in signature.inputs]
    (cpu,) = worker.run_plans(folder / "a.tflite", signature.key, [numbers])
    found = []
    for key in dict.fromkeys([*a.infos, *b.infos]):
        if key not in a.infos or key not in b.infos:
            found.append(OutputComparison(key, reason=f"only in {'a' if key in a.infos else 'b'}"))
            continue
        output = measured(a.infos[key], b.infos[key], a.outputs[key], b.outputs[key], **tolerances)
        if not output.reason:
            output = _near_cpu(output, a.infos[key], cpu[key], (a, b), least_db)
        found.append(output)
    return SignatureComparison(signature.key, tuple(found), seconds=(a.seconds, b.seconds))


def _near_cpu(
    output: OutputComparison, info: TensorInfo, cpu: Array, both: Sequence[_Emulated], least_db: float
) -> OutputComparison:
    """The output with its distance from the CPU's numbers, and whether that is too far."""
    name = output.name
    db_a, db_b = (
        measure(cpu, one.outputs[name], quantized_a=info, quantized_b=one.infos[name]).snr_db for one in both
    )
    reason = ""
    if not min(db_a, db_b) >= least_db:
        which = "a" if db_a <= db_b else "b"
        reason = f"{which} is {min(db_a, db_b):.1f} dB from the CPU, expected at least {least_db:g} dB"
    return replace(output, db=(db_a, db_b), reason=reason)
