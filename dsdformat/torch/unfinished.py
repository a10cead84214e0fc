"""A save that is planned and not written: all that can be refused has been, on every rank.

What follows, writing and the commit, is done at once by `Unfinished.write`, in which ranks agree
by collectives, or in the background by `apart.write_apart`, in which they do not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dsdformat import folders
from dsdformat.folders import PathLike
from dsdformat.storage.mailbox import Mailbox
from dsdformat.torch.comm import Comm
from dsdformat.writer import PartWriter, Writer

__all__ = ["Unfinished", "plan"]


@dataclass(frozen=True, slots=True, eq=False)
class Unfinished:
    """What a rank has to write.

    Attributes:
        comm: The ranks that save.
        writer: Of this rank; its data files are planned.
        coordinator: The same writer on rank 0, which commits.
        mailbox: By which ranks agree that write in the background.
    """

    comm: Comm
    writer: PartWriter
    coordinator: Writer | None
    mailbox: Mailbox | None

    def write(self) -> str:
        """Write, and make the checkpoint exist; return the root digest.

        Raises:
            DistributedError: `rank_failed`, on every rank.

        Ranks: collective over the group.
        Memory: two blocks per thread, and none for raw tensors that are buffers.
        """
        comm, coordinator = self.comm, self.coordinator
        raw = b""
        try:
            with comm.together("save") as step:
                raw = self.write_part()
                step.told = len(raw)
            parts = comm.collect(raw, step.heard)
            with comm.together("save") as step:
                if coordinator is not None:
                    step.told = coordinator.commit(parts[1:])
        except BaseException:
            self.abort()
            raise
        root: str = step.heard[0]
        return root

    def write_part(self) -> bytes:
        """Write the data files of this rank; return what the coordinator needs to know of them."""
        if self.coordinator is None:
            return self.writer.finish()
        self.coordinator.write()
        return b""

    def abort(self) -> None:
        """Remove what was written, if this is the coordinator, and leave the others."""
        if self.coordinator is not None:
            self.coordinator.abort()
        if self.mailbox is not None:
            self.mailbox.close()


def plan(
    comm: Comm,
    path: PathLike,
    plain: Mapping[str, Any],
    *,
    overwrite: bool,
    user: Mapping[str, str] | None,
    stage: Callable[[PartWriter], None] | None = None,
    **options: Any,
) -> Unfinished:
    """Plan what each rank writes of its plain state.

    Args:
        comm: The ranks that save.
        path: The checkpoint's folder, on storage that all of them see.
        plain: What this rank has captured.
        overwrite, user: As in `save`.
        stage: Called with a writer whose data files are planned, if it writes in the background.
        options: Of `dsdformat.create` that concern data.

    Raises:
        DistributedError: `rank_failed`, on every rank; nothing is left.

    Ranks: collective over the group.
    """
    options["world_size"] = comm.world_size
    coordinator: Writer | None = None
    mailbox: Mailbox | None = None
    writer: PartWriter | None = None
    apart = stage is not None and comm.world_size > 1
    try:
        with comm.together("save") as step:
            if comm.is_coordinator:
                coordinator = folders.create(path, overwrite=overwrite, user=user, **options)
                mailbox = Mailbox.begin(path) if apart else None
                if comm.world_size > 1:
                    step.told = [coordinator.staging, str(mailbox.folder) if mailbox else ""]
        staging, folder = step.heard[0] or ("", "")
        with comm.together("save"):
            if apart and mailbox is None:
                mailbox = Mailbox.join(folder, comm.rank)
            writer = coordinator or Writer.join(staging, rank=comm.rank, **options)
            writer.add(plain)
            writer.plan() if stage is None else stage(writer)
    except BaseException:
        if coordinator is not None:
            coordinator.abort()
        if mailbox is not None:
            mailbox.close()
        raise
    assert writer is not None
    return Unfinished(comm, writer, coordinator, mailbox)
