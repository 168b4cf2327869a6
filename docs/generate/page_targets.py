"""The page of the targets: every fact of every file in converter/targets, what it means, and where it comes from."""

import html
import inspect
import re
from dataclasses import MISSING, fields
from typing import Any

from edge_opt.targets import Target, load_target, target_names

_MOST_SHOWN = 8
_OWN = ("name", "summary", "sources", "versions")


def table() -> str:
    """The bundled targets, one line each."""
    rows = [f"| [`{name}`](#{name}) | {load_target(name).summary} |" for name in target_names()]
    return "\n".join(["| target | what it is |", "|---|---|", *rows])


def sections() -> str:
    """One section for each bundled target."""
    return "\n\n".join(_section(load_target(name)) for name in target_names())


def meanings() -> str:
    """The keys of a target file, from the documentation of `Target`."""
    rows = [f"| `{name}` | {_shown(default)} | {meaning} |" for name, default, meaning in facts()]
    return "\n".join(["| fact | default | meaning |", "|---|---|---|", *rows])


def facts() -> list[tuple[str, Any, str]]:
    """A row for each fact: name, default and meaning."""
    known = _documented()
    return [
        (entry.name, None if entry.default is MISSING else entry.default, known.get(entry.name, ""))
        for entry in fields(Target)
        if entry.name not in _OWN
    ]


def _documented() -> dict[str, str]:
    """The meaning of each fact in the class's docstring, from lines `name: meaning` or `name, name: meaning`."""
    known = {entry.name for entry in fields(Target)}
    found: dict[str, str] = {}
    for line in inspect.getdoc(Target).splitlines():  # type: ignore[union-attr]
        head, colon, meaning = line.strip().partition(": ")
        names = [name.strip() for name in head.split(",")]
        if colon and known.issuperset(names):
            found |= dict.fromkeys(names, meaning)
    return found


def _section(target: Target) -> str:
    defaults = {entry.name: entry.default for entry in fields(Target)}
    facts = {name: value for name, value in target.to_dict().items() if name not in _OWN}
    said = {
        name: value for name, value in facts.items() if value not in (defaults.get(name), (), {})
    }
    rows = [
        f"| `{name}` | {_shown(value)} | {_linked(target.sources.get(name, ''))} |"
        for name, value in said.items()
    ]
    table = (
        "\n".join(["| fact | value | source |", "|---|---|---|", *rows])
        if rows
        else "It states no facts."
    )
    versions = ", ".join(f"{name} {version}" for name, version in target.versions.items())
    measured = f"\n\nMeasured with {versions}." if versions else ""
    return f"### {target.name}\n\n{target.summary}\n\n{table}{measured}"


def _shown(value: Any) -> str:
    if value is None or value in ((), {}):
        return "unknown"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, dict):
        return ", ".join(f"`{name}={item}`" for name, item in value.items())
    if isinstance(value, tuple | list):
        names = ", ".join(f"`{item}`" for item in value)
        return (
            names
            if len(value) <= _MOST_SHOWN
            else f"<details><summary>{len(value)} names</summary>{names}</details>"
        )
    return f"`{value:,}`".replace(",", " ") if isinstance(value, int) else f"`{value}`"


def _link(found: re.Match[str]) -> str:
    """An address, shown short."""
    host, _, path = found[0].partition("://")[2].partition("/")
    last = path.rstrip("/").rpartition("/")[2]
    return f"[{host}/…/{last}]({found[0]})" if "/" in path else f"<{found[0]}>"


def _linked(text: str) -> str:
    """Addresses and pages of this documentation as links."""
    escaped = html.escape(text, quote=False).replace("|", "\\|")
    escaped = re.sub(r"https?://[^\s,;:]+(?::\d+)?[^\s,;:.]*", _link, escaped)
    return re.sub(r"\bdocs/([a-z_/-]+)\.md", r"[docs/\1.md](\1.md)", escaped)
