"""What becomes of attention that other exporters write: a second table, every exporter in an environment of its own.

    python benchmarks/exports.py FOLDER --out docs/more-families.md
    python benchmarks/exports.py FOLDER --python exports_keras=/path/to/python      (where there is one already)

For each module testdata/exports_*.py an environment is made in FOLDER, and in it the module's models; models that are
there already stay. Each model is converted with every region proved, and compared with the original, whole, on both
kernel sets. The last column is read from the written file, not from our report: products of two activations and
SOFTMAXes that hold more than one matrix of rows (windows of a picture, or rows with vectors of their own, are none of
heads).
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from families import Row, measure

import edge_opt
from edge_opt.schema.errors import EdgeOptError

_TESTDATA = Path(__file__).resolve().parent.parent / "testdata"
_ONNX2TF = (
    "onnx2tf==1.29.24 tensorflow==2.19.0 tf-keras==2.19.0 onnx==1.19.1 onnxscript==0.7.2 onnxsim==0.4.36 "
    "onnx-graphsurgeon simple_onnx_processing_tools transformers==5.23.0 ai-edge-litert psutil ml_dtypes"
)
# What is installed one after the other: torch without its GPU libraries comes first.
_NEEDED = {
    "exports_keras": ("tensorflow==2.21.0 keras-hub==0.32.0",),
    "exports_onnx2tf": ("torch==2.13.0", _ONNX2TF),
}
_HEAD = (
    "| family | what is special | blocks | converted | regions | whole model | left, and why | several stay |"
)


def environment(module: str, folder: Path) -> str:
    """The interpreter of a module's own environment, made where it is not there yet."""
    place = folder / f"env-{module}"
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for words in _NEEDED[module]:
            subprocess.run([str(python), "-m", "pip", "-q", "install", *words.split()], check=True)
    return str(python)


def families(module: str, python: str) -> dict[str, str]:
    """The module's families, each with what is special about it."""
    script = str(_TESTDATA / "make_families.py")
    command = [python, script, "--from", module, "--list"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in lines}


def make(module: str, python: str, folder: Path) -> dict[str, str]:
    """Make the module's models that are not there yet; returns its families."""
    found = families(module, python)
    missing = [name for name in found if not (folder / f"{name}.tflite").exists()]
    if missing:
        script = str(_TESTDATA / "make_families.py")
        subprocess.run([python, script, str(folder), "--from", module, "--only", *missing], check=False)
    return found


def several_heads(path: Path) -> str:
    """Products of two activations and SOFTMAXes with more than one matrix of rows in a file, counted by shape."""
    found: Counter[str] = Counter()
    for _, graph in edge_opt.load(path).entry_points():
        for operator in graph.operators:
            product = operator.name in ("BATCH_MATMUL", "FULLY_CONNECTED")
            computed = product and not operator.input(1).is_constant and not operator.input(0).is_constant
            shape = operator.outputs[0].shape
            if (computed or operator.name in ("SOFTMAX", "LOG_SOFTMAX")) and math.prod(shape[:-2]) > 1:
                found[f"{operator.name} {list(shape)}"] += 1
    return "; ".join(f"{count} x {what}" for what, count in found.items())


def line(row: Row, about: str, stays: str) -> str:
    """One model as a line of the table."""
    left = "; ".join(f"{count} x {reason}" for reason, count in row.left.items())
    cells = (row.family, about, row.blocks, row.converted, row.regions, row.whole, left, stays)
    return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"


def main() -> int:
    """Make the models, print the table, and write it where asked; 1 where a model could not be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="also write the page to this file")
    parser.add_argument("--python", action="append", default=[], metavar="MODULE=PATH")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    given = dict(pair.split("=", 1) for pair in arguments.python)
    rows: list[Row] = []
    lines: list[str] = []
    missing = 0
    for module in _NEEDED:
        python = given.get(module) or environment(module, arguments.folder)
        for name, about in make(module, python, arguments.folder).items():
            path = arguments.folder / f"{name}.tflite"
            if not path.exists():
                missing += 1
                print(f"{name}: not made, see {path.with_suffix('.log').name}", flush=True)
                continue
            row, stays = _converted(path)
            rows.append(row)
            lines.append(line(row, about, stays))
            print(lines[-1], flush=True)
    page = _page(rows, lines)
    if arguments.out is not None:
        arguments.out.write_text(page, encoding="utf-8")
    print(page.splitlines()[2])
    return 1 if missing else 0


def _converted(path: Path) -> tuple[Row, str]:
    with tempfile.TemporaryDirectory() as folder:
        row = measure(path, Path(folder))
        try:
            return row, several_heads(Path(folder) / "converted.tflite")
        except EdgeOptError as error:
            return row, str(error)


def _page(rows: list[Row], lines: list[str]) -> str:
    blocks, converted = sum(row.blocks for row in rows), sum(row.converted for row in rows)
    whole = sum(row.whole == "bit for bit" for row in rows)
    summary = (
        f"{len(rows)} models, {converted} of {blocks} multi-head blocks converted; {whole} models bit for bit equal on "
        "both kernel sets."
    )
    head = [_HEAD, "|" + " --- |" * (_HEAD.count("|") - 1)]
    about = [part for part in (__doc__ or "").split("\n\n") if not part.startswith("    ")]
    return "\n".join(
        [
            "# More families of attention",
            "",
            summary,
            "",
            *"\n\n".join(about).strip().split("\n"),
            "",
            *head,
            *lines,
            "",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
