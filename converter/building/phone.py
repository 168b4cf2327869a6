"""The chip of a build, its compiler's libraries, and the steps to run the bundle."""

import importlib
import os
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import UsageError, unknown
from edge_opt.npu.sdk import SDK_VARIABLES, find_libraries
from edge_opt.targets.chips import CHIPS, VENDORS, find_chip

QUALCOMM = "qualcomm"
_PACKAGE = "ai_edge_litert_sdk_qualcomm"
_FOLDER = "/data/local/tmp/edge-opt"
_PYTHON = """\
import litert_lm
npu = litert_lm.Backend.NPU(litert_dispatch_lib_dir="")
with litert_lm.Engine({path!r}, backend=npu) as engine:
    with engine.create_session(max_output_tokens=32) as session:
        session.run_prefill(["a prompt"])
        print(*session.run_decode().texts)
"""
_PAGE = """\
# Next steps

LiteRT-LM runs the bundle, before compilation, on this machine's CPU (`pip install litert-lm-api`):

```py
{python}```

On a Qualcomm phone, `litert_lm_main` and `libLiteRtDispatch_Qualcomm.so` are built from one release of LiteRT-LM for
android_arm64. The other libraries are from Qualcomm's AI Engine Direct SDK (QAIRT), in the folder `QNN_SDK_ROOT`, or
from com.qualcomm.qti:qnn-runtime of Maven Central, not older than the release that compiled the bundle.

```bash
{commands}
```
"""
_NO_COMMANDS = "# nothing is compiled for a Qualcomm phone; for others see LiteRT-LM's documentation"


def chip_of(name: str) -> tuple[str, str]:
    """The vendor of a chip, as litert-torch's pipeline names it, and the chip; UsageError for an unknown chip."""
    found = find_chip(name)
    if found is None:
        error = unknown("chip", name.strip(), [chip for chips in VENDORS.values() for chip in chips])
        raise UsageError(f"{error}; `adb shell getprop ro.soc.model` asks a phone for its chip")
    return found


def find_compiler(vendor: str, sdk: AnyPath | None) -> Path | None:
    """The folder with Qualcomm's libraries for this machine; None for vendors whose libraries litert-torch finds."""
    if vendor != QUALCOMM:
        if sdk is not None:
            raise UsageError(
                f"sdk=... is for Qualcomm's libraries: leave it out, litert-torch finds those of {vendor}"
            )
        return None
    if sdk is None and find_spec(_PACKAGE) is not None and not any(map(os.environ.get, SDK_VARIABLES)):
        sdk = importlib.import_module(_PACKAGE).path_to_sdk_libs()
    return find_libraries(sdk)


@dataclass(frozen=True, slots=True)
class NextSteps:
    """Steps to run a bundle after a build.

    `python` runs the uncompiled bundle in LiteRT-LM on CPU kernels, `commands` are for a phone with a Qualcomm NPU.
    """

    python: str
    commands: tuple[str, ...] = ()

    def markdown(self) -> str:
        """The steps as a Markdown page."""
        return _PAGE.format(python=self.python, commands="\n".join(self.commands) or _NO_COMMANDS)


def next_steps(vendor: str, chip: str, converted: str, output: str) -> NextSteps:
    """The steps for `output`, compiled for this chip from `converted`."""
    python = _PYTHON.format(path=converted)
    if vendor != QUALCOMM:
        return NextSteps(python)
    version = CHIPS[chip].hexagon
    names = ("libQnnHtp.so", "libQnnSystem.so", f"libQnnHtpV{version}Stub.so")
    skeleton = f"hexagon-v{version}/unsigned/libQnnHtpV{version}Skel.so"
    android = (f"aarch64-android/{name}" for name in names)
    libraries = (f"$QNN_SDK_ROOT/lib/{path}" for path in (*android, skeleton))
    pushed = [shlex.quote(output), "litert_lm_main", "libLiteRtDispatch_Qualcomm.so", *libraries]
    run = f"./litert_lm_main --backend=npu --model_path={shlex.quote(Path(output).name)} --input_prompt='a prompt'"
    commands = (
        f"adb shell mkdir -p {_FOLDER}",
        f"adb push {' '.join(pushed)} {_FOLDER}/",
        f'adb shell "cd {_FOLDER} && chmod +x litert_lm_main && LD_LIBRARY_PATH=. ADSP_LIBRARY_PATH=. {run}"',
    )
    return NextSteps(python, commands)
