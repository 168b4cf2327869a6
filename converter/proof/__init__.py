"""Proves rewrites: has both versions of a region run on the same inputs, and judges. Never changes a model."""
