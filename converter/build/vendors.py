"""Chips by name: whose they are, where their compiler's libraries are, and what goes to the phone at the end."""

import importlib
import os
import shlex
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from edge_opt.base.atomic import AnyPath
from edge_opt.base.errors import unknown
from edge_opt.npu.chips import CHIPS
from edge_opt.npu.sdk import SDK_VARIABLES, CompilerMissingError, find_libraries

# Of LiteRT, litert/python/aot/vendors/*/target.py.
_MEDIATEK_CHIPS = (
    *("MT6853", "MT6877", "MT6878", "MT6879", "MT6886", "MT6893", "MT6895", "MT6897", "MT6983", "MT6985"),
    *("MT6989", "MT6991", "MT6993", "MT8171", "MT8188", "MT8189"),
)
_GOOGLE = ("Tensor_G3", "Tensor_G4", "Tensor_G5", "Tensor_G6")
_FOLDER = "/data/local/tmp/edge-opt"
_ANDROID = "aarch64-android"
_QUALCOMMS = (
    "of Qualcomm's AI Engine Direct SDK (QAIRT), or of com.qualcomm.qti:qnn-runtime from Maven Central; not older than "
    "the one that compiled the bundle"
)
_MEDIATEKS = "of MediaTek's NeuroPilot SDK, for this chip"
_BUILT = "built from one release of LiteRT-LM, for android_arm64"
_TRY = """\
import litert_lm
npu = litert_lm.Backend.NPU(litert_dispatch_lib_dir="")
with litert_lm.Engine({path!r}, backend=npu) as engine:
    with engine.create_session(max_output_tokens=32) as session:
        session.run_prefill(["a prompt"])
        print(*session.run_decode().texts)
"""


@dataclass(frozen=True, slots=True)
class Vendor:
    """A vendor of NPUs: `name` as litert-torch's pipeline calls it.

    `library` is a pattern of the one that has to be in a folder of the vendor's; empty where no stage of the pipeline
    compiles for the vendor.
    """

    name: str
    title: str
    chips: tuple[str, ...]
    library: str

    @property
    def package(self) -> str:
        """LiteRT's, with the vendor's libraries."""
        return f"ai_edge_litert_sdk_{self.name}"


QUALCOMM = Vendor("qualcomm", "Qualcomm", tuple(CHIPS), "libQnnHtp.so")
MEDIATEK = Vendor("mediatek", "MediaTek", _MEDIATEK_CHIPS, "libneuron*_adapter*.so")
VENDORS = (QUALCOMM, MEDIATEK, Vendor("google_tensor", "Google Tensor", _GOOGLE, ""))


def find_chip(name: str) -> tuple[Vendor, str]:
    """Whose the chip is, and how LiteRT spells it; UsageError where there is no such chip."""
    chips = {chip.lower(): (vendor, chip) for vendor in VENDORS for chip in vendor.chips}
    if name.strip().lower() not in chips:
        raise unknown("chip", name.strip(), [chip for _, chip in chips.values()])
    return chips[name.strip().lower()]


def find_compiler(vendor: Vendor, sdk: AnyPath | None) -> Path | None:
    """The folder with the vendor's libraries for this machine; None where LiteRT finds its package with them."""
    pip_name = vendor.package.replace("_", "-")
    if not vendor.library:
        raise CompilerMissingError(
            f"litert-torch's pipeline has no compiler for {vendor.title}: compile the bundle's models with LiteRT's "
            f"aot_compile and the vendor's SDK (pip install {pip_name})"
            f"{'' if sdk is None else '; leave sdk=... out for the bundle as it is in front of the compiler'}"
        )
    packaged = find_spec(vendor.package) is not None
    if vendor is QUALCOMM:
        if sdk is None and packaged and not any(map(os.environ.get, SDK_VARIABLES)):
            sdk = importlib.import_module(vendor.package).path_to_sdk_libs()
        return find_libraries(sdk)
    if sdk is None and not packaged:
        raise CompilerMissingError(
            f"{vendor.title}'s compiler is missing: `pip install {pip_name}`, which gets it from {vendor.title}, or "
            f"give its folder with sdk=DIR"
        )
    if sdk is None:
        return None
    for library in Path(sdk).rglob(vendor.library):
        return library.resolve().parent
    raise CompilerMissingError(f"{sdk} holds no {vendor.library}: give the folder of {vendor.title}'s SDK")


