"""Qualcomm's compiler for Hexagon NPUs: it also estimates time, and its library emulates the NPU; no phone is needed.

Chips of phones have no time estimate: times are for the nearest chip that has one.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path

from edge_opt.base.atomic import scratch_folder
from edge_opt.base.errors import UsageError, did_you_mean
from edge_opt.ir import Model
from edge_opt.npu import emulator, probe
from edge_opt.npu.compiler import (
    Backend,
    Compiler,
    CompilerMissingError,
    Emulation,
    Figures,
    compiling_threads,
    operators_left,
)
from edge_opt.npu.hexagon import Outcome
from edge_opt.targets.chips import CHIPS

_VTCM_FLAG = "--qualcomm_vtcm_size"
_SHARING_FLAG = "--qualcomm_enable_weight_sharing"
_LOG_LEVEL_FLAG = "--qualcomm_log_level"  # figures are read from the log
_UNKNOWN_CHIP = "Unexpected SoC model"


class Qualcomm(Backend):
    """Qualcomm's compiler, with its libraries and our probe."""

    manufacturer = "Qualcomm"
    compiler = "the Hexagon compiler"
    library = probe.LIBRARY
    needs = "Qualcomm's QNN libraries"
    how_to_get = (
        "give the folder of Qualcomm's AI Engine Direct SDK, or of an unpacked wheel (`pip download --no-deps "
        "onnxruntime-qnn==2.7.0` on x86-64 Linux), with sdk=DIR or in EDGE_OPT_QNN or QNN_SDK_ROOT"
    )
    variables = ("EDGE_OPT_QNN", "QNN_SDK_ROOT")
    results_from = "lib*Htp*.so"
    estimates = True
    emulates = True

    def places(self, chip: str) -> Sequence[str]:
        """Qualcomm's SDK has its x86-64 libraries in the first, the wheel of onnxruntime-qnn in the second."""
        return ("lib/x86_64-linux-clang", "onnxruntime_qnn", ".")

    def measure(self, path: Path, signature: str, compiler: Compiler) -> Figures:
        """Compile; also for the nearest chip, if this one has no time estimate."""
        judge = self.judge(compiler)
        judging = None
        with compiling_threads(2) as threads:
            if judge.chip != compiler.chip:
                judging = threads.submit(self.run, judge, path)
            outcome = self.run(compiler, path)
            self.check_ended(outcome.code, outcome.output, outcome.errors)
            sums = outcome.figures()
            judged = outcome if judging is None else judging.result()
        estimate, why_not = judged.time(judge.chip)
        note = f"no estimate of time: {why_not}" if why_not else self.note(compiler.chip)
        return Figures(
            signature,
            **sums,
            time=estimate,
            note=note,
            versions=outcome.versions,
            on_cpu=outcome.on_cpu,
        )

    def judge(self, compiler: Compiler) -> Compiler:
        """The compiler for the nearest chip that has estimates, with this chip's memory unless the flags set it."""
        chip = CHIPS.get(compiler.chip)
        if chip is None:
            return compiler
        flags = compiler.flags
        if not compiler.has_flag(_VTCM_FLAG):
            flags = (*flags, f"{_VTCM_FLAG}={chip.vtcm}")
        return replace(compiler, chip=chip.judge.name, flags=flags)

    def note(self, chip: str) -> str:
        """The chip that estimates are for, if it is another one."""
        return CHIPS[chip].note if chip in CHIPS else ""

    def pipeline_flags(self, flags: Sequence[str], *, shares_weights: bool) -> list[str]:
        """The flags, with weight sharing as in the pipeline."""
        kept = [flag for flag in flags if not flag.startswith(_LOG_LEVEL_FLAG)]
        if shares_weights and not any(flag.startswith(_SHARING_FLAG) for flag in kept):
            kept.append(f"{_SHARING_FLAG}=true")
        return kept

    def check_emulator(self, compiler: Compiler) -> None:
        """Raise CompilerMissingError if the libraries or the probe are missing."""
        self.libraries(compiler)
        probe.build_probe()

    def emulating(
        self, model: Model, signature: str, compiler: Compiler
    ) -> AbstractContextManager[Emulation]:
        """Compile an entry point to run in the library's emulator."""
        flagged = replace(compiler, flags=(*compiler.flags, emulator.RAW_MEMORY))
        return emulator.emulating(model, signature, partial(self.run, flagged))

    def run(self, compiler: Compiler, path: Path, folders: Path | None = None) -> Outcome:
        """Compile a model with one entry point, and run it in the emulator on `folders`, a pipe (see `probe.c`).

        Raises:
            UsageError: the compiler does not know the chip.
        """
        libraries = self.libraries(compiler)
        searched = [libraries]
        no_probe = ""
        try:
            searched.insert(0, probe.build_probe())
        except CompilerMissingError as error:
            no_probe = str(error)
        with scratch_folder() as scratch:
            log = scratch / "probe"
            variables = {
                "EDGE_OPT_QNN_REAL": str(libraries / probe.LIBRARY),
                "EDGE_OPT_PROBE_LOG": str(log),
            }
            if folders is not None:
                variables["EDGE_OPT_PROBE_RUN"] = str(folders)
            done = self.run_tool(path, compiler, searched, scratch, variables)
            probed = log.read_text(errors="replace") if log.exists() else ""
            outcome = Outcome(done.returncode, done.stdout, done.stderr, no_probe).with_log(probed)
            outcome.on_cpu = operators_left(path, scratch, outcome.refusals())
        if done.returncode and _UNKNOWN_CHIP in done.stderr:
            chip = compiler.chip
            raise UsageError(
                f"the Hexagon compiler does not know chip '{chip}', {did_you_mean(chip, CHIPS)}"
            )
        return outcome
