"""States of random number generators: what is taken goes on bit for bit, or nothing changes."""

from __future__ import annotations

import copy
import doctest
import random
import struct
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the runtime needs torch")
np = pytest.importorskip("numpy", reason="the runtime needs numpy")

from dsdformat.errors import CODES, ArgumentError, MismatchError  # noqa: E402
from dsdformat.torch import rng as rng_module  # noqa: E402
from dsdformat.torch import rng_checks  # noqa: E402
from dsdformat.torch.rng import rng_state, set_rng_state  # noqa: E402

BIT_GENERATORS = ["PCG64", "PCG64DXSM", "MT19937", "Philox", "SFC64"]
KINDS = ["torch", "python", *BIT_GENERATORS]


@pytest.fixture(autouse=True)
def _global_generators() -> Iterator[None]:
    """Leave the global generators as they were before."""
    before = torch.get_rng_state(), random.getstate(), np.random.get_bit_generator()
    legacy = np.random.get_state(legacy=False)
    yield
    torch.set_rng_state(before[0])
    random.setstate(before[1])
    np.random.set_bit_generator(before[2])
    np.random.set_state(legacy)


def make(kind: str, seed: int = 1) -> Any:
    if kind == "torch":
        return torch.Generator().manual_seed(seed)
    if kind == "python":
        return random.Random(seed)
    return np.random.Generator(getattr(np.random, kind)(seed))


def draw(generator: Any) -> list[Any]:
    """Numbers of several kinds: some keep half of a pair, or half a word, for the next call."""
    if isinstance(generator, torch.Generator):
        return [
            torch.rand(3, generator=generator).tolist(),
            torch.randn(1, generator=generator, dtype=torch.float64).tolist(),
            torch.randperm(10, generator=generator).tolist(),
        ]
    if isinstance(generator, random.Random):
        return [generator.random(), generator.gauss(0, 1), generator.sample(range(100), 5)]
    return [
        generator.random(),
        generator.standard_normal(),
        int(generator.integers(0, 2**32, dtype=np.uint32)),
        generator.permutation(10).tolist(),
        generator.bytes(5),
    ]


def seed_globally() -> None:
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)


def draw_globally() -> list[Any]:
    return [
        torch.rand(3).tolist(),
        torch.randn(1, dtype=torch.float64).tolist(),
        np.random.standard_normal(3).tolist(),
        int(np.random.randint(0, 2**32, dtype=np.uint32)),
        random.random(),
        random.gauss(0, 1),
    ]


