"""Chooses which products of a checkpoint's layers get 4-bit weights: as many as the quality allows.

A product's harm is the KL divergence of the next token when it alone is rounded, on text that its rounding did not see.
The products with the least harm for their size are chosen, up to an allowance. The share of a product's output that
rounding destroys does not predict the harm. In Qwen2.5-Coder-0.5B, one product of 96 has 54 % of it.
"""

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from edge_opt.base.errors import UsageError
from edge_opt.base.record import RecordError, from_dict
from edge_opt.base.words import listed, many

PLAN = "plan.json"
"""Name of the file with the choice of products."""
_NEAR = 0.9
"""Share of what is allowed that is near enough to round no larger plan, which takes minutes.

With 0.85, SmolLM2-135M's first plan was taken, with 52 % of its weights in 4 bits; it has room for 57 %.
"""
_NEARER = 0.95  # near enough to try no other part of a plan that is rounded
_KEPT = 0.05
"""Up to this share of the weights stays at 8 bits whatever is allowed: those that 4 bits harm most for their size.

That takes about 3 % of decode's time. In Qwen2.5-Coder-0.5B, the keys' and values' products are 1.5 % of the weights;
with them at 8 bits, all others cost 0.063 instead of 0.079 nats on text of another kind.
"""
_GROWTH = 0.75
"""What products cost together over the sum of their harms, until it is measured.

0.69 in Qwen2.5-Coder-0.5B, 0.85 in SmolLM2-135M. If the first plan costs too little, a larger one is rounded, which
takes minutes; if it costs too much, a part of it is taken.
"""
_ACTIVATIONS = 0.01
"""Nats that int16 activations cost a bundle, whose weights are measured without them.

What bundles with 8-bit weights cost: SmolLM2-135M 0.011 +- 0.005, Gemma 3 270M 0.009 +- 0.009, Qwen2.5-Coder-0.5B
-0.003 +- 0.004. On 5,900 tokens, an earlier choice of 4 bits cost the latter 0.056 nats, as a bundle and if only its
weights were rounded. With 0.005 here and 1.1 for `_ELSEWHERE`, SmolLM2-135M had 66 instead of 59 % of its weights in
4 bits, and cost 0.049 +- 0.009 instead of 0.036 +- 0.008 nats.
"""
_ELSEWHERE = 1.3
"""What rounded weights cost in perplexity of other text, over the KL divergence on the prompts to judge by.

By weights alone or as bundles, on text of another kind without the chat template: 2.0 +- 0.2 (Qwen2.5-Coder-0.5B, 95 %
of its weights in 4 bits, 5,900 tokens), 1.3 +- 0.3 (SmolLM2-135M, 59 %, 1,300 tokens), 1.5 +- 0.3 (Gemma 3 270M, 38 %,
1,300 tokens), 1.8 +- 0.5 (Qwen2.5-Coder-1.5B, 96 %, 3,200 tokens). For the Qwens, that is more than is allowed for
here; `_KEPT` brings them near the limit. By 1.1, Gemma 3 270M got 33 % of its weights in 4 bits and 1.054 +- 0.011
times the checkpoint's perplexity.
"""


def allowed_for(ratio: float) -> float:
    """Nats that rounded weights may cost on the prompts to judge by, for a bundle of this perplexity ratio."""
    return max(math.log(ratio) - _ACTIVATIONS, 0.0) / _ELSEWHERE


@dataclass(frozen=True, slots=True)
class Choice:
    """The bits of one layer's product: `name` as in `PRODUCTS`, `kl` its harm in nats (None if not measured)."""

    layer: int
    name: str
    weights: int
    bits: int
    kl: float | None = None

    @property
    def key(self) -> tuple[int, str]:
        """What tells the product from others."""
        return self.layer, self.name

    @property
    def harm(self) -> float:
        """The harm, 0 if it was not measured."""
        return self.kl or 0.0


@dataclass(frozen=True, slots=True)
class Plan:
    """The bits of all products, and what was measured, in nats.

    `allowance` is what all may cost, `logits` what those in 4 bits cost, `together` what the layers cost as they are.
    """

    products: tuple[Choice, ...]
    allowance: float | None = None
    logits: float | None = None
    together: float | None = None


