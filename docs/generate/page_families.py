"""The table of families, as docs/families.csv has it."""

import csv
from pathlib import Path

_TABLE = Path(__file__).resolve().parents[1] / "families.csv"


def table() -> str:
    """A row for each model; the columns' names are the file's."""
    with _TABLE.open(newline="", encoding="utf-8") as file:
        rows = list(csv.reader(file))
    lines = [_line([name.replace("_", " ") for name in rows[0]]), _line(["---"] * len(rows[0]))]
    return "\n".join(lines + [_line(row) for row in rows[1:]])


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