def comparable(value: Any) -> Any:
    """A state as plain values, with types, dtypes and shapes."""
    if isinstance(value, dict):
        return {key: comparable(part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value), [comparable(part) for part in value]
    if isinstance(value, torch.Tensor):
        return str(value.dtype), str(value.device), value.tolist()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.tolist()
    return type(value), value


def replaced(state: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy of a state with another value at a path."""
    if not path:
        return value
    step, *rest = path
    part = replaced(state[step], tuple(rest), value)
    if isinstance(state, tuple):
        return (*state[:step], part, *state[step + 1 :])
    other = copy.copy(state)
    other[step] = part
    return other


# Taking


def test_taking_the_state_changes_no_generator():
    generators = {kind: make(kind) for kind in KINDS}
    twins = {kind: make(kind) for kind in KINDS}
    seed_globally()
    expected = draw_globally()
    seed_globally()
    rng_state(generators=generators)
    assert draw_globally() == expected
    for kind in KINDS:
        assert draw(generators[kind]) == draw(twins[kind])


def test_a_state_is_made_of_values_that_the_format_stores():
    generators = {"t": make("torch"), "n": make("PCG64"), "p": make("python")}
    state = rng_state(generators=generators)
    assert list(state) == ["torch", "numpy", "python", "generators"]
    assert state["torch"].dtype == torch.uint8
    assert torch.equal(state["torch"], torch.get_rng_state())
    assert state["numpy"]["bit_generator"] == "MT19937"
    assert type(state["numpy"]["state"]["key"]) is np.ndarray
    assert state["python"] == random.getstate()
    assert {name: list(record) for name, record in state["generators"].items()} == {
        "t": ["kind", "device", "state"],
        "n": ["kind", "state"],
        "p": ["kind", "state"],
    }
    assert state["generators"]["t"]["device"] == "cpu"
    assert state["generators"]["n"]["state"]["state"]["inc"] >= 2**64  # an int of 128 bits


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_shares_no_memory_with_its_generator(kind):
    generator = make(kind)
    state = rng_state(generators={"g": generator})
    before = comparable(state)
    draw_globally()
    for _ in range(400):
        draw(generator)
    assert comparable(state) == before


def test_without_generators_there_is_no_such_part():
    assert "generators" not in rng_state()
    assert rng_state(generators={})["generators"] == {}


def test_numpy_is_not_imported_to_take_a_state(monkeypatch):
    monkeypatch.delitem(sys.modules, "numpy")
    state = rng_state(generators={"p": make("python")})
    assert list(state) == ["torch", "python", "generators"]
    assert "numpy" not in sys.modules


def test_cuda_is_not_started_to_take_a_state(monkeypatch):
    def start() -> None:
        raise AssertionError("CUDA was started")

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", start)
    monkeypatch.setattr(torch.cuda, "_lazy_init", start)
    assert "cuda" not in rng_state()


@pytest.mark.parametrize(
    "generators",
    [
        pytest.param([random.Random(1)], id="a list"),
        pytest.param({1: random.Random(1)}, id="a name that is no str"),
        pytest.param({"g": np.random.RandomState(1)}, id="a RandomState"),
        pytest.param({"g": np.random.PCG64(1)}, id="a bit generator"),
        pytest.param({"g": random.SystemRandom()}, id="a SystemRandom"),
        pytest.param({"g": None}, id="None"),
    ],
)
def test_what_is_no_generator_with_a_state_is_refused(generators):
    with pytest.raises(ArgumentError, match="generator") as caught:
        rng_state(generators=generators)
    assert caught.value.code == "bad_argument"
    assert caught.value.hint


def test_a_random_class_with_a_state_of_its_own_is_refused_when_it_is_taken():
    class Mine(random.Random):
        def getstate(self) -> Any:
            return {"mine": 1}

    with pytest.raises(ArgumentError, match="no state to go on from"):
        rng_state(generators={"g": Mine(1)})


# Setting


@pytest.mark.parametrize("drawn", [0, 1, 3, 300])
def test_the_global_generators_go_on_bit_for_bit(drawn):
    for _ in range(drawn):
        draw_globally()
    state = rng_state()
    expected = [draw_globally() for _ in range(300)]
    set_rng_state(state)
    assert [draw_globally() for _ in range(300)] == expected


@pytest.mark.parametrize("drawn", [0, 1, 3, 300])
@pytest.mark.parametrize("kind", KINDS)
def test_a_generator_goes_on_bit_for_bit(kind, drawn):
    source = make(kind)
    for _ in range(drawn):
        draw(source)
    state = rng_state(generators={"g": source})
    other = make(kind, seed=2)
    draw(other)
    set_rng_state(state, generators={"g": other})
    assert [draw(other) for _ in range(300)] == [draw(source) for _ in range(300)]


@pytest.mark.parametrize("kind", BIT_GENERATORS)
def test_numpys_global_generator_may_have_any_bit_generator(kind):
    np.random.set_bit_generator(getattr(np.random, kind)(1))
    np.random.standard_normal(3)
    state = rng_state()
    assert state["numpy"]["bit_generator"] == kind
    expected = draw_globally()
    np.random.set_bit_generator(getattr(np.random, kind)(2))
    set_rng_state(state)
    assert draw_globally() == expected


def test_a_state_may_be_set_again_and_is_not_changed_by_that():
    generators = {kind: make(kind) for kind in KINDS}
    state = rng_state(generators=generators)
    before = comparable(state)
    for _ in range(2):
        set_rng_state(state, generators=generators)
        draw_globally()
        [draw(generator) for generator in generators.values()]
    assert comparable(state) == before


@pytest.mark.parametrize("part", ["torch", "numpy", "python"])
def test_a_part_that_the_state_lacks_is_left_alone(part):
    state = rng_state()
    del state[part]
    draw_globally()
    present = rng_state()
    set_rng_state(state)
    after = rng_state()
    assert comparable(after.pop(part)) == comparable(present[part])
    assert comparable(after) == comparable(state)


def test_an_empty_state_changes_nothing():
    before = comparable(rng_state())
    set_rng_state({})
    assert comparable(rng_state()) == before


def test_arrays_may_be_read_only_and_of_the_other_byte_order():
    def foreign(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: foreign(part) for key, part in value.items()}
        if not isinstance(value, np.ndarray):
            return value
        other = np.repeat(value, 2).astype(value.dtype.newbyteorder())[::2]
        other.flags.writeable = False
        return other

    generators = {kind: make(kind) for kind in BIT_GENERATORS}
    state = rng_state(generators=generators)
    numbers = [np.random.random(), *(draw(generator) for generator in generators.values())]
    set_rng_state(foreign(state), generators=generators)
    assert [np.random.random(), *map(draw, generators.values())] == numbers


def test_integers_may_be_numpys_and_tensors_need_not_be_contiguous():
    generators = {"t": make("torch"), "n": make("Philox")}
    state = rng_state(generators=generators)
    numbers = [draw(generator) for generator in generators.values()]
    state["python"] = replaced(state["python"], (1, 3), np.uint32(state["python"][1][3]))
    numpy_state = state["generators"]["n"]["state"]
    numpy_state["buffer_pos"] = np.int64(numpy_state["buffer_pos"])
    record = state["generators"]["t"]
    record["state"] = record["state"].repeat_interleave(2)[::2]
    assert not record["state"].is_contiguous()
    set_rng_state(state, generators=generators)
    assert [draw(generator) for generator in generators.values()] == numbers


def test_the_default_device_does_not_matter():
    generators = {"t": make("torch")}
    with torch.device("meta"):
        state = rng_state(generators=generators)
    expected = torch.rand(3).tolist(), draw(generators["t"])
    with torch.device("meta"):
        set_rng_state(state, generators=generators)
    assert (torch.rand(3).tolist(), draw(generators["t"])) == expected


def test_a_state_goes_on_bit_for_bit_after_a_file(tmp_path):
    import dsdformat.torch as dsd

    generators = {kind: make(kind) for kind in KINDS}
    draw_globally()
    for generator in generators.values():
        draw(generator)
    state = rng_state(generators=generators)
    dsd.save(tmp_path / "checkpoint", {"rng": state})
    expected = [draw_globally(), *(draw(generator) for generator in generators.values())]
    others = {kind: make(kind, seed=2) for kind in KINDS}
    loaded = dsd.load(tmp_path / "checkpoint")["rng"]
    assert comparable(loaded) == comparable(state)
    set_rng_state(loaded, generators=others)
    assert [draw_globally(), *(draw(generator) for generator in others.values())] == expected


# Refusing


def cpu_state(left: int, after: int, seeded: int = 1, word: int = 7) -> Any:
    """A state of torch's generator on the CPU, as it lies in memory."""
    data = bytearray(struct.pack("=QiiQ624Q40x", 1, left, seeded, after, *[word] * 624))
    return torch.frombuffer(data, dtype=torch.uint8)


def zeros(*shape: int, dtype: Any = None) -> Any:
    return torch.zeros(shape, dtype=dtype or torch.uint8)


WORDS = random.Random(1).getstate()[1]
G = ("generators",)
DAMAGE = [
    (("torch",), None),
    (("torch",), b"bytes"),
    (("torch",), [1, 2]),
    (("torch",), np.zeros(5056, np.uint8)),
    (("torch",), zeros(5056, dtype=torch.float32)),
    (("torch",), zeros(5056, dtype=torch.int8)),
    (("torch",), zeros(0)),
    (("torch",), zeros(5055)),
    (("torch",), zeros(5057)),
    (("torch",), zeros(1, 5056)),
    (("torch",), zeros(5056)),
    (("torch",), torch.empty(5056, dtype=torch.uint8, device="meta")),
    (("torch",), cpu_state(left=0, after=0)),
    (("torch",), cpu_state(left=-1, after=0)),
    (("torch",), cpu_state(left=625, after=0)),
    (("torch",), cpu_state(left=1, after=625)),
    (("torch",), cpu_state(left=600, after=624)),  # torch would read past its words
    (("torch",), cpu_state(left=2, after=624)),
    (("torch",), cpu_state(left=1, after=2**32)),
    (("torch",), cpu_state(left=1, after=0, seeded=0)),
    (("torch",), cpu_state(left=1, after=0, word=2**32)),
    (("numpy",), None),
    (("numpy",), ("MT19937", np.zeros(624, np.uint32), 0, 0, 0.0)),
    (("numpy",), {}),
    (("numpy", "bit_generator"), "PCG64"),
    (("numpy", "bit_generator"), np.zeros(3)),
    (("numpy", "state"), 3),
    (("numpy", "state"), {}),
    (("numpy", "state", "key"), [0] * 624),
    (("numpy", "state", "key"), np.zeros(623, np.uint32)),
    (("numpy", "state", "key"), np.zeros((624, 1), np.uint32)),
    (("numpy", "state", "key"), np.zeros(624, np.int32)),
    (("numpy", "state", "key"), np.zeros(624, np.uint64)),
    (("numpy", "state", "key"), np.zeros(624, object)),
    (("numpy", "state", "pos"), 625),  # numpy would read past its words
    (("numpy", "state", "pos"), -1),
    (("numpy", "state", "pos"), 2**70),
    (("numpy", "state", "pos"), True),
    (("numpy", "state", "pos"), 1.0),
    (("numpy", "state", "pos"), None),
    (("numpy", "has_gauss"), 2),
    (("numpy", "gauss"), "0.5"),
    (("numpy", "gauss"), float("nan")),
    (("python",), None),
    (("python",), ()),
    (("python",), [3, WORDS, None]),
    (("python",), (3, WORDS)),
    (("python", 0), 2),
    (("python", 0), 4),
    (("python", 0), "3"),
    (("python", 1), list(WORDS)),
    (("python", 1), WORDS[:-1]),
    (("python", 1), (*WORDS, 1)),
    (("python", 1, 0), -1),
    (("python", 1, 0), 2**32),
    (("python", 1, 0), "1"),
    (("python", 1, 0), 0.5),
    (("python", 1, 624), 625),
    (("python", 1, 624), -1),
    (("python", 2), "0.5"),
    (("python", 2), float("inf")),
    (G, None),
    (G, []),
    ((*G, "torch"), None),
    ((*G, "torch"), {}),
    ((*G, "torch", "kind"), "random.Random"),
    ((*G, "torch", "kind"), np.zeros(2)),
    ((*G, "torch", "device"), "cuda"),
    ((*G, "torch", "device"), None),
    ((*G, "torch", "state"), zeros(16)),
    ((*G, "python", "kind"), "torch.Generator"),
    ((*G, "python", "state", 1, 3), None),
    ((*G, "PCG64", "kind"), "numpy.random"),
    ((*G, "PCG64", "state", "bit_generator"), "PCG64DXSM"),
    ((*G, "PCG64", "state", "state", "state"), 2**128),
    ((*G, "PCG64", "state", "state", "inc"), -1),
    ((*G, "PCG64", "state", "has_uint32"), 2),
    ((*G, "PCG64", "state", "uinteger"), 2**32),
    ((*G, "PCG64DXSM", "state", "state", "state"), 1.5),
    ((*G, "MT19937", "state", "state", "pos"), 625),
    ((*G, "Philox", "state", "buffer_pos"), 5),  # numpy would not notice
    ((*G, "Philox", "state", "buffer_pos"), -1),
    ((*G, "Philox", "state", "buffer"), np.zeros(3, np.uint64)),
    ((*G, "Philox", "state", "state", "counter"), np.zeros(4, np.float64)),
    ((*G, "Philox", "state", "state", "key"), np.zeros(4, np.uint64)),
    ((*G, "SFC64", "state", "state", "state"), np.zeros(5, np.uint64)),
    ((*G, "SFC64", "state", "uinteger"), -1),
]
DAMAGE_IDS = [f"{'.'.join(map(str, path))}-{i}" for i, (path, _) in enumerate(DAMAGE)]


def unchanged(generators: dict[str, Any], call: Callable[[], object]) -> Any:
    """Expect an error of ours from a call that changes no generator."""
    before = comparable(rng_state(generators=generators))
    with pytest.raises((ArgumentError, MismatchError)) as caught:
        call()
    assert comparable(rng_state(generators=generators)) == before
    error = caught.value
    assert type(error) is CODES[error.code]
    assert error.hint
    return error


@pytest.fixture
def generators() -> dict[str, Any]:
    return {kind: make(kind) for kind in KINDS}


@pytest.mark.parametrize("strict", [True, False], ids=["strict", "loose"])
@pytest.mark.parametrize(
    ("path", "value"),
    DAMAGE,
    ids=[f"{i}-{'.'.join(map(str, p))}" for i, (p, _) in enumerate(DAMAGE)],
)
def test_a_damaged_state_is_refused_and_changes_nothing(generators, path, value, strict):
    state = replaced(rng_state(generators=generators), path, value)
    draw_globally()  # so that a part that was set would show
    for generator in generators.values():
        draw(generator)
    error = unchanged(
        generators, lambda: set_rng_state(state, generators=generators, strict=strict)
    )
    assert error.code == "bad_argument"
    assert str(error).startswith(f"$.{path[0]}")


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(("numpy",), id="numpy"),
        pytest.param(("numpy", "state"), id="inside numpy"),
        pytest.param((*G, "torch"), id="a torch generator"),
        pytest.param((*G, "PCG64"), id="a numpy generator"),
        pytest.param((*G, "PCG64", "state", "state"), id="inside a numpy generator"),
    ],
)
def test_a_key_more_or_less_is_refused(generators, path):
    state = rng_state(generators=generators)
    part: Any = state
    for step in path:
        part = part[step]
    for key in list(part):
        less = {name: value for name, value in part.items() if name != key}
        changed = replaced(state, path, less)
        error = unchanged(generators, lambda s=changed: set_rng_state(s, generators=generators))
        assert "expected the keys" in str(error)
    more = replaced(state, path, {**part, "surplus": 1})
    error = unchanged(generators, lambda: set_rng_state(more, generators=generators))
    assert "surplus" in str(error)


