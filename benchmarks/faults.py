"""Plant faults in rewrites at real lengths, and count those that verification catches and misses.

    python benchmarks/faults.py [--sizes 512/4096,...] [--types float32,int16,int8] [--each 4] [--only TEXT] [--json]

The faults are mutants of the new region (`tests/mutations.py`), with N = 4, K = 2, H = 256. Of two layers that differ
in their numbers, the second is verified unchanged; then the first is mutated, and verification may take it for the
same structure. Mutants that survive at these lengths are run like a small region, in full on both kernel sets and on
extreme inputs: the exit status is 1 if that catches one. Tiles have a quarter of the rows.
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

from fault_graphs import Size, attention
from mutations import Mutant, sampled, survives_checks
from pass_runs import rewrites_of

from edge_opt.ir.parse import parse
from edge_opt.passes import Exact
from edge_opt.passes.mha_to_sha import MhaToSha
from edge_opt.targets import Target
from edge_opt.verification import examine
from edge_opt.verification.examine import Verifier
from edge_opt.verification.rewrite import Rewrite

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


def layers(dtype: str, size: Size, *, tiled: bool) -> list[Rewrite]:
    """What mha_to_sha would do to two layers."""
    target = Target("tiles", "", rows_per_tile=size.queries // 4) if tiled else None
    return rewrites_of(MhaToSha.name, parse(attention(dtype, size)), target)


def campaign(dtype: str, size: Size, label: str, options: argparse.Namespace) -> Iterator[Outcome]:
    """Every fault of one type at one size."""
    with Verifier() as verifier:
        for tiled in (False, True):
            first, second = layers(dtype, size, tiled=tiled)
            proof = verifier.verify(second, Exact())
            assert proof.holds, proof.reason
            for mutant in sampled(first, options.each):
                name = f"{mutant.kind}: {mutant.place}{' (tiled)' if tiled else ''}"
                if options.only in name and survives_checks(mutant.rewrite):
                    yield outcome(verifier, mutant, name, dtype, label)


def outcome(verifier: Verifier, mutant: Mutant, name: str, dtype: str, label: str) -> Outcome:
    """What the proof at size says of it; what it lets pass, in full on both kernel sets and extreme inputs."""
    started = time.monotonic()
    proof = verifier.verify(mutant.rewrite, Exact())
    seconds = time.monotonic() - started
    caught = CAUGHT
    if proof.holds:
        with mock.patch.object(examine, "_IN_FULL", math.inf), Verifier(seed=1) as thorough:
            caught = NOTHING if thorough.verify(mutant.rewrite, Exact()).holds else MISSED
    return Outcome(name, dtype, label, caught, round(seconds, 2), proof.reason)


def main() -> int:
    """Runs the campaign and prints a line for each fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default="512/4096,1024/4096")
    parser.add_argument("--types", default="float32,int16,int8")
    parser.add_argument("--each", type=int, default=4, help="mutants of each kind")
    parser.add_argument("--only", default="", help="part of a fault's name")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    found = []
    for label in options.sizes.split(","):
        queries, cache = map(int, label.split("/"))
        for dtype in options.types.split(","):
            size = Size(queries, heads=4, kv_heads=2, cache=cache, width=256)
            for each in campaign(dtype, size, label, options):
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
