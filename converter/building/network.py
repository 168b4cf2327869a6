"""Runs a language model layer by layer, rounds the weights of its layers, and measures the harm.

Needs torch and transformers; runs in the process of a stage.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np

from edge_opt.base.errors import UsageError
from edge_opt.base.words import Progress
from edge_opt.building.checkpoint import Streamed
from edge_opt.building.gptq import (
    LEAST_ROW,
    ROWS_AT_ONCE,
    Floats,
    Grid,
    Moments,
    Rounder,
    damping_for,
)
from edge_opt.building.logits import KEPT_ROWS
from edge_opt.building.plan import Choice

PRODUCTS = {
    "q": ("q_proj",),
    "kv": ("k_proj", "v_proj"),
    "o": ("o_proj",),
    "gate_up": ("gate_proj", "up_proj"),
    "down": ("down_proj",),
}
"""The products of a layer, by the names of their weights; those of one entry read the same input."""
NAMES = frozenset(chain.from_iterable(PRODUCTS.values()))
"""The last part of the name of each matrix of weights in a layer."""
ALONE = 96
"""Tokens of a prompt to judge each product by; all have as many, so that they run as one batch.

They only rank the products. SmolLM2-135M takes two thirds of the time of 160 tokens; the ranks correlate by 0.96.
"""
# In long texts, one position in so many is compared: the logits of all would cost as much as the layers.
_EVERY = 2


class Product(NamedTuple):
    """One product of a layer, `name` as in `PRODUCTS`, and its linear modules by their names in the checkpoint."""

    layer: int
    name: str
    modules: dict[str, Any]

    def choice(self, bits: int, harm: float | None = None) -> Choice:
        """The product with so many bits."""
        weights = sum(module.weight.numel() for module in self.modules.values())
        return Choice(self.layer, self.name, weights, bits, harm)


@dataclass
class Batch:
    """Texts of one length on their way through the layers: `hidden` `[B, T, D]`, and each layer's other arguments.

    `expected` `[B, positions, vocabulary]`, of those to judge by: the logarithms of the original's probabilities, at
    one position in `every`.
    """

    hidden: Any
    arguments: Sequence[Mapping[str, Any]]
    every: int = 1
    expected: Any = None

    @property
    def compared(self) -> slice:
        """The positions to judge by.

        In the second half, as `evaluate` scores: the first positions are a template, and no answer stands there.
        """
        return slice(self.hidden.shape[1] // 2, None, self.every)


def check_family(model: Any) -> None:
    """Raise UsageError if a layer has weights that no product in `PRODUCTS` accounts for."""
    try:
        layers = model.model.layers
    except AttributeError:
        raise UsageError(_unknown("its layers")) from None
    for number, layer in enumerate(layers):
        names = [
            last_part(name.removesuffix(".weight"))
            for name, weight in layer.named_parameters()
            if weight.dim() > 1
        ]
        if sorted(names) != sorted(NAMES):
            other = sorted(set(names) ^ NAMES) or sorted(names)
            raise UsageError(_unknown(f"{', '.join(other)} in layer {number}"))


def _unknown(what: str) -> str:
    return (
        f"weights='4' needs layers with the products {', '.join(sorted(NAMES))}, and this checkpoint differs in "
        f"{what}: use weights='8' or '4-logits'"
    )


def last_part(name: str) -> str:
    """`q_proj` of `model.layers.0.self_attn.q_proj`."""
    return name.rpartition(".")[2]


class Network:
    """A model layer by layer.

        tokens [B,T] -> embed_tokens -> hidden [B,T,D] -> layer 0 -> .. -> norm -> states -> lm_head -> logits

    A `Batch` holds `hidden` in front of a layer. Methods move lists of them behind one layer after the other, whose
    weights are in memory only meanwhile.

    Args:
        weights: its checkpoint.
        read: tokens of each text to round for, `[1, T]`.
        judged: tokens of each text to judge all products by, `[1, T]`, with T at least `ALONE`. The first tokens of all
            texts judge each product alone, which takes a pass of its own.
    """

    def __init__(self, weights: Streamed, read: Sequence[Any], judged: Sequence[Any]) -> None:
        import torch

        model = weights.model
        self._filled = weights.filled
        self._model = model
        self._layers = list(model.model.layers)
        self.products = [_products(number, layer) for number, layer in enumerate(self._layers)]
        """The products of each layer."""
        with self._filled(model.model.embed_tokens):
            self._read = [self._batch(tokens) for tokens in read]
            alone = torch.cat([tokens[:, :ALONE] for tokens in judged])
            self._alone = self._batch(alone)
            self._together = [replace(self._batch(tokens), every=_EVERY) for tokens in judged]
        before = [self._alone, *self._together]
        moved = [*before]
        for number, layer in enumerate(self._layers):
            with self._filled(layer):
                self._move(number, moved)
        with self._filled(model.lm_head):
            for text, behind in zip(before, moved, strict=True):
                text.expected = self._predicted(behind)
        # Layer by layer, it must compute what the model as a whole does.
        by_model = model(alone[:1]).logits[:, self._alone.compared]
        if not abs(_divergence(self._alone.expected[:1], by_model)) < 1e-4:
            raise UsageError(_unknown("the way it computes its logits"))

    def _states(self, text: Batch) -> Any:
        """What the logits' product reads, of a text behind the last layer."""
        return self._model.model.norm(text.hidden)[:, text.compared]

    def _predicted(self, text: Batch) -> Any:
        return self._model.lm_head(self._states(text)).log_softmax(-1)

    def _harm(self, text: Batch) -> float:
        """The mean KL divergence from the original's next token, in nats, of a text behind the last layer."""
        return _divergence(text.expected, self._predicted(text))

    def measured(self, progress: Progress) -> tuple[Floats, list[Choice], float]:
        """What rounding costs, each product alone for its inputs in the original model.

        Every layer is read from disk once, for all texts that pass it:

            those to judge by, as they are       -> layer            -> behind it, as they are
            a copy of them for each product p    -> layer, p rounded -> changed by p
            those changed in layers before       -> layer            -> behind it, changed

        Returns:
            The sum of `x x'` over inputs x of the original model's logits product, each product's harm at 4 bits, and
            that of the logits.
        """
        changed: list[Batch] = []
        read = [*self._read]
        judged = [self._alone, *self._together]
        for layer, products in enumerate(self.products):
            progress("measuring", layer, len(self.products))
            with self._filled(self._layers[layer]):
                # Those that products of earlier layers changed.
                self._move(layer, changed)
                inputs = self._advance(layer, read, products)
                for product in products:
                    grids = _rounded(product, inputs.pop(product.name))
                    alone = judged[:1]
                    with self._holding(layer, grids):
                        self._move(layer, alone)
                    changed += alone
                self._move(layer, judged)
        moments = self._normed_moments(read)
        with self._filled(self._model.lm_head):
            found: list[Choice] = []
            every = chain.from_iterable(self.products)
            for product, text in zip(every, changed, strict=True):
                found.append(product.choice(8, max(self._harm(text), 0.0)))
            return moments, found, self._logits_harm(Rounder(moments), judged[1:])

    def rounded(
        self,
        names: set[str],
        keep: Callable[[str, Grid], None],
        progress: Progress,
    ) -> Floats:
        """Round products in their order, each for the inputs that those before it, rounded, give.

        Its results there should be the original's on the original's inputs, so it also makes up for what was lost
        before it (Li et al. 2025, https://arxiv.org/abs/2504.02692). SmolLM2-135M, all products in 4 bits, on the
        prompts to judge by: 0.063 nats; 0.102 with these inputs alone, 0.104 with the original's.

        Args:
            names: those of the products' modules.
            keep: gets each of them with its grid.
            progress: called with (stage, done, total).

        Returns:
            The sum of `x x'` over inputs x of the original model's logits product.
        """
        read = [*self._read]
        changed: list[Batch] = []
        for layer, products in enumerate(self.products):
            progress("rounding", layer, len(self.products))
            chosen = [one for one in products if one.modules.keys() <= names]
            if chosen and not changed:
                # Before this layer, nothing is rounded.
                changed = [*read]
            with self._filled(self._layers[layer]), ExitStack() as recalled:
                inputs = self._advance(layer, read, chosen)
                if not changed:
                    continue
                for product in products:
                    now = self._inputs(layer, changed, product)
                    grids: dict[str, Grid] = {}
                    if product in chosen:
                        grids = _rounded(product, inputs.pop(product.name), _joined(now))
                    # Until the layer is done, the product's results are replayed: with weights as they are now.
                    with self._holding(layer, grids):
                        recalled.enter_context(_recalled(product, now))
                    for name, grid in grids.items():
                        keep(name, grid)
                self._move(layer, changed)
        return self._normed_moments(read)

    def harm_of(self, names: Container[str], grid: Callable[[str], Grid]) -> float:
        """The harm of all weights of layers together: those of some modules as rounded, the others at 8 bits."""
        texts = [*self._together]
        for layer in range(len(self._layers)):
            grids: dict[str, Grid] = {}
            with self._filled(self._layers[layer]):
                for name, module in modules_of(self.products[layer]).items():
                    grids[name] = grid(name) if name in names else _at_8_bits(module)
                with self._holding(layer, grids):
                    self._move(layer, texts)
        with self._filled(self._model.lm_head):
            return fmean(map(self._harm, texts))

    def _normed_moments(self, texts: Sequence[Batch]) -> Floats:
        total = Moments()
        for text in texts:
            total.add(self._model.model.norm(text.hidden)[0].numpy())
        return total.whole()

    def _logits_harm(self, rounder: Rounder, texts: Sequence[Batch]) -> float:
        """The harm of 4-bit logits, as the stage `narrow` makes them, by blocks of rows."""
        head = self._model.lm_head.weight
        if len(head) <= KEPT_ROWS:
            return 0.0
        import torch

        states = [self._states(text) for text in texts]
        logits = [[one @ head[:KEPT_ROWS].T] for one in states]
        for block in head[KEPT_ROWS:].split(ROWS_AT_ONCE):
            rounded = rounder.rounded(np.asarray(block.detach().numpy(), np.float32))
            columns = torch.from_numpy(rounded.values()).T
            for one, parts in zip(states, logits, strict=True):
                parts.append(one @ columns)
        harms: list[float] = []
        for text, parts in zip(texts, logits, strict=True):
            harms.append(_divergence(text.expected, torch.cat(parts, -1)))
        return fmean(harms)

    def _batch(self, tokens: Any) -> Batch:
        """A text in front of the first layer, with what the model gives to each layer; no layer runs for it."""
        hidden: list[Any] = []
        arguments: list[Mapping[str, Any]] = []

        def note(given: Any, *_: Any, **named: Any) -> Any:
            hidden.append(given)
            arguments.append(named)
            return given

        for layer in self._layers:
            layer.forward = note
        try:
            self._model.model(tokens, use_cache=False)
        finally:
            for layer in self._layers:
                del layer.forward
        return Batch(hidden[0], arguments)

    def _move(self, layer: int, texts: list[Batch]) -> None:
        """Replace texts by those behind a layer."""
        for place, text in enumerate(texts):
            made = self._layers[layer](text.hidden, **text.arguments[layer])
            hidden = made[0] if isinstance(made, tuple) else made
            texts[place] = replace(text, hidden=hidden)

    def _advance(
        self, layer: int, texts: list[Batch], products: Iterable[Product]
    ) -> dict[str, Any]:
        """Move texts behind a layer; the inputs `[count, columns]` of its products, by their names."""
        with _noted(products) as noted:
            self._move(layer, texts)
        return {name: _joined(inputs) for name, inputs in noted.items()}

    def _inputs(self, layer: int, texts: Iterable[Batch], product: Product) -> list[Any]:
        """The inputs of one product, by text; texts stay in front of the layer, which runs up to it."""
        with _noted([product], stops=True) as noted:
            for text in texts:
                with suppress(_ReachedError):
                    self._layers[layer](text.hidden, **text.arguments[layer])
        return noted[product.name]

    @contextmanager
    def _holding(self, layer: int, grids: Mapping[str, Grid]) -> Iterator[None]:
        """A layer has other weights for the duration, by the names of its modules."""
        import torch

        modules = modules_of(self.products[layer])
        kept = {name: modules[name].weight for name in grids}
        for name, grid in grids.items():
            values = torch.from_numpy(grid.values())
            modules[name].weight = torch.nn.Parameter(values, requires_grad=False)
        try:
            yield
        finally:
            for name, weight in kept.items():
                modules[name].weight = weight


