"""Estimates how a model runs on an NPU: a vendor's compiler compiles it, and its figures rank the forms.

Changes no model, and contains no vendor's code.
"""

from edge_opt.npu.comparing import compare_on_npu
from edge_opt.npu.hexagon import Figures, TimeEstimate
from edge_opt.npu.profiling import Measured, Profile, profile
from edge_opt.npu.sdk import CompilerFailedError, CompilerMissingError
from edge_opt.npu.tuning import Trial, Tuning, tune, tuned_target
from edge_opt.targets.target import write_target

__all__ = [
    "CompilerFailedError",
    "CompilerMissingError",
    "Figures",
    "Measured",
    "Profile",
    "TimeEstimate",
    "Trial",
    "Tuning",
    "compare_on_npu",
    "profile",
    "tune",
    "tuned_target",
    "write_target",
]
