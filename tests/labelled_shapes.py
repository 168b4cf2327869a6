"""Random factored shapes, and which elements of a tensor a head has."""

import math

import numpy as np
from hypothesis import strategies as st

from edge_opt.attention import factors as fx
from edge_opt.attention.factors import Factor, Factored


def elements(factored: Factored, head: int) -> list[int]:
    """Positions in row-major order that belong to a head."""
    flat = [factor for axis in factored for factor in axis]
    positions = np.arange(math.prod(factor.size for factor in flat)).reshape([f.size for f in flat])
    index = tuple(f.digit(head) if f.stride else slice(None) for f in flat)
    return [int(position) for position in np.ravel(positions[index])]


@st.composite
def labelled_shapes(draw: st.DrawFn) -> tuple[Factored, int]:
    """A factored shape and the number of heads; the heads' digits stand anywhere, in any order."""
    digits = draw(st.lists(st.sampled_from((2, 3, 4)), min_size=1, max_size=3))
    heads = math.prod(digits)
    factors: list[Factor] = []
    stride = heads
    for size in digits:
        stride //= size
        factors.append(Factor(size, stride))
    factors += [Factor(size) for size in draw(st.lists(st.sampled_from((1, 2, 3, 4, 6)), max_size=4))]
    axes: list[list[Factor]] = [[]]
    for factor in draw(st.permutations(factors)):
        if draw(st.booleans()):
            axes.append([])
        axes[-1].append(factor)
    return tuple(tuple(fx.merge_neighbours(axis)) for axis in axes), heads
