"""The command line: arguments and printing, nothing else; every command is one call of the library."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code, whatever happens, an interrupt during the imports too."""
    try:
        from edge_opt.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("edge-opt: interrupted\n")
        return 130
    return run(arguments)
