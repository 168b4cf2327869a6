"""From a checkpoint to a bundle for the NPU: litert-torch's stages and ours, one after the other, resumable.

It drives tools that others wrote and rewrites nothing itself; what it knows of them is in `pipeline`.
"""

from edge_opt.build.building import BuildResult, build
from edge_opt.build.stages import BuildCheckError, Job, StageAnswer, StageFailedError, StageReport

__all__ = [
    "BuildCheckError",
    "BuildResult",
    "Job",
    "StageAnswer",
    "StageFailedError",
    "StageReport",
    "build",
]
