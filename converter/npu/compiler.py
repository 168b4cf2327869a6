"""The interface that a vendor's compiler implements, its settings and figures, and what all of them share.

A vendor's compiler is one module with a `Backend`, listed in `vendors`. LiteRT's ahead-of-time tool runs each vendor's
plugin; the vendor's own libraries are the user's, and never copied or bundled. They may crash.
"""

import importlib
import math
import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from subprocess import CompletedProcess
from threading import Thread
from typing import NamedTuple, Protocol

from edge_opt.base import processes
from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import EdgeOptError, UsageError
from edge_opt.base.packages import RUNTIME, version_of
from edge_opt.base.record import Record
from edge_opt.ir import Model
from edge_opt.ir.opening import CALL, check_weights_inside, load
from edge_opt.ir.walk import cut_signature
from edge_opt.runtime.protocol import Array, Arrays
from edge_opt.targets.chips import DEFAULT_CHIP
from edge_opt.targets.placement import OnCpu, Placement, on_the_cpu

_PARTITIONED = re.compile(
    r"Partitioned subgraph<0>, selected (?P<taken>\d+) ops, from a total of (?P<operators>\d+) ops\. "
    r"resulted in (?P<partitions>\d+) partitions"
)
_COMPLAINTS = re.compile(
    r"^(?:.*::ERROR:|.*?\[ ERROR \]\s+(?:<E>\s+)?|ERROR: |└ )(.*)$", re.MULTILINE
)
# Errors of the tool are often only places in its source: "[apply_plugin.cc:455] ERROR: [compiler_plugin.cc:504]".
_PLACES = re.compile(r"(?:\[\S+\]|ERROR:|\s)*")
# Qualcomm's plugin sets an option that is newer than the library, which ignores it; the second line gives no reason.
_HARMLESS = ("unexpected GraphHtpSettings option", "QnnBackend_validateOpConfig failed")
# Qualcomm's plugin links to the first for chips without an HTP, but never calls it here; the wheel lacks it.
_UNUSED_LIBRARY = "libQnnLpai.so"
_COMPILED = "compiled.tflite"
_STAND_IN = "libQnnSystem.so"


class CompilerMissingError(UsageError):
    """The compiler, or a vendor library that it needs, is not on this machine."""


class CompilerFailedError(EdgeOptError):
    """The compiler ended without a result, or its figures cannot be read."""


