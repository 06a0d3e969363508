"""Which steps are recorded in full: as many as the budget allows, the same ones on all ranks, in no rhythm."""

from __future__ import annotations

import random
from collections.abc import Mapping
from zlib import crc32

import pytest

from ddpwatch.sampling.schedule import (
    BARE_PERIOD,
    FULL_BUDGET,
    LONGEST_FULL_PERIOD,
    STEPS_PER_DECISION,
    WATCHED_BUDGET,
    SamplingPeriod,
    SamplingSchedule,
    is_sampled,
    schedule_of,
)

pytestmark = [
    pytest.mark.same_everywhere,
    pytest.mark.xdist_group("test_sampling_schedule"),
    pytest.mark.seconds(12),
]  # not last
MS = 1_000_000
PERIODS = (1, 2, 4, 8, 16, 32, 64)
BUDGET, COST_PER_OWN, LONGEST = 0.003, 10, 32


@pytest.mark.parametrize("period", PERIODS)
def test_one_step_of_each_period_is_chosen(period: int) -> None:
    for block in range(200):
        assert sum(is_sampled(step, period) for step in range(block * period, (block + 1) * period)) == 1


def test_the_step_of_a_period_is_known_beforehand() -> None:
    """In whatever order steps come, and while the period changes."""
    dice, period = random.Random(0), SamplingPeriod(BUDGET, COST_PER_OWN, LONGEST)
    for _ in range(5000):
        step = dice.randrange(1000)
        period.value = dice.choice(PERIODS) if dice.random() < 0.1 else period.value
        chosen = period.chosen(step)
        assert chosen // period.value == step // period.value
        assert is_sampled(chosen, period.value)


def test_ranks_with_different_periods_choose_the_same_steps_as_far_as_they_can() -> None:
    for longer, shorter in zip(PERIODS[1:], PERIODS, strict=False):
        assert all(is_sampled(step, shorter) for step in range(4096) if is_sampled(step, longer))


def scheduled(full: int, watched: int = 1) -> SamplingSchedule:
    schedule = SamplingSchedule()
    schedule.full.value, schedule.watched.value = full, watched
    return schedule


@pytest.mark.parametrize("full", PERIODS)
def test_at_least_one_step_in_32_is_not_watched_and_lies_between_two_of_one_kind(full: int) -> None:
    schedule = scheduled(full)
    bare = [step for step in range(32_000) if schedule.is_bare(step)]
    assert len(bare) == 32_000 / BARE_PERIOD - 1  # none at the start
    alike = sum(schedule.is_light(step - 1) == schedule.is_light(step + 1) for step in bare)
    assert alike > (0.4 if full == 2 else 0.85) * len(bare)


@pytest.mark.parametrize("watched", [2, 4, 8])
def test_of_the_steps_that_are_watched_the_full_ones_are_some(watched: int) -> None:
    schedule = scheduled(64, watched)
    steps = range(64, 64 + 64_000)
    seen = [step for step in steps if not schedule.is_bare(step)]
    assert 0.9 < len(seen) * watched / len(steps) <= 1
    assert sum(not schedule.is_light(step) for step in seen) == len(steps) / 64


@pytest.mark.parametrize("rhythm", [2, 4, 8, 10, 16, 100])
def test_the_choice_has_no_rhythm(rhythm: int) -> None:
    """What a job does every so many steps meets full steps as often as any other step does."""
    steps = range(0, 64_000, rhythm)
    assert sum(is_sampled(step, 8) for step in steps) / len(steps) == pytest.approx(1 / 8, rel=0.15)


def taught(own_ns: int, step_ns: int, period: SamplingPeriod | None = None) -> SamplingPeriod:
    period = period or SamplingPeriod(BUDGET, COST_PER_OWN, LONGEST)
    for _ in range(STEPS_PER_DECISION):
        period.learn(own_ns, step_ns)
    return period


def test_a_cheap_step_is_always_taken() -> None:
    assert taught(int(BUDGET * 100 * MS / COST_PER_OWN / 2), 100 * MS).value == 1
    assert not any(scheduled(1).is_light(step) for step in range(1600))
    assert not any(scheduled(1).is_bare(step) for step in range(BARE_PERIOD))


