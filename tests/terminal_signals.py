"""Scripts that tests start and send signals to: as in a terminal, whatever the tests themselves run under.

Under `nohup`, or in the background of a shell script, signals are ignored, and children inherit that.
"""

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

_HEAD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import terminal_signals
terminal_signals.restore()
import proof_models
"""


def restore() -> None:
    """Nothing is ignored; Ctrl-C raises KeyboardInterrupt."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


def started(script: str, *arguments: object, **options: Any) -> subprocess.Popen[str]:
    """A script that knows `sys` and `proof_models`, running on its own; what it prints is read from here."""
    command = [sys.executable, "-c", _HEAD + script, *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options
    )


def gone(pid: int, seconds: float = 10) -> bool:
    """Whether the process ends within the time; a zombie has ended."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state in "ZX":
            return True
        time.sleep(0.05)
    return False
