"""Take and set the states of random number generators, as values that the format stores.

Decides what such a state holds, and when it is refused. torch, numpy and `random` check little of
what they are given: torch and numpy take a position past the end of the words, and read there.
So each state is checked here, before any generator is changed.
"""

from __future__ import annotations

import math
import numbers
import random
import struct
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dsdformat.errors import ArgumentError, MismatchError, shorten
from dsdformat.format.paths import Path, render_path

if TYPE_CHECKING:
    import numpy as np

    Generator = torch.Generator | np.random.Generator | random.Random

__all__ = ["rng_state", "set_rng_state"]

# A device module that has is_initialized, init, device_count, get_rng_state and set_rng_state.
_ACCELERATORS = ("cuda",)
_PARTS = ("torch", *_ACCELERATORS, "numpy", "python", "generators")
_HINT = "pass what rng_state() returned, as it was then"
_HINT_STRICT = "strict=False sets the streams that are on both sides, and leaves the others alone"

_MT_WORDS = 624
_PYTHON_VERSION = 3
# What torch's generator on the CPU gives, from 2.6 to 2.13 at least: the seed, how many words are
# left (counting from 1), whether it is seeded, which word is next, the words; a pair of normals.
_CPU_STATE = struct.Struct(f"=QiiQ{_MT_WORDS}Q40x")
_HALF_WORD = {"has_uint32": 1, "uinteger": 2**32 - 1}
_PCG = {"state": 2**128 - 1, "inc": 2**128 - 1, **_HALF_WORD}
# The largest integer in each field, by numpy's name of the bit generator.
_LARGEST = {
    "MT19937": {"pos": _MT_WORDS, "has_gauss": 1},
    "PCG64": _PCG | {"has_gauss": 1},
    "PCG64DXSM": _PCG | {"has_gauss": 1},
    "Philox": {"buffer_pos": 4, "has_gauss": 1, **_HALF_WORD},
    "SFC64": {"has_gauss": 1, **_HALF_WORD},
}


@dataclass(frozen=True, slots=True)
class _Stream:
    """One stream of random numbers, whichever library has it.

    Attributes:
        kind: Public name of the generator's class.
        take: Returns the present state.
        check: Returns a state as `put` takes it; raises ArgumentError for one that does not fit.
        put: Goes on from a state.
        device: Type of the device that a torch.Generator is on, or None.
    """

    kind: str
    take: Callable[[], Any]
    check: Callable[[Any, Path], Any]
    put: Callable[[Any], object]
    device: str | None = None


@dataclass(frozen=True, slots=True)
class _Move:
    """One checked state, and the stream that will go on from it."""

    stream: _Stream
    state: Any
    place: Path


def rng_state(*, generators: Mapping[str, Generator] | None = None) -> dict[str, Any]:
    """Take the states of the global random number generators, and of those given.

    No generator is changed, and CUDA is not started. Put the result into the state that you save,
    under a key of your own; each rank has its own.

    Args:
        generators: Generators that you made, by names of your choice, such as that of a sampler.

    Returns:
        A dict of values that the format stores exactly. Nothing in it is shared with a generator:

        - `torch`: a uint8 tensor, the state of torch's generator on the CPU.
        - `cuda`: a list of such tensors, one for each visible device; only if CUDA is started.
        - `numpy`: a dict, the state of `numpy.random`; only if numpy is imported.
        - `python`: a tuple, the state of `random`.
        - `generators`: for each name a dict of `kind`, `state` and, for torch, `device`; only if
          generators are given. What a numpy generator would spawn next is no part of its state.

    Raises:
        ArgumentError: `bad_argument` for a generator of another class, or one without a state.

    Ranks: local.
    Memory: none beyond the result: about 35 KB, and that of each generator.

    Example:
        >>> state = rng_state()
        >>> numbers = torch.rand(3), random.random()
        >>> set_rng_state(state)
        >>> torch.equal(torch.rand(3), numbers[0]), random.random() == numbers[1]
        (True, True)
    """
    state: dict[str, Any] = {"torch": _of_torch(torch.default_generator).take()}
    for name in _ACCELERATORS:
        if torch.get_device_module(name).is_initialized():
            state[name] = [stream.take() for stream in _of_accelerator(name)]
    if sys.modules.get("numpy"):
        state["numpy"] = _of_numpy().take()
    state["python"] = _of_python().take()
    if generators is not None:
        streams = _streams(generators)
        state["generators"] = {name: _record(name, stream) for name, stream in streams.items()}
    return state


