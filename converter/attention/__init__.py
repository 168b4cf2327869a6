"""Attention blocks: the head axis, how it passes through operators, and how blocks are split along it."""
