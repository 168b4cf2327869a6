"""Masks of random attention graphs: where they come from, and how they reach the logits."""

from typing import Any

import numpy as np
from attention_cases import Case
from attention_numbers import Numbers
from graph_builder import GraphBuilder

from edge_opt.ir import DType, Tensor


class MaskBuilder:
    """Makes masks for one graph; blocks share what is asked for twice."""

    def __init__(self, case: Case, g: GraphBuilder, numbers: Numbers) -> None:
        self.case = case
        self.g = g
        self.numbers = numbers
        self._made: dict[Any, Tensor] = {}

    def forget(self) -> None:
        """From here on masks are made anew."""
        self._made.clear()

    def apply(self, logits: Tensor, index: int) -> Tensor:
        """The logits, masked in the way of the case; the shape stays."""
        kind = self.case.mask
        if kind.startswith("select"):
            return self._selected(logits, kind)
        mask = self._mask(kind, logits.shape, index)
        operands = (mask, logits) if self.case.mask_first else (logits, mask)
        name = "SUB" if kind == "subtracted" else "ADD"
        return self.g.op(name, *operands, q=self.numbers.q("masked"), **self.numbers.add_options)

    def _mask(self, kind: str, shape: tuple[int, ...], index: int) -> Tensor:
        key = (kind, shape, index if self.case.mask_source == "layers" else 0)
        if key not in self._made:
            self._made[key] = self._make(kind, shape, index)
        return self._made[key]

    def _make(self, kind: str, shape: tuple[int, ...], index: int) -> Tensor:
        if kind == "per head":
            return self._per_head(shape)
        if kind == "slopes":
            return self._slopes(shape)
        size = shape[-1]
        batch = self.case.batch if kind in ("batched", "padding") else 1
        if kind == "rank 2":
            rows = self.case.length if shape[-2] == self.case.length else 1
            return self._source((rows, size), index)
        rows = 1 if kind == "padding" else self.case.length
        return self._fitted(self._source((batch, 1, rows, size), index), shape, kind)

    def _fitted(self, mask: Tensor, shape: tuple[int, ...], kind: str) -> Tensor:
        """`[B|1, 1, T|1, S]` so that it broadcasts to the logits."""
        g, groups = self.g, self.case.groups
        batch, _, rows, size = mask.shape
        if len(shape) == 3:
            if batch == 1:
                return g.reshape(mask, 1, rows, size)
            wide = g.op("BROADCAST_TO", mask, g.integers(batch, self.case.heads, rows, size))
            return g.reshape(wide, batch * self.case.heads, rows, size)
        if len(shape) == 5:
            return g.reshape(mask, batch, 1, 1, rows, size)
        if rows in (1, shape[2]):
            if kind == "broadcast":
                return g.op("BROADCAST_TO", mask, g.integers(*shape))
            if kind == "tile" and shape[1] > 1:
                return g.op("TILE", mask, g.integers(1, shape[1], 1, 1))
            if kind == "concat" and shape[1] > 1:
                return g.op("CONCATENATION", *[mask] * shape[1], axis=1)
            return mask
        if kind == "tile":
            return g.op("TILE", mask, g.integers(1, 1, groups, 1))
        if kind == "broadcast":
            wide = g.op("BROADCAST_TO", mask, g.integers(batch, groups, rows, size))
            return g.reshape(wide, batch, 1, groups * rows, size)
        return g.op("CONCATENATION", *[mask] * groups, axis=2)

    def _per_head(self, shape: tuple[int, ...]) -> Tensor:
        rng = np.random.default_rng(shape)
        own = [1 if axis == 0 else size for axis, size in enumerate(shape)]
        if len(shape) == 3:
            own[0] = shape[0]
        if self.case.mask_first and shape[-2] == self.case.length:
            own[-2] = 1
        return self.numbers.constant(self.g, rng.uniform(-4, 0, own), "mask")

    def _slopes(self, shape: tuple[int, ...]) -> Tensor:
        """Distances times a number for each head."""
        g, numbers = self.g, self.numbers
        heads = (*(shape[:-1] if len(shape) == 3 else (1, *shape[1:-1])), 1)
        slopes = numbers.constant(g, np.linspace(0.1, 0.5, int(np.prod(heads))).reshape(heads), "factor")
        distances = g.input(
            "distances", (*[1] * (len(shape) - 1), shape[-1]), numbers.dtype, numbers.q("mask")
        )
        return g.op("MUL", distances, slopes, q=numbers.q("mask"))

    def _selected(self, logits: Tensor, kind: str) -> Tensor:
        shape = logits.shape
        if kind == "select":
            rows = self.case.length if shape[-2] == self.case.length else 1
            open_shape = (*[1] * (len(shape) - 2), rows, shape[-1])
        else:
            open_shape = shape
        open_ = self.g.input("open", open_shape, DType.BOOL)
        if kind == "select whole":
            low = self.numbers.constant(self.g, np.full(shape, -100.0), "logits")
            return self.g.op("SELECT", open_, logits, low, q=logits.quantization)
        low = self.numbers.constant(self.g, -100.0, "logits")
        return self.g.op("SELECT_V2", open_, logits, low, q=logits.quantization)

    def _source(self, shape: tuple[int, ...], index: int) -> Tensor:
        g, numbers, source = self.g, self.numbers, self.case.mask_source
        if source == "layers" and len(shape) == 4:
            packed_shape = (shape[0], self.case.blocks + 1, *shape[2:])
            packed = self._made.get("packed")
            if packed is None or packed.shape != packed_shape:
                packed = self._made["packed"] = g.input(
                    "masks", packed_shape, numbers.dtype, numbers.q("mask")
                )
            return g.op("SLICE", packed, g.integers(0, index, 0, 0), g.integers(*shape))
        if source == "sum":
            parts = [g.input("mask", shape, numbers.dtype, numbers.q("mask")) for _ in range(2)]
            return g.op("ADD", *parts, q=numbers.q("mask"), **numbers.add_options)
        if source in ("chain", "select", "quantized"):
            return self._computed(shape, source)
        return g.input("mask", shape, numbers.dtype, numbers.q("mask"))

    def _computed(self, shape: tuple[int, ...], source: str) -> Tensor:
        g, numbers = self.g, self.numbers
        open_ = g.input("open", shape, DType.BOOL)
        if source == "select":
            zero, low = numbers.constant(g, 0.0, "mask"), numbers.constant(g, -50.0, "mask")
            return g.op("SELECT_V2", open_, zero, low, q=numbers.q("mask"))
        closed = g.op("CAST", g.op("LOGICAL_NOT", open_), dtype=DType.FLOAT32)
        mask = g.op("MUL", closed, g.constant(-50.0))
        if numbers.is_float:
            return mask
        return g.op("QUANTIZE", mask, dtype=numbers.dtype, q=numbers.q("mask"))
