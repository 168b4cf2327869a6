"""Graphs of any size in which a search may walk the same operators again and again, and the visits that work takes."""

import sys
from collections.abc import Callable
from types import FrameType

_QKV = "%q: float32[1,4,6,5], %k: float32[1,4,8,5], %v: float32[1,4,8,5], %mask: float32[1,1,6,8]"
_LOGITS = "float32[1,4,6,8]"
_SCORES = f"%l: {_LOGITS} = BATCH_MATMUL(%q, %k) {{adj_y: true}}"
_CODES = "%c: float32[1,8] = CAST(%i) %x: int16[1,8] q(0.01, 0) = QUANTIZE(%c) %y0: float32[1,8] = DEQUANTIZE(%x)"


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
    lines = [
        f"%m0: {_LOGITS} = ABS(%l)",
        *added,
        f"%p: {_LOGITS} = SOFTMAX(%m{count}) {{beta: 1.0}}",
    ]
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


def interleaved_blocks(count: int) -> str:
    """Blocks that share queries, keys and values; the operators of each lie all over the graph."""
    stages: list[list[str]] = [[], [], [], [], [], []]
    for i in range(count):
        block = (
            f"%l{i}: {_LOGITS} = BATCH_MATMUL(%q, %k) {{adj_y: true}}",
            f"%m{i}: {_LOGITS} = ADD(%l{i}, %mask)",
            f"%p{i}: {_LOGITS} = SOFTMAX(%m{i}) {{beta: 1.0}}",
            f"%o{i}: float32[1,4,6,5] = BATCH_MATMUL(%p{i}, %v)",
            f"%t{i}: float32[1,6,4,5] = TRANSPOSE(%o{i}, int32{{0, 2, 1, 3}})",
            f"%r{i}: float32[1,6,20] = RESHAPE(%t{i}, int32{{1, 6, 20}})",
        )
        for stage, line in zip(stages, block, strict=True):
            stage.append(line)
    lines = [line for stage in stages for line in stage]
    return f"subgraph main ({_QKV}) {{ {' '.join(lines)} return {_listed('r', count)} }}"


def summed_softmaxes(count: int) -> str:
    """The sum of many SOFTMAXes weighs the values."""
    lines = [f"%p{i}: {_LOGITS} = SOFTMAX(%l) {{beta: 1.0}}" for i in range(count)]
    lines += [f"%s0: {_LOGITS} = ABS(%p0)"]
    lines += [f"%s{i}: {_LOGITS} = ADD(%s{i - 1}, %p{i})" for i in range(1, count)]
    return _attention(lines, f"%s{count - 1}")


def selects_below_a_chain(count: int) -> str:
    """Many SELECTs read a condition that was reshaped many times, and many SOFTMAXes logits that were."""
    kind = "bool[1,4,6,8]"
    lines = [_SCORES, f"%c0: {kind} = EQUAL(%l, float32(0.0))", f"%x0: {_LOGITS} = ABS(%l)"]
    for i in range(count):
        lines.append(f"%c{i + 1}: {kind} = RESHAPE(%c{i}, int32{{1, 4, 6, 8}})")
        lines.append(f"%x{i + 1}: {_LOGITS} = RESHAPE(%x{i}, int32{{1, 4, 6, 8}})")
    for i in range(count):
        lines.append(f"%s{i}: {_LOGITS} = SELECT_V2(%c{count}, %l, float32(-1e30))")
        lines.append(f"%p{i}: {_LOGITS} = SOFTMAX(%s{i}) {{beta: 1.0}}")
        lines.append(f"%y{i}: {_LOGITS} = SOFTMAX(%x{count}) {{beta: 1.0}}")
    return f"subgraph main ({_QKV}) {{ {' '.join(lines)} return {_listed('p', count)} }}"


def joined(count: int) -> str:
    """One CONCATENATION of many parts of the result."""
    lines = [
        _SCORES,
        f"%p: {_LOGITS} = SOFTMAX(%l) {{beta: 1.0}}",
        "%o: float32[1,4,6,5] = BATCH_MATMUL(%p, %v)",
    ]
    lines += [f"%n{i}: float32[1,4,6,5] = NEG(%o)" for i in range(count)]
    whole = f"%z: float32[1,4,6,{5 * count}] = CONCATENATION({_listed('n', count)}) {{axis: 3}}"
    return f"subgraph main ({_QKV}) {{ {' '.join(lines)} {whole} return %z }}"


