"""Convert every family of attention that exporters write: docs/research/families.csv, from fresh exports.

    python testdata/make_families.py MODELS [--only NAME ...]       litert-torch, TensorFlow, Keras, JAX
    python benchmarks/exports.py MODELS                             Keras 3, keras-hub, onnx2tf
    python testdata/quantize_model.py a16w8 MODELS/*.tflite         also a8w8, dynamic, int4-blocks
    python benchmarks/families.py MODELS

Each model is converted with every region verified, and the whole model is compared with the original on both kernel
sets. Rows of the measured models are replaced, others stay. `require_all` is the exit code of `convert --require-all`:
0, or 1 if something was skipped that should have been converted. The last column is read from the written file, not
from our report: products of two activations, and SOFTMAXes with more than one matrix of rows (except windows of an
image and rows with their own vectors, which are not heads). A family that its exporter cannot write has a row with the
exporter's last message, from the log of make_families.py. The run fails if `--require-all` and the blocks of a row
disagree.
"""

import argparse
import csv
import fcntl
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Literal

import edge_opt
from edge_opt.base.errors import EdgeOptError
from edge_opt.comparison.compare import compare
from edge_opt.conversion import ConversionResult, SitesSkippedError, convert
from edge_opt.ir import load
from edge_opt.passes import Site, Status

_ROOT = Path(__file__).resolve().parent.parent
_SPLITS = "mha_to_sha"
_EXACT = "bit for bit"
_COLUMNS = (
    "family", "special", "types", "blocks", "converted", "require_all", "regions", "whole_xnnpack", "whole_reference",
    "left", "several_heads_in_file",
)  # fmt: skip
_ERROR = re.compile(r"^[\w.]*(Error|Exception)\b")
_SUMMARY = re.compile(r"^\d+ models, .*?\.$", re.MULTILINE | re.DOTALL)
Row = dict[str, str]


def attention(result: ConversionResult) -> list[Site]:
    """The verdicts on attention blocks with several heads, or on what may be one."""
    sites = [site for site in result.sites if site.pass_name == _SPLITS]
    return [
        site
        for site in sites
        if site.heads != 1 and (site.heads is not None or site.status is not Status.SETTLED)
    ]


def measure(path: Path, special: str, folder: Path) -> Row:
    """Convert one model and compare it with itself as it was."""
    name, _, recipe = path.stem.partition(".")
    types = recipe or _floats(path)
    row = dict.fromkeys(_COLUMNS, "") | {"family": name, "special": special, "types": types}
    output = folder / "converted.tflite"
    try:
        result, row["require_all"] = _converted(path, output)
    except EdgeOptError as error:
        return row | {"left": str(error)[:160]}
    sites = attention(result)
    row["blocks"] = str(len(sites))
    row["converted"] = str(sum(site.status is Status.CONVERTED for site in sites))
    row["regions"] = _regions(result)
    left: Counter[str] = Counter()
    for site in result.sites:
        if site.status in (Status.SKIPPED, Status.REVERTED):
            left[f"{site.pass_name}: {site.reason[:200]}"] += 1
    row["left"] = _counted(left)
    places: dict[str, Literal["cpu", "reference"]] = {"xnnpack": "cpu", "reference": "reference"}
    for kernels, on in places.items():
        row[f"whole_{kernels}"] = _compared(path, output, on) if result.converted else "unchanged"
    row["several_heads_in_file"] = several_heads(output) or "none"
    return row


def _converted(path: Path, output: Path) -> tuple[ConversionResult, str]:
    """The result, and what `--require-all` ends with; where that writes nothing, written without it."""
    try:
        return convert(path, output, overwrite=True, require_all=True, shapes=_closed(path)), "0"
    except SitesSkippedError:
        return convert(path, output, overwrite=True, shapes=_closed(path)), "1"


def _closed(path: Path) -> dict[str, tuple[int, ...]]:
    """Static shapes for inputs of open lengths: 14 tokens at a time, 44 keys, of others one."""

    def size(axis: int, name: str, signature: str) -> int:
        if "cache" in name or (name == "mask" and axis == 3):
            return 44
        return 14 if "prefill" in signature else 1

    return {
        f"{signature}/{name}": tuple(
            size(axis, name, signature) if own < 0 else own
            for axis, own in enumerate(tensor.shape_signature)
        )
        for signature, inputs in load(path).inputs()
        for name, tensor in inputs.items()
        if tensor.shape_signature and tensor.is_dynamic
    }


