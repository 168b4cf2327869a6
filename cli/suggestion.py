"""What somebody may have meant by an option that does not exist: one of a like name, or for the same purpose."""

import re
from collections.abc import Mapping
from difflib import SequenceMatcher

_ALIKE = 0.75

# Words that other programs have for what ours call otherwise.
_MEANINGS = {
    "force": "overwrite replace yes clobber",
    "output": "out dest destination to",
    "target": "npu device hardware vendor soc backend",
    "passes": "only pass enable rewrites",
    "skip": "exclude without disable except ignore",
    "signatures": "signature entry entries function",
    "verify": "check prove proof validate",
    "dry-run": "simulate noop preview plan",
    "rows-per-tile": "tile tiles tiling rows block",
    "require-all": "strict",
    "quiet": "silent",
    "inline-composites": "inline decompose composite composites",
    "report": "html markdown log",
    "atol": "tolerance abs epsilon",
    "rtol": "relative rel",
    "runs": "samples repeat iterations",
    "generate": "tokens steps",
}


def nearest(unknown: str, options: Mapping[str, str]) -> str | None:
    """Of `options` (each with its help), the one that was probably meant; None where none is near."""
    word = unknown.lstrip("-").partition("=")[0].lower()
    scores = {option: _score(word, option.lstrip("-"), text) for option, text in options.items()}
    best = max(scores, key=lambda option: scores[option], default=None)
    return best if best is not None and scores[best] >= _ALIKE else None


def _score(word: str, option: str, text: str) -> float:
    if len(word) < 2 or len(option) < 2:
        return 0.0
    parts = set(word.split("-")) - {"no"}
    if parts & set(_MEANINGS.get(option, "").split()):
        return 1.0
    said = set(re.findall(r"[a-z]{5,}", text.lower()))
    alike = SequenceMatcher(None, word, option).ratio()
    return max(alike, _ALIKE if parts & said else 0.0)
