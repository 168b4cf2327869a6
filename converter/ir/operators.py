"""The one record of each operator: inputs and outputs, effect, types, options, versions.

Rooms register behaviour for an operator (a shape rule, say) in tables of their own, by name, and no facts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import cache
from typing import Final, TypeVar

from edge_opt.ir.dtypes import DType
from edge_opt.schema.table import ENUMS, UNIONS, Table, new_table

BUILTIN_OPERATORS: dict[str, int] = ENUMS["BuiltinOperator"]
_T = TypeVar("_T")


class Effect(Enum):
    """What an operator does with the elements of its data operands."""

    ELEMENTWISE = auto()  # a result's element is computed from those at its place; operands may broadcast
    ALONG_ROWS = auto()  # a row of the last axis is computed from the operand's row, of the same length
    REDUCTION = auto()  # folds whole axes
    PRODUCT = auto()  # of matrices
    CONVOLUTION = auto()
    REARRANGING = auto()  # all elements, under other axes
    CUTTING = auto()  # parts of the operand; each result is one
    PADDING = auto()
    REPEATING = auto()  # may take elements several times
    JOINING = auto()
    CALLING = auto()  # runs subgraphs
    RANDOM = auto()
    UNKNOWN = auto()  # code that is not the runtime's
    OTHER = auto()  # nothing above; no rewrite looks at it


_UNSEEN: Final = {Effect.CALLING, Effect.RANDOM, Effect.UNKNOWN, Effect.OTHER}


@dataclass(frozen=True, slots=True)
class Version:
    """A version of an operator: the first runtime that has it, and the types or the rank that need it."""

    runtime: str
    types: frozenset[DType] = frozenset()
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class OperatorKind:
    """Known facts about an operator.

    It has `least` to `most` inputs (by default exactly `least`, -1 is any number) and `outputs` outputs (None: any
    number). Inputs from `least` to `most` may be left out; without a limit only where there are `gaps`.

    `data` are the inputs that the results are made of (None: all), the others steer. `result` is the type of results:
    "data" that of the first data operand, the name of an option, a type, or None where nothing fixes it. With `copies`
    the results hold the data operands' stored numbers as they are. Only a CUTTING operator has several such results;
    behind the first, those of others hold indices or scratch.

    `options` names the table of its options. `versions` are 1, 2, ... of an operator that rewrites add.
    """

    effect: Effect
    least: int = 1
    most: int | None = None
    outputs: int | None = 1
    data: tuple[int, ...] | None = (0,)
    result: DType | str | None = "data"
    copies: bool = False
    gaps: bool = False
    options: str | None = None
    versions: tuple[Version, ...] = ()

    @property
    def is_followed(self) -> bool:
        """Whether rewrites look at the operator: then a graph where it has another form is refused."""
        return self.effect not in _UNSEEN

    def misfit(self, inputs: Sequence[object], outputs: Sequence[object]) -> str | None:
        """Why an operator cannot have these inputs and outputs; None where it can."""
        least, most = self.least, self.least if self.most is None else self.most
        if len(inputs) < least or 0 <= most < len(inputs):
            wanted = f"{least} or more" if most < 0 else " or ".join(map(str, range(least, most + 1)))
            return f"has {len(inputs)} inputs, expected {wanted}"
        if self.is_followed and not outputs:
            return f"has 0 outputs, expected {self.outputs or '1 or more'}"
        if self.outputs not in (None, len(outputs)):
            return f"has {len(outputs)} outputs, expected {self.outputs}"
        required = inputs if most < 0 and not self.gaps else inputs[:least]
        return "leaves out an input that it needs" if None in required else None

    def has_data_at(self, place: int) -> bool:
        """Whether the results are made of the input at this place."""
        return self.data is None or place in self.data

    def data_operands(self, inputs: Sequence[_T | None]) -> list[_T]:
        """Of an operator's inputs, those that its results are made of."""
        return [given for place, given in enumerate(inputs) if given is not None and self.has_data_at(place)]

    def data_results(self, outputs: Sequence[_T]) -> Sequence[_T]:
        """Of an operator's outputs, those that are made of its data operands."""
        return outputs if self.effect is Effect.CUTTING else outputs[:1]

    def version_for(self, *types: DType, rank: int = 0) -> int:
        """The lowest version for data operands of these types and this rank; 1 for one that no rewrite adds."""
        needed = (
            number
            for number, version in enumerate(self.versions, 1)
            if not version.types.isdisjoint(types) or (version.rank is not None and rank >= version.rank)
        )
        return max(needed, default=1)

    def runtime(self, version: int) -> str:
        """The first runtime that has this version, e.g. "2.3.0"; empty for an operator that no rewrite adds."""
        return self.versions[version - 1].runtime if 0 < version <= len(self.versions) else ""


