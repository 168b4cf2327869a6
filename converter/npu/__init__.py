"""NPU estimates: compile a model with the vendor's compiler, and rank its forms by the compiler's figures.

Never changes a model. How to run a vendor's compiler is one module, listed in `vendors`; the compiler itself is the
user's.
"""

from edge_opt.npu.comparing import compare_on_npu
from edge_opt.npu.compiler import (
    Compiler,
    CompilerFailedError,
    CompilerMissingError,
    Figures,
    TimeEstimate,
)
from edge_opt.npu.parts import draw_gain
from edge_opt.npu.profiling import Measured, Profile, profile
from edge_opt.npu.tuning import Trial, Tuning, tune, tuned_target
from edge_opt.targets.target import write_target

__all__ = [
    "Compiler",
    "CompilerFailedError",
    "CompilerMissingError",
    "Figures",
    "Measured",
    "Profile",
    "TimeEstimate",
    "Trial",
    "Tuning",
    "compare_on_npu",
    "draw_gain",
    "profile",
    "tune",
    "tuned_target",
    "write_target",
]
