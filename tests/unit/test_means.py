"""The one statistic for time, worked out by hand, and over which rank-steps it is."""

from __future__ import annotations

from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.means import STARTING_STEPS, MeanBuilder, Means, Sums, merged, share_of_run
from ddpwatch.analysis.step import PHASES, StepFigures
from ddpwatch.report.text import render_report
from tests.support import frames
from tests.unit.test_analysis import make_step, run

PHASE_NS = st.integers(0, 10**12)


def figure(step: int, comm: int | None = 0, exposed: int | None = 0, **phases: int) -> StepFigures:
    return StepFigures(
        step, {"exposed_comm": exposed or 0, "other": 0, **phases}, comm, exposed, None, [], exposed or 0
    )


def test_two_steps_of_two_ranks() -> None:
    """Worked out by hand."""
    builder = MeanBuilder()
    builder.add_step(20, {0: figure(100, 30, 10), 1: figure(100, 20, 0)})
    builder.add_step(21, {0: figure(120, 50, 30), 1: figure(120, 20, 20)})
    ranks = builder.ranks()
    total = merged(ranks.values()).means()
    assert (total.step_ns, total.comm_ns, total.exposed_ns, total.overlap) == (110, 30, 15, 0.5)
    assert [ranks[rank].means().exposed_ns for rank in (0, 1)] == [20, 10]
    assert total.phases_ns["exposed_comm"] == 15
    overlaps = [20 / 30, 20 / 50, 20 / 20, 0 / 20]
    assert sum(overlaps) / 4 == pytest.approx(0.52, abs=0.005)


@given(
    st.lists(
        st.fixed_dictionaries({phase: PHASE_NS for phase in PHASES if phase != "data"}, optional={"data": PHASE_NS}),
        min_size=1,
        max_size=8,
    )
)
def test_means_of_phases_add_up(steps: list[dict[str, int]]) -> None:
    sums = Sums(StepFigures(sum(phases.values()), phases, 0, 0, None, []) for phases in steps)
    assert sum(sums.known_phases_ns.values()) == pytest.approx(sums.step_ns, rel=1e-12)
    assert (sums.phases_ns["data"] is None) == any("data" not in phases for phases in steps)


def mean_of(*steps: tuple[int, dict[int, StepFigures]]) -> tuple[float | None, int, int]:
    """The mean step of the given (number, figures), and how many rank-steps show phases, and communication."""
    builder = MeanBuilder()
    for number, figures in steps:
        builder.add_step(number, figures)
    known = merged(builder.ranks().values())
    return known.means().step_ns, known.watched.count, known.full.count


def test_ranks_are_compared_over_steps_that_all_of_them_sent() -> None:
    both, light = {0: figure(10), 1: figure(10)}, {0: figure(70, None, None), 1: figure(70, None, None)}
    half = {0: figure(10), 1: figure(70, None, None)}
    alone = {0: figure(70)}
    assert mean_of((20, both), (21, light), (22, half), (23, alone)) == (40, 6, 2)
    assert mean_of((20, light), (21, {0: figure(30, None, None)})) == (70, 2, 0)  # no completion is measured
    assert mean_of() == (None, 0, 0)


def test_the_first_steps_are_left_out_once_there_are_others() -> None:
    first = [(number, {0: figure(90)}) for number in range(STARTING_STEPS)]
    later = [(STARTING_STEPS + number, {0: figure(10)}) for number in range(3)]
    assert mean_of(*first, *later) == (10, 3, 3)
    assert mean_of(*first, *later[:2])[1] == STARTING_STEPS + 2


def test_ranks_average_to_the_run_and_their_phases_add_up() -> None:
    def means(step: float, forward: float, exposed: float, hidden: float) -> Means:
        phases = {"forward": forward, "exposed_comm": exposed, "other": step - forward - exposed}
        return Means(step, phases, exposed + hidden, exposed)

    own, every, run = [means(100, 30, 8, 4), means(102, 34, 4, 8)], means(101, 32, 6, 6), means(90, 28, 7, 5)
    ranks = [share_of_run(step, one, every, run) for step, one in zip((89, 91), own, strict=True)]
    assert [sum(one.phases_ns.values()) for one in ranks] == pytest.approx([89, 91])
    assert [one.phases_ns["forward"] / one.phases_ns["other"] for one in ranks] == pytest.approx([30 / 62, 34 / 64])
    assert fmean(one.exposed_ns or 0 for one in ranks) == pytest.approx(7)
    assert fmean(one.comm_ns or 0 for one in ranks) == pytest.approx(12)


def test_without_completions_nothing_is_said_of_communication() -> None:
    sums = Sums([figure(10, None, None), figure(10, 5, 5)])
    assert (sums.comm_ns, sums.exposed_ns, sums.overlap, sums.step_ns) == (None, None, None, 10)


def test_communication_is_at_least_what_is_exposed_of_it() -> None:
    """Of light steps only the wait is known, here 91 ms, and most steps are such."""
    builder = run(late_ms=30)
    for number in range(20, 60):
        for rank in (0, 1):
            step = make_step(rank, number, buckets=[(40, None), (70, None)], status="shadow")
            step.spans[2].end += 80_000_000
            step.duration_ns += 80_000_000
            builder.apply_message(step)
    report = builder.report()
    assert report.phases_ms["exposed_comm"] == report.overlap.exposed_ms
    assert report.overlap.comm_ms == pytest.approx(report.overlap.exposed_ms + 25)
    assert sum(ms for ms in report.phases_ms.values() if ms) == pytest.approx(report.steps.step_ms)
    assert f"exposed communication {report.overlap.exposed_ms:.1f} " in render_report(report)


def test_a_light_step_without_launches_has_not_hidden_its_communication() -> None:
    """On a GPU, light steps carry no launches: that is unknown, not nothing."""
    empty = {f"comm_{name}": [] for name in ("module", "label", "bytes", "ready", "launch", "done")}
    found = frames.state_of([frames.hello(0, 1), *(frames.light(0, n, **empty) for n in range(1, 20))]).recent()
    assert found[-1].figures[0].exposed_ns is None
    assert found[-1].figures[0].phases_ns["exposed_comm"] == 10 * frames.MS
