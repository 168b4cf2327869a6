"""Attention blocks: finding the head axis, following it through operators, and splitting blocks along it."""
