"""The job that scores held-out text with one model, and what it needs."""

from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from edge_opt.build.jobs import Job
from edge_opt.conversion.choices import Progress
from edge_opt.evaluation import checkpoint, runtime
from edge_opt.evaluation.findings import Said
from edge_opt.output.errors import UsageError

_RUNTIME = "litert-lm-api"


def score(job: Job, progress: Progress) -> dict[str, Any]:
    """What a bundle or a checkpoint says of the text, and with how many generated tokens it agrees."""
    model, options = job.inputs["model"], job.options
    judged = options.get("judged", {})

    def step(done: int, total: int) -> None:
        progress(job.stage, done, total)

    if Path(model).is_dir():
        told = [Said(**one) for one in options["said"]]
        said, agreed = checkpoint.score(model, told, judged=judged, step=step)
    else:
        said, agreed = runtime.score(
            model,
            options["parts"],
            checkpoint=options.get("tokenizer"),
            skip_long=options["skip_long"],
            judged=judged,
            step=step,
        )
    return {"said": [asdict(one) for one in said], "agreed": agreed}


def check_runtimes(*, checkpoint: bool) -> dict[str, str]:
    """The version of what runs bundles; UsageError where that is missing, or what runs a checkpoint."""
    try:
        found = {_RUNTIME: version(_RUNTIME)}
    except PackageNotFoundError:
        raise UsageError(
            "bundles are evaluated in LiteRT-LM, which is not installed: pip install '.[lm]' in a checkout of edge-opt "
            "(a build goes on without it with evaluate=False)"
        ) from None
    missing = [name for name in ("torch", "transformers") if checkpoint and find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a checkpoint runs in transformers, and {' and '.join(missing)} is not installed: pip install "
            f"'.[build]' in a checkout of edge-opt, or give a float bundle as the reference"
        )
    return found
