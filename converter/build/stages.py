"""The stages of a build: each runs in its own process, and the work folder keeps its result for later runs.

Stages take and return plain values; their memory, output and crashes stay in their process. A result moves to its
folder once it is complete, and is reused only if its content is unchanged.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base import processes
from edge_opt.base.errors import EdgeOptError, OutputError, UsageError
from edge_opt.base.record import Record, from_dict
from edge_opt.base.words import Progress
from edge_opt.npu.sdk import search_path
from edge_opt.schema.litertlm import is_bundle, read_bundle

MODEL = "model.litertlm"
"""File name of a stage's bundle, in the stage's folder."""
INSTALL = "pip install '.[build]' in a checkout of edge-opt"
"""How to install the stages' tools."""
SUPPORTED = "0.10"
"""The supported version of litert-torch, whose NPU pipeline is experimental; the extra `build` requires it."""
_MARK, _TOLD, _PARTIAL, _SCRATCH = "edge-opt-build", "stage.json", ".partial", "scratch"
_RUNTIME = "litert-lm-api"
_PACKAGES = "litert-torch ai-edge-quantizer ai-edge-litert litert-lm-builder torch transformers edge-opt"
_OURS = ("configure", "export", "calibrate", "narrow", "optimize", "evaluate", "emulate")
"""Stages whose results depend on edge-opt's version."""
_LOOK_SECONDS = 0.3
# `stage 3/7`, as our stages and litert-torch's calibration print; not the progress bars of loading and saving.
_STEP = re.compile(rb"^[^|/\n]* (\d+)/(\d+)\s*$", re.MULTILINE)
_TAIL, _ALMOST_FULL, _CHUNK = 1 << 16, 1 << 20, 1 << 24
_KINDS: dict[int, type[EdgeOptError]] = {2: UsageError, 5: OutputError}


class StageFailedError(EdgeOptError):
    """A stage's tool failed; `result` has the stages completed before."""


class BuildCheckError(EdgeOptError):
    """A bundle is broken or invalid; `result` has the stages completed before."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a stage.

    `config` is litert-torch's configuration, if the stage needs one. `inputs` are files and folders by role, `output`
    is an empty folder for the result, `options` are specific to the stage. `libraries` is the folder of the vendor's
    compiler; None if the tools find it themselves.
    """

    stage: str
    output: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    libraries: str | None = None

    @property
    def model(self) -> Path:
        """The path of the bundle that the stage writes."""
        return Path(self.output) / MODEL


class StageAnswer(NamedTuple):
    """A finished stage's return values, and the peak memory of its largest process in bytes."""

    values: dict[str, Any]
    peak_bytes: int | None = None


class Input(NamedTuple):
    """An input of a stage, whose result is reused only if the digest is the same."""

    path: Path
    digest: str


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
    peak_bytes: int | None
    values: dict[str, Any]
    made_now: bool

    _left_out = ("folder", "key", "digest", "values")
    _properties = ("log", "notes")

    @property
    def log(self) -> str:
        """The file with the tools' output."""
        return str(log_of(self.folder))

    @property
    def notes(self) -> list[str]:
        """The stage's notes for the user."""
        return [*self.values.get("notes", ())]

    @property
    def bundle(self) -> Input:
        """The stage's bundle, as the next stage's input."""
        return Input(self.folder / MODEL, self.digest)


