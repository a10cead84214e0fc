"""The bench program; see `cli.py`."""

import signal
import sys
from pathlib import Path

if __package__ != "bench":  # run as a folder, or as tools.bench: its parent is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and clean up
    sys.exit(main())