def not_exported(log: Path, special: str) -> Row:
    """The row of a family that has a log and no model."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = next(
        (line for line in reversed(lines) if _ERROR.match(line)), lines[-1] if lines else ""
    )
    said = re.sub(r"/\S+/", "", said)  # folders are those of one machine
    return dict.fromkeys(_COLUMNS, "") | {
        "family": log.stem, "special": special, "left": f"not exported: {said[:200]}"
    }  # fmt: skip


def contradictions(rows: list[Row]) -> list[str]:
    """Where `--require-all` passes although a block stays, or fails although nothing does."""
    return [
        f"{row['family']} ({row['types']}): {row['converted']} of {row['blocks']} blocks, left: "
        f"{row['left'] or 'nothing'}, but --require-all ends with {row['require_all']}"
        for row in rows
        if (row["require_all"] == "0" and row["blocks"] != row["converted"])
        or (row["require_all"] == "1" and not row["left"])
    ]


def _floats(path: Path) -> str:
    """The type of most floats that a model computes."""
    graphs = [graph for _, graph in edge_opt.load(path).entry_points()]
    kinds = (
        tensor.dtype
        for graph in graphs
        for operator in graph.operators
        for tensor in operator.outputs
    )
    return Counter(kind.name.lower() for kind in kinds if kind.is_float).most_common(1)[0][0]


def several_heads(path: Path) -> str:
    """Products of two activations and SOFTMAXes with more than one matrix of rows in a file, counted by shape."""
    found: Counter[str] = Counter()
    for _, graph in edge_opt.load(path).entry_points():
        for operator in graph.operators:
            product = operator.name in ("BATCH_MATMUL", "FULLY_CONNECTED")
            computed = (
                product and not operator.input(1).is_constant and not operator.input(0).is_constant
            )
            shape = operator.outputs[0].shape
            if (computed or operator.name in ("SOFTMAX", "LOG_SOFTMAX")) and math.prod(
                shape[:-2]
            ) > 1:
                found[f"{operator.name} {list(shape)}"] += 1
    return _counted(found)


def _counted(found: Counter[str]) -> str:
    return "; ".join(f"{count} x {what}" for what, count in found.items())


def _regions(result: ConversionResult) -> str:
    proofs = [site.proof for site in result.converted if site.proof is not None]
    if not proofs:
        return ""
    exact = sum(proof.bitwise for proof in proofs)
    if exact == len(proofs):
        return _EXACT
    worst = max(proof.max_abs for proof in proofs)
    return f"{exact} of {len(proofs)} {_EXACT}; others {worst:.2g}"


def _compared(before: Path, after: Path, on: Literal["cpu", "reference"]) -> str:
    try:
        report = compare(before, after, on=on)
    except EdgeOptError as error:
        return f"not run ({_without_folder(error, before)[:100]})"
    if report.bitwise:
        return _EXACT
    reasons = [signature.reason for signature in report.signatures if signature.reason]
    if reasons:
        return f"not run ({_without_folder(reasons[0], before)[:100]})"
    outputs = [output for signature in report.signatures for output in signature.outputs]
    worst = max((output.max_rel for output in outputs), default=0.0)
    return f"{worst:.1e} relative"


def _without_folder(message: object, path: Path) -> str:
    return str(message).replace(f"{path.parent}/", "")


def summary(rows: list[Row]) -> str:
    """The table in a sentence."""
    rows = [row for row in rows if row["types"]]
    blocks, converted = (
        sum(int(row[column] or 0) for row in rows) for column in ("blocks", "converted")
    )
    whole = sum(row["whole_xnnpack"] == row["whole_reference"] == _EXACT for row in rows)
    return (
        f"{len(rows)} models, {converted} of {blocks} multi-head blocks converted; {whole} models bit for bit equal as "
        "a whole on both kernel sets."
    )


def _specials() -> dict[str, str]:
    script = str(_ROOT / "testdata" / "make_families.py")
    lines = subprocess.run(
        [sys.executable, script, "--list"], check=True, capture_output=True, text=True
    ).stdout.splitlines()
    return {line.split()[0]: line.split(maxsplit=1)[1].strip() for line in lines}


def main() -> int:
    """Measure the models, write the table, and the summary into the page beside it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, default=_ROOT / "docs" / "research" / "families.csv")
    parser.add_argument("--only", nargs="+", metavar="MODEL", help="files' names, without .tflite")
    arguments = parser.parse_args()
    specials = {
        family: row["special"] for (family, _), row in _known(arguments.out).items()
    } | _specials()
    logs = [p for p in arguments.folder.glob("*.log") if not p.with_suffix(".tflite").exists()]
    models = [p for p in arguments.folder.glob("*.tflite") if ".auxiliary" not in p.name]
    with tempfile.TemporaryDirectory() as folder:
        for path in sorted([*models, *(log for log in logs if log.stem in specials)]):
            if arguments.only is None or path.stem in arguments.only:
                special = specials.get(path.stem.partition(".")[0], "")
                unmade = path.suffix == ".log"
                row = (
                    not_exported(path, special) if unmade else measure(path, special, Path(folder))
                )
                print(", ".join(value for value in row.values() if value), flush=True)
                _record(row, arguments.out)
    rows = list(_known(arguments.out).values())
    print(summary(rows))
    wrong = contradictions(rows)
    print("\n".join(wrong))
    return 1 if wrong else 0


def _known(table: Path) -> dict[tuple[str, str], Row]:
    if not table.exists():
        return {}
    with table.open(newline="", encoding="utf-8") as file:
        rows = [dict.fromkeys(_COLUMNS, "") | row for row in csv.DictReader(file)]
    return {(row["family"], row["types"]): row for row in rows}


def _record(row: Row, table: Path) -> None:
    """Put a row into the table as it is now: several runs may fill one."""
    with Path(__file__).open(encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        rows = _known(table)
        rows[row["family"], row["types"]] = row
        _write(list(rows.values()), table)


def _write(rows: list[Row], out: Path) -> None:
    with out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, _COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    page = out.with_suffix(".md")
    if page.exists():
        text = page.read_text(encoding="utf-8")
        page.write_text(_SUMMARY.sub(summary(rows), text, count=1), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
