"""Compiles a model for Arm Ethos-U with Vela, one entry point at a time: Vela reads no signatures."""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from edge_opt.ir import load, save
from edge_opt.ir.cleanup import keep_signature
from edge_opt.npu.errors import CompilerFailedError, CompilerMissingError, CompilerTimeoutError
from edge_opt.npu.figures import VelaFigures, read_floor

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_opt.ir import Model

DEFAULT_CHIP = "ethos-u85-512"
_COUNT = re.compile(r"^(CPU|NPU) operators = (\d+)", re.MULTILINE)
_WARNING = re.compile(
    r"^Warning \(supported operators\) operator: (\w+)[^\n]*\n\s*(?:Reason: |- )([^\n]*)", re.MULTILINE
)
# "... DataType Float32 (some/tensor)": the name makes every reason another one.
_NAME = re.compile(r"\s*\([^()]*\)$|: [^:]*'.*$")
# Vela has no name for operators newer than itself; composites are the ones that language models hold.
_KINDS = {"None": "operator unknown to Vela"}
_KIBI = 1024
_KIBIBYTES = frozenset({"sram_memory_used", "dram_memory_used"})
_WANTED = (
    "cycles_total",
    "cycles_npu",
    "sram_memory_used",
    "dram_memory_used",
    "sram_total_bytes",
    "dram_total_bytes",
)


def find_vela() -> list[str]:
    """How to start Vela: this interpreter's, else the one on the search path.

    Raises:
        CompilerMissingError: there is none.
    """
    if find_spec("ethosu") is not None:
        return [sys.executable, "-c", "from ethosu.vela.vela import main; raise SystemExit(main())"]
    found = shutil.which("vela")
    if found is None:
        raise CompilerMissingError("Vela is not installed: `pip install 'edge-opt[vela]'` gets it")
    return [found]


def compile_model(
    path: Path, model: Model, *, chip: str | None, flags: Sequence[str], seconds: float | None = None
) -> tuple[list[VelaFigures], dict[str, str]]:
    """Figures of every entry point of `model`, which `path` holds, and the versions that they were measured with.

    Raises:
        CompilerMissingError: Vela is not here.
        CompilerFailedError: Vela ended without a result, or took longer than `seconds` for an entry point; operators
            that it leaves on the CPU are no such failure.
    """
    vela = find_vela()
    found = [
        _compile(vela, path, name if model.signatures else None, chip or DEFAULT_CHIP, flags, seconds)
        for name, _ in model.entry_points()
    ]
    answer = subprocess.run([*vela, "--version"], capture_output=True, text=True, check=False)
    return found, {"ethos-u-vela": answer.stdout.strip()}


def _compile(
    vela: list[str],
    path: Path,
    signature: str | None,
    chip: str,
    flags: Sequence[str],
    seconds: float | None,
) -> VelaFigures:
    # Loaded anew for each: keeping one signature edits the model.
    model = load(path)
    if signature is not None:
        keep_signature(model, signature)
    name, subgraph = model.entry_points()[0]
    with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
        single = Path(folder) / "signature.tflite"
        save(model, single)
        try:
            done = subprocess.run(
                [*vela, str(single), f"--accelerator-config={chip}", f"--output-dir={folder}", *flags],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired as error:
            raise CompilerTimeoutError(
                f"{path.name}: Vela was not done with signature '{name}' after {seconds:g} seconds"
            ) from error
        summaries = [file.read_text(encoding="utf-8") for file in Path(folder).glob("*_summary_*.csv")]
    if done.returncode or not summaries:
        last = (done.stdout.strip().splitlines() or ["it does not say why"])[-1][:200]
        raise CompilerFailedError(
            f"{path.name}: Vela ended with code {done.returncode} on signature '{name}': {last}; see its --help for "
            f"configurations that it knows"
        )
    try:
        taken, operators = read_counts(done.stdout)
        summary = read_summary(summaries[0])
    except ValueError as error:
        raise CompilerFailedError(f"{path.name}: Vela's output cannot be read: {error}") from error
    return VelaFigures(
        signature=name,
        operators=operators,
        taken=taken,
        cycles=summary["cycles_total"],
        npu_cycles=summary["cycles_npu"],
        sram=summary["sram_memory_used"],
        dram=summary["dram_memory_used"],
        sram_traffic=summary["sram_total_bytes"],
        dram_traffic=summary["dram_total_bytes"],
        floor=read_floor(subgraph),
        on_cpu=read_refusals(done.stdout),
    )


def read_counts(output: str) -> tuple[int, int]:
    """Operators (on the NPU, in all), as Vela counts them after its own rewrites.

    Raises:
        ValueError: the output has no such lines.
    """
    found = {place: int(count) for place, count in _COUNT.findall(output)}
    if "NPU" not in found:
        raise ValueError("there is no line 'NPU operators = '")
    return found["NPU"], found["NPU"] + found.get("CPU", 0)


def read_refusals(output: str) -> dict[str, int]:
    """How many operators stay on the CPU, by 'KIND: reason'."""
    counts = Counter(
        f"{_KINDS.get(kind, kind)}: {_NAME.sub('', reason.strip())}"
        for kind, reason in _WARNING.findall(output)
    )
    return dict(counts.most_common())


def read_summary(text: str) -> dict[str, int]:
    """The wanted columns of the summary file's last line; memory in bytes.

    Raises:
        ValueError: a column is missing.
    """
    lines = list(csv.DictReader(text.splitlines()))
    if not lines:
        raise ValueError("the summary is empty")
    missing = [name for name in _WANTED if not lines[-1].get(name)]
    if missing:
        raise ValueError(f"the summary has no column {missing[0]}")
    return {name: round(float(lines[-1][name]) * (_KIBI if name in _KIBIBYTES else 1)) for name in _WANTED}
