"""Made-up jobs of which every step is known, with reports of them: what is estimated of all steps, beside the truth.

Which steps are watched follows from the real schedule; full steps are longer by their stamps, ranks copy results for a
while after each wait, and the job drifts.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from statistics import fmean
from typing import NamedTuple

from ddpwatch.analysis.figures import Report
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.sampling.levels import BARE, FULL, LIGHT
from ddpwatch.sampling.schedule import FIRST_FULL_STEPS, SamplingSchedule
from ddpwatch.wire.messages import Mark, Span, Step, StepStatus
from tests.support.frames import hello

WORLD, MS = 2, 1_000_000
STAMPS_MS = {FULL: 0.9, LIGHT: 0.1, BARE: 0.0}
COPIES_MS = 0.4
FORWARD, BACKWARD, OPTIMIZER = 0.3, 0.6, 0.1  # of compute
PERIODS = {  # of watched and full steps: in the first part of a run, somebody looks
    10: ((1, 4), (2, 32), 0.85),
    50: ((2, 8), (2, 32), 0.3),
    90: ((8, 16), (16, 64), 0.4),
}


class Drawn(NamedTuple):
    """One step of a job (ms). Rank 0 alone may save before it, or stall in it: rank 1 waits for it in the step."""

    compute: float
    exposed: float
    hidden: float
    save: float = 0.0
    stall: float = 0.0

    @property
    def exposed_of_all(self) -> float:
        """Over both ranks."""
        return self.exposed + (self.save + self.stall) / 2

    @property
    def hidden_of_all(self) -> float:
        """The same; while rank 0 is behind, rank 1's first bucket is in flight for all of its backward."""
        return (self.hidden + BACKWARD * self.compute) / 2 if self.save or self.stall else self.hidden


class Result(NamedTuple):
    """What a report says less what is true, as a share of it, and whether its intervals hold that."""

    step: float
    exposed: float
    exposed_held: bool
    overlap_held: bool
    exposed_width: float
    bare: float


def steady(dice: random.Random, number: int, steps: int) -> Drawn:
    """Steps of some 40 ms that become slower, with a tail."""
    drift = 1 + 0.1 * number / steps
    return Drawn(drift * dice.gauss(34, 1), dice.lognormvariate(1.2, 0.35), dice.gauss(12, 2))


def two_lengths(dice: random.Random, number: int, steps: int) -> Drawn:
    """Mostly steps of 20 ms, some of 140."""
    if dice.random() < 1 / 6:
        return Drawn(dice.gauss(110, 2), dice.gauss(30, 3), dice.gauss(40, 4))
    return Drawn(dice.gauss(18, 0.5), max(0.1, dice.gauss(1.6, 0.4)), dice.gauss(6, 1))


def lone_saves(dice: random.Random, number: int, steps: int) -> Drawn:
    """The steady job; rank 0 saves every 40 steps."""
    return steady(dice, number, steps)._replace(save=400.0 if number and number % 40 == 0 else 0.0)


def lone_stalls(dice: random.Random, number: int, steps: int) -> Drawn:
    """The steady job; rank 0 stands still for 2 s in every 30th step."""
    return steady(dice, number, steps)._replace(stall=2000.0 if number and number % 30 == 0 else 0.0)


JOBS = {"steady, 40 ms": steady, "20 and 140 ms": two_lengths, "lone saves": lone_saves, "lone stalls": lone_stalls}


def levels(percent: int, steps: int) -> Iterator[StepStatus]:
    """Yields the level of each step, by the real schedule."""
    (watched, full), later, until = PERIODS[percent]
    schedule = SamplingSchedule()
    for number in range(steps):
        schedule.watched.value, schedule.full.value = (watched, full) if number < until * steps else later
        if schedule.is_bare(number) and number >= FIRST_FULL_STEPS:
            yield BARE
        else:
            yield LIGHT if schedule.is_light(number) else FULL


def step_of(rank: int, number: int, at: int, level: StepStatus, drawn: Drawn) -> Step:
    """Returns a rank's frame: forward, backward with one hidden and one exposed bucket, copies, optimizer."""
    compute = drawn.compute + STAMPS_MS[level]
    stall = 0 if rank else int(drawn.stall * MS)
    forward, backward = stall + int(FORWARD * compute * MS), stall + int((FORWARD + BACKWARD) * compute * MS)
    save = int(drawn.save * MS)
    waits = save + int(drawn.stall * MS) if rank else 0
    done = backward + int(drawn.exposed * MS) + waits
    synced = done + int(COPIES_MS * MS)
    end = synced + int(OPTIMIZER * compute * MS)
    step = Step(rank=rank, step=number, status=level, start_ns=at if rank else at + save, duration_ns=end)
    if level == BARE:
        return step
    step.spans = [
        Span("forward", stall, forward), Span("backward", forward, backward), Span("sync", backward, synced),
        Span("optimizer", synced, end),
    ]  # fmt: skip
    launch = [forward, backward - MS]
    step.own_ns = int(STAMPS_MS[level] * MS / 6)
    step.comm_module, step.comm_label, step.comm_bytes = [0, 0], [0, 1], [1 << 20, 1 << 20]
    step.comm_ready, step.comm_launch = [*launch], launch
    done_ns = [forward + int((drawn.hidden - 1) * MS) + waits, done]
    step.comm_done = [*done_ns] if level == FULL else [None, None]
    return step


def report_of_job(draw: str, percent: int, steps: int, seed: int) -> tuple[Report, list[Drawn], list[int]]:
    """Returns a job's report, what is true of each step, and how long each took by the job's own clock (ns)."""
    dice, builder, at = random.Random(seed), ReportBuilder(), 10**12
    for rank in range(WORLD):
        builder.apply_message(hello(rank, WORLD))
    truth: list[Drawn] = []
    durations: list[int] = []
    for number, level in enumerate(levels(percent, steps)):
        truth.append(JOBS[draw](dice, number, steps))
        frames = [step_of(rank, number, at, level, truth[-1]) for rank in range(WORLD)]
        durations.append(frames[-1].duration_ns)
        if truth[-1].save:
            builder.apply_message(Mark(rank=0, kind="save", name="", start_ns=at, end_ns=frames[0].start_ns))
        at += durations[-1]
        for frame in frames:
            builder.apply_message(frame)
    return builder.report(), truth, durations


def judged(draw: str, percent: int, steps: int, seed: int) -> Result:
    """Compares one report with the truth."""
    report, truth, durations = report_of_job(draw, percent, steps, seed)
    found = report.overlap
    exposed = fmean(one.exposed_of_all for one in truth)
    comm = exposed + fmean(one.hidden_of_all for one in truth)
    assert report.steps.step_ms
    assert found.exposed_ms is not None
    assert found.exposed_reach_ms is not None
    assert found.ratio is not None
    assert found.ratio_reach is not None
    return Result(
        report.steps.step_ms * MS / fmean(durations) - 1,
        found.exposed_ms / exposed - 1,
        abs(found.exposed_ms - exposed) <= found.exposed_reach_ms,
        abs(found.ratio - (1 - exposed / comm)) <= found.ratio_reach,
        found.exposed_reach_ms / exposed,
        report.steps.unwatched / steps,
    )
