"""All cases, in order."""

from vectors.cases import Case
from vectors.invalid import (
    blocks,
    body,
    entries,
    files,
    head,
    headers,
    keys,
    msgpack,
    ranges,
    sections,
    tensors,
    tiling,
)
from vectors.invalid import folder as invalid_folder
from vectors.invalid import tree as invalid_tree
from vectors.valid import codecs, values
from vectors.valid import folder as valid_folder
from vectors.valid import tensors as valid_tensors
from vectors.valid import tree as valid_tree

MODULES = (
    *(valid_folder, valid_tensors, codecs, values, valid_tree),
    *(invalid_folder, head, sections, msgpack, body, entries, invalid_tree, keys),
    *(tensors, tiling, ranges, files, headers, blocks),
)


def all_cases() -> list[Case]:
    cases = [case for module in MODULES for case in module.cases()]
    folders = [case.folder for case in cases]
    repeated = {folder for folder in folders if folders.count(folder) > 1}
    if repeated:
        raise ValueError(f"two cases have one id: {sorted(repeated)}")
    return cases
