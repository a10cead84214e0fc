"""Write the checkpoints that later versions must load, once for each version of the format.

    python tools/make_compat.py 1.1

A folder that is there is never written again. `tests/torch_runtime/test_compat.py` says what the
checkpoints hold, and gets the digests that are printed.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
from torch import distributed, multiprocessing

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import dsdformat  # noqa: E402
import dsdformat.torch as dsd  # noqa: E402
from tests.torch_runtime.test_compat import COMPAT, model_of, training_of  # noqa: E402

RANKS, MEETING = 2, "tcp://127.0.0.1:29531"


def save_sharded(rank: int, path: str) -> None:
    """Save the training as one of several ranks that shard its model."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=MEETING, rank=rank, world_size=RANKS)
    model = fully_shard(model_of(1.0), mesh=init_device_mesh("cpu", (RANKS,)))
    dsd.save(path, training_of(model, 1.0))
    distributed.destroy_process_group()


def main() -> None:
    """Write a folder of checkpoints, and print their digests."""
    (version,) = sys.argv[1:]
    folder = COMPAT / version
    folder.mkdir(parents=True)  # an error if it is there
    dsd.save(folder / "raw", training_of(model_of(1.0), 1.0))
    dsd.save(folder / "compressed", training_of(model_of(1.0), 1.0), codec="planes+zstd")
    multiprocessing.start_processes(save_sharded, (str(folder / "two-ranks"),), nprocs=RANKS)
    for name in ("raw", "compressed", "two-ranks"):
        with dsdformat.open(folder / name) as checkpoint:
            print(f"{version}/{name}: root {checkpoint.root}")
            print(f"  content {checkpoint.content_digest()}")


if __name__ == "__main__":
    main()
