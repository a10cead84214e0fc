"""Zip files that lie about places, lengths or names: refused, and soon (B126, B132, B133)."""

from __future__ import annotations

import io
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from forge import SIX, Member, Tensor, pickled, plain, torch_zip, zipped

from dsdformat import ConvertError
from dsdformat.convert import open_foreign
from dsdformat.convert.archive import read_archive
from dsdformat.convert.files import MemoryBytes
from dsdformat.convert.torch_zip import read_torch_archive

PICKLE = pickled(Tensor().opcodes())
GOOD = [
    Member("archive/data.pkl", PICKLE),
    Member("archive/data/0", SIX),
    Member("archive/version", b"3\n"),
]


def with_last(**fields: object) -> bytes:
    return zipped([*GOOD[:2], Member("archive/version", b"3\n", **fields)])  # type: ignore[arg-type]


def named(name: str | bytes, **fields: object) -> bytes:
    return zipped([*GOOD, Member(name, b"x", **fields)])  # type: ignore[arg-type]


def deflated(nbytes: int) -> bytes:
    """A zip file whose storage inflates to so many zeros."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for member in GOOD:
            data = bytes(nbytes) if member.name == "archive/data/0" else member.data
            file.writestr(str(member.name), data)
    return out.getvalue()


def encrypted() -> bytes:
    return zipped([Member("archive/data.pkl", PICKLE, flags=1), *GOOD[1:]])


CRC = {"crc": 5}
ZIP64 = struct.pack("<2H", 1, 8)
ARCHIVES: dict[str, tuple[bytes, str]] = {
    "nothing": (b"", "archive_malformed"),
    "only-the-magic": (b"PK\x03\x04", "archive_malformed"),
    "no-entries": (zipped([]), "unknown_kind"),
    "bytes-before": (zipped(GOOD, before=b"x"), "archive_overlap"),
    "bytes-behind": (zipped(GOOD, after=b"x"), "archive_malformed"),
    "a-second-zip-behind": (zipped(GOOD, after=zipped(GOOD)), "archive_malformed"),
    "a-zip-in-front": (zipped(GOOD, before=zipped(GOOD)), "archive_overlap"),
    "a-comment": (zipped(GOOD, end={"comment": 4}, after=b"abcd"), "archive_malformed"),
    "a-comment-with-an-end": (
        zipped(GOOD, end={"comment": 22}, after=b"PK\x05\x06" + bytes(18)),
        "archive_malformed",
    ),
    "directory-at-0": (zipped(GOOD, end={"offset": 0}), "archive_malformed"),
    "directory-at-4-gib": (zipped(GOOD, end={"offset": 2**32 - 2}), "archive_malformed"),
    "directory-at-the-zip64-mark": (zipped(GOOD, end={"offset": 2**32 - 1}), "archive_malformed"),
    "directory-of-no-bytes": (zipped(GOOD, end={"nbytes": 0}), "archive_malformed"),
    "directory-of-4-gib": (zipped(GOOD, end={"nbytes": 2**32 - 2}), "archive_malformed"),
    "one-entry-more": (zipped(GOOD, end={"count": 4}), "archive_malformed"),
    "one-entry-less": (zipped(GOOD, end={"count": 2}), "archive_malformed"),
    "65534-entries": (zipped(GOOD, end={"count": 65534}), "archive_malformed"),
    "an-entry-that-is-not-listed": (zipped(GOOD, listed=[0, 1]), "archive_overlap"),
    "an-entry-listed-twice": (zipped(GOOD, listed=[0, 1, 1, 2]), "archive_duplicate"),
    "entries-of-one-name": (zipped([*GOOD, GOOD[1]]), "archive_duplicate"),
    "entries-that-share-data": (
        zipped([*GOOD, Member("archive/data/1", b"", central={"offset": 0})]),
        "archive_overlap",
    ),
    "an-entry-within-another": (
        with_last(central={"offset": 60}),
        "archive_overlap",
    ),
    "an-entry-beyond-the-end": (with_last(central={"offset": 2**31}), "archive_overlap"),
    "an-entry-that-reaches-into-the-directory": (
        with_last(central={"nbytes": 60, "stored": 60}, local={"nbytes": 60, "stored": 60}),
        "archive_overlap",
    ),
    "an-entry-of-4-gib": (
        with_last(central={"nbytes": 2**32 - 2, "stored": 2**32 - 2}),
        "archive_malformed",
    ),
    "bytes-between": (
        zipped([GOOD[0], Member("archive/x", b"x", gap=b"hid"), *GOOD[1:]]),
        "archive_overlap",
    ),
    "bytes-between-in-the-place-of-a-descriptor": (
        zipped([GOOD[0], Member("archive/x", b"x", flags=8, gap=bytes(16)), *GOOD[1:]]),
        "archive_overlap",
    ),
    "a-megabyte-between": (
        zipped([GOOD[0], Member("archive/x", b"x", flags=8, gap=bytes(2**20)), *GOOD[1:]]),
        "archive_overlap",
    ),
    "another-name-in-the-header": (
        with_last(local={"name": b"archive/versiom"}),
        "archive_malformed",
    ),
    "a-longer-name-in-the-header": (
        with_last(local={"name": b"archive/version2"}),
        "archive_malformed",
    ),
    "another-length-in-the-header": (
        with_last(local={"nbytes": 1, "stored": 1}),
        "archive_malformed",
    ),
    "another-checksum-in-the-header": (with_last(local={"crc": 1}), "archive_malformed"),
    "another-method-in-the-header": (with_last(local={"method": 8}), "archive_malformed"),
    "other-flags-in-the-header": (with_last(local={"flags": 8}), "archive_malformed"),
    "two-lengths-of-a-stored-entry": (with_last(central={"nbytes": 1}), "archive_malformed"),
    "zip64-without-its-field": (with_last(central={"nbytes": 2**32 - 1}), "archive_malformed"),
    "zip64-of-2-to-the-64": (
        with_last(
            central={
                "nbytes": 2**32 - 1,
                "stored": 2**32 - 1,
                "extra": struct.pack("<2H2Q", 1, 16, 2**64 - 1, 2**64 - 1),
            }
        ),
        "archive_malformed",
    ),
    "zip64-field-cut-short": (
        with_last(central={"nbytes": 2**32 - 1, "extra": ZIP64}),
        "archive_malformed",
    ),
    "another-disk": (with_last(central={"disk": 1}), "archive_malformed"),
    "a-comment-of-an-entry": (with_last(central={"comment": b"x"}), "archive_malformed"),
    "encrypted": (encrypted(), "archive_compressed"),
    "an-unknown-method": (with_last(method=93), "archive_compressed"),
    "a-folder-with-data": (named("archive/x/"), "archive_malformed"),
    "a-name-with-dots": (named("archive/../x"), "archive_name"),
    "a-name-of-dots": (named(".."), "archive_name"),
    "an-absolute-name": (named("/etc/passwd"), "archive_name"),
    "a-name-of-windows": (named("archive\\x"), "archive_name"),
    "a-name-with-a-drive": (named("c:/x"), "archive_name"),
    "a-name-with-nul": (named("archive/x\0.pkl"), "archive_name"),
    "a-name-with-a-line-feed": (named("archive/x\ny"), "archive_name"),
    "an-empty-name": (named(""), "archive_name"),
    "an-empty-part-of-a-name": (named("archive//x"), "archive_name"),
    "a-name-that-is-not-utf-8": (named(b"archive/\xff"), "archive_name"),
    "a-name-of-60-kb": (named("a" * 60_000), "archive_name"),
    "two-folders": (named("other/x"), "unknown_kind"),
    "two-pickles": (named("archive/x/data.pkl"), "unknown_kind"),
    "no-pickle": (zipped(GOOD[1:]), "unknown_kind"),
    "torchscript": (named("archive/constants.pkl"), "unsupported_kind"),
    "torchscript-code": (named("archive/code/x.py"), "unsupported_kind"),
    "byteorder-middle": (torch_zip(PICKLE, {"0": SIX}, byteorder=b"middle"), "archive_malformed"),
    "byteorder-of-a-kilobyte": (
        torch_zip(PICKLE, {"0": SIX}, byteorder=bytes(1024)),
        "archive_malformed",
    ),
    "version-99": (zipped([*GOOD[:2], Member("archive/version", b"99\n")]), "unsupported_kind"),
    "a-wrong-checksum-of-the-pickle": (
        zipped(
            [Member("archive/data.pkl", PICKLE, central={"crc": 5}, local={"crc": 5}), *GOOD[1:]]
        ),
        "foreign_checksum",
    ),
    "a-compressed-pickle-and-storage": (deflated(24), "archive_compressed"),
    "a-bomb-of-64-mib": (deflated(64 << 20), "archive_compressed"),
    "no-storage": (zipped([GOOD[0], GOOD[2]]), "storage_missing"),
    "a-storage-under-another-name": (
        zipped([GOOD[0], Member("archive/data/00", SIX)]),
        "storage_missing",
    ),
    "a-storage-that-is-shorter": (torch_zip(PICKLE, {"0": SIX[:-4]}), "storage_mismatch"),
    "a-storage-that-is-longer": (torch_zip(PICKLE, {"0": SIX + bytes(4)}), "storage_mismatch"),
    "an-empty-storage": (torch_zip(PICKLE, {"0": b""}), "storage_mismatch"),
}


def read(data: bytes) -> object:
    return read_torch_archive(MemoryBytes(data)).tree


def test_the_archive_that_the_lies_start_from_is_read():
    tree = read(zipped(GOOD))
    assert bytes(tree.read()) == SIX


@pytest.mark.parametrize("case", ARCHIVES)
def test_an_archive_that_lies_is_refused_with_its_code(refused, case):
    data, code = ARCHIVES[case]
    assert refused(lambda: read(data)) == code


@pytest.mark.parametrize("case", ARCHIVES)
def test_an_archive_that_lies_is_refused_from_a_file_too(tmp_path, case):
    path = tmp_path / "x.pt"
    path.write_bytes(ARCHIVES[case][0])
    with pytest.raises(ConvertError):
        open_foreign(path)


def test_every_truncation_of_an_archive_is_refused():
    data = torch_zip(pickled(plain({"a": 1})), {"0": SIX})
    for end in range(len(data)):
        with pytest.raises(ConvertError):
            read(data[:end])


@pytest.mark.parametrize(
    ("storage", "name"),
    [("../data.pkl", "dots"), ("0\0", "nul"), ("", "empty"), ("/etc/passwd", "absolute")],
)
def test_the_key_of_a_storage_does_not_lead_out_of_its_folder(refused, storage, name):
    data = torch_zip(pickled(Tensor(key=storage).opcodes()), {"0": SIX})
    assert refused(lambda: read(data)) == "storage_missing"


def wide(force: bool) -> Callable[[zipfile.ZipFile, str, bytes], None]:
    def write(file: zipfile.ZipFile, name: str, data: bytes) -> None:
        with file.open(name, "w", force_zip64=force) as out:
            out.write(data)

    return write


class Pipe(io.RawIOBase):
    """A file that cannot be sought, so that lengths follow the data."""

    def __init__(self) -> None:
        self.data = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        self.data += bytes(data)  # type: ignore[call-overload]
        return len(bytes(data))  # type: ignore[call-overload]


@pytest.mark.parametrize("force", [False, True], ids=["plain", "zip64"])
@pytest.mark.parametrize("pipe", [False, True], ids=["file", "pipe"])
def test_what_another_writer_of_zip_files_makes_is_read(pipe, force):
    out = Pipe() if pipe else io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("archive/", b"")
        for member in GOOD:
            wide(force)(file, str(member.name), member.data)
    data = bytes(out.data) if pipe else out.getvalue()
    assert bytes(read(data).read()) == SIX


def test_a_storage_behind_4_gib_is_read(tmp_path):
    """A sparse file, as zip64 has it: lengths of 64 bits in the entry and at the end."""
    path = tmp_path / "big.pt"
    large = 2**32 + 24
    pickle = pickled(plain({"w": Tensor(key="1").opcodes()}))
    with path.open("wb") as out:
        entries = []
        for name, data, nbytes in (
            ("archive/data.pkl", pickle, len(pickle)),
            ("archive/data/0", b"", large),
            ("archive/data/1", SIX, len(SIX)),
        ):
            offset = out.tell()
            extra = struct.pack("<2H3Q", 1, 24, nbytes, nbytes, offset)
            lies = {"nbytes": 2**32 - 1, "stored": 2**32 - 1, "crc": 0, "extra": extra}
            member = Member(name, local=lies, central=lies | {"offset": 2**32 - 1})
            out.write(member.head(offset) + data)
            out.seek(offset + len(member.head(offset)) + nbytes)
            entries.append(member.entry(offset))
        start, directory = out.tell(), b"".join(entries)
        out.write(directory)
        out.write(
            struct.pack("<4sQ2H2I4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, 3, 3, len(directory), start)
        )
        out.write(struct.pack("<4sIQI", b"PK\x06\x07", 0, start + len(directory), 1))
        out.write(struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, 3, 3, len(directory), 2**32 - 1, 0))
    with open_foreign(path) as foreign:
        assert bytes(foreign.read("w")) == SIX


def test_an_inflated_array_is_read_in_pieces_and_never_beyond_its_length(tmp_path, refused):
    path = tmp_path / "x.npz"
    np.savez_compressed(path, a=np.arange(300_000.0), b=np.zeros((3, 4), order="F"))
    with open_foreign(path) as foreign:
        assert np.frombuffer(foreign.read("a")).sum() == np.arange(300_000.0).sum()
        assert foreign.tensor("b").shape == (3, 4)
        foreign.read("b")
    forged = read_archive(MemoryBytes(path.read_bytes())).entries["a.npy"]
    data = bytearray(path.read_bytes())
    data[forged.byte_offset + forged.stored_nbytes // 2] ^= 0xFF
    path.write_bytes(data)

    def read_it() -> None:
        with open_foreign(path) as foreign:
            foreign.read("a")

    assert refused(read_it, peak=8 << 20) in ("archive_malformed", "foreign_checksum")


@pytest.mark.parametrize("nbytes", range(13))
def test_an_array_that_ends_in_its_first_bytes_is_refused(tmp_path, refused, nbytes):
    path = tmp_path / "x.npz"
    path.write_bytes(zipped([Member("a.npy", npy_of(3)[:nbytes])]))
    assert refused(lambda: open_foreign(path)) == "header_malformed"


def npz_of(inflates_to: bytes, said: int, *, behind: bytes = b"") -> bytes:
    """An .npz file of one array, whose entry says how long it is."""
    out = zlib.compressobj(wbits=-15)
    stored = out.compress(inflates_to) + out.flush() + behind
    lies = {"nbytes": said, "crc": zlib.crc32(inflates_to[:said])}
    return zipped([Member("a.npy", method=8, stored=stored, local=lies, central=lies)])


def npy_of(count: int) -> bytes:
    out = io.BytesIO()
    np.save(out, np.arange(float(count)))
    return out.getvalue()


BOMB = bytes(32 << 20)
ARRAY = npy_of(1000)
INFLATED = {
    "a-byte-more": (ARRAY + b"\0", len(ARRAY), "archive_malformed"),
    "a-byte-more-that-it-says": (ARRAY + b"\0", len(ARRAY) + 1, "header_malformed"),
    "a-byte-less": (ARRAY[:-1], len(ARRAY), "archive_malformed"),
    "a-bomb": (ARRAY + BOMB, len(ARRAY), "archive_malformed"),
    "a-bomb-that-it-says": (ARRAY + BOMB, len(ARRAY) + len(BOMB), "header_malformed"),
}


def read_array(data: bytes, path: Path) -> bytes:
    path.write_bytes(data)
    with open_foreign(path) as foreign:
        return bytes(foreign.read("a"))


@pytest.mark.parametrize("case", INFLATED)
def test_what_inflates_to_another_length_than_its_array_has_is_stopped(tmp_path, refused, case):
    """B133: the length is that of shape and dtype; exactly that is taken."""
    assert read_array(npz_of(ARRAY, len(ARRAY)), tmp_path / "x.npz") == ARRAY[-8000:]
    inflates_to, said, code = INFLATED[case]
    data = npz_of(inflates_to, said)
    assert len(data) < 50_000
    assert refused(lambda: read_array(data, tmp_path / "x.npz"), peak=2 << 20) == code


def test_a_second_stream_behind_the_first_is_no_part_of_an_array(tmp_path, refused):
    """B133."""
    out = zlib.compressobj(wbits=-15)
    second = out.compress(ARRAY[4000:]) + out.flush()
    cut = npz_of(ARRAY[:4000], len(ARRAY), behind=second)
    assert refused(lambda: read_array(cut, tmp_path / "x.npz")) == "archive_malformed"
    longer = npz_of(ARRAY, len(ARRAY), behind=second)
    assert refused(lambda: read_array(longer, tmp_path / "x.npz")) == "archive_malformed"
