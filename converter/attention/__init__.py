"""Attention blocks: found by dataflow, and split by following the axis of their heads (docs/head-axis.md)."""
