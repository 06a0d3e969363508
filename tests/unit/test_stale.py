"""Figures that are old are marked: a dash in plain lines, faint in the dashboard's header."""

from __future__ import annotations

from ddpwatch.tui.models.overview import LinkState, OverviewBuilder
from ddpwatch.tui.paint.header import paint_header
from ddpwatch.viewer.plain import HEADER, line
from ddpwatch.viewer.state import STALE_NS, STALE_STEPS, RunState, Stale
from tests.support.frames import MS, beat, bye, light, run, state_of

SECOND = 10**9


def columns(state: RunState) -> dict[str, str]:
    """The figures of the newest plain line, by the start of their heading."""
    names = ("step", "it/s", "step ms", "overlap", "exposed ms")
    values = line(state, state.diagnosis.incidents()).replace(" %", "%").split()
    assert HEADER.split()[:2] == ["step", "it/s"]
    return dict(zip(names, values, strict=False))


def later(state: RunState, ns: int, *, steps: bool) -> RunState:
    """The same run so much later: with light steps of both ranks all the time, or with heartbeats only."""
    until, number = state.now_ns + ns, state.finished_steps
    while state.now_ns < until:
        at_ns = min(state.now_ns + SECOND, until)
        for rank in range(2):
            state.apply_message(light(rank, number) if steps else beat(rank, number), at_ns)
        number += 1
    return state


def test_figures_are_shown_while_they_are_new() -> None:
    found = columns(later(state_of(run(40)), STALE_NS - SECOND, steps=False))
    assert found["it/s"] == "10.00"
    assert "–" not in found.values()


def test_nothing_is_repeated_when_no_step_comes_any_more() -> None:
    found = columns(later(state_of(run(40)), STALE_NS + 1, steps=False))
    assert [found[name] for name in ("it/s", "step ms", "overlap", "exposed ms")] == ["–"] * 4


def test_what_only_full_steps_show_gets_old_by_itself() -> None:
    found = columns(later(state_of(run(40)), STALE_NS + SECOND, steps=True))
    assert found["it/s"] != "–"
    assert (found["overlap"], found["exposed ms"]) == ("–", "–")


def test_long_steps_get_old_more_slowly_and_an_ended_run_keeps_its_figures() -> None:
    state = later(state_of(run(40)), STALE_NS + 1, steps=False)
    assert state.stale(100 * MS) == Stale(steps=True, timed=True)
    assert state.stale(STALE_NS / STALE_STEPS + SECOND) == Stale()
    state.apply_message(bye(), state.now_ns)
    assert state.stale(100 * MS) == Stale()


def test_the_dashboard_s_old_figures_are_faint() -> None:
    def styles(state: RunState) -> dict[str, str]:
        return {text.split()[0]: style for text, style in paint_header(overview(state), 160)[1] if text.strip()}

    def overview(state: RunState):  # type: ignore[no-untyped-def]
        return OverviewBuilder().build(state, LinkState())

    fresh = styles(state_of(run(40)))
    assert (fresh["step"], fresh["overlap"]) == ("heading-strong", "heading-strong")
    old = styles(later(state_of(run(40)), STALE_NS + SECOND, steps=True))
    assert (old["step"], old["overlap"], old["exposed"]) == ("heading-strong", "heading-faint", "heading-faint")
