"""What fairscale's FSDP has sharded is joined; and in place of its SSD offload, files are mapped.

Shards are built by hand here, as fairscale makes them, so that it need not be installed.
"""

from __future__ import annotations

import copy
import sys
import types
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch", reason="the runtime needs torch")

from torch import nn  # noqa: E402

import dsdformat.torch as dsd  # noqa: E402
from dsdformat import ArgumentError, EntryNotFoundError, MismatchError  # noqa: E402
from dsdformat.torch.flatten import FlattenParams, consolidate  # noqa: E402
from dsdformat.torch.fqn import canonical_name  # noqa: E402
from dsdformat.torch.mapped import map_parameters  # noqa: E402
from tests.torch_runtime.exact import assert_same, assert_same_tensor  # noqa: E402

# Shards, as fairscale makes them


class Instance:
    """One FSDP wrapper: what it holds, how it is sharded, what its metadata say."""

    def __init__(
        self,
        path: str,
        tensors: dict[str, Any],
        *,
        flat: list[list[str]] | bool = True,
        shared: tuple[tuple[str, str], ...] = (),
        alone: bool = False,
    ) -> None:
        self.path = path
        self.tensors = tensors
        self.shared = shared
        self.alone = alone
        names = list(tensors)
        if flat is True:
            flat = [names] if names else []
        self.parts = (
            [(name, [name]) for name in names]
            if flat is False
            else [(f"flat_param_{number}", group) for number, group in enumerate(flat)]
        )

    def shard(self, rank: int, world: int) -> tuple[dict[str, Any], dict[str, Any]]:
        weights, params = {}, {}
        for key, names in self.parts:
            tensors = [self.tensors[name] for name in names]
            whole = len(tensors) == 1 and names == [key] and world == 1
            full = torch.cat([one.reshape(-1) for one in tensors])
            chunks = list(full.chunk(world))
            chunks += [full[:0]] * (world - len(chunks))
            own, padding = chunks[rank], chunks[0].numel() - chunks[rank].numel()
            if self.alone:
                own, padding = full, 0
            # Fairscale pads with zeros; nobody may depend on that.
            padded = torch.cat([own, torch.full((padding,), 77).to(own.dtype)])
            weights[self.full(key)] = tensors[0] if whole else padded
            params[key] = {
                "names": names,
                "shapes": [one.shape for one in tensors],
                "numels": [one.numel() for one in tensors],
                "padding": padding,
            }
        return weights, {
            "fsdp_path": self.path,
            "params": params,
            "no_broadcast_optim_state": self.alone,
            "shared_param_info": list(self.shared),
        }

    def full(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def shards(
    instances: list[Instance], world: int, buffers: dict[str, Any] | None = None
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    weights, metadata = [], []
    for rank in range(world):
        both = [instance.shard(rank, world) for instance in instances]
        state = {key: value for one, _ in both for key, value in one.items()}
        state.update(buffers or {})
        weights.append(state)
        metadata.append(
            {"param_metadata": [one for _, one in both], "buffer_names": list(buffers or {})}
        )
    return weights, metadata


def rand(*shape: int, dtype: Any = torch.float32) -> Any:
    return torch.randn(shape).to(dtype)


def tower(dtype: Any = torch.float32, flat: list[list[str]] | bool = True) -> list[Instance]:
    a = Instance("a", {"weight": rand(4, 4, dtype=dtype), "bias": rand(4, dtype=dtype)}, flat=flat)
    b = Instance("b", {"0.weight": rand(3, 4, dtype=dtype), "2.scale": rand(dtype=dtype)})
    c = Instance(
        "c.deep",
        {"embed.weight": rand(7, 5, dtype=dtype), "mid.bias": rand(5, dtype=dtype)},
        shared=(("embed.weight", "out.weight"),),
    )
    return [Instance("", {}), a, b, c]


def truth(instances: list[Instance]) -> dict[str, Any]:
    found = {one.full(name): value for one in instances for name, value in one.tensors.items()}
    for one in instances:
        found.update({one.full(b): one.tensors[a] for a, b in one.shared})
    return found


WORLDS = pytest.mark.parametrize("world", [1, 2, 3, 4])


@WORLDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_shards_of_one_wrapper_are_joined(world, dtype):
    one = Instance("", {"0.weight": rand(8, 4, dtype=dtype), "0.bias": rand(8, dtype=dtype)})
    assert_same(consolidate(*shards([one], world)), truth([one]))


@WORLDS
@pytest.mark.parametrize("flat", [True, False], ids=["flat", "unflattened_child"])
def test_shards_of_wrappers_at_several_paths_are_joined_with_their_ties(world, flat):
    instances = tower(flat=flat)
    found = consolidate(*shards(instances, world))
    assert_same(found, truth(instances))
    assert found["c.deep.out.weight"] is found["c.deep.embed.weight"]


@WORLDS
def test_several_flat_parameters_of_one_wrapper_are_joined(world):
    tensors = {"a": rand(3), "b": rand(2, 2), "c": rand(5), "d": rand()}
    one = Instance("x", tensors, flat=[["a", "c"], ["b", "d"]])
    assert_same(consolidate(*shards([one], world)), truth([one]))


@WORLDS
def test_buffers_are_those_of_the_first_rank(world):
    one = Instance("", {"weight": rand(3, 3), "scale": rand()})
    buffers = {"mean": rand(6), "count": torch.tensor(5), "table": torch.arange(4)}
    weights, metadata = shards([one], world, buffers)
    for rank in range(1, world):
        weights[rank]["mean"] = rand(6)
    assert_same(consolidate(weights, metadata), {**truth([one]), **buffers})


@pytest.mark.parametrize("world", [3, 5, 8])
def test_more_ranks_than_elements_leave_whole_shards_of_padding(world):
    one = Instance("", {"a": rand(2), "b": rand(0, 4)}, flat=[["a", "b"]])
    assert_same(consolidate(*shards([one], world)), truth([one]))


def test_parameters_that_are_not_flat_have_their_shape_on_one_rank():
    one = Instance("a", {"weight": rand(3, 4), "scale": rand()}, flat=False)
    assert_same(consolidate(*shards([one], 1)), truth([one]))
    weights, _ = shards([one], 1)
    assert weights[0]["a.weight"].shape == (3, 4)


@WORLDS
def test_an_expert_that_each_rank_has_for_itself_is_that_of_rank_0(world):
    shared = Instance("", {"gate": rand(4, 4)})
    experts = [
        Instance("expert", {"w": rand(5, 4), "b": rand(3)}, alone=True) for _ in range(world)
    ]
    parts = [shards([shared, expert], world) for expert in experts]
    weights = [part[0][rank] for rank, part in enumerate(parts)]
    metadata = [part[1][rank] for rank, part in enumerate(parts)]
    assert_same(consolidate(weights, metadata), truth([shared, experts[0]]))


def test_an_expert_that_was_saved_apart_is_decoded_if_that_is_allowed():
    gone = Instance("", {"gone": rand(2, 2)})
    expert = Instance("stack.0.expert", {"w": rand(5, 4), "b": rand(3)}, alone=True)
    weights, metadata = shards([gone, expert], 1, {"gone.buffer": rand(2)})
    del weights[0]["flat_param_0"], weights[0]["gone.buffer"]
    assert_same(consolidate(weights, metadata, strict=False), truth([expert]))
    with pytest.raises(MismatchError, match="lack flat_param_0"):
        consolidate(weights, metadata)


def test_ties_are_kept_out_if_what_they_mean_is_missing():
    one = Instance("x", {"a": rand(2)}, shared=(("a", "b"),))
    weights, metadata = shards([one, Instance("", {"c": rand(1)})], 2)
    for rank in range(2):
        del weights[rank]["x.flat_param_0"]
    assert list(consolidate(weights, metadata, strict=False)) == ["c"]


def test_ties_of_parameters_with_different_names_are_read_as_they_are_meant():
    # The path of each with the name of the other: so fairscale writes it.
    one = Instance("x", {"a.weight": rand(7, 5), "a.bias": rand(7)})
    weights, metadata = shards([one], 2)
    for rank in range(2):
        metadata[rank]["param_metadata"][0]["shared_param_info"] = [("a.kernel", "b.weight")]
    found = consolidate(weights, metadata)
    assert found["x.b.kernel"] is found["x.a.weight"]
    assert "x.b.weight" not in found


def test_ties_of_parameters_that_are_not_flat_are_found_by_their_memory():
    one = Instance("", {"embed.weight": rand(7, 5), "bias": rand(3)}, flat=False)
    for world in (1, 2):
        weights, metadata = shards([one], world)
        for rank in range(world):
            weights[rank]["out.weight"] = weights[rank]["embed.weight"].detach()
        found = consolidate(weights, metadata)
        assert found["out.weight"] is found["embed.weight"]
        assert_same(found, {**one.tensors, "out.weight": one.tensors["embed.weight"]})


def test_names_of_wrappers_are_dropped():
    one = Instance("_fsdp_wrapped_module.a._fpw_module", {"_fpw_module.0.weight": rand(3, 3)})
    weights, metadata = shards([one], 2, {"_fsdp_wrapped_module.a.mean": rand(2)})
    found = consolidate(weights, metadata)
    assert sorted(found) == ["a.0.weight", "a.mean"]
    assert_same_tensor(found["a.0.weight"], one.tensors["_fpw_module.0.weight"])


@WORLDS
@pytest.mark.parametrize("name", ["flat_param", "flat_param_0"])
def test_metadata_of_older_versions_are_read(world, name):
    flat = Instance("a", {"w": rand(3, 4), "b": rand(2)})
    plain = Instance("b", {"w": rand(3, 3), "b": rand(5)}, flat=False)
    weights, metadata = shards([Instance("", {}), flat, plain], world)
    for rank in range(world):
        weights[rank][f"a.{name}"] = weights[rank].pop("a.flat_param_0")
        old = []
        for one in metadata[rank]["param_metadata"]:
            parts = list(one["params"].values())
            old.append(
                {
                    "fsdp_path": one["fsdp_path"],
                    "is_flat": one["fsdp_path"] != "b",
                    "num_padded": [part["padding"] for part in parts],
                    "param_names": [name for part in parts for name in part["names"]],
                    "param_shapes": [shape for part in parts for shape in part["shapes"]],
                    "param_numels": [numel for part in parts for numel in part["numels"]],
                    "no_broadcast_optim_state": False,
                }
            )
        metadata[rank]["param_metadata"] = old
    assert_same(consolidate(weights, metadata), truth([flat, plain]))


def test_buffers_that_no_rank_has_were_not_persistent_and_are_left_out():
    one = Instance("", {"w": rand(3)})
    weights, metadata = shards([one], 2, {"cache": rand(2)})
    for rank in range(2):
        del weights[rank]["cache"]
    assert_same(consolidate(weights, metadata), truth([one]))
    weights[1]["cache"] = rand(2)
    with pytest.raises(MismatchError, match="'cache' is not in the weights of rank 0"):
        consolidate(weights, metadata)


def test_the_result_can_be_saved_and_loaded_into_a_flat_and_a_plain_model(tmp_path):
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8))
    one = Instance("", {name: value.detach() for name, value in model.named_parameters()})
    weights, metadata = shards([one], 3, dict(model.named_buffers()))
    dsd.save(tmp_path / "c", {"model": consolidate(weights, metadata)})
    for wrap in (FlattenParams, nn.Sequential):
        torch.manual_seed(1)
        other = wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)))
        inner = other if wrap is FlattenParams else other[0]
        dsd.load(tmp_path / "c", {"model": inner})
        assert_same(dict(inner.state_dict()), dict(model.state_dict()))


