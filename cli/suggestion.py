"""What somebody may have meant by an option that does not exist: one of a like name, or for the same purpose."""

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
    "--rows-per-tile": "tile tiles tiling rows block blocks",
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
    scored = [(_score(unknown.lower(), option), option.opts[-1]) for option in options]
    score, best = max(scored, key=lambda found: found[0], default=(0.0, None))
    return best if score >= _ALIKE else None


def _score(word: str, option: Any) -> float:
    parts = set(word.split("-")) - {"", "no"}
    if parts & set(_MEANINGS.get(option.opts[-1], "").split()):
        return 1.0
    names = [name for name in (*option.opts, f"--{option.name.replace('_', '-')}") if len(name) > 2]
    return max(SequenceMatcher(None, word, name).ratio() for name in names)
