"""What a file system can put in the place of a checkpoint, or do to it while it is read.

Wrong kinds of files, wrong lengths of gigabytes, no permission, names too long, and files that
change under an open reader. The right error comes each time, at once, and nothing waits for ever.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import socket
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dsdformat
import dsdformat.numpy
from dsdformat import (
    ArgumentError,
    Checkpoint,
    DsdError,
    FormatError,
    StorageError,
    TensorSource,
)
from dsdformat.convert import convert, find_kind, open_any, open_foreign

LABELS = ["manifest.dsd", "model.safetensors", "optimizer.safetensors", "config.json"]
TENSORS = ["model/raw", "model/text", "optimizer/moment"]
NOBODY = 65534
TIB = 2**40


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """End a test that waits, with an exception that no code of ours catches."""

    class HangError(BaseException):
        pass

    def ring(*_: object) -> None:
        raise HangError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def save(path: Path, word: str = "new", **options: object) -> None:
    with dsdformat.create(path, user={"word": word}, **options) as writer:
        writer.add({"model": {"w": TensorSource.of("uint8", (5000,), bytes(5000))}})


def word_of(path: Path) -> str:
    dsdformat.verify(path).raise_if_bad()
    with dsdformat.open(path) as checkpoint:
        return checkpoint.user["word"]


def codes_of(path: Path) -> set[str]:
    return {problem.code for problem in dsdformat.verify(path).problems}


# Special files


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    with contextlib.chdir(path.parent), socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)


def make_device(path: Path) -> None:
    """One that never ends: /dev/zero."""
    try:
        os.mknod(path, 0o666 | stat.S_IFCHR, os.makedev(1, 5))
        os.close(os.open(path, os.O_RDONLY))
    except PermissionError:
        pytest.skip("making and opening a device takes a privilege")


def make_link_to_device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def make_link_to_pipe(path: Path) -> None:
    os.mkfifo(path.parent.parent / "pipe")
    path.symlink_to("../pipe")


def make_link_to_terminal(path: Path) -> None:
    path.symlink_to("/dev/tty")


def make_folder(path: Path) -> None:
    path.mkdir()


SPECIAL = [
    *(make_pipe, make_socket, make_device, make_folder),
    *(make_link_to_device, make_link_to_pipe, make_link_to_terminal),
]
special = pytest.mark.parametrize("make", SPECIAL, ids=lambda make: make.__name__[5:])


@special
@pytest.mark.parametrize("label", LABELS)
def test_no_file_of_a_checkpoint_may_be_special(small_folder, make, label):
    (small_folder / label).unlink()
    make(small_folder / label)
    assert codes_of(small_folder) == {"not_regular_file"}


@special
def test_a_special_file_that_is_not_listed_is_not_touched(small_folder, make):
    make(small_folder / "extra")
    report = dsdformat.verify(small_folder)
    assert (report.ok, report.unlisted) == (True, ("extra",))


@special
@pytest.mark.parametrize("call", [dsdformat.open, dsdformat.numpy.load])
def test_a_manifest_that_is_special_is_refused_by_readers(small_folder, make, call):
    (small_folder / "manifest.dsd").unlink()
    make(small_folder / "manifest.dsd")
    with pytest.raises(FormatError) as error:
        call(small_folder)
    assert error.value.code == "not_regular_file"


@special
def test_a_special_file_in_the_place_of_a_checkpoint_is_none(small_folder, make):
    path = small_folder.parent / "folder" / "c"
    path.parent.mkdir()
    make(path)
    for call in (dsdformat.open, dsdformat.numpy.load):
        with pytest.raises(FormatError) as error:
            call(path)
        assert error.value.code == "no_manifest"
    assert codes_of(path) == {"no_manifest"}


@special
def test_a_special_file_is_no_foreign_checkpoint(small_folder, make):
    path = small_folder.parent / "folder" / "model.pt"
    path.parent.mkdir()
    make(path)
    for call in (find_kind, open_foreign, open_any):
        with pytest.raises(DsdError) as error:
            call(path)
        assert error.value.code == ("unknown_kind" if make is make_folder else "not_regular_file")


@pytest.fixture(scope="module")
def foreign_folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of Hugging Face in two files, and one of DCP."""
    folder = tmp_path_factory.mktemp("foreign")
    with dsdformat.create(folder / "c") as writer:
        for name in ("a", "b"):
            writer.add({name: TensorSource.of("uint8", (3,), name.encode() * 3)})
    convert(folder / "c", folder / "huggingface", to="huggingface", max_shard_bytes=3)
    convert(folder / "c", folder / "dcp", to="dcp")
    return folder


