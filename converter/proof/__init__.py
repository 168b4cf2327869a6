"""Verifies rewrites: runs both versions of a region on the same inputs and compares them. Never changes a model."""
