"""What a compiler says of a model, as data, and how that ranks. Runs nothing and prints nothing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from edge_opt.base.record import Record
from edge_opt.ir import DType, Subgraph, Tensor

ITSELF_SINCE = "0.11"
"""The first release of LiteRT-LM that makes masks and updates caches itself (seen in its wheels)."""
_BY_RUNTIME = f"LiteRT-LM itself (before {ITSELF_SINCE}: the model)"
RUNS = {
    "embedder": "CPU",
    "rope": "CPU",
    "masks": _BY_RUNTIME,
    "decoder": "NPU",
    "cache update": _BY_RUNTIME,
}
"""The parts of a step in their order, and where each runs on a phone."""
NOTE = (
    "The decoder runs on the NPU. The other times are what the parts would take there: embedder and rope run on the "
    f"CPU, and LiteRT-LM makes masks and updates caches itself since {ITSELF_SINCE} (NpuConfig.use_hw_masking_for_npu, "
    "use_hw_cache_update_for_npu)."
)


@dataclass(frozen=True, slots=True)
class TimeEstimate:
    """What the Hexagon compiler estimates one run of an entry point to take, and between which bounds.

    Cycles of the NPU and microseconds, on `chip`. It ranks graphs; nobody calibrated it on a device. `without_cost`
    operators are not in it, since the compiler has no cost for them.
    """

    chip: str
    cycles: int
    cycles_low: int
    cycles_high: int
    us: int
    us_low: int
    us_high: int
    without_cost: int


@dataclass(frozen=True, slots=True)
class Figures(Record):
    """One entry point as the Hexagon compiler made it; bytes. All but `floor` are the compiler's own static figures.

    `taken` of `operators` run on the NPU, in `partitions` pieces; what it refuses shows only here. On-chip memory that
    overflows is written out (`spill`) and read back (`fill`); both are part of `ddr_written` and `ddr_read`. `run_list`
    counts the steps of the compiled graph. `floor`: what has to be read at the very least, see `read_floor`. `time` is
    None where the compiler estimates none; `note` says why, or of which other chip it is. `qnn` is the version of the
    libraries' interface.
    """

    signature: str
    operators: int
    taken: int
    partitions: int
    spill: int
    fill: int
    ddr_read: int
    ddr_written: int
    run_list: int
    floor: int
    time: TimeEstimate | None = None
    note: str = ""
    qnn: str = ""

    _properties = ("read_ratio",)

    @property
    def read_ratio(self) -> float | None:
        """DDR read over the floor; None where there is nothing to read."""
        return self.ddr_read / self.floor if self.floor else None

    def ranking(self, *, timed: bool = True) -> dict[str, float]:
        """What ranks entry points, first things first, each by the words that tell it; smaller is better.

        What leaves the NPU counts first, then in how many pieces the rest is, then, if it is `timed`, the estimated
        time, then bytes moved and steps.
        """
        time = math.inf if self.time is None else self.time.us / 1000
        return {
            "{} operators off the NPU": self.operators - self.taken,
            "{} pieces on the NPU": self.partitions,
            **({"estimated {:.3f} ms": time} if timed else {}),
            "{:,} bytes moved": self.ddr_read + self.ddr_written,
            "{:,} steps": self.run_list,
        }

    def gain(self, after: Figures) -> tuple[bool, str]:
        """Whether `after`, the same entry point as converted, is better than this one as exported; and why."""
        timed = self.time is not None and after.time is not None
        old, new = self.ranking(timed=timed), after.ranking(timed=timed)
        counted = [*old][:3]  # after the pieces either the time or the bytes, not both
        text = next((text for text in counted if old[text] != new[text]), counted[-1])
        ratio = f" ({new[text] / old[text]:.3f} of it)" if old[text] and new[text] else ""
        why = f"{text.format(old[text])} as exported, {text.format(new[text])} as converted{ratio}"
        return new[text] < old[text], why


@dataclass(frozen=True, slots=True)
class Measured(Record):
    """An entry point that was given to the compiler: its figures, or the reason why there are none."""

    signature: str
    figures: Figures | None = None
    failure: str = ""

    _or_null = ("failure",)

    @property
    def rank(self) -> tuple[float, ...]:
        """Smaller is better; what did not compile comes last."""
        return (math.inf,) if self.figures is None else tuple(self.figures.ranking().values())


@dataclass(frozen=True, slots=True)
class Step(Record):
    """One prefill or one token, under the name of the decoder's entry point: its parts by name, in their order."""

    name: str
    parts: Mapping[str, Measured]


@dataclass(frozen=True, slots=True)
class Profile(Record):
    """A model as the compiler makes it: figures of every entry point, and what they were measured with.

    `notes` are sentences: of which chip the estimated time is, or why there is none. `steps`: of a bundle, what one
    prefill and one token take, by part.
    """

    model: str
    chip: str
    flags: tuple[str, ...]
    versions: Mapping[str, str]
    seconds: float
    signatures: tuple[Figures, ...]
    notes: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()


def read_floor(subgraph: Subgraph) -> int:
    """Bytes of every constant and every input that the subgraph's operators use, each counted once.

    float32 constants count half: NPUs keep them as fp16. Inputs count in the type that the caller hands in. What the
    bodies of composites hold is not counted; it is a few numbers. Dynamic dimensions count as the file records them.
    """
    inputs = sum(size_of(tensor) for tensor in subgraph.inputs if tensor.consumers)
    return inputs + sum(
        size_of(tensor) // 2 if tensor.dtype is DType.FLOAT32 else size_of(tensor)
        for tensor in constants(subgraph).values()
    )


def constants(subgraph: Subgraph) -> dict[int, Tensor]:
    """Every constant that the operators read, once each, by what identifies its buffer."""
    return {
        id(tensor.buffer): tensor
        for operator in subgraph.operators
        for tensor in operator.inputs
        if tensor is not None and tensor.is_constant
    }


def size_of(tensor: Tensor) -> int:
    """Bytes; 0 for a type of no fixed size."""
    return tensor.dtype.byte_size(tensor.elements) or 0
