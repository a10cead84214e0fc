"""Measure dsdformat beside its peers and beside the plain system calls, on this machine.

Run `.venv/bin/python tools/bench --help` from the repository, or `python -m bench` with `tools` on
the path. `case.py` holds the words used here, `cases/` what is measured, `formats/` who is
measured, `measure.py` how one call is measured, and `runs.py` the order of the calls.
"""
