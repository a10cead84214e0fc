"""Errors: every code has a class and a place in the registry, and messages say what to do."""

from __future__ import annotations

import copy
import errno
import re
from pathlib import Path

import pytest

import dsdformat
from dsdformat import errors
from dsdformat.errors import CODES, DsdError, FormatError, Problem, raise_problems, shorten

REGISTRY = Path(__file__).resolve().parents[2] / "spec" / "registry" / "errors.md"
ROW = re.compile(r"^\| `(\w+)` \| (\w+) \|", re.MULTILINE)
REGISTERED = dict(ROW.findall(REGISTRY.read_text("utf-8")))
FORMAT_CODES = [code for code, kind in CODES.items() if issubclass(kind, FormatError)]


def test_the_registry_lists_every_code():
    assert REGISTERED.keys() == CODES.keys()


@pytest.mark.parametrize("code", CODES)
def test_a_code_has_the_class_that_the_registry_says(code):
    assert CODES[code].__name__ == REGISTERED[code]


@pytest.mark.parametrize("code", CODES)
def test_a_code_is_in_lower_case(code):
    assert re.fullmatch(r"[a-z]+(_[a-z]+)*", code)


@pytest.mark.parametrize("code", FORMAT_CODES)
def test_a_problem_makes_the_error_of_its_code(code):
    error = Problem(code, "what failed", where="model.safetensors", byte_offset=5).error()
    assert type(error) is CODES[code]
    assert (error.code, error.where, error.byte_offset) == (code, "model.safetensors", 5)


@pytest.mark.parametrize(
    ("kind", "builtin"),
    [
        (errors.FormatError, ValueError),
        (errors.ArgumentError, ValueError),
        (errors.EntryNotFoundError, KeyError),
        (errors.MismatchError, ValueError),
        (errors.UnsupportedValueError, TypeError),
        (errors.StorageError, OSError),
        (errors.DependencyError, ImportError),
        (errors.DistributedError, RuntimeError),
        (errors.ConvertError, ValueError),
    ],
)
def test_an_error_is_also_the_builtin_that_callers_catch(kind, builtin):
    assert issubclass(kind, builtin)
    assert issubclass(kind, DsdError)


def test_every_exception_of_the_module_is_public():
    kinds = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, Exception)
    }
    assert kinds <= set(dsdformat.__all__)


MADE = [
    pytest.param(errors.ArgumentError("what", code="bad_argument", hint="do"), id="argument"),
    pytest.param(errors.MismatchError("what", code="state_conflict", hint="do"), id="mismatch"),
    pytest.param(
        errors.EntryNotFoundError("what", name="a", close_matches=["b", "c"]), id="not-found"
    ),
    pytest.param(errors.UnsupportedValueError("what", path_in_tree="$.a", hint="do"), id="value"),
    pytest.param(errors.StorageError("what", errno=errno.ENOSPC, hint="do"), id="storage"),
    pytest.param(
        errors.DependencyError("what", code="missing_dependency", hint="do"), id="dependency"
    ),
    pytest.param(errors.ConvertError("what", code="bad_argument", hint="do"), id="convert"),
    pytest.param(Problem("bad_body", "what", path="$.a", hint="do").error(), id="format"),
    pytest.param(
        errors.DistributedError("what", code="io_error", failures={}, hint="do"), id="distributed"
    ),
]


@pytest.mark.parametrize("error", MADE)
def test_an_error_reads_as_its_message_and_then_its_hint(error):
    first, _, rest = str(error).partition("\n\n")
    assert first == "what"
    assert rest == f"hint: {error.hint}"


@pytest.mark.parametrize("error", MADE)
def test_the_repr_of_an_error_names_its_class(error):
    assert repr(error).startswith(type(error).__name__)


@pytest.mark.parametrize("error", MADE)
def test_a_copy_of_an_error_says_the_same(error):
    other = copy.copy(error)
    assert (type(other), str(other), vars(other)) == (type(error), str(error), vars(error))


def test_an_error_without_a_hint_reads_as_its_message():
    assert str(errors.StorageError("what")) == "what"


def test_close_matches_are_the_hint():
    error = errors.EntryNotFoundError("what", name="a", close_matches=["b", "c"])
    assert error.hint == "did you mean b, c?"


def test_a_storage_error_keeps_the_number_of_the_system():
    assert errors.StorageError("what", errno=errno.ENOSPC).errno == errno.ENOSPC


def test_no_problems_raise_nothing():
    raise_problems([])


def test_several_problems_are_one_error_of_the_first_code():
    problems = [Problem("chunk_hole", "one"), Problem("bad_reference", "two")]
    with pytest.raises(errors.LayoutError) as error:
        raise_problems(problems)
    assert str(error.value) == "one\ntwo"
    assert error.value.problems == tuple(problems)


def test_a_message_shows_ten_problems_and_counts_the_rest():
    error = errors.FormatError([Problem("bad_body", f"problem {n}") for n in range(13)])
    assert str(error).splitlines()[-2:] == ["problem 9", "… and 3 more problems"]


def test_a_problem_keeps_the_file_that_it_has():
    assert Problem("bad_body", "", where="a").at("b").where == "a"
    assert Problem("bad_body", "").at("b").where == "b"


@pytest.mark.parametrize("length", [198, 199, 10_000])
def test_a_value_is_cut_to_200_characters_in_a_message(length):
    text = shorten("x" * length)
    assert len(text) == min(length + 2, 200)
    assert text.endswith("'" if length == 198 else "…")


def test_a_number_of_many_digits_is_cut_like_any_value():
    assert len(shorten(10**5000)) <= 200
