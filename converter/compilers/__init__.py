"""Runs a vendor's own compiler on a model and reads its figures; changes no model, and holds no vendor's code."""

from edge_opt.compilers.errors import CompilerFailedError, CompilerMissingError
from edge_opt.compilers.figures import Figures, Profile, SpillFigures, VelaFigures
from edge_opt.compilers.floor import read_floor
from edge_opt.compilers.profiling import COMPILERS, LEVELS, profile

__all__ = [
    "COMPILERS",
    "LEVELS",
    "CompilerFailedError",
    "CompilerMissingError",
    "Figures",
    "Profile",
    "SpillFigures",
    "VelaFigures",
    "profile",
    "read_floor",
]