class CompilerKilledError(CompilerFailedError):
    """The compiler was killed, as Linux does if memory runs out."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """Settings of an NPU's compiler, as plain values; the chip determines the vendor.

    `chip` is the compiler's name for the chip, `flags` are such as `--qualcomm_optimization_level=O2`. `sdk` is the
    folder with the vendor's libraries; None takes Qualcomm's from EDGE_OPT_QNN or QNN_SDK_ROOT, MediaTek's from
    EDGE_OPT_NEUROPILOT, or either from LiteRT's package of them.
    """

    chip: str = DEFAULT_CHIP
    flags: tuple[str, ...] = ()
    sdk: AnyPath | None = None

    def __post_init__(self) -> None:
        """Raise UsageError if a flag is malformed."""
        for flag in self.flags:
            if not re.match(r"--\w", flag):
                raise UsageError(
                    f"'{flag}' is not a compiler flag: write --qualcomm_optimization_level=O2"
                )

    def has_flag(self, name: str) -> bool:
        """True if the flags set this option, such as `--qualcomm_vtcm_size`."""
        return any(flag.startswith(name) for flag in self.flags)


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """The compiler's estimate for one run of an entry point in microseconds, with bounds.

    It is for `chip`, and only for ranking graphs: it is not calibrated on a device. It excludes the `without_cost`
    operators, for which the compiler has no cost.
    """

    chip: str
    us: int
    us_low: int
    us_high: int
    without_cost: int


@dataclass(frozen=True, slots=True)
class Figures(Record):
    """The compiler's static figures for one entry point; sizes are in bytes, None if the compiler has no such figure.

    `taken` of `operators` run on the NPU, in `partitions` pieces. Data that overflows on-chip memory is written out
    (`spill`) and read back (`fill`); both are part of `ddr_written` and `ddr_read`. `run_list` counts the steps of the
    compiled graph. `time` is None if there is no estimate; `note` says why, or which other chip it is for. `versions`
    are those of the vendor's libraries. `on_cpu`: operators that the NPU does not run.
    `least_read`: the bytes of all weights and inputs, which any compiler reads at least once.
    """

    signature: str
    operators: int
    taken: int
    partitions: int
    spill: int | None = None
    fill: int | None = None
    ddr_read: int | None = None
    ddr_written: int | None = None
    run_list: int | None = None
    time: TimeEstimate | None = None
    note: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    on_cpu: tuple[OnCpu, ...] = ()
    least_read: int | None = None

    @property
    def placement(self) -> Placement:
        """What runs where."""
        return Placement(self.signature, self.partitions, self.on_cpu)

    def ranking(self) -> dict[str, float]:
        """Figures that rank entry points, most important first, by the text that reports them; smaller is better."""
        moved = math.inf
        if self.ddr_read is not None and self.ddr_written is not None:
            moved = self.ddr_read + self.ddr_written
        return {
            "{} operators off the NPU": self.operators - self.taken,
            "{} pieces on the NPU": self.partitions,
            "estimated {:.3f} ms": math.inf if self.time is None else self.time.us / 1000,
            "{:,} bytes moved": moved,
            "{:,} steps": math.inf if self.run_list is None else self.run_list,
        }

    def gain(self, after: "Figures") -> tuple[bool, str]:
        """Return whether `after`, as converted, is better than this one, as exported, and the deciding figures.

        If operators off the NPU and pieces on it are equal, the first other figure that both have decides.
        """
        old = self.ranking()
        new = after.ranking()
        known = [text for text in old if math.inf not in (old[text], new[text])]
        # The first two are operators off the NPU and pieces on it, which are always known.
        changed = [text for text in known[:2] if old[text] != new[text]]
        deciding = [*changed, *known[2:]]
        if not deciding:
            return True, self.note
        text = deciding[0]
        before = old[text]
        now = new[text]
        ratio = f" (ratio {now / before:.3f})" if before and now else ""
        why = f"{text.format(before)} as exported, {text.format(now)} as converted{ratio}"
        return now < before, why


class Emulation(Protocol):
    """A compiled entry point that runs on this machine, with the NPU's arithmetic."""

    def run(self, inputs: Mapping[str, Array]) -> Arrays:
        """Run once; inputs and outputs are named as in the signature, and unused inputs are ignored."""