def choose(measured: Sequence[Choice], together: Callable[[Plan], float], allowance: float) -> Plan:
    """Choose products for 4 bits, those with the least harm for their size first, while together they fit `allowance`.

    Those with the most, up to 5 % of the weights, are never chosen.

    `together` gives what a plan costs as a whole, and rounds it unless it is part of the last one that was rounded. The
    cost grows about as the sum of harms does, so the next plan to try is where that line meets the allowance:

        number of products in 4 bits:  0 .. fits .. size, the next .. too_many .. all

    Of a plan that costs too much, a part is taken without another rounding. In SmolLM2-135M, 66 products cost 0.0339
    nats as a part of 74, 0.0343 as a part of 70.
    """
    ordered = sorted(measured, key=lambda one: one.harm / one.weights)
    # By the number of products in 4 bits, from 0: the sum of their harms, and their weights.
    sums = [0.0, *accumulate(one.harm for one in ordered)]
    weights = [0, *accumulate(one.weights for one in ordered)]

    def of_size(size: int) -> Plan:
        chosen = {*ordered[:size]}
        products = [replace(one, bits=4 if one in chosen else 8) for one in measured]
        return Plan(tuple(products))

    fits = 0
    # One more than may be in 4 bits, so that `_KEPT` stays at 8.
    too_many = bisect_left(weights, (1 - _KEPT) * weights[-1]) + 1
    costs = {0: 0.0}
    while too_many - fits > 1:
        # The next plan is a part of one that was rounded, and costs too much.
        is_part = too_many in costs
        if costs[fits] >= (_NEARER if is_part else _NEAR) * allowance:
            break
        if is_part:
            # The line through both costs.
            part = (allowance - costs[fits]) / (costs[too_many] - costs[fits])
            target = sums[fits] + part * (sums[too_many] - sums[fits])
        else:
            growth = costs[fits] / sums[fits] if sums[fits] > 0 else 0.0
            target = allowance / (growth or _GROWTH)
        guess = bisect_right(sums, target) - 1
        size = min(max(guess, fits + 1), too_many - 1)
        costs[size] = together(of_size(size))
        if costs[size] <= allowance:
            fits = size
            continue
        if not is_part:
            fits = 0  # a smaller plan that was rounded alone cost something else than as a part of this one
        too_many = size
    return replace(of_size(fits), together=costs[fits] if fits else None)


def plan_of(values: Any, where: str = "the plan") -> Plan:
    """A plan from JSON values; UsageError, which says where it is from, if types, bits or numbers are wrong."""
    try:
        plan = from_dict(Plan, values)
    except RecordError as error:
        raise UsageError(
            f"{where} is not valid: {error}; give the {PLAN} of an earlier build"
        ) from error
    for one in plan.products:
        product = f"{one.name} of layer {one.layer}"
        if one.bits not in (4, 8):
            raise UsageError(f"{where} has {one.bits} bits for {product}: give 4 or 8")
        if not math.isfinite(one.harm):
            raise UsageError(f"{where} has the kl {one.kl} for {product}: give a number or null")
    return plan


def plan_lines(plan: Plan) -> list[str]:
    """Notes for the user: how many weights are in 4 bits, and which products stay at 8."""
    kept = [one for one in plan.products if one.bits == 8]
    kept.sort(key=lambda one: -one.harm)
    total = sum(one.weights for one in plan.products)
    share = 1 - sum(one.weights for one in kept) / total
    narrow = len(plan.products) - len(kept)
    lines = [
        f"{narrow} of {many(len(plan.products), 'product')} of the layers, {share:.0%} of their weights, are in 4 bits"
    ]
    if kept:
        measured = any(one.kl is not None for one in kept)
        why = ", for the KL divergence that 4 would cost" if measured else ""
        lines.append(f"At 8 bits{why}: {listed(map(_described, kept))}")
    if plan.together is not None:
        lines.append(f"KL divergence of the layers with these bits: {plan.together:.3f} nats")
    return lines


def _described(choice: Choice) -> str:
    cost = "" if choice.kl is None else f" ({choice.kl:.4f})"
    return f"{choice.name} of layer {choice.layer}{cost}"
