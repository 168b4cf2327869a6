"""What the pages of the documentation tell readers to run: blocks, the commands in them, and files to run those on."""

from __future__ import annotations

import atexit
import re
import shlex
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import generation_models as models
from bundles import bundle, model_part
from cli_runs import DEMO, QUANTIZED
from text_parser import parse

import edge_opt
from edge_opt.comparison.golden import record
from edge_opt.ir import to_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "examples").glob("*.yml")),
]
SHELL = ("bash", "sh", "console")
PROGRAMS = (
    *("edge-opt", "pip", "python", "python3", "bash", "pytest", "ruff", "mkdocs", "unzip", "litert"),
    "model-explorer",
)
_FENCE = re.compile(r"^( *)```(\w*)(.*)$")
_RUN = re.compile(r"^( *)(?:- )?run: *(.*)$")
_NEEDS = re.compile(r"\s# needs (.+)$")
_GENERATED = re.compile(r"^<!-- edge-opt: (?!end).+?^<!-- edge-opt: end -->$", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`((?:edge-opt|python -m edge_opt) [^`]+)`")


@dataclass(frozen=True)
class Block:
    """Code on a page; `title` where it is a file that the reader is to have."""

    page: Path
    line: int
    language: str
    title: str
    text: str

    @property
    def needs(self) -> str:
        """The package that a Python block says it needs in its first line; empty where none."""
        return self.text.removeprefix("# needs ").splitlines()[0] if self.text.startswith("# needs ") else ""

    @property
    def commands(self) -> list[Command]:
        """The commands in it, `a && b` being two."""
        if self.language in SHELL:
            lines = [line for line in self.text.splitlines() if line.strip() and not line.startswith("#")]
        elif self.language in ("yaml", "yml"):
            lines = list(_steps(self.text))
        elif self.language in ("", "text"):
            lines = [line for line in self.text.splitlines() if _program(line.split(" ")[0]) in PROGRAMS]
        else:
            lines = []
        return [Command.of(part, self) for line in lines for part in line.split(" && ")]


@dataclass(frozen=True)
class Command:
    """`needs`: what it says that it needs and this machine may not have; then it is parsed and not run."""

    words: tuple[str, ...]
    needs: str
    where: str

    @classmethod
    def of(cls, line: str, block: Block) -> Command:
        """One command; where its output is sent to is left out."""
        needs = _NEEDS.search(line)
        words = shlex.split(_NEEDS.sub("", line).split(" > ")[0], comments=True)
        place = f"{block.page.relative_to(ROOT)}:{block.line}"
        return cls(tuple(words), needs[1] if needs else "", f"{place}: {line.strip()}")

    @property
    def program(self) -> str:
        """Its name, in whichever environment; `edge-opt` for `python -m edge_opt` too."""
        return "edge-opt" if self.words[1:3] == ("-m", "edge_opt") else _program(self.words[0])

    @property
    def arguments(self) -> list[str]:
        """What follows the program."""
        return list(self.words[3 if self.words[1:3] == ("-m", "edge_opt") else 1 :])

    @property
    def outputs(self) -> set[str]:
        """Files that it writes."""
        pairs = zip(self.words, self.words[1:], strict=False)
        named = {value for option, value in pairs if option in ("-o", "--output", "--report", "--node-data")}
        if self.program == "edge-opt" and self.arguments[:1] == ["convert"] and "-o" not in self.words:
            source = Path(self.arguments[1])
            named.add(f"{source.stem}.opt{source.suffix}")
        return named


def _program(word: str) -> str:
    return word.removeprefix(".venv/bin/")


def own_text(page: Path) -> str:
    """A page without its generated parts; every line keeps its number."""
    return _GENERATED.sub(lambda part: "\n" * part[0].count("\n"), page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[Block]:
    """Every block of code that we wrote: between fences, or indented by four behind an empty line."""
    text = own_text(page)
    return [Block(page, 1, "yaml", "", text)] if page.suffix == ".yml" else list(_blocks(page, text))


def _blocks(page: Path, text: str) -> Iterator[Block]:
    lines = text.splitlines()
    place = 0
    while place < len(lines):
        begin = place
        opened = _FENCE.match(lines[place])
        if opened:
            margin, language, rest = len(opened[1]), opened[2], opened[3]
            place += 1
            while lines[place].strip() != "```":
                place += 1
            title = re.search(r'title="([^"]+)"', rest)
            body = [line[margin:] for line in lines[begin + 1 : place]]
            yield Block(page, begin + 1, language, title[1] if title else "", "\n".join(body) + "\n")
        elif lines[place].startswith("    ") and (not place or not lines[place - 1].strip()):
            while place + 1 < len(lines) and (lines[place + 1].startswith("    ") or not lines[place + 1]):
                place += 1
            body = [line[4:] for line in lines[begin : place + 1]]
            yield Block(page, begin + 1, "", "", "\n".join(body).rstrip() + "\n")
        place += 1


def _steps(text: str) -> Iterator[str]:
    """The commands of a workflow's `run` steps."""
    lines = text.splitlines()
    for place, line in enumerate(lines):
        found = _RUN.match(line)
        if found and found[2] != "|":
            yield found[2].partition("  #")[0]
        elif found:
            for inner in lines[place + 1 :]:
                if inner.strip() and not inner.startswith(found[1] + "  "):
                    break
                if inner.strip():
                    yield inner.strip()


def inline_commands(page: Path) -> list[Command]:
    """Commands of ours in the midst of a sentence."""
    prose = re.sub(
        r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    block = Block(page, 1, "bash", "", "")
    return [Command.of(" ".join(found.split()), block) for found in _INLINE.findall(prose)]


@cache
def supplies() -> Path:
    """A folder with the files that the pages speak of, made of the bundled tiny Gemma3."""
    folder = Path(mkdtemp(prefix="edge-opt-pages-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copy(DEMO, folder / "gemma.tflite")
    shutil.copy(QUANTIZED, folder / "gemma_int16.tflite")
    edge_opt.convert(DEMO, folder / "gemma.opt.tflite", verify="none")
    record(DEMO, folder / "gemma.npz")
    texts = {"prefill_decode": models.split(), "embedder": models.embedder(), "aux": models.auxiliary()}
    parts = [model_part(kind, to_bytes(parse(text))) for kind, text in texts.items()]
    (folder / "gemma.litertlm").write_bytes(bundle(parts))
    shutil.copy(folder / "gemma.litertlm", folder / "gemma.opt.litertlm")
    return folder


def supply(folder: Path, page: Path, commands: list[Command]) -> None:
    """What a reader has at that place of a page: the files that its commands name and do not write themselves."""
    written = {name for command in commands for name in command.outputs}
    for command in commands:
        for word in command.words:
            if (supplies() / word).is_file() and word not in written:
                shutil.copy(supplies() / word, folder / word)
    for block in blocks(page):
        if block.title and not (ROOT / block.title).exists():
            (folder / block.title).write_text(block.text, encoding="utf-8")
