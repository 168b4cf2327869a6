"""What somebody may have meant by an option that does not exist: one of a like name, or for the same purpose."""

import re
from difflib import SequenceMatcher
from typing import Any

_ALIKE = 0.75
# Words that other programs have for what ours call otherwise; our library's names need no entry.
_MEANINGS = {
    "--force": "replace yes clobber",
    "--output": "out dest destination to",
    "--target": "npu device hardware vendor soc backend",
    "--passes": "only pass enable rewrites",
    "--skip": "exclude without disable except ignore",
    "--signatures": "signature entry entries function",
    "--verify": "check prove proof validate",
    "--dry-run": "simulate noop preview plan",
    "--rows-per-tile": "tile tiles tiling rows block",
    "--require-all": "strict",
    "--quiet": "silent",
    "--inline-composites": "inline decompose composite composites",
    "--report": "html markdown log",
    "--atol": "tolerance abs epsilon",
    "--rtol": "relative rel",
    "--runs": "samples repeat iterations",
    "--generate": "tokens steps",
}


def nearest(unknown: str, command: Any) -> str | None:
    """Of a command's options, the one that was probably meant; None where none is near."""
    options = [param for param in command.params if param.param_type_name == "option"]
    scores = {option.opts[-1]: _score(unknown.lstrip("-").lower(), option) for option in options}
    best = max(scores, key=lambda name: scores[name])
    return best if scores[best] >= _ALIKE else None


def _score(word: str, option: Any) -> float:
    parts = set(word.split("-")) - {"no"}
    if parts & set(_MEANINGS.get(option.opts[-1], "").split()):
        return 1.0
    names = [name.lstrip("-") for name in (*option.opts, option.name.replace("_", "-")) if len(name) > 2]
    alike = max(SequenceMatcher(None, word, name).ratio() for name in names)
    said = set(re.findall(r"[a-z]{5,}", (option.help or "").lower()))
    return max(alike, _ALIKE if parts & said else 0.0)
