"""Loads every file that enters rules into the table; holds nothing else."""

from edge_opt.shapes import (
    arranging,
    contraction,
    control_flow,
    elementwise,
    generating,
    lookup,
    padding,
    recurrent,
    reduction,
    reshaping,
    slicing,
    stablehlo,
    stablehlo_products,
    windows,
)

LOADED = (
    arranging,
    contraction,
    control_flow,
    elementwise,
    generating,
    lookup,
    padding,
    recurrent,
    reduction,
    reshaping,
    slicing,
    stablehlo,
    stablehlo_products,
    windows,
)
