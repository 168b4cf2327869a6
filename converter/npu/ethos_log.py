"""Reads what Vela, the compiler for Arm Ethos-U, prints and the summary it writes; starts nothing."""

from __future__ import annotations

import csv
import re
from collections import Counter

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
