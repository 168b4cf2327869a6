"""The process of one stage: `python -m edge_opt.build.child PARENT_PID JOB.json OUTCOME.json`.

Prints what the tools print, and lines `stage done/total` of progress; its answer is the last file. It never outlives
its parent, nor do the processes that it started.
"""

import errno
import json
import os
import resource
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from edge_opt.build.jobs import Job
from edge_opt.build.pipeline import STAGES
from edge_opt.schema.errors import EdgeOptError, OutputError

_PARENT_CHECK_SECONDS = 0.5
_LONGEST_CAUSE = 300
_NO_ROOM = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "a file would become larger than it may be here (ulimit -f)",
}


def main() -> int:
    """Carry a job out; 0 where there is a result."""
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
        return {"told": STAGES[job.stage](job, _progress)}
    except EdgeOptError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except Exception as error:
        traceback.print_exc()
        if isinstance(error, OSError) and error.errno in _NO_ROOM:
            return {"error": _NO_ROOM[error.errno], "exit_code": OutputError.exit_code}
        return {
            "error": f"{type(error).__name__}: {_first_sentence(str(error))}"[:_LONGEST_CAUSE],
            "exit_code": EdgeOptError.exit_code,
        }


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


if __name__ == "__main__":
    sys.exit(main())
