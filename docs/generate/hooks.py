"""Builds the parts of the site that come from the code: MkDocs calls this module (`hooks` in mkdocs.yml).

A page says `<!-- edge-opt: NAME -->` where a generated part goes. Passes without a page get one, and the files at the
root of the repository that readers look for are pages too. Nothing of this is committed, and nothing loads the network.
"""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import page_commands
import page_families
import page_messages
import page_passes
import page_targets
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from outputs import Outputs
from pictures import picture

import edge_opt
from edge_opt.passes import PASSES

ROOT = Path(__file__).resolve().parents[2]
FROM_ROOT = {
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
MORE = "More"
_PASSES = "passes/index.md"

PARTS: dict[str, Callable[[], str]] = {
    "families": page_families.table,
    "passes": page_passes.table,
    "targets": page_targets.table,
    "target-sections": page_targets.sections,
    "target-facts": page_targets.meanings,
    "commands": page_commands.table,
    "command-sections": page_commands.sections,
    "messages": page_messages.listed,
    "refusals": page_messages.refusals,
    "errors": page_messages.table,
    "version": lambda: edge_opt.__version__,
    "block": lambda: picture("mha_to_sha").to_html("An attention block"),
    **{f"pass {name}": (lambda name=name: page_passes.page(name)) for name in PASSES},  # type: ignore[misc]
}
_PLACE = re.compile(r"^<!-- edge-opt: (.+?) -->$", re.MULTILINE)
_LINK = re.compile(r"\]\((?:docs/)?([A-Za-z_/-]+\.(?:md|yml|html))(#[^)]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Completes the navigation: a page per pass, what lies at the root, and pages that mkdocs.yml does not name."""
    nav: list[Any] = list(config.nav or [])
    named = set(_named(nav))
    passes = next(pages for entry in nav for pages in entry.values() if _PASSES in pages)
    passes.extend(f"passes/{name}.md" for name in PASSES if f"passes/{name}.md" not in named)
    known = named | set(FROM_ROOT.values())
    left = sorted(path.name for path in Path(config.docs_dir).glob("*.md") if path.name not in known)
    if left:
        nav.append({MORE: left})
    config.nav = _existing(nav, Path(config.docs_dir))
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that no file in docs/ stands for."""
    for name in PASSES:
        uri = f"passes/{name}.md"
        if files.get_file_from_path(uri) is None:
            content = f"# {name}\n\n<!-- edge-opt: pass {name} -->\n"
            files.append(File.generated(config, uri, content=content))
    for name, uri in FROM_ROOT.items():
        if (ROOT / name).exists():
            text = (ROOT / name).read_text(encoding="utf-8")
            files.append(File.generated(config, uri, content=_LINK.sub(_relinked, text)))
    for path in sorted((ROOT / "examples").iterdir()):
        if path.is_file():
            files.append(File.generated(config, f"examples/{path.name}", abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: object) -> str:
    """Fills in the generated parts."""
    shown = Outputs()

    def part(found: re.Match[str]) -> str:
        if found[1].startswith("output "):
            return shown.of(found[1].removeprefix("output "))
        if found[1].startswith("example "):
            return _example(found[1].removeprefix("example "))
        if found[1] not in PARTS:
            raise PluginError(
                f"{page.file.src_uri}: there is no part '{found[1]}', there are {', '.join(PARTS)}"
            )
        return PARTS[found[1]]()

    return _PLACE.sub(part, markdown.replace("](../examples/", "](examples/"))


def _example(name: str) -> str:
    """A file of the examples, shown whole."""
    path = ROOT / "examples" / name
    language = {".yml": "yaml", ".toml": "toml", ".py": "python"}[path.suffix]
    return f'```{language} title="{path.name}"\n{path.read_text(encoding="utf-8").rstrip()}\n```'


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
    return uri in {f"passes/{name}.md" for name in PASSES} or roots.get(uri, folder / uri).exists()


def _relinked(found: re.Match[str]) -> str:
    """A link from the root of the repository, as a link between pages."""
    path = FROM_ROOT.get(found[1], "index.md" if found[1] == "README.md" else found[1])
    return f"]({path}{found[2] or ''})"