def modules_of(products: Iterable[Product]) -> dict[str, Any]:
    """The linear modules of products by their names in the checkpoint."""
    modules: dict[str, Any] = {}
    for product in products:
        modules |= product.modules
    return modules


def _products(number: int, layer: Any) -> list[Product]:
    modules = dict(layer.named_modules())
    products = []
    for product, names in PRODUCTS.items():
        paths = [path for path in modules if last_part(path) in names]
        by_name = {f"model.layers.{number}.{path}": modules[path] for path in paths}
        products.append(Product(number, product, by_name))
    return products


def _divergence(expected: Any, logits: Any) -> float:
    """The mean KL divergence, in nats, from distributions whose logarithms are expected."""
    found = logits.log_softmax(-1)
    return float((expected.exp() * (expected - found)).sum(-1).mean())


def rows_of(module: Any) -> Floats:
    """The weights of a linear module, `[rows, columns]`."""
    return np.asarray(module.weight.detach().numpy(), np.float32)


@contextmanager
def by_onednn() -> Iterator[None]:
    """Linear modules multiply by oneDNN for the duration, if torch has it.

    Torch takes Intel's MKL for float32, which reaches half of oneDNN's speed on a processor of AMD (Zen 5). A weight
    must not be changed in place meanwhile; its module may get another one.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    linear = torch.nn.functional.linear

    def multiplied(inputs: Any, weight: Any, bias: Any = None) -> Any:
        # Weights keep their converted copy, which takes as long as a product with few inputs.
        if not hasattr(weight, "by_onednn"):
            weight.by_onednn = weight.to_mkldnn()
        added = None if bias is None else bias.to_mkldnn()
        return linear(inputs.contiguous().to_mkldnn(), weight.by_onednn, added).to_dense()

    class OneDnn(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            called = multiplied if func is linear else func
            return called(*args, **(kwargs or {}))

    if not torch.backends.mkldnn.is_available():
        yield
        return
    with OneDnn():
        yield


class _ReachedError(Exception):
    """The product whose inputs are wanted; what is behind it in the layer need not run."""


@contextmanager
def _noted(products: Iterable[Product], *, stops: bool = False) -> Iterator[dict[str, list[Any]]]:
    """The inputs of products by their names, `[1, T, columns]` for each text that passes for the duration."""
    noted: dict[str, list[Any]] = {}

    def note(name: str, _: Any, given: tuple[Any, ...]) -> None:
        noted[name].append(given[0])
        if stops:
            raise _ReachedError

    hooks = []
    for product in products:
        noted[product.name] = []
        reader = next(iter(product.modules.values()))
        hooks.append(reader.register_forward_pre_hook(partial(note, product.name)))
    try:
        yield noted
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _recalled(product: Product, inputs: Sequence[Any]) -> Iterator[None]:
    """A product's modules replay what they make of these inputs now, instead of computing it again.

    `inputs` has one for each text. All texts must pass each time, in the same order.
    """
    computed = {module: module.forward for module in product.modules.values()}
    for module in computed:
        results = cycle([module(one) for one in inputs])
        module.forward = partial(_next_of, results)
    try:
        yield
    finally:
        for module, forward in computed.items():
            module.forward = forward


def _next_of(results: Iterator[Any], _: Any) -> Any:
    return next(results)


def _joined(inputs: Sequence[Any]) -> Any:
    import torch

    return torch.cat([one.reshape(-1, one.shape[-1]) for one in inputs])


def _rounded(product: Product, inputs: Any, now: Any = None) -> dict[str, Grid]:
    """The weights of a product's modules in 4 bits, by name, for inputs `[count, columns]`.

    With `now`, the inputs that rounded products before it give: for these, and so that results are nearer to those
    of `inputs`.
    """
    import torch

    counts = _limits(inputs) if product.name == "down" else 1
    read = (inputs if now is None else now) * counts
    moments = Moments()
    moments.add(read.numpy())
    rounder = Rounder(moments.whole(), damping_for(read.shape[1], len(read)))
    lacking = None if now is None else (inputs - now) * counts
    grids: dict[str, Grid] = {}
    for name, module in product.modules.items():
        lost = None
        if lacking is not None:
            # In the order that takes the fewest steps, which differs between products.
            lost = torch.linalg.multi_dot([module.weight, lacking.T, read]).numpy()
        grids[name] = rounder.rounded(rows_of(module), lost)
    return grids


def _limits(states: Any) -> Any:
    """Factors `[count, 1]` for the inputs of `down`: massive activations of one token would swamp all others.

    They stay among them: without the first token, 4 bits in `down` of Qwen2.5-Coder-0.5B's layers 0 and 2 alone cost
    0.020 and 0.025 nats instead of 0.001 and 0.003. With their whole length, layer 3 costs 0.25 instead of 0.15.
    """
    length = states.norm(dim=1, keepdim=True)
    return (2 * length.median() / length.clamp(min=1e-9)).clamp(max=1)


def _at_8_bits(module: Any) -> Grid:
    """The weights of a linear module as the exporter quantizes them: one scale a row, the largest code 127."""
    rows = rows_of(module)
    scales = np.maximum(np.abs(rows).max(axis=1), LEAST_ROW) / 127
    codes = np.rint(rows / scales[:, None])
    return Grid(codes.astype(np.int8), np.asarray(scales, np.float32))
