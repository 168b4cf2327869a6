"""The command line: only arguments and printing; the library does the work."""

import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code, even if it is interrupted during the imports."""
    try:
        from edge_opt.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("edge-opt: interrupted\n")
        return 130
    return run(arguments)
