"""The fuzz program; see `cli.py`."""

import sys
from pathlib import Path

if not __package__:  # run as a folder: the package's parent is not on the path then
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from fuzz.cli import main

if __name__ == "__main__":
    sys.exit(main())