@pytest.mark.parametrize("state", [None, 3, [("torch", 1)], torch.zeros(3)], ids=repr)
def test_a_state_that_is_no_dict_is_refused(state):
    error = unchanged({}, lambda: set_rng_state(state))
    assert error.code == "bad_argument"


@pytest.mark.parametrize("key", ["mps", "Torch", 1], ids=repr)
def test_an_unknown_part_is_refused_unless_told_otherwise(key):
    state = {**rng_state(), key: 1}
    error = unchanged({}, lambda: set_rng_state(state))
    assert error.code == "bad_argument"
    assert "strict=False" in error.hint
    expected = draw_globally()
    set_rng_state(state, strict=False)
    assert draw_globally() == expected


def test_a_message_says_where_what_was_expected_and_what_came():
    state = replaced(rng_state(), ("numpy", "state", "pos"), 700)
    error = unchanged({}, lambda: set_rng_state(state))
    assert error.message == "$.numpy.state.pos: expected an integer from 0 to 624, got 700"
    state = replaced(rng_state(), ("numpy", "state", "key"), np.zeros(3))
    error = unchanged({}, lambda: set_rng_state(state))
    assert error.message == (
        "$.numpy.state.key: expected uint32 ndarray of shape (624,), "
        "got float64 ndarray of shape (3,)"
    )


