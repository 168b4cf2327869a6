"""Proves rewrites: runs both versions of a region on the same inputs. Never changes a model.

The native runtime is only ever loaded in a child process (`worker`); this side holds plain numbers.
"""
