"""Text held out of the calibration: the prompts to score, and which part of each is read and which is scored."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base.errors import UsageError
from edge_opt.base.words import many
from edge_opt.building.prompts import read_prompts, text_of
from edge_opt.building.source import look_at

Halves = tuple[str, str]
"""A prompt in two parts: one that is read, and one that is scored."""
_JOINT = "\n\n"
_LONG = 2.25
"""Characters of a long prompt per cache position: over half as many tokens, in most texts."""
_MOST_SCORED = 512
"""Most characters to score per prompt: each token is one decode step."""
_FEWEST = 10
"""Fewest prompts for holding some out."""
_SHARE = 5
"""One prompt in this many is held out."""
_RUN = 8
"""Words in a row that two texts hardly share unless one repeats the other."""
_NOT_EVALUATED = "Not evaluated: {}, or --held-out FILE.jsonl"


def read_texts(path: Path, calibrated: Sequence[Any] = ()) -> list[str]:
    """The texts of a file; UsageError if one is too short, or is among the prompts that are calibrated on."""
    texts = [text_of(prompt).strip() for prompt in read_prompts(path)]
    seen = {text_of(prompt).strip() for prompt in calibrated}
    for number, text in enumerate(texts, 1):
        where = f"held-out prompts {path}, prompt {number}"
        if text in seen:
            raise UsageError(
                f"{where} is also a calibration prompt: remove it from one of the files"
            )
        if cut(text) is None:
            raise UsageError(f"{where} is too short to be scored: give at least two words")
    return texts


class Texts(NamedTuple):
    """Texts to evaluate on, if any, prompts to calibrate with, and a note on the texts."""

    scored: list[str]
    calibration: list[Any]
    note: str


def repeating(texts: Sequence[str], calibrated: Iterable[Any]) -> str:
    """The end of a note: how many texts repeat calibration prompts with most of their words; empty if none does."""
    known: set[tuple[str, ...]] = set()
    for prompt in calibrated:
        known |= _runs(text_of(prompt))
    count = 0
    for text in texts:
        runs = _runs(text)
        if 2 * len(runs & known) > len(runs):
            count += 1
    if not count:
        return ""
    return (
        f"; {count} of {many(len(texts), 'text')} mostly repeat the prompts that were calibrated with, so the bundle "
        f"may look better than it is"
    )


def _runs(text: str) -> set[tuple[str, ...]]:
    words = text.split()
    return {tuple(words[first : first + _RUN]) for first in range(len(words) - _RUN + 1)}


def hold_out(prompts: Sequence[Any]) -> Texts:
    """Hold out every fifth prompt, each once, and calibrate with the others; with all if none is held out."""
    different = {text_of(prompt).strip(): prompt for prompt in prompts}
    if len(different) < _FEWEST:
        given = many(len(different), "different prompt")
        why = f"{given} given, but at least {_FEWEST} are needed to hold some out; give more"
        return Texts([], [*prompts], _NOT_EVALUATED.format(why))
    held = [*different][::_SHARE]
    texts = [*filter(cut, held)]
    if not texts:
        why = "every fifth prompt is too short to be cut in two; give longer ones"
        return Texts([], [*prompts], _NOT_EVALUATED.format(why))
    for text in held:
        del different[text]
    calibration = [*different.values()]
    note = f"Held out for evaluation: {len(texts)} of {len(prompts)} prompts, every fifth"
    return Texts(texts, calibration, note + repeating(texts, calibration))


def cut(text: str) -> Halves | None:
    """Cut a prompt into the part to read and the part to score; None if it is too short for both.

    The scored part is the second half, or the end of a long prompt. It starts at a space, so that both parts give the
    same tokens as the whole.
    """
    text = text.strip()
    start = max(len(text) // 2, len(text) - _MOST_SCORED)
    space = re.search(r"\s", text[start:])
    if space is not None:
        start += space.start()
    read = text[:start]
    scored = text[start:]
    return (read, scored) if read.strip() and scored.strip() else None


def in_turn(texts: Sequence[str], *bundles: Path) -> list[Halves]:
    """Cut texts, and order them as longest, shortest, next longest, and so on: the first few have varied lengths.

    If none fills about half of the bundles' longest cache, or if those that do hardly fit, a text joined from them
    comes first.
    """
    wanted = int(_LONG * max(look_at(path).cache for path in bundles))
    longest = max((len(text) for text in texts if len(text) <= 2 * wanted), default=0)
    joined = _JOINT.join(texts)[:wanted]
    if longest < min(wanted, len(joined)):
        texts = [*texts, joined]
    by_length = sorted(filter(None, map(cut, texts)), key=lambda halves: len(halves[0]))
    ordered: list[Halves] = []
    while by_length:
        ordered.append(by_length.pop())
        by_length.reverse()  # the next one is taken from the other end
    return ordered