@pytest.mark.parametrize("saved", KINDS)
@pytest.mark.parametrize("given", KINDS)
def test_a_state_of_another_kind_of_generator_is_refused(saved, given):
    state = rng_state(generators={"g": make(saved)})
    other = {"g": make(given)}
    if saved == given:
        set_rng_state(state, generators=other)
        return
    error = unchanged(other, lambda: set_rng_state(state, generators=other))
    assert error.code == "bad_argument"
    assert "give a generator" in error.hint


def test_names_of_generators_must_be_the_same_on_both_sides():
    one, two, three = make("PCG64"), make("torch"), make("python")
    state = rng_state(generators={"one": one, "two": two})
    for given, lost in [
        ({"one": one}, "two"),
        (None, "one"),
        ({"one": one, "two": two, "three": three}, "three"),
    ]:
        error = unchanged(
            {"one": one, "two": two, "three": three},
            lambda given=given: set_rng_state(state, generators=given),
        )
        assert error.code == "state_mismatch"
        assert lost in error.message
        assert "strict=False" in error.hint


def test_a_generator_is_missed_where_the_state_has_none_at_all():
    state = rng_state()
    error = unchanged({}, lambda: set_rng_state(state, generators={"g": make("python")}))
    assert error.code == "state_mismatch"


def test_not_strict_sets_what_both_sides_have():
    one, two, three = make("PCG64"), make("torch"), make("python")
    state = rng_state(generators={"one": one, "two": two})
    expected = draw(one)
    twin, present = make("python"), rng_state(generators={"two": two})["generators"]
    set_rng_state(state, generators={"one": one, "three": three}, strict=False)
    assert draw(one) == expected
    assert draw(three) == draw(twin)
    assert comparable(rng_state(generators={"two": two})["generators"]) == comparable(present)