class Backend(ABC):
    """A vendor's compiler; a subclass overrides what it can do beyond compiling.

    Most are plugins of LiteRT's tool, see `run_tool`. One with a tool of its own overrides `check_installed`, too.

    `manufacturer` is the vendor as LiteRT's tool names it, `compiler` the compiler in messages. `library` is a file in
    the folder of its libraries, `needs` what messages call them, `how_to_get` where they come from, `variables` the
    environment variables that name their folder, and `results_from` the files in it that results depend on. `estimates`
    and `emulates` are true if it estimates time and if compiled graphs can run here.
    """

    manufacturer: str
    compiler: str
    library: str
    needs: str
    how_to_get: str
    variables: tuple[str, ...]
    results_from: str
    estimates = False
    emulates = False

    @abstractmethod
    def measure(self, path: Path, signature: str, compiler: Compiler) -> Figures:
        """Compile a model whose only entry point is `signature`, and return the compiler's figures.

        Raises:
            UsageError: the compiler does not know the chip.
            CompilerMissingError: the compiler, or a library that it needs, is not installed.
            CompilerFailedError: the compiler gave no result; the message is only the reason.
        """

    @abstractmethod
    def places(self, chip: str) -> Sequence[str]:
        """Where in the given folder the libraries may be, as patterns, the best first."""

    def package_arguments(self, chip: str) -> Sequence[str]:
        """Arguments of `path_to_sdk_libs` in LiteRT's package of the libraries."""
        return ()

    def judge(self, compiler: Compiler) -> Compiler:
        """The compiler whose estimates rank graphs: for this chip, unless only another one has estimates."""
        return compiler

    def note(self, chip: str) -> str:
        """A note on estimates for the chip; empty if they are its own."""
        return "" if self.estimates else f"no estimate for {self.manufacturer}"

    def pipeline_flags(self, flags: Sequence[str], *, shares_weights: bool) -> list[str]:
        """The flags with which litert-torch's pipeline will compile, from those that it is configured with."""
        return [*flags]

    def check_emulator(self, compiler: Compiler) -> None:
        """Raise CompilerMissingError unless compiled graphs can run here; the message says what is needed."""
        raise CompilerMissingError(
            f"no emulator for {self.manufacturer}'s chip {compiler.chip}: give a chip of Qualcomm"
        )

    def emulating(
        self, model: Model, signature: str, compiler: Compiler
    ) -> AbstractContextManager[Emulation]:
        """Compile an entry point to run in the emulator; only if `emulates`, and `check_emulator` raises nothing."""
        raise NotImplementedError

    def libraries(self, compiler: Compiler) -> Path:
        """The folder with the vendor's libraries, as `Compiler` describes; or raise CompilerMissingError."""
        root = self._root(compiler)
        if root is None:
            raise CompilerMissingError(f"{self.compiler} needs {self.needs}: {self.how_to_get}")
        for place in self.places(compiler.chip):
            for found in sorted(Path(root).glob(f"{place}/{self.library}")):
                return found.parent.resolve()
        if Path(root).is_file():
            raise CompilerMissingError(f"{root} is a file, not a folder: {self.how_to_get}")
        if not Path(root).is_dir():
            raise CompilerMissingError(f"folder {root} does not exist: {self.how_to_get}")
        raise CompilerMissingError(
            f"{root} holds no {self.library} for x86-64 Linux: {self.how_to_get}"
        )

    def check_installed(self, compiler: Compiler) -> None:
        """Raise CompilerMissingError if LiteRT's tool, the vendor's plugin or its libraries are missing."""
        self.libraries(compiler)
        find_tool(self.manufacturer)

    def _root(self, compiler: Compiler) -> AnyPath | None:
        """The folder that the user gives or names, or else that of LiteRT's package."""
        if compiler.sdk is not None:
            return compiler.sdk
        for name in self.variables:
            if os.environ.get(name):
                return os.environ[name]
        package = f"ai_edge_litert_sdk_{self.manufacturer.lower()}"
        if find_spec(package) is None:
            return None
        found: AnyPath | None = importlib.import_module(package).path_to_sdk_libs(
            *self.package_arguments(compiler.chip)
        )
        return found

    def run_tool(
        self,
        path: Path,
        compiler: Compiler,
        folders: Sequence[Path],
        scratch: Path,
        variables: Mapping[str, str] | None = None,
    ) -> CompletedProcess[str]:
        """Compile a model with LiteRT's tool, with the libraries in `folders` and `variables` in the environment."""
        tool, plugin = find_tool(self.manufacturer)
        command = [
            str(tool),
            "--cmd=apply",
            f"--model={path}",
            f"--o={scratch / _COMPILED}",
            f"--libs={plugin}",
            f"--soc_manufacturer={self.manufacturer}",
            f"--soc_model={compiler.chip}",
            *compiler.flags,
        ]
        searched = {"LD_LIBRARY_PATH": search_path(*folders, scratch=scratch)}
        done = processes.run(command, {**os.environ, **searched, **(variables or {})})
        if done.returncode:
            (scratch / _COMPILED).unlink(missing_ok=True)  # empty, or a part of it
        return done

    def check_ended(self, code: int, output: str, errors: str) -> None:
        """Raise CompilerFailedError, with the reason in the tool's logs, if it failed.

        It also ends with an error if every operator stays on the CPU, which is a result.
        """
        partitioned = _PARTITIONED.search(errors)
        takes_nothing = partitioned is not None and partitioned["taken"] == "0"
        if code and not takes_nothing:
            reason = reason_of(code, output, errors)
            kind = CompilerKilledError if code == -signal.SIGKILL else CompilerFailedError
            raise kind(f"{self.compiler} ended with code {code}: {reason}")


class OperatorCounts(NamedTuple):
    """The operators of a graph, how many are taken by the NPU, and in how many partitions."""

    operators: int
    taken: int
    partitions: int


