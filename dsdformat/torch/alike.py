"""Find out which ranks have the same, without telling anybody everything.

A digest of what a rank has goes to one rank of the group, which the digest itself names; that one
sees who else has it, and answers. So each rank sends and gets about as much as it has, however
many ranks there are.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import torch

from dsdformat.torch.comm import Comm

__all__ = ["KEY_NBYTES", "alike_among", "find_alike", "keys_to_tell", "trade"]

KEY_NBYTES = 16
_RANKS_TOLD, _KEYS_TOLD = 8, 4096  # up to which all ranks tell each other all of their keys
_SIZE_NBYTES = 8


def find_alike(comm: Comm, keys: Sequence[bytes]) -> list[tuple[int, ...]]:
    """Return for each key the ranks of the group that passed it, ascending.

    Args:
        comm: The group.
        keys: First bytes of digests, `KEY_NBYTES` of them; each once.

    Ranks: collective over the group; four exchanges, however many keys there are.
    Memory: 200 bytes for each key.
    """
    asked: list[list[int]] = [[] for _ in range(comm.world_size)]
    for number, key in enumerate(keys):
        asked[int.from_bytes(key[:4], "little") % comm.world_size].append(number)
    received = trade(comm, [b"".join(keys[number] for number in some) for some in asked])
    answers = trade(comm, _answers(received))
    result: list[tuple[int, ...]] = [()] * len(keys)
    for numbers, answer in zip(asked, answers, strict=True):
        for number, ranks in zip(numbers, _decoded(answer, len(numbers)), strict=True):
            result[number] = ranks
    return result


def keys_to_tell(comm: Comm, keys: Sequence[bytes]) -> bytes | None:
    """Return all keys, for ranks that tell each other something else anyway; None if too many.

    Where ranks are few, this takes less than four exchanges. See `alike_among`.
    """
    few = comm.world_size <= _RANKS_TOLD and len(keys) <= _KEYS_TOLD
    return b"".join(keys) if few else None


def alike_among(
    comm: Comm, keys: Sequence[bytes], told: Sequence[bytes | None]
) -> list[tuple[int, ...]]:
    """Do as `find_alike`, where ranks have told their `keys_to_tell`.

    Args:
        comm: The group.
        keys: Of this rank.
        told: By all ranks; some may have had too many.

    Ranks: collective over the group, if some had too many; else local.
    """
    if any(one is None for one in told):
        return find_alike(comm, keys)
    holders: dict[bytes, tuple[int, ...]] = {}
    for rank, raw in enumerate(told):
        for key in _cut(raw or b""):
            holders[key] = (*holders.get(key, ()), rank)
    return [holders[key] for key in keys]


def _cut(raw: bytes) -> list[bytes]:
    return [raw[at : at + KEY_NBYTES] for at in range(0, len(raw), KEY_NBYTES)]


def _answers(received: Sequence[bytes]) -> list[bytes]:
    """Say to each rank who has what it has: a number for each key, and the lists of ranks."""
    holders: dict[bytes, list[int]] = {}
    asked = list(map(_cut, received))
    for rank, keys in enumerate(asked):
        for key in keys:
            holders.setdefault(key, []).append(rank)
    answers = []
    for keys in asked:
        groups: dict[tuple[int, ...], int] = {}
        numbers = [groups.setdefault(tuple(holders[key]), len(groups)) for key in keys]
        lists = [number for ranks in groups for number in (len(ranks), *ranks)]
        answers.append(array("I", [*numbers, *lists]).tobytes())
    return answers


def _decoded(answer: bytes, count: int) -> list[tuple[int, ...]]:
    numbers = array("I")
    numbers.frombytes(answer)
    groups, at = [], count
    while at < len(numbers):
        groups.append(tuple(numbers[at + 1 : at + 1 + numbers[at]]))
        at += 1 + numbers[at]
    return [groups[number] for number in numbers[:count]]


def trade(comm: Comm, parts: Sequence[bytes]) -> list[bytes]:
    """Send bytes to each rank, of any length, and return what each sends to this one.

    Ranks: collective over the group.
    """
    count = comm.world_size
    sent = [len(part) for part in parts]
    lengths = torch.tensor(sent, dtype=torch.int64).view(torch.uint8).to(comm.device)
    alike = [_SIZE_NBYTES] * count
    sizes = [
        int(one.clone().view(torch.int64).item()) for one in comm.exchange(lengths, alike, alike)
    ]
    whole = b"".join(parts)
    buffer = torch.frombuffer(bytearray(whole or b"\0"), dtype=torch.uint8)[: len(whole)]
    received = comm.exchange(buffer.to(comm.device), sent, sizes)
    return [one.cpu().numpy().tobytes() for one in received]
