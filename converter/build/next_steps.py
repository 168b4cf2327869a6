"""What to do with a bundle that was built: try it on this machine, then put it on the phone and run it there."""

from dataclasses import dataclass
from pathlib import Path

from edge_opt.build.vendors import MEDIATEK, QUALCOMM, Vendor
from edge_opt.npu.chips import CHIPS

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
    run = f"./litert_lm_main --backend=npu --model_path={Path(output).name} --input_prompt='a prompt'"
    commands = (
        f"adb shell mkdir -p {_FOLDER}",
        f"adb push {output} {' '.join(file.path for file in files)} {_FOLDER}/",
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