# Shards that are wrong


def weights_case(change: Any) -> Any:
    return lambda weights, metadata: change(weights)


def field(path: str, value: Any) -> Any:
    """Set one field of the metadata of rank 1, or remove it if the value is `...`."""

    def change(weights: Any, metadata: Any) -> None:
        node: Any = metadata[1]
        steps = [int(step) if step.isdigit() else step for step in path.split("/")]
        for step in steps[:-1]:
            node = node[step]
        if value is ...:
            del node[steps[-1]]
        else:
            node[steps[-1]] = value

    return change


PART = "param_metadata/0/params/flat_param_0"
MISMATCHES = {
    "lacking_rank": (weights_case(lambda w: w[1].pop("x.flat_param_0")), "rank 1, but of others"),
    "lacking_all": (
        weights_case(lambda w: [one.pop("x.flat_param_0") for one in w]),
        "lack x.flat_param_0",
    ),
    "too_short": (
        weights_case(lambda w: w[1].update({"x.flat_param_0": torch.ones(3)})),
        "10 elements on 2 ranks.*x.a, x.b.*have 14",
    ),
    "dtype": (
        weights_case(lambda w: w[1].update({"x.flat_param_0": torch.ones(7).double()})),
        "float64",
    ),
    "no_tensor": (weights_case(lambda w: w[1].update({"x.flat_param_0": [1]})), "no plain tensor"),
    "sparse": (
        weights_case(lambda w: w[0].update({"x.flat_param_0": torch.ones(7).to_sparse()})),
        "no plain tensor",
    ),
    "unknown": (weights_case(lambda w: w[0].update(extra=torch.ones(3))), "says nothing of extra"),
    "unknown_object": (weights_case(lambda w: w[0].update(extra=3)), "says nothing of extra"),
    "twice": (
        weights_case(lambda w: w[0].update({"_fpw_module.x.flat_param_0": torch.ones(7)})),
        "twice",
    ),
    "padding": (field(f"{PART}/padding", 8), "8 of 7 are padding"),
    "padding_by_one": (field(f"{PART}/padding", 1), "13 elements"),
    "other_path": (field("param_metadata/0/fsdp_path", "y"), "'y' where rank 0 has 'x'"),
    "other_names": (field(f"{PART}/names", ["b", "a"]), "rank 1 has"),
    "other_tie": (field("param_metadata/0/shared_param_info", []), "rank 1 has"),
    "fewer": (field("param_metadata/0/params", {}), "rank 1"),
    "fewer_instances": (field("param_metadata", []), "rank 1 has 0 FSDP instances"),
    "alone_on_one": (field("param_metadata/0/no_broadcast_optim_state", True), "rank 1"),
}


