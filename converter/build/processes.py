"""The real toolchain: each stage in a process of its own, so that its memory, its noise and its crashes end with it."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_opt.build.errors import StageFailedError
from edge_opt.build.jobs import Carried, Job, Progress
from edge_opt.build.pipeline import check_versions
from edge_opt.npu.sdk import search_path
from edge_opt.schema.errors import EdgeOptError, OutputError, UsageError

_LOOK_SECONDS = 0.3
_STEP = re.compile(rb"(\d+)/(\d+)\s*$", re.MULTILINE)
_TAIL = 4096
_ALMOST_FULL = 1 << 20
_KINDS: dict[int, type[EdgeOptError]] = {2: UsageError, 5: OutputError}


class Processes:
    """Carries out litert-torch's stages and ours; tests have one of small functions in its place."""

    def versions(self) -> dict[str, str]:
        """Of everything that a stage's result depends on.

        Raises:
            UsageError: something is not installed, or in a version that is not known here.
        """
        return check_versions()

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Progress) -> Carried:
        """Run one stage in a process; an interrupt ends it and all that it started.

        What its tools print goes to `log`, what they leave lying about to the folder `scratch`.

        Raises:
            EdgeOptError: it failed; the message is the cause alone.
        """
        told, outcome = scratch / "job.json", scratch / "outcome.json"
        told.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [
            sys.executable,
            "-P",
            "-m",
            "edge_opt.build.child",
            str(os.getpid()),
            str(told),
            str(outcome),
        ]
        with log.open("wb") as out:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=_environment(job, scratch),
                start_new_session=True,
            )
            try:
                _watch(child, log, job.stage, progress)
            finally:
                if child.poll() is None:
                    with suppress(ProcessLookupError):
                        os.killpg(child.pid, signal.SIGKILL)
                    child.wait()
        return _carried(child.returncode, outcome, scratch)


def _environment(job: Job, scratch: Path) -> dict[str, str]:
    temporary = scratch / "tmp"
    temporary.mkdir()
    found = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(temporary),
    }
    if job.libraries is not None:
        found["LD_LIBRARY_PATH"] = search_path(Path(job.libraries), scratch=scratch)
    return found


def _watch(child: subprocess.Popen[bytes], log: Path, stage: str, progress: Progress) -> None:
    """Wait, and pass on the last step that the tools told of."""
    while True:
        try:
            child.wait(_LOOK_SECONDS)
        except subprocess.TimeoutExpired:
            steps = _STEP.findall(_tail(log))
            if steps:
                progress(stage, *map(int, steps[-1]))
        else:
            return


def _tail(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
        return file.read()


def _carried(code: int, outcome: Path, scratch: Path) -> Carried:
    told: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        told = json.loads(outcome.read_text(encoding="utf-8"))
    if "told" in told:
        return Carried(told["told"], told["peak_bytes"])
    if shutil.disk_usage(scratch).free < _ALMOST_FULL:
        raise OutputError("the disk is full")
    if "error" in told:
        raise _KINDS.get(told["exit_code"], StageFailedError)(told["error"])
    how = f"exit status {code}"
    if code < 0:
        how = f"killed by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += ", as the system does when memory runs out"
    raise StageFailedError(how)
