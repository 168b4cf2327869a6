"""Rounds weights of a checkpoint's layers to 4 bits before the export: as many as the quality allows.

    checkpoint -> rotate -> measure each product -> choose, round together -> rounded checkpoint, codes, plan

A product's harm is the KL divergence of the next token when it alone is rounded, on text that its rounding did not see.
The products with the least harm for their size are chosen, up to an allowance. The share of a product's output that
rounding destroys does not predict the harm. In Qwen2.5-Coder-0.5B, one product of 96 has 54 % of it.
Those that are chosen are rounded again, together, where later ones make up for earlier ones.
"""

import json
import math
import tempfile
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from edge_opt.base.errors import UsageError
from edge_opt.base.record import RecordError, from_dict
from edge_opt.base.words import Progress, listed, many
from edge_opt.building.checkpoint import Stored, Streamed, create, load
from edge_opt.building.gptq import BOTTOM, LEAST_ROW, TOP, Floats, Grid
from edge_opt.building.network import (
    NAMES,
    Harm,
    Network,
    Product,
    by_onednn,
    check_family,
    last_part,
)
from edge_opt.building.prompts import read_prompts, text_of, wording_of
from edge_opt.building.rotation import rotate_stream
from edge_opt.building.stages import Job

CHECKPOINT = "checkpoint"
"""Name of the rounded checkpoint in the stage's folder."""
PLAN = "plan.json"
"""Name of the file with the choice of products."""
_CODES = "codes.safetensors"  # codes and scales of the rounded weights
_LOGITS = "logits_inputs"
_LONGEST = 1200  # tokens of a prompt to round for
_MOST_TOKENS = 10000
_LEAST_TOKENS = 4000
_EACH = 4  # one prompt in so many is kept to judge by
_MOST_JUDGED = 4  # prompts
_ALONE = 96
"""Tokens of a prompt to judge each product by; all have as many, so that they run as one batch.

They only rank the products. SmolLM2-135M takes two thirds of the time of 160 tokens; the ranks correlate by 0.96.
"""
_TOGETHER = 512  # at most, to judge all products by
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

    def narrow(self) -> Callable[[Product], bool]:
        """Tells which products are in 4 bits."""
        chosen = {(one.layer, one.name) for one in self.products if one.bits == 4}
        return lambda product: (product.layer, product.name) in chosen


def round_weights(job: Job, progress: Progress) -> dict[str, Any]:
    """Run the stage: write the rounded checkpoint, its codes and the plan.

    Raises:
        UsageError: the family's products are unknown, the prompts have too few tokens, or the plan is of another model.
    """
    source = Path(job.inputs["checkpoint"])
    output = Path(job.output)
    given = job.options["plan"]
    import torch

    weights = load(source)
    check_family(weights.model)
    texts = _texts(source, Path(job.inputs["prompts"]))
    notes = []
    with torch.no_grad(), by_onednn(), tempfile.TemporaryDirectory() as folder:
        known = grids_of(weights)
        if not known and job.options["rotate"]:
            weights, note = _rotated(weights, source, Path(folder, "rotated"))
            notes.append(note)
        network = Network(weights, *texts)
        rounded = _Codes(Path(folder, _CODES), weights, network.modules())
        if known:
            unused = "" if given is None else ", so the plan is not used"
            notes.append(f"The checkpoint's weights lie on a 4-bit grid already{unused}")
            plan = _plan_of(network, known)
            for name, grid in known.items():
                rounded.keep(name, grid)
            none = Plan(()).narrow()
            moments = network.rounded(none, rounded.keep, progress)
        elif given is not None:
            plan = checked_plan(given, network)
            moments = network.rounded(plan.narrow(), rounded.keep, progress)
        else:
            moments, harm = network.measured(progress)
            plan = _measured_plan(network, harm, rounded, job.options["ratio"], progress)
        chosen = network.modules(plan.narrow())
        codes = _Codes(output / _CODES, weights, chosen)
        codes.keep_moments(moments)
        for name in chosen:
            codes.keep(name, rounded.grid(name))
        # A rotated checkpoint has a place for each weight by now.
        places = weights.prepare_copy(source, output / CHECKPOINT, map(_weight_of, chosen))
        _write_rounded(weights, places, chosen, codes)
        if plan.together is None:
            plan = replace(plan, together=network.harm_of(chosen, codes.grid))
    (output / PLAN).write_text(json.dumps(asdict(plan), indent=1), encoding="utf-8")
    notes += plan_lines(plan)
    return {"notes": [*filter(None, notes)]}