# Source: TFLite, each kernel's Prepare: `TF_LITE_ENSURE_EQ(context, NumInputs(node), ...)`, `output->type = ...`,
# TF_LITE_ENSURE_TYPES_EQ. Kernels copy, or compare, stored numbers; concatenation.cc, pack.cc, unpack.cc and
# expand_dims.cc demand equal parameters.
_KINDS: Final[dict[str, OperatorKind]] = {
    (
        "ABS CEIL COS ELU EXP FAKE_QUANT FLOOR GELU HARD_SWISH LEAKY_RELU LOG LOGICAL_NOT LOGISTIC NEG RELU RELU6 "
        "RELU_0_TO_1 RELU_N1_TO_1 ROUND RSQRT SIGN SIN SQRT SQUARE TANH ZEROS_LIKE"
    ): OperatorKind(Effect.ELEMENTWISE),
    "CAST COMPLEX_ABS IMAG QUANTIZE REAL": OperatorKind(Effect.ELEMENTWISE, result=None),
    "DEQUANTIZE": OperatorKind(Effect.ELEMENTWISE, result=DType.FLOAT32),
    "BUCKETIZE": OperatorKind(Effect.ELEMENTWISE, result=DType.INT32),
    (
        "ADD ATAN2 BITWISE_XOR DIV FLOOR_DIV FLOOR_MOD LOGICAL_AND LOGICAL_OR MUL POW RIGHT_SHIFT SQUARED_DIFFERENCE "
        "STABLEHLO_ADD STABLEHLO_AND STABLEHLO_MAXIMUM STABLEHLO_MINIMUM STABLEHLO_MULTIPLY STABLEHLO_SHIFT_LEFT SUB"
    ): OperatorKind(Effect.ELEMENTWISE, 2, data=(0, 1)),
    "MAXIMUM MINIMUM": OperatorKind(Effect.ELEMENTWISE, 2, data=(0, 1), copies=True),
    "EQUAL GREATER GREATER_EQUAL LESS LESS_EQUAL NOT_EQUAL": OperatorKind(
        Effect.ELEMENTWISE, 2, data=(0, 1), result=DType.BOOL
    ),
    "PRELU": OperatorKind(Effect.ELEMENTWISE, 2),
    "ADD_N": OperatorKind(Effect.ELEMENTWISE, 2, -1, data=None),
    "SELECT SELECT_V2": OperatorKind(Effect.ELEMENTWISE, 3, data=(1, 2), copies=True),
    "L2_NORMALIZATION LOG_SOFTMAX": OperatorKind(Effect.ALONG_ROWS),
    "SOFTMAX": OperatorKind(Effect.ALONG_ROWS, result=None),
    "MEAN REDUCE_ALL REDUCE_ANY REDUCE_PROD SUM": OperatorKind(Effect.REDUCTION, 2),
    "REDUCE_MAX REDUCE_MIN": OperatorKind(Effect.REDUCTION, 2, copies=True),
    "BATCH_MATMUL": OperatorKind(Effect.PRODUCT, 2, data=(0, 1)),
    "FULLY_CONNECTED": OperatorKind(Effect.PRODUCT, 2, 3, outputs=None),
    "CONV_2D CONV_3D DEPTHWISE_CONV_2D": OperatorKind(Effect.CONVOLUTION, 2, 3),
    "TRANSPOSE_CONV": OperatorKind(Effect.CONVOLUTION, 3, 4, data=(2,)),
    "SQUEEZE": OperatorKind(Effect.REARRANGING, copies=True),
    "RESHAPE": OperatorKind(Effect.REARRANGING, 1, 2, copies=True),
    "EXPAND_DIMS TRANSPOSE": OperatorKind(Effect.REARRANGING, 2, copies=True),
    "SLICE": OperatorKind(Effect.CUTTING, 3, copies=True),
    "STRIDED_SLICE": OperatorKind(Effect.CUTTING, 4, copies=True),
    "SPLIT": OperatorKind(Effect.CUTTING, 2, outputs=None, data=(1,), copies=True),
    "SPLIT_V": OperatorKind(Effect.CUTTING, 3, outputs=None, copies=True),
    "UNPACK": OperatorKind(Effect.CUTTING, outputs=None, copies=True),
    "MIRROR_PAD PAD": OperatorKind(Effect.PADDING, 2, copies=True),
    "PADV2": OperatorKind(Effect.PADDING, 3, data=(0, 2), copies=True),
    "BROADCAST_TO GATHER TILE": OperatorKind(Effect.REPEATING, 2, copies=True),
    "CONCATENATION PACK": OperatorKind(Effect.JOINING, 1, -1, data=None, copies=True),
    "CALL_ONCE": OperatorKind(Effect.CALLING, 0, outputs=0, data=()),
    "CALL STABLEHLO_COMPOSITE": OperatorKind(Effect.CALLING, 0, -1, None, (), None, gaps=True),
    "IF STABLEHLO_CASE": OperatorKind(Effect.CALLING, 1, -1, None, (), None, gaps=True),
    "WHILE": OperatorKind(Effect.CALLING, 1, -1, None, (), None),
    "RANDOM_STANDARD_NORMAL RANDOM_UNIFORM": OperatorKind(Effect.RANDOM, data=(), result=None),
    "MULTINOMIAL": OperatorKind(Effect.RANDOM, 2, data=(), result=None),
    "STABLEHLO_RNG_BIT_GENERATOR": OperatorKind(Effect.RANDOM, outputs=2, data=(), result=None),
    "CUSTOM DELEGATE STABLEHLO_CUSTOM_CALL": OperatorKind(Effect.UNKNOWN, 0, -1, None, (), None, gaps=True),
    "AVERAGE_POOL_2D DENSIFY L2_POOL_2D": OperatorKind(Effect.OTHER),
    "DEPTH_TO_SPACE MAX_POOL_2D SPACE_TO_DEPTH": OperatorKind(Effect.OTHER, copies=True),
    "READ_VARIABLE": OperatorKind(Effect.OTHER, result=None),
    "RANK": OperatorKind(Effect.OTHER, result=DType.INT32),
    "SHAPE": OperatorKind(Effect.OTHER, result="out_type"),
    "WHERE": OperatorKind(Effect.OTHER, result=DType.INT64),
    "VAR_HANDLE": OperatorKind(Effect.OTHER, 0, data=(), result=None),
    "ASSIGN_VARIABLE": OperatorKind(Effect.OTHER, 2, outputs=0, data=()),
    "ARG_MAX ARG_MIN": OperatorKind(Effect.OTHER, 2, result="output_type"),
    "BROADCAST_ARGS STABLEHLO_PAD": OperatorKind(Effect.OTHER, 2, data=(0, 1)),
    "CUMSUM RESIZE_BILINEAR": OperatorKind(Effect.OTHER, 2),
    "GATHER_ND RESIZE_NEAREST_NEIGHBOR REVERSE_V2": OperatorKind(Effect.OTHER, 2, copies=True),
    "EMBEDDING_LOOKUP": OperatorKind(Effect.OTHER, 2, data=(1,), result=None),
    "FILL": OperatorKind(Effect.OTHER, 2, data=(1,), copies=True),
    "RFFT2D": OperatorKind(Effect.OTHER, 2, result=DType.COMPLEX64),
    "STABLEHLO_GATHER": OperatorKind(Effect.OTHER, 2, result=None),
    "TOPK_V2": OperatorKind(Effect.OTHER, 2, outputs=2, copies=True),
    "DYNAMIC_UPDATE_SLICE": OperatorKind(Effect.OTHER, 3, data=(0, 1), copies=True),
    "RANGE": OperatorKind(Effect.OTHER, 3, data=(0, 1, 2)),
    "SCATTER_ND": OperatorKind(Effect.OTHER, 3, data=(1,)),
    "UNSORTED_SEGMENT_MAX UNSORTED_SEGMENT_MIN UNSORTED_SEGMENT_PROD UNSORTED_SEGMENT_SUM": OperatorKind(
        Effect.OTHER, 3
    ),
    "STABLEHLO_SCATTER": OperatorKind(Effect.OTHER, 3, -1, outputs=None, result=None),
    "ONE_HOT": OperatorKind(Effect.OTHER, 4, data=(2, 3)),
}

