"""Take and set the states of random number generators, as values that the format stores.

Decides what such a state holds, and which streams are set. Each state is checked (`rng_checks`)
before any generator is changed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from dsdformat.errors import ArgumentError, MismatchError, shorten
from dsdformat.format.paths import Path, render_path
from dsdformat.torch.rng_checks import (
    bad_state,
    check_keys,
    check_numpy,
    check_python,
    check_tensor,
    describe,
    is_text,
)

if TYPE_CHECKING:
    import numpy as np

    Generator = torch.Generator | np.random.Generator | random.Random

__all__ = ["rng_state", "set_rng_state"]

# A device module that has is_initialized, init, device_count, get_rng_state and set_rng_state.
_ACCELERATORS = ("cuda",)
_PARTS = ("torch", *_ACCELERATORS, "numpy", "python", "generators")
_HINT_STRICT = "strict=False sets the streams that are on both sides, and leaves the others alone"


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
        raise bad_state((), f"a state is a dict, got {describe(state)}")
    unknown = [key for key in state if key not in _PARTS]
    if unknown and strict:
        raise bad_state(unknown[:1], f"is none of the parts {', '.join(_PARTS)}", hint=_HINT_STRICT)
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
        raise bad_state(place, f"the generator refuses this state: {error}") from error


def _of_torch(generator: torch.Generator) -> _Stream:
    return _Stream(
        kind="torch.Generator",
        take=generator.get_state,
        check=partial(check_tensor, device=generator.device),
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
            check=partial(check_tensor, device=torch.device(name, index)),
            put=partial(module.set_rng_state, device=index),
            device=name,
        )
        for index in range(module.device_count())
    ]


def _of_python(generator: random.Random | None = None) -> _Stream:
    """Return the stream of a generator, or that of the module `random`."""
    source: Any = random if generator is None else generator
    return _Stream(
        kind="random.Random", take=source.getstate, check=check_python, put=source.setstate
    )


def _of_numpy(generator: np.random.Generator | None = None) -> _Stream:
    """Return the stream of a generator, or that of the module `numpy.random`."""
    import numpy as np

    if generator is None:
        take = partial(np.random.get_state, legacy=False)
        return _Stream(
            kind="numpy.random",
            take=take,
            check=partial(check_numpy, take=take),
            put=np.random.set_state,
        )
    source = generator.bit_generator

    def take_own() -> Any:
        return source.state

    return _Stream(
        kind="numpy.random.Generator",
        take=take_own,
        check=partial(check_numpy, take=take_own),
        put=partial(setattr, source, "state"),
    )


def _streams(generators: Any) -> dict[str, _Stream]:
    if not isinstance(generators, Mapping):
        raise ArgumentError(
            f"generators maps names to generators, got {describe(generators)}",
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
        f"got {describe(generator)}",
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
        raise bad_state(place, f"expected a dict, got {describe(records)}")
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
        raise bad_state(place, f"expected a dict, got {describe(record)}")
    for key, value in wanted.items():  # first, since keys depend on the kind
        if key in record and not is_text(record[key], value):
            raise bad_state(
                (*place, key),
                f"the generator given has {value}, the state {describe(record[key])}",
                hint="give a generator of the class, and on the kind of device, that was saved",
            )
    check_keys(record, {*wanted, "state"}, place)
    return _move(stream, record["state"], (*place, "state"))


def _accelerator_moves(name: str, states: Any, strict: bool) -> Iterator[_Move]:
    if not isinstance(states, (list, tuple)):
        raise bad_state((name,), f"expected a list of tensors, got {describe(states)}")
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
            raise bad_state(
                (name,),
                f"the devices cannot be started: {error}",
                hint=f"take {name!r} out of the state, or spawn this process instead of forking it",
            ) from error
    for index, (stream, state) in enumerate(pairs):
        yield _move(stream, state, (name, index))


def _bad_generator(name: Any, message: str, hint: str) -> ArgumentError:
    return ArgumentError(f"generators[{shorten(name)}]: {message}", code="bad_argument", hint=hint)


def _mismatch(place: Path, message: str) -> MismatchError:
    return MismatchError(
        f"{render_path(place)}: {message}", code="state_mismatch", hint=_HINT_STRICT
    )
