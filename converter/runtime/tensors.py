"""A model's inputs and outputs as plain data: the runtime's description, roles, and growth of caches."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Kernels = Literal["xnnpack", "reference"]
"""Kernel sets: XNNPACK with optimized kernels for what it declines, or the reference kernels."""

MAIN = "main"
"""The name of subgraph 0 of a model without signatures, which is run by position."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One input or output of a signature: `name` is the signature's name for it, `tensor` its own.

    `shape` has 1 where `declared` has -1 (a dynamic dimension). `scales` and `zero_points` are empty without
    quantization, and several lie along `axis`. `entries` is the size of the smallest table that it indexes, or 0.
    An integer input may be 0 to `accepts` - 1, any number if that is 0; None if that is unknown, as for outputs.
    Where it may be any, `near` has numbers that a comparison with a constant tells apart.
    """

    name: str
    tensor: str
    shape: tuple[int, ...]
    declared: tuple[int, ...]
    dtype: str
    scales: tuple[float, ...] = ()
    zero_points: tuple[int, ...] = ()
    axis: int = 0
    entries: int = 0
    accepts: int | None = None
    near: tuple[int, ...] = ()

    @property
    def is_plain_integer(self) -> bool:
        """True for integers that stand for themselves."""
        return np.dtype(self.dtype).kind in "iu" and not self.quantized

    @property
    def is_float(self) -> bool:
        """True for real numbers that stand for themselves."""
        return np.dtype(self.dtype).kind == "f"

    @property
    def quantized(self) -> bool:
        """True if integers stand for real numbers with a single scale; kernels produce no others."""
        return len(self.scales) == 1 and self.dtype in {"int8", "uint8", "int16", "int32"}

    @property
    def quantization(self) -> tuple[tuple[float, ...], tuple[int, ...], int]:
        """Scales, zero points and axis, for comparisons."""
        return self.scales, self.zero_points, self.axis if len(self.scales) > 1 else 0

    def has_type_of(self, other: "TensorInfo") -> bool:
        """True if the same bytes mean the same numbers in both."""
        return (self.dtype, self.quantization) == (other.dtype, other.quantization)

    @property
    def zero_point(self) -> int:
        """The code that stands for 0."""
        return self.zero_points[0] if self.zero_points else 0

    @property
    def limits(self) -> tuple[int, int]:
        """The lowest and the highest integer of the type."""
        limits = np.iinfo(self.dtype)
        return int(limits.min), int(limits.max)

    def reals(self, values: NDArray[Any]) -> NDArray[np.float64]:
        """The real numbers that the array stands for."""
        numbers = values.astype(np.float64)
        if not self.quantized:
            return numbers
        return np.asarray((numbers - self.zero_point) * self.scales[0])

    @property
    def elements(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class SignatureInfo:
    """One entry point; `positional` if it is subgraph 0 of a model without signatures.

    `keeps_state`: what it returns may depend on earlier calls, also of other signatures.
    """

    name: str
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    positional: bool = False
    keeps_state: bool = False


Role = Literal[
    "mask", "position", "token", "index", "integer", "code", "cache", "rotary", "embedding", "data"
]

# A plain integer has one of these roles, or is a mask.
_COUNTED = frozenset({"position", "token"})
# Role, pattern of its names, and numpy's kinds of its types. The first match decides: "pos_emb_cos" is a rotary table,
# not a position; "position_ids" is not a token.
_ROLES: tuple[tuple[Role, str, str], ...] = (
    ("mask", r"mask", "fiub"),
    ("rotary", r"pos_emb|rope|rotary|(^|_)(cos|sin)($|_)", "fiu"),
    ("position", r"(^|_)pos($|_)|position|time_step|(^|_)step($|_)", "i"),
    ("token", r"token(?!_type)|input_ids|(?<!type)(?<!segment)(^|_)ids?$", "i"),
    ("cache", r"cache|kv_slice|past_key|past_value", "fiu"),
    ("embedding", r"embed", "fiu"),
)


def role_of(info: TensorInfo) -> Role:
    """The role of an input, by the signature's name for it, then by the tensor's own name."""
    kind = np.dtype(info.dtype).kind
    for name in (info.name, info.tensor.rsplit("/", 1)[-1]):
        for role, pattern, kinds in _ROLES:
            if role != "mask" and info.is_plain_integer != (role in _COUNTED):
                continue
            if kind in kinds and re.search(pattern, name.lower()):
                return role
    return "data"


def cache_of(info: TensorInfo) -> str:
    """The name of the cache that an argument is, or is the new part of; empty for other arguments."""
    name = info.name.replace("slice", "cache")
    return name if role_of(replace(info, name=name)) == "cache" else ""


def caches_of(signature: SignatureInfo) -> dict[str, TensorInfo]:
    """The inputs that are caches, by name."""
    inputs = (info for info in signature.inputs if "slice" not in info.name)
    return {info.name: info for info in inputs if role_of(info) == "cache"}


def growing_axis(cache: TensorInfo, part: TensorInfo) -> int | None:
    """The axis along which new keys or values follow the old ones; None if the shapes do not determine it."""
    if len(cache.shape) != len(part.shape):
        return None
    differs = np.not_equal(cache.shape, part.shape)
    return int(differs.argmax()) if differs.sum() == 1 else None


def growing_axes(signature: SignatureInfo) -> dict[str, int | None]:
    """The growing axis of every cache whose new part is separate: an output that is named like it, but `slice`.

    If the part is as long as the cache (a prefill of a whole ring buffer), it is that of the other layers' caches.
    """
    parts = {info.name: info for info in (*signature.inputs, *signature.outputs)}
    axes: dict[str, int | None] = {}
    of_other_layers: dict[str, int] = {}
    for name, cache in caches_of(signature).items():
        part = parts.get(name.replace("cache", "slice"))
        if part is None:
            continue
        axis = growing_axis(cache, part)
        axes[name] = axis
        if axis is not None:
            of_other_layers[_without_layer(name)] = axis
    for name, axis in axes.items():
        if axis is None:
            axes[name] = of_other_layers.get(_without_layer(name))
    return axes


def _without_layer(name: str) -> str:
    """The name without the layer's number."""
    return re.sub(r"\d+", "", name)


