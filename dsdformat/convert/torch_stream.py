"""Files of `torch.save` in the stream form, the only one before torch 1.6: pickles, then storages.

Five pickles: a magic number, a version, facts of the machine, the object, and the keys of its
storages. Each storage is its number of elements and its bytes, little-endian, in that order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, Window, read_bytes
from dsdformat.convert.numpy_names import NUMPY_NAMES
from dsdformat.convert.pickles.keys import ValueFault
from dsdformat.convert.pickles.machine import Parsed, parse_pickle
from dsdformat.convert.pickles.resolving import Rules, resolve
from dsdformat.convert.plain_names import PLAIN_NAMES
from dsdformat.convert.storages import Storage, StorageId, itemsize_of, parse_storage_id
from dsdformat.convert.torch_names import TorchNames
from dsdformat.errors import ConvertError, printable
from dsdformat.limits import KIB

__all__ = ["MAGIC", "VERSION", "is_torch_stream", "read_torch_stream"]

MAGIC = 0x1950A86A20F9469CFC6C
VERSION = 1001
_SMALL_NBYTES = 64 * KIB
_SMALL_MEMORY = 256 * KIB


def is_torch_stream(source: Bytes) -> bool:
    """Whether a file begins with the magic number, in whatever protocol."""
    head = Window(source, 0, min(_SMALL_NBYTES, source.nbytes))
    try:
        return bool(parse_pickle(head, memory_max=_SMALL_MEMORY).root == MAGIC)
    except ConvertError:
        return False


def read_torch_stream(source: Bytes) -> Any:
    """Read a file of `torch.save` in the stream form; give what `resolve` gives.

    Raises:
        ConvertError: `stream_malformed`; what `parse_pickle` and `resolve` raise;
            `storage_missing` or `storage_mismatch`.

    Memory: the pickles, and what `parse_pickle` makes of them; no tensor.
    """
    return _Reader(source).read()


@dataclass(frozen=True, slots=True)
class _Place:
    """A storage, and where its bytes are."""

    id: StorageId
    data: Window


class _Reader:
    def __init__(self, source: Bytes) -> None:
        self.source = source
        self.places: dict[str, _Place] = {}

    def read(self) -> Any:
        source = self.source
        magic = parse_pickle(source, memory_max=_SMALL_MEMORY)
        version = parse_pickle(source, magic.end, memory_max=_SMALL_MEMORY)
        if magic.root != MAGIC or version.root != VERSION:
            self.bad("does not begin with the magic number and version 1001")
        system = parse_pickle(source, version.end, memory_max=_SMALL_MEMORY)
        parsed = parse_pickle(source, system.end)
        keys = parse_pickle(source, parsed.end)
        self.find_places(parsed, keys)
        names = TorchNames(self.find_storage, source.nbytes)
        rules = Rules({**PLAIN_NAMES, **NUMPY_NAMES, **names.calls}, names.stored)
        return resolve(parsed.root, rules, source.name)

    def bad(self, message: str) -> NoReturn:
        raise fault("stream_malformed", self.source.name, message, hint="the file is damaged")

    def find_places(self, parsed: Parsed, keys: Parsed) -> None:
        """Walk over the storages that follow the pickles."""
        listed = keys.root
        if type(listed) is not list or any(type(key) is not str for key in listed):
            self.bad("the list of storages is none")
        ids = self.storage_ids(parsed)
        if len(set(listed)) != len(listed) or set(listed) != set(ids):
            self.bad("the list of storages is not that of the tensors' storages")
        at = keys.end
        for key in listed:
            storage = ids[key]
            name = f"storage {printable(key)}"
            numel = int.from_bytes(read_bytes(self.source, at, 8, name), "little")
            if numel != storage.numel:
                raise fault(
                    "storage_mismatch",
                    self.source.name,
                    f"{name} has {numel} elements, and {storage.numel} are announced",
                )
            data = Window(self.source, at + 8, storage.nbytes, name)
            self.places[key] = _Place(storage, data)
            at += 8 + storage.nbytes
        if at != self.source.nbytes:
            self.bad(f"{self.source.nbytes - at} bytes follow the last storage")

    def storage_ids(self, parsed: Parsed) -> dict[str, StorageId]:
        """Return the ids of the storages in a graph by their keys."""
        ids: dict[str, StorageId] = {}
        for stored in parsed.stored:
            try:
                found = parse_storage_id(stored.pid)
            except ValueFault as error:
                raise fault(error.code, self.source.name, str(error)) from None
            if isinstance(found, StorageId):
                first = ids.setdefault(found.key, found)
                if (first.dtype, first.numel) != (found.dtype, found.numel):
                    raise fault(
                        "storage_mismatch",
                        self.source.name,
                        f"storage {printable(found.key)} has two dtypes or lengths",
                    )
        return ids

    def find_storage(self, storage: StorageId) -> Storage:
        place = self.places.get(storage.key)
        if place is None:
            raise ValueFault(f"storage {printable(storage.key)} is not there", "storage_missing")
        if storage.view is None:
            return Storage(storage, place.data)
        _, offset, numel = storage.view
        itemsize = itemsize_of(storage.dtype)
        if offset + numel > storage.numel:
            raise ValueFault("a view that reaches outside of its storage", "storage_out_of_bounds")
        part = Window(place.data, offset * itemsize, numel * itemsize, "a view")
        return Storage(storage, part)
