"""What an NPU makes of a model: a vendor's own compiler is run on it, and forms are chosen by what it says.

Changes no model, and holds no vendor's code.
"""

from edge_opt.npu.candidates import Choice, choices
from edge_opt.npu.comparing import NpuComparison, compare_on_npu
from edge_opt.npu.errors import CompilerFailedError, CompilerMissingError, CompilerTimeoutError
from edge_opt.npu.figures import Figures, Profile, SpillFigures, TimeEstimate, VelaFigures, read_floor
from edge_opt.npu.layers import Layers, cut_layers
from edge_opt.npu.profiling import COMPILERS, LEVELS, profile
from edge_opt.npu.search import Tuning, tune
from edge_opt.npu.trials import Trial
from edge_opt.npu.winner import tuned_target, write_target

__all__ = [
    "COMPILERS",
    "LEVELS",
    "Choice",
    "CompilerFailedError",
    "CompilerMissingError",
    "CompilerTimeoutError",
    "Figures",
    "Layers",
    "NpuComparison",
    "Profile",
    "SpillFigures",
    "TimeEstimate",
    "Trial",
    "Tuning",
    "VelaFigures",
    "choices",
    "compare_on_npu",
    "cut_layers",
    "profile",
    "read_floor",
    "tune",
    "tuned_target",
    "write_target",
]
