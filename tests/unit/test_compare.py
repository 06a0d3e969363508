"""Comparing runs: no difference where there is none, the right one where there is, and what the exit code says."""

from __future__ import annotations

import random
from pathlib import Path
from statistics import fmean

import pytest

from ddpwatch.analysis.compare import RunComparison, RunDifference, RunSeries, changes, compare, setup_of
from ddpwatch.analysis.step import PHASES
from ddpwatch.errors import DdpwatchError, UnclearError, UsageError
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import compare_recordings, parse_percent, slower_than
from ddpwatch.report.compare_text import render_compare
from ddpwatch.wire.messages import Bye
from tests.support.frames import hello
from tests.support.frames import run as fleet_of
from tests.support.runs import BEGIN, MS, record, run_of

pytestmark = pytest.mark.same_everywhere


def series(
    name: str, seed: int, steps: int = 200, slower: float = 1.0, exposed: float = 10.0, stays: float = 0.5,
    noise: float = 1.0,
) -> RunSeries:  # fmt: skip
    """A run whose noise remembers (so much of it stays for the next step), with outliers."""
    dice, memory, run = random.Random(seed), 0.0, RunSeries(name)
    for _ in range(steps):
        memory = stays * memory + dice.gauss(0, noise)
        value = (100 + memory + (50 if dice.random() < 0.02 else 0)) * slower + exposed
        run.step.append(value)
        for phase in PHASES:
            run.phases[phase].append(exposed if phase == "exposed_comm" else (value - exposed) / (len(PHASES) - 1))
    return run


def test_runs_of_one_kind_do_not_differ() -> None:
    verdicts = [compare(series("A", seed), series("B", 1000 + seed)).verdict for seed in range(30)]
    assert verdicts.count("same") >= 29


@pytest.mark.parametrize("stays", [0.0, 0.8, 0.9])
def test_noise_that_remembers_does_not_look_like_a_difference(stays: float) -> None:
    """Less than one false alarm is to be expected. Were steps taken as independent: 17 at 0.8, 22 at 0.9."""
    pairs = [
        (series("A", n, 300, stays=stays, noise=4), series("B", 1000 + n, 300, stays=stays, noise=4)) for n in range(60)
    ]
    verdicts = [compare(a, b).verdict for a, b in pairs]
    assert sum(verdict in ("slower", "faster") for verdict in verdicts) <= 2


def test_five_percent_are_found() -> None:
    verdicts = [compare(series("A", seed), series("B", 1000 + seed, slower=1.05)).verdict for seed in range(10)]
    assert verdicts == ["slower"] * 10


def test_the_words_name_the_cause() -> None:
    found = compare(series("A", 1, exposed=41), series("B", 2, exposed=18))
    assert found.verdict == "faster"
    assert found.phase == "exposed_comm"
    assert found.low is not None
    assert found.high is not None
    assert found.low < -23 / 141 < found.high
    assert "% faster than A (" in found.text
    assert found.text.endswith(", because exposed communication fell from 41 to 18 ms")


def test_noise_that_could_hide_much_is_not_called_equal() -> None:
    def noisy(name: str, seed: int) -> RunSeries:
        dice, run = random.Random(seed), RunSeries(name)
        run.step = [dice.uniform(50, 150) for _ in range(60)]
        run.phases = {phase: [value / len(PHASES) for value in run.step] for phase in PHASES}
        return run

    found = compare(noisy("A", 1), noisy("B", 2))
    assert found.verdict == "unclear"
    assert "could hide in the noise" in found.text


def test_a_change_of_overlap_is_told_whatever_the_step_time() -> None:
    a, b = series("A", 1), series("B", 2)
    dice = random.Random(3)
    a.overlap = [0.6 + dice.gauss(0, 0.03) for _ in a.step]
    b.overlap = [0.8 + dice.gauss(0, 0.03) for _ in b.step]
    found = compare(a, b)
    assert found.verdict == "same"
    assert found.overlap is not None
    assert 0.15 < found.overlap[1] < found.overlap[2] < 0.25
    assert "; overlap rose from 60% to 80% (" in found.text
    a.shown_overlap, b.shown_overlap = 0.57, 0.78  # as the page has them
    shown = compare(a, b)
    assert shown.overlap is not None
    assert shown.overlap[0] == pytest.approx(0.21)
    assert "; overlap rose from 57% to 78% (" in shown.text
    a.shown_overlap = b.shown_overlap = None
    b.overlap = [0.6 + dice.gauss(0, 0.03) for _ in b.step]
    assert compare(a, b).overlap is None


