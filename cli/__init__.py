"""The command line: only arguments and printing; the library does the work."""

from edge_opt.cli.app import main

__all__ = ["main"]
