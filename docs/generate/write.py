"""Writes the parts of the pages that come from the code: `python docs/generate/write.py`; `--check` lists stale pages.

A page holds such a part between `<!-- edge-opt: NAME -->` and `<!-- edge-opt: end -->`. Pages are committed as they are
written, so a reader of the repository sees what a reader of the site sees. Needs the extra `docs`.
"""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import page_api
import page_commands
import page_passes
import page_reasons
import page_shapes
import page_targets
from outputs import Outputs

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PARTS: dict[str, Callable[[], str]] = {
    "passes": page_passes.table,
    "reasons": page_reasons.table,
    "pass-sections": page_passes.sections,
    "targets": page_targets.table,
    "target-sections": page_targets.sections,
    "target-facts": page_targets.meanings,
    "shapes": page_shapes.table,
    "commands": page_commands.table,
    "command-sections": page_commands.sections,
}
_PLACE = re.compile(
    r"^<!-- edge-opt: (?!end)(.+?) -->\n(.*?)^<!-- edge-opt: end -->$", re.MULTILINE | re.DOTALL
)
STALE = "stale: run python docs/generate/write.py"
_TIME = re.compile(r"\b\d+\.\d s\b")
_LANGUAGES = {".yml": "yaml", ".toml": "toml", ".py": "python"}


def written(page: str) -> str:
    """The text of a page with its generated parts as the code has them now; a time that was printed stays as it was."""
    shown = Outputs()

    def part(place: re.Match[str]) -> str:
        kind, _, rest = place[1].partition(" ")
        made = {"output": shown.of, "example": _example, "api": page_api.section}
        text = made[kind](rest) if kind in made else PARTS[place[1]]()
        new = f"<!-- edge-opt: {place[1]} -->\n{text}\n<!-- edge-opt: end -->"
        return place[0] if _TIME.sub("", new) == _TIME.sub("", place[0]) else new

    return _PLACE.sub(part, page)


def stale(*, write: bool) -> list[Path]:
    """Pages whose generated parts are not what the code has; `write` brings them up to date."""
    changed = []
    for page in sorted(DOCS.rglob("*.md")):
        text = page.read_text(encoding="utf-8")
        new = written(text)
        if new != text:
            changed.append(page)
            if write:
                page.write_text(new, encoding="utf-8")
    return changed


def _example(name: str) -> str:
    """A file of the examples, shown whole."""
    path = ROOT / "examples" / name
    return f'```{_LANGUAGES[path.suffix]} title="{path.name}"\n{path.read_text(encoding="utf-8").rstrip()}\n```'


def main() -> int:
    """Write the pages; with `--check` list the stale ones and exit 1 if any is."""
    checking = sys.argv[1:] == ["--check"]
    pages = stale(write=not checking)
    for page in pages:
        sys.stdout.write(f"{page.relative_to(ROOT)}: {STALE if checking else 'written'}" + "\n")
    return 1 if checking and pages else 0


if __name__ == "__main__":
    sys.exit(main())
