"""What several ranks save, load, gather and broadcast."""

from __future__ import annotations

import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard

from compare.case import (
    HERE,
    Scene,
    Subject,
    WrongError,
    expect,
    expect_equal,
    expect_refusal,
    refusal_of,
)
from compare.cases.optimizers import stepped, two_layers
from compare.libraries import COLLECTIVES, DCP, STATE_DICTS

__all__ = ["RANKS"]

RANKS = Subject("Several ranks")

CPU = torch.device("cpu")


def mesh_of(*shape: int) -> DeviceMesh:
    """Make a mesh of all ranks; its last axis shards."""
    names = ("stage", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def fsdp1(model: nn.Module) -> nn.Module:
    """Wrap a model in the older FSDP, with parameters that are still parameters."""
    return FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)


@RANKS.case(
    "tensors of one name that differ between ranks are kept apart, or refused by name",
    source="KempnerInstitute/KempnerForge#202",
    pair=DCP,
    ranks=2,
)
def experts_of_ranks(library: Any, scene: Scene) -> None:
    expert = nn.Linear(2, 2, bias=False)
    model = nn.ModuleDict({"experts": nn.ModuleList([expert])})
    with torch.no_grad():
        expert.weight.fill_(scene.rank)
    try:
        library.save(scene.folder, {"model": model})
    except Exception as error:
        if "experts.0.weight" in str(error):
            return
        raise
    library.load(scene.folder, {"model": model})
    expect_equal(expert.weight[0, 0].item(), float(scene.rank), "the weight")


@RANKS.case(
    "a rank that loads what it has saved opens no data files of other ranks",
    source="pytorch/pytorch#125740",
    pair=DCP,
    ranks=2,
)
def own_files_only(library: Any, scene: Scene) -> None:
    model = fully_shard(two_layers(), mesh=mesh_of(2))
    optimizer = stepped(model)
    opened: set[str] = set()

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(args[0], str | Path):
            opened.add(Path(args[0]).name)  # some are opened by their name in a folder

    sys.addaudithook(note)
    library.save_training(scene.folder, model, optimizer)
    own = {library.MANIFEST, *opened}
    opened.clear()
    library.load_training(scene.folder, model, optimizer)
    there = {path.name for path in (scene.folder / "checkpoint").iterdir()}
    expect(bool(opened & there), "no file is seen to be opened")
    others = sorted(there & opened - own)
    expect(not others, f"it opens {', '.join(others)}")


@RANKS.case(
    "all ranks are told when one of them fails, by an Exception that names the cause",
    source="pytorch/pytorch#122529",
    pair=DCP,
    ranks=2,
)
def failures_of_others(library: Any, scene: Scene) -> None:
    if scene.rank == 0:
        library.save_alone(scene.folder, {"there": torch.ones(2)})
    distributed.barrier()
    wanted = ["there", "elsewhere"][: scene.rank + 1]
    error = refusal_of(
        lambda: library.load(scene.folder, {name: torch.zeros(2) for name in wanted})
    )
    if error is None:
        raise WrongError("not told")
    if "elsewhere" not in str(error):
        raise error
    expect(isinstance(error, Exception), f"{type(error).__name__} is no Exception")


@RANKS.case(
    "a whole state that only rank 0 has, without being told to broadcast it, is an error",
    source="pytorch/pytorch#157781",
    pair=STATE_DICTS,
    ranks=2,
)
def state_on_rank_0_only(library: Any, scene: Scene) -> None:
    model = fsdp1(two_layers())
    state = two_layers().state_dict() if scene.rank == 0 else {}
    options = library.StateDictOptions(full_state_dict=True)
    expect_refusal(
        lambda: library.set_model_state_dict(model, state, options=options),
        "0.weight",
        otherwise="loaded in silence",
    )


@RANKS.case(
    "names that a model lacks are an error if `strict`, with `cpu_offload` or without; else none",
    source="pytorch/pytorch#149516",
    pair=STATE_DICTS,
    ranks=2,
)
def unexpected_names_with_offload(library: Any, scene: Scene) -> None:
    model = fully_shard(two_layers(), mesh=mesh_of(2))
    state = {**two_layers().state_dict(), "zzz.weight": torch.ones(2)} if scene.rank == 0 else {}
    said: dict[str, BaseException | None] = {}
    for offload, strict in product((False, True), repeat=2):
        options = library.StateDictOptions(
            full_state_dict=True, broadcast_from_rank0=True, cpu_offload=offload, strict=strict
        )
        load = partial(library.set_model_state_dict, model, dict(state), options=options)
        said[f"cpu_offload={offload}, strict={strict}"] = refusal_of(load)
    for how, error in said.items():
        text = "no error" if error is None else f"{type(error).__name__}: {error}"
        if how.endswith("False"):
            expect(error is None, f"{how}: {text}")
        else:
            expect(isinstance(error, RuntimeError) and "zzz.weight" in text, f"{how}: {text}")


