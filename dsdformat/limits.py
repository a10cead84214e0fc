"""Ceilings that a reader checks before it allocates (spec section 17), fixed sizes and names."""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

MANIFEST_LABEL = "manifest.dsd"
SIGNATURES_LABEL = "manifest.dsd.sig"
SIGNATURES_MAX = 256
SIGNATURES_NBYTES_MAX = 64 * 1024

HEAD_NBYTES_MAX = 64 * MIB
BODY_NBYTES_MAX = GIB
DEPTH_MAX = 128
NDIM_MAX = 64
CUT_DIMS_MAX = 8
INT63_MAX = 2**63 - 1
INT_MIN, INT_MAX = -(2**63), 2**64 - 1  # what msgpack holds as an integer

PAGE_NBYTES = 64 * KIB
BLOCK_NBYTES_MIN = 4 * KIB
BLOCK_NBYTES_MAX = 64 * MIB
BLOCK_NBYTES_DEFAULT = 4 * MIB
LEAF_NBYTES = 4 * MIB
WINDOW_NBYTES_MAX = 64 * MIB

FILE_CHUNKS_MAX = 65_536
HEADER_NBYTES_MAX = 64 * MIB
HEADER_ALIGNMENT = 4096
SIZE_CLASSES = (4096, 256, 64, 16, 8, 4, 2, 1)

# Foreign files: what `convert` reads of them at most.
PICKLE_NBYTES_MAX = GIB
PICKLE_MEMORY_MAX = 4 * GIB  # what its objects take, as estimated
PICKLE_MARKS_MAX = 1024  # nested marks
PICKLE_INT_NBYTES_MAX = KIB
PICKLE_NAME_NBYTES_MAX = KIB  # of a module or a qualified name
PICKLE_DEPTH_MAX = 1024  # objects within objects
PICKLE_NODES_MAX = 50_000_000  # with shared objects counted as often as they are met
PICKLE_NODES_FREE = 2**17  # of which so many may be, however few are in the file
PICKLE_SHARED_MAX = 16  # and beyond that, so many for each that is in the file
ARCHIVE_DIRECTORY_NBYTES_MAX = 512 * MIB
JSON_NBYTES_MAX = 128 * MIB
AMPLIFICATION_MAX = 64  # bytes of all tensors, per byte of the file
AMPLIFICATION_FREE = GIB