def _rotated(weights: Streamed, source: Path, target: Path) -> tuple[Streamed, str]:
    """The rotated checkpoint, or the same if its family cannot be rotated, with a note for the user.

    Weights round better when no channel stands out, even if activations gain nothing; they must lose nothing.
    """
    prepared = rotate_stream(weights, source, target, least_gain=1)
    return (load(target) if prepared.rotated else weights), prepared.note


def _write_rounded(
    weights: Streamed, places: dict[str, Stored], chosen: Iterable[str], codes: "_Codes"
) -> None:
    """Fill the places of a copy of a checkpoint, by name; chosen modules get the values of their codes."""
    for name in chosen:
        rounded = codes.grid(name).values()
        places.pop(_weight_of(name)).codes("r+")[:] = rounded
    weights.copy_to(places)


class _Texts(NamedTuple):
    """Tokens of the texts that `Network` takes, named as there."""

    read: list[Any]
    alone: Any
    together: list[Any]


def _texts(checkpoint: Path, prompts: Path) -> _Texts:
    """Divide the prompts into those to round for, in the chat template, and those to judge by, half of them without it.

    `evaluate` scores text without it. There, rounded weights cost as much as in the template in SmolLM2-135M, and more
    in Qwen2.5-Coder-0.5B: 0.060 instead of 0.037 nats. Rounding for both forms gives 0.056 and 0.040.
    """
    import torch

    wording = wording_of(checkpoint)

    def tokens_of(text: str) -> Any:
        return torch.tensor([[*map(int, wording.tokenizer.tokenize(text))]])

    read: list[Any] = []
    judged: list[Any] = []
    total = 0  # tokens to round for
    long = 0  # prompts that are long enough to judge by
    different = {wording.text(prompt): text_of(prompt) for prompt in read_prompts(prompts)}
    for text, plain in different.items():
        tokens = tokens_of(text)
        is_long = tokens.shape[1] >= _ALONE
        long += is_long
        is_kept = is_long and long % _EACH == 0
        if is_kept and len(judged) < _MOST_JUDGED:
            without = tokens_of(plain)
            takes_plain = len(judged) % 2 == 1 and without.shape[1] >= _ALONE
            taken = without if takes_plain else tokens
            judged.append(taken[:, :_TOGETHER])
        elif tokens.shape[1] and total < _MOST_TOKENS:
            read.append(tokens[:, :_LONGEST])
            total += read[-1].shape[1]
    if total < _LEAST_TOKENS or not judged:
        raise UsageError(
            f"weights='4' needs {_LEAST_TOKENS} tokens of prompts, counting at most {_LONGEST} of each, and {_EACH} "
            f"prompts of at least {_ALONE} tokens, one of them to judge by; there are {total} tokens and "
            f"{many(long, 'such prompt')}: give more different prompts, or use weights='8'"
        )
    alone = torch.cat([tokens[:, :_ALONE] for tokens in judged])
    return _Texts(read, alone, judged)


