"""The stages of a build: each runs in its own process, and the work folder keeps its result for later runs.

Stages take and return plain values; their memory, output and crashes stay in their process. A result moves to its
folder once it is complete, and is reused only if its content is unchanged.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from threading import Event
from typing import Any, NamedTuple

from edge_opt.base import processes
from edge_opt.base.atomic import DISK_FULL, reason_of
from edge_opt.base.errors import EdgeOptError, OutputError, UsageError
from edge_opt.base.packages import LOG, version_of, versions_of
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress, size
from edge_opt.base.work import MODEL
from edge_opt.building import large_blocks
from edge_opt.npu.compiler import search_path

INSTALL = "pip install '.[build]' in a checkout of edge-opt"
"""How to install the stages' tools."""
TRIED = ("0.10", "0.11")
"""Versions of litert-torch, whose NPU pipeline is experimental, that whole builds were made with."""
_FAMILIES = "litert-torch may not export this family: docs/build.md lists those that were built"
_MARK = "edge-opt-build"
_REPORT = "stage.json"
_SEAL = "seal"
"""The digest of a stage's report, in its file."""
_PARTIAL = ".partial"
"""Suffix of folders that a killed build may leave, and the next one deletes."""
# litert-torch imports tensorflow without requiring it.
_TOOLS = [
    "litert_torch",
    "ai_edge_litert",
    "litert_lm_builder",
    "tensorflow",
    "torch",
    "transformers",
]
QUANTIZERS = ("ai_edge_quantizer", "litert_quantizer")
"""The module of the quantizer that litert-torch calls, by its old name and by its new one."""
_NOT_RUN = {"__pycache__", "cli", "testdata"}
"""Folders of the package that do not affect stages."""
_LOOK_SECONDS = 0.3
# `stage 3/7`, as our stages and litert-torch's calibration print; not the progress bars of loading and saving.
_STEP = re.compile(rb"^[^|/\n]* (\d+)/(\d+)\s*$", re.MULTILINE)
_TAIL = 1 << 16
_ALMOST_FULL = 1 << 20
# The system, a process of a pool that it killed, torch, C++, and Python, whose text may be empty.
_OUT_OF_MEMORY = re.compile("SIGKILL|BrokenProcessPool|allocate memory|bad_alloc|MemoryError")
_NO_SPACE = os.strerror(errno.ENOSPC)
_KINDS: dict[int, type[EdgeOptError]] = {2: UsageError, 5: OutputError}
LIBRARIES = "libraries"
"""The role of the folder with the vendor's libraries, on whose content the results of stages that read it depend."""
Values = dict[str, Any]
"""Plain values by name: settings, options, and what a stage returns."""


class StageFailedError(EdgeOptError):
    """A stage's tool failed; `result` has the stages completed before."""


class OutOfMemoryError(StageFailedError):
    """A stage ended because memory ran out, as far as can be seen from outside."""


class BuildCheckError(EdgeOptError):
    """A bundle is broken or invalid; `result` has the stages completed before."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a stage.

    `config` is litert-torch's configuration. `inputs` are files and folders by role (see `recipe`), `output` is an
    empty folder for the result, `options` are specific to the stage. `libraries` is the folder of the vendor's
    compiler; None if the stage needs none, or finds it itself. With `spares_memory`, large blocks of memory are in
    temporary files.
    """

    stage: str
    output: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    config: Values = field(default_factory=dict)
    options: Values = field(default_factory=dict)
    libraries: str | None = None
    spares_memory: bool = False

    @property
    def model(self) -> Path:
        """The path of the bundle that the stage writes."""
        return Path(self.output) / MODEL


class Input(NamedTuple):
    """An input of a stage, whose result is reused only if the digest is the same."""

    path: Path
    digest: str