class Processes:
    """Runs stages, each in its own process; tests replace it with small functions."""

    def versions(self) -> dict[str, str]:
        """Versions of the packages that results depend on; UsageError if one is missing or unsupported."""
        needs = "the build needs {}: " + INSTALL
        versions = {package: _version(package, needs.format(package)) for package in _PACKAGES.split()}
        if find_spec("tensorflow") is None:  # litert-torch imports it without requiring it
            raise UsageError(needs.format("tensorflow"))
        if not versions["litert-torch"].startswith(f"{SUPPORTED}."):
            raise UsageError(
                f"litert-torch is {versions['litert-torch']}, but edge-opt supports only {SUPPORTED}: {INSTALL}"
            )
        return versions

    def check_runtimes(self, *, bundles: bool = True) -> dict[str, str]:
        """The version of LiteRT-LM if `bundles`; UsageError if it, or a package that runs checkpoints, is missing."""
        missing = [name for name in ("torch", "transformers") if find_spec(name) is None]
        if missing:
            raise UsageError(
                f"a checkpoint runs in transformers, and {' and '.join(missing)} is not installed: {INSTALL}"
            )
        needs = (
            "bundles are evaluated in LiteRT-LM, which is not installed: pip install '.[lm]' in a checkout of edge-opt "
            "(a build goes on without it with evaluate=False)"
        )
        return {_RUNTIME: _version(_RUNTIME, needs)} if bundles else {}

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Progress) -> StageAnswer:
        """Run one stage in a process that prints to `log`; an interrupt ends it and its child processes.

        Raises:
            EdgeOptError: the stage failed; the message has only the cause.
        """
        child = _start(job, log, scratch)
        try:
            while child.poll() is None:
                with suppress(subprocess.TimeoutExpired):
                    child.wait(_LOOK_SECONDS)
                progress(job.stage, *_steps(log))
        finally:
            processes.end(child)
        return _answer(child.returncode, scratch)


