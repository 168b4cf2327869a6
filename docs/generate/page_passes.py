"""The page of the passes: identity and check, from the code."""

import inspect
import re

from edge_opt.passes import PASSES


def table() -> str:
    """All passes in the order in which they run."""
    rows = [
        f"| {place} | [`{name}`](#{name}) | {chosen.summary} | {chosen.check.words} |"
        for place, (name, chosen) in enumerate(PASSES.items(), 1)
    ]
    return "\n".join(["| | pass | what it does | results |", "|---|---|---|---|", *rows])


def sections() -> str:
    """One section for each pass: its identity, its check, and where it applies."""
    return "\n\n".join(_section(name) for name in PASSES)


def _section(name: str) -> str:
    chosen = PASSES[name]
    identity = _docstring(type(chosen)).splitlines()
    quoted = "\n".join(f"> {line}" if line else ">" for line in identity)
    words = f"**Results:** {chosen.check.words}. **Where:** {_docstring(type(chosen).sites)}"
    return f"## {name}\n\n{quoted}\n\n{words}"


def _docstring(documented: object) -> str:
    """A docstring's own text, with plain signs where Markdown would take them for its own."""
    return re.sub(r"(?<![`\w])<(?=\w)", "&lt;", inspect.getdoc(documented) or "")
