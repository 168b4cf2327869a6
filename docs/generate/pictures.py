"""What each pass does, drawn: the real pass runs on a small model, and the report's own code lays out both versions."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))

from text_parser import parse

from edge_opt import convert
from edge_opt.conversion.result import proof as proof_words
from edge_opt.inspection import example_rewrite
from edge_opt.ir import Model, Operator, load
from edge_opt.ir.text import operator_text
from edge_opt.passes import Status
from edge_opt.report import Example
from edge_opt.report.page import draw
from edge_opt.targets import Target, load_target

TESTDATA = Path(__file__).resolve().parents[2] / "testdata"
_MOST_LINES = 40
_ON_SINGLE_HEADS = ("tile_rows", "mask_before_join")
# Colours that can be read on a light and on a dark page.
_STYLE = (
    "text{fill:#1c1f23;font:600 11px system-ui,sans-serif;text-anchor:middle}text.detail{fill:#4d545c;font-weight:400}"
    "rect{fill:#eef3fb;stroke:#9db6dc}.input rect{fill:#f4f1ea;stroke:#cbbf9f}"
    ".edge{fill:none;stroke:#8a929c;stroke-width:1.2}"
)


@dataclass(frozen=True, slots=True)
class Picture:
    """A region before and after a pass, what the model is, and what the proof showed."""

    name: str
    example: Example
    source: str
    proof: str

    @property
    def versions(self) -> dict[str, Sequence[Operator]]:
        """The operators of both versions."""
        return {"before": self.example.before, "after": self.example.after}

    def to_markdown(self, title: str, folder: str) -> str:
        """Both pictures side by side, which lie in `folder`; then what the model is."""
        heads = [f"{word}: {_counted(operators)}" for word, operators in self.versions.items()]
        images = [
            f"![{title}, {head}]({folder}/{self.name}-{word}.svg)"
            for word, head in zip(self.versions, heads, strict=True)
        ]
        rows = [f"| {' | '.join(cells)} |" for cells in (heads, ["---"] * 2, images)]
        return "\n".join([*rows, "", f"{self.source} {self.proof}"])

    def to_text(self) -> str:
        """Both versions in the text form."""
        blocks = []
        for word, operators in self.versions.items():
            lines = [operator_text(operator, self.example.name) for operator in operators]
            if len(lines) > _MOST_LINES:
                lines = [*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES} more ..."]
            blocks.append("\n".join([f"{word.capitalize()}:", "", "```text", *lines, "```"]))
        return "\n\n".join(blocks)

    def write(self, folder: Path) -> None:
        """The pictures as SVG files; they follow the reader's colour scheme."""
        for word, operators in self.versions.items():
            svg = draw(operators, self.example.name, f"{self.name}, {word}")
            head, tag, rest = svg.partition(">")
            namespace = ' xmlns="http://www.w3.org/2000/svg"'
            text = f"{head}{namespace}{tag}<style>{_STYLE}</style>{rest}\n"
            (folder / f"{self.name}-{word}.svg").write_text(text, encoding="utf-8")


def _counted(operators: Sequence[Operator]) -> str:
    return "1 operator" if len(operators) == 1 else f"{len(operators)} operators"


def picture(name: str) -> Picture:
    """The first region that a pass rewrites in the model that shows it best."""
    if name in ("mha_to_sha", *_ON_SINGLE_HEADS):
        path = TESTDATA / "demo_gemma3.tflite"
        source = "A tiny Gemma3, exported by litert-torch; bundled, as `edge-opt demo` shows it."
    else:
        path = TESTDATA / f"pass_{name}.txt"
        source = _SOURCES[name]
    rows = 2 if name == "tile_rows" else None
    target = replace(load_target("generic"), rows_per_tile=rows, mask_before_join=name == "mask_before_join")
    return Picture(name, _example(path, name, target), source, _proved(path, name, target))


_SOURCES = {
    "position_table": "Rope as litert-torch's pipeline quantizes it, made small: 4 positions at a time, a cache of 24.",
    "inline_composites": "Cut out of a Gemma3 that litert-torch exported with its SDPA composites for GPUs.",
    "mask_to_add": "Cut out of a Gemma3 that litert-torch exported for GPUs, with a boolean mask.",
    "quantized_mask": "Cut out of the auxiliary model of a Gemma3, quantized by ai-edge-quantizer (int16).",
    "matmul_convert": "The graph that this rewrite was specified with: logits against the cache and the new slice.",
}


def _read(path: Path, name: str) -> Model:
    """The model, its heads split first where the pass works on single heads."""
    model = load(path) if path.suffix == ".tflite" else parse(path.read_text(encoding="utf-8"))
    if name in _ON_SINGLE_HEADS:
        convert(model, passes=["mha_to_sha"], verify="none")
    return model


def _example(path: Path, name: str, target: Target) -> Example:
    model = _read(path, name)
    signature = next(entry for entry, _ in model.entry_points())
    example = example_rewrite(model, signature, name, target)
    assert example is not None, f"{name} finds nothing in {path.name}"
    return example


def _proved(path: Path, name: str, target: Target) -> str:
    """The pass's own proof of that region, in words."""
    result = convert(_read(path, name), passes=[name], target=target)
    site = next((site for site in result.sites if site.status is Status.CONVERTED), None)
    assert site is not None, f"{name} converts nothing in {path.name}"
    return f"Run before and after on both kernel sets: {proof_words(site)}."
