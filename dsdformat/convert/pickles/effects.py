"""What opcodes do to the stack and the memo, as pickle's documentation says; nothing more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dsdformat.convert.pickles.nodes import ABSENT, Call, Elements, Global, Pairs, Stored
from dsdformat.convert.pickles.opcodes import OPCODES
from dsdformat.convert.pickles.state import State
from dsdformat.limits import PICKLE_MARKS_MAX, PICKLE_NAME_NBYTES_MAX

__all__ = ["EFFECTS"]

_INDEX_DIGITS_MAX = 10


# The stack and the memo


def _mark(state: State) -> None:
    if len(state.marks) >= PICKLE_MARKS_MAX:
        raise state.stream.fault("foreign_too_large", "marks are nested too deep")
    state.marks.append(state.stack)
    state.stack = []


def _memoize(state: State) -> None:
    memo, stack = state.memo, state.stack
    index = len(memo)
    if index in memo or not stack:
        state.memoize(index)  # says what is wrong
    memo[index] = stack[-1]


def _index(state: State) -> int:
    text = state.stream.line(_INDEX_DIGITS_MAX)
    if not text.isdigit():
        state.malformed("the index of a memo's entry is no number")
    return int(text)


def _frame(state: State) -> None:
    length = state.stream.number(8)
    if state.frame_end is not None:
        state.malformed("a frame begins within another")
    if length > state.stream.left:
        state.malformed(f"a frame of {length} bytes is longer than what follows")
    state.frame_end = state.stream.position + length


# Containers


def _tuple_of(count: int) -> Callable[[State], None]:
    def push(state: State) -> None:
        stack = state.stack
        if len(stack) < count:
            state.malformed("the stack is too short for a tuple")
        stack[-count:] = [tuple(stack[-count:])]

    return push


def _tuple(state: State) -> None:
    items = state.pop_mark()
    state.stack.append(tuple(items))


def _list(state: State) -> None:
    items = state.pop_mark()
    state.stack.append(items)


def _dict(state: State) -> None:
    flat = _even(state, state.pop_mark())
    state.stack.append(Pairs(flat))


def _frozenset(state: State) -> None:
    items = state.pop_mark()
    state.stack.append(Elements(items, frozen=True))


def _extend(state: State, items: list[Any]) -> None:
    target = state.top()
    if type(target) is list or type(target) is Call:
        target.extend(items)
    else:
        state.malformed("items are appended to what is no list")


def _set(state: State, flat: list[Any]) -> None:
    target = state.top()
    if type(target) is Pairs:
        target.flat.extend(flat)
    elif type(target) is Call:
        target.set(flat)
    else:
        state.malformed("keys are set in what is no dict")


def _even(state: State, flat: list[Any]) -> list[Any]:
    if len(flat) % 2:
        state.malformed("a key has no value")
    return flat


def _append(state: State) -> None:
    item = state.pop()
    _extend(state, [item])


def _appends(state: State) -> None:
    items = state.pop_mark()
    _extend(state, items)


def _setitem(state: State) -> None:
    value = state.pop()
    key = state.pop()
    _set(state, [key, value])


def _setitems(state: State) -> None:
    flat = _even(state, state.pop_mark())
    _set(state, flat)


def _additems(state: State) -> None:
    items = state.pop_mark()
    target = state.top()
    if type(target) is Elements and not target.frozen:
        target.items.extend(items)
    elif type(target) is Call:
        target.extend(items)
    else:
        state.malformed("elements are added to what is no set")


# Names and calls


def _name(state: State, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        state.malformed("a name is not UTF-8")


def _global_line(state: State) -> Global:
    module = _name(state, state.stream.line(PICKLE_NAME_NBYTES_MAX))
    return Global(module, _name(state, state.stream.line(PICKLE_NAME_NBYTES_MAX)))


def _stack_global(state: State) -> None:
    name, module = state.pop(), state.pop()
    if type(name) is not str or type(module) is not str:
        state.malformed("a name is no string")
    if max(len(name), len(module)) > PICKLE_NAME_NBYTES_MAX:
        raise state.stream.fault("foreign_too_large", "a name is too long")
    state.stack.append(Global(module, name))


def _call(state: State, function: Any, args: Any, kwargs: Any = None) -> None:
    if type(args) is not tuple:
        state.malformed("the arguments of a call are no tuple")
    state.stack.append(Call(function, args, kwargs))


def _reduce(state: State) -> None:
    args, function = state.pop(), state.pop()
    _call(state, function, args)


def _newobj_ex(state: State) -> None:
    kwargs, args, function = state.pop(), state.pop(), state.pop()
    if type(kwargs) is not Pairs:
        state.malformed("the keyword arguments of a call are no dict")
    _call(state, function, args, kwargs)


def _inst(state: State) -> None:
    function = _global_line(state)
    _call(state, function, tuple(state.pop_mark()))


def _obj(state: State) -> None:
    items = state.pop_mark()
    if not items:
        state.malformed("a call has no function")
    _call(state, items[0], tuple(items[1:]))


def _build(state: State) -> None:
    attributes = state.pop()
    target = state.top()
    if type(target) is not Call:
        state.malformed("a state is set on what has none")
    if target.state is not ABSENT:
        state.malformed("a state is set twice")
    target.state = attributes


def _binpersid(state: State) -> None:
    stored = Stored(state.pop())
    state.pids.append(stored)
    state.stack.append(stored)


EFFECTS: dict[int, Callable[[State], None]] = {
    OPCODES[name]: handler
    for name, handler in {
        "MARK": _mark,
        "PUT": lambda state: state.memoize(_index(state)),
        "BINPUT": lambda state: state.memoize(state.stream.byte()),
        "LONG_BINPUT": lambda state: state.memoize(state.stream.number(4)),
        "MEMOIZE": _memoize,
        "GET": lambda state: state.recall(_index(state)),
        "BINGET": lambda state: state.recall(state.stream.byte()),
        "LONG_BINGET": lambda state: state.recall(state.stream.number(4)),
        "FRAME": _frame,
        "TUPLE": _tuple,
        "TUPLE1": _tuple_of(1),
        "TUPLE2": _tuple_of(2),
        "TUPLE3": _tuple_of(3),
        "LIST": _list,
        "DICT": _dict,
        "EMPTY_DICT": lambda state: state.stack.append(Pairs([])),
        "EMPTY_SET": lambda state: state.stack.append(Elements([], frozen=False)),
        "FROZENSET": _frozenset,
        "APPEND": _append,
        "APPENDS": _appends,
        "SETITEM": _setitem,
        "SETITEMS": _setitems,
        "ADDITEMS": _additems,
        "GLOBAL": lambda state: state.stack.append(_global_line(state)),
        "STACK_GLOBAL": _stack_global,
        "REDUCE": _reduce,
        "NEWOBJ": _reduce,
        "NEWOBJ_EX": _newobj_ex,
        "INST": _inst,
        "OBJ": _obj,
        "BUILD": _build,
        "BINPERSID": _binpersid,
    }.items()
}