@dataclass(frozen=True, slots=True, eq=False)
class Stage:
    """A stage: the roles of the files that it reads if they exist, and the places in its folder of those it makes."""

    name: str
    reads: tuple[str, ...] = ()
    makes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StageReport(Record):
    """One stage's time, the peak memory of its largest process, and its result's size, both in bytes.

    `made_now` is False if the result, and so time and memory, are from an earlier run. `key` is a digest of the inputs
    and settings, `digest` one of the result folder, `values` are the stage's return values.
    """

    name: str
    folder: Path
    key: str
    digest: str
    bytes: int
    seconds: float
    peak_bytes: int
    values: Values
    made_now: bool

    _left_out = ("folder", "key", "digest", "values")
    _properties = ("log", "notes")

    @property
    def log(self) -> str:
        """The file with the tools' output."""
        return str(self.folder.with_suffix(".log"))

    @property
    def notes(self) -> list[str]:
        """The stage's notes for the user."""
        return [*filter(None, self.values.get("notes", ()))]

    @property
    def bundle(self) -> Path:
        """The path of the stage's bundle."""
        return self.folder / MODEL


def quantizers() -> Sequence[str]:
    """The installed modules of `QUANTIZERS`, or the first if there is none."""
    return [module for module in QUANTIZERS if version_of(module)] or QUANTIZERS[:1]


def tool_versions() -> dict[str, str]:
    """Versions of the packages that results depend on; UsageError if one is missing.

    edge-opt's has a digest of its code. It is computed for every build: stages start from the files as they are then,
    even if this process loaded older ones.
    """
    versions = versions_of([*_TOOLS, *quantizers()], INSTALL)
    return versions | {"edge-opt": f"{version('edge-opt')}+{_code_digest()}"}


def untried(versions: Mapping[str, str | None]) -> str:
    """A warning if no whole build was made with the version of litert-torch; else empty."""
    found = versions.get("litert-torch") or TRIED[0]
    if f"{found}.".startswith(tuple(f"{one}." for one in TRIED)):
        return ""
    return (
        f"litert-torch is {found}, and edge-opt was tried with {' and '.join(TRIED)}: check answers before releasing "
        f"the bundle, or {INSTALL}"
    )


def _code_digest() -> str:
    """A digest of the installed code that stages run, and of its data files, wherever they are."""
    digest = hashlib.sha256()
    # In an editable install, the schema is a folder apart.
    for package in ("edge_opt", "edge_opt.schema"):
        root = Path(str(files(package)))
        code = [one for one in _files(root) if _NOT_RUN.isdisjoint(one.relative_to(root).parts)]
        digest.update(digest_of(code, root).encode())
    return digest.hexdigest()[:16]


def carry_out(job: Job, log: Path, progress: Progress) -> tuple[Values, int]:
    """Run one stage in a process that prints to `log`, beside which its temporary files are.

    An interrupt ends the process and its child processes.

    Returns:
        The stage's return values, and the peak memory of its largest process in bytes.

    Raises:
        EdgeOptError: the stage failed; the message has only the cause.
    """
    with tempfile.TemporaryDirectory(
        _PARTIAL, dir=log.parent.resolve(), ignore_cleanup_errors=True
    ) as folder:
        scratch = Path(folder)
        order = scratch / "job.json"
        outcome = scratch / "outcome.json"
        temporary = scratch / "tmp"
        order.write_text(json.dumps(asdict(job)), encoding="utf-8")
        temporary.mkdir()
        variables = {
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(temporary),
        }
        if job.spares_memory:
            variables |= large_blocks.variables(temporary)
        if job.libraries is not None:
            variables["LD_LIBRARY_PATH"] = search_path(Path(job.libraries), scratch=scratch)
        ended_before = processes.ended_for_memory()
        with log.open("wb") as out:
            child = processes.start_module(
                "edge_opt.building.stage_process", order, outcome, environment=variables, stdout=out
            )
        try:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_SECONDS)
                progress(job.stage, *_steps(log))
        finally:
            processes.end(child)
        memory_ran_out = processes.ended_for_memory() > ended_before
        return _answer(child.returncode, outcome, log, memory_ran_out=memory_ran_out)


