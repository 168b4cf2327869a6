"""Runs models with LiteRT in child processes: inputs, requests and replies. Never changes a model.

The native runtime is loaded only in a child process (`native`); the parent holds plain data.
"""
