"""Compare `edge-opt convert` with `cp`, flatbuffer_utils and model_utils: one table of times and peak memory.

    benchmarks/convert.py MODEL.tflite... [--peers PYTHON]       on your models
    benchmarks/convert.py --make FOLDER [--peers PYTHON]         on a Gemma3-270M, a 1B and a quantized 1B with random
                                                                 weights (1.07, 4.0 and 1.0 GB), made there once

All read the same file from a warm cache and write to the same folder, each right after its own `cp`, while the disk is
idle. The other tools read and write a model unchanged, which is less work than a conversion; PYTHON is an interpreter
that has them (ai-edge-litert, litert-converter). Memory is that of all processes of a tool together. Making the models
needs the extras `torch` and `quantizer`, 20 GiB and some minutes. The exit status is 1 if a bar is missed.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from processes import Run, python, run

from edge_opt.base.errors import EdgeOptError
from edge_opt.schema import read_model

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
# The bar of the design: 1.25 x cp + 2 s, 0.5 s more for each 1,000 operators over 2,000, and for every distinct
# quantized block 0.4 s on each of the two kernel sets; 150 MiB over the interpreter's own import.
MOST_TIMES_CP, MOST_SECONDS_MORE, MOST_MEMORY = 1.25, 2.0, 150 * MIB
FREE_OPERATORS, SECONDS_PER_OPERATOR = 2000, 0.5 / 1000
SECONDS_PER_QUANTIZED_BLOCK = 2 * 0.4
# A peer that wants more ends, instead of whatever else runs on this machine.
MOST_PEER_MEMORY, MOST_PEER_SECONDS = 14 << 30, 600.0

_CONVERT = "import sys, edge_opt.cli; sys.exit(edge_opt.cli.main(sys.argv[1:]))"
_PEERS = {
    "flatbuffer_utils": """
import sys
from ai_edge_litert.tools import flatbuffer_utils
flatbuffer_utils.write_model(flatbuffer_utils.read_model(sys.argv[1]), sys.argv[2])
""",
    "model_utils": """
