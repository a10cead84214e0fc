"""Check states of random number generators that came from a file, before any generator is changed.

torch, numpy and `random` check little of what they are given: torch and numpy take a position past
the end of the words, and read there.
"""

from __future__ import annotations

import math
import numbers
import struct
from collections.abc import Callable, Mapping
from typing import Any

import torch

from dsdformat.errors import ArgumentError, shorten
from dsdformat.format.paths import Path, render_path

__all__ = [
    "bad_state",
    "check_keys",
    "check_numpy",
    "check_python",
    "check_tensor",
    "describe",
    "is_text",
]

_HINT = "pass what rng_state() returned, as it was then"
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


def check_tensor(value: Any, place: Path, device: torch.device) -> torch.Tensor:
    if not isinstance(value, torch.Tensor) or value.dtype != torch.uint8 or value.ndim != 1:
        raise bad_state(place, f"expected a uint8 tensor of 1 dimension, got {describe(value)}")
    try:
        state = value.detach().to("cpu").contiguous()
        _scratch(device).set_state(state)
        if device.type == "cpu" and len(state) == _CPU_STATE.size:
            _check_words(bytes(state.tolist()), place)
    except ArgumentError:
        raise
    except Exception as error:
        raise bad_state(place, f"is no state of a generator on {device.type}: {error}") from error
    return state


def _scratch(device: torch.device) -> torch.Generator:
    """Make a generator to try a state on; an argument, so that no default device matters."""
    return torch.Generator(device=device)


def _check_words(data: bytes, place: Path) -> None:
    """Check what torch does not: it reads the words from `after` on while some are left."""
    _, left, _, after, *words = _CPU_STATE.unpack(data)
    if after + left > _MT_WORDS + 1:
        raise bad_state(place, f"word {after} is next and {left} are left, of {_MT_WORDS} words")
    if max(words) >= 2**32:
        raise bad_state(place, "a word has more than 32 bits")


def check_python(value: Any, place: Path) -> tuple[Any, ...]:
    if not isinstance(value, tuple) or len(value) != 3:
        raise bad_state(place, f"expected a tuple of 3, got {describe(value)}")
    version, words, gauss = value
    _check_integer(version, _PYTHON_VERSION, (*place, 0), least=_PYTHON_VERSION)
    if not isinstance(words, tuple) or len(words) != _MT_WORDS + 1:
        raise bad_state((*place, 1), f"expected a tuple of {_MT_WORDS + 1}, got {describe(words)}")
    *words, after = words
    plain = [_check_integer(word, 2**32 - 1, (*place, 1, i)) for i, word in enumerate(words)]
    plain.append(_check_integer(after, _MT_WORDS, (*place, 1, _MT_WORDS)))
    if gauss is not None:
        gauss = _check_float(gauss, (*place, 2))
    return _PYTHON_VERSION, tuple(plain), gauss


def check_numpy(value: Any, place: Path, take: Callable[[], Any]) -> Any:
    if not isinstance(value, Mapping):
        raise bad_state(place, f"expected a dict, got {describe(value)}")
    present = take()
    kind = present.get("bit_generator")
    if "bit_generator" in value and not is_text(value["bit_generator"], kind):
        raise bad_state(
            (*place, "bit_generator"),
            f"the generator here has {kind}, the state {describe(value['bit_generator'])}",
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
            raise bad_state(place, f"expected a dict, got {describe(value)}")
        check_keys(value, set(present), place)
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
            raise bad_state(place, f"expected {describe(present)}, got {describe(value)}")
        return np.array(value, dtype=present.dtype)
    if isinstance(present, int):
        return _check_integer(value, largest.get(str(place[-1])), place)
    if isinstance(present, float):
        return _check_float(value, place)
    if type(value) is not type(present):
        raise bad_state(place, f"expected {describe(present)}, got {describe(value)}")
    return value


def _check_integer(value: Any, largest: int | None, place: Path, *, least: int = 0) -> int:
    fits = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not fits or (largest is not None and not least <= value <= largest):
        span = "" if largest is None else f" from {least} to {largest}"
        raise bad_state(place, f"expected an integer{span}, got {describe(value)}")
    return int(value)


def _check_float(value: Any, place: Path) -> float:
    if not isinstance(value, float) or not math.isfinite(value):
        raise bad_state(place, f"expected a finite float, got {describe(value)}")
    return value


def check_keys(value: Mapping[Any, Any], wanted: set[str], place: Path) -> None:
    if value.keys() != wanted:
        raise bad_state(place, f"expected the keys {sorted(wanted)}, got {shorten(list(value))}")


def is_text(value: Any, wanted: str | None) -> bool:
    """Tell whether a value is this str; comparing an array would give an array."""
    return isinstance(value, str) and value == wanted


def describe(value: Any) -> str:
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if dtype is not None and shape:
        return f"{dtype} {type(value).__name__} of shape {tuple(shape)}"
    if isinstance(value, (list, tuple, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return shorten(value)


def bad_state(place: Path, message: str, *, hint: str = _HINT) -> ArgumentError:
    return ArgumentError(f"{render_path(place)}: {message}", code="bad_argument", hint=hint)