MEMBERS = [
    *("huggingface/model-00002-of-00002.safetensors", "huggingface/model.safetensors.index.json"),
    *("dcp/.metadata", "dcp/__0_0.distcp"),
]


@special
@pytest.mark.parametrize("member", MEMBERS)
def test_no_file_of_a_foreign_folder_may_be_special(tmp_path, foreign_folders, make, member):
    kind, label = member.split("/")
    path = tmp_path / "folder" / kind
    shutil.copytree(foreign_folders / kind, path)
    with open_any(path) as opened:
        assert {name: bytes(one.read()) for name, one in opened} == {"a": b"aaa", "b": b"bbb"}
    (path / label).unlink()
    make(path / label)
    with pytest.raises(DsdError) as error:
        [one.read() for _, one in open_any(path)]
    assert error.value.code == "not_regular_file"


@special
@pytest.mark.parametrize("overwrite", [False, True])
def test_a_special_file_is_never_replaced_by_a_checkpoint(tmp_path, make, overwrite):
    path = tmp_path / "folder" / "c"
    path.parent.mkdir()
    make(path)
    before = os.lstat(path)
    if make is make_folder:
        (path / "mine").write_bytes(b"")
    with pytest.raises(StorageError) as error:
        save(path, overwrite=overwrite)
    assert error.value.code == "not_replaceable"
    assert os.path.samestat(before, os.lstat(path))
    assert not [name for name in os.listdir(path.parent) if name.startswith(".")]


@special
@pytest.mark.parametrize("name", [".c.dsd-partial-00000000", ".c.dsd-replaced"])
def test_a_special_file_among_the_leftovers_disturbs_no_save(tmp_path, make, name):
    parent = tmp_path / "folder"
    parent.mkdir()
    make(parent / name)
    save(parent / "c")
    save(parent / "c", "again", overwrite=True)
    assert word_of(parent / "c") == "again"


@pytest.mark.parametrize("name", [".c.dsd-partial-00000000", ".c.dsd-replaced"])
def test_a_link_among_the_leftovers_leads_to_nothing_that_is_removed(tmp_path, name):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_bytes(b"mine")
    (tmp_path / "runs").mkdir()
    save(tmp_path / "runs" / "c", "old")
    (tmp_path / "runs" / name).symlink_to(tmp_path / "mine")
    save(tmp_path / "runs" / "c", "new", overwrite=True)
    assert word_of(tmp_path / "runs" / "c") == "new"
    assert (tmp_path / "mine" / "thesis.txt").read_bytes() == b"mine"


# Lengths


@pytest.mark.parametrize("label", LABELS)
def test_a_file_with_a_hole_of_a_tebibyte_behind_it_is_refused_at_once(small_folder, label):
    make_longer(small_folder / label, TIB)
    code = "trailing_bytes" if label == "manifest.dsd" else "file_size_mismatch"
    assert codes_of(small_folder) == {code}


