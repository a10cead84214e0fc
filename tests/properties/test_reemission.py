"""What is read can be written again, byte for byte: bodies, trees, whole manifests."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import root_states, texts, tilings

import dsdformat
import dsdformat.numpy
from dsdformat import PartWriter, TensorSource, Writer
from dsdformat.format.decoding import decode_tree
from dsdformat.format.dtypes import DTYPES
from dsdformat.format.frame import SECTIONS, emit_manifest
from dsdformat.format.manifest import Body, Mesh, emit_body, parse_body
from dsdformat.format.packing import emit, parse
from dsdformat.format.values import encode
from dsdformat.parts import Part, emit_sections, needed_features
from dsdformat.sections import ManifestFile
from dsdformat.storage.memory import MemoryStorage, MemoryTarget
from dsdformat.testing.vectors import find_cases

VALID = Path(__file__).resolve().parents[2] / "spec" / "vectors" / "valid"
CASES = {case.id: case.folder / "checkpoint" / "manifest.dsd" for case in find_cases(VALID)}
VECTORS = [pytest.param(path, id=name) for name, path in CASES.items() if path.is_file()]

# Attributes are hints: what is no value of the format is left out when they are decoded.
LOSSY_HINTS = {"tree-attributes-odd"}
# A newer minor version, and sections of other software: read, and not written by this version.
OTHER_FRAMES = {"minor-7", "minor-65535"}
OTHER_SECTIONS = {"section-ignorable", "section-ignorable-compressed"}
# The order of tables that nothing refers to is their author's choice.
UNUSED_TABLES = {"provenance-unused"}


def sections_of(raw: bytes) -> tuple[ManifestFile, dict[str, bytes]]:
    """The decoded sections of a manifest."""
    manifest = ManifestFile(MemoryStorage({"manifest.dsd": raw}))
    lengths = manifest.section_nbytes()
    return manifest, {name: manifest.read(name, 0, nbytes) for name, nbytes in lengths.items()}


def check_body(raw: bytes) -> Body:
    assert emit(parse(raw)) == raw
    body = parse_body(parse(raw))
    assert emit_body(body) == raw
    return body


def check_tree(encoded: Any) -> None:
    tree = decode_tree(encoded)
    assert tree.problems == []
    assert emit(encode(tree.root)) == emit(encoded)


def rewritten(raw: bytes) -> bytes:
    """Read a whole manifest into tensors and chunks, and write it from those."""
    manifest, sections = sections_of(raw)
    body = parse_body(parse(sections["body"]))
    # A part is a manifest with raw pages.
    plain = {name: [sections[name]] for name in SECTIONS}
    features = [name for name in manifest.head.features if not manifest.compressed]
    head, pages, _ = emit_manifest(list(plain.items()), features, compress=False)
    part = Part.from_bytes(head + b"".join(pages), 0)
    made, columns = emit_sections(part)
    made = replace(made, sides=body.sides, user=body.user, extensions=body.extensions)
    head, pages, _ = emit_manifest(
        [("body", [emit_body(made)]), *((name, list(column)) for name, column in columns)],
        needed_features(part),
        compress=manifest.compressed,
    )
    return head + b"".join(pages)


@pytest.mark.parametrize("path", VECTORS)
def test_the_body_of_a_vector_is_what_writing_it_again_gives(path):
    check_body(sections_of(path.read_bytes())[1]["body"])


@pytest.mark.parametrize("path", [case for case in VECTORS if case.id not in LOSSY_HINTS])
def test_the_tree_of_a_vector_is_what_encoding_its_values_gives(path):
    check_tree(parse(sections_of(path.read_bytes())[1]["body"])["tree"])


@pytest.mark.parametrize(
    "path",
    [case for case in VECTORS if case.id not in OTHER_FRAMES | OTHER_SECTIONS | UNUSED_TABLES],
)
def test_the_manifest_of_a_vector_is_what_writing_its_tensors_again_gives(path):
    raw = path.read_bytes()
    manifest, sections = sections_of(raw)
    if manifest.compressed:  # by another version of the library: the contents are what counts
        assert sections_of(rewritten(raw))[1] == sections
    else:
        assert rewritten(raw) == raw


@given(root_states(), st.sampled_from(["raw", "zstd", "planes+zstd"]))
def test_the_manifest_of_a_state_is_what_writing_its_tensors_again_gives(state, codec):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "checkpoint"
        dsdformat.numpy.save(path, state, codec=codec, user={"run": "7"}, threads=1)
        raw = (path / "manifest.dsd").read_bytes()
    body = check_body(sections_of(raw)[1]["body"])
    check_tree(body.tree)
    assert rewritten(raw) == raw


@st.composite
def sources(draw) -> TensorSource:
    """Zeros in any number of chunks, sharded or not as far as provenance goes."""
    row = DTYPES[draw(st.sampled_from(sorted(DTYPES)))]
    shape = draw(st.lists(st.integers(1, 6), max_size=3).map(tuple))
    chunks = [(box, bytes(box.numel * row.itemsize)) for box in draw(tilings(shape))]
    layout = draw(st.none() | st.sampled_from(LAYOUTS))
    codec = draw(st.sampled_from(["raw", "zstd", "planes+zstd"]))
    return TensorSource(row.name, shape, chunks, codec=codec, layout=layout)


LAYOUTS = [
    (Mesh(("dp",), (2,), (0, 1)), ("shard(0)",)),
    (Mesh(("dp",), (2,), (0, 1)), ("replicate",)),
    (Mesh(("dp", "tp"), (1, 2), (1, 0)), ("replicate", "strided_shard(0,2)")),
]


@given(
    st.dictionaries(texts, sources(), max_size=4),
    st.dictionaries(texts, texts, max_size=2),
    st.sampled_from([4096, 65_536]),
    st.booleans(),
)
def test_the_manifest_of_a_writer_is_what_writing_its_tensors_again_gives(
    tensors, user, block_nbytes, with_side
):
    files: dict[str, bytearray] = {}
    target = MemoryTarget(files)
    options = {"threads": 1, "block_nbytes": block_nbytes, "world_size": 2}
    writer, other = Writer(target, user=user, **options), PartWriter(target, rank=1, **options)
    writer.add({"model": tensors})
    other.add({"model": {}})
    if with_side:
        writer.add_file("config.json", b"{}")
    writer.commit([other.finish()])
    raw = bytes(files["manifest.dsd"])
    check_tree(check_body(sections_of(raw)[1]["body"]).tree)
    assert rewritten(raw) == raw
