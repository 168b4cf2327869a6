"""Caches as a prefill leaves them, kept in a file: what the realistic inputs of a signature with caches read.

The prefill is the reference model's own, run on realistic inputs, one chunk of tokens after the other, up to the
position where the signature begins. Both models that are compared get what came out.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edge_opt.proof import noise
from edge_opt.proof.errors import RuntimeFailed
from edge_opt.proof.inputs import InputPlan, Stored, plan
from edge_opt.proof.loop import Chunk
from edge_opt.proof.protocol import Arrays
from edge_opt.proof.roles import cache_length, caches_of, growing_axis, longest_prefill, new_tokens, part_of
from edge_opt.proof.runner import Runnable, Worker
from edge_opt.proof.tensors import SignatureInfo

_MOST_CALLS = 4  # twice what a comparison itself runs of the prefill, once in each model


@dataclass(slots=True)
class FilledCaches:
    """Fills the caches of one model's signatures, and plans inputs with them; `folder` is where they go.

    `stored` has them by signature, run and name. `reach` is the position up to which those of a signature may be
    filled. `notes` say, for people, what the caches of which signatures hold.
    """

    worker: Worker
    model: Runnable
    described: Mapping[str, SignatureInfo]
    seed: int
    folder: Path
    stored: dict[tuple[str, int, str], Stored] = field(default_factory=dict)
    reach: dict[str, int] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def plan(self, name: str, run: int) -> tuple[InputPlan, ...]:
        """Realistic inputs of one run, filled caches among them, not beyond the position that these reach to."""
        plans = plan(self.described[name], seed=self.seed, run=run)
        reach = self.reach.get(name)
        if reach is not None and any(one.start > reach for one in plans):
            plans = plan(self.described[name], seed=self.seed, run=run, start=reach)
        return tuple(
            replace(one, stored=self.stored.get((name, run, one.info.name))) if one.role == "cache" else one
            for one in plans
        )

    def served(self, names: Iterable[str]) -> tuple[dict[str, list[str]], list[str]]:
        """Signatures by the prefill that fills their caches, and those whose caches none fills."""
        by_filler: dict[str, list[str]] = {}
        without: list[str] = []
        for name in names:
            signature = self.described[name]
            filler = longest_prefill(self.described.values(), signature)
            if not caches_of(signature):
                continue
            if filler is None or not _can_fill(filler):
                without.append(name)
            else:
                by_filler.setdefault(filler.name, []).append(name)
        return by_filler, without

    def fill(self, filler: str, names: Sequence[str], runs: Iterable[int]) -> None:
        """Run one prefill, for each run as far as the signatures need it."""
        prefill, path, listed = self.described[filler], self.folder / "caches", ", ".join(names)
        reach = _MOST_CALLS * new_tokens(prefill)
        counts: list[int] = []
        stored: dict[tuple[str, int, str], Stored] = {}
        try:
            for run in runs:
                counts.append(min(self._needed(names, run), reach))
                filled = self.worker.fill(self.model, prefill, self._chunks(prefill, counts[-1], run))
                for cache, array in keep(filled, path).items():
                    assert isinstance(array, np.memmap)
                    place = Stored(str(path), array.offset, caches_of(prefill)[cache])
                    stored.update({(name, run, cache): place for name in names})
        except RuntimeFailed as error:
            why = f"random, because the prefill that would fill them failed: {error}"
            self.notes.append(f"caches of {listed}: {why}")
            return
        self.stored.update(stored)
        self.reach.update(dict.fromkeys(names, reach))
        tokens = ", ".join(map(str, counts))
        self.notes.append(f"caches of {listed}: filled by {filler} up to position {tokens}")

    def _needed(self, names: Iterable[str], run: int) -> int:
        """The last position at which one of the signatures begins in this run."""
        plans = (one for name in names for one in plan(self.described[name], seed=self.seed, run=run))
        return max((one.start for one in plans), default=0)

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


def keep(arrays: Arrays, path: Path) -> Arrays:
    """The same arrays, mapped from the end of a file that they are written to; they are taken out of `arrays`."""
    kept: Arrays = {}
    with path.open("ab") as file:
        for name in list(arrays):
            array = np.ascontiguousarray(arrays.pop(name))
            place = file.tell()
            file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            kept[name] = np.memmap(path, array.dtype, "r", place, array.shape) if array.size else array
    return kept