@pytest.mark.parametrize("label", LABELS)
def test_a_file_that_is_one_hole_is_refused_at_once(small_folder, label):
    (small_folder / label).write_bytes(b"")
    make_longer(small_folder / label, TIB)
    code = "bad_magic" if label == "manifest.dsd" else "file_size_mismatch"
    assert codes_of(small_folder) == {code}


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model.npz", "model"])
def test_a_foreign_file_that_is_one_hole_is_refused_at_once(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    make_longer(tmp_path / name, TIB)
    with pytest.raises(DsdError):
        open_any(tmp_path / name)


def make_longer(path: Path, nbytes: int) -> None:
    try:
        os.truncate(path, nbytes)
    except OSError:
        pytest.skip("this file system has no files of that length")


@pytest.mark.parametrize("label", LABELS)
def test_a_hole_in_the_place_of_a_file_is_found(small_folder, label):
    """As a crash leaves a file whose length was kept and whose bytes were not."""
    nbytes = (small_folder / label).stat().st_size
    (small_folder / label).write_bytes(b"")
    os.truncate(small_folder / label, nbytes)
    expected = {
        "manifest.dsd": {"bad_magic"},
        "config.json": {"side_checksum_mismatch"},
        "model.safetensors": {"header_mismatch", "checksum_mismatch", "stored_checksum_mismatch"},
        "optimizer.safetensors": {"header_mismatch", "stored_checksum_mismatch"},
    }
    found = codes_of(small_folder)
    assert found
    assert found <= expected[label]


# Files that change while they are read


def read_all(checkpoint: Checkpoint) -> dict[str, bytes | str]:
    """The bytes of each tensor, or the code of the error."""
    found: dict[str, bytes | str] = {}
    for name in TENSORS:
        try:
            found[name] = bytes(checkpoint.read(name))
        except DsdError as error:
            found[name] = error.code
    return found


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def put_link(path: Path) -> None:
    path.rename(path.with_name("aside"))
    path.symlink_to("aside")


def put_stale(path: Path) -> None:
    """Another file of the same length takes the name, as a copy that is under way does."""
    data = path.read_bytes()
    path.unlink()
    path.write_bytes(bytes(len(data)))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "removed": (Path.unlink, "missing_file"),
    "pipe": (put_pipe, "not_regular_file"),
    "link": (put_link, "not_regular_file"),
    "longer": (lambda path: os.truncate(path, path.stat().st_size + 1), "file_size_mismatch"),
    "shorter": (lambda path: os.truncate(path, path.stat().st_size - 1), "file_size_mismatch"),
    "empty": (lambda path: os.truncate(path, 0), "file_size_mismatch"),
    "stale": (put_stale, "checksum_mismatch"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_data_file_that_changes_before_it_is_first_read_gives_an_error(
    small_folder, small_tensors, change
):
    make, code = CHANGES[change]
    with dsdformat.open(small_folder) as checkpoint:
        make(small_folder / "model.safetensors")
        found = read_all(checkpoint)
    assert found["model/raw"] == code
    assert found["model/text"] in (code, f"stored_{code}")
    assert found["optimizer/moment"] == small_tensors["optimizer/moment"]


@pytest.mark.parametrize("change", ["removed", "pipe", "link", "stale"])
def test_a_data_file_that_loses_its_name_is_read_on(small_folder, small_tensors, change):
    with dsdformat.open(small_folder) as checkpoint:
        checkpoint.read("model/raw")
        CHANGES[change][0](small_folder / "model.safetensors")
        assert read_all(checkpoint) == small_tensors


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 6000])
def test_a_data_file_that_is_cut_while_it_is_open_gives_an_error(small_folder, nbytes):
    """Whoever copies over it in place, and is slow."""
    with dsdformat.open(small_folder) as checkpoint:
        checkpoint.read("model/text")
        os.truncate(small_folder / "model.safetensors", nbytes)
        found = read_all(checkpoint)
        assert {found["model/raw"], found["model/text"]} == {"file_size_mismatch"}
        with pytest.raises(FormatError) as error:
            checkpoint.tensor("model/raw").map()
        assert error.value.code == "file_size_mismatch"


def test_a_data_file_that_is_written_over_while_it_is_open_gives_no_wrong_bytes(small_folder):
    path = small_folder / "model.safetensors"
    with dsdformat.open(small_folder) as checkpoint:
        checkpoint.read("model/raw")
        with path.open("r+b") as file:
            file.write(bytes(path.stat().st_size))
        found = read_all(checkpoint)
    assert found["model/raw"] == "checksum_mismatch"
    assert found["model/text"] == "stored_checksum_mismatch"


