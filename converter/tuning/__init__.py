"""Finds the form and the compiler flags that suit one target best, by compiling one block of a model in all of them."""

from edge_opt.tuning.candidates import Choice, choices
from edge_opt.tuning.one_block import OneBlock, cut_block
from edge_opt.tuning.search import Trial, Tuning, tune
from edge_opt.tuning.winner import tuned_target, write_target

__all__ = [
    "Choice",
    "OneBlock",
    "Trial",
    "Tuning",
    "choices",
    "cut_block",
    "tune",
    "tuned_target",
    "write_target",
]
