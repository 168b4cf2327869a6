"""Run tests/fuzz.py for long: mutants in a child process, watched for crashes, hangs and memory.

    python benchmarks/fuzz.py --count 1000000 [--seed 0] [--seconds S] [--models DIR ...] [--save DIR] [--only NUMBER]

Prints one summary, and each kind of finding with the number of its first mutant; the exit status is 1 if there are any.
The seeds are those of the quick tests and the .tflite files in the given folders: small files whole, and the operators
around each SOFTMAX of large ones. Each mutant is read and checked, its shapes are inferred and its attention is
matched; of those that get that far, one in `--convert-one-in` is also converted, written and read again. A mutant may
take 1 s of processor time (10 s where nothing can interrupt it) and 200 MiB of memory.
"""

import argparse
import contextlib
import faulthandler
import gc
import json
import mmap
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

TESTS = Path(__file__).resolve().parent.parent / "tests"
sys.path.insert(0, str(TESTS))

_LARGEST_SEED = 300_000
_MEMORY = 200 << 20
_STUCK_SECONDS = 10.0
_ASLEEP_SECONDS = 600.0
_BATCH = 200


def main() -> int:
    """Run, and print the summary."""
    options = _options()
    if options.child is not None:
        _serve(options)
        return 0
    if options.only is not None:
        return _again(options)
    run = Run(options)
    for sign in (
        signal.SIGINT,
        signal.SIGTERM,
    ):  # in the background, a shell lets the first be ignored
        signal.signal(sign, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        run.go()
    print(run.summary())
    return 1 if run.findings else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=10_000, help="mutants to make")
    parser.add_argument("--first", type=int, default=0, help="number of the first")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this time")
    parser.add_argument("--seed", type=int, default=0, help="another seed, other mutants")
    parser.add_argument(
        "--models", type=Path, nargs="*", default=[], help="folders with models to make mutants of"
    )
    parser.add_argument(
        "--convert-one-in", type=int, default=16, help="default: 16; 1 converts all"
    )
    parser.add_argument(
        "--structured", type=float, default=0.4, help="share of changed tables, default 0.4"
    )
    parser.add_argument("--save", type=Path, help="folder for the first mutant of each finding")
    parser.add_argument(
        "--only", type=int, help="examine this one mutant here, and show what happens"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


@dataclass
class Run:
    """What came of the mutants so far; restarts the child where it ended."""

    options: argparse.Namespace
    outcomes: Counter[str] = field(default_factory=Counter)
    findings: dict[str, dict[str, Any]] = field(default_factory=dict)
    slowest: tuple[float, int] = (0.0, 0)
    growth: int = 0
    seeds: int = 0
    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def go(self) -> None:
        """Until all mutants are examined or the time is up."""
        following, end = self.options.first, self.options.first + self.options.count
        with tempfile.NamedTemporaryFile() as file:
            file.write(bytes(8))
            file.flush()
            position = mmap.mmap(file.fileno(), 8)
            deadline = self.started + self.options.seconds
            while following < end and time.monotonic() < deadline:
                following = self._one_child(file.name, position, following, end, deadline)

    def _one_child(
        self, name: str, position: mmap.mmap, first: int, end: int, deadline: float
    ) -> int:
        """Feed one child; returns the number of the mutant to go on with."""
        command = [
            sys.executable,
            __file__,
            "--child",
            name,
            "--first",
            str(first),
            "--count",
            str(end - first),
        ]
        command += ["--seed", str(self.options.seed), "--models", *map(str, self.options.models)]
        command += ["--convert-one-in", str(self.options.convert_one_in)]
        command += ["--structured", str(self.options.structured)]
        command += ["--save", str(self.options.save)] if self.options.save else []
        position[:] = first.to_bytes(8, "little")
        read, write = os.pipe()
        with subprocess.Popen([*command], stdout=write) as child, os.fdopen(read, "rb") as lines:
            os.close(write)
            os.set_blocking(read, False)
            try:
                ending = self._watch(child, lines, position, deadline)
            finally:
                child.kill()
        reached = int.from_bytes(position[:], "little")
        if ending is None:
            return reached if time.monotonic() > deadline else end
        self._found(ending, {"number": reached, "seed": "?", "text": ending})
        return reached + 1

    def _watch(
        self, child: "subprocess.Popen[bytes]", lines: Any, position: mmap.mmap, deadline: float
    ) -> str | None:
        """Take the child's reports until it ends; why it did, None where it was done or its time was up."""
        last, since, used, rest = b"", time.monotonic(), 0.0, b""
        while True:
            ended = child.poll() is not None
            self.seconds = time.monotonic() - self.started
            rest = self._take(rest + (lines.read() or b""))
            if ended:
                return (
                    None
                    if child.returncode == 0
                    else f"the process ended with status {child.returncode}"
                )
            now = time.monotonic()
            if now > deadline:
                child.kill()
                return None
            if position[:] != last or not self.seeds:
                last, since, used = position[:], now, _processor_seconds(child.pid)
            spent = _processor_seconds(child.pid) - used
            if spent > _STUCK_SECONDS or now - since > _ASLEEP_SECONDS:
                child.send_signal(signal.SIGUSR1)  # it prints where it is
                time.sleep(1)
                child.kill()
                return f"no end in sight after {spent:.0f} s of processor time, {now - since:.0f} s in all"
            time.sleep(0.2)

    def _take(self, content: bytes) -> bytes:
        *whole, rest = content.split(b"\n")
        for line in whole:
            report = json.loads(line)
            self.seeds = report.get("seeds", self.seeds)
            self.outcomes.update(report.get("outcomes", {}))
            self.growth = max(self.growth, report.get("growth", 0))
            self.slowest = max(self.slowest, tuple(report.get("slowest", (0.0, 0))))
            if "kind" in report:
                self._found(report["kind"], report)
        return rest

    def _found(self, kind: str, report: dict[str, Any]) -> None:
        known = self.findings.setdefault(kind, {**report, "times": 0})
        known["times"] += 1
        if known["times"] == 1:
            print(
                f"mutant {report['number']} of '{report['seed']}': {report['text']}",
                file=sys.stderr,
                flush=True,
            )

    def summary(self) -> str:
        """The figures, one a line."""
        total = sum(self.outcomes.values())
        lines = [
            f"{total} mutants of {self.seeds} models in {self.seconds:.0f} s (seed {self.options.seed})"
        ]
        lines += [f"  {count:>9} {outcome}" for outcome, count in sorted(self.outcomes.items())]
        lines.append(
            f"  slowest: mutant {self.slowest[1]}, {self.slowest[0]:.2f} s of processor time"
        )
        lines.append(
            f"  the process grew by {self.growth >> 20} MiB over its size before the first mutant"
        )
        lines.append(f"  {len(self.findings)} kinds of findings")
        for kind, report in self.findings.items():
            lines.append(f"    {report['times']} times, first by mutant {report['number']}: {kind}")
        return "\n".join(lines)


def _seeds(options: argparse.Namespace) -> list[Any]:
    """The handmade seeds, small models of the folders as they are, and cuts of the large ones."""
    from fuzz_seeds import cuts, handmade, seed  # noqa: PLC0415 - only the child pays for it

    from edge_opt import EdgeOptError, load  # noqa: PLC0415
    from edge_opt.ir import to_bytes  # noqa: PLC0415
    from edge_opt.ir.opening import check_not_compiled  # noqa: PLC0415

    made = handmade()
    for path in sorted(
        path for folder in options.models for path in Path(folder).rglob("*.tflite")
    ):
        try:
            model = load(path)
            check_not_compiled(model, path)
            if path.stat().st_size <= _LARGEST_SEED:
                made.append(seed(path.name, to_bytes(model)))
            made += list(cuts(path))[:3]
        except EdgeOptError as error:
            print(f"left out: {error}")
    return made


def _serve(options: argparse.Namespace) -> None:
    """The child: examine one mutant after the other, report in batches."""
    import fuzz  # noqa: PLC0415

    faulthandler.register(signal.SIGUSR1)
    # Standard output carries the reports alone: whatever anybody prints goes to standard error.
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    seeds = _seeds(options)
    gc.freeze()  # the seeds stay, nobody need look through them again
    gc.set_threshold(50_000)
    with Path(options.child).open("r+b") as file:
        position = mmap.mmap(file.fileno(), 8)
    size = _data_size()
    resource.setrlimit(resource.RLIMIT_DATA, (size + _MEMORY, resource.RLIM_INFINITY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    _report(channel, seeds=len(seeds))
    outcomes: Counter[str] = Counter()
    slowest = (0.0, 0)
    for number in range(options.first, options.first + options.count):
        position[:] = number.to_bytes(8, "little")
        name, content = fuzz.mutant(seeds, number, options.seed, options.structured)
        started = time.process_time()
        try:
            with fuzz.time_limit():
                outcomes[fuzz.examine(content, options.convert_one_in)] += 1
        except Exception as error:
            outcomes["a finding"] += 1
            text = f"{type(error).__name__}: {error}"[:500]
            _report(channel, kind=_kind(error), number=number, seed=name, text=text)
            _save(options, number, content)
        slowest = max(slowest, (round(time.process_time() - started, 3), number))
        if number % _BATCH == _BATCH - 1:
            growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10
            _report(channel, outcomes=outcomes, slowest=slowest, growth=growth)
            outcomes.clear()
    _report(channel, outcomes=outcomes, slowest=slowest)


def _report(channel: TextIO, **fields: Any) -> None:
    channel.write(json.dumps(fields) + "\n")
    channel.flush()


def _kind(error: Exception) -> str:
    """Equal for what is likely one bug: the exception's type and the line of ours that it came from."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if "fuzz" not in frame.filename and frame.filename.endswith(".py")
    ]
    own = [
        frame
        for frame in ours
        if any(part in frame.filename for part in ("converter", "schema", "edge_opt"))
    ]
    last = (own or ours or list(frames))[-1]
    place = "/".join(Path(last.filename).parts[-2:])
    return f"{type(error).__name__} in {place}, line {last.lineno}"


def _save(options: argparse.Namespace, number: int, content: bytes) -> None:
    if options.save is not None:
        options.save.mkdir(parents=True, exist_ok=True)
        suffix = ".litertlm" if content.startswith(b"LITERTLM") else ".tflite"
        (options.save / f"mutant_{options.seed}_{number}{suffix}").write_bytes(content)


def _data_size() -> int:
    """Private memory of this process now, as RLIMIT_DATA counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 1 << 40


def _processor_seconds(pid: int) -> float:
    """What the process has used of the processor; 0 where it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _again(options: argparse.Namespace) -> int:
    import fuzz  # noqa: PLC0415

    name, content = fuzz.mutant(_seeds(options), options.only, options.seed, options.structured)
    _save(options, options.only, content)
    print(f"mutant {options.only} of '{name}', {len(content)} bytes")
    print(fuzz.examine(content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
