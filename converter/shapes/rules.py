"""Loads every file that enters rules into the table; holds nothing else."""

from edge_opt.shapes import arranging, contraction, control_flow, elementwise, reduction, reshaping, slicing

LOADED = (arranging, contraction, control_flow, elementwise, reduction, reshaping, slicing)