@pytest.mark.parametrize("change", CHANGES)
def test_a_manifest_that_changes_while_it_is_open_gives_the_old_state_or_an_error(
    small_folder, small_tensors, change
):
    with dsdformat.open(small_folder) as checkpoint:
        CHANGES[change][0](small_folder / "manifest.dsd")
        found = read_all(checkpoint)
    codes = {"page_checksum_mismatch", "truncated", "missing_file", "not_regular_file"}
    for name, data in found.items():
        assert data == small_tensors[name] or data in codes


# Permission


@pytest.fixture
def unprivileged(small_files: dict[str, bytes]) -> Iterator[Path]:
    """A folder with `c` in it, while this process has no privilege that opens what it may not."""
    folder = Path(tempfile.mkdtemp()).resolve()
    try:
        (folder / "c").mkdir()
        for label, data in small_files.items():
            (folder / "c" / label).write_bytes(data)
        with without_privilege(folder):
            yield folder
    finally:
        for path in (folder, *folder.rglob("*")):
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(folder)


@contextlib.contextmanager
def without_privilege(folder: Path) -> Iterator[None]:
    if os.geteuid() != 0:
        yield
        return
    for path in (folder, *folder.rglob("*")):
        os.chown(path, NOBODY, NOBODY)
    os.setegid(NOBODY)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


def refusal(call: Callable[..., object], *args: object, **options: object) -> tuple[str, int]:
    with pytest.raises(StorageError) as error:
        call(*args, **options)
    assert error.value.errno is not None
    return error.value.code, error.value.errno


DENIED = ("io_error", errno.EACCES)


@pytest.mark.parametrize("label", LABELS)
def test_a_file_that_may_not_be_read_is_a_storage_error(unprivileged, label):
    (unprivileged / "c" / label).chmod(0)
    assert refusal(dsdformat.verify, unprivileged / "c") == DENIED
    if label == "manifest.dsd":
        assert refusal(dsdformat.open, unprivileged / "c") == DENIED
    elif label != "config.json":
        assert refusal(dsdformat.numpy.load, unprivileged / "c") == DENIED


@pytest.mark.parametrize("mode", [0, 0o100, 0o400], ids=oct)
def test_a_folder_that_may_not_be_listed_or_entered_is_a_storage_error(unprivileged, mode):
    (unprivileged / "c").chmod(mode)
    for call in (dsdformat.verify, dsdformat.open, dsdformat.numpy.load, open_any):
        assert refusal(call, unprivileged / "c") == DENIED


def test_a_folder_above_that_may_not_be_entered_is_a_storage_error(unprivileged):
    unprivileged.chmod(0)
    for call in (dsdformat.verify, dsdformat.open, dsdformat.numpy.load, open_any, save):
        assert refusal(call, unprivileged / "c") == DENIED


def test_a_checkpoint_is_read_from_folders_and_files_that_are_read_only(unprivileged):
    for path in (unprivileged / "c").iterdir():
        path.chmod(0o400)
    (unprivileged / "c").chmod(0o500)
    unprivileged.chmod(0o500)
    assert dsdformat.verify(unprivileged / "c").ok
    assert dsdformat.numpy.load(unprivileged / "c")["optimizer"]["step"] == 3


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_save_into_a_folder_that_is_read_only_changes_nothing(unprivileged, overwrite):
    unprivileged.chmod(0o500)
    assert refusal(save, unprivileged / "d", overwrite=overwrite) == DENIED
    if overwrite:
        assert refusal(save, unprivileged / "c", overwrite=True) == DENIED
    assert dsdformat.verify(unprivileged / "c").ok
    assert os.listdir(unprivileged) == ["c"]


def test_a_checkpoint_that_is_read_only_is_replaced_when_asked(unprivileged):
    """Its name is the folder's above; what cannot be removed stays aside, and says so."""
    (unprivileged / "c").chmod(0o500)
    save(unprivileged / "c", overwrite=True)
    assert word_of(unprivileged / "c") == "new"


# Names


@pytest.mark.parametrize("length", [1, 200, 232, 233])
def test_a_name_of_up_to_233_characters_is_saved_replaced_and_read(tmp_path, length):
    path = tmp_path / ("n" * length)
    save(path, "old")
    save(path, "new", overwrite=True)
    assert word_of(path) == "new"
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize("length", [234, 255, 256, 5000])
def test_a_longer_name_is_refused_and_nothing_is_left(tmp_path, length):
    assert refusal(save, tmp_path / ("n" * length)) == ("io_error", errno.ENAMETOOLONG)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("call", [dsdformat.open, dsdformat.verify, save])