def small() -> Any:
    one = Instance("x", {"a": rand(3, 4), "b": rand(2)}, shared=(("a", "c"),))
    return shards([one], 2)


@pytest.mark.parametrize(("change", "what"), MISMATCHES.values(), ids=MISMATCHES)
def test_shards_that_do_not_fit_their_metadata_are_refused(change, what):
    weights, metadata = small()
    change(weights, metadata)
    with pytest.raises(MismatchError, match=what) as caught:
        consolidate(weights, metadata)
    assert caught.value.code == "state_mismatch"


FIRST = {
    "duplicate": (f"{PART}/names", ["a", "a"], ArgumentError),
    "tie_to_nothing": ("param_metadata/0/shared_param_info", [("z", "y")], MismatchError),
    "tie_over_another": ("param_metadata/0/shared_param_info", [("a", "b")], MismatchError),
    "tie_to_itself": ("param_metadata/0/shared_param_info", [("a", "a")], MismatchError),
    "buffer_over_parameter": ("buffer_names", ["x.a"], MismatchError),
    "buffer_over_tie": ("buffer_names", ["x.c"], MismatchError),
}


@pytest.mark.parametrize(("path", "value", "error"), FIRST.values(), ids=FIRST)
def test_metadata_that_contradict_themselves_are_refused(path, value, error):
    weights, metadata = small()
    field(path, value)(weights, [None, metadata[0]])
    field(path, value)(weights, metadata)
    with pytest.raises(error):
        consolidate(weights, metadata)