def _measured_plan(
    network: Network, harm: Harm, rounded: "_Codes", ratio: float, progress: Progress
) -> Plan:
    """The plan that follows from the harm of each product alone, and of those that are chosen; rounds these."""
    measured = [Choice(one.layer, one.name, one.weights, 8, kl) for one, kl in harm.products]
    made: set[str] = set()

    def together(plan: Plan) -> float:
        nonlocal made
        names = {*network.modules(plan.narrow())}
        if not names <= made:
            network.rounded(plan.narrow(), rounded.keep, progress)
            made = names
        return network.harm_of(names, rounded.grid)

    allowance = allowed_for(ratio)
    plan = choose(measured, together, allowance - harm.logits)
    return replace(plan, allowance=allowance, logits=harm.logits)


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
    most = bisect_left(weights, (1 - _KEPT) * weights[-1])

    def plan(size: int) -> Plan:
        narrow = {*ordered[:size]}
        products = [replace(one, bits=4 if one in narrow else 8) for one in measured]
        return Plan(tuple(products))

    fits = 0
    too_many = most + 1
    costs = {0: 0.0}
    near = _NEAR
    while too_many - fits > 1 and costs[fits] < near * allowance:
        if too_many in costs:
            # The line through both costs.
            part = (allowance - costs[fits]) / (costs[too_many] - costs[fits])
            target = sums[fits] + part * (sums[too_many] - sums[fits])
        else:
            growth = costs[fits] / sums[fits] if sums[fits] > 0 else 0.0
            target = allowance / (growth or _GROWTH)
        guess = bisect_right(sums, target) - 1
        size = min(max(guess, fits + 1), too_many - 1)
        costs[size] = together(plan(size))
        if costs[size] <= allowance:
            fits = size
            continue
        if too_many not in costs:
            fits = 0  # the smaller plan's cost was that of another rounding
        too_many = size
        near = _NEARER
    return replace(plan(fits), together=costs[fits] if fits else None)


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


def checked_plan(given: Mapping[str, Any], network: Network) -> Plan:
    """A plan as JSON values, for this model; UsageError if it is not one, or has other products."""
    plan = plan_of(given)
    products = [*_bits(network, plan.narrow())]
    wanted = Counter((one.layer, one.name) for one in products)
    found = Counter((one.layer, one.name) for one in plan.products)
    for wrong, how in ((wanted - found, "missing"), (found - wanted, "one too many")):
        if wrong:
            layer, name = min(wrong)
            raise UsageError(
                f"the plan has {len(plan.products)} products, and the checkpoint {len(products)} in "
                f"{len(network.products)} layers; {name} of layer {layer} is {how}: give the plan of a checkpoint of "
                f"the same shape"
            )
    harms = {(one.layer, one.name): one.kl for one in plan.products}
    measured = [replace(one, kl=harms[one.layer, one.name]) for one in products]
    # What else the file tells was measured for another checkpoint, or for other bits.
    return Plan(tuple(measured))


def _plan_of(network: Network, known: Mapping[str, Grid]) -> Plan:
    """The plan that has those products in 4 bits of which all weights lie on a grid."""

    def lies_on_grid(product: Product) -> bool:
        return product.modules.keys() <= known.keys()

    return Plan(tuple(_bits(network, lies_on_grid)))


def _bits(network: Network, narrow: Callable[[Product], bool]) -> list[Choice]:
    """The choice for each product of a checkpoint."""
    choices: list[Choice] = []
    for products in network.products:
        choices += [
            Choice(one.layer, one.name, one.weights, 4 if narrow(one) else 8) for one in products
        ]
    return choices


def grids_of(weights: Streamed) -> dict[str, Grid]:
    """Weights of layers that lie on a 4-bit grid already, one scale a row, as after training for 4 bits."""
    found: dict[str, Grid] = {}
    paths = [path for path, _ in weights.model.named_modules() if last_part(path) in NAMES]
    for path in paths:
        name = _weight_of(path)
        first_rows = weights.read(name, slice(8))
        if _on_grid(first_rows) is None:
            continue
        grid = _on_grid(weights.read(name))
        if grid is not None:
            found[path] = grid
    # Otherwise a few products of zeros, maybe.
    return found if 2 * len(found) >= len(paths) else {}


