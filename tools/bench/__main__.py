"""The bench program; see `cli.py`."""

import signal
import sys
from pathlib import Path

if __package__ != "bench":
    if not __package__:  # run as a folder, which is on the path then, but its modules are not to be
        del sys.path[0]
    tools = Path(__file__).resolve().parent.parent
    sys.path[:0] = [str(tools), str(tools.parent)]  # and so the library beside it is measured

from bench.cli import main

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # and clean up
    sys.exit(main())