def operator_counts(log: str) -> OperatorCounts:
    """Read the tool's log; CompilerFailedError if it has no counts."""
    found = _PARTITIONED.search(log)
    if found is None:
        raise CompilerFailedError(
            "the compiler reports nothing for the graph: its plugin may not know the chip"
        )
    return OperatorCounts(**{name: int(text) for name, text in found.groupdict().items()})


def operators_left(path: Path, scratch: Path, reasons: Mapping[int, str]) -> tuple[OnCpu, ...]:
    """The operators that remain in a model's compiled version, found by their results' names; all, without a version.

    `reasons`: why, by an operator's place, if that is known.
    """
    compiled = scratch / _COMPILED
    kept: set[str] = set()
    for operator in load(compiled if compiled.exists() else path).subgraphs[0].operators:
        if operator.code.custom_code != CALL:
            kept |= {tensor.name for tensor in operator.outputs}
    left: list[OnCpu] = []
    for place, operator in enumerate(load(path).subgraphs[0].operators):
        if not kept.isdisjoint(tensor.name for tensor in operator.outputs):
            left.append(on_the_cpu(place, operator, reasons.get(place, "")))
    return tuple(left)


def first_complaint(*logs: str) -> str:
    """Return the first line marked as an error, in the order of the logs; empty if there is none."""
    for log in logs:
        for found in _COMPLAINTS.finditer(log):
            text = found[1].strip()
            if not _PLACES.fullmatch(text) and not text.startswith(_HARMLESS):
                return text[:200]
    return ""


def reason_of(code: int, *logs: str) -> str:
    """Why a compiler ended with an exit code, by its logs or its signal."""
    return first_complaint(*logs) or processes.killed_by(code) or "no reason given"


def find_tool(manufacturer: str) -> tuple[Path, Path]:
    """LiteRT's ahead-of-time tool, and the folder of the vendor's plugin; or raise CompilerMissingError."""
    module = find_spec(RUNTIME)
    if module is None or not module.origin:
        raise CompilerMissingError("ai-edge-litert is not installed: pip install ai-edge-litert")
    root = Path(module.origin).parent
    tool = root / "tools" / "apply_plugin_main"
    plugin = root / "vendors" / manufacturer.lower() / "compiler"
    if not tool.is_file() or not plugin.is_dir():
        raise CompilerMissingError(
            f"ai-edge-litert {version_of(RUNTIME)} in {root} has no ahead-of-time compiler for {manufacturer}: its "
            f"wheel for x86-64 Linux has one"
        )
    return tool, plugin


def search_path(*folders: Path, scratch: Path) -> str:
    """LD_LIBRARY_PATH with these folders before its current value.

    The library that Qualcomm's wheel lacks is created in `scratch`.
    """
    libraries = folders[-1]
    searched = [str(folder) for folder in folders]
    if (libraries / _STAND_IN).exists() and not (libraries / _UNUSED_LIBRARY).exists():
        (scratch / _UNUSED_LIBRARY).symlink_to(libraries / _STAND_IN)
        searched.append(str(scratch))
    known = os.environ.get("LD_LIBRARY_PATH")
    if known:
        searched.append(known)
    return ":".join(searched)


def cut_entry_point(model: Model, signature: str) -> Model:
    """Cut out one entry point, as the compiler needs it, without inputs that nothing reads."""
    check_weights_inside(model)
    graph, inputs, outputs = model.arguments(signature)
    read = {name: tensor for name, tensor in inputs.items() if tensor.consumers}
    made = {name: tensor for name, tensor in outputs.items() if tensor.producer is not None}
    return cut_signature(model, signature, graph.operators, read, made)


@contextmanager
def compiling_threads(count: int) -> Iterator[Executor]:
    """Threads that each wait for a compiler; an interrupt ends every compiler."""
    with ThreadPoolExecutor(count) as executor:
        try:
            yield executor
        except Exception:
            executor.shutdown(cancel_futures=True)
            raise
        except BaseException:
            executor.shutdown(wait=False, cancel_futures=True)
            # Repeat: a thread may be about to start its compiler.
            waiting = Thread(target=executor.shutdown)
            waiting.start()
            while waiting.is_alive():
                processes.end_all()
                waiting.join(0.05)
            raise
