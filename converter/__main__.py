"""`python -m edge_opt` is the command line; the only place in the library that knows of it."""

import sys

from edge_opt.cli import main

if __name__ == "__main__":
    sys.exit(main())