@pytest.mark.parametrize("times", [1.5, 3, 7, 15])
def test_a_costly_step_is_taken_as_often_as_the_budget_allows(times: float) -> None:
    """Its cost, spread over all steps, is within the budget, and more than half of it is used."""
    period = taught(int(times * BUDGET * 100 * MS / COST_PER_OWN), 100 * MS)
    assert 0.45 <= times / period.value <= 1.01


def test_a_period_has_an_end_and_comes_back() -> None:
    period = taught(50 * MS, 100 * MS)
    assert period.value == LONGEST
    assert taught(1000, 100 * MS, period).value == 1


def test_one_dear_step_of_a_loop_is_enough_to_learn_that() -> None:
    """A thousand collectives, say. DDP's first steps are full at any cost, and others until eight have taught."""
    for settles, own_ns, full in ((False, 20 * MS, 1), (True, 20 * MS, 12), (False, MS, 8)):
        schedule, found = SamplingSchedule(settles=settles), 0
        for step in range(20):
            is_full = not schedule.is_light(step)
            found += is_full
            schedule.learn("ok" if is_full else "shadow", own_ns if is_full else 1000, 45 * MS)
        assert full <= found <= full + 1, (settles, own_ns)


def test_a_period_does_not_flutter() -> None:
    """A little less than before is no reason to change."""
    period = taught(int(3 * BUDGET * 100 * MS / COST_PER_OWN), 100 * MS)
    assert period.value == 4
    assert taught(int(1.5 * BUDGET * 100 * MS / COST_PER_OWN), 100 * MS, period).value == 4


def costing(light: float, full: float) -> SamplingSchedule:
    """A schedule that has learnt what a light step costs, and what a full one adds, as shares of a step of 100 ms."""
    schedule = SamplingSchedule()
    for _ in range(STEPS_PER_DECISION):
        schedule.learn("shadow", round(light * 100 * MS / 2), 100 * MS)
        schedule.learn("ok", round(full * 100 * MS / 6), 100 * MS)
    return schedule


def levels(schedule: SamplingSchedule, steps: range) -> list[str]:
    return ["-" if schedule.is_bare(n) else "s" if schedule.is_light(n) else "f" for n in steps]


STEPS = range(6400, 6400 + 3200)


@pytest.mark.parametrize("light", [0.0001, 0.001, 0.002, 0.004, 0.006, 0.02])
@pytest.mark.parametrize("full", [0.0001, 0.002, 0.004, 0.01, 0.05, 0.3])
@pytest.mark.parametrize("budget", [0.01, 0.003, 0.1])
def test_a_lease_spends_its_budget_and_no_more(budget: float, full: float, light: float) -> None:
    """Or what watching costs without one. Less than half is spent only if every step is full."""

    def spent() -> float:
        chosen = levels(schedule, STEPS)
        return (light * (len(chosen) - chosen.count("-")) + full * chosen.count("f")) / len(chosen)

    schedule = costing(light, full)
    without = spent()
    schedule.follow(round(budget * 1e6))
    assert spent() <= 1.000001 * max(budget, without)
    assert spent() > 0.4 * budget or schedule.full.value == 1
    chosen = levels(schedule, STEPS)
    assert chosen.count("-") <= (len(chosen) / 32 if light <= budget / 2 else len(chosen) / 2)


@pytest.mark.parametrize(
    ("light", "full", "chosen"),
    [(0.001, 0.0005, 785448588), (0.001, 0.004, 205748465), (0.004, 0.004, 2959843179), (0.004, 0.3, 3557624088)],
)
def test_without_a_lease_nothing_has_changed(light: float, full: float, chosen: int) -> None:
    """The checksums are those of the schedule before there were leases."""
    schedule = costing(light, full)
    schedule.follow(0)
    assert crc32("".join(levels(schedule, STEPS)).encode()) == chosen


@pytest.mark.parametrize("budget", [1, 2_000, 1_000_000])
def test_a_lease_never_asks_for_less_and_leaves_nothing_behind(budget: int) -> None:
    schedule = costing(0.004, 0.01)
    before = levels(schedule, STEPS)
    schedule.follow(budget)
    assert levels(schedule, STEPS).count("f") >= before.count("f")
    assert levels(schedule, STEPS).count("-") <= before.count("-")
    schedule.follow(0)
    assert levels(schedule, STEPS) == before


