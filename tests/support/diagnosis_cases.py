"""The cases of the benchmark of diagnosis: what goes wrong in a made-up job, and what a diagnosis should say of it."""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from tests.support.fleet import (
    BACKWARD,
    BUCKETS,
    LAYER_PARAMS,
    PARAMS,
    TRANSFER,
    Disturbance,
    Fleet,
    Shape,
    has_hooks,
    zeros,
)
from tests.support.fleet_noise import NOISES, Noise, NoiseKind

Kind = Literal[
    "clean",
    "constant",
    "periodic",
    "random",
    "stall",
    "drift",
    "moving",
    "two",
    "slow_input",
    "slow_input_all",
    "exposed",
    "slow_link",
    "gc",
    "checkpoint",
    "checkpoint_rank0",
    "validation",
]
KINDS: tuple[Kind, ...] = get_args(Kind)[1:]
SIZES = (0.03, 0.05, 0.10, 0.20, 0.50)  # of a step
EXPOSED_SIZES = (0.15, 0.20, 0.30, 0.50)  # of a step; less is no fault
SIZELESS = ("stall", "checkpoint", "checkpoint_rank0", "validation")  # they take seconds
MANY_RANKS, MOST_RANKS, HUGE_KINDS = 8, 64, ("constant", "periodic", "stall")  # of larger jobs, fewer are played
STEP_NS = (40_000_000, 400_000_000)
UNIFORM_STEP_NS = 120_000_000  # at least, where noise is 0 to 20 ms
SHORT_STEP_NS = 166_000_000  # below, every second step is bare
SETTLED_STEP = 40
LAYERS = PARAMS // LAYER_PARAMS
SPLIT_PHASES = ("data", "forward", "backward")
PERIODS = (2, 16)
CHANCES = (0.05, 0.4)
CLEAN_STEPS = 1000  # of one run, about
STALL_S, BREAK_S = (0.5, 12.0), (0.3, 5.0)

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Case:
    """One made-up job. ``size`` is the fault's, as a share of a step as it takes place, noise and waits included."""

    kind: Kind
    size: float
    world: int
    seed: int
    noise: NoiseKind


@dataclass
class Truth:
    """One incident that a diagnosis should find.

    Attributes:
        kinds: How it may call it; the first one fits best.
        ranks: Whose doing it is; empty if it is no single rank's.
        phases: In which phase; the first one fits best, and empty ones are not judged.
        params: In the backward, the parameters of the layer.
        strikes: The steps that it strikes.
        slack: How many steps the diagnosis may be wrong about where it starts.
        cost_ns: What it costs, measured by comparison with a job without it.
        hidden: It strikes in bare steps only: whose doing it is cannot be known.
        cost_of: Whose time that is: what the other ranks wait, or what all ranks spend on it, in the steps it strikes.
    """

    kinds: tuple[str, ...]
    strikes: Ints
    ranks: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    params: Collection[int] | None = None
    period: int | None = None
    slack: int = 16
    hidden: bool = False
    cost_of: Literal["others", "input", "transfer", "gap"] = "others"
    cost_ns: float = 0.0

    @property
    def since(self) -> int:
        """The first step that it strikes."""
        return int(self.strikes[0])


@dataclass
class Job:
    """A case as it is played."""

    case: Case
    shape: Shape
    disturbance: Disturbance
    truths: list[Truth] = field(default_factory=list)

    @property
    def fleet(self) -> Fleet:
        """The job as it takes place."""
        return Fleet(self.shape, self.disturbance)

    @cached_property
    def usual_ns(self) -> float:
        """A step before anything goes wrong: the median of the slowest rank's."""
        steps = islice(Fleet(self.shape).play(), SETTLED_STEP)
        return float(np.median([(played.end - played.start).max() for played in steps]))

    @property
    def undisturbed(self) -> Fleet:
        """The same job with the same noise, without what goes wrong. What a slow wire costs is all of its transfers."""
        calm = Disturbance(self.shape)
        if self.case.kind == "exposed":
            calm.wire[:] = 0
        return Fleet(self.shape, calm)


def cases(
    kinds: tuple[Kind, ...], worlds: tuple[int, ...], seeds: int, noises: tuple[NoiseKind, ...] = NOISES
) -> Iterator[Case]:
    """All kinds in all sizes and worlds; of larger worlds, which take longest, fewer."""
    for seed in range(seeds):
        for kind in kinds:
            sizes = (0.0,) if kind in SIZELESS else EXPOSED_SIZES if kind in ("exposed", "slow_link") else SIZES
            for size in sizes:
                for world in worlds:
                    if _is_played(kind, size, world, seed):
                        noise = random.Random(f"{kind} {size} {world} {seed}").choice(noises)
                        yield Case(kind, size, world, seed, noise)


def _is_played(kind: Kind, size: float, world: int, seed: int) -> bool:
    if world > MOST_RANKS:
        return kind in HUGE_KINDS and size in (0.0, 0.10) and seed % 8 == 0
    return world >= (4 if kind == "two" else 2) and (world <= MANY_RANKS or seed % 4 == 0)


