"""Plan the data files of one writer: which chunk goes into which file, in which order.

Pure (spec R-10.8, R-10.9). As chunks are columns, so are their places in a file.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from dsdformat.chunks import Chunks
from dsdformat.errors import UnsupportedValueError, shorten
from dsdformat.format.codecs import CODECS, RAW
from dsdformat.format.paths import emit_key_suffix, emit_keys, render_path
from dsdformat.format.payload import (
    emit_entries,
    emit_form,
    header_nbytes,
    join_entries,
    size_classes,
)
from dsdformat.format.values import encoded_key
from dsdformat.limits import FILE_CHUNKS_MAX, HEADER_ALIGNMENT, HEADER_NBYTES_MAX, SIZE_CLASSES

__all__ = ["FilePlan", "plan_files", "share_of"]


@dataclass(slots=True, eq=False)
class FilePlan:
    """A data file to write: its chunks in storage order, and the room for its header.

    Columns have one item for each chunk, in that order.

    Attributes:
        chunks: Those of all files.
        prefix: Of the paths in it.
        rows: Which chunks.
        keys: Their payload keys.
        metadata: For the header.
        header_nbytes: Room for the header; the data begins behind it.
        header: Its JSON where that is known before the data: if nothing is compressed.
        label: Of the file, once it has one.
        nbytes: Of the file, once written.
        byte_offset, stored_nbytes: Where each chunk lies: of a raw one once planned, else once
            written.
        digests: Of each chunk 32 bytes for each block, once written.
        frames: Stored lengths of the blocks of each chunk; none of raw ones.
        frame_digests: Of each chunk 32 bytes for each frame.
    """

    chunks: Chunks
    prefix: tuple[str, ...]
    rows: list[int]
    keys: list[str]
    metadata: dict[str, str]
    header_nbytes: int = 0
    header: bytes | None = None
    label: str = ""
    nbytes: int = 0
    byte_offset: list[int] = field(default_factory=list)
    stored_nbytes: list[int] = field(default_factory=list)
    digests: list[bytes | bytearray] = field(default_factory=list)
    frames: list[Sequence[int]] = field(default_factory=list)
    frame_digests: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        count = len(self.rows)
        self.digests, self.frames, self.frame_digests = [b""] * count, [()] * count, [b""] * count

    @property
    def lengths(self) -> list[int]:
        """The decoded length of each chunk."""
        return list(map(self.chunks.nbytes.__getitem__, self.rows))

    @property
    def codecs(self) -> list[int]:
        """The codec of each chunk."""
        return list(map(self.chunks.codec.__getitem__, self.rows))

    @property
    def raw_nbytes(self) -> int:
        """How many bytes of raw chunks there are; the compressed ones come behind them."""
        pairs = zip(self.codecs, self.lengths, strict=True)
        return sum(nbytes for codec, nbytes in pairs if codec == RAW)

    def header_text(self, stored: Sequence[int]) -> bytes:
        """Return the JSON of the header of chunks that are stored in so many bytes each."""
        ends = list(itertools.accumulate(stored, initial=0))
        entries = emit_entries(self.keys, self._forms(stored), ends[:-1], ends[1:])
        return join_entries(entries, self.metadata)

    def _forms(self, stored: Sequence[int]) -> list[str]:
        """Return what the header says of each chunk; made once for each dtype and shape."""
        chunks = self.chunks
        dtypes, boxes, shapes, codecs = chunks.dtype, chunks.box, chunks.shape, chunks.codec
        known: dict[tuple[str, tuple[int, ...]], str] = {}
        forms = []
        for row, nbytes in zip(self.rows, stored, strict=True):
            box, dtype, codec = boxes[row], dtypes[row], codecs[row]
            shape = shapes[row] if box is None else box.shape
            if codec != RAW:
                forms.append(emit_form(dtype, shape, codec, nbytes))
                continue
            form = known.get((dtype.name, shape))
            if form is None:
                form = known[dtype.name, shape] = emit_form(dtype, shape, RAW, nbytes)
            forms.append(form)
        return forms


def plan_files(
    chunks: Chunks,
    metadata: dict[str, str],
    block_nbytes: int,
    *,
    chunks_max: int = FILE_CHUNKS_MAX,
    header_max: int = HEADER_NBYTES_MAX,
) -> list[FilePlan]:
    """Spread chunks over files: one for each top-level key, more where one would be too full.

    Args:
        chunks: All that are written.
        metadata: For the headers.
        block_nbytes: Of the checkpoint.
        chunks_max, header_max: When to begin another file.

    Raises:
        UnsupportedValueError: a name, or the metadata, is too long for any header.
    """
    keys = [""] * len(chunks)
    groups: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for parent, first, stop in chunks.containers():
        prefix = parent[:1] if parent and type(parent[0]) is str else ()
        groups[prefix] += range(first, stop)
        below = parent[len(prefix) :]
        keys[first:stop] = emit_keys(below, chunks.step[first:stop], encoded_key)
    _add_suffixes(keys, chunks)
    plans: list[FilePlan] = []
    room = header_max - 8 - len(join_entries((), metadata))
    for prefix in sorted(groups):
        rows = _in_storage_order(chunks, groups[prefix])
        for piece in _fill_files(rows, keys, chunks, chunks_max, room):
            some = list(map(keys.__getitem__, piece))
            plan = FilePlan(chunks, prefix, piece, some, metadata)
            _place(plan, block_nbytes, header_max)
            plans.append(plan)
    return plans


def share_of(plans: Sequence[FilePlan], part: int, of: int) -> list[list[int]]:
    """Return the places of the chunks in each file that one of several processes writes.

    Raw chunks are shared by their bytes, each process a run of them. Where a compressed chunk
    lies depends on those before it, so all of one file are the share of one process.
    """
    total = sum(plan.raw_nbytes for plan in plans)
    shares: list[list[int]] = []
    done = 0
    for number, plan in enumerate(plans):
        share = []
        for place, (codec, nbytes) in enumerate(zip(plan.codecs, plan.lengths, strict=True)):
            owner = number % of
            if codec == RAW:
                owner = min(of - 1, done * of // max(total, 1))
                done += nbytes
            if owner == part:
                share.append(place)
        shares.append(share)
    return shares


def _add_suffixes(keys: list[str], chunks: Chunks) -> None:
    """Complete the keys of chunks that are parts of tensors, or compressed."""
    codecs = chunks.codec
    if not any(codecs) and chunks.box.count(None) == len(keys):  # mostly
        return
    for row, box in enumerate(chunks.box):
        if box is not None or codecs[row] != RAW:
            keys[row] += emit_key_suffix(box, None if codecs[row] == RAW else CODECS[codecs[row]])


def _in_storage_order(chunks: Chunks, rows: list[int]) -> list[int]:
    """Raw chunks in falling order of size class, then compressed ones (R-10.8).

    Whole pages keep their order, so that a layer's tensors stay together; of the others the
    largest comes first, and so lies at a page boundary too.
    """
    lengths = chunks.nbytes
    by_class: dict[int, list[int]] = {size: [] for size in SIZE_CLASSES}
    packed = []
    for row, size in zip(rows, size_classes(map(lengths.__getitem__, rows)), strict=True):
        if chunks.codec[row] == RAW:
            by_class[size].append(row)
        else:
            packed.append(row)
    ordered: list[int] = []
    for size in sorted(by_class, reverse=True):
        some = by_class[size]
        if size != HEADER_ALIGNMENT:
            some.sort(key=lengths.__getitem__, reverse=True)  # those of one length keep their order
        ordered += some
    return ordered + packed


def _fill_files(
    rows: list[int], keys: Sequence[str], chunks: Chunks, chunks_max: int, header_room: int
) -> Iterator[list[int]]:
    shapes = chunks.shape
    # Keys in their longest escape, numbers and punctuation: an upper bound.
    text = "".join(map(keys.__getitem__, rows))
    dims = sum(map(len, map(shapes.__getitem__, rows)))
    if len(rows) <= chunks_max and _cost(text, len(rows), dims) <= header_room:
        yield rows
        return
    piece: list[int] = []
    room = header_room
    for row in rows:
        cost = _cost(keys[row], 1, len(shapes[row]))
        if piece and (len(piece) >= chunks_max or cost > room):
            yield piece
            piece, room = [], header_room
        piece.append(row)
        room -= cost
    if piece:
        yield piece


def _cost(keys: str, count: int, dims: int) -> int:
    return 6 * len(keys.encode()) + 64 * count + 24 * (dims + 3 * count)


def _place(plan: FilePlan, block_nbytes: int, header_max: int) -> None:
    """Plan the header's room, and where raw chunks lie: one after another, before the others."""
    chunks, lengths, codecs = plan.chunks, plan.lengths, plan.codecs
    stored = lengths
    if any(codecs):
        stored = [chunks.stored_bound(row, block_nbytes) for row in plan.rows]
    text = plan.header_text(stored)
    plan.header_nbytes = header_nbytes(len(text))
    if plan.header_nbytes > header_max:
        raise _too_long(plan, header_max)
    if not any(codecs):
        plan.header = text
    plan.stored_nbytes = [
        nbytes if codec == RAW else 0 for codec, nbytes in zip(codecs, lengths, strict=True)
    ]
    ends = itertools.accumulate(plan.stored_nbytes, initial=plan.header_nbytes)
    plan.byte_offset = list(ends)[:-1]


def _too_long(plan: FilePlan, header_max: int) -> UnsupportedValueError:
    """Say why a header is too long although the file has one chunk alone."""
    row, key = plan.rows[0], plan.keys[0]
    if len(key.encode()) > sum(len(part) for pair in plan.metadata.items() for part in pair):
        what, hint = f"the name of {shorten(plan.chunks.name(row))}", "use a shorter name"
    else:
        what, hint = "the metadata for the headers", "store long values in the state"
    return UnsupportedValueError(
        f"{what} needs a header of {plan.header_nbytes} bytes, at most {header_max}",
        path_in_tree=render_path(plan.chunks.path(row)),
        hint=hint,
    )