def test_another_set_up_is_named_whatever_the_verdict() -> None:
    runs = [series("a", 1), series("b", 2), RunSeries("c")]
    for run, ranks, parameters in zip(runs, (2, 4, 4), (1_000_000, 1_000_000, 13), strict=True):
        run.setup = setup_of(hello(0, world_size=ranks, parameters=parameters))
    a, b, c = runs
    assert compare(a, b).text.endswith("; not the same set-up: ranks 2 and 4")
    assert compare(b, c).text.endswith("; not the same set-up: parameters 1,000,000 and 13")
    c.setup = b.setup | {"script": "other.py"}
    assert compare(b, c).text.endswith(f"; not the same set-up: script {b.setup['script']} and other.py")
    b.setup = setup_of(None)  # nothing is known of it
    assert "set-up" not in compare(a, b).text + compare(a, a).text


def test_too_few_steps_are_not_judged() -> None:
    found = compare(series("A", 1, steps=5), series("B", 2))
    assert (found.verdict, found.ratio) == ("unknown", None)
    assert found.text == "A has 5 steps to compare; 20 are needed"


def longer(run: RunSeries, by: float, which: range) -> RunSeries:
    """Makes some of its steps longer: a rank pauses before them, and the other waits."""
    for step in range(len(run.step)):
        extra = by if step in which else 0.0
        run.step[step] += extra
        for phase in ("between", "exposed_comm"):
            run.phases[phase][step] += extra / 2
        for phase in PHASES:
            alone = {"between": extra / 2, "exposed_comm": -extra / 2}.get(phase, 0.0)
            run.waited_for[phase].append(run.phases[phase][step] + alone)
    return run


def test_what_happens_every_twentieth_step_is_paid_and_told() -> None:
    """A median does not see it: it said that there was no difference."""
    a, b = longer(series("A", 1, 400), 0, range(0)), longer(series("B", 2, 300), 500, range(19, 300, 20))
    found = compare(a, b)
    assert (found.verdict, found.phase) == ("slower", "between")
    assert found.ratio == pytest.approx(fmean(b.step) / fmean(a.step) - 1)
    assert found.low is not None
    assert found.low > 0.05
    assert "because the gap before the forward of the rank that others waited for rose from 17 to 42 ms; " in found.text
    assert "; the median step takes as long (110 and 110 ms), but 15 of 300 steps of B take 610 ms" in found.text
    change = changes(a, b)["step"]
    assert change is not None
    assert (change.certain, change.by) == (True, pytest.approx(fmean(b.step) - fmean(a.step)))
    a.shown, b.shown = {"forward": 20.0, "backward": None}, {"forward": 21.5, "backward": 30.0}  # as the page has them
    found_changes = changes(a, b)
    assert found_changes["forward"] is not None
    assert found_changes["forward"].by == 1.5
    assert found_changes["backward"] is None


def test_what_starts_half_way_is_unclear_and_never_no_difference() -> None:
    found = compare(series("A", 1, 300), longer(series("B", 2, 300), 60, range(140, 300)))
    assert found.verdict == "unclear"
    assert found.text.startswith("unclear whether B is slower or faster than A (+28.")
    assert "; the median step takes 5" in found.text
    assert "no difference" not in found.text


@pytest.mark.parametrize(
    ("verdict", "interval", "code"),
    [
        ("slower", (0.3, 0.12, 0.48), 1),
        ("slower", (0.06, 0.01, 0.11), 3),
        ("slower", (0.03, 0.02, 0.04), 0),
        ("unclear", (0.3, -0.2, 0.8), 3),
        ("unclear", (-0.1, -0.24, 0.04), 0),
        ("same", (0.01, -0.02, 0.04), 0),
        ("faster", (-0.3, -0.4, -0.2), 0),
        ("unknown", (None, None, None), 1),
    ],
)
def test_the_gate_tells_what_is_unclear_from_what_is_no_difference(
    verdict: str, interval: tuple[float | None, ...], code: int
) -> None:
    found = RunDifference("a", "b", *interval, verdict, "", None, "b", [], [])  # type: ignore[arg-type]
    comparison = RunComparison([], [found])
    if code == 0:
        slower_than(comparison, 0.05)
        return
    with pytest.raises(UnclearError if code == 3 else DdpwatchError) as error:
        slower_than(comparison, 0.05)
    assert error.value.exit_code == code