MALFORMED = {
    "no_list": ("param_metadata", 3),
    "no_buffers": ("buffer_names", ...),
    "buffer_number": ("buffer_names", [3]),
    "instance": ("param_metadata/0", "x"),
    "path": ("param_metadata/0/fsdp_path", None),
    "no_path": ("param_metadata/0/fsdp_path", ...),
    "no_params": ("param_metadata/0/params", ...),
    "params_list": ("param_metadata/0/params", [1]),
    "params_key": ("param_metadata/0/params", {3: {}}),
    "part": (PART, None),
    "no_names": (f"{PART}/names", ...),
    "name_number": (f"{PART}/names", ["a", 3]),
    "names_empty": (f"{PART}/names", []),
    "shapes_numbers": (f"{PART}/shapes", [3, 4]),
    "shape_negative": (f"{PART}/shapes", [(-3, -4), (2,)]),
    "shape_float": (f"{PART}/shapes", [(3.0, 4), (2,)]),
    "shape_huge": (f"{PART}/shapes", [(0, 2**62, 2**62), (2,)]),
    "shapes_fewer": (f"{PART}/shapes", [(3, 4)]),
    "numels": (f"{PART}/numels", [12, 3]),
    "numels_negative": (f"{PART}/numels", [-12, 2]),
    "numels_tensor": (f"{PART}/numels", [torch.ones(12), 2]),
    "padding_negative": (f"{PART}/padding", -1),
    "padding_bool": (f"{PART}/padding", False),
    "padding_none": (f"{PART}/padding", None),
    "no_padding": (f"{PART}/padding", ...),
    "alone": ("param_metadata/0/no_broadcast_optim_state", 1),
    "tie_alone": ("param_metadata/0/shared_param_info", [("a",)]),
    "tie_number": ("param_metadata/0/shared_param_info", [("a", 3)]),
    "tie_text": ("param_metadata/0/shared_param_info", ["ac"]),
}


