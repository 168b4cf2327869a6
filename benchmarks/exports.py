"""Make the models of exporters that need their own versions of packages, each in its own environment.

    python benchmarks/exports.py FOLDER
    python benchmarks/exports.py FOLDER --python exports_keras=/path/to/python      (to use an existing one)

For each module testdata/exports_*.py, an environment is made in FOLDER and the module's models are made in it. Existing
models are not made again. benchmarks/families.py measures them.
"""

import argparse
import subprocess
import sys
from pathlib import Path

_TESTDATA = Path(__file__).resolve().parent.parent / "testdata"
_ONNX2TF = (
    "onnx2tf==1.29.24 tensorflow==2.19.0 tf-keras==2.19.0 onnx==1.19.1 onnxscript==0.7.2 onnxsim==0.4.36 "
    "onnx-graphsurgeon simple_onnx_processing_tools transformers==5.23.0 ai-edge-litert psutil ml_dtypes"
)
# What is installed one after the other: torch without its GPU libraries comes first.
_NEEDED = {
    "exports_keras": ("tensorflow==2.21.0 keras-hub==0.32.0",),
    "exports_onnx2tf": ("torch==2.13.0", _ONNX2TF),
}


def environment(module: str, folder: Path) -> str:
    """The interpreter of a module's own environment, made where it is not there yet."""
    place = folder / f"env-{module}"
    python = place / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
        for words in _NEEDED[module]:
            subprocess.run([str(python), "-m", "pip", "-q", "install", *words.split()], check=True)
    return str(python)


def make(module: str, python: str, folder: Path) -> list[str]:
    """Make the module's models that are not there yet; returns the families that could not be made."""
    script = str(_TESTDATA / "make_families.py")
    listed = [python, script, "--from", module, "--list"]
    lines = subprocess.run(listed, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [line.split()[0] for line in lines]
    missing = [name for name in found if not (folder / f"{name}.tflite").exists()]
    if missing:
        subprocess.run(
            [python, script, str(folder), "--from", module, "--only", *missing], check=False
        )
    return [name for name in found if not (folder / f"{name}.tflite").exists()]


def main() -> int:
    """Make the models; 1 where one could not be made."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", action="append", default=[], metavar="MODULE=PATH")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    given = dict(pair.split("=", 1) for pair in arguments.python)
    missing: list[str] = []
    for module in _NEEDED:
        python = given.get(module) or environment(module, arguments.folder)
        missing += make(module, python, arguments.folder)
    for name in missing:
        print(f"{name}: not made, see {name}.log")
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