def test_with_a_budget_of_everything_all_watched_steps_are_full_whatever_they_cost() -> None:
    schedule = costing(0.9, 3.0)
    schedule.follow(1_000_000)
    schedule.learn("ok", 100 * MS, 100 * MS)
    assert levels(schedule, STEPS).count("f") == len(STEPS) * 31 // 32


def test_full_steps_come_at_once() -> None:
    """From the first step of the lease on, which is known beforehand: not after another `STEPS_PER_DECISION`."""
    schedule = costing(0.001, 0.004)
    assert levels(schedule, range(1024, 1088)).count("f") == 8
    schedule.follow(10_000)
    assert levels(schedule, range(1088, 1120)).count("f") == 31


def test_a_lease_goes_by_what_is_learnt_meanwhile() -> None:
    schedule = costing(0.001, 0.004)
    schedule.follow(10_000)
    for _ in range(STEPS_PER_DECISION):
        schedule.learn("ok", round(0.03 * 100 * MS / 6), 100 * MS)
    assert schedule.full.value == 4
    for _ in range(STEPS_PER_DECISION):
        schedule.learn("shadow", round(0.008 * 100 * MS / 2), 100 * MS)
        schedule.learn("ok", round(0.03 * 100 * MS / 6), 100 * MS)
    assert (schedule.watched.value, schedule.full.value) == (2, 8)


def test_ranks_with_other_costs_share_the_full_steps_of_the_one_with_fewer() -> None:
    one, other = costing(0.001, 0.004), costing(0.001, 0.03)
    for schedule in (one, other):
        schedule.follow(10_000)
    full = [{n for n in STEPS if not s.is_bare(n) and not s.is_light(n)} for s in (one, other)]
    assert full[1] < full[0]


def watched_of(schedule: SamplingSchedule | None) -> list[int]:
    """The steps that are watched once their cost was found to be high."""
    assert schedule is not None
    taught(100 * MS, 100 * MS, schedule.watched)
    return [step for step in range(BARE_PERIOD, 64_000) if not schedule.is_bare(step)]


@pytest.mark.parametrize(
    ("detail", "full"), [("", 1 / 64), ("low", 1 / 64), ("normal", 1 / 8), ("2%", 1 / 4), ("high", 31 / 32)]
)
def test_a_detail_without_a_viewer(detail: str, full: float, caplog: pytest.LogCaptureFixture) -> None:
    """Of steps of 10 ms, with the cost that was measured."""
    job = Simulated(0.1, 0.3, {"DDPWATCH_DETAIL": detail}).run(16_384, 10)
    assert job.share("f") == pytest.approx(full, rel=0.05)
    assert not caplog.messages


def test_a_lease_gives_no_less_than_the_job_s_own_detail() -> None:
    job = Simulated(0.1, 0.3, {"DDPWATCH_DETAIL": "high"})
    job.lease_ppm = 10_000
    assert job.run(16_384, 10).share("f") == pytest.approx(31 / 32)


def test_rank_files_are_recordings_which_ask_for_more() -> None:
    assert Simulated(0.1, 0.3, {"DDPWATCH_RECORD_DIR": "/tmp"}).run(16_384, 10).share("f") == pytest.approx(1 / 8)


def test_everything_can_be_asked_for_and_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    assert schedule_of({"DDPWATCH_DETAIL": "full"}) is None
    assert not caplog.messages
    assert watched_of(schedule_of({"DDPWATCH_DETAIL": "most"})) == watched_of(schedule_of({}))
    (message,) = caplog.messages
    assert "'most'" in message
    assert "low, normal, high" in message


@pytest.mark.parametrize("step_ns", [50 * MS, 100 * MS, 250 * MS, 1000 * MS])
def test_of_twenty_steps_enough_are_watched_to_name_a_rank(step_ns: int) -> None:
    """A rank that becomes slow is named within 20 steps (`ddpwatch.analysis.window`), by seven late ones of eight."""
    schedule = SamplingSchedule()
    taught(200_000, step_ns, schedule.watched)
    for first in range(64, 6400):
        assert sum(not schedule.is_bare(step) for step in range(first, first + 18)) >= 8


NOTHING_SET: Mapping[str, str] = {}


