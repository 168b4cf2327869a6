"""Output of commands, run while the site is built, on the bundled tiny Gemma3 as `gemma.tflite` and converted."""

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

TESTDATA = Path(__file__).resolve().parents[2] / "testdata"
_MOST_LINES = 24


class Outputs:
    """The commands of one page, one after the other in one folder."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="edge-opt-docs-")
        shutil.copy(TESTDATA / "demo_gemma3.tflite", Path(self._folder.name) / "gemma.tflite")

    def of(self, command: str) -> str:
        """The output of a command as a block of text; if the command fails, so does the build."""
        if (
            "gemma.opt.tflite" in command
            and not (Path(self._folder.name) / "gemma.opt.tflite").exists()
        ):
            self.of("convert gemma.tflite")
        ran = subprocess.run(
            [sys.executable, "-m", "edge_opt", *shlex.split(command)],
            cwd=self._folder.name,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, f"edge-opt {command}: {ran.stderr}"
        lines = [line.rstrip() for line in ran.stdout.strip().splitlines()]
        if len(lines) > _MOST_LINES:
            lines = [*lines[:_MOST_LINES], f"... {len(lines) - _MOST_LINES} more lines ..."]
        return "\n".join(["```text", *lines, "```"])
