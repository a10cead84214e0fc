"""What a vector declares: tensors, chunks, files, the tree; and the parts that hooks may change."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from vectors import zstd
from vectors.wire import dtypes

MAGIC = bytes.fromhex("894453440d0a1a0a")

Shape = tuple[int, ...]


@dataclass
class Chunk:
    offset: Shape
    shape: Shape
    file: int = 0
    codec: int = 0
    piece: Callable[[bytes], bytes] = zstd.smaller


@dataclass
class Tensor:
    """A tensor and its row-major bytes; one chunk in file 0 where none are given."""

    dtype: str
    shape: Shape
    data: bytes
    chunks: list[Chunk] = field(default_factory=list)
    layout: int = 0

    def __post_init__(self) -> None:
        if not self.chunks:
            self.chunks = [Chunk((0,) * len(self.shape), self.shape)]
        expected = math.prod(self.shape) * dtypes()[self.dtype].itemsize
        if len(self.data) != expected:
            raise ValueError(f"{self.dtype}{self.shape}: {len(self.data)} bytes, not {expected}")


@dataclass
class DataFile:
    label: str = "model.safetensors"
    prefix: tuple[str, ...] = ()
    rank: int = 0
    metadata: dict[str, str] = field(default_factory=lambda: {"format": "pt"})
    header_multiple: int = 64
    by_size_class: bool = True
    header: Callable[[bytes], bytes] | None = None  # from the right header to the one written


@dataclass
class Checkpoint:
    tensors: list[Tensor]
    tree: object
    files: list[DataFile] = field(default_factory=lambda: [DataFile()])
    user: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, object] = field(default_factory=dict)
    sides: dict[str, bytes] = field(default_factory=dict)
    meshes: list[dict] = field(default_factory=list)
    layouts: list[dict] = field(default_factory=list)
    world_size: int = 1
    block_nbytes: int = 4096
    page: Callable[[bytes], bytes] = zstd.raw
    minor: int = 0
    more_sections: list["Section"] = field(default_factory=list)
    unlisted: dict[str, bytes] = field(default_factory=dict)


@dataclass
class Block:
    decoded: bytes
    stored: bytes
    digest: bytes
    stored_digest: bytes


@dataclass
class StoredChunk:
    tensor: Tensor
    chunk: Chunk
    blocks: list[Block]
    file: int
    codec: int
    byte_offset: int = 0  # from the file's data, until the header is known
    key: str = ""

    @property
    def stored(self) -> bytes:
        return b"".join(block.stored for block in self.blocks)


@dataclass
class Section:
    name: bytes
    data: bytes
    flags: int = 0


@dataclass
class Page:
    stored: bytes
    digest: bytes


@dataclass
class SectionRow:
    name: bytes
    flags: int
    pages: int
    decoded_nbytes: int


@dataclass
class Head:
    rows: list[SectionRow]
    pages: list[tuple[int, bytes]]
    features: bytes
    magic: bytes = MAGIC
    major: int = 1
    minor: int = 0
    head_nbytes: int = 0
    manifest_nbytes: int = 0
    features_nbytes: int = 0
    section_count: int = 0
    page_count: int = 0
    reserved: bytes = bytes(4)
