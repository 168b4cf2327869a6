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
_FOLDER, _ANDROID = "/data/local/tmp/edge-opt", "aarch64-android"
_TRY = """\
import litert_lm
npu = litert_lm.Backend.NPU(litert_dispatch_lib_dir="")
with litert_lm.Engine({path!r}, backend=npu) as engine:
    with engine.create_session(max_output_tokens=32) as session:
        session.run_prefill(["a prompt"])
        print(*session.run_decode().texts)
"""
_PAGE = """\
# Next steps for {name}

## Try it here

LiteRT-LM runs the bundle, before compilation, on this machine's CPU (`pip install litert-lm-api`):

```py
{python}```

## Run it on the phone

{phone}
"""
_NO_COMMANDS = "edge-opt knows no commands for this vendor's phones: see LiteRT-LM's documentation."
_PHONE = """\
`litert_lm_main` and `libLiteRtDispatch_Qualcomm.so` are built from one release of LiteRT-LM for android_arm64. The
other libraries are from Qualcomm's AI Engine Direct SDK (QAIRT) or from com.qualcomm.qti:qnn-runtime of Maven Central,
not older than the release that compiled the bundle.

```bash
{commands}
```"""


def chip_of(name: str) -> tuple[str, str]:
    """The vendor of a chip, as litert-torch's pipeline names it, and the chip; UsageError for an unknown chip."""
    found = find_chip(name)
    if found is None:
        raise unknown("chip", name.strip(), [chip for chips in VENDORS.values() for chip in chips])
    return found


def find_compiler(vendor: str, sdk: AnyPath | None) -> Path | None:
    """The folder with Qualcomm's libraries for this machine; None for vendors whose libraries litert-torch finds."""
    if vendor != QUALCOMM:
        if sdk is not None:
            raise UsageError(
                f"sdk=... is for Qualcomm's libraries: litert-torch finds those of {vendor} by itself"
            )
        return None
    if sdk is None and find_spec(_PACKAGE) is not None and not any(map(os.environ.get, SDK_VARIABLES)):
        sdk = importlib.import_module(_PACKAGE).path_to_sdk_libs()
    return find_libraries(sdk)


@dataclass(frozen=True, slots=True)
class NextSteps:
    """Steps to run a bundle after a build.

    `bundle` is the uncompiled bundle, `python` runs it in LiteRT-LM on CPU kernels. `commands` are for a phone with a
    Qualcomm NPU; empty if nothing was compiled.
    """

    bundle: str
    python: str
    commands: tuple[str, ...] = ()

    def markdown(self, name: str) -> str:
        """The steps as a Markdown page for the bundle of this name."""
        phone = _PHONE.format(commands="\n".join(self.commands)) if self.commands else _NO_COMMANDS
        return _PAGE.format(name=name, python=self.python, phone=phone)


def next_steps(
    vendor: str, chip: str, libraries: Path | None, converted: str, output: str | None
) -> NextSteps:
    """The steps for `output`, compiled for this chip from `converted`; `output` is None if nothing was compiled.

    `libraries` is the compiler's folder; if it is in a whole SDK, commands take the phone's libraries from there.
    """
    python = _TRY.format(path=converted)
    if output is None or vendor != QUALCOMM:
        return NextSteps(converted, python)
    version = CHIPS[chip].hexagon
    whole = libraries is not None and (libraries.parent / _ANDROID).is_dir()
    root = libraries.parent if libraries is not None and whole else Path("$QNN_SDK_ROOT/lib")
    names = ("libQnnHtp.so", "libQnnSystem.so", f"libQnnHtpV{version}Stub.so")
    skeleton = root / f"hexagon-v{version}" / "unsigned" / f"libQnnHtpV{version}Skel.so"
    of_qualcomm = (*(root / _ANDROID / name for name in names), skeleton)
    paths = (output, "litert_lm_main", "libLiteRtDispatch_Qualcomm.so", *map(str, of_qualcomm))
    # The shell expands $QNN_SDK_ROOT, so such paths are not quoted.
    pushed = (path if path.startswith("$") else shlex.quote(path) for path in paths)
    run = f"./litert_lm_main --backend=npu --model_path={shlex.quote(Path(output).name)} --input_prompt='a prompt'"
    commands = (
        f"adb shell mkdir -p {_FOLDER}",
        f"adb push {' '.join(pushed)} {_FOLDER}/",
        f'adb shell "cd {_FOLDER} && chmod +x litert_lm_main && LD_LIBRARY_PATH=. ADSP_LIBRARY_PATH=. {run}"',
    )
    return NextSteps(converted, python, commands)
