"""What ddpwatch has stopped seeing, as its users read it."""

from __future__ import annotations

from ddpwatch.analysis.diagnosis.words.turned_off import TurnedOff
from ddpwatch.analysis.findings import notes
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.tui.models.overview import Overview
from ddpwatch.tui.paint.header import paint_header
from ddpwatch.viewer.plain import line
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import WATCHING, Mark, decode, encode


def off(rank: int, feature: str, step: int | None, reason: str = "KeyError in hooks.close") -> Mark:
    return Mark(rank=rank, name=f"ddpwatch stops something: {reason}", start_ns=5, off=feature, step=step)


MARKS = [
    off(2, "bucket layouts", 7),
    off(0, "bucket layouts", 9, "KeyError: no: such in a.b"),
    off(1, WATCHING, 12),
    off(1, WATCHING, 13, "another"),
    Mark(rank=3, name="epoch: 1", start_ns=5),
]


def test_it_names_what_is_off_on_which_ranks_since_when_and_why() -> None:
    found = TurnedOff()
    for mark in MARKS:
        found.apply_message(decode(encode(mark)))
    assert [one.message for one in found.found()] == [
        "rank 1 is not watched from step 12 on: KeyError in hooks.close",
        "no bucket layouts of ranks 0, 2 from step 7 on: KeyError: no: such in a.b",
    ]
    assert found.has("stacks")  # of rank 1
    assert not TurnedOff().has("stacks")


def test_a_report_has_it_among_its_notes() -> None:
    builder = ReportBuilder()
    for mark in MARKS:
        builder.apply_message(mark)
    made = builder.report()
    report = made.as_json()
    assert [note.message[:24] for note in notes(made)] == ["rank 1 is not watched fr", "no bucket layouts of ran"]
    assert report["off"][1] == {
        "feature": "bucket layouts",
        "ranks": [0, 2],
        "step": 7,
        "reason": "KeyError: no: such in a.b",
        "message": "no bucket layouts of ranks 0, 2 from step 7 on: KeyError: no: such in a.b",
    }


def test_the_header_and_the_plain_lines_have_it() -> None:
    state = RunState()
    assert "not watched" not in line(state, [])
    for mark in MARKS:
        state.apply_message(mark, 1)
    assert "  rank 1 not watched; no bucket layouts; " in line(state, [])
    rows = paint_header(Overview(off="no bucket layouts"), 120)
    assert "no bucket layouts" in "".join(text for text, _ in rows[0])
