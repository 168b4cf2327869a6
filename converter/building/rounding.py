"""Rounds weights of a checkpoint's layers to 4 bits before the export: as many as the quality allows.

    checkpoint -> rotate -> measure each product -> choose -> round layer by layer -> rounded checkpoint, codes, plan

A product's harm is the KL divergence of the next token when it alone is rounded, on text that its rounding did not see.
These divergences add up, so the products with the least harm for their size are chosen, up to an allowance. The share
of a product's output that rounding destroys does not predict the harm: in Qwen2.5-Coder-0.5B, 3 of 96 have 45 % of it.
"""

import importlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_opt.base.errors import UsageError
from edge_opt.base.record import from_dict
from edge_opt.base.words import Progress, many
from edge_opt.building.gptq import ROWS_AT_ONCE, TOP, Floats, Grid, Rounder
from edge_opt.building.logits import KEPT_ROWS
from edge_opt.building.prompts import read_prompts, wording_of
from edge_opt.building.rotation import load, rotate_stream, save
from edge_opt.building.stages import Job

CHECKPOINT, PLAN, _CODES = "checkpoint", "plan.json", "codes.safetensors"
"""Names in the stage's folder: the rounded checkpoint, the choice, and the codes and scales of its rounded weights."""
PRODUCTS = {
    "qkv": ("q_proj", "k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The products of a layer, by the names of their weights; those of one entry read the same input."""
_NAMES = frozenset(name for names in PRODUCTS.values() for name in names)
_LOGITS = "logits_inputs"
_LONGEST = 600  # tokens of a prompt to round for
_MOST_TOKENS = 6000  # more change little: Qwen2.5-Coder-0.5B, 5,177 tokens 1.093, 9,396 tokens 1.090
_LEAST_TOKENS = 4000
_EACH = 4  # one prompt in so many is kept to judge by
_JUDGED = 96  # tokens of a prompt to judge by; all have as many, so that they run as one batch
_MOST_JUDGED = 6  # prompts
_EVERY = 3  # positions whose logits are compared: those of all would cost as much as the layers


@dataclass(frozen=True, slots=True)
class Choice:
    """The bits of one layer's product: `name` as in `PRODUCTS`, `kl` its harm in nats (None if not measured)."""

    layer: int
    name: str
    weights: int
    bits: int
    kl: float | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """The bits of all products, and what was measured: nats that 8-bit weights and the logits' 4 bits cost."""

    products: tuple[Choice, ...]
    allowance: float | None = None
    eight_bits: float | None = None
    logits: float | None = None


@dataclass
class Text:
    """Texts on their way through the layers: `hidden` `[B, T, D]`, and each layer's other arguments."""

    hidden: Any
    arguments: Sequence[Mapping[str, Any]]


def round_weights(job: Job, progress: Progress) -> dict[str, Any]:
    """Run the stage: write the rounded checkpoint, its codes and the plan.

    Raises:
        UsageError: the family's products are unknown, the prompts have too few tokens, or the plan is of another model.
    """
    source = Path(job.inputs["checkpoint"])
    output = Path(job.output)
    torch = importlib.import_module("torch")
    model = load(source)
    check_family(model)
    read, judged = _texts(source, Path(job.inputs["prompts"]))
    notes = []
    with torch.no_grad():
        found = grids_of(model)
        if not found and job.options["rotate"]:
            # Weights round better when no channel stands out, even if activations gain nothing.
            prepared = rotate_stream(model, least_gain=0)
            notes.append(prepared.note)
            if prepared.spoiled:
                model = load(source)
        network = Network(model, read, judged)
        if found:
            unused = "" if job.options["plan"] is None else ", so the plan is not used"
            notes.append(f"The checkpoint's weights lie on a 4-bit grid already{unused}")
            plan = Plan(tuple(_taken(network, found)))
            _, moments = network.rounded(Plan(()), progress)
            grids = found
        else:
            plan = _plan_for(network, job, progress)
            grids, moments = network.rounded(plan, progress)
        harm = network.harm()
    save(model, source, output / CHECKPOINT)
    _write_codes(output / _CODES, model, grids, moments)
    (output / PLAN).write_text(json.dumps(asdict(plan), indent=1), encoding="utf-8")
    return {
        "notes": [
            *filter(None, notes),
            *plan_lines(plan),
            f"KL divergence of the rounded weights: {harm:.3f} nats",
        ]
    }


def _plan_for(network: "Network", job: Job, progress: Progress) -> Plan:
    """The plan that is given, or the one that measuring leads to."""
    given = job.options["plan"]
    if given is not None:
        return checked_plan(given, network)
    return choose(*network.measured(progress), job.options["ratio"])


def check_family(model: Any) -> None:
    """Raise UsageError if a layer has weights that no product in `PRODUCTS` accounts for."""
    try:
        layers = model.model.layers
    except AttributeError:
        raise UsageError(_unknown("its layers")) from None
    for number, layer in enumerate(layers):
        matrices = {
            name.removesuffix(".weight") for name, weight in layer.named_parameters() if weight.dim() > 1
        }
        names = sorted(name.rsplit(".", 1)[-1] for name in matrices)
        if names != sorted(_NAMES):
            other = sorted(set(names) ^ _NAMES) or names
            raise UsageError(_unknown(f"{', '.join(other)} in layer {number}"))


def _unknown(what: str) -> str:
    return (
        f"weights='4' needs layers with the products {', '.join(sorted(_NAMES))}, and this checkpoint differs in "
        f"{what}: use weights='8' or '4-logits'"
    )


def _texts(checkpoint: Path, prompts: Path) -> tuple[list[Any], Any]:
    """Tokens of each text to round for, `[1, T]`, and of those to judge by, `[B, T]`."""
    torch = importlib.import_module("torch")
    wording = wording_of(checkpoint)
    read: list[Any] = []
    judged: list[Any] = []
    for number, prompt in enumerate(read_prompts(prompts)):
        tokens = torch.tensor([list(map(int, wording.tokenizer.tokenize(wording.text(prompt))))])
        is_long = tokens.shape[1] >= _JUDGED
        if number % _EACH == _EACH - 1 and is_long and len(judged) < _MOST_JUDGED:
            judged.append(tokens[:, :_JUDGED])
        elif _tokens(read) < _MOST_TOKENS:
            read.append(tokens[:, :_LONGEST])
    count = _tokens(read)
    if count < _LEAST_TOKENS or not judged:
        raise UsageError(
            f"the prompts have {count} tokens to round weights for, without {many(len(judged), 'prompt')} of "
            f"{_JUDGED} or more tokens to judge by, and weights='4' needs {_LEAST_TOKENS} and one to judge by: give "
            f"more or longer prompts, or use weights='8'"
        )
    return read, torch.cat(judged)


def _tokens(texts: Sequence[Any]) -> int:
    return sum(text.shape[1] for text in texts)


class Network:
    """A model layer by layer, with the texts to round for and those to judge by."""

    def __init__(self, model: Any, read: Sequence[Any], judged: Any) -> None:
        self._torch = importlib.import_module("torch")
        self._model = model
        self.layers = list(model.model.layers)
        self._read = [self._text(tokens) for tokens in read]
        self._judged = self._text(judged)
        self._expected = model(judged).logits[:, ::_EVERY].log_softmax(-1)
        harm = self.harm()
        if not abs(harm) < 1e-4:
            raise UsageError(_unknown("the way it computes its logits"))

    def products(self, layer: int) -> dict[str, dict[str, Any]]:
        """The linear modules of a layer by product, and by the name of their weights in the checkpoint."""
        found: dict[str, dict[str, Any]] = {product: {} for product in PRODUCTS}
        for path, module in self.layers[layer].named_modules():
            for product, names in PRODUCTS.items():
                if path.rsplit(".", 1)[-1] in names:
                    found[product][f"model.layers.{layer}.{path}"] = module
        return found

    def harm(self, start: int = 0, text: Text | None = None) -> float:
        """The mean KL divergence from the original's next token, in nats, of texts that have reached a layer."""
        reached = self._judged if text is None else text
        hidden = reached.hidden
        for number in range(start, len(self.layers)):
            hidden = self._step(number, hidden, reached)
        states = self._model.model.norm(hidden)[:, ::_EVERY]
        return self._divergence(self._model.lm_head(states))

    def _divergence(self, logits: Any) -> float:
        found = logits.log_softmax(-1)
        return float((self._expected.exp() * (self._expected - found)).sum(-1).mean())

    def measured(self, progress: Progress) -> tuple[list[Choice], float, float]:
        """The harm of each product alone at 4 bits, that of all of them at 8, and that of the logits at 4."""
        choices: list[Choice] = []
        read = self._started(self._read)
        judged = self._started([self._judged])
        eight = self._started([self._judged])
        for layer in range(len(self.layers)):
            progress("measuring", layer, len(self.layers))
            moments = self._advance(layer, read)
            products = self.products(layer)
            for product, modules in products.items():
                rounder = Rounder(moments[product])
                rounded = {name: _rounded(rounder, module.weight) for name, module in modules.items()}
                with self._instead(modules, {name: grid.values() for name, grid in rounded.items()}):
                    harm = self.harm(layer, judged[0])
                count = sum(module.weight.numel() for module in modules.values())
                choices.append(Choice(layer, product, count, 8, max(harm, 0.0)))
            every = {name: module for modules in products.values() for name, module in modules.items()}
            with self._instead(every, {name: _at_8_bits(module.weight) for name, module in every.items()}):
                self._move(layer, eight)
            self._move(layer, judged)
        return choices, self.harm(len(self.layers), eight[0]), self._logits_harm(read, judged[0])

    def rounded(self, plan: Plan, progress: Progress) -> tuple[dict[str, Grid], Floats]:
        """Round the chosen weights in place, each layer for the inputs that the rounded ones before it give.

        Returns the grids by name, and the sum of `x x'` over inputs x of the logits' product.
        """
        chosen = {(one.layer, one.name) for one in plan.products if one.bits == 4}
        grids: dict[str, Grid] = {}
        read = self._started(self._read)
        for layer in range(len(self.layers)):
            progress("rounding", layer, len(self.layers))
            before = self._started(read)
            moments = self._advance(layer, read)
            products = [
                (name, modules) for name, modules in self.products(layer).items() if (layer, name) in chosen
            ]
            for product, modules in products:
                rounder = Rounder(moments[product])
                for name, module in modules.items():
                    grids[name] = _rounded(rounder, module.weight)
                    module.weight.copy_(self._torch.from_numpy(grids[name].values()))
            if products:
                read = before
                self._move(layer, read)
        return grids, self._normed_moments(read)

    def _normed_moments(self, texts: Sequence[Text]) -> Floats:
        total: Any = 0
        for text in texts:
            states = self._model.model.norm(text.hidden)[0]
            total = total + states.T @ states
        return np.asarray(total.numpy(), np.float32)

    def _logits_harm(self, read: Sequence[Text], judged: Text) -> float:
        """The harm of 4-bit logits, as the stage `narrow` makes them, by blocks of rows."""
        head = self._model.lm_head.weight
        if len(head) <= KEPT_ROWS:
            return 0.0
        rounder = Rounder(self._normed_moments(read))
        states = self._model.model.norm(judged.hidden)[:, ::_EVERY]
        logits = [states @ head[:KEPT_ROWS].T]
        for start in range(KEPT_ROWS, len(head), ROWS_AT_ONCE):
            rounded = _rounded(rounder, head[start : start + ROWS_AT_ONCE]).values()
            logits.append(states @ self._torch.from_numpy(rounded).T)
        return self._divergence(self._torch.cat(logits, -1))

    def _text(self, tokens: Any) -> Text:
        """A text in front of the first layer, with what the model gives to each layer; no layer runs for it."""
        hidden: list[Any] = []
        arguments: list[Mapping[str, Any]] = []

        def note(given: Any, *_: Any, **named: Any) -> Any:
            hidden.append(given)
            arguments.append(named)
            return given

        for layer in self.layers:
            layer.forward = note
        try:
            self._model.model(tokens, use_cache=False)
        finally:
            for layer in self.layers:
                del layer.forward
        return Text(hidden[0], arguments)

    def _started(self, texts: Sequence[Text]) -> list[Text]:
        return [Text(text.hidden, text.arguments) for text in texts]

    def _step(self, layer: int, hidden: Any, text: Text) -> Any:
        made = self.layers[layer](hidden, **text.arguments[layer])
        return made[0] if isinstance(made, tuple) else made

    def _move(self, layer: int, texts: Sequence[Text]) -> None:
        """Move texts behind a layer."""
        for text in texts:
            text.hidden = self._step(layer, text.hidden, text)

    def _advance(self, layer: int, texts: Sequence[Text]) -> dict[str, Floats]:
        """Move texts behind a layer; the sum of `x x'` over inputs x, by product."""
        moments: dict[str, Any] = dict.fromkeys(PRODUCTS, 0)

        def add(product: str, given: tuple[Any, ...]) -> None:
            states = given[0].reshape(-1, given[0].shape[-1])
            if product == "down":
                states = _without_outliers(states)
            moments[product] = moments[product] + states.T @ states

        hooks = []
        for product, modules in self.products(layer).items():
            reader = next(iter(modules.values()))
            hooks.append(
                reader.register_forward_pre_hook(lambda _, given, product=product: add(product, given))
            )
        self._move(layer, texts)
        for hook in hooks:
            hook.remove()
        return {product: np.asarray(total.numpy(), np.float32) for product, total in moments.items()}

    @contextmanager
    def _instead(self, modules: Mapping[str, Any], weights: Mapping[str, Floats]) -> Iterator[None]:
        """Other weights for the duration."""
        kept = {name: module.weight.data for name, module in modules.items()}
        for name, module in modules.items():
            module.weight.data = self._torch.from_numpy(weights[name])
        try:
            yield
        finally:
            for name, module in modules.items():
                module.weight.data = kept[name]


def _without_outliers(states: Any) -> Any:
    """The inputs of `down` without the first token, whose massive activations swamp the others, and none far longer.

    With all of it, 4 bits in `down` alone make Qwen2.5-Coder-0.5B's perplexity 1.79 times as large, so 1.05 times.
    """
    states = states[1:]
    length = states.norm(dim=1, keepdim=True)
    return states * (2 * length.median() / length.clamp(min=1e-9)).clamp(max=1)


def _rounded(rounder: Rounder, weight: Any) -> Grid:
    rows = np.asarray(weight.detach().numpy(), np.float32)
    blocks = [rounder.rounded(rows[at : at + ROWS_AT_ONCE]) for at in range(0, len(rows), ROWS_AT_ONCE)]
    return Grid(np.concatenate([one.codes for one in blocks]), np.concatenate([one.scales for one in blocks]))


def _at_8_bits(weight: Any) -> Floats:
    """Weights as the exporter quantizes them: one scale a row, the largest code 127."""
    rows = np.asarray(weight.detach().numpy(), np.float32)
    scales = np.maximum(np.abs(rows).max(axis=1, keepdims=True), np.float32(1e-9)) / 127
    return np.asarray(np.rint(rows / scales) * scales, np.float32)


def choose(measured: Sequence[Choice], eight_bits: float, logits: float, ratio: float) -> Plan:
    """The products with the least harm for their size at 4 bits, up to what 8 bits and the logits leave of a ratio."""
    allowance = math.log(ratio)
    left = allowance - eight_bits - logits
    narrow: set[Choice] = set()
    for choice in sorted(measured, key=lambda one: (one.kl or 0.0) / one.weights):
        harm = choice.kl or 0.0
        if harm <= left:
            left -= harm
            narrow.add(choice)
    products = (
        Choice(one.layer, one.name, one.weights, 4 if one in narrow else 8, one.kl) for one in measured
    )
    return Plan(tuple(products), allowance, eight_bits, logits)


def checked_plan(given: Mapping[str, Any], network: Network) -> Plan:
    """A plan as JSON values, for this model; UsageError if it has other products or other bits than 4 and 8."""
    plan = from_dict(Plan, given)
    counts = {
        (layer, name): sum(module.weight.numel() for module in modules.values())
        for layer in range(len(network.layers))
        for name, modules in network.products(layer).items()
    }
    found = [(one.layer, one.name) for one in plan.products]
    if sorted(found) != sorted(counts):
        raise UsageError(
            f"the plan has {len(found)} products, and the checkpoint {len(counts)} in {len(network.layers)} layers: "
            f"give the plan of a checkpoint of the same shape"
        )
    for one in plan.products:
        if one.bits not in (4, 8):
            raise UsageError(f"the plan has {one.bits} bits for {one.name} of layer {one.layer}: give 4 or 8")
    products = (replace(one, weights=counts[one.layer, one.name]) for one in plan.products)
    return replace(plan, products=tuple(products))


def grids_of(model: Any) -> dict[str, Grid]:
    """Weights of layers that lie on a 4-bit grid already, one scale a row, as after training for 4 bits."""
    found: dict[str, Grid] = {}
    modules = dict(model.named_modules())
    paths = [path for path in modules if path.rsplit(".", 1)[-1] in _NAMES]
    for path in paths:
        rows = np.asarray(modules[path].weight.detach().numpy(), np.float32)
        grid = _on_grid(rows[:8]) and _on_grid(rows)
        if grid is not None:
            found[path] = grid
    if 2 * len(found) < len(paths):
        return {}  # a few products of zeros, maybe
    for path, grid in found.items():
        modules[path].weight.copy_(importlib.import_module("torch").from_numpy(grid.values()))
    return found


def _on_grid(rows: Floats) -> Grid | None:
    """The codes and scales of rows that are multiples of a scale, up to bfloat16's rounding; None if they are not."""
    largest = np.abs(rows).max(axis=1, keepdims=True)
    scales = np.where(largest[:, 0] > 0, np.float32(0), np.float32(1))
    for most in range(TOP, 0, -1):
        scale = np.where(largest > 0, largest, np.float32(1)) / np.float32(most)
        codes = rows / scale
        fits = (np.abs(codes - np.rint(codes)) < 0.02).all(axis=1)
        fits &= largest[:, 0] > 0
        scales[fits] = scale[fits, 0]
    if not scales.all():
        return None
    return Grid(np.rint(rows / scales[:, None]).astype(np.int8), scales)


def _taken(network: Network, grids: Mapping[str, Grid]) -> Iterator[Choice]:
    """The bits of a checkpoint's products, some of which lie on a 4-bit grid."""
    for layer in range(len(network.layers)):
        for product, modules in network.products(layer).items():
            count = sum(module.weight.numel() for module in modules.values())
            yield Choice(layer, product, count, 4 if set(modules) <= set(grids) else 8)


def plan_lines(plan: Plan) -> list[str]:
    """Notes for the user: how many weights are in 4 bits, and which products stay at 8."""
    kept = sorted((one for one in plan.products if one.bits == 8), key=lambda one: -(one.kl or 0.0))
    share = sum(one.weights for one in plan.products if one.bits == 4) / sum(
        one.weights for one in plan.products
    )
    narrow = len(plan.products) - len(kept)
    lines = [
        f"{narrow} of {many(len(plan.products), 'product')} of the layers, {share:.0%} of their weights, are in 4 bits"
    ]
    if kept:
        named = [
            f"{one.name} of layer {one.layer}" + ("" if one.kl is None else f" ({one.kl:.4f})")
            for one in kept[:6]
        ]
        more = f" and {len(kept) - len(named)} more" if len(kept) > len(named) else ""
        lines.append(f"At 8 bits, for the KL divergence that 4 would cost: {', '.join(named)}{more}")
    return lines


def _write_codes(path: Path, model: Any, grids: Mapping[str, Grid], moments: Floats) -> None:
    arrays: dict[str, Any] = {_LOGITS: moments}
    for name, grid in grids.items():
        arrays[f"{name}.codes"] = grid.codes
        arrays[f"{name}.scales"] = grid.scales
        bias = model.get_submodule(name).bias
        if bias is not None:
            arrays[f"{name}.bias"] = np.asarray(bias.detach().numpy(), np.float32)
    importlib.import_module("safetensors.numpy").save_file(arrays, path)


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
    arrays = importlib.import_module("safetensors.numpy").load_file(folder / _CODES)
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