import sys
from litert_converter.tools import model_utils
module, context = model_utils.read_flatbuffer(sys.argv[1])
model_utils.write_flatbuffer(module, sys.argv[2], ir_context=context)
""",
}
# Long enough to be seen by who looks on from outside.
_IMPORT = "import time, ai_edge_litert.interpreter; time.sleep(0.3)"


@dataclass(frozen=True)
class Row:
    """One tool on one model: medians over the rounds, the most memory seen; `cp_seconds` of the copies beside it."""

    model: str
    tool: str
    seconds: float
    cp_seconds: float
    peak: int
    outcome: str = ""
    allowed_seconds: float | None = None

    @property
    def times_cp(self) -> float:
        """How much longer than `cp`."""
        return self.seconds / self.cp_seconds


def copied(source: Path, target: Path, *, to_disk: bool = False) -> float:
    """Seconds that `cp` takes, `to_disk` until the bytes are there, as a conversion's are."""
    os.sync()
    started = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    if to_disk:
        descriptor = os.open(target, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
    return time.perf_counter() - started


def beside_cp(command: list[str], model: Path, target: Path, **limits: float) -> tuple[float, Run]:
    """Run a tool right after a `cp`, with nothing left to be written of either."""
    seconds = copied(model, target)
    os.sync()
    return seconds, run(command, **limits)  # type: ignore[arg-type]


def conversion(model: Path, target: Path, rounds: int) -> Row:
    """The row of `edge-opt convert`, regions proved."""
    command = python(_CONVERT, "convert", model, "-o", target, "--force", "--json")
    pairs = [beside_cp(command, model, target) for _ in range(rounds)]
    last = pairs[-1][1]
    if last.status:
        sys.exit(f"benchmarks/convert.py: {model}: {last.complaint.strip() or last.said}")
    said = json.loads(last.said)
    cp_seconds = statistics.median(seconds for seconds, _ in pairs)
    sites = [site for site in said["sites"] if site["heads"]]
    done = sum(site["status"] == "converted" for site in sites)
    return Row(
        model.name,
        "edge-opt convert",
        statistics.median(each.seconds for _, each in pairs),
        cp_seconds,
        max(each.peak for _, each in pairs),
        f"{done} of {len(sites)} blocks converted",
        MOST_TIMES_CP * cp_seconds + _more_seconds(said),
    )


def _more_seconds(said: dict[str, object]) -> float:
    """What the design allows over `cp` for this model."""
    signatures, sites = said["signatures"], said["sites"]
    assert isinstance(signatures, list)
    assert isinstance(sites, list)
    operators = sum(signature["operators_before"] for signature in signatures)
    proofs = [site["proof"] for site in sites if site["proof"]]
    # Only integers differ by steps of their quantization.
    distinct = sum(proof["steps"] is not None and not proof["repeated"] for proof in proofs)
    return (
        MOST_SECONDS_MORE
        + SECONDS_PER_OPERATOR * max(0, operators - FREE_OPERATORS)
        + SECONDS_PER_QUANTIZED_BLOCK * distinct
    )


def peer(name: str, model: Path, target: Path, interpreter: str) -> Row:
    """The row of a peer: once, it takes long."""
    command = python(_PEERS[name], model, target, interpreter=interpreter)
    limits = {"most_bytes": MOST_PEER_MEMORY, "most_seconds": MOST_PEER_SECONDS}
    cp_seconds, done = beside_cp(command, model, target, **limits)
    return Row(model.name, name, done.seconds, cp_seconds, done.peak, _outcome(done, target))


def _outcome(done: Run, target: Path) -> str:
    """What a peer wrote, or how it failed."""
    last = (done.complaint.strip().splitlines() or [""])[-1][:150]
    if done.timed_out:
        return f"FAILS: not done after {MOST_PEER_SECONDS:.0f} s"
    if done.status < 0:
        limit = f"{MOST_PEER_MEMORY >> 30} GiB allowed"
        return f"FAILS: {signal.Signals(-done.status).name} ({limit}) {last}".strip()
    if done.status:
        return f"FAILS: {last}"
    try:
        read_model(target)
    except EdgeOptError as error:
        return f"WRONG: {error}"
    return "read and written, nothing converted"


def benchmark(model: Path, folder: Path, options: argparse.Namespace) -> list[Row]:
    """All rows of one model."""
    target = folder / "written.tflite"
    copied(model, target)  # warms the cache
    plain = [copied(model, target) for _ in range(options.rounds)]
    flushed = [copied(model, target, to_disk=True) for _ in range(options.rounds)]
    own = conversion(model, target, options.rounds)
    cp_seconds = statistics.median([*plain, own.cp_seconds])
    rows = [
        Row(model.name, "cp", cp_seconds, cp_seconds, 0, f"{model.stat().st_size:,} bytes"),
        Row(model.name, "cp, on the disk", statistics.median(flushed), cp_seconds, 0),
        own,
    ]
    if options.peers:
        rows += [peer(name, model, target, options.peers) for name in _PEERS]
    target.unlink(missing_ok=True)
    return rows


def misses(row: Row, imported: int) -> list[str]:
    """Bars that a row misses, in words."""
    if row.allowed_seconds is None:
        return []
    slow = [f"time: {row.seconds:.2f} s, bar {row.allowed_seconds:.2f} s"]
    large = [
        f"memory: {(row.peak - imported) / MIB:.0f} MiB over the import, bar {MOST_MEMORY / MIB:.0f} MiB"
    ]
    return slow * (row.seconds > row.allowed_seconds) + large * (row.peak - imported > MOST_MEMORY)


def report(rows: list[Row], imported: int) -> str:
    """The table, and what it is held to."""
    lines = [f"{'model':20}{'tool':18}{'time':>10}{'x cp':>8}{'bar':>10}{'memory':>11}  "]
    for row in rows:
        bar = "" if row.allowed_seconds is None else f"{row.allowed_seconds:.2f} s"
        memory = f"{row.peak / MIB:,.0f} MiB" if row.peak else ""
        times = f"{row.seconds:8.2f} s{row.times_cp:8.2f}"
        lines.append(
            f"{row.model.removesuffix('.tflite'):20}{row.tool:18}{times}{bar:>10}{memory:>11}  {row.outcome}".rstrip()
        )
    lines.append(f"importing the interpreter: {imported / MIB:.0f} MiB")
    missed = [f"{row.model}: {miss}" for row in rows for miss in misses(row, imported)]
    return "\n".join([*lines, *(f"NOT within the bar: {each}" for each in missed)])


def made(folder: Path) -> list[Path]:
    """The architectures of Gemma3-270M and 1B with random weights, exported and quantized as users do."""
    targets = [
        folder / name
        for name in ("gemma3_270m.tflite", "gemma3_1b.tflite", "gemma3_1b_a16w8.tflite")
    ]
    if all(target.exists() for target in targets):
        return targets
    sys.path.insert(0, str(ROOT / "testdata"))
    from checkpoints import HuggingFace, Sizes  # noqa: PLC0415 - needs torch
    from quantize_model import quantize  # noqa: PLC0415

    folder.mkdir(parents=True, exist_ok=True)
    common = {
        "heads": 4,
        "kv_heads": 1,
        "head_size": 256,
        "vocab": 262144,
        "prefill": 128,
        "cache": 1280,
        "window": 512,
    }
    options = {"externalize_embedder": True, "experimental_lightweight_conversion": True}
    for target, own in zip(
        targets,
        ({"layers": 18, "hidden": 640, "ffn": 2048}, {"layers": 26, "hidden": 1152, "ffn": 6912}),
        strict=False,
    ):
        if not target.exists():
            HuggingFace("gemma3", Sizes(**common, **own), options)(target)
    if not targets[2].exists():
        quantize(targets[1], targets[2], "a16w8")
    return targets


def main() -> int:
    """Parse the command line, run, print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", type=Path, nargs="*", metavar="MODEL.tflite")
    parser.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3, the median counts")
    parser.add_argument(
        "--peers", metavar="PYTHON", help="compare with the peers too, run by this interpreter"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if bool(options.models) == bool(options.make):
        parser.error("give models, or --make FOLDER")
    models = made(options.make) if options.make else options.models
    imported = run(python(_IMPORT)).peak
    rows: list[Row] = []
    for model in models:
        with tempfile.TemporaryDirectory(dir=model.resolve().parent) as folder:
            rows += benchmark(model, Path(folder), options)
    within = not any(misses(row, imported) for row in rows)
    if options.json:
        print(
            json.dumps(
                {"rows": [asdict(row) for row in rows], "import": imported, "within": within}
            )
        )
    else:
        print(report(rows, imported))
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