# Operators that rewrites add: for each version its first runtime, then the types, or the rank, that need it. The
# runtime doesn't check the version, other readers do.
# Source: LiteRT, tflite/tools/versioning: op_version.cc, GetBuiltinOperatorVersion; runtime_version.cc,
# FindMinimumRuntimeVersionForOp.
_VERSIONS: Final = {
    "ADD": "1.5.0, 1.14.0 INT8, 2.4.0 INT16, 2.6.0 INT64, 2.13.0",
    "BATCH_MATMUL": "2.3.0, 2.3.0 INT8, 2.4.0 INT16, 2.5.0",
    "CAST": (
        "1.5.0, 2.7.0 UINT32, 2.8.0 INT8, 2.9.0 UINT16, 2.12.0 FLOAT16 FLOAT64, 2.15.0 INT4, 2.17.0 BFLOAT16"
    ),
    "CONCATENATION": "1.5.0, 1.14.0 INT8, 2.3.0 INT16, 2.14.0 UINT32",
    "EQUAL": "1.14.0, 1.14.0 INT8, 2.3.0 STRING, 2.13.0 INT16",
    "GATHER": "1.6.0, 1.14.0 INT8, 1.15.0 BOOL, 2.4.0 INT16, 2.5.0",
    "LESS": "1.14.0, 1.14.0 INT8, 2.13.0 INT16",
    "LOGICAL_NOT": "1.11.0",
    "MAXIMUM": "1.14.0, 1.14.0 INT8, 2.3.0 RANK5, 2.3.0 INT16",
    "MINIMUM": "1.14.0, 1.14.0 INT8, 2.3.0 RANK5, 2.3.0 INT16",
    "MUL": "1.5.0, 1.14.0 INT8, 1.15.0, 2.3.0 INT16, 2.6.0 INT64, 2.11.0 COMPLEX64, 2.13.0 UINT32",
    "NOT_EQUAL": "1.14.0, 1.14.0 INT8, 2.3.0 STRING",
    "PACK": "1.11.0, 1.14.0 INT8, 2.3.0 INT16, 2.13.0 UINT32",
    "RESHAPE": "1.5.0",
    "SELECT_V2": "2.2.0, 2.12.0 UINT32",
    "SHAPE": "1.10.0",
    "SLICE": "1.14.0, 1.14.0 INT8, 1.14.0 STRING, 2.4.0 INT16, 2.5.0 RANK5, 2.14.0 UINT32",
    "SPLIT": "1.5.0, 1.14.0 INT8, 1.14.0 INT32, 2.3.0 INT16",
    "SQUEEZE": "1.6.0, 2.5.0 INT8",
    "SUB": "1.6.0, 1.14.0 INT8, 2.3.0 RANK5, 2.4.0 INT64, 2.4.0 INT16",
    "TRANSPOSE": "1.6.0, 1.14.0 INT8, 1.15.0 BOOL, 2.3.0 RANK5, 2.4.0 INT16, 2.12.0 RANK6, 2.14.4 INT4",
    "UNPACK": "1.11.0, 1.14.0 INT8 UINT8, 2.2.0 BOOL, 2.3.0 INT16",
}


