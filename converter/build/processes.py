"""The real toolchain: each stage in a process of its own, so that its memory, its noise and its crashes end with it."""

import json
import os
import re
import shutil
import signal
import subprocess
from contextlib import suppress
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_opt import processes
from edge_opt.build.work import INSTALL, Job, StageAnswer, StageFailedError
from edge_opt.npu.sdk import search_path
from edge_opt.output.errors import EdgeOptError, OutputError, UsageError
from edge_opt.output.words import Progress

SUPPORTED = "0.10"
"""The version of litert-torch whose experimental package is known here; the extra `build` asks for it."""
_PACKAGES = "litert-torch ai-edge-quantizer ai-edge-litert litert-lm-builder torch transformers edge-opt"
_MODULE = "tensorflow"  # litert-torch imports it without requiring it
_RUNTIME = "litert-lm-api"
_LOOK_SECONDS = 0.3
_STEP = re.compile(rb"(\d+)/(\d+)\s*$", re.MULTILINE)
_TAIL = 4096
_ALMOST_FULL = 1 << 20
_KINDS: dict[int, type[EdgeOptError]] = {2: UsageError, 5: OutputError}


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


def _watch(child: subprocess.Popen[bytes], log: Path, stage: str, progress: Progress) -> None:
    """Wait, and pass on the last step that the tools printed."""
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