class Simulated:
    """A rank whose steps cost what they are said to cost (ms): a light step, and a full one in addition to that."""

    def __init__(
        self, light_ms: float, full_ms: float, environment: Mapping[str, str] = NOTHING_SET, light: bool = True
    ) -> None:
        schedule = schedule_of(environment, light)
        assert schedule is not None
        self.schedule, self.number, self.lease_ppm = schedule, 0, 0
        self._cost = {"-": 0.0, "s": light_ms, "f": full_ms}
        self.levels: dict[int, str] = {}

    def run(self, steps: int, step_ms: float) -> Simulated:
        for number in range(self.number, self.number + steps):
            self.schedule.follow(self.lease_ppm)
            (level,) = levels(self.schedule, range(number, number + 1))
            self.levels[number] = level
            own_ms = self._cost[level] / {"-": 1, "s": 2, "f": 6 if self.schedule._light else 2}[level]
            name = {"-": "unwatched", "s": "shadow", "f": "ok"}[level]
            self.schedule.learn(name, round(own_ms * MS), round(step_ms * MS))
        self.number += steps
        return self

    def share(self, kinds: str, newest: int = 8192) -> float:
        return sum(level in kinds for level in list(self.levels.values())[-newest:]) / newest

    def watched(self) -> set[int]:
        return {number for number, level in self.levels.items() if level != "-"}


SHORT_MS = (0.5, 1.5, 2, 2.7, 5, 10, 20, 40)


@pytest.mark.parametrize("step_ms", [1.5, 2, 2.7, 5, 10, 20, 50, 100])
def test_the_budget_is_kept_where_steps_are_short(step_ms: float) -> None:
    """With the cost that was measured, 0.1 ms per light step and 0.3 ms more per full one."""
    job = Simulated(light_ms=0.1, full_ms=0.3).run(16_384, step_ms)
    assert (0.1 * job.share("sf") + 0.3 * job.share("f")) / step_ms <= WATCHED_BUDGET + FULL_BUDGET


@pytest.mark.parametrize("step_ms", SHORT_MS)
@pytest.mark.parametrize(("light", "per_s"), [(True, 10), (False, 2.5)])
def test_however_dear_enough_steps_per_second_are_watched(step_ms: float, light: bool, per_s: float) -> None:
    """10, a quarter without light steps; and a full one per second, or one of 64."""
    job = Simulated(5, 20, light=light).run(16_384, step_ms)
    assert per_s <= job.share("sf") * 1000 / step_ms <= (2.01 * per_s if step_ms > 1 else 8 * per_s)
    full = job.share("f") * 1000 / step_ms
    assert full > 1 or job.share("f") >= 1 / LONGEST_FULL_PERIOD


@pytest.mark.parametrize("step_ms", SHORT_MS)
def test_all_steps_can_be_watched_however_short(step_ms: float) -> None:
    assert Simulated(5, 20, {"DDPWATCH_DETAIL": "high"}).run(16_384, step_ms).share("sf") == 1 - 1 / BARE_PERIOD


def test_when_steps_become_long_most_are_watched_soon() -> None:
    """Not when enough watched steps have been seen again, which took minutes."""
    job = Simulated(0.2, 0.4).run(4096, 2.7)
    assert job.schedule.watched.value == 32
    job.run(2, 200)
    assert job.schedule.watched.value == 2
    assert job.schedule.full.value <= LONGEST_FULL_PERIOD
    job.run(200, 1000)
    assert job.schedule.watched.value == 1


def test_one_long_step_changes_little() -> None:
    job = Simulated(0.2, 0.4).run(4096, 2.7)
    before = job.schedule.watched.value
    job.run(1, 1000).run(64, 2.7)
    assert job.schedule.watched.value == before