def _versions(text: str) -> Iterator[Version]:
    for entry in filter(None, text.split(", ")):
        runtime, *needs = entry.split()
        ranks = [int(word.removeprefix("RANK")) for word in needs if word.startswith("RANK")]
        types = frozenset(DType[word] for word in needs if not word.startswith("RANK"))
        yield Version(runtime, types, ranks[0] if ranks else None)


# Operators whose options table is not named after them (schema.fbs, union BuiltinOptions).
_OPTIONS: Final = {
    "CONV_3D_TRANSPOSE": "Conv3DOptions",
    "L2_NORMALIZATION": "L2NormOptions",
    "MAXIMUM MINIMUM": "MaximumMinimumOptions",
    "AVERAGE_POOL_2D L2_POOL_2D MAX_POOL_2D": "Pool2DOptions",
    "MULTINOMIAL RANDOM_STANDARD_NORMAL RANDOM_UNIFORM": "RandomOptions",
    "MEAN REDUCE_ALL REDUCE_ANY REDUCE_MAX REDUCE_MIN REDUCE_PROD SUM": "ReducerOptions",
    "UNIDIRECTIONAL_SEQUENCE_RNN": "SequenceRNNOptions",
}
_SHARED_OPTIONS: Final = {name: table for names, table in _OPTIONS.items() for name in names.split()}
_OWN_OPTIONS: Final = {
    table.removesuffix("Options").lower(): table
    for union in ("BuiltinOptions2", "BuiltinOptions")
    for table in UNIONS[union].values()
}

