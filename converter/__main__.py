"""Runs the command line for `python -m edge_opt`; no other module of the library imports it."""

import sys

from edge_opt.cli import main

if __name__ == "__main__":
    sys.exit(main())
