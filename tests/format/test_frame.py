"""The manifest's frame: golden bytes of each table, paging, and what a damaged head says."""

from __future__ import annotations

import pytest
from blake3 import blake3

from dsdformat.errors import FormatError
from dsdformat.format.frame import (
    FIXED_NBYTES,
    SECTIONS,
    check_prefix,
    emit_manifest,
    parse_head,
)

EMPTY = [(name, []) for name in SECTIONS[1:]]

# A manifest whose body is the empty map, and whose other sections are empty.
FIXED = bytes.fromhex(
    "89 44 53 44 0d 0a 1a 0a"  # magic
    "01 00"  # major 1
    "00 00"  # minor 0
    "20 01 00 00"  # head_nbytes: 40 + 7*24 + 36 + 12 + 32 = 288
    "21 01 00 00 00 00 00 00"  # manifest_nbytes: 289
    "0c 00 00 00"  # features_nbytes
    "07 00 00 00"  # section_count
    "01 00 00 00"  # page_count
    "00 00 00 00"  # reserved
)
BODY_ROW = bytes.fromhex(
    "62 6f 64 79 00 00 00 00"  # name: body
    "00 00 00 00"  # flags
    "01 00 00 00"  # pages
    "01 00 00 00 00 00 00 00"  # decoded_nbytes
)
TENSORS_ROW = bytes.fromhex(
    "74 65 6e 73 6f 72 73 00"  # name: tensors
    "00 00 00 00"  # flags
    "00 00 00 00"  # pages
    "00 00 00 00 00 00 00 00"  # decoded_nbytes
)
PAGE_ROW = bytes.fromhex(
    "01 00 00 00"  # stored_nbytes
    "bbe6a9f5a0146a1f4d0381e9b0ed1ac2f1a979ce9d5ad84e46ff0b58f36b5f46"  # digest
)
FEATURES = b"planes\nzstd\n"


def golden() -> tuple[bytes, list[bytes], bytes]:
    return emit_manifest([("body", [b"\x80"]), *EMPTY], ["zstd", "planes"], compress=False)


# Golden bytes


def test_the_fixed_part_has_its_bytes():
    head, _, _ = golden()
    assert head[:40] == FIXED


def test_a_section_row_has_its_bytes():
    head, _, _ = golden()
    assert (head[40:64], head[64:88]) == (BODY_ROW, TENSORS_ROW)


def test_a_page_row_has_its_bytes():
    head, _, _ = golden()
    assert head[208:244] == PAGE_ROW


def test_features_lie_behind_the_page_rows_each_with_a_line_feed():
    head, _, _ = golden()
    assert head[244:-32] == FEATURES


def test_the_seal_is_the_digest_of_all_bytes_before_it():
    head, _, root = golden()
    assert head[-32:] == root == blake3(head[:-32]).digest()


# Pages


@pytest.mark.parametrize(
    ("nbytes", "pages"),
    [
        pytest.param(0, [], id="nothing"),
        pytest.param(1, [1], id="one-byte"),
        pytest.param(65_535, [65_535], id="a-page-less-one"),
        pytest.param(65_536, [65_536], id="a-page"),
        pytest.param(65_537, [65_536, 1], id="a-page-and-one"),
        pytest.param(131_072, [65_536, 65_536], id="two-pages"),
    ],
)
def test_a_section_is_cut_into_pages_of_65536_bytes(nbytes, pages):
    head, stored, _ = emit_manifest(
        [("body", [b"\x80"]), ("tensors", [bytes(nbytes)]), *EMPTY[1:]], (), compress=False
    )
    assert [len(page) for page in stored[1:]] == pages
    section = parse_head(head, len(head) + 1 + nbytes).sections["tensors"]
    assert [section.page_nbytes(page) for page in range(section.pages)] == pages


@pytest.mark.parametrize("step", [1000, 65_536, 100_000, 200_000])
def test_the_pieces_that_a_section_comes_in_do_not_matter(step, rng):
    data = rng.randbytes(150_000)
    pieces = [data[at : at + step] for at in range(0, len(data), step)]
    rest = EMPTY[1:]
    whole = emit_manifest([("body", [b"\x80"]), ("tensors", [data]), *rest], (), compress=False)
    cut = emit_manifest([("body", [b"\x80"]), ("tensors", pieces), *rest], (), compress=False)
    assert whole == cut