SUBGRAPH_FIELDS: Final[dict[str, tuple[str, ...]]] = {
    "CallOnceOptions": ("init_subgraph_index",),
    "CallOptions": ("subgraph",),
    "IfOptions": ("then_subgraph_index", "else_subgraph_index"),
    "StableHLOCompositeOptions": ("decomposition_subgraph_index",),
    "StablehloCaseOptions": ("branch_subgraph_indices",),
    "StablehloCustomCallOptions": ("called_computations",),
    "StablehloReduceOptions": ("body_subgraph_index",),
    "StablehloReduceWindowOptions": ("body_subgraph_index",),
    "StablehloScatterOptions": ("update_computation_subgraph_index",),
    "StablehloSortOptions": ("comparator_subgraph_index",),
    "StablehloWhileOptions": ("cond_subgraph_index", "body_subgraph_index"),
    "WhileOptions": ("cond_subgraph_index", "body_subgraph_index"),
}
"""Options table -> its fields that hold subgraph indices (schema.fbs names them by these words only)."""

_UNDESCRIBED: Final = OperatorKind(Effect.OTHER, 0, -1, None, (), None, gaps=True)


def _records() -> Iterator[tuple[str, OperatorKind]]:
    described = {name: kind for names, kind in _KINDS.items() for name in names.split()}
    for name in BUILTIN_OPERATORS:
        options = _SHARED_OPTIONS.get(name) or _OWN_OPTIONS.get(name.replace("_", "").lower())
        versions = tuple(_versions(_VERSIONS.get(name, "")))
        yield name, replace(described.get(name, _UNDESCRIBED), options=options, versions=versions)


KINDS: Final = dict(_records())
"""The record of each builtin operator, by its name in the schema."""


def operators_that(*effects: Effect) -> frozenset[str]:
    """Names of the operators with one of these effects."""
    return frozenset(name for name, kind in KINDS.items() if kind.effect in effects)


UNARY: Final = frozenset(name for name in operators_that(Effect.ELEMENTWISE) if KINDS[name].least == 1)
"""Elementwise operators of one operand."""


@cache
def default_options(operator: str) -> Table | None:
    """Options with nothing but the schema's defaults; None for an operator that has none. Not to be edited."""
    table = KINDS[operator].options
    return None if table is None else new_table(table)


def subgraph_indices(options: Table | None) -> tuple[int, ...]:
    """The subgraphs that these options name, each as often as they do."""
    if options is None:
        return ()
    indices: list[int] = []
    for field in SUBGRAPH_FIELDS.get(options.name, ()):
        value = options.get(field)
        if isinstance(value, int):
            indices.append(value)
        elif value is not None:
            indices.extend(value.tolist())
    return tuple(indices)
