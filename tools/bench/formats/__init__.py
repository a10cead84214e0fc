"""Who is measured: a module for each library, with one `Format` that says how it is called.

Each does what its manual says for a model that is there already: save it, load into it, read one
of its parameters. To add a library, write such a module and list its format in `FORMATS`.
"""

from bench.formats.dcp import DCP
from bench.formats.dcp_hf import DCP_HF, DCP_HF_CONSOLIDATED
from bench.formats.dsd import DSD
from bench.formats.format import Format
from bench.formats.plain import PLAIN
from bench.formats.safetensors import SAFETENSORS
from bench.formats.tensorizer import TENSORIZER
from bench.formats.torch_checkpointing import TORCH_CHECKPOINTING
from bench.formats.torch_pickle import TORCH_PICKLE
from bench.formats.torchsnapshot import TORCHSNAPSHOT
from bench.formats.ztensor import ZTENSOR

__all__ = ["FORMATS", "Format"]

FORMATS = (
    PLAIN,
    DSD,
    SAFETENSORS,
    TORCH_PICKLE,
    DCP,
    DCP_HF,
    DCP_HF_CONSOLIDATED,
    TORCH_CHECKPOINTING,
    TORCHSNAPSHOT,
    TENSORIZER,
    ZTENSOR,
)
