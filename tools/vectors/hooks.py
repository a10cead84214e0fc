"""Hooks that break one thing in a layer of the builder, or that change it."""

from collections.abc import Callable

from vectors.builder import add_up
from vectors.chunks import writer_order
from vectors.declare import Head, Page, Section, StoredChunk
from vectors.wire import digest

BytesHook = Callable[[bytes], bytes]
HeadHook = Callable[[Head], Head | None]
Files = dict[str, bytes]
Columns = dict[str, list]


def flip(at: int, bit: int = 0) -> BytesHook:
    """Flip one bit of a byte string; `at` may count from its end."""

    def hook(data: bytes) -> bytes:
        changed = bytearray(data)
        changed[at] ^= 1 << bit
        return bytes(changed)

    return hook


# The folder


def rename(old: str, new: str) -> Callable[[Files], None]:
    """Give a file another name, out of the way of what `setup` puts there."""

    def hook(files: Files) -> None:
        files[new] = files.pop(old)

    return hook


def without(label: str) -> Callable[[Files], None]:
    def hook(files: Files) -> None:
        del files[label]

    return hook


def edited(label: str, change: BytesHook) -> Callable[[Files], None]:
    def hook(files: Files) -> None:
        files[label] = change(files[label])

    return hook


def symlink(label: str, target: str) -> list[dict[str, str]]:
    return [{"op": "symlink", "label": label, "target": target}]


def fifo(label: str) -> list[dict[str, str]]:
    return [{"op": "fifo", "label": label}]


def mkdir(label: str) -> list[dict[str, str]]:
    return [{"op": "mkdir", "label": label}]


# The head, sections and pages


def head_put(**fields: object) -> HeadHook:
    """Set fields of the head, which is sealed after."""

    def hook(head: Head) -> None:
        for name, value in fields.items():
            setattr(head, name, value)

    return hook


def head_plus(**fields: int) -> HeadHook:
    def hook(head: Head) -> None:
        for name, value in fields.items():
            setattr(head, name, getattr(head, name) + value)

    return hook


def features(names: bytes) -> HeadHook:
    """List other features; the lengths follow."""

    def hook(head: Head) -> Head:
        head.features = names
        return add_up(head)

    return hook


def section_put(index: int, **fields: object) -> Callable[[list[Section]], None]:
    def hook(sections: list[Section]) -> None:
        for name, value in fields.items():
            setattr(sections[index], name, value)

    return hook


def page_stored(section: int, change: BytesHook) -> Callable[[list[list[Page]]], None]:
    """Store the first page of a section as other bytes, with their digest."""

    def hook(pages: list[list[Page]]) -> None:
        stored = change(pages[section][0].stored)
        pages[section][0] = Page(stored, digest(stored))

    return hook


def page_flip(section: int, page: int) -> Callable[[list[list[Page]]], None]:
    def hook(pages: list[list[Page]]) -> None:
        pages[section][page].stored = flip(-1)(pages[section][page].stored)

    return hook


# The body


def body_put(key: str, value: object) -> Callable[[dict], None]:
    def hook(body: dict) -> None:
        body[key] = value

    return hook


def body_drop(key: str) -> Callable[[dict], None]:
    def hook(body: dict) -> None:
        del body[key]

    return hook


def in_file(**members: object) -> Callable[[dict], None]:
    """Set members of the first data file's entry; `...` removes one."""
    return _in_entry("files", members)


def in_side(**members: object) -> Callable[[dict], None]:
    return _in_entry("sides", members)


def _in_entry(table: str, members: dict[str, object]) -> Callable[[dict], None]:
    def hook(body: dict) -> None:
        body[table][0] = kept(body[table][0] | members)

    return hook


def kept(members: dict[str, object]) -> dict[str, object]:
    """A map without the members that are `...`."""
    return {key: value for key, value in members.items() if value is not ...}


def labelled(table: str, *labels: str) -> Callable[[dict], None]:
    """Give the entries of `files` or `sides` other labels."""

    def hook(body: dict) -> None:
        for entry, label in zip(body[table], labels, strict=True):
            entry["label"] = label

    return hook


# Columns and chunks


def column_put(column: str, index: int, value: int) -> Callable[[Columns], None]:
    def hook(columns: Columns) -> None:
        columns[column][index] = value

    return hook


def column_set(column: str, *values: object) -> Callable[[Columns], None]:
    return lambda columns: columns.update({column: list(values)})


def no_chunks(chunks: list[StoredChunk]) -> None:
    chunks.clear()


def block_stored(block: int, change: BytesHook) -> Callable[[list[StoredChunk]], None]:
    """Store a block of the first chunk as other bytes, with their digest."""

    def hook(chunks: list[StoredChunk]) -> None:
        changed = chunks[0].blocks[block]
        changed.stored = change(changed.stored)
        changed.stored_digest = digest(changed.stored)
        place(chunks)

    return hook


def place(chunks: list[StoredChunk]) -> None:
    """Lay the chunks of one file down again, after their stored bytes changed."""
    offset = 0
    for chunk in sorted(chunks, key=writer_order):
        chunk.byte_offset = offset
        offset += len(chunk.stored)


def moved(*offsets: int) -> Callable[[list[StoredChunk]], None]:
    """Lay chunks at these byte offsets, counted from where the data begin."""

    def hook(chunks: list[StoredChunk]) -> None:
        for chunk, offset in zip(chunks, offsets, strict=True):
            chunk.byte_offset = offset

    return hook