@pytest.mark.parametrize(("path", "value"), MALFORMED.values(), ids=MALFORMED)
def test_metadata_of_another_form_are_refused_with_the_place(path, value):
    weights, metadata = small()
    field(path, value)(weights, metadata)
    with pytest.raises(ArgumentError, match=r"^rank 1") as caught:
        consolidate(weights, metadata)
    assert caught.value.code == "bad_argument"


@pytest.mark.parametrize(
    ("weights", "metadata"),
    [
        pytest.param([], [], id="no_ranks"),
        pytest.param([{}], [], id="no_metadata"),
        pytest.param([{}, {}], [{"param_metadata": [], "buffer_names": []}], id="fewer"),
        pytest.param({}, {}, id="dicts"),
        pytest.param([3], [{"param_metadata": [], "buffer_names": []}], id="number"),
        pytest.param([{3: 3}], [{"param_metadata": [], "buffer_names": []}], id="key"),
        pytest.param([{}], [None], id="none"),
    ],
)
def test_arguments_of_another_form_are_refused(weights, metadata):
    with pytest.raises(ArgumentError) as caught:
        consolidate(weights, metadata)
    assert caught.value.code == "bad_argument"


OTHER = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 40),
    st.floats(),
    st.sampled_from(["", "a", "b", "x", "flat_param_0", "x.a", "_fpw_module"]),
    st.lists(st.integers(-2, 5), max_size=3),
    st.lists(st.sampled_from(["a", "b"]), max_size=3),
    st.dictionaries(st.sampled_from(["names", "a"]), st.integers(), max_size=2),
    st.builds(lambda: torch.ones(3)),
)


@st.composite
def damaged(draw: Any) -> Any:
    weights, metadata = copy.deepcopy(small())
    for _ in range(draw(st.integers(1, 3))):
        node: Any = [weights, metadata]
        while True:
            keys = list(node) if isinstance(node, dict) else list(range(len(node)))
            if not keys:
                break
            key = draw(st.sampled_from(keys))
            deeper = isinstance(node[key], (dict, list)) and draw(st.integers(0, 4)) > 0
            if not deeper:
                if isinstance(node, dict) and draw(st.booleans()):
                    del node[key]
                else:
                    node[key] = draw(OTHER)
                break
            node = node[key]
    return weights, metadata


@settings(max_examples=400, deadline=None)
@given(damaged(), st.booleans())
def test_damaged_shards_give_an_error_of_ours_or_tensors(pair, strict):
    try:
        found = consolidate(*pair, strict=strict)
    except (ArgumentError, MismatchError):
        return
    assert all(type(name) is str for name in found)
    assert all(isinstance(value, torch.Tensor) for value in found.values())


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_layout_over_any_number_of_ranks_is_joined_bit_for_bit(data):
    dtypes = [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.float8_e5m2]
    instances = []
    for number in range(data.draw(st.integers(1, 3))):
        dtype = data.draw(st.sampled_from(dtypes))
        shapes = data.draw(st.lists(st.lists(st.integers(0, 4), max_size=3), max_size=4))
        tensors = {f"m.p{index}": rand(*shape, dtype=dtype) for index, shape in enumerate(shapes)}
        names = list(tensors)
        middle = data.draw(st.integers(0, len(names)))
        groups = [group for group in (names[:middle], names[middle:]) if group]
        flat = data.draw(st.sampled_from([groups, groups, False]))
        path = data.draw(st.sampled_from(["", "deep.er."])) + f"i{number}"
        shared = (("m.p0", "n.p0"),) if names and flat else ()
        instances.append(Instance(path, tensors, flat=flat, shared=shared))
    world = data.draw(st.integers(1, 5))
    assert_same(consolidate(*shards(instances, world)), truth(instances))