def set_rng_state(
    state: Mapping[str, Any],
    *,
    generators: Mapping[str, Generator] | None = None,
    strict: bool = True,
) -> None:
    """Let random number generators go on from a state that `rng_state` took, bit for bit.

    All of the state is checked before any generator is changed; after an error, all of them are
    as they were. A part that the state does not have, such as `cuda`, is left alone. A state
    with `cuda` starts CUDA.

    Args:
        state: What `rng_state` returned, or what became of that in a checkpoint: tensors may be
            on any device, arrays may be read-only and of any byte order.
        generators: The generators to set, by the names that they were taken under.
        strict: Whether the state must have the generators that are given and no others, and as
            many CUDA devices as there are, and no unknown part. If not, what is on one side only
            is left alone.

    Raises:
        ArgumentError: `bad_argument` for a state that is damaged or of another kind of generator.
        MismatchError: `state_mismatch` for other CUDA devices or other names of generators.

    Ranks: local.
    Memory: the present states, and a copy of `state`.

    Example:
        >>> sampler = random.Random(7)
        >>> state = rng_state(generators={"sampler": sampler})
        >>> order = sampler.sample(range(100), 100)
        >>> set_rng_state(state, generators={"sampler": sampler})
        >>> sampler.sample(range(100), 100) == order
        True
    """
    if not isinstance(state, Mapping):
        raise _bad((), f"a state is a dict, got {_describe(state)}")
    unknown = [key for key in state if key not in _PARTS]
    if unknown and strict:
        raise _bad(unknown[:1], f"is none of the parts {', '.join(_PARTS)}", hint=_HINT_STRICT)
    moves: list[_Move] = []
    if "torch" in state:
        moves.append(_move(_of_torch(torch.default_generator), state["torch"], ("torch",)))
    if "numpy" in state:
        moves.append(_move(_of_numpy(), state["numpy"], ("numpy",)))
    if "python" in state:
        moves.append(_move(_of_python(), state["python"], ("python",)))
    moves += _generator_moves(state.get("generators", {}), _streams(generators or {}), strict)
    for name in _ACCELERATORS:
        if name in state:  # last, since this may start the devices
            moves += _accelerator_moves(name, state[name], strict)
    _apply(moves)


def _move(stream: _Stream, state: Any, place: Path) -> _Move:
    return _Move(stream, stream.check(state, place), place)


def _apply(moves: list[_Move]) -> None:
    """Set all streams, or, if one refuses, none."""
    place: Path = ()
    try:
        with ExitStack() as undo:
            for move in moves:
                place = move.place
                undo.callback(move.stream.put, move.stream.take())
            for move in moves:
                place = move.place
                move.stream.put(move.state)
            undo.pop_all()
    except Exception as error:
        raise _bad(place, f"the generator refuses this state: {error}") from error


def _of_torch(generator: torch.Generator) -> _Stream:
    return _Stream(
        kind="torch.Generator",
        take=generator.get_state,
        check=partial(_check_tensor, device=generator.device),
        put=generator.set_state,
        device=generator.device.type,
    )


def _of_accelerator(name: str) -> list[_Stream]:
    """Return a stream for each visible device; the devices are not started by this."""
    module = torch.get_device_module(name)
    return [
        _Stream(
            kind="torch.Generator",
            take=partial(module.get_rng_state, index),
            check=partial(_check_tensor, device=torch.device(name, index)),
            put=partial(module.set_rng_state, device=index),
            device=name,
        )
        for index in range(module.device_count())
    ]


def _of_python(generator: random.Random | None = None) -> _Stream:
    """Return the stream of a generator, or that of the module `random`."""
    source: Any = random if generator is None else generator
    return _Stream(
        kind="random.Random", take=source.getstate, check=_check_python, put=source.setstate
    )


def _of_numpy(generator: np.random.Generator | None = None) -> _Stream:
    """Return the stream of a generator, or that of the module `numpy.random`."""
    import numpy as np

    if generator is None:
        take = partial(np.random.get_state, legacy=False)
        return _Stream(
            kind="numpy.random",
            take=take,
            check=partial(_check_numpy, take=take),
            put=np.random.set_state,
        )
    source = generator.bit_generator

    def take_own() -> Any:
        return source.state

    return _Stream(
        kind="numpy.random.Generator",
        take=take_own,
        check=partial(_check_numpy, take=take_own),
        put=partial(setattr, source, "state"),
    )


