"""Who is asked: pairs of libraries with the same functions.

Modules here give dsdformat and its peers the same shape, with calls that the documentation of each
recommends. State dicts need none of it: dsdformat's module has the functions of torch's.
"""

from compare.case import Library, Pair

__all__ = ["COLLECTIVES", "DCP", "HF", "MODULES", "SAFETENSORS", "STATE_DICTS", "TORCH_SAVE"]

_DSD = Library("dsdformat", "compare.libraries.dsd", needs="dsdformat")

STATE_DICTS = Pair(
    Library("state_dict", "torch.distributed.checkpoint.state_dict"),
    Library("dsdformat", "dsdformat.torch.state_dict"),
)
COLLECTIVES = Pair(Library("gloo", "compare.libraries.collectives"), _DSD)
DCP = Pair(Library("DCP", "compare.libraries.dcp"), _DSD)
HF = Pair(Library("DCP to Hugging Face", "compare.libraries.hf", needs="safetensors"), _DSD)
MODULES = Pair(Library("torch", "compare.libraries.plain"), _DSD)
SAFETENSORS = Pair(Library("safetensors", "compare.libraries.st", needs="safetensors"), _DSD)
TORCH_SAVE = Pair(Library("torch.save", "compare.libraries.plain"), _DSD)
