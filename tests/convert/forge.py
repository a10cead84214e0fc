"""Forges pickles, zip files and files of torch.save, opcode by opcode and field by field."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

MARK, STOP, TUPLE, REDUCE, BUILD, NEWOBJ = b"(", b".", b"t", b"R", b"b", b"\x81"
EMPTY_DICT, EMPTY_LIST, EMPTY_TUPLE = b"}", b"]", b")"
SETITEM, SETITEMS, APPEND, APPENDS, PERSID = b"s", b"u", b"a", b"e", b"Q"
PROTO = b"\x80\x02"
COMMAND = "touch canary"


def pickled(*pieces: bytes, proto: bytes = PROTO) -> bytes:
    return proto + b"".join(pieces) + STOP


def text(value: str) -> bytes:
    data = value.encode("utf-8", "surrogatepass")
    return b"X" + struct.pack("<I", len(data)) + data


def integer(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    if len(data) < 256:
        return b"\x8a" + bytes([len(data)]) + data
    return b"\x8b" + struct.pack("<I", len(data)) + data


def name(module: str, qualname: str) -> bytes:
    return b"c" + module.encode() + b"\n" + qualname.encode() + b"\n"


def stack_name(module: str, qualname: str) -> bytes:
    return text(module) + text(qualname) + b"\x93"


def plain(value: Any) -> bytes:
    """The opcodes of a plain value."""
    if value is None or type(value) is bool:
        return {None: b"N", True: b"\x88", False: b"\x89"}[value]
    if type(value) is int:
        return integer(value)
    if type(value) is str:
        return text(value)
    if type(value) is bytes:
        return value  # opcodes already
    if type(value) is tuple:
        return MARK + b"".join(map(plain, value)) + TUPLE
    if type(value) is list:
        return EMPTY_LIST + MARK + b"".join(map(plain, value)) + APPENDS
    if type(value) is dict:
        items = b"".join(plain(key) + plain(item) for key, item in value.items())
        return EMPTY_DICT + MARK + items + SETITEMS
    raise TypeError(type(value))


def call(function: bytes, *args: Any) -> bytes:
    return function + plain(args) + REDUCE


SYSTEM = name("os", "system")
PAYLOAD = call(SYSTEM, COMMAND)
ORDERED = call(name("collections", "OrderedDict"))


@dataclass
class Tensor:
    """A tensor as a pickle rebuilds it; every field can lie."""

    key: Any = "0"
    kind: bytes = field(default_factory=lambda: name("torch", "FloatStorage"))
    location: Any = "cpu"
    numel: Any = 6
    offset: Any = 0
    size: Any = (2, 3)
    stride: Any = (3, 1)
    requires_grad: Any = False
    hooks: Any = ORDERED
    more: tuple[Any, ...] = ()
    function: bytes = field(default_factory=lambda: name("torch._utils", "_rebuild_tensor_v2"))
    view: tuple[Any, ...] = ()  # (None,) or a view, in the stream form

    def opcodes(self) -> bytes:
        pid = plain(("storage", self.kind, self.key, self.location, self.numel, *self.view))
        args = (pid + PERSID, self.offset, self.size, self.stride)
        return call(self.function, *args, self.requires_grad, self.hooks, *self.more)


# Zip files


@dataclass
class Member:
    """An entry; what is not None in the last fields takes the place of the truth."""

    name: str | bytes
    data: bytes = b""
    method: int = 0
    flags: int = 0
    stored: bytes | None = None
    extra: bytes = b""
    gap: bytes = b""
    local: Mapping[str, Any] = field(default_factory=dict)
    central: Mapping[str, Any] = field(default_factory=dict)

    @property
    def encoded(self) -> bytes:
        return self.name if isinstance(self.name, bytes) else self.name.encode()

    def fields(self, lies: Mapping[str, Any], offset: int) -> dict[str, Any]:
        stored = self.data if self.stored is None else self.stored
        truth = {
            "name": self.encoded,
            "flags": self.flags,
            "method": self.method,
            "crc": zlib.crc32(self.data),
            "stored": len(stored),
            "nbytes": len(self.data),
            "extra": self.extra,
            "offset": offset,
            "comment": b"",
            "disk": 0,
        }
        return truth | dict(lies)

    def head(self, offset: int) -> bytes:
        f = self.fields(self.local, offset)
        numbers = (20, f["flags"], f["method"], 0, 0, f["crc"], f["stored"], f["nbytes"])
        lengths = (len(f["name"]), len(f["extra"]))
        return struct.pack("<4s5H3I2H", b"PK\x03\x04", *numbers, *lengths) + f["name"] + f["extra"]

    def entry(self, offset: int) -> bytes:
        f = self.fields({"extra": b"", **self.central}, offset)
        numbers = (20, 20, f["flags"], f["method"], 0, 0, f["crc"], f["stored"], f["nbytes"])
        lengths = (len(f["name"]), len(f["extra"]), len(f["comment"]))
        rest = (f["disk"], 0, 0, f["offset"])
        head = struct.pack("<4s6H3I5H2I", b"PK\x01\x02", *numbers, *lengths, *rest)
        return head + f["name"] + f["extra"] + f["comment"]


def zipped(
    members: Sequence[Member],
    *,
    before: bytes = b"",
    after: bytes = b"",
    end: Mapping[str, int] | None = None,
    listed: Sequence[int] | None = None,
) -> bytes:
    """A zip file; `end` lies about the directory, `listed` says which members it lists."""
    data = bytearray(before)
    entries = []
    for member in members:
        offset = len(data)
        data += member.head(offset)
        data += member.data if member.stored is None else member.stored
        data += member.gap
        entries.append(member.entry(offset))
    directory = b"".join(entries[index] for index in listed or range(len(entries)))
    truth = {
        "count": len(listed or entries),
        "nbytes": len(directory),
        "offset": len(data),
        "comment": 0,
    }
    f = truth | dict(end or {})
    data += directory
    data += struct.pack(
        "<4s4H2IH",
        b"PK\x05\x06",
        0,
        0,
        f["count"],
        f["count"],
        f["nbytes"],
        f["offset"],
        f["comment"],
    )
    return bytes(data) + after


def torch_zip(
    pickle: bytes,
    storages: Mapping[str, bytes] | None = None,
    folder: str = "archive",
    **records: bytes,
) -> bytes:
    """A file of torch.save around a pickle."""
    members = [Member(f"{folder}/data.pkl", pickle)]
    members += [Member(f"{folder}/{key}", data) for key, data in records.items()]
    members += [Member(f"{folder}/data/{key}", data) for key, data in (storages or {}).items()]
    members.append(Member(f"{folder}/version", b"3\n"))
    return zipped(members)


SIX = struct.pack("<6f", *range(6))


def torch_file(*tensors: Tensor) -> bytes:
    """A file with tensors under the keys `0`, `1`, … over the storage `0` of six floats."""
    items = b"".join(text(str(i)) + tensor.opcodes() for i, tensor in enumerate(tensors))
    return torch_zip(pickled(EMPTY_DICT, MARK, items, SETITEMS), {"0": SIX})


# The stream form

MAGIC = 0x1950A86A20F9469CFC6C
SYSTEM_INFO = {"protocol_version": 1001, "little_endian": True}


def torch_stream(
    pickle: bytes,
    storages: Mapping[str, bytes],
    *,
    magic: int = MAGIC,
    version: int = 1001,
    keys: Any = None,
    numel: Mapping[str, int] | None = None,
    after: bytes = b"",
) -> bytes:
    """A file of torch.save in the stream form, of float storages."""
    heads = [pickled(plain(one)) for one in (magic, version, SYSTEM_INFO)]
    listed = sorted(storages) if keys is None else keys
    tail = b"".join(
        struct.pack("<q", (numel or {}).get(key, len(data) // 4)) + data
        for key, data in sorted(storages.items())
    )
    return b"".join(heads) + pickle + pickled(plain(listed)) + tail + after
