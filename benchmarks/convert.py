"""`edge-opt convert` against `cp` and against flatbuffer_utils, in one run: times as ratios, peak memory.

    benchmarks/convert.py MODEL.tflite            on a model of yours
    benchmarks/convert.py --make FOLDER           on a Gemma3-270M with random weights (1.07 GB), made there once

All three read the same file from a warm cache and write to the same folder. The peer reads and writes a model
unchanged, which is less than a conversion does. Making the model needs the extra `torch`, 6 GiB and some minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIB = 1 << 20
# The bar of the design: 1.25 x cp + 2 s, for quantized blocks 0.4 s more on each of the two kernel sets (the
# reference kernels are slow there), 150 MiB over the interpreter's own import.
MOST_TIMES_CP, MOST_SECONDS_MORE, MOST_MEMORY = 1.25, 2.0, 150 * MIB
MOST_SECONDS_PER_QUANTIZED_BLOCK = 2 * 0.4

# Each runs in a process of its own and prints its peak memory: its own, and its largest child's.
_MEASURED = """
import json, resource, sys
{body}
own = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmHWM")) * 1024
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
print(json.dumps([own, children]))
"""
_CONVERT = """
import contextlib, io
from edge_opt.cli import main
with contextlib.redirect_stdout(io.StringIO()) as said:
    assert main(["convert", sys.argv[1], "-o", sys.argv[2], "--force", "--json"]) == 0
