"""gather, distribute and broadcast: every dtype bit for bit, in buckets of any size."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dsdformat.errors import (
    DistributedError,
    DsdError,
    MismatchError,
    RankDisagreementError,
    UnsupportedValueError,
)
from dsdformat.torch.broadcast import broadcast
from dsdformat.torch.comm import Comm
from dsdformat.torch.distribute import distribute
from dsdformat.torch.gather import gather
from dsdformat.torch.routes import Routes
from tests.ranks.counting import counted, watched
from tests.ranks.layouts import everywhere
from tests.ranks.shards import (
    DTYPE_IDS,
    DTYPES,
    ONE_AXIS,
    SHAPE_IDS,
    SHAPES,
    STRIDED,
    TWO_AXES,
    blank,
    carried,
    cut,
    dtensor,
    local_bits,
    mesh_of,
    noise,
    spread,
    typed,
    world,
)
from tests.torch_runtime.exact import assert_same, assert_same_tensor

BUCKETS = [1, 50, 1 << 28]
SHAPED = dict(zip(SHAPE_IDS, SHAPES, strict=True))
PAIRED = {**TWO_AXES, **STRIDED}


def fits(placements: Any, shape: tuple[int, ...]) -> bool:
    return all(not hasattr(one, "dim") or one.dim < len(shape) for one in placements)


LAID = [
    pytest.param(shape, placements, id=f"{name}-{how}")
    for name, shape in SHAPED.items()
    for how, placements in ONE_AXIS.items()
    if fits(placements, shape)
]


def assert_all_same(tensor: torch.Tensor, wanted: torch.Tensor) -> None:
    assert type(tensor) is torch.Tensor
    assert not tensor.requires_grad
    assert_same_tensor(tensor, wanted)


# Dtypes


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
@pytest.mark.parametrize("to", [None, 0, 1], ids=["to-all", "to-0", "to-1"])
def test_every_dtype_is_gathered_bit_for_bit(dtype, to):
    mesh = mesh_of((2,))
    whole = {f"t{shape}": noise(shape, dtype) for shape in [(5, 3), (1,), (0, 2), ()]}
    tensors = {
        name: spread(one, mesh, [Shard(0) if one.dim() else Replicate()])
        for name, one in whole.items()
    }
    found = gather(tensors, to=to, bucket_nbytes=32)
    assert_same(found, whole if to in (None, distributed.get_rank()) else {})


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_dtype_is_broadcast_bit_for_bit(dtype):
    mesh = mesh_of((2,))
    shapes = [(5, 3), (1,), (0, 2), ()]
    whole = {f"{kind}{shape}": noise(shape, dtype) for shape in shapes for kind in "sp"}
    into = {}
    for name, one in whole.items():
        if name[0] == "s" and one.dim():
            into[name] = blank(one, mesh, [Shard(0)])
        else:
            into[name] = typed(carried(one).clone().fill_(0), dtype)
    given = whole if distributed.get_rank() == 0 else None
    broadcast(given, into, bucket_nbytes=32)
    for name, one in whole.items():
        wanted = cut(one, mesh, [Shard(0)]) if isinstance(into[name], DTensor) else one
        assert local_bits(into[name]) == local_bits(wanted)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", DTYPES, ids=DTYPE_IDS)
def test_every_dtype_is_distributed_bit_for_bit(dtype):
    mesh = mesh_of((2,))
    whole = {"s": noise((5, 3), dtype), "p": noise((3,), dtype), "o": noise((), dtype)}
    into: dict[str, Any] = {
        "s": blank(whole["s"], mesh, [Shard(0)]),
        "p": typed(carried(whole["p"]).clone().fill_(0), dtype),
        "o": typed(carried(whole["o"]).clone().fill_(0), dtype),
    }
    distribute(whole, into)
    assert local_bits(into["s"]) == local_bits(cut(whole["s"], mesh, [Shard(0)]))
    assert local_bits(into["p"]) == local_bits(whole["p"])
    assert local_bits(into["o"]) == local_bits(whole["o"])


# Shapes, placements, buckets


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("shape", "placements"), LAID)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_shapes_and_placements_are_joined_in_buckets_of_any_size(shape, placements, bucket):
    mesh = mesh_of((3,))
    whole = {f"t{i}": noise(shape, torch.float32, i) for i in range(3)}
    tensors = {name: spread(one, mesh, placements) for name, one in whole.items()}
    before = {name: local_bits(one) for name, one in tensors.items()}
    assert_same(gather(tensors, bucket_nbytes=bucket), whole)
    assert {name: local_bits(one) for name, one in tensors.items()} == before


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("shape", "placements"), LAID)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_shapes_and_placements_are_cut_in_buckets_of_any_size(shape, placements, bucket):
    mesh = mesh_of((3,))
    whole = {f"t{i}": noise(shape, torch.float32, i) for i in range(3)}
    into = {name: blank(one, mesh, placements) for name, one in whole.items()}
    into["plain"] = torch.zeros(shape)
    whole["plain"] = noise(shape, torch.float32, 9)
    broadcast(whole if distributed.get_rank() == 0 else None, into, bucket_nbytes=bucket)
    for name, one in into.items():
        wanted = cut(whole[name], mesh, placements) if isinstance(one, DTensor) else whole[name]
        assert local_bits(one) == local_bits(wanted)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "placements", [*TWO_AXES.values(), *STRIDED.values()], ids=[*TWO_AXES, *STRIDED]
)
@pytest.mark.parametrize("shape", [(5, 7), (1, 17), (0, 3)], ids=str)
@pytest.mark.parametrize("bucket", [40, 1 << 28])
def test_two_axes_are_joined_cut_and_sent(placements, shape, bucket):
    mesh = mesh_of((2, 2))
    whole = {"one": noise(shape, torch.float32), "other": noise(shape, torch.int16, 1)}
    tensors = {name: spread(one, mesh, placements) for name, one in whole.items()}
    assert_same(gather(tensors, bucket_nbytes=bucket), whole)
    sent = {name: blank(one, mesh, placements) for name, one in whole.items()}
    broadcast(whole if distributed.get_rank() == 0 else None, sent, bucket_nbytes=bucket)
    own = {name: blank(one, mesh, placements) for name, one in whole.items()}
    distribute(whole, own)
    for name, tensor in tensors.items():
        assert local_bits(sent[name]) == local_bits(tensor)
        assert local_bits(own[name]) == local_bits(tensor)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bucket", BUCKETS)
def test_tensors_of_all_dtypes_share_buckets(bucket):
    mesh = mesh_of((2,))
    whole = {name: noise((3, 5), dtype) for name, dtype in zip(DTYPE_IDS, DTYPES, strict=True)}
    tensors = {name: spread(one, mesh, [Shard(1)]) for name, one in whole.items()}
    found = gather(tensors, bucket_nbytes=bucket)
    assert_same(found, whole)
    into = {name: blank(one, mesh, [Shard(1)]) for name, one in whole.items()}
    broadcast(whole if distributed.get_rank() == 0 else None, into, bucket_nbytes=bucket)
    assert {n: local_bits(t) for n, t in into.items()} == {
        n: local_bits(t) for n, t in tensors.items()
    }


@pytest.mark.ranks(4)
@pytest.mark.parametrize("bucket", [200, 1 << 28])
@pytest.mark.parametrize("room", [0, 1 << 16], ids=["too-little-memory", "memory"])
def test_what_goes_through_memory_of_all_ranks_is_the_same(bucket, room):
    mesh = mesh_of((4,))
    whole = {name: noise((9, 5), dtype) for name, dtype in zip(DTYPE_IDS, DTYPES, strict=True)}
    tensors = {name: spread(one, mesh, [Shard(1)]) for name, one in whole.items()}
    into = {name: blank(one, mesh, [Shard(0)]) for name, one in whole.items()}
    given = whole if distributed.get_rank() == 0 else None
    sent: list[int] = []
    with (
        mock.patch("dsdformat.torch.exchange_memory.LEAST_NBYTES", 0),
        mock.patch("dsdformat.torch.exchange_memory.PADDING_NBYTES", room),
        mock.patch("dsdformat.torch.comm._DIRECT_RANKS", 0),  # what ranks tell goes another way
        watched(lambda _, args: sent.append(args[1].nbytes), ("all_to_all_single",)),
    ):
        found = gather(tensors, to=2, bucket_nbytes=bucket)
        broadcast(given, into, bucket_nbytes=bucket)
    assert_same(found, whole if distributed.get_rank() == 2 else {})
    for name, one in into.items():
        assert local_bits(one) == local_bits(cut(whole[name], mesh, [Shard(0)]))
    # Of long rounds there is more than the elements of tensors: each begins at a multiple of 16.
    assert any(everywhere(len(sent))) == (room == 0 and bucket > 200)


# Memory that is not packed


@pytest.mark.ranks(2)
def test_shards_that_are_not_contiguous_are_gathered():
    mesh = mesh_of((2,))
    whole = noise((6, 4), torch.float32)
    local = cut(whole, mesh, [Shard(0)])
    transposed = local.t().contiguous().t()
    assert not transposed.is_contiguous()
    wide = torch.zeros(3, 8)
    wide[:, ::2] = local
    tensors = {
        "transposed": dtensor(transposed, mesh, [Shard(0)], (6, 4)),
        "stepped": dtensor(wide[:, ::2], mesh, [Shard(0)], (6, 4)),
    }
    assert_same(gather(tensors, bucket_nbytes=16), {"transposed": whole, "stepped": whole})


@pytest.mark.ranks(2)
def test_tensors_that_are_not_contiguous_are_sent_and_filled():
    mesh = mesh_of((2,))
    base = noise((4, 12), torch.float32)
    whole = {"a": base.t()[::2], "b": base[:, 3:9].t(), "c": base[1].expand(6, 12)[:, :4]}
    plain = {name: one.clone() for name, one in whole.items()}
    into = {
        "a": blank(whole["a"].contiguous(), mesh, [Shard(0)]),
        "b": torch.zeros(4, 12)[:, ::2].t(),
        "c": dtensor(torch.zeros(4, 3).t(), mesh, [Shard(0)], (6, 4)),
    }
    broadcast(whole if distributed.get_rank() == 0 else None, into, bucket_nbytes=20)
    assert local_bits(into["a"]) == local_bits(cut(plain["a"].contiguous(), mesh, [Shard(0)]))
    assert_same_tensor(into["b"], plain["b"])
    assert local_bits(into["c"]) == local_bits(cut(plain["c"].contiguous(), mesh, [Shard(0)]))


@pytest.mark.ranks(2)
def test_parameters_that_need_gradients_are_filled_and_keep_none():
    parameter = nn.Parameter(torch.zeros(3))
    mesh = mesh_of((2,))
    sharded = nn.Parameter(blank(torch.zeros(3, 2), mesh, [Shard(0)]))
    whole = {"one": nn.Parameter(torch.ones(3)), "other": torch.full((3, 2), 2.0)}
    broadcast(whole if distributed.get_rank() == 0 else None, {"one": parameter, "other": sharded})
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert parameter.tolist() == [1.0] * 3
    assert sharded.to_local().unique().tolist() == [2.0]


@pytest.mark.ranks(2)
def test_conjugated_and_negated_views_are_resolved():
    mesh = mesh_of((2,))
    base = torch.tensor([1 + 2j, 3 - 4j, 5 + 6j])
    lazy = {"conj": base.conj(), "neg": base.conj().imag}
    assert lazy["conj"].is_conj()
    assert lazy["neg"].is_neg()
    into = {
        "conj": blank(base, mesh, [Shard(0)]),
        "neg": blank(base.real.contiguous(), mesh, [Shard(0)]),
    }
    broadcast(lazy if distributed.get_rank() == 0 else None, into)
    found = gather(into)
    assert found["conj"].tolist() == [1 - 2j, 3 + 4j, 5 - 6j]
    assert found["neg"].tolist() == [-2.0, 4.0, -6.0]


# What comes back


@pytest.mark.ranks(2)
@pytest.mark.parametrize("to", [None, 0, 1])
def test_order_is_kept_and_plain_tensors_come_back_as_they_are(to):
    mesh = mesh_of((2,))
    plain = nn.Parameter(torch.ones(2))
    whole = noise((5,), torch.float32)
    tensors = {
        "z": spread(whole, mesh, [Shard(0)]),
        "a": plain,
        "m": spread(whole, mesh, [Shard(0)]),
    }
    found = gather(tensors, to=to)
    mine = to in (None, distributed.get_rank())
    assert list(found) == (["z", "a", "m"] if mine else ["a"])
    assert found["a"].data_ptr() == plain.data_ptr()
    assert not found["a"].requires_grad


@pytest.mark.ranks(2)
@pytest.mark.parametrize("what", ["gather", "broadcast", "distribute"])
def test_nothing_is_nothing(what):
    if what == "gather":
        assert gather({}) == {}
    elif what == "broadcast":
        broadcast({}, {})
    else:
        distribute({}, {})


@pytest.mark.ranks(2)
def test_gathered_tensors_share_memory_if_they_are_one_tensor():
    mesh = mesh_of((2,))
    tensor, other = (spread(noise((4,), torch.float32), mesh, [Replicate()]) for _ in range(2))
    found = gather({"one": tensor, "tied": tensor, "other": other})
    assert found["tied"] is found["one"]
    found["one"].zero_()
    assert found["other"].any()
    assert tensor.to_local().any()


@pytest.mark.ranks(2)
def test_each_message_holds_many_tensors():
    mesh = mesh_of((2,))
    tensors = {f"t{i}": spread(torch.full((3,), float(i)), mesh, [Shard(0)]) for i in range(2000)}
    with counted() as calls:
        found = gather(tensors)
    assert [int(one[2]) for one in found.values()] == list(range(2000))
    assert len(calls) <= 16
    into = {name: blank(one, mesh, [Shard(0)]) for name, one in found.items()}
    with counted() as calls:
        broadcast(found if distributed.get_rank() == 0 else None, into)
    assert len(calls) <= 16


BUCKET = pytest.mark.parametrize("bucket", [128, 1 << 20], ids=["many-buckets", "one-bucket"])


@pytest.mark.ranks(4)
@BUCKET
@pytest.mark.parametrize("to", [None, 0], ids=["to-all", "to-0"])
def test_a_rank_sends_no_more_than_it_holds(bucket, to):
    whole = noise((64, 4), torch.float32)
    tensor = spread(whole, mesh_of((4,)), [Shard(0)])
    with moved_nbytes("pack") as moved:
        gather({"one": tensor}, to=to, bucket_nbytes=bucket)
    keeps = distributed.get_rank() == to  # what it has, which it copies
    assert sum(moved) == (0 if keeps else tensor.to_local().nbytes)


@pytest.mark.ranks(4)
@BUCKET
def test_a_rank_receives_no_more_than_it_holds(bucket):
    whole = noise((64, 4), torch.float32)
    into = blank(whole, mesh_of((4,)), [Shard(0)])
    with moved_nbytes("unpack") as moved:
        given = {"one": whole} if distributed.get_rank() == 0 else None
        broadcast(given, {"one": into}, bucket_nbytes=bucket)
    assert sum(moved) == (into.to_local().nbytes if distributed.get_rank() else 0)


@contextmanager
def moved_nbytes(verb: str) -> Iterator[list[int]]:
    """Note the lengths of the buffers that this rank packs to be sent, or unpacks."""
    moved: list[int] = []
    kept = getattr(Routes, verb)

    def noting(self: Routes, pieces: Any, target: Any, *args: Any) -> Any:
        moved.append(self.nbytes(pieces, target))
        return kept(self, pieces, target, *args)

    setattr(Routes, verb, noting)
    try:
        yield moved
    finally:
        setattr(Routes, verb, kept)


# Groups


@pytest.mark.ranks(4)
def test_two_meshes_of_two_ranks_are_gathered_apart():
    mesh = mesh_of((2, 2), ("a", "b"))["b"]
    pair = distributed.get_rank() // 2
    whole = noise((5, 3), torch.float32, pair)
    tensor = spread(whole, mesh, [Shard(0)])
    assert_same_tensor(gather({f"own{pair}": tensor})[f"own{pair}"], whole)
    mine = gather({"one": tensor}, to=1)
    assert list(mine) == (["one"] if distributed.get_rank() % 2 else [])


@pytest.mark.ranks(4)
def test_tensors_of_several_meshes_are_gathered_in_one_call():
    both = mesh_of((2, 2), ("a", "b"))
    whole = noise((5, 3), torch.float32)
    tensors = {
        "all": spread(whole, both, [Shard(0), Shard(1)]),
        "rows": spread(whole, both["a"], [Shard(0)]),
        "columns": spread(whole, both["b"], [Shard(1)]),
        "plain": whole,
    }
    assert_same(gather(tensors, bucket_nbytes=8), dict.fromkeys(tensors, whole))
    into = {
        "all": blank(whole, both, [Shard(0), Shard(1)]),
        "rows": blank(whole, both["a"], [Shard(0)]),
        "columns": blank(whole, both["b"], [Shard(1)]),
        "plain": torch.zeros(5, 3),
    }
    broadcast(dict.fromkeys(into, whole) if distributed.get_rank() == 0 else None, into)
    assert {n: local_bits(t) for n, t in into.items()} == {
        n: local_bits(t) for n, t in tensors.items()
    }


@pytest.mark.ranks(4)
def test_a_group_of_some_ranks_gets_what_its_first_rank_has():
    rank = distributed.get_rank()
    ranks = [1, 3] if rank % 2 else [0, 2]
    groups = [distributed.new_group([0, 2]), distributed.new_group([1, 3])]
    mesh = DeviceMesh.from_group(groups[rank % 2], "cpu")
    whole = {
        "plain": noise((3,), torch.float32, rank % 2),
        "cut": noise((5,), torch.int64, rank % 2),
    }
    into = {"plain": torch.zeros(3), "cut": blank(whole["cut"], mesh, [Shard(0)])}
    given = whole if rank == ranks[0] else None
    broadcast(given, into, group=groups[rank % 2])
    assert_same(gather(into), whole)


@pytest.mark.ranks(4)
def test_a_mesh_of_ranks_in_another_order_is_gathered_and_filled():
    mesh = DeviceMesh("cpu", [3, 1, 0, 2])
    whole = noise((7, 2), torch.float32)
    tensor = spread(whole, mesh, [Shard(0)])
    assert_same(gather({"one": tensor}), {"one": whole})
    into = blank(whole, mesh, [Shard(0)])
    broadcast({"one": whole} if distributed.get_rank() == 0 else None, {"one": into})
    assert local_bits(into) == local_bits(tensor)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("ranks", [[3, 1, 0, 2], [2, 1]], ids=str)
def test_the_rank_that_gets_is_told_by_its_position_in_the_mesh(ranks):
    mesh = DeviceMesh("cpu", ranks)
    if distributed.get_rank() in ranks:
        whole = noise((7, 2), torch.float32)
        found = gather({"one": spread(whole, mesh, [Shard(0)])}, to=0)
        assert list(found) == (["one"] if distributed.get_rank() == ranks[0] else [])


@pytest.mark.ranks(4)
def test_ranks_outside_of_a_mesh_take_no_part():
    mesh = DeviceMesh("cpu", [1, 2])
    if distributed.get_rank() in (1, 2):
        whole = noise((5,), torch.float32)
        found = gather({"one": spread(whole, mesh, [Shard(0)])})
        assert_same(found, {"one": whole})


def reinitialized(folder: str) -> list[int]:
    """Gather over a part of the ranks, in three process groups one after another."""
    rank, lengths = distributed.get_rank(), []
    for turn in range(3):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))["b"]
        whole = noise((5 + turn,), torch.float32)
        found = gather({"one": spread(whole, mesh, [Shard(0)])})
        lengths.append(len(found["one"]))
        distributed.barrier()
        distributed.destroy_process_group()
        store = distributed.FileStore(f"{folder}/again{turn}", 4)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=4)
    return lengths


def test_a_new_process_group_gets_groups_of_its_own(ranks, tmp_path):
    assert ranks(4)(reinitialized, str(tmp_path)) == [[5, 6, 7]] * 4


# What is refused, on all ranks alike


@pytest.mark.ranks(2)
@pytest.mark.parametrize("verb", ["gather", "broadcast", "distribute"])
def test_sums_that_are_not_added_up_are_refused(verb):
    tensor = DTensor.from_local(torch.ones(2), mesh_of((2,)), [Partial()], run_check=False)
    call = {
        "gather": lambda: gather({"one": tensor}),
        "broadcast": lambda: broadcast({"one": torch.ones(2)}, {"one": tensor}),
        "distribute": lambda: distribute({"one": torch.ones(2)}, {"one": tensor}),
    }[verb]
    with pytest.raises(UnsupportedValueError, match=r"sums|redistribute"):
        call()


def refused(call: Any, kind: type[Exception] = DsdError) -> str:
    """The message of an error, which comes in time and is the same on all ranks."""
    started = time.monotonic()
    with pytest.raises(kind) as caught:
        call()
    assert time.monotonic() - started < 15
    messages = everywhere(str(caught.value))
    assert len(set(messages)) == 1
    distributed.barrier()
    return messages[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("verb", ["gather", "broadcast"])
@pytest.mark.parametrize("what", ["name", "shape", "dtype", "placement", "count", "order"])
def test_ranks_that_pass_different_tensors_are_told(verb, what):
    mesh, rank = mesh_of((2,)), distributed.get_rank()
    shape = (6 + 2 * rank, 2) if what == "shape" else (6, 2)
    dtype = torch.float64 if what == "dtype" and rank else torch.float32
    placement = Replicate() if what == "placement" and rank else Shard(0)
    tensors = {
        f"name{rank if what == 'name' else 0}": spread(noise(shape, dtype), mesh, [placement]),
        "other": spread(noise((2,), dtype), mesh, [Shard(0)]),
    }
    if what == "count" and rank:
        tensors["more"] = tensors["other"]
    if what == "order" and rank:
        tensors = dict(reversed(tensors.items()))
    if verb == "gather":
        refused(lambda: gather(tensors), RankDisagreementError)
    else:
        given = {name: gather_alone(one) for name, one in tensors.items()} if rank == 0 else None
        refused(lambda: broadcast(given, tensors), RankDisagreementError)


def gather_alone(tensor: Any) -> torch.Tensor:
    return torch.zeros(tensor.shape, dtype=tensor.dtype)


@pytest.mark.ranks(4)
def test_pieces_that_claim_different_whole_shapes_are_refused():
    rows = [3, 3, 3, 1][distributed.get_rank()]
    local = torch.ones(rows, 2)
    tensor = DTensor.from_local(local, mesh_of((4,)), [Shard(0)], run_check=False)
    message = refused(lambda: gather({"one": tensor}), RankDisagreementError)
    assert "one" in message
    assert "12, 2" in message
    assert "4, 2" in message


@pytest.mark.ranks(4)
def test_pieces_that_are_not_cut_as_they_claim_are_refused():
    # The true shape, but rows that are spread in a way of the user's own.
    rows = [2, 3, 3, 2][distributed.get_rank()]
    tensor = dtensor(torch.ones(rows, 2), mesh_of((4,)), [Shard(0)], (10, 2))
    refused(lambda: gather({"one": tensor}))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", ["plain", "sharded"])
@pytest.mark.parametrize("what", ["shape", "dims", "dtype", "width", "missing"])
def test_what_rank_0_has_wrongly_is_an_error_everywhere(kind, what):
    mesh = mesh_of((2,))
    given = {
        "shape": torch.ones(4, 3),
        "dims": torch.ones(6),
        "dtype": torch.ones(3, 2, dtype=torch.int32),
        "width": torch.ones(3, 2, dtype=torch.float64),
        "missing": None,
    }[what]
    zeros = torch.zeros(3, 2)
    into = {"one": blank(zeros, mesh, [Shard(0)]) if kind == "sharded" else zeros}
    whole = {} if given is None else {"one": given}
    refused(lambda: broadcast(whole if distributed.get_rank() == 0 else None, into))
    assert not any(local_bits(into["one"]))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("given", [(5, 2), (6,), (6, 1)], ids=str)
def test_shapes_are_compared_before_anything_is_distributed(given):
    mesh = mesh_of((2,))
    into = {
        "first": blank(torch.ones(4), mesh, [Shard(0)]),
        "second": blank(torch.ones(6, 2), mesh, [Shard(0)]),
    }
    with pytest.raises(MismatchError, match="second"):
        distribute({"first": torch.ones(4), "second": torch.ones(given)}, into)
    assert not any(local_bits(into["first"]))


@pytest.mark.ranks(2)
def test_distribute_converts_dtypes_as_copying_does():
    mesh = mesh_of((2,))
    whole = torch.arange(7, dtype=torch.float64) / 3
    into = {"one": blank(whole.to(torch.bfloat16), mesh, [Shard(0)])}
    distribute({"one": whole}, into)
    assert_same_tensor(gather(into)["one"], whole.to(torch.bfloat16))


# Steps that are taken together


@pytest.mark.ranks(3)
@pytest.mark.parametrize("failing", [[0], [2], [0, 1], [0, 1, 2]], ids=str)
def test_a_failure_of_some_ranks_is_raised_by_all(failing):
    rank = distributed.get_rank()

    def step() -> None:
        if rank in failing:
            raise MismatchError(f"of rank {rank}", code="state_mismatch")

    with pytest.raises(DistributedError) as caught, Comm().together("the step"):
        step()
    assert sorted(caught.value.failures) == failing
    assert {str(error) for error in caught.value.failures.values()} == {
        f"of rank {one}" for one in failing
    }
    assert all(isinstance(error, MismatchError) for error in caught.value.failures.values())
    assert len(set(everywhere(str(caught.value)))) == 1


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "value",
    [None, 0, 3.5, "text", b"\0\1", [1, [2, None]], {"a": {"b": (1, 2)}}, "x" * 100_000],
    ids=["none", "int", "float", "text", "bytes", "lists", "dicts", "long"],
)
def test_values_of_all_ranks_come_to_all(value):
    rank = distributed.get_rank()
    found = Comm().gather_values([rank, value] if rank != 1 else None)
    assert_same(found, [[0, value], None, [2, value]])
    assert world() == 3