def test_compressed_pages_bring_the_feature_zstd():
    sections = [("body", [bytes(5000)]), *EMPTY]
    head, stored, _ = emit_manifest(sections, (), compress=True)
    parsed = parse_head(head, len(head) + sum(map(len, stored)))
    assert parsed.features == ("zstd",)


def test_pages_that_do_not_get_shorter_stay_as_they_are(rng):
    sections = [("body", [rng.randbytes(5000)]), *EMPTY]
    head, stored, _ = emit_manifest(sections, (), compress=True)
    assert [len(page) for page in stored] == [5000]
    assert parse_head(head, len(head) + 5000).features == ()


def test_a_head_that_was_emitted_parses_to_what_it_says():
    head, stored, root = golden()
    parsed = parse_head(head, len(head) + 1)
    assert (parsed.root, parsed.minor, parsed.features) == (root, 0, ("planes", "zstd"))
    assert parsed.page_offsets == (288, 289)
    assert parsed.page_digests == blake3(stored[0]).digest()
    assert [(s.name, s.pages, s.nbytes) for s in parsed.sections.values()][:2] == [
        ("body", 1, 1),
        ("tensors", 0, 0),
    ]


# Damage


def test_the_message_for_a_newer_version_says_both_versions():
    prefix = FIXED[:8] + b"\x02\x00\x07\x00" + FIXED[12:]
    with pytest.raises(FormatError, match=r"made by format 2\.7, this reads 1\.x") as error:
        check_prefix(prefix, 289)
    assert error.value.code == "unknown_major"
    assert error.value.hint


def test_the_version_is_checked_before_the_file_is_found_cut_short():
    with pytest.raises(FormatError) as error:
        check_prefix(FIXED[:8] + b"\x09\x00", 10)
    assert error.value.code == "unknown_major"


@pytest.mark.parametrize(
    ("at", "new", "code", "byte_offset"),
    [
        pytest.param(0, b"\x88", "bad_magic", 0, id="magic"),
        pytest.param(8, b"\x00\x00", "unknown_major", 8, id="major"),
        pytest.param(12, b"\x21\x01\x00\x00", None, None, id="head-as-long-as-the-file"),
        pytest.param(12, b"\x22\x01\x00\x00", "truncated", 289, id="head-longer-than-the-file"),
        pytest.param(12, b"\x47\x00\x00\x00", "bad_head", 12, id="head-of-71-bytes"),
        pytest.param(16, b"\x22\x01", "truncated", 289, id="manifest-longer-than-the-file"),
    ],
)
def test_the_fixed_part_is_checked_field_by_field(at, new, code, byte_offset):
    prefix = FIXED[:at] + new + FIXED[at + len(new) :]
    if code is None:
        assert check_prefix(prefix, 289) == 289
        return
    with pytest.raises(FormatError) as error:
        check_prefix(prefix, 289)
    problem = error.value.problems[0]
    assert (problem.code, problem.byte_offset, problem.where) == (code, byte_offset, "manifest.dsd")


@pytest.mark.parametrize("length", range(FIXED_NBYTES + 1))
def test_a_fixed_part_that_is_cut_short_is_no_checkpoint_or_truncated(length):
    with pytest.raises(FormatError) as error:
        check_prefix(FIXED[:length], length)
    assert error.value.code == ("bad_magic" if length < 8 else "truncated")


def test_a_head_of_more_than_64_mib_is_refused_before_it_is_read():
    prefix = FIXED[:12] + (64 * 2**20 + 1).to_bytes(4, "little") + FIXED[16:]
    with pytest.raises(FormatError) as error:
        check_prefix(prefix, 2**40)
    assert error.value.code == "bad_head"


def test_a_broken_seal_comes_before_any_other_fault():
    head, _, _ = golden()
    broken = head[:36] + b"\x01" + head[37:]
    with pytest.raises(FormatError) as error:
        parse_head(broken, len(head) + 1)
    assert error.value.code == "seal_mismatch"
    assert (error.value.expected, error.value.actual) != (None, None)


def test_an_unknown_feature_is_named():
    head, _, _ = emit_manifest([("body", [b"\x80"]), *EMPTY], ["holograms"], compress=False)
    with pytest.raises(FormatError, match="holograms") as error:
        parse_head(head, len(head) + 1)
    assert error.value.code == "unknown_feature"
