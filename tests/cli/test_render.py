"""Tables, sizes, shortening and escapes."""

from __future__ import annotations

import io
import unicodedata

import pytest

from dsdformat.cli import render
from dsdformat.cli.escapes import cells, escape, fit, unescape
from dsdformat.cli.render import Column, Output, format_count, format_pace, format_size

SIZES = {
    0: "0 B",
    1023: "1023 B",
    1024: "1.0 KiB",
    1536: "1.5 KiB",
    2**20 - 1: "1.0 MiB",
    64 << 20: "64.0 MiB",
    2**63 - 1: "8.0 EiB",
}


@pytest.mark.parametrize(("nbytes", "text"), SIZES.items(), ids=map(str, SIZES))
def test_a_size_reads(nbytes, text):
    assert format_size(nbytes) == text


PACES = {
    (0, 0.0): "0 B in 1 ms",
    (52, 0.0123): "52 B in 12 ms",
    (52, 0.0996): "52 B in 100 ms",
    (2**30, 0.1): "1.0 GiB in 0.1 s, 10.0 GiB/s",
    (3 * 2**30, 12.34): "3.0 GiB in 12.3 s, 248.9 MiB/s",
}


@pytest.mark.parametrize(("done", "text"), PACES.items(), ids=PACES.values())
def test_a_pace_reads_without_a_rate_where_that_would_be_of_the_beginning(done, text):
    assert format_pace(*done) == text


def test_counts_agree_with_their_noun():
    assert format_count(1, "tensor") == "1 tensor"
    assert format_count(1024, "tensor") == "1,024 tensors"
    assert format_count(2, "entry", "entries") == "2 entries"


ESCAPES = {
    "newline": ("a\nb", r"a\nb"),
    "nul": ("a\0b", r"a\x00b"),
    "escape-sequence": ("\x1b[31m", r"\x1b[31m"),
    "c1-control": ("\x9b31m", r"\x9b31m"),
    "right-to-left-override": ("a\u202eb", r"a\u202eb"),
    "line-separator": ("a\u2028b", r"a\u2028b"),
    "tag": ("a\U000e0001b", r"a\U000e0001b"),
    "plain": ("layers.0/größe 重み", "layers.0/größe 重み"),
}


@pytest.mark.parametrize(("text", "escaped"), ESCAPES.values(), ids=ESCAPES)
def test_what_could_drive_a_terminal_is_escaped_and_can_be_typed_so(text, escaped):
    assert escape(text) == escaped
    assert unescape(escaped) == text


def test_no_character_but_space_is_printed_that_unicode_calls_control_format_or_separator():
    for code in range(0x110000):
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
            assert escape(chr(code)).isascii()


def test_short_text_is_not_shortened():
    assert fit("weight", 6) == "weight"


def test_long_text_loses_its_middle():
    assert fit("0123456789", 7) == "012…789"


def test_wide_characters_count_twice():
    assert cells("重み") == 4
    assert fit("重重重重", 5) == "重…重"


def test_characters_without_width_do_not_make_a_line_endless():
    assert len(fit("a" + "\u0301" * 10_000, 40)) <= 41


def test_a_name_of_ten_thousand_characters_is_shortened_at_once():
    assert len(fit("x" * 10_000, 200)) == 200


@pytest.fixture
def printed():
    """`printed(columns, rows, width)` gives the lines of a table."""

    def printed(columns, rows, width=None):
        out = io.StringIO()
        output = Output(out, io.StringIO())
        output.width = width
        output.table(columns, rows)
        return out.getvalue().splitlines()

    return printed


NAME, SIZE = Column("name", flexible=True), Column("size", right=True)


def test_columns_are_as_wide_as_what_they_hold(printed):
    assert printed([NAME, SIZE], [("a", "1"), ("bcdefg", "100 MiB")]) == [
        "name       size",
        "a             1",
        "bcdefg  100 MiB",
    ]


def test_columns_keep_their_width_in_later_batches(printed, monkeypatch):
    monkeypatch.setattr(render, "_BATCH", 1)
    assert printed([NAME, SIZE], [("abcdef", "1"), ("b", "2")])[1:] == [
        "abcdef     1",
        "b          2",
    ]


def test_a_table_without_rows_prints_nothing(printed):
    assert printed([NAME, SIZE], []) == []


def test_flexible_columns_share_what_a_terminal_has_left(printed):
    value = Column("value", flexible=True)
    lines = printed([NAME, SIZE, value], [("short", "1 B", "x" * 100)], width=40)
    assert lines[1] == "short   1 B  " + "x" * 13 + "…" + "x" * 13
    lines = printed([NAME, SIZE, value], [("n" * 50, "1 B", "x" * 100)], width=40)
    assert max(map(len, lines)) <= 41


def test_names_keep_sixteen_cells_on_the_narrowest_terminal(printed):
    assert printed([NAME, SIZE], [("n" * 30, "1 B")], width=5)[1].startswith("n" * 8 + "…n")


def test_wide_characters_keep_columns_aligned(printed):
    lines = printed([NAME, SIZE], [("重み", "1"), ("abcd", "2")])
    assert lines[1:] == ["重み     1", "abcd     2"]


def test_a_table_holds_a_batch_of_rows_at_most(printed):
    ready = []

    def rows():
        for number in range(5000):
            ready.append(number)
            yield (str(number), "1")
            if number == 4000:
                assert out.getvalue().count("\n") == 4001

    out = io.StringIO()
    assert Output(out, io.StringIO()).table([NAME, SIZE], rows()) == 5000
    assert len(ready) == 5000


def test_json_is_ascii_whatever_it_holds(printed):
    out = io.StringIO()
    Output(out, io.StringIO()).document({"name": "重み\x1b\u202e", "rows": iter(["é"])})
    assert out.getvalue().isascii()
    assert "\x1b" not in out.getvalue()