def _steps(log: Path) -> tuple[int, int]:
    """The last progress in a log: steps done, total steps."""
    found = _STEP.findall(_end_of(log))
    if not found:
        return 0, 1
    done, total = found[-1]
    return int(done), int(total)


def _end_of(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return file.read()


def _answer(status: int, outcome: Path, log: Path, *, memory_ran_out: bool) -> tuple[Values, int]:
    """What a stage returned, or its error; memory may have run out in a process that it had started.

    Compilers end the process if the disk is full, and their files are gone with it.
    """
    answer: Values = {}
    with suppress(OSError, ValueError):
        answer = json.loads(outcome.read_text(encoding="utf-8"))
    if "values" in answer:
        return answer["values"], answer["peak_bytes"]
    error = answer.get("error", "")
    is_full = shutil.disk_usage(outcome.parent).free < _ALMOST_FULL
    ended = not error and not memory_ran_out
    if is_full or _NO_SPACE in error or (ended and _NO_SPACE.encode() in _end_of(log)):
        raise OutputError(DISK_FULL)
    kind = _KINDS.get(answer.get("exit_code", 0), StageFailedError)
    if kind is not StageFailedError:
        raise kind(error)
    cause = error or processes.killed_by(status) or f"exit status {status}"
    if memory_ran_out or _OUT_OF_MEMORY.search(cause):
        raise OutOfMemoryError(f"memory probably ran out ({cause}): {processes.MORE_MEMORY}")
    raise StageFailedError(cause)


@dataclass
class Stages:
    """The stages of one build, in a locked work folder, see `locked`.

    `files` has their results by role. `config` is the pipeline's, once it is resolved. `ended` is set if stages that
    still run are to end. `needs` are estimates of the bytes of memory that stages need.
    """

    folder: Path
    versions: Mapping[str, str]
    progress: Progress
    on_stage: Callable[[StageReport], None] | None
    done: list[StageReport]
    files: dict[str, Input] = field(default_factory=dict)
    config: Values = field(default_factory=dict)
    ended: Event = field(default_factory=Event)
    needs: Mapping[str, int] = field(default_factory=dict)

    def run(self, stage: Stage, options: Values) -> StageReport:
        """Add a stage's result to `done` and `files`, see `result`, and return it."""
        report = self.add(self.result(stage, options))
        for role, place in stage.makes.items():
            self.files[role] = Input(report.folder / place, report.digest)
        return report

    def add(self, report: StageReport) -> StageReport:
        """Add a result to `done`, and return it."""
        self.done.append(report)
        how = f"made in {report.seconds:.1f} s" if report.made_now else "reused"
        LOG.info("stage '%s' %s", report.name, how)
        if self.on_stage is not None:
            self.on_stage(report)
        return report

    @contextmanager
    def threads(self, *, side_by_side: bool) -> Iterator[ThreadPoolExecutor]:
        """Threads for stages that run side by side, or one after another in the order that they are given.

        An error or an interrupt ends the stages that still run.
        """
        with ThreadPoolExecutor(None if side_by_side else 1) as threads:
            try:
                yield threads
            except BaseException:
                self.ended.set()
                raise

    def result(self, stage: Stage, options: Values) -> StageReport:
        """Return a stage's result: an earlier run's if inputs, options, libraries and versions are the same, or new."""
        folder = self.folder / stage.name
        inputs = {role: self.files[role] for role in stage.reads if role in self.files}
        digests = {role: given.digest for role, given in inputs.items()}
        key = _digest_of_values([stage.name, digests, options, self.versions])
        kept = _kept(folder, key)
        if kept is not None:
            return kept
        paths = {role: str(given.path.resolve()) for role, given in inputs.items()}
        libraries = paths.pop(LIBRARIES, None)
        job = Job(
            stage=stage.name,
            output=str(folder.with_suffix(_PARTIAL).resolve()),
            inputs=paths,
            config=self.config,
            options=options,
            libraries=libraries,
            spares_memory=self.needs.get(stage.name, 0) > processes.free_memory(),
        )
        try:
            return self._made(job, key)
        except (OSError, EdgeOptError) as error:
            raise self._explained(error, stage.name) from error

    def _explained(self, error: OSError | EdgeOptError, stage: str) -> EdgeOptError:
        """A stage's error, with its name, what it needs, and where its log is."""
        after = f"; its log is {self.folder / stage}.log"
        if isinstance(error, OSError):
            return OutputError(f"stage '{stage}': {reason_of(error)}{after}")
        if isinstance(error, OutOfMemoryError) and stage in self.needs:
            after = f"; it needs about {size(self.needs[stage])}{after}"
        elif type(error) is StageFailedError and stage in {"configure", "export", "check"}:
            after += f"; {_FAMILIES}"
        return type(error)(f"stage '{stage}': {error}{after}")

    def _progress(self, stage: str, done: int, total: int) -> None:
        """Show progress; StageFailedError, which ends the stage, if all stages are to end."""
        if self.ended.is_set():
            raise StageFailedError("it was ended")
        self.progress(stage, done, total)

    def _made(self, job: Job, key: str) -> StageReport:
        """Run a stage in an empty folder, renamed once it is complete."""
        partial = Path(job.output)
        folder = self.folder / job.stage
        log = folder.with_suffix(".log")
        partial.mkdir()
        started = time.perf_counter()
        try:
            self._progress(job.stage, 0, 1)
            values, peak_bytes = carry_out(job, log, self._progress)
            files = _files(partial)
            report = StageReport(
                name=job.stage,
                folder=folder,
                key=key,
                digest=digest_of(files, partial),
                bytes=sum(file.stat().st_size for file in files),
                seconds=round(time.perf_counter() - started, 3),
                peak_bytes=peak_bytes,
                values=values,
                made_now=True,
            )
            # As a later run finds it, in a folder that may have moved by then.
            for_later = asdict(report) | {"folder": "", "made_now": False}
            for_later[_SEAL] = _digest_of_values(for_later)
            (partial / _REPORT).write_text(json.dumps(for_later, indent=1), encoding="utf-8")
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
            self._progress(job.stage, 1, 1)
            return report
        except BaseException:
            # Four times the checkpoint, maybe, and of no use.
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _kept(folder: Path, key: str) -> StageReport | None:
    """An earlier result that is unchanged and has this key, or None."""
    with suppress(OSError, ValueError, TypeError, RecursionError):
        stored = dict(json.loads((folder / _REPORT).read_text(encoding="utf-8")))
        is_whole = stored.pop(_SEAL, None) == _digest_of_values(stored)
        report = from_dict(StageReport, stored | {"folder": folder})
        if is_whole and report.key == key and report.digest == digest_of(_files(folder), folder):
            return report
    return None


def _digest_of_values(values: Any) -> str:
    """A digest of plain values."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock the work folder; UsageError if another build uses it or it holds other files."""
    mark = folder / _MARK
    try:
        if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
            raise UsageError(
                f"{folder} holds other files: give an empty folder, or a new one, with work=..."
            )
        folder.mkdir(exist_ok=True)
        lock = mark.open("ab")
    except OSError as error:
        raise OutputError(
            f"work folder {folder} cannot be used: {error.strerror}; give another work=..."
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"another build is running in {folder}: wait for it, or give another work=..."
            ) from None
        for left in folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        yield


def digest_of(files: Iterable[Path], root: Path) -> str:
    """A digest of the files' contents and their names relative to `root`."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            content = hashlib.file_digest(file, "sha256").hexdigest()
        digest.update(f"{path.relative_to(root)}\0{content}\0".encode())
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _REPORT)
