"""Graphs of any size in which a search may walk the same operators again and again, and the visits that work takes."""

import sys
from collections.abc import Callable
from types import FrameType

_QKV = "%q: float32[1,4,6,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5], %mask: float32[1,1,6,8]"
_LOGITS = "float32[1,4,6,8]"
_SCORES = f"%l: {_LOGITS} = BATCH_MATMUL(%q, %k) {{adj_y: true}}"
_CODES = (
    "%c: float32[1,8] = CAST(%i) %x: int16[1,8] q(0.01, 0) = QUANTIZE(%c) %y0: float32[1,8] = DEQUANTIZE(%x)"
)


def _attention(lines: list[str], probabilities: str) -> str:
    tail = f"""%o: float32[1,4,6,5] = BATCH_MATMUL({probabilities}, %v)
      %t: float32[1,6,4,5] = TRANSPOSE(%o, int32{{0, 2, 1, 3}})
      %r: float32[1,6,20] = RESHAPE(%t, int32{{1, 6, 20}})"""
    return f"subgraph main ({_QKV}) {{ {_SCORES} {' '.join(lines)} {tail} return %r }}"


def cosines(count: int) -> str:
    """Each cosine is the angle of the next."""
    chain = (f"%y{i + 1}: float32[1,8] = COS(%y{i})" for i in range(count))
    return f"subgraph main (%i: int32[1,8]) {{ {_CODES} {' '.join(chain)} return %y{count} }}"


def cosines_of_one(count: int) -> str:
    """Many cosines of one angle with a long way to it."""
    way = (f"%y{i + 1}: float32[1,8] = NEG(%y{i})" for i in range(count))
    ends = (f"%z{i}: float32[1,8] = COS(%y{count})" for i in range(count))
    named = ", ".join(f"%z{i}" for i in range(count))
    return f"subgraph main (%i: int32[1,8]) {{ {_CODES} {' '.join((*way, *ends))} return {named} }}"


def masks(count: int) -> str:
    """Many masks are added to the logits, one after the other."""
    added = [f"%m{i + 1}: {_LOGITS} = ADD(%m{i}, %mask)" for i in range(count)]
    lines = [f"%m0: {_LOGITS} = ABS(%l)", *added, f"%p: {_LOGITS} = SOFTMAX(%m{count}) {{beta: 1.0}}"]
    return _attention(lines, "%p")


def diamonds(count: int) -> str:
    """Two ways lead from each sum to the next, so that there are 2^count paths."""
    lines = [f"%m0: {_LOGITS} = ABS(%l)"]
    for i in range(count):
        lines += [f"%a{i}: {_LOGITS} = NEG(%m{i})", f"%b{i}: {_LOGITS} = EXP(%m{i})"]
        lines.append(f"%m{i + 1}: {_LOGITS} = ADD(%a{i}, %b{i})")
    return _attention([*lines, f"%p: {_LOGITS} = SOFTMAX(%m{count}) {{beta: 1.0}}"], "%p")


def softmaxes(count: int) -> str:
    """Many SOFTMAXes read the end of one long chain of masks."""
    lines = [
        f"%m0: {_LOGITS} = ABS(%l)",
        *(f"%m{i + 1}: {_LOGITS} = ADD(%m{i}, %mask)" for i in range(count)),
    ]
    lines += [f"%p{i}: {_LOGITS} = SOFTMAX(%m{count}) {{beta: 1.0}}" for i in range(count)]
    named = ", ".join(f"%p{i}" for i in range(count))
    return f"subgraph main ({_QKV}) {{ {_SCORES} {' '.join(lines)} return {named} }}"


SHAPES: dict[str, Callable[[int], str]] = {
    each.__name__: each for each in (cosines, cosines_of_one, masks, diamonds, softmaxes)
}


def visits(work: Callable[[], object]) -> int:
    """Number of Python calls that the work takes, resumed generators included: the same on every machine."""
    count = 0

    def counted(_frame: FrameType, event: str, _argument: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(counted)
    try:
        work()
    finally:
        sys.setprofile(before)
    return count
