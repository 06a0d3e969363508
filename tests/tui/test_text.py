import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from ddpwatch.analysis.diagnosis.words.wording import buckets_named, ranks_named
from ddpwatch.common.text import ms, spans, three_digits
from ddpwatch.tui.paint.canvas import Canvas, plain
from ddpwatch.tui.text import Field, fit, flow, shorten, shorten_name, wrap

HOSTILE = [
    "\x1b[31mred\x1b[0m", "a\rb", "bell\x07", "\x9b2J", "\u202eevil", "zero\u200bwidth", "tab\there", "line\nbreak",
    "\x1b]0;title\x07", "e\u0301" * 20, "\U000e0041tag", "\ud800", "\ufeffbom", "\u2066iso\u2069", "\x7f",
]  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_names_lose_what_moves_the_cursor(name):
    cleaned = shorten_name(name, 12)
    assert cleaned.isprintable()
    assert cell_len(cleaned) == sum(max(cell_len(c), 1) for c in cleaned) <= 12


@given(st.text(max_size=200), st.integers(0, 40))
def test_a_clean_name_is_never_wider_than_asked(name, width):
    assert cell_len(shorten_name(name, width)) <= width


def test_wide_characters_count_as_two_cells():
    assert shorten_name("模型模型", 5) == "模型…"
    assert shorten_name("模型", 4) == "模型"


@given(st.text(max_size=40), st.integers(1, 20), st.integers(-3, 20))
def test_a_canvas_row_is_always_as_wide_as_the_canvas(text, width, x):
    canvas = Canvas(width, 1)
    canvas.put(x, 0, shorten_name(text, 40), "a")
    canvas.put(2, 0, "界", "b")
    canvas.put(3, 0, "x", "c")
    (row,) = canvas.rows()
    assert cell_len("".join(run for run, _ in row)) == width


def test_runs_join_equal_cells():
    canvas = Canvas(6, 1)
    canvas.fill(1, 3, 0, "=", "a")
    canvas.fill(3, 5, 0, "-", "a")
    assert canvas.rows() == [[(" ", "text"), ("==--", "a"), (" ", "text")]]
    assert plain(canvas.rows()) == [" ==--"]


def test_drawing_outside_is_cut_off():
    canvas = Canvas(3, 1)
    canvas.put(-1, 0, "abcdef")
    canvas.put(0, 5, "x")
    canvas.fill(-5, 50, -1, "x", "a")
    assert plain(canvas.rows()) == ["bcd"]


def test_unknown_is_a_dash_never_zero():
    assert ms(None) == three_digits(None) == "–"
    assert ms(0) == "0.0"


@pytest.mark.parametrize(("value", "text"), [(123.4, "123"), (12.34, "12.3"), (1.234, "1.23"), (0, "0.0")])
def test_numbers_have_three_digits(value, text):
    assert three_digits(value) == text


def test_fit_prefers_full_then_short_then_drops_the_least():
    fields = [Field("alpha one", "a1", 0), Field("beta two", "b2", 1), Field("gamma", "g", 2)]
    assert "".join(text for text, _ in fit(fields, 40)) == "alpha one   beta two   gamma"
    assert "".join(text for text, _ in fit(fields, 10)) == "a1  b2  g"
    assert "".join(text for text, _ in fit(fields, 6)) == "a1  b2"
    assert "".join(text for text, _ in fit(fields, 1)) == "…"
    assert fit([], 10) == []


def test_wrap_breaks_between_words_and_cuts_the_last_line():
    assert wrap("one two three four", 9, 2) == ["one two", "three …"]
    assert wrap("", 9, 2) == [""]
    assert wrap("x", 0, 2) == []


def test_shorten_to_nothing():
    assert shorten("abc", 0) == ""
    assert shorten("abc", 1) == "…"


def test_runs_of_numbers_are_spans():
    assert spans([0, 1, 2, 3, 5, 7, 8]) == "0–3,5,7,8"
    assert spans(range(616, 624)) == "616–623"
    assert spans([0, 2, 4, 6, 8]) == "0,2,4,6…"
    assert spans([]) == ""
    assert ranks_named([0, 1, 2, 3, 4, *range(6, 16)]) == "ranks 0–4, 6–15"
    assert ranks_named([2, 3]) == "ranks 2, 3"
    assert ranks_named(range(0, 14, 2)) == "ranks 0, 2, 4, 6, 8, 10 …"
    assert buckets_named([1]) == "bucket 1"


def test_no_part_is_broken_between_lines():
    assert flow(["late 30 ms", "step 120 ms", "group 0–7"], 24, 3) == ["late 30 ms · step 120 ms", "group 0–7"]
    assert flow(["aaaa", "bbbb", "cccc"], 6, 2) == ["aaaa", "bbbb …"]
    assert flow(["aaaa", "bbbb", "cccc"], 5, 2) == ["aaaa", "bbbb"]
    assert flow([], 10, 2) == []
