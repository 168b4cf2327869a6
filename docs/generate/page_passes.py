"""The pages of the passes: identity and demand from the code, the picture from a run of the pass."""

import inspect
import re

from pictures import picture

from edge_opt.passes import PASSES
from edge_opt.passes.contract import Demand


def table() -> str:
    """All passes in the order in which they run."""
    rows = [
        f"| {place} | [`{name}`]({name}.md) | {chosen.summary} | {demand_words(chosen.demand)} |"
        for place, (name, chosen) in enumerate(PASSES.items(), 1)
    ]
    return "\n".join(["| | pass | what it does | proved to be |", "|---|---|---|---|", *rows])


def demand_words(demand: Demand) -> str:
    """What a pass is held to, in a few words."""
    if demand.kind == "bitwise":
        return "equal bit for bit"
    if demand.kind == "steps":
        return f"at most {demand.tolerance:g} quantization step apart"
    if demand.kind == "absolute":
        return "within half a step of the same computed in float"
    return f"equal to {demand.tolerance:g} relative"


def page(name: str) -> str:
    """The generated part of a pass's page: what it is held to, its identity, where it looks, and the picture."""
    chosen = PASSES[name]
    drawn = picture(name)
    return "\n\n".join(
        [
            f"`{name}` {chosen.summary}.",
            _quoted(docstring(type(chosen))),
            f"**Proved to be** {demand_words(chosen.demand)}, on XNNPACK and on the reference kernels, at every site.",
            f"**Sites:** {_lowered(docstring(type(chosen).sites))}",
            "## Before and after",
            drawn.to_markdown(name, "../assets"),
            f"<details markdown><summary>The same as text</summary>\n\n{drawn.to_text()}\n\n</details>",
        ]
    )


def docstring(documented: object) -> str:
    """A docstring's own text, with plain signs where Markdown would take them for its own."""
    return re.sub(r"(?<![`\w])<(?=\w)", "&lt;", inspect.getdoc(documented) or "")


def _quoted(text: str) -> str:
    return "\n".join(f"> {line}" if line else ">" for line in text.splitlines())


def _lowered(text: str) -> str:
    return text[:1].lower() + text[1:]
