"""What an NPU makes of a model: a vendor's own compiler is run on it, and forms are chosen by what it says.

Changes no model, and holds no vendor's code.
"""

from edge_opt.npu.candidates import Choice, choices
from edge_opt.npu.errors import CompilerFailedError, CompilerMissingError
from edge_opt.npu.figures import Figures, Profile, SpillFigures, VelaFigures
from edge_opt.npu.floor import read_floor
from edge_opt.npu.one_block import OneBlock, cut_block
from edge_opt.npu.profiling import COMPILERS, LEVELS, profile
from edge_opt.npu.search import Trial, Tuning, tune
from edge_opt.npu.winner import tuned_target, write_target

__all__ = [
    "COMPILERS",
    "LEVELS",
    "Choice",
    "CompilerFailedError",
    "CompilerMissingError",
    "Figures",
    "OneBlock",
    "Profile",
    "SpillFigures",
    "Trial",
    "Tuning",
    "VelaFigures",
    "choices",
    "cut_block",
    "profile",
    "read_floor",
    "tune",
    "tuned_target",
    "write_target",
]