def _version(package: str, needs: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise UsageError(needs) from None


def _start(job: Job, log: Path, scratch: Path) -> subprocess.Popen[bytes]:
    order, temporary = scratch / "job.json", scratch / "tmp"
    order.write_text(json.dumps(asdict(job)), encoding="utf-8")
    temporary.mkdir()
    variables = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
    if job.libraries is not None:
        variables["LD_LIBRARY_PATH"] = search_path(Path(job.libraries), scratch=scratch)
    with log.open("wb") as out:
        return processes.start_module(
            "edge_opt.build.stage", order, scratch / "outcome.json", environment=variables, stdout=out
        )


def _steps(log: Path) -> tuple[int, int]:
    """The last progress in a log: steps done, total steps."""
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        done, total = (_STEP.findall(file.read()) or [(0, 1)])[-1]
    return int(done), int(total)


def _answer(status: int, scratch: Path) -> StageAnswer:
    answer: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        answer = json.loads((scratch / "outcome.json").read_text(encoding="utf-8"))
    if "values" in answer:
        return StageAnswer(answer["values"], answer["peak_bytes"])
    if shutil.disk_usage(scratch).free < _ALMOST_FULL:
        raise OutputError("the disk is full")
    if "error" in answer:
        raise _KINDS.get(answer["exit_code"], StageFailedError)(answer["error"])
    memory = ", as the system does when memory runs out" if status == -signal.SIGKILL else ""
    raise StageFailedError((processes.killed_by(status) or f"exit status {status}") + memory)


@dataclass
class Stages:
    """The stages of one build, in a locked work folder, see `taken`.

    `config` is the pipeline's, once it is resolved; `done` are the finished stages.
    """

    folder: Path
    tools: Processes
    versions: Mapping[str, str]
    libraries: Path | None
    progress: Progress
    on_stage: Callable[[StageReport], None] | None
    config: dict[str, Any] = field(default_factory=dict)
    done: list[StageReport] = field(default_factory=list)

    def run(
        self, name: str, depends: object, options: Mapping[str, Any] | None = None, /, **inputs: Input
    ) -> StageReport:
        """Return a stage's result: an earlier run's if its inputs and settings are the same, else a new one."""
        versions = {tool: v for tool, v in self.versions.items() if name in _OURS or tool != "edge-opt"}
        digests = {role: given.digest for role, given in inputs.items()}
        values = json.dumps([name, digests, depends, versions], sort_keys=True, default=str)
        key, folder, report = hashlib.sha256(values.encode()).hexdigest(), self.folder / name, None
        with suppress(OSError, ValueError, TypeError):
            told = json.loads((folder / _TOLD).read_text(encoding="utf-8"))
            report = from_dict(StageReport, {**told, "folder": folder, "made_now": False})
        if report is None or report.key != key or not _is_whole(report):
            paths = {role: str(given.path.resolve()) for role, given in inputs.items()}
            libraries = None if self.libraries is None else str(self.libraries)
            partial = folder.with_suffix(_PARTIAL).resolve()
            job = Job(name, str(partial), paths, self.config or None, options or {}, libraries)
            try:
                report = self._made(job, key, 0 if report is None else int(report.seconds))
            except (EdgeOptError, OSError) as error:
                cause = error.strerror or error if isinstance(error, OSError) else error
                kind = _KINDS.get(OutputError.exit_code if isinstance(error, OSError) else error.exit_code)
                message = f"stage '{name}': {cause}; its log is {log_of(folder)}"
                raise (kind or StageFailedError)(message) from error
        self.done.append(report)
        if self.on_stage is not None:
            self.on_stage(report)
        return report

    def _made(self, job: Job, key: str, seconds: int) -> StageReport:
        """Run a stage in an empty folder, renamed once it is complete; an earlier run took `seconds`."""
        partial, folder, scratch = Path(job.output), self.folder / job.stage, self.folder / _SCRATCH
        for empty in (partial, scratch):
            shutil.rmtree(empty, ignore_errors=True)
            empty.mkdir()
        started = time.perf_counter()

        def told(stage: str, done: int, total: int) -> None:
            """Report progress; without steps, in seconds out of the earlier run's."""
            if total <= 1 and seconds:
                done, total = min(int(time.perf_counter() - started), seconds - 1), seconds
            self.progress(stage, done, total)

        told(job.stage, 0, 1)
        answer = self.tools.carry_out(job, log_of(folder), scratch.resolve(), told)
        files = _files(partial)
        report = StageReport(
            name=job.stage,
            folder=folder,
            key=key,
            digest=digest_of(files, partial),
            bytes=sum(file.stat().st_size for file in files),
            seconds=round(time.perf_counter() - started, 3),
            peak_bytes=answer.peak_bytes,
            values=answer.values,
            made_now=True,
        )
        values = {name: value for name, value in asdict(report).items() if name not in ("folder", "made_now")}
        (partial / _TOLD).write_text(json.dumps(values, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        shutil.rmtree(scratch, ignore_errors=True)
        self.progress(job.stage, 1, 1)
        return report


@contextmanager
def taken(folder: Path) -> Iterator[None]:
    """Lock the work folder; UsageError if another build uses it or it holds other files."""
    mark = folder / _MARK
    try:
        if folder.is_dir() and any(folder.iterdir()) and not mark.exists():
            raise UsageError(f"{folder} holds other files: give an empty folder, or a new one, with work=...")
        folder.mkdir(exist_ok=True)
        lock = mark.open("ab")
    except OSError as error:
        raise OutputError(f"work folder {folder} cannot be used: {error.strerror}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UsageError(
                f"another build is running in {folder}: wait for it, or give another work=..."
            ) from None
        for left in folder.glob(f"*{_PARTIAL}"):
            shutil.rmtree(left, ignore_errors=True)
        try:
            yield
        finally:
            shutil.rmtree(folder / _SCRATCH, ignore_errors=True)


def log_of(folder: Path) -> Path:
    """The log file of the stage with this folder."""
    return folder.with_suffix(".log")


def digest_of(files: Iterable[Path], root: Path) -> str:
    """A digest of the files' contents and their names relative to `root`; for bundles, of their sections.

    A bundle's header contains the time and a random number, so equal bundles differ in bytes.
    """
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.relative_to(root)}\0".encode())
        if is_bundle(path):
            bundle = read_bundle(path)
            for index, section in enumerate(bundle.sections):
                content = bundle.content(index)
                digest.update(f"{section.data_type} {section.items} {content.size}\0".encode())
                for at in range(0, content.size, _CHUNK):
                    digest.update(content.read(at, min(_CHUNK, content.size - at)))
        else:
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()


def _is_whole(report: StageReport) -> bool:
    """True if a stage's folder is unchanged since it was written."""
    with suppress(OSError, EdgeOptError):
        return digest_of(_files(report.folder), report.folder) == report.digest
    return False


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != _TOLD)