def test_names_below_the_wrapper_of_fairscale_are_canonical(monkeypatch):
    place = "fairscale.nn.misc.flatten_params_wrapper"

    class FlattenParamsWrapper(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self._fpw_module = module

    module = types.ModuleType(place)
    module.FlattenParamsWrapper = FlattenParamsWrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, place, module)
    model = nn.Sequential(FlattenParamsWrapper(nn.Sequential(nn.Linear(2, 2))))
    assert canonical_name(model, "0._fpw_module.0.weight") == "0.0.weight"
    assert canonical_name(model, "0.0.weight") == "0.0.weight"


# Parameters that are maps of a checkpoint


def model_of(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Linear(8, 8))
    model[3].weight = model[2].weight
    return model


def file_bytes(path: Path) -> dict[str, bytes]:
    return {one.name: one.read_bytes() for one in path.iterdir()}


@pytest.mark.parametrize("meta", [False, True])
def test_mapped_parameters_are_the_stored_ones_and_frozen(tmp_path, meta):
    wanted = model_of()
    optimizer = torch.optim.SGD(wanted.parameters(), momentum=0.9)
    wanted(torch.ones(5, 4)).sum().backward()
    optimizer.step()
    dsd.save(tmp_path / "c", {"model": wanted, "optimizer": optimizer, "step": 3})
    with torch.device("meta" if meta else "cpu"):
        model = model_of(seed=1)
    before = dict(model.named_parameters())
    assert not map_parameters(tmp_path / "c", model)
    assert_same(dict(model.state_dict()), dict(wanted.state_dict()))
    assert all(dict(model.named_parameters())[name] is one for name, one in before.items())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert model[3].weight is model[2].weight
    x = torch.rand(5, 4)
    assert_same_tensor(model(x).detach(), wanted(x).detach())


def test_mapped_parameters_can_be_trained_and_the_file_never_changes(tmp_path):
    wanted = model_of()
    dsd.save(tmp_path / "c", {"model": wanted})
    before = file_bytes(tmp_path / "c")
    model = model_of(seed=1)
    map_parameters(tmp_path / "c", model, trainable=True)
    for one in (wanted, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        for _ in range(2):
            optimizer.zero_grad()
            one(torch.ones(5, 4)).square().sum().backward()
            optimizer.step()
    assert_same(dict(model.state_dict()), dict(wanted.state_dict()))
    assert file_bytes(tmp_path / "c") == before


def test_a_checkpoint_can_be_replaced_while_it_is_mapped(tmp_path):
    dsd.save(tmp_path / "c", {"model": model_of()})
    model = model_of(seed=1)
    map_parameters(tmp_path / "c", model, trainable=True)
    with torch.no_grad():
        model[0].weight.zero_()
    dsd.save(tmp_path / "c", {"model": model}, overwrite=True)
    assert_same(dsd.load(tmp_path / "c")["model"], dict(model.state_dict()))


def test_tensors_that_are_tied_in_the_file_only_do_not_see_each_others_writes(tmp_path):
    shared = nn.Parameter(torch.ones(8))
    dsd.save(tmp_path / "c", {"model": nn.ParameterDict({"a": shared, "b": shared})})
    model = nn.ParameterDict({"a": torch.zeros(8), "b": torch.zeros(8)})
    map_parameters(tmp_path / "c", model, trainable=True)
    model["a"].data.fill_(5)
    assert model["b"].eq(1).all()


def test_what_was_frozen_stays_frozen_when_the_rest_is_trained(tmp_path):
    dsd.save(tmp_path / "c", {"model": model_of()})
    model = model_of(seed=1)
    model[0].requires_grad_(False)
    map_parameters(tmp_path / "c", model, trainable=True)
    assert not model[0].weight.requires_grad
    assert model[2].weight.requires_grad


def test_a_model_that_does_not_fit_is_told_and_not_changed(tmp_path):
    dsd.save(tmp_path / "c", {"model": model_of()})
    model = nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(8, 8).double())
    kept = copy.deepcopy(model.state_dict())
    with pytest.raises(MismatchError) as caught:
        map_parameters(tmp_path / "c", model)
    assert {one.what for one in caught.value.report.mismatched} == {"shape", "dtype"}
    assert_same(dict(model.state_dict()), dict(kept))
    report = map_parameters(tmp_path / "c", model, strict=False)
    assert "model/3.weight" in report.unexpected or "model/3.bias" in report.unexpected
    assert_same_tensor(model[0].weight.detach(), kept["0.weight"])
    with pytest.raises(EntryNotFoundError):
        map_parameters(tmp_path / "c", model, name="other")


