"""The campaign of planted faults at the lengths that people ship: what the proof at size catches, and what it misses.

    python benchmarks/faults.py [--sizes 512/4096,1024/4096] [--types float32,int16,int8] [--only TEXT] [--json]

The faults are those of docs/faults.md that the proof has to stop, at N = 4, K = 2, H = 256. Of two layers that differ
in their numbers the second is proved as it should be; then the first one is corrupted, and the proof may take its
structure for one that it knows. What the proof at size misses is run like a small region, in full on both kernel sets
and on extreme inputs: exit status 1 where that catches it. Tiles have a quarter of the rows.
"""

import argparse
import json
import math
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))

from collections.abc import Iterator

from fault_graphs import Edit, Size, attention
from faults import FAULTS, PROOF, Fault
from pass_runs import rewrites_of
from text_parser import parse

from edge_opt.ir import Model
from edge_opt.passes import Demand
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.passes.rewrite import Rewrite
from edge_opt.proof import examination
from edge_opt.proof.regions import RegionProver
from edge_opt.targets import Target

PASS = MhaToSha.name
CAUGHT, MISSED, NOTHING = "caught", "MISSED", "no number changes"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one fault: what stopped it, and how long that took."""

    fault: str
    dtype: str
    size: str
    caught: str
    seconds: float
    reason: str


def layers(dtype: str, size: Size, *, tiled: bool) -> tuple[Model, list[Rewrite]]:
    """Two layers, and what mha_to_sha would do to them."""
    model = parse(attention(dtype, size))
    target = Target("tiles", "", rows_per_tile=size.queries // 4) if tiled else None
    return model, rewrites_of(PASS, model, target)


def campaign(dtype: str, size: Size, label: str, wanted: str) -> Iterator[Outcome]:
    """Every fault of one type at one size."""
    chosen = [
        (fault, graph.startswith("tiled"))
        for fault in FAULTS
        for graph in fault.graphs
        if fault.caught == PROOF and fault.pass_name == PASS and graph.endswith(dtype)
    ]
    with RegionProver() as prover:
        for tiled in sorted({tiled for _, tiled in chosen}):
            proof = prover.prove(layers(dtype, size, tiled=tiled)[1][1], Demand())
            assert proof.holds, proof.reason
        for fault, tiled in chosen:
            if wanted in fault.name:
                yield outcome(prover, fault, dtype, label, corrupted(fault, dtype, size, tiled=tiled))


def corrupted(fault: Fault, dtype: str, size: Size, *, tiled: bool) -> Rewrite:
    """The first layer with the fault in it."""
    model, rewrites = layers(dtype, size, tiled=tiled)
    edit = Edit(model, rewrites[0], size)
    fault.apply(edit)
    return edit.finish()


def outcome(prover: RegionProver, fault: Fault, dtype: str, label: str, wrong: Rewrite) -> Outcome:
    """What the proof at size says of it; what it lets pass, in full on both kernel sets and extreme inputs."""
    started = time.monotonic()
    proof = prover.prove(wrong, Demand())
    seconds = time.monotonic() - started
    caught = CAUGHT
    if proof.holds:
        with mock.patch.object(examination, "_IN_FULL", math.inf), RegionProver() as thorough:
            caught = NOTHING if thorough.prove(wrong, Demand()).holds else MISSED
    return Outcome(fault.name, dtype, label, caught, round(seconds, 2), proof.reason)


def main() -> int:
    """Runs the campaign and prints a line for each fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="512/4096,1024/4096")
    parser.add_argument("--types", default="float32,int16,int8")
    parser.add_argument("--only", default="", help="part of a fault's name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for label in options.sizes.split(","):
        queries, cache = map(int, label.split("/"))
        for dtype in options.types.split(","):
            size = Size(queries, heads=4, kv_heads=2, cache=cache, width=256)
            for each in campaign(dtype, size, label, options.only):
                found.append(each)
                line = f"{each.size}  {each.dtype:8} {each.seconds:7.1f} s  {each.caught:17}  {each.fault}"
                print(line, file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    else:
        for caught in (CAUGHT, NOTHING, MISSED):
            print(f"{caught}: {sum(each.caught == caught for each in found)}")
    return int(any(each.caught == MISSED for each in found))


if __name__ == "__main__":
    sys.exit(main())
