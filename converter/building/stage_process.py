"""The process of one stage, `python -m edge_opt.building.stage_process PARENT JOB OUTCOME`; job and outcome are files.

It prints the tools' output, and progress as lines `stage done/total`.
"""

import json
import resource
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from edge_opt.base.errors import EdgeOptError
from edge_opt.base.processes import begin_child
from edge_opt.base.record import from_dict
from edge_opt.base.words import Progress
from edge_opt.building import evaluation, merging, narrowing, pipeline, rounding
from edge_opt.building.sections import closed
from edge_opt.building.stages import Job, Values

STAGES: dict[str, Callable[[Job, Progress], Values]] = {
    "merge": merging.merge,
    "configure": pipeline.configure,
    "round": rounding.round_weights,
    "export": pipeline.export,
    "check": evaluation.check_export,
    "calibrate": pipeline.calibrate,
    "quantize": pipeline.quantize,
    "narrow": narrowing.narrow,
    "optimize": pipeline.optimize,
    "evaluate": evaluation.score,
    "emulate": evaluation.emulate,
    "compile": pipeline.compile_bundle,
}


def main() -> None:
    """Run the job, and write its outcome."""
    job, outcome = map(Path, begin_child())
    answer = _answer(from_dict(Job, json.loads(job.read_text(encoding="utf-8"))))
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    answer["peak_bytes"] = 1024 * max(resource.getrusage(one).ru_maxrss for one in who)
    outcome.write_text(json.dumps(answer, default=str), encoding="utf-8")


def _answer(job: Job) -> Values:
    try:
        inputs = {role: str(closed(Path(path))) for role, path in job.inputs.items()}
        return {"values": STAGES[job.stage](replace(job, inputs=inputs), _progress)}
    except EdgeOptError as error:
        return {"error": str(error), "exit_code": error.exit_code}
    except Exception as error:
        traceback.print_exc()
        first_line, _, _ = str(error).strip().partition("\n")
        cause = f"{type(error).__name__}: {first_line}"[:300]
        return {"error": cause, "exit_code": EdgeOptError.exit_code}


def _progress(stage: str, done: int, total: int) -> None:
    print(f"{stage} {done}/{total}", flush=True)  # noqa: T201  the parent reads it


if __name__ == "__main__":
    main()
