"""Code and commands on the pages of the documentation, and a folder with the files that they name."""

from __future__ import annotations

import atexit
import re
import shlex
import shutil
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from tempfile import mkdtemp
from textwrap import dedent

import generation_models as models
from cli_runs import DEMO, QUANTIZED

import edge_opt
from edge_opt.comparison.golden import record

ROOT = Path(__file__).resolve().parent.parent
PATTERNS = ("*.md", "docs/**/*.md", "examples/*.yml")
PAGES = [page for pattern in PATTERNS for page in sorted(ROOT.glob(pattern))]
TOOLS = ("pip", "python", "python3", "bash", "pytest", "ruff", "mkdocs", "litert", "model-explorer")
PROGRAMS = ("edge-opt", *TOOLS)
_FENCED = re.compile(r"^```(\w*)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"\n\n((?:    [^\n]*\n|\n)+)")
_NEEDS = re.compile(r"\s*# needs (.+)$")
_GENERATED = re.compile(
    r"^<!-- edge-opt: (?!end).+?^<!-- edge-opt: end -->$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True)
class Block:
    """Code on a page; `title` where it is a file that the reader is to have."""

    page: Path
    language: str
    title: str
    text: str

    @property
    def needs(self) -> str:
        """The package that a Python block needs, as its first line says; empty where none."""
        found = _NEEDS.match(self.text.splitlines()[0])
        return found[1] if found else ""

    @property
    def commands(self) -> list[Command]:
        """The commands in it, `a && b` being two."""
        lines = [line.strip() for line in self.text.replace("\\\n", " ").splitlines()]
        if self.language in ("yaml", "yml"):
            lines = [
                line.partition("run: ")[2].partition("  #")[0]
                for line in lines
                if line.startswith("- run: ")
            ]
        elif self.language not in ("", "bash"):
            lines = []
        parts = [part for line in lines if not line.startswith("#") for part in line.split(" && ")]
        return [
            command
            for part in parts
            if (command := Command.of(part, self.page)).program in PROGRAMS
        ]


@dataclass(frozen=True)
class Command:
    """`needs`: what it needs and this machine may not have; it is then parsed and not run."""

    words: tuple[str, ...]
    needs: str
    where: str

    @classmethod
    def of(cls, line: str, page: Path) -> Command:
        """One command, without the place that its output is sent to."""
        needs = _NEEDS.search(line)
        bare = _NEEDS.sub("", line).split(" > ")[0]
        words = shlex.split(bare, comments=True) if bare.startswith((*PROGRAMS, ".venv/")) else []
        return cls(tuple(words), needs[1] if needs else "", f"{page.relative_to(ROOT)}: {line}")

    @property
    def program(self) -> str:
        """Its name, in whichever environment; `edge-opt` for `python -m edge_opt` too."""
        if self.words[1:3] == ("-m", "edge_opt"):
            return "edge-opt"
        return self.words[0].removeprefix(".venv/bin/") if self.words else ""

    @property
    def arguments(self) -> list[str]:
        """What follows the program."""
        return list(self.words[3 if self.words[1:3] == ("-m", "edge_opt") else 1 :])

    @property
    def runnable(self) -> bool:
        """Whether every machine can run it; completion and the demo have tests of their own."""
        apart = {"--install-completion", "demo"} & set(self.words)
        return self.program == "edge-opt" and not self.needs and not apart


def own_text(page: Path) -> str:
    """A page without its generated parts."""
    return _GENERATED.sub("", page.read_text(encoding="utf-8"))


def blocks(page: Path) -> list[Block]:
    """Every block of code that we wrote: between fences, or indented by four behind an empty line."""
    text, found = own_text(page), []
    if page.suffix == ".yml":
        return [Block(page, "yaml", "", text)]
    for language, rest, body in _FENCED.findall(text):
        title = re.search(r'title="([^"]+)"', rest)
        found.append(Block(page, language, title[1] if title else "", body))
    indented = (body for body in _INDENTED.findall(_FENCED.sub("", text)) if body.strip())
    return found + [Block(page, "", "", dedent(body).strip("\n")) for body in indented]


@cache
def supplies() -> Path:
    """A folder with the files that the pages name, made of the bundled tiny Gemma3."""
    folder = Path(mkdtemp(prefix="edge-opt-pages-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copy(DEMO, folder / "gemma.tflite")
    shutil.copy(QUANTIZED, folder / "gemma_int16.tflite")
    edge_opt.convert(DEMO, folder / "gemma.opt.tflite", verify="none")
    record(DEMO, folder / "gemma.golden.npz")
    shutil.copy(models.packed(folder), folder / "gemma.opt.litertlm")
    return folder


def supply(folder: Path, page: Path, commands: list[Command]) -> None:
    """The files that a page's commands read and do not write themselves."""
    words = [word for command in commands for word in command.words]
    written = {after for before, after in pairwise(words) if before in ("-o", "--report")}
    if any(command.arguments[:2] == ["convert", "gemma.tflite"] for command in commands):
        written.add("gemma.opt.tflite")
    if any(command.arguments == ["golden", "record", "gemma.tflite"] for command in commands):
        written.add("gemma.golden.npz")
    for name in {word for word in words if (supplies() / word).is_file()} - written:
        shutil.copy(supplies() / name, folder / name)
    for block in blocks(page):
        if block.title and not (ROOT / block.title).exists():
            (folder / block.title).write_text(block.text, encoding="utf-8")
