"""Which of the equivalent single-head graphs is built: how and where heads are cut, and how they are joined."""

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Form:
    """A choice of cut.

    `cut`: SPLIT keeps the rank, `[B,1,N*T,H]` -> N x `[B,1,T,H]`; UNPACK drops the head axis,
    `[B,T,N,H]` -> N x `[B,T,H]`. `position`: "near" cuts right above the logits products, after the reshapes that lead
    there; "far" cuts first and rearranges each head; "above" cuts as far up as every head can be computed on its own,
    above RoPE and, with `composites`, above a norm over H. `sink` moves multiplications by a scalar below the cut, into
    each head.
    """

    cut: Literal["split", "unpack"] = "split"
    position: Literal["near", "far", "above"] = "near"
    sink: bool = True
    composites: bool = True

    @property
    def keep_axes(self) -> bool:
        """True where a head's tensors keep the head axis, at size 1."""
        return self.cut != "unpack"


FORMS = {
    "split": Form(),
    "unpack": Form(cut="unpack", position="far"),
    "split-above": Form(position="above"),
}
AS_FOUND = "as-found"
"""Heads that the block merges into `[.., N*H]` are split and concatenated; heads that it leaves side by side in
`[.., N, H]` are unpacked and packed. This is what the reference graphs do."""

FORM_NAMES = (AS_FOUND, *FORMS)
"""The words for a form in target files."""


def form_for(name: str, *, merged: bool) -> Form:
    """The form that a target's word stands for, for a block that merges its heads or leaves them side by side."""
    as_found = "split" if merged else "unpack"
    return FORMS[as_found if name == AS_FOUND else name]