def test_a_path_that_is_too_long_is_a_storage_error(tmp_path, call):
    path = tmp_path.joinpath(*(["n" * 200] * 30))
    assert refusal(call, path) == ("io_error", errno.ENAMETOOLONG)


def test_a_checkpoint_in_a_folder_that_is_too_deep_to_name_is_read_by_a_relative_path(
    small_folder, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    for _ in range(25):
        os.mkdir("n" * 200)
        os.chdir("n" * 200)
    shutil.copytree(small_folder, "c")
    assert dsdformat.verify("c").ok
    assert refusal(save, "d") == ("io_error", errno.ENAMETOOLONG)
    assert os.listdir() == ["c"]
    monkeypatch.undo()
    shutil.rmtree(tmp_path / ("n" * 200))


# Case


@pytest.fixture
def caseless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file system to which `A` and `a` are one name; it keeps the first form."""
    real = os.open

    def resolved(path: object, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        folder, name = os.path.split(os.fspath(path))  # type: ignore[call-overload]
        if dir_fd is not None or str(folder).startswith(str(tmp_path)):
            for other in os.listdir(folder or dir_fd):
                if other.lower() == str(name).lower():
                    path = os.path.join(folder, other)
        return real(path, flags, mode, dir_fd=dir_fd)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", resolved)
    monkeypatch.setattr(os, "supports_dir_fd", {*os.supports_dir_fd, resolved})


def test_names_that_differ_in_case_alone_have_files_of_their_own_where_case_is_nothing(
    caseless, tmp_path
):
    state = {
        name: {"w": TensorSource.of("uint8", (1,), bytes([number]))}
        for number, name in enumerate(("model", "Model", "MODEL", "Optimizer"))
    }
    state["w"] = TensorSource.of("uint8", (1,), b"r")  # which has no section
    with dsdformat.create(tmp_path / "c", threads=1) as writer:
        writer.add_file("README.md", b"")
        writer.add(state)
    labels = {path.name for path in (tmp_path / "c").iterdir()}
    assert len({label.lower() for label in labels}) == len(labels) == 7
    assert dsdformat.verify(tmp_path / "c", threads=1).ok
    with dsdformat.open(tmp_path / "c", threads=1) as checkpoint:
        found = {entry.name: bytes(entry.read()) for entry in checkpoint}
    assert found == {
        "model/w": b"\0",
        "Model/w": b"\1",
        "MODEL/w": b"\2",
        "Optimizer/w": b"\3",
        "w": b"r",
    }


@pytest.mark.parametrize("label", ["README.MD", "readme.md", "Manifest.dsd", "x.SafeTensors"])
def test_a_side_file_whose_name_is_taken_but_for_its_case_is_refused(tmp_path, label):
    with dsdformat.create(tmp_path / "c") as writer:
        writer.add_file("README.md", b"")
        with pytest.raises(ArgumentError) as error:
            writer.add_file(label, b"")
        assert error.value.code == "bad_argument"


@pytest.mark.parametrize(
    ("label", "code"), [("manifest.dsd", "no_manifest"), ("model.safetensors", "missing_file")]
)
def test_a_file_whose_name_came_back_in_another_case_is_missing(small_folder, label, code):
    """As from a file system that knows capitals alone."""
    (small_folder / label).rename(small_folder / label.upper())
    assert codes_of(small_folder) == {code}


@pytest.mark.parametrize("call", [dsdformat.open, save])
def test_a_file_in_the_place_of_a_folder_above_is_an_error(tmp_path, call):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(DsdError) as error:
        call(tmp_path / "file" / "c")
    assert error.value.code in ("no_manifest", "io_error")


def test_a_loop_of_links_is_an_error(tmp_path):
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    for call in (dsdformat.open, save, find_kind):
        with pytest.raises(DsdError) as error:
            call(tmp_path / "a" / "c")
        assert error.value.code in ("no_manifest", "io_error", "missing_file")