def test_a_generator_without_a_state_is_refused_when_setting_too(generators):
    state = rng_state(generators={"g": make("python")})
    given = {"g": random.SystemRandom()}
    error = unchanged({}, lambda: set_rng_state(state, generators=given))
    assert error.code == "bad_argument"


@pytest.mark.parametrize("fault", [ValueError, RuntimeError, TypeError, KeyError])
def test_if_a_library_refuses_after_all_every_stream_is_as_it_was(monkeypatch, fault):
    class Refusing(random.Random):
        refused = False

        def setstate(self, state: Any) -> None:
            if not self.refused:
                self.refused = True
                raise fault("no")
            super().setstate(state)

    generators = {"first": make("PCG64"), "refusing": Refusing(1), "last": make("torch")}
    state = rng_state(generators=generators)
    draw_globally()
    draw(generators["first"])
    error = unchanged(generators, lambda: set_rng_state(state, generators=generators))
    assert error.code == "bad_argument"
    assert str(error).startswith("$.generators.refusing.state: the generator refuses this state")
    assert type(error.__cause__) is fault


def test_an_interrupt_leaves_every_stream_as_it_was_and_goes_on_up():
    class Interrupted(random.Random):
        interrupted = False

        def setstate(self, state: Any) -> None:
            if not self.interrupted:
                self.interrupted = True
                raise KeyboardInterrupt
            super().setstate(state)

    generators = {"first": make("PCG64"), "interrupted": Interrupted(1)}
    state = rng_state(generators=generators)
    draw_globally()
    draw(generators["first"])
    before = comparable(rng_state(generators=generators))
    with pytest.raises(KeyboardInterrupt):
        set_rng_state(state, generators=generators)
    assert comparable(rng_state(generators=generators)) == before


