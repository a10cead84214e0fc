"""Files of `torch.save` in the zip form: state dicts, general checkpoints, Lightning's.

Reads the pickle with the closed machine, and each storage where it lies in the zip, when a tensor
in it is asked for. A storage must be in the file, stored, and as long as the pickle says.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dsdformat.convert.archive import Archive, Entry, read_archive
from dsdformat.convert.faults import fault
from dsdformat.convert.files import Bytes, read_bytes
from dsdformat.convert.numpy_names import NUMPY_NAMES
from dsdformat.convert.pickles.keys import ValueFault
from dsdformat.convert.pickles.machine import parse_pickle
from dsdformat.convert.pickles.resolving import Rules, resolve
from dsdformat.convert.plain_names import PLAIN_NAMES
from dsdformat.convert.storages import Storage, StorageId, itemsize_of
from dsdformat.convert.torch_names import TorchNames
from dsdformat.errors import printable
from dsdformat.limits import PICKLE_NBYTES_MAX

__all__ = ["PICKLE_NAME", "TorchArchive", "read_torch_archive"]

PICKLE_NAME = "data.pkl"
VERSION_MAX = 10
_RECORD_NBYTES_MAX = 64


@dataclass(frozen=True)
class TorchArchive:
    """A file of `torch.save`, read but for its tensors.

    Attributes:
        tree: What `resolve` gives.
        archive: The zip file.
    """

    tree: Any
    archive: Archive

    def verify(self) -> int:
        """Compare all entries with their CRC-32; return how many bytes were compared.

        Raises:
            ConvertError: `foreign_checksum`.
        """
        return sum(map(self.archive.check_crc, self.archive.entries.values()))


def read_torch_archive(source: Bytes) -> TorchArchive:
    """Read a file of `torch.save` in the zip form.

    Raises:
        ConvertError: `unsupported_kind` for TorchScript and packages; what `read_archive`,
            `parse_pickle` and `resolve` raise; `storage_missing` or `storage_mismatch`.

    Memory: the pickle, and what `parse_pickle` makes of it; no tensor.
    """
    return _Reader(source).read()


class _Reader:
    def __init__(self, source: Bytes) -> None:
        self.source = source
        self.archive = read_archive(source)
        self.folder = self.find_folder()
        self.big = self.read_byteorder()
        self.seen: dict[str, StorageId] = {}

    def read(self) -> TorchArchive:
        self.check_version()
        entry = self.archive.entries[self.folder + PICKLE_NAME]
        if entry.nbytes > PICKLE_NBYTES_MAX:
            raise self.fault("foreign_too_large", f"a pickle of {entry.nbytes} bytes")
        self.archive.check_crc(entry)
        data = self.archive.data(entry)
        parsed = parse_pickle(data)
        if parsed.end != data.nbytes:
            raise self.fault("pickle_malformed", f"bytes follow the pickle {PICKLE_NAME}")
        names = TorchNames(self.find_storage, self.source.nbytes)
        rules = Rules({**PLAIN_NAMES, **NUMPY_NAMES, **names.calls}, names.stored)
        return TorchArchive(resolve(parsed.root, rules, self.source.name), self.archive)

    def fault(self, code: str, message: str, hint: str | None = None) -> Exception:
        return fault(code, self.source.name, message, hint=hint)

    def find_folder(self) -> str:
        """Return the folder that all entries are in, with its slash."""
        names = self.archive.entries
        pickles = [name for name in names if name.endswith("/" + PICKLE_NAME)]
        folders = {name.split("/", 1)[0] for name in names}
        if len(pickles) != 1 or len(folders) != 1:
            raise self.fault("unknown_kind", "is a zip file, but not one of torch.save")
        folder = pickles[0].removesuffix(PICKLE_NAME)
        if folder + "constants.pkl" in names or any(n.startswith(folder + "code/") for n in names):
            raise self.fault(
                "unsupported_kind",
                "is a TorchScript archive",
                "load it with torch.jit.load, and save its state_dict()",
            )
        return folder

    def record(self, name: str) -> bytes | None:
        """Return a small record, or None if there is none."""
        entry = self.archive.entries.get(self.folder + name)
        if entry is None:
            return None
        if entry.nbytes > _RECORD_NBYTES_MAX:
            raise self.fault("archive_malformed", f"the record {name} has {entry.nbytes} bytes")
        return read_bytes(self.archive.data(entry), 0, entry.nbytes)

    def read_byteorder(self) -> bool:
        """Return whether storages are big-endian."""
        order = self.record("byteorder")
        if order not in (None, b"little", b"big"):
            raise self.fault("archive_malformed", "the record byteorder is neither little nor big")
        return order == b"big"

    def check_version(self) -> None:
        version = self.record("version")
        number = (version or b"").strip()
        if version is not None and not (number.isdigit() and 1 <= int(number) <= VERSION_MAX):
            raise self.fault(
                "unsupported_kind",
                f"has format version {printable(ascii(version)[2:-1])}",
                f"versions up to {VERSION_MAX} are read",
            )

    def find_storage(self, storage: StorageId) -> Storage:
        name = f"{self.folder}data/{storage.key}"
        entry = self.archive.entries.get(name)
        if entry is None:
            raise ValueFault(f"storage {printable(storage.key)} is not there", "storage_missing")
        first = self.seen.setdefault(storage.key, storage)
        if first.dtype != storage.dtype or storage.view is not None:
            raise ValueFault(f"storage {printable(storage.key)} has two dtypes", "storage_mismatch")
        self.check_length(storage, entry)
        return Storage(storage, self.archive.data(entry), self.big)

    def check_length(self, storage: StorageId, entry: Entry) -> None:
        rest = entry.nbytes - storage.nbytes
        if not 0 <= rest < itemsize_of(storage.dtype):
            raise ValueFault(
                f"storage {printable(storage.key)} has {entry.nbytes} bytes, "
                f"and {storage.nbytes} are announced",
                "storage_mismatch",
            )
