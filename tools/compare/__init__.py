"""Run what users of torch's checkpoints report, with torch and with dsdformat, and show both.

Run `.venv/bin/python tools/compare --help` from the repository. `case.py` holds the words used
here, `cases/` the scenarios by subject, `libraries/` who is asked, `child.py` is the process of
one rank, `runs.py` starts ranks and stops those that hang. No outcome is written down anywhere:
each case says what is right, and all else comes from running it.
"""