@pytest.mark.parametrize("step_ms", [2.7, 6.25, 10, 20])
def test_ranks_with_other_costs_and_durations_share_enough_steps(step_ms: float) -> None:
    """6.25 ms is where the longest period changes: ranks see durations that differ a little."""
    dice, ranks = random.Random(1), [Simulated(cost, 4 * cost) for cost in (0.01, 0.03, 0.1, 0.3)]
    for _ in range(16_384 // 8):
        for rank in ranks:
            rank.run(8, step_ms * dice.uniform(0.98, 1.02))
    shared = set.intersection(*(rank.watched() for rank in ranks))
    assert len([number for number in shared if number >= 8192]) / 8192 * 1000 / step_ms >= 0.98 * 10
    assert len({rank.schedule.watched.value for rank in ranks}) > 1
    assert len(shared) > (0.75 if step_ms == 6.25 else 0.95) * min(len(rank.watched()) for rank in ranks)


@pytest.mark.parametrize("watched", [1, 2, 8, 16, 32, 64])
def test_cpu_time_is_taken_around_watched_steps(watched: int) -> None:
    """Of them and of their neighbours, except at the end of a period now and then."""
    schedule = scheduled(512, watched)
    steps = range(6400, 6400 + 6400)
    taken = {step for step in steps if schedule.needs_cpu_time(step)}
    chosen = [step for step in steps if not schedule.is_bare(step)]
    compared = sum(all(step + at in taken for at in (-1, 0, 1, 2)) for step in chosen)
    assert compared >= (1 - 3 / watched if watched >= 16 else 0.99) * len(chosen) - 8
    assert len(taken) <= (4 * len(steps) / watched if watched >= 16 else len(steps))


@pytest.mark.parametrize("watched", [2, 4, 8])
def test_where_many_steps_are_watched_there_is_something_to_be_done_at_each(watched: int) -> None:
    schedule = scheduled(512, watched)
    bare = [step for step in range(6400, 6400 + 640) if schedule.is_bare(step)]
    assert [schedule.bare_until(step) for step in bare] == [step + 1 for step in bare]


@pytest.mark.parametrize("watched", [16, 32, 64])
def test_nothing_is_to_be_done_until_the_step_that_is_named(watched: int) -> None:
    schedule = scheduled(512, watched)
    for step in range(6400, 6400 + 640):
        if schedule.is_bare(step):
            until = schedule.bare_until(step)
            assert until > step
            for other in range(step + 1, until):
                assert schedule.is_bare(other)
                assert not schedule.needs_cpu_time(other)
            named = schedule.needs_cpu_time(until) or not until % watched
            assert named or not schedule.is_bare(until)


@pytest.mark.parametrize("floor", [0.0005, 0.005, 0.02])
@pytest.mark.parametrize("by_sender", [False, True])
def test_what_bare_steps_and_the_sender_cost_is_taken_from_the_budget(floor: float, by_sender: bool) -> None:
    """If it is more than the budget, watched steps become as rare as they may."""
    sender = [0]
    schedule = SamplingSchedule(sender_clock=lambda: sender[0])
    schedule.watched.limit(64)
    schedule.follow(10_000)
    for _ in range(1000):
        sender[0] += int(floor * 100 * MS) if by_sender else 0
        schedule.learn("unwatched", 0 if by_sender else int(floor * 100 * MS / 2), 100 * MS)
        schedule.learn("shadow", int(0.04 * 100 * MS / 2), 100 * MS)
        sender[0] += int(floor * 100 * MS) if by_sender else 0
    spent = floor + 0.04 / schedule.watched.value
    assert schedule.watched.value == 64 if floor > 0.01 else 0.0025 < spent <= 0.01


@pytest.mark.parametrize("light", [True, False])
def test_light_steps_come_back_where_there_may_be_any(light: bool) -> None:
    schedule = SamplingSchedule(light=light, settles=False)
    schedule.full.learn(10**6, 10**8, at_once=True)  # costs so much that not each step is full

    def lightly() -> bool:
        return schedule.is_light(schedule.full.chosen(64) + 1)

    assert lightly() is light
    schedule.use_light(False)
    assert not lightly()
    schedule.use_light(True)
    assert lightly() is light


@pytest.mark.parametrize(("own_ms", "period"), [(0.2, 2), (1.5, 8), (6, 16), (40, 64)])
def test_a_loop_whose_steps_are_all_full_is_watched_as_its_collectives_cost(own_ms: float, period: int) -> None:
    """For 0.2 % of a step if that leaves one step in 8, for 1 % if not, and at the most one step in 64."""
    schedule = SamplingSchedule(settles=False)
    schedule.use_light(False)
    for step in range(4096):
        bare = schedule.is_bare(step)
        assert bare or not schedule.is_light(step)
        schedule.learn("unwatched" if bare else "ok", 0 if bare else round(own_ms * MS), 100 * MS)
    assert schedule.watched.value == period
