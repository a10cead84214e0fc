"""Zip files taken apart and put together again, with right lengths and checksums."""

from __future__ import annotations

import functools
import io
import random
import struct
import zipfile
import zlib
from collections.abc import Callable, Sequence

from fuzz.bytewise import NUMBERS, mutated

__all__ = ["mutated_archive", "unzipped", "zipped"]

_LOCAL = struct.Struct("<4s5H3I2H")
_CENTRAL = struct.Struct("<4s6H3I5H2I")
_END = struct.Struct("<4s4H2IH")
_NAMES = ("", "a", "a/", "../a", "/a", "C:a", "a\\b", "archive/version", "archive/data/0", "x.npy")

Member = tuple[str, int, bytes]  # name, method, data
Change = Callable[[bytes, random.Random, Sequence[bytes]], bytes]


@functools.lru_cache(maxsize=2048)
def unzipped(data: bytes) -> tuple[Member, ...]:
    """The members of a zip file; none if it is not one."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as file:
            infos = file.infolist()
            if sum(info.file_size for info in infos) > 1 << 20:
                return ()
            return tuple((one.filename, one.compress_type, file.read(one)) for one in infos)
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return ()
    except (NotImplementedError, RuntimeError, struct.error, MemoryError, IndexError):
        return ()


def zipped(members: Sequence[Member], lie: Callable[[list[int]], None] | None = None) -> bytes:
    """A zip file of members.

    Args:
        members: What it holds.
        lie: Changes the numbers of one header or another, which it gets in turn.
    """
    out, directory = bytearray(), bytearray()
    for name, method, data in members:
        text = name.encode("utf-8", "surrogatepass")[:65_535]
        stored = _deflated(data) if method == zipfile.ZIP_DEFLATED else data
        sizes = [0x800 * (not name.isascii()), method, zlib.crc32(data), len(stored), len(data)]
        local, central = [*sizes, len(text), 0], [*sizes, len(text), 0, 0, len(out)]
        if lie is not None:
            lie(local)
            lie(central)
        flags, kind, crc, size, full, name_nbytes, extra = local
        head = (b"PK\3\4", 20, flags, kind, 0, 0, crc, size, full, name_nbytes, extra)
        out += _LOCAL.pack(*_clipped(_LOCAL, head)) + text + stored
        flags, kind, crc, size, full, name_nbytes, extra, disk, offset = central
        row = (b"PK\1\2", 20, 20, flags, kind, 0, 0, crc, size, full, name_nbytes, extra, 0)
        directory += _CENTRAL.pack(*_clipped(_CENTRAL, (*row, disk, 0, 0, offset))) + text
    end = [len(members), len(directory), len(out)]
    if lie is not None:
        lie(end)
    count, nbytes, start = end
    fields = (b"PK\5\6", 0, 0, count, count, nbytes, start, 0)
    return bytes(out + directory) + _END.pack(*_clipped(_END, fields))


def _clipped(layout: struct.Struct, fields: Sequence[object]) -> list[object]:
    codes = [code for code in layout.format if code in "sHI" or code.isdigit()]
    widths = []
    count = ""
    for code in codes:
        if code.isdigit():
            count += code
            continue
        widths += [0] if code == "s" else [2 if code == "H" else 4] * int(count or 1)
        count = ""
    return [
        one if not width else int(one) % 256**width  # type: ignore[call-overload]
        for one, width in zip(fields, widths, strict=True)
    ]


def _deflated(data: bytes) -> bytes:
    packer = zlib.compressobj(6, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


def mutated_archive(inner: dict[str, Change]) -> Change:
    """Make a change of zip files: of a member, of the list of them, of a header, or of bytes.

    Args:
        inner: By the end of a member's name, how its data are changed.
    """

    def change(data: bytes, rng: random.Random, others: Sequence[bytes] = ()) -> bytes:
        kind = rng.random()
        members = list(unzipped(data))
        if kind < 0.15 or not members:
            return mutated(data, rng, others)
        if kind < 0.25:
            return zipped(members, lambda numbers: _lie(numbers, rng))
        at = _chosen(members, inner, rng)
        name, method, body = members[at]
        if kind < 0.8:
            theirs = unzipped(rng.choice(others)) if others and rng.random() < 0.2 else ()
            donors = [one for member, _, one in theirs if member[-4:] == name[-4:]]
            suffix = next((end for end in inner if name.endswith(end)), None)
            members[at] = (name, method, (inner[suffix] if suffix else mutated)(body, rng, donors))
        elif kind < 0.86:
            members[at] = (rng.choice((*_NAMES, name.upper(), name + "/")), method, body)
        elif kind < 0.9:
            members[at] = (name, rng.choice((0, 8, 8, 12)), body)
        elif kind < 0.95:
            members.insert(at, rng.choice(members))
        else:
            del members[at]
        return zipped(members)

    return change


def _chosen(members: list[Member], inner: dict[str, Change], rng: random.Random) -> int:
    """Choose a member, most often one that there is an own change for."""
    own = [at for at, (name, _, _) in enumerate(members) if name.endswith(tuple(inner))]
    return rng.choice(own) if own and rng.random() < 0.75 else int(rng.random() * len(members))


def _lie(numbers: list[int], rng: random.Random) -> None:
    if rng.random() < 0.3:
        at = int(rng.random() * len(numbers))
        new = numbers[at] + rng.choice((-1, 1, 8)) if rng.random() < 0.5 else rng.choice(NUMBERS)
        numbers[at] = max(0, new)
