"""What a stage gets and answers, the process that carries it out, and the work folder that keeps its result.

All are plain values, for a stage runs in a process of its own: its memory, its noise and its crashes end with it. A
result gets its folder when it is complete, and is taken again only where its content is still what was written.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from edge_opt.base import processes
from edge_opt.base.errors import EdgeOptError, OutputError, UsageError
from edge_opt.base.record import from_dict
from edge_opt.base.words import Progress
from edge_opt.npu.sdk import search_path

MODEL = "model.litertlm"
"""What a stage that makes a bundle calls it, in its folder."""
INSTALL = "pip install '.[build]' in a checkout of edge-opt"
"""How to get what stages run."""
_MARK = "edge-opt-build"
_TOLD, _PARTIAL, _SCRATCH = "stage.json", ".partial", "scratch"
_CHUNK = 1 << 22
_TAIL = 4096
SUPPORTED = "0.10"
"""The version of litert-torch whose experimental package is known here; the extra `build` asks for it."""
_PACKAGES = "litert-torch ai-edge-quantizer ai-edge-litert litert-lm-builder torch transformers edge-opt"
_MODULE = "tensorflow"  # litert-torch imports it without requiring it
_RUNTIME = "litert-lm-api"
_LOOK_SECONDS = 0.3
_STEP = re.compile(rb"(\d+)/(\d+)\s*$", re.MULTILINE)
_ALMOST_FULL = 1 << 20
_KINDS: dict[int, type[EdgeOptError]] = {2: UsageError, 5: OutputError}


class StageFailedError(EdgeOptError):
    """A tool of a stage failed; `result` has what was done until then."""


class BuildCheckError(EdgeOptError):
    """The compiled bundle is not what it has to be; `result` has what was done until then."""

    exit_code = 1


@dataclass(frozen=True, slots=True)
class Job:
    """One run of a stage.

    `config` is litert-torch's configuration; None for the stage that makes it. `inputs` are files and folders by what
    they are, `output` is an empty folder for the result, `options` are the stage's own. `libraries` is the folder with
    the vendor's compiler; None where its programs find that themselves.
    """

    stage: str
    output: str
    inputs: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    libraries: str | None = None

    @property
    def model(self) -> Path:
        """The bundle that it makes."""
        return Path(self.output) / MODEL


@dataclass(frozen=True, slots=True)
class StageAnswer:
    """A stage that was carried out: what it answers, and the memory of its largest process in bytes."""

    values: dict[str, Any] = field(default_factory=dict)
    peak_bytes: int | None = None


class Input(NamedTuple):
    """What a stage reads; its result is taken again only where the digest is the same."""

    path: Path
    digest: str


@dataclass(frozen=True, slots=True)
class Kept:
    """The result of a stage: what it was made from, the digest of what is in its folder, and what the stage said.

    `size` and `peak_bytes` (of its largest process) are in bytes.
    """

    folder: Path
    key: str
    digest: str
    size: int
    seconds: float
    peak_bytes: int | None
    values: dict[str, Any]

    @property
    def bundle(self) -> Input:
        """The bundle that the stage made, for the next one."""
        return Input(self.folder / MODEL, self.digest)


@dataclass(frozen=True, slots=True)
class WorkFolder:
    """A folder that is ours alone while a build runs, see `taken`."""

    path: Path

    @property
    def scratch(self) -> Path:
        """For what tools leave lying about; gone after each stage."""
        return self.path / _SCRATCH

    def log(self, stage: str) -> Path:
        """Where the tools of a stage print."""
        return self.path / f"{stage}.log"

    def last_line(self, stage: str) -> str:
        """The last line of a stage's log; nothing where there is none yet."""
        return re.split(r"[\r\n]+", _tail(self.log(stage)).decode(errors="replace").strip())[-1].strip()

    def kept(self, stage: str, key: str) -> Kept | None:
        """The result of an earlier run, where it was made from the same; None where it is to be made."""
        folder = self.path / stage
        with suppress(OSError, ValueError, TypeError):
            values = json.loads((folder / _TOLD).read_text(encoding="utf-8"))
            kept = from_dict(Kept, {**values, "folder": folder})
            if kept.key == key and digest_of(_files(folder), folder) == kept.digest:
                return kept
        return None

    def begin(self, stage: str) -> Path:
        """An empty folder for the result of a stage, and an empty one for its scratch."""
        partial = self.path / f"{stage}{_PARTIAL}"
        for folder in (partial, self.scratch):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
        return partial

    def keep(self, stage: str, key: str, seconds: float, done: StageAnswer) -> Kept:
        """Give what was made its name; what an earlier run left there goes."""
        partial, folder = self.path / f"{stage}{_PARTIAL}", self.path / stage
        files = _files(partial)
        size = sum(file.stat().st_size for file in files)
        kept = Kept(
            folder, key, digest_of(files, partial), size, round(seconds, 3), done.peak_bytes, done.values
        )
        values = {name: value for name, value in asdict(kept).items() if name != "folder"}
        (partial / _TOLD).write_text(json.dumps(values, indent=1), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
        shutil.rmtree(self.scratch, ignore_errors=True)
        return kept


@contextmanager
def taken(path: Path) -> Iterator[WorkFolder]:
    """A folder, which nobody else works in meanwhile.

    Raises:
        UsageError: another build is in it, or it holds something else.
        OutputError: it cannot be made or written.
    """
    mark, work = path / _MARK, WorkFolder(path)
    try:
        if path.is_dir() and any(path.iterdir()) and not mark.exists():
            raise UsageError(f"{path} holds other files: give an empty folder, or a new one, with work=...")
        path.mkdir(exist_ok=True)
        lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise OutputError(f"work folder {path} cannot be used: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise UsageError(
            f"another build is at work in {path}: wait for it, or give another work=..."
        ) from None
    for left in (work.scratch, *path.glob(f"*{_PARTIAL}")):
        shutil.rmtree(left, ignore_errors=True)
    try:
        yield work
    finally:
        shutil.rmtree(work.scratch, ignore_errors=True)
        os.close(lock)


def key_of(value: object) -> str:
    """What a result depends on, as one digest; `value` is of plain values."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()


def digest_of(files: Iterable[Path], root: Path) -> str:
    """One digest of the names below `root` and the contents of files."""
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(f"{path.relative_to(root)}\0{os.fstat(file.fileno()).st_size}\0".encode())
            while chunk := file.read(_CHUNK):
                digest.update(chunk)
    return digest.hexdigest()


def _files(folder: Path) -> list[Path]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return sorted(path for path in files if path.name != _TOLD)


class Processes:
    """Carries out litert-torch's stages and ours; tests have one of small functions in its place."""

    def versions(self) -> dict[str, str]:
        """Of everything that a stage's result depends on; UsageError where one is missing or not known here."""
        try:
            versions = {package: version(package) for package in _PACKAGES.split()}
        except PackageNotFoundError as error:
            raise UsageError(f"the build needs {error.name}: {INSTALL}") from None
        if find_spec(_MODULE) is None:
            raise UsageError(f"the build needs {_MODULE}: {INSTALL}")
        if not versions["litert-torch"].startswith(f"{SUPPORTED}."):
            raise UsageError(
                f"litert-torch is {versions['litert-torch']}, and its pipeline for NPUs, which is experimental, is "
                f"known here as of {SUPPORTED}: {INSTALL}"
            )
        return versions

    def check_runtimes(self, *, checkpoint: bool) -> dict[str, str]:
        """The version of what runs bundles; UsageError where that is missing, or what runs a checkpoint."""
        try:
            versions = {_RUNTIME: version(_RUNTIME)}
        except PackageNotFoundError:
            raise UsageError(
                "bundles are evaluated in LiteRT-LM, which is not installed: pip install '.[lm]' in a checkout of "
                "edge-opt (a build goes on without it with evaluate=False)"
            ) from None
        missing = [name for name in ("torch", "transformers") if checkpoint and find_spec(name) is None]
        if missing:
            raise UsageError(
                f"a checkpoint runs in transformers, and {' and '.join(missing)} is not installed: pip install "
                f"'.[build]' in a checkout of edge-opt, or give a float bundle as the reference"
            )
        return versions

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Progress) -> StageAnswer:
        """Run one stage in a process; an interrupt ends it and all that it started.

        What its tools print goes to `log`, what they leave lying about to the folder `scratch`.

        Raises:
            EdgeOptError: it failed; the message is the cause alone.
        """
        order, outcome = scratch / "job.json", scratch / "outcome.json"
        order.write_text(json.dumps(asdict(job)), encoding="utf-8")
        temporary = scratch / "tmp"
        temporary.mkdir()
        variables = {"HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
        if job.libraries is not None:
            variables["LD_LIBRARY_PATH"] = search_path(Path(job.libraries), scratch=scratch)
        with log.open("wb") as out:
            child = processes.start_module(
                "edge_opt.build.stage", order, outcome, environment=variables, stdout=out
            )
            try:
                _watch(child, log, job.stage, progress)
            finally:
                processes.end(child)
        return _carried(child.returncode, outcome, scratch)


def _tail(log: Path) -> bytes:
    """The end of a log; nothing where there is none yet."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return file.read()
    return b""


def _watch(child: subprocess.Popen[bytes], log: Path, stage: str, progress: Progress) -> None:
    """Wait, and pass on the last step that the tools printed; 0 of 1 until there is one."""
    while True:
        try:
            child.wait(_LOOK_SECONDS)
            return
        except subprocess.TimeoutExpired:
            steps = _STEP.findall(_tail(log)) or [(0, 1)]
            progress(stage, *map(int, steps[-1]))


def _carried(status: int, outcome: Path, scratch: Path) -> StageAnswer:
    answer: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        answer = json.loads(outcome.read_text(encoding="utf-8"))
    if "values" in answer:
        return StageAnswer(answer["values"], answer["peak_bytes"])
    if shutil.disk_usage(scratch).free < _ALMOST_FULL:
        raise OutputError("the disk is full")
    if "error" in answer:
        raise _KINDS.get(answer["exit_code"], StageFailedError)(answer["error"])
    memory = ", as the system does when memory runs out" if status == -signal.SIGKILL else ""
    raise StageFailedError((processes.killed_by(status) or f"exit status {status}") + memory)
