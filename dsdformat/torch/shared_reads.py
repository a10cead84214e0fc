"""Read what ranks want: what several want is read once, verified there, and passed on.

Ranks find out which boxes others want too, plan by themselves who reads what of those, read, and
give each other the rest in messages. What a rank alone wants, it reads and nobody hears of. Where
ranks want other boxes of the same blocks, `shared_blocks` sees to it that blocks are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dsdformat.boxes import Box
from dsdformat.format.digests import digest
from dsdformat.garbage import paused_gc
from dsdformat.plan.block_shares import is_worth_it
from dsdformat.plan.read_shares import ReadPart, cut_reads, cut_rows, piece_nbytes, share_out
from dsdformat.reader import Checkpoint
from dsdformat.torch.alike import KEY_NBYTES, alike_among, keys_to_tell
from dsdformat.torch.buffers import box_view
from dsdformat.torch.comm import Comm, group_order
from dsdformat.torch.moves import Move, copy_twins, distinct, fill, mark_changed, read
from dsdformat.torch.origin import Origin
from dsdformat.torch.pass_on import Part, pass_on
from dsdformat.torch.shared_blocks import BlockMoves

__all__ = ["fill_together"]


@dataclass
class _Shared:
    """What some ranks all want.

    Attributes:
        ranks: Of the group, ascending; this one among them.
        moves: Of this rank, in an order that is the same on all of them.
        given: For each rank, which boxes of which destinations it reads and passes on.
    """

    ranks: tuple[int, ...]
    moves: list[Move] = field(default_factory=list)
    given: list[list[Part]] = field(default_factory=list)


def fill_together(
    comm: Comm,
    checkpoint: Origin,
    list_moves: Callable[[], Sequence[Move]],
    *,
    share_reads: bool,
) -> None:
    """Read tensors on all ranks of a group, what is wanted twice once.

    Args:
        comm: The ranks that load together, from one checkpoint.
        checkpoint: It, as this rank has it open.
        list_moves: Makes the destinations of this rank, and lists what is to be read.
        share_reads: Whether ranks pass on what others want too; the same on all of them.

    Raises:
        DistributedError: `rank_failed`, on every rank, before anything is passed on.

    Ranks: collective over the group.
    Memory: as `fill`; then as `pass_on`; then as `BlockMoves.run`.
    """
    if comm.world_size == 1 or not share_reads:
        with comm.together("load"):
            fill(checkpoint, list_moves())
        return
    moves: Sequence[Move] = ()
    first: Sequence[Move] = ()
    keys: list[bytes] = []
    blocks: BlockMoves | None = None
    with comm.together("load") as step, paused_gc():
        moves = list_moves()
        first = distinct(moves)
        keys = [_key(move) for move in first]
        if isinstance(checkpoint, Checkpoint):
            blocks = BlockMoves(comm, checkpoint, first)
        nbytes = [blocks.wanted_nbytes, blocks.extra_nbytes] if blocks else [0, 0]
        step.told = [len(first), nbytes, keys_to_tell(comm, keys)]
    if not any(count for count, *_ in step.heard):
        return
    ranks = alike_among(comm, keys, [told for *_, told in step.heard])
    shared: list[_Shared] = []
    own = [move for move, some in zip(first, ranks, strict=True) if len(some) == 1]
    if blocks is not None and is_worth_it(
        [(wanted, extra) for _, (wanted, extra), _ in step.heard]
    ):
        blocks.keep(own)
        own = blocks.share()
    else:
        blocks = None
    with comm.together("load"):
        shared = _find_shared(first, ranks)
        for one in shared:
            own += _plan(comm, checkpoint, one)
        read(checkpoint, own)
    for one in shared:
        group = comm
        if len(one.ranks) < comm.world_size:
            group = Comm.of_ranks((comm.ranks[rank] for rank in one.ranks), within=comm)
        pass_on(group, [move.into.detach() for move in one.moves], one.given)
    if blocks is not None:
        blocks.run()
    copy_twins(moves, first)
    mark_changed(moves)


def _key(move: Move) -> bytes:
    box = move.place
    named = repr((move.index, box.offset, box.shape, str(move.into.dtype)))
    return digest(named.encode())[:KEY_NBYTES]


def _find_shared(moves: Sequence[Move], ranks: Sequence[tuple[int, ...]]) -> list[_Shared]:
    """Put the moves together that the same ranks want, in an order that all of them have."""
    found: dict[tuple[int, ...], _Shared] = {}
    for move, some in zip(moves, ranks, strict=True):
        if len(some) > 1:
            found.setdefault(some, _Shared(some)).moves.append(move)
    for one in found.values():
        one.moves.sort(key=_order)
    return sorted(found.values(), key=lambda one: group_order(one.ranks))


def _order(move: Move) -> tuple[object, ...]:
    box = move.place
    return move.index, box.offset, box.shape, str(move.into.dtype)


def _plan(comm: Comm, checkpoint: Origin, shared: _Shared) -> Iterator[Move]:
    """Choose the reader of each part, and list what this rank reads."""
    ranks = shared.ranks
    size = piece_nbytes(sum(move.nbytes for move in shared.moves), len(ranks))
    parts = [
        (number, part)
        for number, move in enumerate(shared.moves)
        for part in _parts(checkpoint, move, size)
    ]
    places = {rank: place for place, rank in enumerate(ranks)}
    alike = isinstance(checkpoint, Checkpoint) and checkpoint.world_size == comm.world_size
    writers = [places.get(_writer(checkpoint, part)) if alike else None for _, part in parts]
    readers = share_out([part.nbytes for _, part in parts], writers, len(ranks))
    shared.given = [[] for _ in ranks]
    for (number, part), reader in zip(parts, readers, strict=True):
        move = shared.moves[number]
        for box in part.boxes:
            at = _relative(box, move.place)
            shared.given[reader].append(Part(number, at))
            if ranks[reader] == comm.rank:
                yield Move(move.index, move.stored, box_view(move.into, at), box)


def _parts(checkpoint: Origin, move: Move, nbytes: int) -> Iterator[ReadPart]:
    """Cut what is to be read; of a foreign checkpoint, of which no blocks are known, by rows."""
    if isinstance(checkpoint, Checkpoint):
        table = checkpoint.table.chunk_table(move.index)
        yield from cut_reads(table, move.place, checkpoint.block_nbytes, nbytes)
    else:
        yield from cut_rows(move.place, move.stored.itemsize, nbytes)


def _writer(checkpoint: Origin, part: ReadPart) -> int:
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint.table.body.files[part.file].rank


def _relative(box: Box, around: Box) -> Box:
    """Return where a box lies in another one."""
    return Box(tuple(a - b for a, b in zip(box.offset, around.offset, strict=True)), box.shape)