def known_length(signature: SignatureInfo) -> int:
    """Capacity of the longest cache in positions, from its growing axis or the mask; 0 if unknown."""
    caches = caches_of(signature)
    if not caches:
        return 0
    axes = growing_axes(signature)
    sizes = [caches[name].shape[axis] for name, axis in axes.items() if axis is not None]
    masks = [info for info in signature.inputs if role_of(info) == "mask" and info.shape]
    return max(sizes or [info.shape[-1] for info in masks], default=0)


def cache_length(signature: SignatureInfo) -> int:
    """Like `known_length`; if that is unknown, the second largest size of a cache."""
    caches = caches_of(signature).values()
    guessed = (sorted(cache.shape)[-2] for cache in caches if len(cache.shape) > 1)
    return known_length(signature) or min(guessed, default=0)


def new_tokens(signature: SignatureInfo) -> int:
    """Number of tokens `[B, T]`, embeddings `[B, T, D]` or positions that a signature takes at once."""
    lengths: list[int] = []
    for info in signature.inputs:
        if role_of(info) in {"token", "embedding", "position"}:
            behind_batch = info.shape[1:] or info.shape
            lengths += behind_batch[:1]
    return max(lengths, default=1)


def longest_prefill(
    signatures: Iterable[SignatureInfo], reader: SignatureInfo
) -> SignatureInfo | None:
    """The longest prefill signature with all caches of the reader, or None."""
    read = named_shapes(caches_of(reader).values())
    prefills = (one for one in signatures if "prefill" in one.name)
    fitting = (one for one in prefills if read <= named_shapes(caches_of(one).values()))
    return max(fitting, key=new_tokens, default=None)


def named_shapes(infos: Iterable[TensorInfo]) -> set[tuple[str, tuple[int, ...]]]:
    """Each with its name and shape."""
    return {(info.name, info.shape) for info in infos}
