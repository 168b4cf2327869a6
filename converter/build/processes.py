"""The real toolchain: each stage in a process of its own, so that its memory, its noise and its crashes end with it.

That process, `main` here, prints what the tools print, and lines `stage done/total` of progress; its answer is a file.
It never outlives its parent, nor do the processes that it started.
"""

import errno
import json
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from edge_opt.build.jobs import Carried, Job, StageFailedError
from edge_opt.build.pipeline import STAGES, check_versions
from edge_opt.build.scoring import check_runtimes, score
from edge_opt.conversion.choices import Progress
from edge_opt.npu.sdk import search_path
from edge_opt.output.errors import EdgeOptError, OutputError, UsageError
from edge_opt.output.words import signal_name

_LOOK_SECONDS = 0.3
_STEP = re.compile(rb"(\d+)/(\d+)\s*$", re.MULTILINE)
_TAIL = 4096
_ALMOST_FULL = 1 << 20
_KINDS: dict[int, type[EdgeOptError]] = {2: UsageError, 5: OutputError}
_CHILD = "from edge_opt.build.processes import main; raise SystemExit(main())"
_PARENT_CHECK_SECONDS = 0.5
_LONGEST_CAUSE = 300
_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would become larger than it may be here (ulimit -f)",
}


class Processes:
    """Carries out litert-torch's stages and ours; tests have one of small functions in its place."""

    def versions(self) -> dict[str, str]:
        """Of everything that a stage's result depends on; UsageError where one is missing or not known here."""
        return check_versions()

    def check_runtimes(self, *, checkpoint: bool) -> dict[str, str]:
        """The version of what runs bundles; UsageError where that is missing, or what runs a checkpoint."""
        return check_runtimes(checkpoint=checkpoint)

    def carry_out(self, job: Job, log: Path, scratch: Path, progress: Progress) -> Carried:
        """Run one stage in a process; an interrupt ends it and all that it started.

        What its tools print goes to `log`, what they leave lying about to the folder `scratch`.

        Raises:
            EdgeOptError: it failed; the message is the cause alone.
        """
        told, outcome = scratch / "job.json", scratch / "outcome.json"
        told.write_text(json.dumps(asdict(job)), encoding="utf-8")
        command = [sys.executable, "-P", "-c", _CHILD, str(os.getpid()), str(told), str(outcome)]
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
    found = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(temporary)}
    if job.libraries is not None:
        found["LD_LIBRARY_PATH"] = search_path(Path(job.libraries), scratch=scratch)
    return found


def _watch(child: subprocess.Popen[bytes], log: Path, stage: str, progress: Progress) -> None:
    """Wait, and pass on the last step that the tools told of."""
    while True:
        try:
            child.wait(_LOOK_SECONDS)
            return
        except subprocess.TimeoutExpired:
            with log.open("rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - _TAIL))
                steps = _STEP.findall(file.read())
            if steps:
                progress(stage, *map(int, steps[-1]))


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
        how = f"killed by {signal_name(-code)}"
        if -code == signal.SIGKILL:
            how += ", as the system does when memory runs out"
    raise StageFailedError(how)


# The other end


def main() -> int:
    """Carry out the job of the second argument for the process of the first; 0 where the third has a result."""
    parent, job, outcome = int(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
    threading.Thread(target=_leave_with, args=(parent,), daemon=True).start()
    told = _answer(Job(**json.loads(job.read_text(encoding="utf-8"))))
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    unit = 1 if sys.platform == "darwin" else 1024
    told["peak_bytes"] = unit * max(resource.getrusage(one).ru_maxrss for one in who)
    outcome.write_text(json.dumps(told, default=str), encoding="utf-8")
    return 0 if "told" in told else 1


def _answer(job: Job) -> dict[str, Any]:
    try:
        return {"told": {**STAGES, "score": score}[job.stage](job, _progress)}
    except EdgeOptError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return {"error": _NO_ROOM[error.errno], "exit_code": OutputError.exit_code}
        told = f"{type(error).__name__}: {_first_sentence(str(error))}"
        return {"error": told[:_LONGEST_CAUSE], "exit_code": EdgeOptError.exit_code}


def _first_sentence(text: str) -> str:
    """The first line, and the next where that only announces it."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1])


def _progress(stage: str, done: int, total: int) -> None:
    print(f"{stage} {done}/{total}", flush=True)  # noqa: T201  the parent reads it


def _leave_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_PARENT_CHECK_SECONDS)
    os.killpg(os.getpgid(0), signal.SIGKILL)
