"""An attention graph as choices: sizes, and how each step is written."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One graph: sizes first, then how each step is written. The first choice of each is the plainest."""

    batch: int
    groups: int
    kv_heads: int
    length: int
    cache: int
    head_size: int
    numbers: str
    layout: str
    query: str
    product: str
    repeat: str
    interleaved: bool
    size_one: str
    scale: frozenset[str]
    scaling: str
    scale_late: bool
    soft_cap: bool
    mask: str
    mask_source: str
    mask_at: str
    mask_first: bool
    key_layout: str
    value_layout: str
    flips: frozenset[str]
    keys_first: bool
    values_first: bool
    sink: bool
    requantize: bool
    slices: str
    cast_probabilities: bool
    tail: str
    tail_by_reshape: bool
    project: bool
    blocks: int
    chained: bool
    shared: frozenset[str]
    escapes: frozenset[str]
    order: tuple[int, ...]

    @property
    def quantized(self) -> bool:
        """True where the products are in integers."""
        return self.numbers in ("int8", "int16")

    @property
    def heads(self) -> int:
        """N."""
        return self.groups * self.kv_heads

    @property
    def segments(self) -> tuple[int, ...]:
        """Key lengths, in the order of the logits."""
        return {
            "split": (self.cache, self.length),
            "one": (self.cache,),
            "none": (self.length,),
            "cross": (self.cache,),
        }[self.layout]
