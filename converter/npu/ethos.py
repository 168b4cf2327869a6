"""Compiles a model for Arm Ethos-U with Vela, one entry point at a time: Vela reads no signatures."""

import csv
import re
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from edge_opt.ir import Model, save
from edge_opt.npu.figures import Compilation, VelaFigures, read_floor
from edge_opt.npu.layers import cut_entry_point
from edge_opt.npu.sdk import CompilerFailedError, CompilerMissingError, run_program, why_ended

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
# Columns of the summary, by what we call them; these two of them are in KiB.
_COLUMNS = {
    "cycles": "cycles_total",
    "npu_cycles": "cycles_npu",
    "sram": "sram_memory_used",
    "dram": "dram_memory_used",
    "sram_traffic": "sram_total_bytes",
    "dram_traffic": "dram_total_bytes",
}
_KIBIBYTES = ("sram", "dram")


def find_vela() -> list[str]:
    """How to start Vela: this interpreter's, else the one on the search path; CompilerMissingError without one."""
    if find_spec("ethosu") is not None:
        return [sys.executable, "-c", "from ethosu.vela.vela import main; raise SystemExit(main())"]
    found = shutil.which("vela")
    if found is None:
        raise CompilerMissingError(
            "Vela is not installed: `pip install '.[vela]'` in a checkout of edge-opt installs it"
        )
    return [found]


def compile_model(
    path: Path, model: Model, *, chip: str, flags: Sequence[str], seconds: float | None = None
) -> Compilation:
    """Compile every entry point of `model`, which `path` holds, each in so many seconds.

    Raises:
        CompilerMissingError: Vela is not here.
        CompilerFailedError: Vela ended without a result; operators that it leaves on the CPU are no such failure.
    """
    vela, who, signatures = find_vela(), f"{path.name}: Vela", []
    for name, subgraph in model.entry_points():
        with tempfile.TemporaryDirectory(prefix="edge-opt-") as folder:
            file = Path(folder) / "signature.tflite"
            save(cut_entry_point(model, name), file)
            options = [f"--accelerator-config={chip}", *flags, f"--output-dir={folder}"]
            done = run_program(who, [*vela, str(file), *options], seconds)
            summaries = [file.read_text(encoding="utf-8") for file in Path(folder).glob("*_summary_*.csv")]
        output = done.stdout + done.stderr
        if done.returncode or not summaries:
            last = (output.strip().splitlines() or [why_ended(done.returncode)])[-1][:200]
            raise CompilerFailedError(
                f"{who} ended with code {done.returncode} on signature '{name}': {last}; see its --help for "
                f"configurations that it knows"
            )
        try:
            taken, operators = read_counts(output)
            summary = read_summary(summaries[0])
        except ValueError as error:
            raise CompilerFailedError(f"{who}'s output cannot be read: {error}") from error
        floor, left = read_floor(subgraph), read_refusals(output)
        signatures.append(VelaFigures(name, operators, taken, floor=floor, on_cpu=left, **summary))
    answer = run_program(who, [*vela, "--version"])
    return Compilation(tuple(signatures), {"ethos-u-vela": answer.stdout.strip()})


def read_counts(output: str) -> tuple[int, int]:
    """Operators (on the NPU, in all), as Vela counts them after its own rewrites; ValueError without them."""
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
    """What the last line of the summary file says, in bytes and cycles; ValueError where a column is missing."""
    lines = list(csv.DictReader(text.splitlines()))
    if not lines:
        raise ValueError("the summary is empty")
    missing = [column for column in _COLUMNS.values() if not lines[-1].get(column)]
    if missing:
        raise ValueError(f"the summary has no column {missing[0]}")
    told = {name: float(lines[-1][column]) for name, column in _COLUMNS.items()}
    return {name: round(value * (_KIBI if name in _KIBIBYTES else 1)) for name, value in told.items()}
