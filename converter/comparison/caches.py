"""Fill realistic caches for a comparison: the reference model's prefill computes them for both models.

Prefill runs on realistic inputs, chunk by chunk, up to the position where a signature begins.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from edge_opt.runtime import noise
from edge_opt.runtime.inputs import InputPlan, Stored, plan
from edge_opt.runtime.protocol import Arrays, RuntimeFailed
from edge_opt.runtime.runner import Worker
from edge_opt.runtime.tensors import (
    SignatureInfo,
    cache_length,
    caches_of,
    growing_axis,
    longest_prefill,
    new_tokens,
    part_of,
)

_MOST_CALLS = 4  # twice the prefill calls of the comparison itself (one in each model)


@dataclass(slots=True)
class FilledCaches:
    """Fills the caches of one model's signatures and plans inputs with them; arrays are stored in `folder`.

    `filled` has the position up to which a signature's caches are filled, `stored` the caches by signature and name.
    `notes` describe the content of each signature's caches.
    """

    worker: Worker
    model: Path
    described: Mapping[str, SignatureInfo]
    seed: int
    folder: Path
    filled: dict[str, int] = field(default_factory=dict)
    stored: dict[tuple[str, str], Stored] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def plan(self, name: str, run: int = 0) -> list[InputPlan]:
        """Plan realistic inputs of one run with the filled caches, starting within their filled positions."""
        plans = plan(self.described[name], seed=self.seed, run=run)
        reach = self.filled.get(name)
        if reach is not None and any(one.start > reach for one in plans):
            plans = plan(self.described[name], seed=self.seed, run=run, start=reach)
        return [
            replace(one, stored=self.stored.get((name, one.info.name))) if one.role == "cache" else one
            for one in plans
        ]

    def fill(self, names: Iterable[str]) -> None:
        """Fill the caches that these signatures read, each with the longest prefill that has them."""
        served = defaultdict[str, list[str]](list)
        for name in (name for name in names if caches_of(self.described[name])):
            prefill = longest_prefill(self.described.values(), self.described[name])
            served[prefill.name if prefill is not None and can_fill(prefill) else ""].append(name)
        for filler, listed in sorted(served.items(), reverse=True):
            how = "random, because no prefill signature of a fills them"
            try:
                how = self._fill(self.described[filler], listed) if filler else how
            except RuntimeFailed as error:
                how = f"random, because the prefill that would fill them failed: {error}"
            self.notes.append(f"caches of {', '.join(listed)}: {how}")

    def _fill(self, prefill: SignatureInfo, names: Sequence[str]) -> str:
        """Run one prefill, chunk by chunk, as far as the signatures need it and the cache has room."""
        step, last = new_tokens(prefill), max(cache_length(prefill) - new_tokens(prefill), 0)
        starts = (one.start for name in names for one in plan(self.described[name], seed=self.seed))
        count = min(max(starts, default=0), _MOST_CALLS * step)
        chunks = [
            (min(begin, last), noise.seed_of(self.seed, "fill", begin)) for begin in range(0, count, step)
        ]
        file = self.folder / "caches"
        for cache, array in keep(self.worker.fill(self.model, prefill, chunks), file).items():
            assert isinstance(array, np.memmap)
            place = Stored(str(file), array.offset, caches_of(prefill)[cache])
            self.stored.update({(name, cache): place for name in names})
        self.filled.update(dict.fromkeys(names, count))
        return f"filled by {prefill.name} up to position {count}"


def can_fill(prefill: SignatureInfo) -> bool:
    """True if every cache has a fixed shape and is also an output: whole, or as a part with a known position."""
    outputs = {info.name: info for info in prefill.outputs}
    for name, cache in caches_of(prefill).items():
        part = outputs.get(part_of(name))
        whole = name in outputs and outputs[name].shape == cache.shape
        grows = part is not None and (part.shape == cache.shape or growing_axis(cache, part) is not None)
        if -1 in cache.declared or 0 in cache.shape or not (whole or grows):
            return False
    return new_tokens(prefill) > 1 and all(-1 not in info.declared for info in prefill.inputs)


def keep(arrays: Arrays, path: Path) -> Arrays:
    """Move arrays out of `arrays` to the end of a file, and return them memory-mapped."""
    kept: Arrays = {}
    with path.open("ab") as file:
        for name in list(arrays):
            array = np.ascontiguousarray(arrays.pop(name))
            place = file.tell()
            file.write(array.reshape(-1).view(np.uint8).data)
            file.flush()
            kept[name] = np.memmap(path, array.dtype, "r", place, array.shape) if array.size else array
    return kept