# CUDA


class FakeCuda(SimpleNamespace):
    """What is used of `torch.cuda`, over generators on the CPU."""

    def __init__(self, count: int, started: bool = True, starts: bool = True) -> None:
        super().__init__(started=started, starts=starts)
        self.devices = [torch.Generator().manual_seed(index) for index in range(count)]

    def is_initialized(self) -> bool:
        return self.started

    def init(self) -> None:
        if not self.starts:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess")
        self.started = True

    def device_count(self) -> int:
        return len(self.devices)

    def get_rng_state(self, device: int) -> Any:
        assert self.started
        return self.devices[device].get_state()

    def set_rng_state(self, new_state: Any, device: int) -> None:
        assert self.started
        self.devices[device].set_state(new_state)

    def draw(self) -> list[Any]:
        return [torch.rand(3, generator=device).tolist() for device in self.devices]


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeCuda]:
    """`fake_cuda(count)` stands in for `torch.cuda` from then on."""

    def fake_cuda(count: int, **options: bool) -> FakeCuda:
        fake = FakeCuda(count, **options)
        monkeypatch.setattr(torch, "get_device_module", lambda name: fake)
        monkeypatch.setattr(rng_checks, "_scratch", lambda device: torch.Generator())
        return fake

    return fake_cuda


def test_a_state_has_one_tensor_for_each_device_and_all_go_on(fake_cuda):
    fake = fake_cuda(2)
    state = rng_state()
    assert list(state) == ["torch", "cuda", "numpy", "python"]
    assert len(state["cuda"]) == 2
    expected = fake.draw()
    set_rng_state(state)
    assert fake.draw() == expected


def test_setting_a_state_with_devices_starts_them(fake_cuda):
    state = rng_state_of(fake_cuda(1))
    fake = fake_cuda(1, started=False)
    assert "cuda" not in rng_state()
    set_rng_state(state)
    assert fake.started


def rng_state_of(fake: FakeCuda) -> dict[str, Any]:
    fake.draw()
    return rng_state()


