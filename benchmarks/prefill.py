"""Compare the time of verification with that of the model: `convert` and the model's own prefill on two threads.

    python benchmarks/prefill.py MODEL.tflite... [--json]

For each model, one after the other in one run: `cp` and flush, `edge-opt convert` with verification, and one run of the
longest prefill on two threads (on zeros, which take as long as other numbers; loading is not counted). The bar is 1.25
x `cp` + 2 s + two such prefills, and 1 GiB beyond the interpreter's imports. The exit status is 1 if a bar is missed or
a block is skipped.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import processes

MOST_OVER_IMPORT = 1 << 30
_IMPORT = "from ai_edge_litert.interpreter import Interpreter"
_PREFILL = """
import sys, time
import numpy as np
from ai_edge_litert.interpreter import Interpreter
interpreter = Interpreter(sys.argv[1], num_threads=2)
names = [name for name in interpreter.get_signature_list() if "prefill" in name]
name = max(names, key=lambda name: int("".join(filter(str.isdigit, name)) or 0))
run = interpreter.get_signature_runner(name)
inputs = {key: np.zeros(given["shape"], given["dtype"]) for key, given in run.get_input_details().items()}
started = time.perf_counter()
run(**inputs)
print(time.perf_counter() - started)
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """One model: seconds, bytes over the import, and sites."""

    model: str
    copy: float
    convert: float
    prefill: float
    bar: float
    over_import: int
    converted: int
    sites: int

    @property
    def holds(self) -> bool:
        """Whether both bars are kept and nothing was left."""
        quick = self.convert <= self.bar and self.over_import <= MOST_OVER_IMPORT
        return quick and self.converted == self.sites


def measure(model: Path, baseline: int) -> Measured:
    """All of it for one model."""
    with tempfile.TemporaryDirectory(dir=model.parent) as folder:
        copied, output = Path(folder) / "copy", Path(folder) / "out.tflite"
        started = time.perf_counter()
        processes.run(["cp", str(model), str(copied)])
        with copied.open("rb") as file:
            os.fsync(file.fileno())
        copy = time.perf_counter() - started
        copied.unlink()
        edge_opt = str(Path(sys.executable).parent / "edge-opt")
        command = [edge_opt, "convert", str(model), "-o", str(output), "--json"]
        ran = processes.run(command)
        assert ran.status == 0, ran.complaint
        said = json.loads(ran.said)
    prefill = processes.run([sys.executable, "-c", _PREFILL, str(model)])
    assert prefill.status == 0, prefill.complaint
    seconds = float(prefill.said.split()[-1])
    sites = [site for site in said["sites"] if (site["heads"] or 0) > 1]
    converted = sum(site["status"] == "converted" for site in sites)
    bar = 1.25 * copy + 2 + 2 * seconds
    return Measured(
        model.name, copy, ran.seconds, seconds, bar, ran.peak - baseline, converted, len(sites)
    )


def main() -> int:
    """Measures and prints a line for each model."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    baseline = processes.run([sys.executable, "-c", _IMPORT]).peak
    found = []
    for model in options.models:
        each = measure(model, baseline)
        found.append(each)
        line = (
            f"{each.model}: cp {each.copy:.2f} s, convert {each.convert:.2f} s, prefill {each.prefill:.2f} s, "
            f"bar {each.bar:.2f} s, {each.over_import >> 20} MiB over the import, "
            f"{each.converted} of {each.sites} blocks{'' if each.holds else ' MISSED'}"
        )
        print(line, file=sys.stderr if options.json else sys.stdout, flush=True)
    if options.json:
        print(json.dumps([asdict(each) for each in found], indent=2))
    return int(not all(each.holds for each in found))


if __name__ == "__main__":
    sys.exit(main())
