"""Rules of operators that look up, scatter or sum over segments: tables, sparse forms, hash tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_opt.shapes.call import as_dimension
from edge_opt.shapes.dimension import DYNAMIC, may_be_equal, shape_text
from edge_opt.shapes.errors import ShapeError
from edge_opt.shapes.registry import rule

if TYPE_CHECKING:
    from edge_opt.shapes.call import Call, Results
    from edge_opt.shapes.dimension import Shape


@rule("HASHTABLE_LOOKUP", inputs=3, outputs=2)
def hashtable_lookup(call: Call) -> Results:
    """Keys `[n]` (input 0) pick rows of the values (input 2); a second result says which were found.

    Source: TFLite, hashtable_lookup.cc, Prepare.
    """
    lookup, keys, values = call.require_rank(0, 1), call.require_rank(1, 1), call.shapes[2]
    count = DYNAMIC if lookup is None else lookup[0]
    if values is None:
        return [None, (count,)]
    if not values or (keys is not None and not may_be_equal(keys[0], values[0])):
        raise ShapeError(f"{call.described(2)} must have a row for each key of {call.described(1)}")
    return [(count, *values[1:]), (count,)]


@rule("EMBEDDING_LOOKUP_SPARSE", inputs=5)
def embedding_lookup_sparse(call: Call) -> Results:
    """The sparse ids' dense shape (input 2), less its last axis, then the rows of the table (input 4).

    Source: TFLite, embedding_lookup_sparse.cc, Prepare and Eval.
    """
    call.require_rank(0, 1)
    call.require_rank(1, 2)
    call.require_rank(3, 1)
    shape, table = call.sizes(2), call.shapes[4]
    if table is not None and len(table) < 2:
        raise ShapeError(f"the table {call.described(4)} has rank {len(table)}: expected rank 2 or more")
    if shape is None or table is None:
        return [None]
    return [(*shape[:-1], *table[1:])]


@rule("LSH_PROJECTION", inputs=(2, 3), optional=(2,))
def lsh_projection(call: Call) -> Results:
    """Hash functions `[k, b]` (input 0) give k numbers (sparse), or k * b bits (dense).

    Source: TFLite, lsh_projection.cc, Resize.
    """
    functions = call.require_rank(0, 2)
    kind = int(call.option("type", 0))
    if kind not in (1, 2):
        raise ShapeError(f"its type is {kind}: expected SPARSE (1) or DENSE (2)")
    if functions is None:
        return [(DYNAMIC,)]
    if kind == 1:
        return [(functions[0],)]
    return [(DYNAMIC if min(functions) < 0 else functions[0] * functions[1],)]


@rule("SCATTER_ND", inputs=3)
def scatter_nd(call: Call) -> Results:
    """The result has the shape that input 2 spells out; each row of the indices places a slice.

    Source: TFLite, scatter_nd.cc, CheckShapes and ResizeOutputTensor.
    """
    indices, updates, result = call.shapes[0], call.shapes[1], call.sizes(2)
    if result is None or indices is None or updates is None:
        return [result]
    if not indices or not updates:
        raise ShapeError(f"{call.described(0)} and {call.described(1)} must have rank 1 or more")
    outer, depth = indices[:-1], indices[-1]
    if depth < 0:
        return [result]
    expected = (*outer, *result[depth:])
    if depth > len(result) or len(updates) != len(expected) or not all(map(may_be_equal, updates, expected)):
        raise ShapeError(
            f"the updates {call.described(1)} must have the shape {shape_text(expected)}: a slice of "
            f"{shape_text(result)} for each row of {call.described(0)}"
        )
    return [result]


@rule("SPARSE_TO_DENSE", inputs=4)
def sparse_to_dense(call: Call) -> Results:
    """The result has the shape that input 1 spells out.

    Source: TFLite, sparse_to_dense.cc, Prepare and CheckDimensionsMatch.
    """
    indices, values = call.require_rank(0, 0, 2), call.require_rank(2, 0, 1)
    call.require_single(3)
    result = call.sizes(1)
    if indices is None or result is None:
        return [result]
    if len(indices) == 2 and not may_be_equal(indices[1], len(result)):
        raise ShapeError(
            f"the rows of {call.described(0)} must have {len(result)} numbers, one for each axis"
        )
    if indices and values and not may_be_equal(indices[0], values[0]):
        raise ShapeError(f"{call.described(0)} and {call.described(2)} must have one row for each value")
    return [result]


@rule("DENSIFY", inputs=1)
def densify(call: Call) -> Results:
    """The result has the shape of the input, which is stored sparsely.

    Source: TFLite, densify.cc, Prepare.
    """
    return [call.shapes[0]]


@rule("SEGMENT_SUM", inputs=2, data_dependent=True)
def segment_sum(call: Call) -> Results:
    """The first axis shrinks to the number of segments: the largest id (input 1) and one more.

    Source: TFLite, segment_sum.cc, ResizeOutputTensor.
    """
    shape, segments = call.shapes[0], call.require_rank(1, 1)
    if shape is None:
        return [None]
    if not shape or (segments is not None and not may_be_equal(segments[0], shape[0])):
        raise ShapeError(
            f"{call.described(1)} must have an id for each index of axis 0 of {call.described(0)}"
        )
    ids = call.integers(1)
    return [(DYNAMIC if ids is None else max(ids, default=-1) + 1, *shape[1:])]


@rule(
    "UNSORTED_SEGMENT_MAX", "UNSORTED_SEGMENT_MIN", "UNSORTED_SEGMENT_PROD", "UNSORTED_SEGMENT_SUM",
    inputs=3,
)  # fmt: skip
def unsorted_segment(call: Call) -> Results:
    """The axes that the ids (input 1) cover become one, as long as input 2 says.

    Source: TFLite, unsorted_segment.cc, ResizeOutputTensor.
    """
    shape, segments, count = call.shapes[0], call.shapes[1], call.scalar(2)
    call.require_single(2)
    if shape is None or segments is None:
        return [None]
    if len(segments) > len(shape) or not all(map(may_be_equal, segments, shape)):
        raise ShapeError(
            f"the shape of the ids {call.described(1)} must be the start of that of {call.described(0)}"
        )
    return [(as_dimension(count), *shape[len(segments) :])]


@rule("HASHTABLE", inputs=0)
def hashtable(call: Call) -> Results:
    """One handle.

    Source: TFLite, hashtable.cc, PrepareHashtable.
    """
    del call
    return [(1,)]


@rule("HASHTABLE_FIND", inputs=3)
def hashtable_find(call: Call) -> Results:
    """A value for each key of input 1.

    Source: TFLite, hashtable_find.cc, PrepareHashtableFind.
    """
    return [call.shapes[1]]


@rule("HASHTABLE_IMPORT", inputs=3, outputs=0)
def hashtable_import(call: Call) -> Results:
    """Keys (input 1) and values (input 2) of one shape go into the table; no result.

    Source: TFLite, hashtable_import.cc, PrepareHashtableImport.
    """
    keys, values = call.shapes[1], call.shapes[2]
    if keys is not None and values is not None and not _same(keys, values):
        raise ShapeError(
            f"the keys {call.described(1)} and the values {call.described(2)} must have the same shape"
        )
    return []


def _same(left: Shape, right: Shape) -> bool:
    return len(left) == len(right) and all(map(may_be_equal, left, right))


@rule("HASHTABLE_SIZE", inputs=1)
def hashtable_size(call: Call) -> Results:
    """One number.

    Source: TFLite, hashtable_size.cc, PrepareHashtableSize.
    """
    del call
    return [(1,)]
