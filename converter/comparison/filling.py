"""Caches as a prefill leaves them, kept in a file: what the realistic inputs of a signature with caches read.

The prefill is the reference model's own, run on realistic inputs, one chunk of tokens after the other, up to the
position where the signature begins. Both models that are compared get what came out.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from edge_opt.proof import noise
from edge_opt.proof.caches import cache_length, caches_of, growing_axis, longest_prefill, new_tokens, part_of
from edge_opt.proof.errors import RuntimeFailed
from edge_opt.proof.inputs import InputPlan, Stored, plan
from edge_opt.proof.loop import Chunk

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from pathlib import Path

    from edge_opt.proof.protocol import Arrays
    from edge_opt.proof.runner import Runnable, Worker
    from edge_opt.proof.tensors import SignatureInfo

_REPLY_BYTES = 256 << 20
_MOST_CALLS = 4  # twice what a comparison itself runs of the prefill, once in each model


@dataclass(slots=True)
class FilledCaches:
    """Filled caches by prefill signature, run and name; `fillers` has the prefill of each signature that has one.

    `reach` is, for such a signature, the position up to which its caches may be filled. `told` says, for people, what
    the caches of which signatures hold.
    """

    fillers: dict[str, str] = field(default_factory=dict)
    reach: dict[str, int] = field(default_factory=dict)
    stored: dict[tuple[str, int, str], Stored] = field(default_factory=dict)
    told: list[str] = field(default_factory=list)

    def plan(self, signature: SignatureInfo, seed: int, run: int) -> tuple[InputPlan, ...]:
        """Realistic inputs of one run, filled caches among them, not beyond the position that these reach to."""
        made = plan(signature, seed=seed, run=run)
        reach = self.reach.get(signature.name, math.inf)
        if any(one.start > reach for one in made):
            made = plan(signature, seed=seed, run=run, start=int(reach))
        filler = self.fillers.get(signature.name, "")
        return tuple(
            replace(one, stored=self.stored.get((filler, run, one.info.name))) if one.role == "cache" else one
            for one in made
        )


@dataclass(frozen=True, slots=True)
class Filler:
    """Fills the caches of one model; `folder` is where they go."""

    worker: Worker
    model: Runnable
    described: Mapping[str, SignatureInfo]
    seed: int
    folder: Path

    def served(self, names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Signatures by the prefill that fills their caches, and those whose caches none fills."""
        by_filler: dict[str, list[str]] = {}
        without: list[str] = []
        for name in names:
            signature = self.described[name]
            if caches_of(signature):
                filler = longest_prefill(self.described.values(), signature)
                if filler is None or not _can_fill(filler):
                    without.append(name)
                else:
                    by_filler.setdefault(filler.name, []).append(name)
        return by_filler, without

    def fill(self, filler: str, names: Sequence[str], runs: Sequence[int], into: FilledCaches) -> None:
        """Run one prefill, for each run as far as the signatures need it."""
        prefill = self.described[filler]
        reach = _MOST_CALLS * new_tokens(prefill)
        needed = {run: min(self._needed(names, run), reach) for run in runs}
        chunks = {run: self._chunks(prefill, count, run) for run, count in needed.items()}
        size = sum(info.nbytes for info in caches_of(prefill).values())
        batch = max(_REPLY_BYTES // max(size, 1), 1)
        listed = ", ".join(names)
        try:
            for begin in range(0, len(runs), batch):
                these = runs[begin : begin + batch]
                results = self.worker.fill(self.model, prefill, [chunks[run] for run in these])
                for run, arrays in zip(these, results, strict=True):
                    self._keep(prefill, run, arrays, into)
        except RuntimeFailed as error:
            into.told.append(
                f"caches of {listed}: random, because the prefill that would fill them failed: {error}"
            )
            return
        into.fillers.update(dict.fromkeys(names, filler))
        into.reach.update(dict.fromkeys(names, reach))
        tokens = ", ".join(map(str, needed.values()))
        into.told.append(f"caches of {listed}: filled by {filler} up to position {tokens}")

    def _needed(self, names: Iterable[str], run: int) -> int:
        """The last position at which one of the signatures begins in this run."""
        plans = (plan(self.described[name], seed=self.seed, run=run) for name in names)
        return max((made.start for listed in plans for made in listed), default=0)

    def _chunks(self, prefill: SignatureInfo, count: int, run: int) -> tuple[Chunk, ...]:
        """Calls that take `count` tokens or a few more, none of them beyond the end of the cache."""
        step = new_tokens(prefill)
        last = max(cache_length(prefill) - step, 0)
        chunks = []
        for number in range(math.ceil(count / step)):
            start = min(number * step, last)
            seed = noise.seed_of(self.seed, "fill", run, number)
            chunks.append(Chunk(start, plan(prefill, seed=seed, start=start)))
        return tuple(chunks)

    def _keep(self, prefill: SignatureInfo, run: int, arrays: Arrays, into: FilledCaches) -> None:
        path = self.folder / "caches"
        infos = caches_of(prefill)
        with path.open("ab") as file:
            for name in list(arrays):
                array = np.ascontiguousarray(arrays.pop(name))
                into.stored[prefill.name, run, name] = Stored(str(path), file.tell(), infos[name])
                file.write(array.reshape(-1).view(np.uint8).data)


def _can_fill(prefill: SignatureInfo) -> bool:
    """Whether every cache comes out again, whole or as a part whose place is known, and has a fixed shape."""
    outputs = {info.name: info for info in prefill.outputs}
    for name, cache in caches_of(prefill).items():
        part = outputs.get(part_of(name))
        whole = name in outputs and outputs[name].shape == cache.shape
        grows = part is not None and (part.shape == cache.shape or growing_axis(cache, part) is not None)
        if -1 in cache.declared or 0 in cache.shape or not (whole or grows):
            return False
    return new_tokens(prefill) > 1 and all(-1 not in info.declared for info in prefill.inputs)
