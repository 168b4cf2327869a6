"""NPU compilers as data: what each accepts and prefers, one file per compiler; users can add their own."""

from edge_opt.targets.lint import Finding, lint
from edge_opt.targets.target import GENERIC, Target, TargetLike, load_target, target_names

__all__ = ["GENERIC", "Finding", "Target", "TargetLike", "lint", "load_target", "target_names"]
