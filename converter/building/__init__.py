"""Builds an NPU bundle from a checkpoint: runs litert-torch's stages and ours in sequence, resumable.

This package drives other tools and rewrites nothing itself; `pipeline` knows litert-torch.
"""

from edge_opt.building.run import BuildResult, build
from edge_opt.building.stages import BuildCheckError, StageFailedError, StageReport

__all__ = ["BuildCheckError", "BuildResult", "StageFailedError", "StageReport", "build"]
