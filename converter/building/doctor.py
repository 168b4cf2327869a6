"""What is installed, what works with it, and the command that installs the rest."""

import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import metadata

import numpy as np

from edge_opt.base.errors import EdgeOptError
from edge_opt.base.packages import RUNTIME, overwritten, usual_name, version_of, versions_of
from edge_opt.base.record import Record
from edge_opt.building import evaluation, stages
from edge_opt.ir import to_bytes
from edge_opt.ir.parse import parse
from edge_opt.npu.compiler import Compiler
from edge_opt.npu.vendors import backend_of
from edge_opt.runtime.runner import Worker

_MODULES = (
    RUNTIME,
    "numpy",
    "msgspec",
    "flatbuffers",
    "typer",
    "rich",
    "litert_torch",
    "litert_lm",
    "litert_lm_builder",
    "torch",
    "transformers",
    "tensorflow",
    "peft",
)
_MODEL = "subgraph main (%x: float32[1]) {\n  %y: float32[1] = ADD(%x, %x)\n  return %y\n}\n"
_EXTRAS = "pip install '.[build,lm]'"
_QNN = (
    "pip download --no-deps onnxruntime-qnn==2.7.0 && python -m zipfile -e onnxruntime_qnn-*.whl qnn && "
    "export EDGE_OPT_QNN=$PWD/qnn"
)


@dataclass(frozen=True, slots=True)
class Ability(Record):
    """Something that edge-opt does; `problem` is why it does not work here, and `remedy` the command that mends it.

    Both are empty if it works; `remedy` also if no command is enough.
    """

    name: str
    problem: str = ""
    remedy: str = ""

    @property
    def summary(self) -> str:
        """The problem, without what to do if a command does it."""
        if not self.problem:
            return "works"
        return self.problem.partition(": ")[0] if self.remedy else self.problem


@dataclass(frozen=True, slots=True)
class Diagnosis(Record):
    """Versions of packages, None for those that are not installed, and what works with them.

    `warnings` are about packages that work, but that nobody tried together.
    """

    versions: dict[str, str | None]
    abilities: Sequence[Ability]
    warnings: Sequence[str] = ()

    _properties = ("remedy",)

    @property
    def remedy(self) -> str:
        """One command, to be run in a checkout, for all that does not work; empty if there is nothing to mend."""
        return " && ".join(dict.fromkeys(one.remedy for one in self.abilities if one.remedy))


def versions() -> dict[str, str | None]:
    """The versions of edge-opt, Python, the system, and the packages that results depend on; None where missing."""
    found: dict[str, str | None] = {
        "edge-opt": metadata.version("edge-opt"),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    modules = [*_MODULES, *stages.quantizers()]
    return found | {usual_name(module): version_of(module) for module in modules}


def diagnose() -> Diagnosis:
    """Find out what works. The runtime and the vendor's tools are tried; other packages are looked for, not loaded."""
    compiler = Compiler()
    backend = backend_of(compiler.chip)
    qnn = _tried("libraries", _QNN, backend.libraries, compiler).remedy
    abilities = [
        _tried("convert, compare", "pip install --force-reinstall ai-edge-litert", _run),
        _tried("build", _EXTRAS, stages.tool_versions),
        _tried("build from a LoRA folder", _EXTRAS, versions_of, ("peft",), _EXTRAS),
        _tried("evaluate", _EXTRAS, evaluation.check_runtimes),
        _tried("profile, tune, compile", qnn, backend.check_installed, compiler),
        _tried("emulator", qnn, backend.check_emulator, compiler),
    ]
    found = versions()
    return Diagnosis(found, abilities, [*filter(None, (overwritten(), stages.untried(found)))])


def _tried(name: str, remedy: str, check: Callable[..., object], *arguments: object) -> Ability:
    """The ability that a check tries, which raises an error if it does not work."""
    try:
        check(*arguments)
    except EdgeOptError as error:
        return Ability(name, str(error), remedy)
    return Ability(name)


def _run() -> None:
    """Run one operator in the runtime."""
    with Worker() as worker:
        worker.run(to_bytes(parse(_MODEL)), None, {"x": np.ones(1, np.float32)})
