"""Rounds weights of a checkpoint's layers to 4 bits before the export: as many as the quality allows.

    checkpoint -> rotate -> measure each product -> choose, round together -> rounded checkpoint, codes, plan

`plan` chooses, by what each product costs when it alone is rounded. Those that are chosen are rounded again, together,
where later ones make up for earlier ones.
"""

import json
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress, many
from edge_opt.base.work import CHECKPOINT
from edge_opt.building.checkpoint import Streamed, load
from edge_opt.building.codes import CODES, CodesFile
from edge_opt.building.gptq import BOTTOM, LEAST_ROW, TOP, Floats, Grid
from edge_opt.building.network import (
    ALONE,
    NAMES,
    Network,
    by_onednn,
    check_family,
    last_part,
    modules_of,
)
from edge_opt.building.plan import PLAN, Choice, Plan, allowed_for, choose, plan_lines, plan_of
from edge_opt.building.prompts import read_prompts, text_of, wording_of
from edge_opt.building.rotation import rotate_stream
from edge_opt.building.stages import Job

_LONGEST = 1200  # tokens of a prompt to round for
_MOST_TOKENS = 10000
_LEAST_TOKENS = 4000
_EACH = 4  # one prompt in so many is kept to judge by
_MOST_JUDGED = 4  # prompts
_MOST_JUDGED_OF_EACH = 512  # tokens


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
    read, judged = _texts(source, Path(job.inputs["prompts"]))
    notes = []
    with torch.no_grad(), by_onednn(), tempfile.TemporaryDirectory() as folder:
        known = grids_of(weights)
        if not known and job.options["rotate"]:
            weights, note = _rotated(weights, source, Path(folder, "rotated"))
            notes.append(note)
        network = Network(weights, read, judged)
        every = modules_of(chain.from_iterable(network.products))
        rounded = CodesFile(Path(folder, CODES), weights, every)
        rounding = _Rounding(network, rounded, progress)
        if known:
            unused = "" if given is None else ", so the plan is not used"
            notes.append(f"The checkpoint's weights lie on a 4-bit grid already{unused}")
            plan, moments = rounding.kept(known)
        elif given is not None:
            plan = checked_plan(given, network)
            moments = rounding.carry_out(_in_4_bits(network, plan))
        else:
            plan, moments = rounding.measured(job.options["ratio"])
        chosen = _in_4_bits(network, plan)
        codes = CodesFile(output / CODES, weights, chosen)
        codes.keep_moments(moments)
        wide = [f"{name}.weight" for name in chosen]
        places = weights.prepare_copy(source, output / CHECKPOINT, wide)
        for name in chosen:
            grid = rounded.grid(name)
            codes.keep(name, grid)
            # A rotated checkpoint has a place for each weight by now.
            places.pop(f"{name}.weight").codes("r+")[:] = grid.values()
        weights.copy_to(places)
        if plan.together is None:
            plan = replace(plan, together=network.harm_of(chosen, rounded.grid))
    (output / PLAN).write_text(json.dumps(asdict(plan), indent=1), encoding="utf-8")
    return {"notes": [*notes, *plan_lines(plan)]}


def _rotated(weights: Streamed, source: Path, target: Path) -> tuple[Streamed, str]:
    """The checkpoint with its residual stream rotated, if that is possible, and a note."""
    # Weights round better when no channel stands out, even if activations gain nothing; they must lose nothing.
    prepared = rotate_stream(weights, source, target, least_gain=1)
    return load(target) if prepared.rotated else weights, prepared.note