sys.stderr.write(said.getvalue())
"""
_PEER = """
from ai_edge_litert.tools import flatbuffer_utils
flatbuffer_utils.write_model(flatbuffer_utils.read_model(sys.argv[1]), sys.argv[2])
"""
_IMPORT = "import ai_edge_litert.interpreter"


@dataclass(frozen=True)
class Measured:
    """One run: seconds, and peak bytes of the process and of the largest of its children."""

    seconds: float
    own: int
    children: int
    said: str = ""


def measured(body: str, *arguments: Path) -> Measured:
    """Run a program in a fresh process, starting the interpreter included."""
    code = _MEASURED.format(body=body)
    started = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - started
    if done.returncode:
        sys.exit(f"benchmarks/convert.py: {done.stderr.strip().splitlines()[-1]}")
    own, children = json.loads(done.stdout.splitlines()[-1])
    return Measured(seconds, own, children, done.stderr)


def copied(source: Path, target: Path) -> float:
    """Seconds that `cp` takes."""
    started = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    return time.perf_counter() - started


def synced(source: Path, target: Path) -> float:
    """Seconds that `cp` takes until the bytes are on the disk, where a conversion's are too."""
    started = time.perf_counter()
    subprocess.run(["cp", source, target], check=True)
    descriptor = os.open(target, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
    return time.perf_counter() - started


@dataclass(frozen=True)
class Results:
    """What is printed; times are medians over the rounds, memory is the largest seen."""

    model: str
    bytes: int
    converted: int
    sites: int
    quantized: int
    cp_seconds: float
    cp_fsync_seconds: float
    convert_seconds: float
    peer_seconds: float | None
    parent_peak: int
    worker_peak: int
    peer_peak: int | None
    import_peak: int

    @property
    def allowed_seconds(self) -> float:
        """The bar for this model on this machine."""
        proofs = MOST_SECONDS_PER_QUANTIZED_BLOCK * self.quantized
        return MOST_TIMES_CP * self.cp_seconds + MOST_SECONDS_MORE + proofs

    @property
    def over_import(self) -> int:
        """Peak bytes of the larger of the two processes, less what importing the interpreter alone takes."""
        return max(self.parent_peak, self.worker_peak) - self.import_peak

    @property
    def within(self) -> bool:
        """Whether both bars hold."""
        return self.convert_seconds <= self.allowed_seconds and self.over_import <= MOST_MEMORY


def benchmark(model: Path, folder: Path, rounds: int, *, peer: bool) -> Results:
    """Run all of them, one after the other in every round, so that drift of the machine meets all alike."""
    target = folder / "written.tflite"
    copied(model, target)  # warms the cache
    base = measured(_IMPORT)
    plain, flushed, converts = [], [], []
    for _ in range(rounds):
        plain.append(copied(model, target))
        flushed.append(synced(model, target))
        converts.append(measured(_CONVERT, model, target))
    other = measured(_PEER, model, target) if peer else None
    target.unlink()
    said = json.loads(converts[-1].said)
    return Results(
        model=model.name,
        bytes=model.stat().st_size,
        converted=sum(site["status"] == "converted" for site in said["sites"]),
        sites=len(said["sites"]),
        # Only integers differ by steps of their quantization.
        quantized=sum((site["proof"] or {}).get("steps") is not None for site in said["sites"]),
        cp_seconds=statistics.median(plain),
        cp_fsync_seconds=statistics.median(flushed),
        convert_seconds=statistics.median(run.seconds for run in converts),
        peer_seconds=None if other is None else other.seconds,
        parent_peak=max(run.own for run in converts),
        worker_peak=max(run.children for run in converts),
        peer_peak=None if other is None else other.own,
        import_peak=base.own,
    )


def report(found: Results) -> str:
    """The results for people: ratios first."""

    def timed(label: str, seconds: float, remark: str = "") -> str:
        return f"{label:20}{seconds:8.2f} s{seconds / found.cp_seconds:8.2f} x cp  {remark}".rstrip()

    def mib(count: int) -> str:
        return f"{count / MIB:.0f} MiB"

    bar = f"bar: {found.allowed_seconds:.2f} s, {MOST_TIMES_CP} x cp + {MOST_SECONDS_MORE:g} s"
    if found.quantized:
        bar += f" + {MOST_SECONDS_PER_QUANTIZED_BLOCK:g} s for each of {found.quantized} quantized blocks"
    memory = f"conversion {mib(found.parent_peak)}, its worker {mib(found.worker_peak)}"
    lines = [
        f"{found.model}, {found.bytes:,} bytes: {found.converted} of {found.sites} sites converted",
        timed("cp", found.cp_seconds),
        timed("cp, on the disk", found.cp_fsync_seconds),
        timed("edge-opt convert", found.convert_seconds, bar),
    ]
    if found.peer_seconds is not None:
        times = f"{found.peer_seconds / found.convert_seconds:.1f} times as long as the conversion"
        lines.append(timed("flatbuffer_utils", found.peer_seconds, times))
    lines += [
        f"peak memory: importing the interpreter {mib(found.import_peak)}; {memory}",
        f"over the import: {mib(found.over_import)} (bar: {mib(MOST_MEMORY)})",
    ]
    if found.peer_peak is not None:
        lines.append(f"flatbuffer_utils: {mib(found.peer_peak)}")
    lines.append("within both bars" if found.within else "NOT within both bars")
    return "\n".join(lines)


def made(folder: Path) -> Path:
    """The architecture of Gemma3-270M with random weights, exported as users do."""
    target = folder / "gemma3_270m.tflite"
    if not target.exists():
        sys.path.insert(0, str(ROOT / "testdata"))
        from make_families import HuggingFace, Sizes  # noqa: PLC0415

        folder.mkdir(parents=True, exist_ok=True)
        sizes = Sizes(
            layers=18, heads=4, kv_heads=1, head_size=256, hidden=640, ffn=2048, vocab=262144, prefill=128,
            cache=1280, window=512,
        )  # fmt: skip
        options = {"externalize_embedder": True, "experimental_lightweight_conversion": True}
        HuggingFace("gemma3", sizes, options)(target)
    return target


def main() -> int:
    """Parse the command line, run, print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("model", type=Path, nargs="?", metavar="MODEL.tflite")
    source.add_argument("--make", type=Path, metavar="FOLDER")
    parser.add_argument("--rounds", type=int, default=3, help="default: 3, the median counts")
    parser.add_argument("--no-peer", action="store_true", help="leave flatbuffer_utils out")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    model = arguments.model or made(arguments.make)
    with tempfile.TemporaryDirectory(dir=model.resolve().parent) as folder:
        found = benchmark(model, Path(folder), arguments.rounds, peer=not arguments.no_peer)
    if arguments.json:
        print(json.dumps({**asdict(found), "over_import": found.over_import, "within": found.within}))
    else:
        print(report(found))
    return 0 if found.within else 1


if __name__ == "__main__":
    sys.exit(main())