@pytest.mark.parametrize(("saved", "present"), [(2, 1), (1, 2), (1, 0), (0, 1)])
def test_other_devices_than_the_state_has_are_refused_before_they_start(fake_cuda, saved, present):
    state = rng_state_of(fake_cuda(saved))
    fake = fake_cuda(present, started=False)
    draw_globally()
    error = unchanged({}, lambda: set_rng_state(state))
    assert error.code == "state_mismatch"
    assert error.message == (f"$.cuda: the state has {saved} devices, this process sees {present}")
    assert not fake.started


def test_not_strict_sets_the_devices_that_there_are(fake_cuda):
    source = fake_cuda(2)
    state = rng_state()
    expected = source.draw()
    fewer = fake_cuda(1)
    fewer.draw()
    set_rng_state(state, strict=False)
    assert fewer.draw() == expected[:1]
    more = fake_cuda(3)
    third = FakeCuda(3).draw()[2]
    more.devices[0].manual_seed(9)
    set_rng_state(state, strict=False)
    assert more.draw() == [*expected, third]
    none = fake_cuda(0, started=False)
    set_rng_state(state, strict=False)
    assert not none.started


@pytest.mark.parametrize(
    "value", [None, {}, zeros(3), [None, None], [zeros(3)] * 2, [zeros(5056)] * 2], ids=repr
)
def test_damaged_states_of_devices_change_nothing(fake_cuda, value):
    fake = fake_cuda(2)
    state = replaced(rng_state(), ("cuda",), value)
    draw_globally()
    error = unchanged({}, lambda: set_rng_state(state))
    assert error.code == "bad_argument"
    assert str(error).startswith("$.cuda")
    assert fake.draw() == FakeCuda(2).draw()


def test_devices_that_cannot_start_are_reported_as_such(fake_cuda):
    state = rng_state_of(fake_cuda(1))
    fake_cuda(1, started=False, starts=False)
    draw_globally()
    error = unchanged({}, lambda: set_rng_state(state))
    assert error.message.startswith("$.cuda: the devices cannot be started: Cannot re-initialize")


def test_a_state_with_cuda_is_refused_where_there_is_none():
    if torch.cuda.device_count():
        pytest.skip("this machine has a CUDA device")
    state = {**rng_state(), "cuda": [zeros(16)]}
    draw_globally()
    error = unchanged({}, lambda: set_rng_state(state))
    assert error.code == "state_mismatch"
    set_rng_state(state, strict=False)
    assert not torch.cuda.is_initialized()


@pytest.mark.gpu
def test_the_generators_of_real_devices_go_on_bit_for_bit():
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

    def draw_on_devices() -> list[Any]:
        return [
            torch.randn(5, device=f"cuda:{index}").tolist()
            for index in range(torch.cuda.device_count())
        ] + [torch.randn(5, device="cuda:0", generator=own).tolist()]

    torch.cuda.init()
    before = torch.cuda.get_rng_state_all()
    try:
        own = torch.Generator(device="cuda:0").manual_seed(1)
        draw_on_devices()
        state = rng_state(generators={"own": own})
        assert len(state["cuda"]) == torch.cuda.device_count()
        assert state["generators"]["own"]["device"] == "cuda"
        expected = draw_on_devices()
        set_rng_state(state, generators={"own": own})
        assert draw_on_devices() == expected
        moved = {**state, "torch": state["torch"].cuda()}
        moved["cuda"] = [tensor.cuda() for tensor in state["cuda"]]
        set_rng_state(moved, generators={"own": own})
        assert draw_on_devices() == expected
        unaligned = state["cuda"][0].clone()
        unaligned[8] = 1  # an offset of torch's is a multiple of 4
        for wrong in (zeros(3), zeros(5056), unaligned):
            damaged = replaced(state, ("cuda", 0), wrong)
            unchanged(
                {"own": own},
                lambda damaged=damaged: set_rng_state(damaged, generators={"own": own}),
            )
        unchanged({}, lambda: set_rng_state(state, generators={"own": make("torch")}))
    finally:
        torch.cuda.set_rng_state_all(before)


def test_the_examples_are_true():
    failed, tried = doctest.testmod(rng_module)
    assert (failed, tried > 0) == (0, True)
