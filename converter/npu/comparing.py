"""Compares two models as the NPU computes them: both are compiled, and run in the compiler's own emulator.

The inputs are those of `edge_opt.compare`: caches filled by the prefill, masks that fit. How exact the NPU is, is
measured against the first model on the CPU.
"""

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError
from edge_opt.base.record import Record
from edge_opt.base.words import Progress
from edge_opt.comparison.compare import choose
from edge_opt.comparison.findings import first_of
from edge_opt.comparison.generate import FilledCaches
from edge_opt.comparison.models import name_of
from edge_opt.ir import Model, load, save
from edge_opt.ir.opening import ModelLike, Opened
from edge_opt.npu.chips import DEFAULT_CHIP
from edge_opt.npu.hexagon import Compiler, emulate
from edge_opt.npu.layers import cut_entry_point, layer_ends
from edge_opt.npu.sdk import CompilerFailedError, CompilerMissingError, find_sdk
from edge_opt.runtime.inputs import InputPlan, array_of, pair
from edge_opt.runtime.metrics import Difference, measure
from edge_opt.runtime.protocol import Array
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import SignatureInfo, TensorInfo

LEAST_DB = 20.0
"""Signal to noise against the CPU that a compiled model must keep, in dB."""

SECONDS = 3600.0
"""How long one model and signature may take, where nobody says otherwise."""


@dataclass(frozen=True, slots=True)
class NpuOutput(Record):
    """One output on the NPU: how B differs from A there, and what each is against the CPU, in dB."""

    name: str
    difference: Difference
    db_a: float
    db_b: float

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        names = ("elements", "differing", "max_abs", "equal")
        figures = {name: getattr(self.difference, name) for name in names}
        return {"name": self.name, **figures, "db_a": self.db_a, "db_b": self.db_b}


@dataclass(frozen=True, slots=True)
class NpuSignature(Record):
    """One entry point; `verdict` says why it could not be compared. Seconds are those of the emulator."""

    name: str
    outputs: tuple[NpuOutput, ...] = ()
    verdict: str | None = None
    seconds: tuple[float, float] = (0.0, 0.0)

    _properties = ("worst_db",)

    @property
    def differing(self) -> int:
        """Numbers that are not the same bits in A and B."""
        return sum(output.difference.differing for output in self.outputs)

    @property
    def elements(self) -> int:
        """Numbers in all."""
        return sum(output.difference.elements for output in self.outputs)

    @property
    def worst_db(self) -> float:
        """The lowest signal to noise of an output of either model against the CPU."""
        return min((min(output.db_a, output.db_b) for output in self.outputs), default=math.inf)


@dataclass(frozen=True, slots=True)
class NpuComparison(Record):
    """Two models on the NPU, and what was demanded of them."""

    a: str
    b: str
    chip: str
    flags: tuple[str, ...]
    layers: int | None
    seed: int
    least_db: float
    signatures: tuple[NpuSignature, ...]
    caches: tuple[str, ...] = ()

    @property
    def equal(self) -> bool:
        """Whether everything ran, B is within the demand of A, and both are near enough to the CPU."""
        return not self.differences()

    def differences(self) -> list[str]:
        """One sentence for everything that is not as demanded."""
        sentences = []
        for signature in self.signatures:
            where = f"signature '{signature.name}' on {self.chip}"
            if signature.verdict:
                sentences.append(f"{where}: {signature.verdict}")
            for output in signature.outputs:
                name, apart = f"{where}, output '{output.name}'", output.difference
                if not apart.equal:
                    sentences.append(
                        f"{name}: {apart.differing} of {apart.elements} elements of b differ from a, by at most "
                        f"{apart.max_abs:.3g}"
                    )
                worst = min(output.db_a, output.db_b)
                if not worst >= self.least_db:
                    which = "a" if output.db_a <= output.db_b else "b"
                    sentences.append(
                        f"{name}: {which} is {worst:.1f} dB from the CPU, and {self.least_db:g} dB are demanded"
                    )
        return sentences

    def summary(self) -> str:
        """One sentence."""
        if not self.equal:
            return first_of(self.differences())
        differing = sum(signature.differing for signature in self.signatures)
        elements = sum(signature.elements for signature in self.signatures)
        worst = min((signature.worst_db for signature in self.signatures), default=math.inf)
        same = "all the same bits" if not differing else f"{differing} differ, within the tolerances"
        return f"on {self.chip}'s emulator {elements} numbers, {same}; at least {worst:.1f} dB from the CPU"

    def to_dict(self) -> dict[str, Any]:
        """The JSON contract of `edge-opt compare --on npu --json`; no noise at all is null."""
        judged = {"on": "npu", "equal": self.equal, "differences": self.differences()}
        return {**judged, **Record.to_dict(self)}


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
) -> NpuComparison:
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
        for prefill, served in caches.served(common)[0].items():
            caches.fill(prefill, served, range(1))
        compared: list[NpuSignature] = []
        for place, name in enumerate(names):
            if name not in common:
                compared.append(NpuSignature(name, verdict=f"only {'a' if name in ours else 'b'} has it"))
                continue
            tell(f"{name}: emulating", 2 * place, 2 * len(names))
            ends = () if layers is None else layer_ends(models[0], name, layers)
            cuts = [cut_entry_point(model, name, ends) for model in models]
            plans = _plans(caches, name, theirs[name])
            compared.append(_compared(cuts, plans, compiler, worker, folder, atol=atol, rtol=rtol))
        tell("compared", 2 * len(names), 2 * len(names))
    return NpuComparison(
        a=name_of(a, "a"),
        b=name_of(b, "b"),
        chip=compiler.chip,
        flags=tuple(flags),
        layers=layers,
        seed=seed,
        least_db=least_db,
        signatures=tuple(compared),
        caches=tuple(caches.notes),
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
    **tolerances: float,
) -> NpuSignature:
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
            return NpuSignature(signature.key, verdict=f"{side}: {error}")
        outputs = {key: arrays[tensor.name] for key, tensor in tensors.outputs.items()}
        emulated.append(_Emulated({info.name: info for info in described.outputs}, outputs, seconds))
    a, b = emulated[0], emulated[-1]
    numbers = [plans[0][key] for key in signature.inputs]
    (cpu,) = worker.run_plans(folder / "a.tflite", signature.key, [numbers])

    def apart(key: str, arrays: Mapping[str, Array], other: _Emulated, **how: Any) -> Difference:
        return measure(
            arrays[key], other.outputs[key], quantized_a=a.infos[key], quantized_b=other.infos[key], **how
        )

    measured = []
    for key in a.infos:
        if key not in b.infos or a.outputs[key].shape != b.outputs[key].shape:
            verdict = f"output '{key}' is not in both models, with one shape"
            return NpuSignature(signature.key, verdict=verdict)
        db_a, db_b = (apart(key, cpu, one).snr_db for one in (a, b))
        measured.append(NpuOutput(key, apart(key, a.outputs, b, **tolerances), db_a, db_b))
    return NpuSignature(signature.key, tuple(measured), seconds=(a.seconds, b.seconds))