def _streams(generators: Any) -> dict[str, _Stream]:
    if not isinstance(generators, Mapping):
        raise ArgumentError(
            f"generators maps names to generators, got {_describe(generators)}",
            code="bad_argument",
            hint="name each: generators={'sampler': generator}",
        )
    return {name: _of_generator(name, generator) for name, generator in generators.items()}


def _of_generator(name: Any, generator: Any) -> _Stream:
    if type(name) is not str:
        raise _bad_generator(name, "a name is a str", "name the generator by a str")
    if isinstance(generator, torch.Generator):
        return _of_torch(generator)
    if isinstance(generator, random.Random):
        return _of_python(generator)
    if sys.modules.get("numpy"):
        import numpy as np

        if isinstance(generator, np.random.Generator):
            return _of_numpy(generator)
    raise _bad_generator(
        name,
        f"got {_describe(generator)}",
        "give a torch.Generator, a numpy.random.Generator or a random.Random",
    )


def _record(name: str, stream: _Stream) -> dict[str, Any]:
    """Return what a state has for a generator that was given."""
    try:
        state = stream.take()
        if stream.kind == "random.Random":  # a class of the user's may have a state of its own
            stream.check(state, ("generators", name, "state"))
    except (ArgumentError, NotImplementedError, RuntimeError) as error:  # random.SystemRandom
        message = f"this generator gives no state to go on from: {error.args[0]}"
        raise _bad_generator(name, message, "leave it out") from error
    device = {} if stream.device is None else {"device": stream.device}
    return {"kind": stream.kind, **device, "state": state}


def _generator_moves(records: Any, streams: dict[str, _Stream], strict: bool) -> Iterator[_Move]:
    place = ("generators",)
    if not isinstance(records, Mapping):
        raise _bad(place, f"expected a dict, got {_describe(records)}")
    not_given = [name for name in records if name not in streams]
    not_saved = [name for name in streams if name not in records]
    if strict and not_given:
        raise _mismatch(place, f"the state has {shorten(not_given)}, which were not given")
    if strict and not_saved:
        raise _mismatch(place, f"the state lacks {shorten(not_saved)}, which were given")
    for name, stream in streams.items():
        if name in records:
            yield _generator_move(stream, records[name], (*place, name))


def _generator_move(stream: _Stream, record: Any, place: Path) -> _Move:
    wanted = {"kind": stream.kind, "device": stream.device}
    if stream.device is None:
        del wanted["device"]
    if not isinstance(record, Mapping):
        raise _bad(place, f"expected a dict, got {_describe(record)}")
    for key, value in wanted.items():  # first, since keys depend on the kind
        if key in record and not _is_text(record[key], value):
            raise _bad(
                (*place, key),
                f"the generator given has {value}, the state {_describe(record[key])}",
                hint="give a generator of the class, and on the kind of device, that was saved",
            )
    _check_keys(record, {*wanted, "state"}, place)
    return _move(stream, record["state"], (*place, "state"))


def _accelerator_moves(name: str, states: Any, strict: bool) -> Iterator[_Move]:
    if not isinstance(states, (list, tuple)):
        raise _bad((name,), f"expected a list of tensors, got {_describe(states)}")
    streams = _of_accelerator(name)
    if strict and len(states) != len(streams):
        raise _mismatch(
            (name,), f"the state has {len(states)} devices, this process sees {len(streams)}"
        )
    pairs = list(zip(streams, states, strict=False))
    if pairs:
        try:
            torch.get_device_module(name).init()
        except Exception as error:  # such as a fork of a process that had started them
            raise _bad(
                (name,),
                f"the devices cannot be started: {error}",
                hint=f"take {name!r} out of the state, or spawn this process instead of forking it",
            ) from error
    for index, (stream, state) in enumerate(pairs):
        yield _move(stream, state, (name, index))