def _on_grid(rows: Floats) -> Grid | None:
    """The codes and scales of `[rows, columns]` that are multiples of a scale for each row; None if they are not.

    Up to bfloat16's rounding of 2^-8, which a weight and the row's largest may each have. A row's largest code may be 8
    to 1; the least one that fits is taken. Of 20,000 rows of 24 normal numbers, none fits any.
    """
    largest = np.abs(rows).max(axis=1, keepdims=True)
    rows = np.where(largest < LEAST_ROW, 0, rows)
    codes = np.zeros_like(rows)
    found = np.zeros(len(rows), np.bool_)
    for most in range(-BOTTOM, 0, -1):
        tried = rows * (most / np.maximum(largest, LEAST_ROW))
        nearest = np.rint(tried)
        is_near = np.abs(tried - nearest) < 0.005 + 2**-7 * np.abs(nearest)
        fits = (is_near & (nearest <= TOP)).all(axis=1)
        codes[fits] = nearest[fits]
        found |= fits
    if not found.all():
        return None
    # The scale with the least squared error; 1 for a row of zeros.
    squares = np.square(codes).sum(axis=1)
    products = (codes * rows).sum(axis=1)
    scales = np.where(squares > 0, products / np.maximum(squares, 1), 1)
    return Grid(codes.astype(np.int8), scales.astype(np.float32))


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


def _weight_of(name: str) -> str:
    return f"{name}.weight"


class _Codes:
    """A new file: the rounded weights of modules by name, their biases, and the moments of the logits' inputs."""

    def __init__(self, path: Path, weights: Streamed, names: Iterable[str]) -> None:
        width = weights.model.config.hidden_size
        tensors: dict[str, tuple[str, tuple[int, ...]]] = {_LOGITS: ("F32", (width, width))}
        biases: dict[str, Floats] = {}
        for name in names:
            module = weights.model.get_submodule(name)
            rows, columns = module.weight.shape
            tensors[f"{name}.codes"] = "I8", (rows, columns)
            tensors[f"{name}.scales"] = "F32", (rows,)
            if module.bias is not None:
                tensors[f"{name}.bias"] = "F32", (rows,)
                biases[f"{name}.bias"] = weights.read(f"{name}.bias")
        self._places = create(path, tensors)
        for name, numbers in biases.items():
            self._write(name, numbers)

    def _write(self, name: str, numbers: Any) -> None:
        self._places[name].codes("r+")[:] = numbers

    def keep_moments(self, moments: Floats) -> None:
        """Write the moments."""
        self._write(_LOGITS, moments)

    def keep(self, name: str, grid: Grid) -> None:
        """Write the weights of a module."""
        self._write(f"{name}.codes", grid.codes)
        self._write(f"{name}.scales", grid.scales)

    def grid(self, name: str) -> Grid:
        """Read the weights of a module."""
        return Grid(self._places[f"{name}.codes"].codes(), self._places[f"{name}.scales"].codes())


@dataclass(frozen=True, slots=True)
class Rounded:
    """The products that the stage rounded, by name: weights, and biases if they have any (float32 `[rows]`).

    `moments` `[hidden, hidden]`: the sum of `x x'` over inputs x of the logits' product.
    """

    grids: dict[str, Grid]
    biases: dict[str, Floats]
    moments: Floats


def read_rounded(folder: Path) -> Rounded:
    """Read what the stage wrote."""
    from safetensors.numpy import load_file

    arrays = load_file(folder / _CODES)
    moments = arrays.pop(_LOGITS)
    grids: dict[str, Grid] = {}
    biases: dict[str, Floats] = {}
    for key, array in arrays.items():
        name, _, part = key.rpartition(".")
        if part == "codes":
            grids[name] = Grid(array, arrays[f"{name}.scales"])
        elif part == "bias":
            biases[name] = array
    return Rounded(grids, biases, moments)