def job_of(case: Case) -> Job:
    """Builds the job. The same case makes the same job."""
    dice = np.random.default_rng([case.seed, case.world, int(1000 * case.size), get_args(Kind).index(case.kind)])
    low = UNIFORM_STEP_NS if case.noise == "uniform" else STEP_NS[0]
    step_ns = int(np.exp(dice.uniform(np.log(low), np.log(STEP_NS[1]))))
    since = SETTLED_STEP + int(dice.integers(60))
    shape = Shape(
        world=case.world, steps=since + _lasts(case.kind, dice), step_ns=step_ns,
        noise=Noise(case.noise, float(dice.uniform(0.01, 0.05)) if case.noise == "gauss" else 0.02),
        watched_period=2 if step_ns < SHORT_STEP_NS else 1, full_period=int(dice.choice((4, 8, 8, 8, 16))),
        seed=int(dice.integers(1 << 32)),
    )  # fmt: skip
    job = Job(case, shape, Disturbance(shape))
    if case.kind != "clean":
        _BUILDERS[case.kind](job, since, dice)
    return job


def _lasts(kind: Kind, dice: np.random.Generator) -> int:
    """For how many steps a job goes on after its fault starts."""
    if kind == "clean":
        return CLEAN_STEPS
    usual = {
        "random": 300,
        "drift": 360,
        "moving": 360,
        "two": 260,
        "periodic": 24 * PERIODS[1],
        "stall": 60,
        "gc": 300,
    }
    return usual.get(kind, 140) + int(dice.integers(20))


# -- what goes wrong -----------------------------------------------------------------------------------------


def _strike(
    job: Job, rank: int, strikes: Ints, delays: Ints | int, dice: np.random.Generator, phase: str = ""
) -> Truth:
    """Delays one rank in these steps, in one phase; names no kinds yet."""
    phase = phase or str(dice.choice(SPLIT_PHASES))
    truth = Truth((), strikes, (rank,), (phase,))
    late = zeros(job.shape)
    late[strikes, rank] = delays
    if phase == "backward":
        layer = int(dice.integers(LAYERS))
        job.disturbance.backward.append((layer * LAYER_PARAMS, late))
        last = PARAMS - layer * LAYER_PARAMS
        truth.params = range(last - LAYER_PARAMS, last)
    elif phase == "forward":
        job.disturbance.forward += late
    else:
        job.disturbance.data += late
    job.truths.append(truth)
    return truth


def _ns(job: Job) -> int:
    return int(job.case.size * job.usual_ns)


def _any_rank(job: Job, dice: np.random.Generator) -> int:
    return int(dice.integers(job.shape.world))


def _slow(truth: Truth) -> tuple[str, ...]:
    """What to call a slow rank; one that only waits for data longer may be called slow input, too."""
    return ("straggler", *(("slow_input",) if truth.phases == ("data",) else ()))


def _constant(job: Job, since: int, dice: np.random.Generator) -> None:
    truth = _strike(job, _any_rank(job, dice), np.arange(since, job.shape.steps), _ns(job), dice)
    truth.kinds = _slow(truth)


def _periodic(job: Job, since: int, dice: np.random.Generator) -> None:
    period = int(dice.integers(PERIODS[0], PERIODS[1] + 1))
    strikes = np.arange(since, job.shape.steps, period)
    truth = _strike(job, _any_rank(job, dice), strikes, _ns(job), dice)
    truth.kinds, truth.period, truth.slack = ("intermittent",), period, 4 * period


def _random(job: Job, since: int, dice: np.random.Generator) -> None:
    chance = float(dice.uniform(*CHANCES))
    strikes = since + np.flatnonzero(dice.random(job.shape.steps - since) < chance)
    truth = _strike(job, _any_rank(job, dice), strikes, _ns(job), dice)
    truth.kinds, truth.slack = ("intermittent",), int(6 / chance)


def _stall(job: Job, since: int, dice: np.random.Generator) -> None:
    pause_ns = int(1e9 * np.exp(dice.uniform(*np.log(STALL_S))))
    truth = _strike(job, _any_rank(job, dice), np.array([since]), pause_ns, dice)
    truth.kinds, truth.slack = ("pause",), 2
    status = job.fleet.status(since)
    truth.hidden = status == "unwatched"
    if not has_hooks(since, status):
        truth.params = None
    if truth.hidden:
        truth.phases = ()


def _drift(job: Job, since: int, dice: np.random.Generator) -> None:
    strikes = np.arange(since, job.shape.steps)
    truth = _strike(job, _any_rank(job, dice), strikes, np.linspace(0, _ns(job), len(strikes)).astype(np.int64), dice)
    truth.kinds, truth.slack = ("drift", *_slow(truth)), len(strikes) * 2 // 3


