"""The command line: arguments and printing, nothing else; every command is one call of the library."""

from edge_opt.cli.app import main

__all__ = ["main"]