def test_a_model_that_could_not_be_mapped_can_be_trained_on(tmp_path):
    dsd.save(tmp_path / "c", {"model": nn.Linear(4, 5)})
    wanted, model = model_of(), model_of()
    for one in (wanted, model):
        one(torch.ones(5, 4)).square().sum().backward()
    with pytest.raises(MismatchError):
        map_parameters(tmp_path / "c", model)
    for one in (wanted, model):
        one(torch.ones(5, 4)).square().sum().backward()
        torch.optim.SGD(one.parameters(), lr=0.1).step()
    assert_same(dict(model.state_dict()), dict(wanted.state_dict()))


def test_what_cannot_be_mapped_is_told(tmp_path):
    pytest.importorskip("zstandard")
    dsd.save(tmp_path / "c", {"model": nn.Linear(64, 64, bias=False)}, codec="zstd")
    model = nn.Linear(64, 64, bias=False)
    kept = model.weight.detach().clone()
    with pytest.raises(ArgumentError, match="model/weight cannot be mapped") as caught:
        map_parameters(tmp_path / "c", model)
    assert caught.value.code == "cannot_map"
    assert_same_tensor(model.weight.detach(), kept)


@pytest.mark.parametrize("meta", [False, True])
def test_a_flat_parameter_is_one_map_of_a_flat_checkpoint(tmp_path, meta):
    flat = FlattenParams(model_of())
    dsd.save(tmp_path / "flat", {"model": flat.flat_state_dict()})
    dsd.save(tmp_path / "plain", {"model": flat})
    with torch.device("meta" if meta else "cpu"):
        other = FlattenParams(model_of(seed=1))
    with pytest.raises(ArgumentError, match="flat_param_0 is flat"):
        map_parameters(tmp_path / "plain", other)
    map_parameters(tmp_path / "flat", other)
    assert_same(dict(other.state_dict()), dict(flat.state_dict()))
    assert not other.module[2].weight.requires_grad
    assert other.module[3].weight.data_ptr() == other.module[2].weight.data_ptr()
    x = torch.rand(5, 4)
    assert_same_tensor(other(x).detach(), flat(x).detach())


CHILD = """
import sys
import torch
from torch import nn
from dsdformat.torch.flatten import FlattenParams
from dsdformat.torch.mapped import map_parameters

def resident(kind):
    with open("/proc/self/status") as file:
        fields = dict(line.split(":", 1) for line in file)
    return int(fields[kind].split()[0]) * 1024

path, flat = sys.argv[1], sys.argv[2] == "flat"
torch.set_num_threads(1)
with torch.device("meta"):
    model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(32)])
model = FlattenParams(model) if flat else model
x = torch.ones(1, 1024)
nn.Linear(1024, 1024)(x)
start = resident("VmRSS")
map_parameters(path, model, trainable=True)
mapped = resident("VmRSS")
with torch.no_grad():
    model[0](x)
    one = resident("VmRSS")
    model(x)
    every, private = resident("VmRSS"), resident("RssAnon")
    model[0].weight.add_(1)
written = resident("RssAnon")
print(mapped - start, one - mapped, every - mapped, written - private)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("form", ["plain", "flat"])
def test_a_mapped_model_takes_memory_only_where_it_is_touched(tmp_path, form):
    import subprocess

    layer, count = 4 << 20, 32
    model: Any = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(count)])
    state = FlattenParams(model).flat_state_dict() if form == "flat" else model
    dsd.save(tmp_path / "c", {"model": state})
    found = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "c"), form],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    mapped, one, every, written = map(int, found.stdout.split())
    assert mapped < layer * count / 8, "mapping, and verifying, read nothing into memory to stay"
    assert one < layer * count / 4, "one layer needs its own pages, and what is read ahead"
    assert every > layer * count * 0.9, "all layers are there once they were used"
    assert layer / 2 < written < layer * 2, "one layer was written to, and one was copied"
