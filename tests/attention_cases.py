"""An attention graph as choices: sizes, and how each step is written; and random choices that go together."""

from dataclasses import make_dataclass, replace
from typing import Any

from hypothesis import strategies as st

MASKS = ("shared", "batched", "absent", "concat", "tile", "per head", "rank 2", "padding", "select", "slopes")


def _some(*names: str) -> st.SearchStrategy[frozenset[str]]:
    return st.frozensets(st.sampled_from(names), max_size=len(names))


def _choice(*names: str) -> st.SearchStrategy[str]:
    return st.sampled_from(names)


_CHOICES: dict[str, st.SearchStrategy[Any]] = {
    "batch": st.sampled_from((1, 1, 2, 3)),
    "length": st.sampled_from((1, 4, 3, 8)),
    "cache": st.sampled_from((8, 5, 12)),
    "head_size": st.sampled_from((8, 4, 5)),
    "numbers": _choice("float32", "float32", "float16", "dequantized", "int8", "int16"),
    "layout": _choice("split", "one", "none", "cross"),
    "query": _choice("projected", "BTNH", "BNTH", "BTD", "TNH"),
    "product": _choice("fold", "repeat", "flat", "five"),
    "repeat": _choice("broadcast", "tile", "concat"),
    "interleaved": st.booleans(),
    "scale": _some("query", "key", "logits"),
    "scaling": _choice("MUL", "DIV", "swapped", "full-rank", "per head"),
    "soft_cap": st.booleans(),
    "mask": _choice(*MASKS),
    "mask_source": _choice("input", "chain", "select", "layers"),
    "mask_at": _choice("product", "heads", "five"),
    "reversed": st.booleans(),
    "key_layout": _choice("KTH", "KHT", "TKH"),
    "value_layout": _choice("KHT", "KTH", "TKH"),
    "flips": _some("query", "key", "probabilities", "value"),
    "keys_first": st.booleans(),
    "values_first": st.booleans(),
    "sink": st.sampled_from((False, False, False, True)),
    "slices": _choice("SLICE", "SPLIT_V"),
    "tail": _choice("merged", "rows", "unmerged", "flat", "flat then mapped", "heads"),
    "tail_by_reshape": st.booleans(),
    "project": st.booleans(),
    "blocks": st.sampled_from((1, 1, 1, 2, 3)),
    "escapes": st.one_of(st.just(frozenset()), _some("kv", "logits", "probabilities", "scaled", "tail")),
    "order": st.one_of(st.just(()), st.lists(st.integers(0, 9), min_size=1, max_size=8).map(tuple)),
}


class Case(make_dataclass("Choices", ("groups", "kv_heads", *_CHOICES), frozen=True)):
    """One graph: G, K, and one of each of the choices; the first of each is the plainest."""

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
        lengths = {"split": (self.cache, self.length), "none": (self.length,)}
        return lengths.get(self.layout, (self.cache,))


@st.composite
def cases(draw: st.DrawFn, /, **fixed: Any) -> Case:
    """A case; `fixed` pins some of its fields."""
    groups, kv_heads = draw(
        st.sampled_from(((4, 1), (2, 2), (1, 4), (3, 1), (1, 2), (2, 3), (1, 3), (4, 2), (2, 1)))
    )
    chosen = {name: fixed[name] if name in fixed else draw(strategy) for name, strategy in _CHOICES.items()}
    return possible(Case(**{"groups": groups, "kv_heads": kv_heads, **chosen, **fixed}))


def possible(case: Case) -> Case:
    """The case, with choices that exclude each other resolved."""
    if case.layout == "one" and case.cache < case.length:
        case = replace(case, cache=case.length + 4)
    if case.tail == "unmerged" and case.length == 1 and case.groups > 1 and case.product == "fold":
        # `[1, 1, N, H]` says nowhere whether N are heads or rows of one head.
        case = replace(case, tail="merged")
    if case.product in ("fold", "five"):
        case = replace(case, interleaved=False)
    apart = case.length == 1 and case.query in ("BTNH", "TNH")
    if case.tail == "heads" and (apart or case.query == "BNTH" or case.product == "fold"):
        # Nor do heads among the rows that nothing behind the block takes apart.
        case = replace(case, tail="merged")
    return replace(case, batch=1) if case.query == "TNH" else case
