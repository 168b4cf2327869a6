"""What becomes of every family of attention that exporters write: a table, from freshly exported models.

    python testdata/make_families.py MODELS
    python testdata/quantize_model.py a16w8 MODELS/*.tflite          (and a8w8, dynamic)
    python benchmarks/families.py MODELS --out docs/families.md

Each model is converted with every region proved, and compared with the original, whole, on both kernel sets.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from edge_opt.comparison.compare import compare
from edge_opt.conversion import ConversionResult, convert
from edge_opt.passes import SiteReport, Status
from edge_opt.schema.errors import EdgeOptError

_SPLITS = "mha_to_sha"
_HEAD = "| family | types | blocks | converted | regions | whole model | left, and why |"


@dataclass(slots=True)
class Row:
    """One model."""

    family: str
    types: str
    blocks: int = 0
    converted: int = 0
    regions: str = ""
    whole: str = ""
    left: Counter[str] = field(default_factory=Counter)

    def cells(self) -> str:
        """As a line of the table."""
        left = "; ".join(f"{count} x {reason}" for reason, count in self.left.items())
        values = (self.family, self.types, self.blocks, self.converted, self.regions, self.whole, left)
        return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"


def attention(result: ConversionResult) -> list[SiteReport]:
    """The verdicts on attention blocks with several heads, or on what may be one."""
    sites = [site for site in result.sites if site.pass_name == _SPLITS]
    return [site for site in sites if site.heads != 1 and (site.heads is not None or not site.settled)]


def measure(path: Path, folder: Path) -> Row:
    """Convert one model and compare it with itself as it was."""
    name, _, recipe = path.stem.partition(".")
    row = Row(name, recipe or "float32")
    output = folder / "converted.tflite"
    try:
        result = convert(path, output, overwrite=True)
    except EdgeOptError as error:
        row.left[str(error)[:160]] += 1
        return row
    sites = attention(result)
    row.blocks = len(sites)
    row.converted = sum(site.status is Status.CONVERTED for site in sites)
    row.regions = _regions(result)
    for site in result.sites:
        if site.status is not Status.CONVERTED and not site.settled:
            row.left[f"{site.pass_name}: {site.reason[:200]}"] += 1
    row.whole = _whole(path, output) if result.converted else "unchanged"
    return row


def _regions(result: ConversionResult) -> str:
    proofs = [site.proof for site in result.converted if site.proof is not None]
    if not proofs:
        return ""
    exact = sum(proof.bitwise for proof in proofs)
    if exact == len(proofs):
        return "bit for bit"
    worst = max(proof.max_abs for proof in proofs)
    masked = max((proof.fully_masked_rows_max_abs or 0.0 for proof in proofs), default=0.0)
    return f"{exact} of {len(proofs)} bit for bit; others {worst:.2g}" + (
        f", masked rows {masked:.2g}" * (masked > 0)
    )


def _whole(before: Path, after: Path) -> str:
    """What comparing the whole models gave; one word where both kernel sets agree."""
    texts = {backend: _compared(before, after, backend) for backend in ("xnnpack", "reference")}
    if len(set(texts.values())) == 1:
        return texts["xnnpack"]
    return ", ".join(f"{backend}: {text}" for backend, text in texts.items())


def _compared(before: Path, after: Path, backend: Literal["xnnpack", "reference"]) -> str:
    try:
        report = compare(before, after, backend=backend)
    except EdgeOptError as error:
        return f"not run ({_without_folder(error, before)[:100]})"
    if report.bitwise:
        return "bit for bit"
    reasons = [signature.reason for signature in report.signatures if signature.reason]
    if reasons:
        return f"not run ({_without_folder(reasons[0], before)[:100]})"
    outputs = [output for signature in report.signatures for output in signature.outputs]
    worst = max(
        (output.difference.max_rel for output in outputs if output.difference is not None), default=0.0
    )
    return f"{worst:.1e} relative"


def _without_folder(message: object, path: Path) -> str:
    return str(message).replace(f"{path.parent}/", "")


def main() -> int:
    """Print the table, and write it where asked."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="also write the page to this file")
    arguments = parser.parse_args()
    models = [p for p in sorted(arguments.folder.glob("*.tflite")) if ".auxiliary" not in p.name]
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for path in models:
            rows.append(measure(path, Path(folder)))
            print(rows[-1].cells(), flush=True)
    page = _page(rows)
    if arguments.out is not None:
        arguments.out.write_text(page, encoding="utf-8")
    print(page.splitlines()[2])
    return 0


def _page(rows: list[Row]) -> str:
    blocks, converted = sum(row.blocks for row in rows), sum(row.converted for row in rows)
    whole = sum(row.whole == "bit for bit" for row in rows)
    summary = (
        f"{len(rows)} models, {converted} of {blocks} multi-head blocks converted; {whole} models bit for bit equal on "
        "both kernel sets."
    )
    head = [_HEAD, "|" + " --- |" * (_HEAD.count("|") - 1)]
    about = (__doc__ or "").split("\n\n    python", maxsplit=1)[0].strip()
    return "\n".join(
        ["# Families of attention", "", summary, "", about, "", *head, *(row.cells() for row in rows), ""]
    )


if __name__ == "__main__":
    sys.exit(main())
