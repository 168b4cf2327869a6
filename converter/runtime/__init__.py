"""Runs models with LiteRT in child processes: inputs, requests, and what comes back. Never changes a model.

The native runtime is only ever loaded in a child process (`native`); this side holds plain numbers.
"""
