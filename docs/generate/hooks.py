"""Completes the site: MkDocs calls this module (`hooks` in mkdocs.yml).

The files at the root of the repository that readers look for are pages, too; pages that mkdocs.yml does not name are
listed. What the pages hold is written by `write.py` and committed.
"""

import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
MORE = "More"
_PASSES = "passes/index.md"

_LINK = re.compile(r"\]\((?:docs/)?([A-Za-z_/-]+\.(?:md|yml|html))(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Completes the navigation: a page per pass, what lies at the root, and pages that mkdocs.yml does not name."""
    nav: list[Any] = list(config.nav or [])
    passes = next(pages for entry in nav for pages in entry.values() if _PASSES in pages)
    passes += [
        f"passes/{path.name}"
        for path in sorted(Path(config.docs_dir, "passes").glob("*.md"))
        if path.name != "index.md"
    ]
    known = set(_named(nav)) | set(FROM_ROOT.values())
    left = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in known)
    if left:
        nav.append({MORE: left})
    config.nav = _existing(nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file in docs/ stands for."""
    for name, uri in FROM_ROOT.items():
        if (ROOT / name).exists():
            text = (ROOT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, uri, content=_LINK.sub(_relinked, text)))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Examples lie beside the pages of the site."""
    return markdown.replace("](../examples/", "](examples/")


def _named(nav: Any) -> list[str]:
    """Every page in a navigation."""
    if isinstance(nav, str):
        return [nav]
    items = nav.values() if isinstance(nav, dict) else nav
    return [page for item in items for page in _named(item)]


def _existing(entry: Any, folder: Path) -> Any:
    """An entry without pages that this checkout does not have."""
    if isinstance(entry, dict):
        return {title: _existing(pages, folder) for title, pages in entry.items()}
    if isinstance(entry, list):
        return [
            _existing(item, folder) for item in entry if not isinstance(item, str) or _is_there(item, folder)
        ]
    return entry


def _is_there(uri: str, folder: Path) -> bool:
    roots = {page: ROOT / name for name, page in FROM_ROOT.items()}
    return roots.get(uri, folder / uri).exists()


def _relinked(found: re.Match[str]) -> str:
    """A link from the root of the repository, as a link between pages."""
    path = FROM_ROOT.get(found[1], "index.md" if found[1] == "README.md" else found[1])
    return f"]({path}{found[2] or ''})"