def _moving(job: Job, since: int, dice: np.random.Generator) -> None:
    first, rank = since, _any_rank(job, dice)
    while job.shape.steps - first >= 30:
        last = min(job.shape.steps, first + int(dice.integers(30, 101)))
        truth = _strike(job, rank, np.arange(first, last), _ns(job), dice)
        truth.kinds = _slow(truth)
        rank, first = (rank + 1 + int(dice.integers(job.shape.world - 1))) % job.shape.world, last


def _two(job: Job, since: int, dice: np.random.Generator) -> None:
    """One rank every fourth to eighth step, another one in half of the steps in between."""
    one, other = dice.choice(job.shape.world, 2, replace=False).tolist()
    period = int(dice.integers(4, 9))
    steps = np.arange(since, job.shape.steps)
    first = _strike(job, one, steps[::period], _ns(job), dice)
    first.kinds, first.period, first.slack = ("intermittent",), period, 4 * period
    between = np.setdiff1d(steps, steps[::period])
    second = _strike(job, other, between[dice.random(len(between)) < 0.5], _ns(job), dice)
    second.kinds = ("intermittent", *_slow(second))


def _slow_input(job: Job, since: int, dice: np.random.Generator) -> None:
    strikes = np.arange(since, job.shape.steps)
    _strike(job, _any_rank(job, dice), strikes, _ns(job), dice, "data").kinds = ("slow_input", "straggler")


def _slow_input_all(job: Job, since: int, dice: np.random.Generator) -> None:
    strikes = np.arange(since, job.shape.steps)
    job.disturbance.data[strikes] = _ns(job)
    truth = Truth(("slow_input",), strikes, phases=("data",), cost_of="input")
    job.truths.append(truth)


def _slow_wire(job: Job, since: int, kinds: tuple[str, ...]) -> None:
    """A wire that leaves ``size`` of a step exposed: the first bucket waits for its gradients, then all travel."""
    hidden = BACKWARD * (1 - 1 / BUCKETS)
    job.disturbance.wire[since:] = (_ns(job) / job.shape.step_ns + hidden) / BUCKETS / TRANSFER
    steps = np.arange(since, job.shape.steps)
    job.truths.append(Truth(kinds, steps, phases=("exposed_comm", ""), cost_of="transfer"))


def _exposed(job: Job, since: int, dice: np.random.Generator) -> None:
    _slow_wire(job, 0, ("exposed_comm",))


def _slow_link(job: Job, since: int, dice: np.random.Generator) -> None:
    _slow_wire(job, since, ("slow_link", "exposed_comm"))
    job.truths[-1].slack = max(16, job.shape.watched_period * job.shape.full_period)  # transfers show in full steps


def _gc(job: Job, since: int, dice: np.random.Generator) -> None:
    rank, size_ns = _any_rank(job, dice), _ns(job)
    strikes = since + np.flatnonzero(dice.random(job.shape.steps - since) < 0.05)
    if not len(strikes):
        strikes = np.array([since])
    truth = _strike(job, rank, strikes, size_ns, dice, "forward")
    for step in strikes.tolist():
        job.disturbance.mark(step, rank, "gc", "garbage collection, generation 2")
    truth.kinds, truth.phases, truth.slack = ("intermittent", "pause", "straggler"), ("gc",), 80


def _break(job: Job, since: int, dice: np.random.Generator, ranks: tuple[int, ...], kind: str, name: str) -> None:
    """Something between steps, every so many steps, that takes all these ranks a while."""
    strikes = np.arange(since, job.shape.steps, int(dice.integers(20, 61)))
    took_ns = int(1e9 * np.exp(dice.uniform(*np.log(BREAK_S))))
    for step in strikes.tolist():
        for rank in ranks:
            job.disturbance.gap[step, rank] = took_ns
            job.disturbance.mark(step, rank, kind, name)
    phase = {"save": "checkpoint"}.get(kind, kind)
    own = ranks if len(ranks) == 1 else ()
    truth = Truth(("pause", "intermittent"), strikes, own, (phase,), slack=2)
    truth.cost_of = "others" if own else "gap"
    job.truths.append(truth)


def _checkpoint(job: Job, since: int, dice: np.random.Generator) -> None:
    _break(job, since, dice, tuple(range(job.shape.world)), "save", "torch.save")


def _checkpoint_rank0(job: Job, since: int, dice: np.random.Generator) -> None:
    _break(job, since, dice, (0,), "save", "torch.save")


def _validation(job: Job, since: int, dice: np.random.Generator) -> None:
    _break(job, since, dice, tuple(range(job.shape.world)), "validation", "validation")


_BUILDERS: dict[Kind, Callable[[Job, int, np.random.Generator], None]] = {
    "constant": _constant,
    "periodic": _periodic,
    "random": _random,
    "stall": _stall,
    "drift": _drift,
    "moving": _moving,
    "two": _two,
    "slow_input": _slow_input,
    "slow_input_all": _slow_input_all,
    "exposed": _exposed,
    "slow_link": _slow_link,
    "gc": _gc,
    "checkpoint": _checkpoint,
    "checkpoint_rank0": _checkpoint_rank0,
    "validation": _validation,
}
