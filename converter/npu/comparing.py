"""Compares two models as the NPU computes them: both are compiled, and run in the compiler's own emulator.

The inputs are those of `edge_opt.compare`: caches filled by the prefill, masks that fit. How exact the NPU is, is
measured against the first model on the CPU; that is a warning, and no part of the verdict.
"""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress, many
from edge_opt.comparison.compare import choose
from edge_opt.comparison.findings import (
    ComparisonReport,
    OutputComparison,
    SignatureComparison,
    measured,
    name_of,
)
from edge_opt.comparison.generate import FilledCaches
from edge_opt.ir import Model, load, save
from edge_opt.ir.opening import ModelLike, Opened
from edge_opt.npu.emulator import check_emulator, emulating
from edge_opt.npu.hexagon import Compiler
from edge_opt.npu.layers import cut_entry_point, layer_ends
from edge_opt.npu.sdk import CompilerFailedError
from edge_opt.runtime.inputs import InputPlan, array_of, pair
from edge_opt.runtime.metrics import measure
from edge_opt.runtime.protocol import Arrays
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo
from edge_opt.targets.chips import DEFAULT_CHIP

NEAR_DB = 20.0
"""Signal to noise against the CPU, in dB, below which there is a warning."""

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
    seconds: float | None = SECONDS,
    progress: Progress | None = None,
) -> ComparisonReport:
    """Compile both models for a Hexagon NPU, run them in the compiler's emulator, and compare what comes out.

    Where they are far from what the CPU computes, the report's `remarks` say so; whether they are equal is decided by
    the two alone.

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
        seconds: after so long the compiler and the emulator are stopped, for each model and signature; None never.
        progress: called with (stage, done, total).

    Raises:
        CompilerMissingError: the compiler, its libraries or a C compiler are not on this machine.
        UsageError: no such signature, or no attention to count layers by.
        ModelFormatError: a model cannot be read.
    """
    compiler = Compiler(chip or DEFAULT_CHIP, tuple(flags), sdk, seconds)
    check_emulator(compiler)
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
        tell("filling caches", 0, len(names))
        caches = FilledCaches(worker, files[0], ours, seed, folder)
        caches.fill(common)
        compared: list[SignatureComparison] = []
        for place, name in enumerate(names):
            tell(f"{name}: emulating", place, len(names))
            if name not in common:
                only = name_of(a, "a") if name in ours else name_of(b, "b")
                compared.append(SignatureComparison(name, reason=f"only in {only}"))
                continue
            ends = () if layers is None else layer_ends(models[0], name, layers)
            cuts = [cut_entry_point(model, name, ends) for model in models]
            plans = _plans(caches, name, theirs[name])
            compared.append(_compared(cuts, plans, compiler, worker, folder, atol=atol, rtol=rtol))
        tell("compared", len(names), len(names))
    cut = "" if layers is None else f", cut behind {many(layers, 'layer')}"
    chosen = f"compiled for {compiler.chip}{cut}{''.join(f', {flag}' for flag in flags)}"
    return ComparisonReport(
        name_of(a, "a"),
        name_of(b, "b"),
        "npu",
        seed,
        atol,
        rtol,
        signatures=tuple(compared),
        remarks=(*(text for one in compared for text in _warnings(one)), chosen, *caches.notes),
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


def _compared(
    cuts: Sequence[Model],
    plans: Sequence[Mapping[str, InputPlan]],
    compiler: Compiler,
    worker: Worker,
    folder: Path,
    **tolerances: float,
) -> SignatureComparison:
    """The models, of one entry point each, in the emulator, and the first one on the CPU; both are the one if alone."""
    (signature,) = cuts[0].signatures
    runs: list[tuple[Arrays, float]] = []
    described = []
    for side, cut, planned in zip("ab", cuts, plans, strict=False):
        save(cut, folder / f"{side}.tflite", overwrite=True)
        (entry,) = worker.describe(folder / f"{side}.tflite")
        described.append({info.name: info for info in entry.outputs})
        try:
            with emulating(cut, compiler) as emulator:
                runs.append(emulator.run({key: array_of(planned[key]) for key in cut.signatures[0].inputs}))
        except CompilerFailedError as error:
            return SignatureComparison(signature.key, reason=f"{side}: {error}")
    numbers = [plans[0][key] for key in signature.inputs]
    (cpu,) = worker.run_plans(folder / "a.tflite", signature.key, [numbers])
    (a, seconds_a), (b, seconds_b) = runs[0], runs[-1]
    infos_a, infos_b = described[0], described[-1]
    found = []
    for key in dict.fromkeys([*infos_a, *infos_b]):
        if key not in infos_a or key not in infos_b:
            found.append(OutputComparison(key, reason=f"only in {'a' if key in infos_a else 'b'}"))
            continue
        output = measured(infos_a[key], infos_b[key], a[key], b[key], **tolerances)
        if not output.reason:
            sides = ((a[key], infos_a[key]), (b[key], infos_b[key]))
            first, second = (
                measure(cpu[key], array, quantized_a=infos_a[key], quantized_b=info).snr_db
                for array, info in sides
            )
            output = replace(output, db=(first, second))
        found.append(output)
    return SignatureComparison(signature.key, tuple(found), seconds=(seconds_a, seconds_b))


def _warnings(compared: SignatureComparison) -> Iterator[str]:
    """That the output that is farthest from the CPU's is far."""
    db, name = min(
        ((output.db, output.name) for output in compared.outputs if output.db is not None),
        key=lambda one: min(one[0]),
        default=((NEAR_DB, NEAR_DB), ""),
    )
    if not min(db) >= NEAR_DB:
        yield (
            f"warning: signature '{compared.name}', output '{name}': a is {db[0]:.1f} dB and b {db[1]:.1f} dB from the "
            "CPU's kernels: the NPU's arithmetic is another, and this is not a difference between a and b"
        )
