"""Feed what readers read with bytes that nobody meant, and see that only our errors come out.

Run `.venv/bin/python tools/fuzz --help` from the repository. `targets.py` lists what is fed, one
function each, and the rule that it keeps; `bytewise.py`, `values.py`, `manifests.py`, `folders.py`
and `foreign.py` change inputs, with the digests above a change made right; `engine.py` runs inputs
from a seed alone, `guided.py` lets atheris choose them by the code they reach, and `peer.py` asks
the JavaScript reader whether it agrees.
"""
