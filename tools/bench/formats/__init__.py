"""Who is measured: a module for each library, with one `Format` that says how it is called.

Each does what its manual says for a model that is there already: save it, load into it, read one
of its parameters. To add a library, write such a module and list its format in `FORMATS`.
"""

from bench.formats.dcp import DCP
from bench.formats.dsd import DSD
from bench.formats.format import Format
from bench.formats.plain import PLAIN
from bench.formats.safetensors import SAFETENSORS
from bench.formats.torch_pickle import TORCH_PICKLE

__all__ = ["FORMATS", "Format"]

FORMATS = (PLAIN, DSD, SAFETENSORS, TORCH_PICKLE, DCP)
