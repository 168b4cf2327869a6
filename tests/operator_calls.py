"""Draws calls of every operator that folds: operands of small whole numbers, options, and types of results.

What is drawn need not be valid: the interpreter says whether it is.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

import numpy as np
from hypothesis import strategies as st
from shapes_referee import Options, Shape, T, const

from edge_opt.shapes.folding import FOLDERS

Draw = Callable[[st.SearchStrategy[Any]], Any]


class Call(NamedTuple):
    """One operator: its constant inputs, options, and types of results."""

    name: str
    inputs: list[T]
    options: Options = None
    outputs: tuple[str, ...] = ("INT32",)


SIZES = st.integers(0, 3)
SHAPES = st.lists(SIZES, max_size=3).map(tuple)
FILLED = st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple)
NUMBERS = st.one_of(st.integers(-9, 9), st.sampled_from([2**31 - 1, -(2**31), 2**30, 46341]))
INTS = st.sampled_from(["INT32", "INT64"])


def tensor(draw: Draw, shape: Shape, dtype: str, numbers: st.SearchStrategy[int] = NUMBERS) -> T:
    """A constant of that shape."""
    chosen = st.booleans() if dtype == "BOOL" else numbers
    values = draw(st.lists(chosen, min_size=prod(shape), max_size=prod(shape)))
    return const(np.array(values).reshape(shape), dtype)


def vector(draw: Draw, count: int, low: int = -4, high: int = 4) -> T:
    """A constant vector of small numbers."""
    return const(draw(st.lists(st.integers(low, high), min_size=count, max_size=count)))


def like(draw: Draw, shape: Shape) -> Shape:
    """A shape that mostly broadcasts to this one."""
    sizes = [draw(st.sampled_from([size, size, 1])) for size in shape]
    return tuple(sizes[draw(st.integers(0, len(sizes))) :])


def elementwise(draw: Draw, name: str) -> Call:
    shape, dtype = draw(SHAPES), "BOOL" if name.startswith("LOGICAL") else draw(INTS)
    count = 1 if name in ("ABS", "NEG", "LOGICAL_NOT") else 2
    inputs = [tensor(draw, like(draw, shape) if count == 2 else shape, dtype) for _ in range(count)]
    if name in ("DIV", "FLOOR_DIV", "FLOOR_MOD"):  # of the least number by -1 the kernel dies
        inputs[1] = tensor(draw, inputs[1].shape, dtype, st.integers(2, 9))
    compares = name in ("EQUAL", "NOT_EQUAL", "GREATER", "GREATER_EQUAL", "LESS", "LESS_EQUAL")
    activation = {"fused_activation_function": draw(st.sampled_from([0, 0, 0, 1]))}
    options = activation if name in ("ADD", "SUB", "MUL", "DIV") else None
    return Call(name, inputs, options, ("BOOL" if compares else dtype,))


def select(draw: Draw, name: str) -> Call:
    shape, dtype = draw(SHAPES), draw(INTS)
    condition = draw(st.sampled_from([shape, shape[:1], (), like(draw, shape)]))
    choices = [shape if name == "SELECT" else like(draw, shape) for _ in range(2)]
    inputs = [tensor(draw, condition, "BOOL"), *(tensor(draw, choice, dtype) for choice in choices)]
    return Call(name, inputs, None, (dtype,))


def reduction(draw: Draw, name: str) -> Call:
    shape, dtype = draw(SHAPES), draw(INTS)
    axes = vector(draw, draw(SIZES), -len(shape), max(len(shape) - 1, 0))
    return Call(name, [tensor(draw, shape, dtype), axes], {"keep_dims": draw(st.booleans())}, (dtype,))


def segments(draw: Draw, name: str) -> Call:
    count, depth = draw(st.integers(1, 4)), draw(SHAPES)
    ids = vector(draw, count, 0, 2)
    return Call(name, [tensor(draw, (count, *depth), "INT32"), ids, const(3)], {})


def of_shape(draw: Draw, name: str) -> Call:
    source, dtype = tensor(draw, draw(SHAPES), draw(st.sampled_from(["INT32", "FLOAT32"]))), draw(INTS)
    return Call(name, [source], {"out_type": 2 if dtype == "INT32" else 4}, (dtype,))


def cast(draw: Draw, name: str) -> Call:
    types = st.sampled_from(["INT32", "INT64", "BOOL", "FLOAT32", "INT8", "UINT8"])
    source, target = draw(types), draw(types)
    numbers = st.integers(0, 127) if source in ("INT8", "UINT8") else NUMBERS
    return Call(name, [tensor(draw, draw(SHAPES), source, numbers)], None, (target,))


def arranged(draw: Draw, name: str) -> Call:
    """Operators of one tensor and, but for SQUEEZE, one vector."""
    shape = draw(SHAPES)
    rank, source = len(shape), tensor(draw, shape, "INT32")
    if name == "SQUEEZE":
        return Call(name, [source], {"squeeze_dims": draw(st.lists(st.integers(-3, 2), max_size=2))})
    if name == "TRANSPOSE":
        return Call(name, [source, const(draw(st.permutations(range(rank))))], {})
    if name == "EXPAND_DIMS":
        return Call(name, [source, const(draw(st.integers(-rank - 2, rank + 1)))], {})
    if name == "TILE":
        return Call(name, [source, vector(draw, rank, 0, 3)], {})
    if name == "BROADCAST_TO":
        source = tensor(draw, like(draw, shape), "INT32")
        return Call(name, [source, const(np.array(shape, np.int32))], {})
    targets = [(*shape[:axis], -1, *shape[axis + 1 :]) for axis in range(rank)]
    target = draw(
        st.sampled_from([(-1,), (prod(shape),), shape[::-1], *targets]) | st.lists(st.integers(-1, 3))
    )
    return Call(name, [source, const(np.array(target, np.int32))], {})


def joined(draw: Draw, name: str) -> Call:
    shape, count = draw(SHAPES), draw(st.integers(1, 3))
    axis = draw(st.integers(-len(shape) - 1, len(shape)))
    shapes = [shape] * count
    if name == "CONCATENATION" and -len(shape) <= axis < len(shape):
        sizes = [draw(SIZES) for _ in range(count)]
        shapes = [(*shape[: axis % len(shape)], size, *shape[axis % len(shape) + 1 :]) for size in sizes]
    options = {"axis": axis} | ({"values_count": count} if name == "PACK" else {})
    return Call(name, [tensor(draw, each, "INT32") for each in shapes], options)


def cut(draw: Draw, name: str) -> Call:
    shape = draw(FILLED)
    axis, source = draw(st.integers(-len(shape), len(shape) - 1)), tensor(draw, shape, "INT32")
    size = shape[axis]
    if name == "UNPACK":
        return Call(name, [source], {"axis": axis, "num": size}, ("INT32",) * size)
    if name == "SPLIT":
        count = draw(st.sampled_from([1, size, 2]))
        return Call(name, [const(axis), source], {"num_splits": count}, ("INT32",) * count)
    first = draw(st.integers(0, size))
    sizes = draw(st.sampled_from([[size], [-1], [first, size - first], [first, -1], [-1, 1]]))
    return Call(
        name, [source, const(sizes), const(axis)], {"num_splits": len(sizes)}, ("INT32",) * len(sizes)
    )


def sliced(draw: Draw, name: str) -> Call:
    shape = draw(SHAPES)
    begins = [draw(st.integers(0, size)) for size in shape]
    pairs = zip(shape, begins, strict=True)
    sizes = [draw(st.integers(-1, size - begin)) for size, begin in pairs]
    dtype = draw(INTS)
    bounds = [const(np.array(numbers, np.int32), dtype) for numbers in (begins, sizes)]
    return Call(name, [tensor(draw, shape, "INT32"), *bounds], {})


def strided(draw: Draw, name: str) -> Call:
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple))
    count = draw(st.integers(0, len(shape) + 1))
    strides = const(draw(st.lists(st.sampled_from([1, 1, 2, -1]), min_size=count, max_size=count)))
    inputs = [tensor(draw, shape, "INT32"), vector(draw, count), vector(draw, count), strides]
    masks = ("begin_mask", "end_mask", "ellipsis_mask", "new_axis_mask", "shrink_axis_mask")
    bits = st.sampled_from([0, 0, *range(1 << count)])
    options = {name: draw(bits) for name in masks} | {"offset": draw(st.sampled_from([False, False, True]))}
    return Call(name, inputs, options)


def gathered(draw: Draw, name: str) -> Call:
    shape = draw(FILLED)
    axis = draw(st.integers(-len(shape), len(shape) - 1))
    indices = tensor(draw, draw(SHAPES), draw(INTS), st.integers(0, shape[axis] - 1))
    options = {"axis": axis, "batch_dims": draw(st.sampled_from([0, 0, 0, 1]))}
    return Call(name, [tensor(draw, shape, "INT32"), indices], options)


def filled(draw: Draw, name: str) -> Call:
    dtype = draw(st.sampled_from(["INT32", "INT64", "BOOL"]))
    return Call(name, [const(np.array(draw(SHAPES), np.int32)), tensor(draw, (), dtype)], {}, (dtype,))


def ranged(draw: Draw, name: str) -> Call:
    dtype, numbers = draw(INTS), [draw(st.integers(-9, 9)) for _ in range(3)]
    return Call(name, [const(number, dtype) for number in numbers], {}, (dtype,))


_MAKERS: dict[str, Callable[[Draw, str], Call]] = {
    "CAST": cast, "FILL": filled, "GATHER": gathered, "RANGE": ranged, "REDUCE_PROD": reduction, "SHAPE": of_shape,
    "SLICE": sliced, "STRIDED_SLICE": strided, "UNSORTED_SEGMENT_PROD": segments,
    **dict.fromkeys(("SELECT", "SELECT_V2"), select),
    **dict.fromkeys(("CONCATENATION", "PACK"), joined),
    **dict.fromkeys(("SPLIT", "SPLIT_V", "UNPACK"), cut),
    **dict.fromkeys(("BROADCAST_TO", "EXPAND_DIMS", "RESHAPE", "SQUEEZE", "TILE", "TRANSPOSE"), arranged),
}  # fmt: skip


@st.composite
def calls(draw: Draw, name: str) -> Call:
    """A call of the named operator; an elementwise one where nothing else is known of it."""
    return _MAKERS.get(name, elementwise)(draw, name)


FOLDING = sorted(FOLDERS)
