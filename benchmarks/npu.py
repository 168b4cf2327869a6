"""Estimated time on a Hexagon NPU, before and after conversion, by its compiler: one table.

    npu.py MODEL.tflite ... [--sdk FOLDER] [--chip SM8850] [--forms] [--jobs N] [--json]
    npu.py --models FOLDER ...                           all models there; `npu_models.py FOLDER` makes them

Every entry point of every model is compiled alone, with the flags of litert-torch's pipeline: as exported, and as
`convert --target qualcomm-htp` rewrites it. `--forms` adds every form that `tune` would try. Times are ms for one run
of the entry point, with the compiler's bounds, for the nearest chip with an estimate and the on-chip memory of
`--chip`. They rank versions; no phone was timed. Nothing is stored between runs, and nothing is verified: `convert`
does that. The exit status is 1 if an entry point misses its bar, or takes longer than as exported.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from edge_opt.base.errors import EdgeOptError
from edge_opt.ir import Model, load, save
from edge_opt.npu import Compiler, TimeEstimate, Trial
from edge_opt.npu.compiler import cut_entry_point
from edge_opt.npu.tuning import applied, largest_attention, try_form, variants
from edge_opt.npu.vendors import backend_of
from edge_opt.targets import Target, load_target

# litert_torch.generative.export_hf.experimental.npu_export compiles with these.
EXPORTERS_FLAGS = ("--qualcomm_optimization_level=O3", "--qualcomm_enable_weight_sharing=true")
# Ours over as exported, at most, by the name of the model; anything else, and any decode, may take no longer.
BARS = {"270m_128_1024": 0.53, "6l_512_4096": 0.51, "1b_1024_4096": 0.57, "4b_128_1280": 0.83}


EXPORTED, OURS = "as exported", "ours"


@dataclass(frozen=True)
class Row:
    """One entry point of one model, with the outcome of every form that was compiled; the first is as exported."""

    model: str
    signature: str
    trials: tuple[Trial, ...]

    def time(self, form: str) -> TimeEstimate | None:
        """The estimate for a form; None where it did not compile, or nothing is known of its time."""
        return next((estimate(trial) for trial in self.trials if trial.form == form), None)

    @property
    def ratio(self) -> float | None:
        """Ours over as exported."""
        ours, exported = self.time(OURS), self.time(EXPORTED)
        return None if ours is None or exported is None else ours.us / exported.us

    @property
    def bar(self) -> float:
        """What the ratio may be at most."""
        return BARS.get(self.model, 1.0) if self.signature.startswith("prefill") else 1.0

    @property
    def misses(self) -> bool:
        """Whether it does not hold its bar, to the precision that the bars have."""
        return self.ratio is None or round(self.ratio, 2) > self.bar

    def to_dict(self) -> dict[str, Any]:
        """For `--json`."""
        told = {
            "model": self.model,
            "signature": self.signature,
            "ratio": self.ratio,
            "bar": self.bar,
        }
        return {**told, "trials": [trial.to_dict() for trial in self.trials]}


def estimate(trial: Trial) -> TimeEstimate | None:
    """The estimated time of a trial, of the whole entry point on the NPU."""
    figures = trial.measured.figures
    return figures.time if figures is not None and figures.taken == figures.operators else None


def candidates(
    model: Model, signature: str, target: Target, *, forms: bool
) -> Iterator[tuple[str, Target | None]]:
    """As exported and ours, and with `forms` what `tune` would try."""
    yield EXPORTED, None
    yield OURS, target
    if forms:
        _, attention = largest_attention(model, signature)
        yield from (
            (form, applied(target, changes))
            for form, changes in variants(attention, target)
            if changes
        )


def measured(
    path: Path, options: argparse.Namespace, folder: Path, running: ThreadPoolExecutor
) -> Iterator[Row]:
    """A row for every entry point of a model."""
    model, target = load(path), load_target("qualcomm-htp")
    compiler = Compiler(options.chip, EXPORTERS_FLAGS, options.sdk)
    judge = backend_of(options.chip).judge(compiler)
    for signature, _ in model.entry_points():
        alone = folder / f"{path.stem}.{signature}.tflite"
        save(cut_entry_point(model, signature), alone)
        waiting = {
            form: running.submit(try_form, str(alone), facts, judge)
            for form, facts in candidates(model, signature, target, forms=options.forms)
        }
        trials = tuple(told(Trial(form, future.result())) for form, future in waiting.items())
        yield Row(path.stem, signature, trials)
        alone.unlink()


def told(trial: Trial) -> Trial:
    """The same, with a line for it."""
    print(trial.form, file=sys.stderr, flush=True)
    return trial


def report(rows: Sequence[Row]) -> str:
    """The table, one entry point a line, then what else was tried, best first."""
    lines = [
        f"{'model':16}{'signature':14}{'as exported, ms':>24}{'ours, ms':>24}{'ratio':>8}{'bar':>7}"
    ]
    for row in rows:
        ratio = "-" if row.ratio is None else f"{row.ratio:.3f}"
        times = f"{_time(row.time(EXPORTED)):>24}{_time(row.time(OURS)):>24}"
        missed = "  MISSED" if row.misses else ""
        lines.append(f"{row.model:16}{row.signature:14}{times}{ratio:>8}{row.bar:7.2f}{missed}")
        others = [trial for trial in row.trials if trial.form not in (EXPORTED, OURS)]
        lines += [
            f"{'':30}{trial.form:>40}  {_time(estimate(trial)) or trial.measured.failure}"
            for trial in sorted(others, key=_microseconds)
        ]
        unknown = [trial for trial in row.trials if (time := estimate(trial)) and time.without_cost]
        lines += [f"{'':30}{trial.form}: some operators have no cost in it" for trial in unknown]
    return "\n".join(lines)


def _microseconds(trial: Trial) -> float:
    time = estimate(trial)
    return float("inf") if time is None else time.us


def _time(time: TimeEstimate | None) -> str:
    return (
        ""
        if time is None
        else f"{time.us / 1e3:.3f} [{time.us_low / 1e3:.2f} {time.us_high / 1e3:.2f}]"
    )


def main() -> int:
    """Parse the command line, run, print; 1 where a bar is missed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", type=Path, nargs="*", metavar="MODEL.tflite")
    parser.add_argument("--models", type=Path, metavar="FOLDER", help="all .tflite models there")
    parser.add_argument(
        "--sdk", metavar="FOLDER", help="Qualcomm's libraries; default: EDGE_OPT_QNN"
    )
    parser.add_argument("--chip", default="SM8850", help="default: %(default)s")
    parser.add_argument(
        "--forms", action="store_true", help="every form that `tune` would try, too"
    )
    parser.add_argument("--jobs", type=int, default=1, help="compilations at a time; default: 1")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    paths = [*options.paths, *(sorted(options.models.glob("*.tflite")) if options.models else [])]
    if not paths:
        parser.error("give models, or --models FOLDER with some in it")
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as running:
            rows = [row for path in paths for row in measured(path, options, Path(folder), running)]
    except EdgeOptError as error:
        sys.exit(f"benchmarks/npu.py: {error}")
    print(json.dumps([row.to_dict() for row in rows]) if options.json else report(rows))
    return int(any(row.misses for row in rows))


if __name__ == "__main__":
    sys.exit(main())
