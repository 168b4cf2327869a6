"""Completes the site: MkDocs calls this module (`hooks` in mkdocs.yml).

The files at the root of the repository that readers look for are pages, too, and examples lie beside the pages.
"""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
_LINK = re.compile(r"\]\((?:docs/)?([A-Za-z_/-]+\.(?:md|yml|html))(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file in docs/ stands for."""
    for name, uri in FROM_ROOT.items():
        text = (ROOT / name).read_text(encoding="utf-8")
        files.append(File.generated(config, uri, content=_LINK.sub(_relinked, text)))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Examples lie beside the pages of the site."""
    return markdown.replace("](../examples/", "](examples/")


def _relinked(found: re.Match[str]) -> str:
    """A link from the root of the repository, as a link between pages."""
    path = FROM_ROOT.get(found[1], "index.md" if found[1] == "README.md" else found[1])
    return f"]({path}{found[2] or ''})"