def test_recordings_are_compared(tmp_path: Path) -> None:
    a = record(tmp_path / "a.mcap", run_of(steps=60, seed=1))
    b = record(tmp_path / "b.mcap", run_of(steps=60, seed=2, slower=1.2))
    result = compare_recordings([a, b])
    assert [run.steps for run in result.runs] == [59, 59]
    difference = result.differences[0]
    assert (difference.a, difference.b, difference.verdict, difference.phase) == (
        "a",
        "b",
        "slower",
        "backward",
    )
    assert difference.ratio == pytest.approx(0.2, abs=0.02)
    text = render_compare(result)
    a_ms, b_ms = (run.step_ms or 0.0 for run in result.runs)  # the table's
    assert difference.ratio == pytest.approx(b_ms / a_ms - 1)
    assert f"b is {difference.ratio:.1%} slower than a".replace("%", " %") in text
    slower_than(result, 0.25)
    with pytest.raises(DdpwatchError, match=r"more than 5\.0%") as error:
        slower_than(result, 0.05)
    assert error.value.exit_code == 1


@pytest.mark.parametrize(("world", "exposed_ms"), [(8, 45), (2, 30)])
def test_a_late_rank_explains_what_the_others_waited(tmp_path: Path, world: int, exposed_ms: int) -> None:
    """Seven of eight ranks wait 40 ms longer, so exposed communication rises most, and explains nothing.

    Of two ranks, it rises as much as the late one's backward does in the mean.
    """
    runs = {"healthy": fleet_of(60, world=world), "late": fleet_of(60, world=world, late_rank=world - 1, late_ms=40)}
    paths = [
        record(tmp_path / f"{name}.mcap", ((message, BEGIN + number * MS) for number, message in enumerate(run)))
        for name, run in runs.items()
    ]
    result = compare_recordings(paths)
    assert [run.phases_ms_p50["exposed_comm"] for run in result.runs] == [10, exposed_ms]
    assert result.differences[0].phase == "backward"
    because = "because the backward of the rank that others waited for rose from 49 to 89 ms"
    assert because in result.differences[0].text


@pytest.mark.parametrize("swapped", [False, True])
def test_the_death_of_one_run_comes_before_its_steps(tmp_path: Path, swapped: bool) -> None:
    kill = Bye(rank=1, by="collector", reason="killed", detail="SIGKILL", signal=9, at_ns=BEGIN + 9_000 * MS, step=60)
    runs = {"whole": fleet_of(60), "killed": [*fleet_of(60), kill]}
    paths = [
        record(tmp_path / f"{name}.mcap", ((message, BEGIN + number * MS) for number, message in enumerate(run)))
        for name, run in runs.items()
    ]
    (found,) = compare_recordings(paths[::-1] if swapped else paths).differences
    names = "killed and whole" if swapped else "whole and killed"
    assert found.text.startswith("only killed: rank 1 was killed (SIGKILL)")
    assert f"; by their steps, no difference between {names}" in found.text
    assert found.incidents[0].kind == "death"


def test_that_somebody_stopped_one_of_two_runs_is_no_difference(tmp_path: Path) -> None:
    stopped = Bye(rank=1, by="rank", reason="exception", detail="KeyboardInterrupt", at_ns=BEGIN + 9_000 * MS, step=60)
    runs = {"whole": fleet_of(60), "stopped": [*fleet_of(60), stopped]}
    paths = [
        record(tmp_path / f"{name}.mcap", ((message, BEGIN + number * MS) for number, message in enumerate(run)))
        for name, run in runs.items()
    ]
    (found,) = compare_recordings(paths).differences
    assert found.text.startswith("no difference between whole and stopped")
    assert not found.incidents


def test_what_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="two recordings"):
        compare_recordings([record(tmp_path / "a.mcap")]).as_json()
    with pytest.raises(UsageError, match="none of the selected steps and ranks"):
        compare_recordings([tmp_path / "a.mcap", record(tmp_path / "b.mcap")], Selection(first=500)).as_json()


@pytest.mark.parametrize(("text", "meant"), [("5%", 0.05), ("5", 0.05), ("0", 0.0), ("2.5 %", 0.025)])
def test_percentages(text: str, meant: float) -> None:
    assert parse_percent(text) == pytest.approx(meant)


@pytest.mark.parametrize("text", ["", "five", "-1%", "nan"])
def test_what_is_no_percentage(text: str) -> None:
    with pytest.raises(UsageError):
        parse_percent(text)


def test_a_gap_of_which_one_run_knows_the_waits_is_no_cause() -> None:
    """Without a DataLoader all of the gap is 'between'; with one, the waits for data are not part of it."""
    old, new = series("old", 1), series("new", 2)
    old.step, old.phases["data"] = [value + 30 for value in old.step], []
    old.phases["between"] = [value + 30 for value in old.phases["between"]]
    assert compare(new, old).verdict == "slower"
    assert compare(new, old).phase == ""
    assert changes(new, old)["between"] is None