@RANKS.case(
    "whole states that are offloaded go to the first rank of each pipeline stage",
    source="pytorch/pytorch#183037",
    pair=STATE_DICTS,
    ranks=4,
)
def whole_states_of_stages(library: Any, scene: Scene) -> None:
    mesh = mesh_of(2, 2)
    stage, place = divmod(scene.rank, 2)
    model = nn.Linear(4, 4, bias=False)
    nn.init.constant_(model.weight, stage)
    fully_shard(model, mesh=mesh["shard"])
    options = library.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = library.get_model_state_dict(model, options=options)
    expect_equal(list(state), [] if place else ["weight"], "the list of names")
    expect(place == 1 or bool((state["weight"] == stage).all()), "other values")


@RANKS.case(
    "a buffer that no state dict holds does not stay on meta unnoticed",
    source="hiyouga/LlamaFactory#10820",
    pair=STATE_DICTS,
    ranks=2,
)
def buffers_on_meta(library: Any, scene: Scene) -> None:
    def make() -> nn.Module:
        model = nn.Linear(4, 4, bias=False)
        model.register_buffer("frequencies", torch.ones(3), persistent=False)
        return model

    state = make().state_dict() if scene.rank == 0 else {}
    with torch.device("meta"):
        model = fully_shard(make(), mesh=mesh_of(2))
    options = library.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    try:
        library.set_model_state_dict(model, state, options=options)
    except Exception as error:
        if "frequencies" in str(error):
            return
        raise
    expect(not model.frequencies.is_meta, "loaded in silence, with the buffer on meta")
    expect(bool((model.frequencies == 1).all()), "the buffer is not initialized")


@RANKS.case(
    "the whole state of a model under FSDP1 on the CPU can be offloaded",
    source="pytorch/pytorch#188989",
    pair=STATE_DICTS,
    ranks=2,
)
def offloaded_model_of_fsdp1(library: Any, scene: Scene) -> None:
    torch.manual_seed(0)
    model = two_layers()
    wanted = {name: value.clone() for name, value in model.state_dict().items()}
    options = library.StateDictOptions(full_state_dict=True, cpu_offload=True)
    state = library.get_model_state_dict(fsdp1(model), options=options)
    expect_equal(list(state), [] if scene.rank else list(wanted), "the list of names")
    for name, value in state.items():
        expect(torch.equal(value, wanted[name]), f"other values in {name}")


@RANKS.case(
    "the whole state of an optimizer under FSDP1 on the CPU can be offloaded",
    source=HERE,
    pair=STATE_DICTS,
    ranks=2,
)
def offloaded_optimizer_of_fsdp1(library: Any, scene: Scene) -> None:
    model = fsdp1(two_layers())
    optimizer = stepped(model)
    options = library.StateDictOptions(full_state_dict=True)
    wanted = library.get_optimizer_state_dict(model, optimizer, options=options)["state"]
    wanted = {key: value.clone() for key, value in wanted["0.weight"].items()}
    options.cpu_offload = True
    state = library.get_optimizer_state_dict(model, optimizer, options=options)
    if scene.rank:
        return
    entry = state["state"]["0.weight"]
    expect(not torch.equal(entry["exp_avg"], entry["exp_avg_sq"]), "exp_avg equals exp_avg_sq")
    for key, value in wanted.items():
        expect(torch.equal(entry[key], value), f"other values in {key}")


DTYPES = ("float8_e4m3fn", "float8_e8m0fnu", "float4_e2m1fn_x2", "uint16", "bool", "complex64")


@RANKS.case(
    "8-bit and 4-bit floats and unsigned integers can be broadcast",
    source="vllm-project/compressed-tensors#603",
    pair=COLLECTIVES,
    ranks=2,
)
def dtypes_that_are_broadcast(library: Any, scene: Scene) -> None:
    refused = []
    for name in DTYPES:
        bits = torch.arange(16, dtype=torch.uint8) % (2 if name == "bool" else 16)
        tensor = (bits if scene.rank == 0 else torch.zeros_like(bits)).view(getattr(torch, name))
        if refusal_of(partial(library.broadcast, tensor)) is not None:
            refused.append(name)
        else:
            expect(torch.equal(tensor.view(torch.uint8), bits), f"other bits of {name}")
    expect(not refused, f"refuses {', '.join(refused)}")