def _check_tensor(value: Any, place: Path, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        raise _bad(place, f"expected a uint8 tensor of 1 dimension, got {_describe(value)}")
    try:
        state = value.detach().to("cpu").contiguous()
        _scratch(device).set_state(state)
        if device.type == "cpu" and len(state) == _CPU_STATE.size:
            _check_words(bytes(state.tolist()), place)
    except ArgumentError:
        raise
    except Exception as error:
        raise _bad(place, f"is no state of a generator on {device.type}: {error}") from error
    return state


def _scratch(device: torch.device) -> torch.Generator:
    """Make a generator to try a state on; an argument, so that no default device matters."""
    return torch.Generator(device=device)


def _check_words(data: bytes, place: Path) -> None:
    """Check what torch does not: it reads the words from `after` on while some are left."""
    _, left, _, after, *words = _CPU_STATE.unpack(data)
    if after + left > _MT_WORDS + 1:
        raise _bad(place, f"word {after} is next and {left} are left, of {_MT_WORDS} words")
    if max(words) >= 2**32:
        raise _bad(place, "a word has more than 32 bits")


def _check_python(value: Any, place: Path) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or len(value) != 3:
        raise _bad(place, f"expected a tuple of 3, got {_describe(value)}")
    version, words, gauss = value
    _check_integer(version, _PYTHON_VERSION, (*place, 0), least=_PYTHON_VERSION)
    if not isinstance(words, tuple) or len(words) != _MT_WORDS + 1:
        raise _bad((*place, 1), f"expected a tuple of {_MT_WORDS + 1}, got {_describe(words)}")
    *words, after = words
    plain = [_check_integer(word, 2**32 - 1, (*place, 1, i)) for i, word in enumerate(words)]
    plain.append(_check_integer(after, _MT_WORDS, (*place, 1, _MT_WORDS)))
    if gauss is not None:
        gauss = _check_float(gauss, (*place, 2))
    return _PYTHON_VERSION, tuple(plain), gauss


def _check_numpy(value: Any, place: Path, take: Callable[[], Any]) -> Any:
    if not isinstance(value, Mapping):
        raise _bad(place, f"expected a dict, got {_describe(value)}")
    present = take()
    kind = present.get("bit_generator")
    if "bit_generator" in value and not _is_text(value["bit_generator"], kind):
        raise _bad(
            (*place, "bit_generator"),
            f"the generator here has {kind}, the state {_describe(value['bit_generator'])}",
            hint="give a generator with the bit generator that was saved",
        )
    return _fitted(value, present, place, _LARGEST.get(kind, {}))


def _fitted(value: Any, present: Any, place: Path, largest: Mapping[str, int]) -> Any:
    """Return a state of numpy's with plain integers and native arrays, if it fits.

    Args:
        value: What came from a file.
        present: The generator's own state, which shows the keys and the types.
        place: Where the value is in the state.
        largest: The largest integers, by key.
    """
    import numpy as np

    if isinstance(present, dict):
        if not isinstance(value, Mapping):
            raise _bad(place, f"expected a dict, got {_describe(value)}")
        _check_keys(value, set(present), place)
        return {
            key: _fitted(value[key], part, (*place, key), largest) for key, part in present.items()
        }
    if isinstance(present, np.ndarray):
        fits = (
            isinstance(value, np.ndarray)
            and value.shape == present.shape
            and (value.dtype.kind, value.dtype.itemsize)
            == (present.dtype.kind, present.dtype.itemsize)
        )
        if not fits:
            raise _bad(place, f"expected {_describe(present)}, got {_describe(value)}")
        return np.array(value, dtype=present.dtype)
    if isinstance(present, int):
        return _check_integer(value, largest.get(str(place[-1])), place)
    if isinstance(present, float):
        return _check_float(value, place)
    if type(value) is not type(present):
        raise _bad(place, f"expected {_describe(present)}, got {_describe(value)}")
    return value


def _check_integer(value: Any, largest: int | None, place: Path, *, least: int = 0) -> int:
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fits or (largest is not None and not least <= value <= largest):
        span = "" if largest is None else f" from {least} to {largest}"
        raise _bad(place, f"expected an integer{span}, got {_describe(value)}")
    return int(value)


def _check_float(value: Any, place: Path) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise _bad(place, f"expected a finite float, got {_describe(value)}")
    return value


def _check_keys(value: Mapping[Any, Any], wanted: set[str], place: Path) -> None:
    if value.keys() != wanted:
        raise _bad(place, f"expected the keys {sorted(wanted)}, got {shorten(list(value))}")


def _is_text(value: Any, wanted: str | None) -> bool:
    """Tell whether a value is this str; comparing an array would give an array."""
    return isinstance(value, str) and value == wanted


def _describe(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape:
        return f"{dtype} {type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return shorten(value)


def _bad(place: Path, message: str, *, hint: str = _HINT) -> ArgumentError:
    return ArgumentError(f"{render_path(place)}: {message}", code="bad_argument", hint=hint)


def _bad_generator(name: Any, message: str, hint: str) -> ArgumentError:
    return ArgumentError(f"generators[{shorten(name)}]: {message}", code="bad_argument", hint=hint)


def _mismatch(place: Path, message: str) -> MismatchError:
    return MismatchError(
        f"{render_path(place)}: {message}", code="state_mismatch", hint=_HINT_STRICT
    )