def _texts(checkpoint: Path, prompts: Path) -> tuple[list[Any], list[Any]]:
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
    long_prompts = 0  # long enough to judge by
    different = {wording.text(prompt): text_of(prompt) for prompt in read_prompts(prompts)}
    for text, plain in different.items():
        tokens = tokens_of(text)
        is_long = tokens.shape[1] >= ALONE
        long_prompts += is_long
        is_kept = is_long and long_prompts % _EACH == 0
        if is_kept and len(judged) < _MOST_JUDGED:
            plain_tokens = tokens_of(plain)
            is_second = len(judged) % 2 == 1
            if is_second and plain_tokens.shape[1] >= ALONE:
                tokens = plain_tokens
            judged.append(tokens[:, :_MOST_JUDGED_OF_EACH])
        elif tokens.shape[1] and total < _MOST_TOKENS:
            read.append(tokens[:, :_LONGEST])
            total += read[-1].shape[1]
    if total < _LEAST_TOKENS or not judged:
        raise UsageError(
            f"weights='4' needs {_LEAST_TOKENS} tokens of prompts, counting at most {_LONGEST} of each, and {_EACH} "
            f"prompts of at least {ALONE} tokens, one of them to judge by; there are {total} tokens and "
            f"{many(long_prompts, 'such prompt')}: give more different prompts, or use weights='8'"
        )
    return read, judged


@dataclass
class _Rounding:
    """Rounds products of a network, and keeps them in a file; `made` are the modules that were rounded last."""

    network: Network
    codes: CodesFile
    progress: Progress
    made: set[str] = field(default_factory=set)

    def carry_out(self, names: Iterable[str]) -> Floats:
        """Round the products with these modules; returns the moments, as `Network.rounded` does."""
        self.made = {*names}
        return self.network.rounded(self.made, self.codes.keep, self.progress)

    def measured(self, ratio: float) -> tuple[Plan, Floats]:
        """The plan by the harm of each product alone and of those that are chosen, which it rounds; and the moments."""
        moments, measured, logits = self.network.measured(self.progress)
        allowance = allowed_for(ratio)
        plan = choose(measured, self.together, allowance - logits)
        return replace(plan, allowance=allowance, logits=logits), moments

    def together(self, plan: Plan) -> float:
        """What a plan costs as a whole; rounds it unless it is part of the last one that was rounded."""
        names = _in_4_bits(self.network, plan)
        if not self.made.issuperset(names):
            self.carry_out(names)
        return self.network.harm_of(names, self.codes.grid)

    def kept(self, known: dict[str, Grid]) -> tuple[Plan, Floats]:
        """The plan with those products in 4 bits of which all weights lie on a grid, which are kept; and the moments.

        Takes the grids from memory.
        """
        plan = Plan(tuple(_choices(self.network, {*known})))
        for name in [*known]:
            self.codes.keep(name, known.pop(name))
        return plan, self.carry_out(())  # rounds nothing


def _in_4_bits(network: Network, plan: Plan) -> list[str]:
    """The names of the modules of products that a plan has in 4 bits."""
    narrow = {one.key for one in plan.products if one.bits == 4}
    every = chain.from_iterable(network.products)
    return [*modules_of(one for one in every if (one.layer, one.name) in narrow)]


def _choices(network: Network, names: set[str]) -> list[Choice]:
    """The choice for each product of a checkpoint: 4 bits if all its modules have these names."""
    products = chain.from_iterable(network.products)
    return [one.choice(4 if one.modules.keys() <= names else 8) for one in products]


def checked_plan(given: Mapping[str, Any], network: Network) -> Plan:
    """A plan as JSON values, for this model; UsageError if it is not one, or has other products."""
    plan = plan_of(given)
    products = _choices(network, set())
    wanted = Counter(one.key for one in products)
    found = Counter(one.key for one in plan.products)
    for wrong, how in ((wanted - found, "missing"), (found - wanted, "one too many")):
        if wrong:
            layer, name = min(wrong)
            raise UsageError(
                f"the plan has {len(plan.products)} products, and the checkpoint {len(products)} in "
                f"{len(network.products)} layers; {name} of layer {layer} is {how}: give the plan of a checkpoint of "
                f"the same shape"
            )
    given_for = {one.key: one for one in plan.products}
    # What else the file tells was measured for another checkpoint, or for other bits.
    return Plan(tuple(replace(given_for[one.key], weights=one.weights) for one in products))


def grids_of(weights: Streamed) -> dict[str, Grid]:
    """Weights of layers that lie on a 4-bit grid already, one scale a row, as after training for 4 bits."""
    found: dict[str, Grid] = {}
    paths = [path for path, _ in weights.model.named_modules() if last_part(path) in NAMES]
    for path in paths:
        name = f"{path}.weight"
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
