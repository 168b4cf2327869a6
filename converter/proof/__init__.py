"""Runs models and says whether two of them compute the same; never changes one.

The native runtime is only ever loaded in a child process (`worker`); this side holds plain numbers.
"""