@dataclass(frozen=True, slots=True)
class PhoneFile:
    """A file that the phone needs beside the bundle: what to push, and where it comes from."""

    path: str
    source: str


@dataclass(frozen=True, slots=True)
class NextSteps:
    """The end of a build.

    `bundle` is the one in front of the compiler, and `python` runs it in LiteRT-LM on CPU kernels. `files` and the
    `commands` are for the phone; there are none where nothing was compiled.
    """

    bundle: str
    python: str
    files: tuple[PhoneFile, ...] = ()
    commands: tuple[str, ...] = ()

    def lines(self) -> list[str]:
        """For people."""
        lines = [
            "Try it here, in LiteRT-LM on CPU kernels, before the compiler (pip install '.[lm]' in a checkout):",
            "",
            *(f"    {line}" for line in self.python.splitlines()),
        ]
        if self.files:
            lines += ["", "On the phone it needs:", ""]
            lines += [f"    {file.path}, {file.source}" for file in self.files]
            lines += ["", "Push it and run it there:", "", *(f"    {line}" for line in self.commands)]
        return lines


def next_steps(
    vendor: Vendor, chip: str, libraries: Path | None, converted: str, output: str | None
) -> NextSteps:
    """What to do next with `output`, compiled for this chip from `converted`; None where nothing was compiled.

    `libraries` is the folder of the compiler: where a whole SDK is around it, the phone's libraries are named there.
    """
    python = _TRY.format(path=converted)
    if output is None:
        return NextSteps(converted, python)
    dispatch = f"libLiteRtDispatch_{vendor.title.replace(' ', '')}.so"
    files = [PhoneFile(name, _BUILT) for name in ("litert_lm_main", dispatch)]
    if vendor is QUALCOMM:
        files += [PhoneFile(str(path), _QUALCOMMS) for path in _qualcomm_libraries(chip, libraries)]
    elif vendor is MEDIATEK:
        files.append(PhoneFile("libneuronusdk_adapter.mtk.so", _MEDIATEKS))
    variables = "LD_LIBRARY_PATH=. ADSP_LIBRARY_PATH=." if vendor is QUALCOMM else "LD_LIBRARY_PATH=."
    name = shlex.quote(Path(output).name)
    run = f"./litert_lm_main --backend=npu --model_path={name} --input_prompt='a prompt'"
    # The shell replaces $QNN_SDK_ROOT, so what begins with it stays unquoted.
    pushed = (
        path if path.startswith("$") else shlex.quote(path)
        for path in (output, *(file.path for file in files))
    )
    commands = (
        f"adb shell mkdir -p {_FOLDER}",
        f"adb push {' '.join(pushed)} {_FOLDER}/",
        f'adb shell "cd {_FOLDER} && chmod +x litert_lm_main && {variables} {run}"',
    )
    return NextSteps(converted, python, tuple(files), commands)


def _qualcomm_libraries(chip: str, libraries: Path | None) -> list[Path]:
    """Of a Hexagon NPU its library, and the two ends of the call to this very version of it."""
    version = CHIPS[chip].hexagon if chip in CHIPS else "?"
    root = Path("$QNN_SDK_ROOT/lib")
    if libraries is not None and (libraries.parent / _ANDROID).is_dir():
        root = libraries.parent
    names = ("libQnnHtp.so", "libQnnSystem.so", f"libQnnHtpV{version}Stub.so")
    skeleton = root / f"hexagon-v{version}" / "unsigned" / f"libQnnHtpV{version}Skel.so"
    return [*(root / _ANDROID / name for name in names), skeleton]
