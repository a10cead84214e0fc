"""Measure dsdformat beside its peers and beside the plain system calls, on this machine.

Run `python tools/bench --help` or `python -m tools.bench --help` from the repository. `case.py`
holds the words used here, `cases/` what is measured, `formats/` who is measured, `goals.py` what is
to be reached, `measure.py` how one call is measured, and `runs.py` the order of the calls.
"""