def joined_products(count: int) -> str:
    """One CONCATENATION of many equal products, each with a QUANTIZE, which are merged once they are rewritten."""
    kind = "int16[1,4,6,8]"
    lines: list[str] = []
    for i in range(count):
        lines.append(f"%l{i}: {kind} q(0.1, 0) = BATCH_MATMUL(%q, %k) {{adj_y: true}}")
        lines.append(f"%n{i}: {kind} q(0.2, 0) = QUANTIZE(%l{i})")
    whole = (
        f"%z: int16[1,4,6,{8 * count}] q(0.2, 0) = CONCATENATION({_listed('n', count)}) {{axis: 3}}"
    )
    given = "%q: int16[1,4,6,5] q(0.01, 0), %k: int16[1,4,8,5] q(0.01, 0)"
    return f"subgraph main ({given}) {{ {' '.join(lines)} {whole} return %z }}"


def products_of_products(count: int) -> str:
    """Many products are summed, and many products read the sum."""
    square = "float32[1,4,6,6]"
    lines = [f"%l{i}: {square} = BATCH_MATMUL(%q, %q) {{adj_y: true}}" for i in range(count)]
    lines += [f"%s0: {square} = ABS(%l0)"]
    lines += [f"%s{i}: {square} = ADD(%s{i - 1}, %l{i})" for i in range(1, count)]
    lines += [f"%o{i}: float32[1,4,6,5] = BATCH_MATMUL(%s{count - 1}, %q)" for i in range(count)]
    return f"subgraph main ({_QKV}) {{ {' '.join(lines)} return {_listed('o', count)} }}"


def given_weights(count: int) -> str:
    """Layers of a residual stream with SOFTMAXes, whose weights are inputs of the graph."""
    kind = "float32[1,8,6]"
    given = ", ".join(f"%w{i}: float32[6,6]" for i in range(count))
    lines: list[str] = []
    for i in range(count):
        lines += [
            f"%s{i}: {kind} = SOFTMAX(%x{i}) {{beta: 1.0}}",
            f"%p{i}: {kind} = FULLY_CONNECTED(%x{i}, %w{i}) {{keep_num_dims: true}}",
            f"%x{i + 1}: {kind} = ADD(%s{i}, %p{i})",
        ]
    return f"subgraph main (%x0: {kind}, {given}) {{ {' '.join(lines)} return %x{count} }}"


def given_products(count: int) -> str:
    """Many products of several matrices, in no attention, read the end of one long chain."""
    lines = ["%x0: float32[1,4,6,5] = ABS(%q)"]
    lines += [f"%x{i + 1}: float32[1,4,6,5] = NEG(%x{i})" for i in range(count)]
    lines += [
        f"%l{i}: {_LOGITS} = BATCH_MATMUL(%x{count}, %k) {{adj_y: true}}" for i in range(count)
    ]
    return f"subgraph main ({_QKV}) {{ {' '.join(lines)} return {_listed('l', count)} }}"


def composites_of_one(count: int) -> str:
    """Many composites of one long body."""
    call = '{name: "long", decomposition_subgraph_index: 1}'
    calls = [f"%y{i}: float32[1,8] = STABLEHLO_COMPOSITE(%x) {call}" for i in range(count)]
    body = [f"%y{i + 1}: float32[1,8] = NEG(%y{i})" for i in range(count)]
    main = f"subgraph main (%x: float32[1,8]) {{ {' '.join(calls)} return {_listed('y', count)} }}"
    return f"{main} subgraph long (%y0: float32[1,8]) {{ {' '.join(body)} return %y{count} }}"


def packed(count: int) -> str:
    """An integer is packed many times, and the result joined many times."""
    often = ", ".join(["%i"] * count)
    joined = ", ".join(["%p"] * count)
    return f"""subgraph main (%i: int32[]) {{
      %p: int32[{count}] = PACK({often}) {{values_count: {count}, axis: 0}}
      %q: int32[{count * count}] = CONCATENATION({joined}) {{axis: 0}}
      %y: int32[{count * count}] = NEG(%q)
      return %y
    }}"""


def _listed(name: str, count: int) -> str:
    return ", ".join(f"%{name}{i}" for i in range(count))


def heads(count: int) -> str:
    """One block of many heads, in front of a reader that all of them have once they are split."""
    sizes = {"[1,4,": f"[1,{count},", "6,4,5]": f"6,{count},5]", "20": str(5 * count)}
    text = _attention([f"%p: {_LOGITS} = SOFTMAX(%l) {{beta: 1.0}}"], "%p")
    for old, size in sizes.items():
        text = text.replace(old, size)
    return text


SHAPES: dict[str, Callable[[int], str]] = {
    each.__name__: each
    for each in (
        cosines,
        cosines_of_one,
        masks,
        diamonds,
        softmaxes,
        interleaved_blocks,
        summed_softmaxes,
        selects_below_a_chain,
        joined,
        joined_products,
        products_of_products,
        given_weights,
        given_products,
        composites_of_one,
        packed,
        heads,
    )
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
