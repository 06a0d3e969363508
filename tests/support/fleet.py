"""Made-up jobs of 2 to 1,024 ranks whose true schedule is known: what each rank computed, and who waited for whom.

Every rank computes with noise, and launches its buckets as its gradients come. The buckets travel one after the other
on one wire: a transfer starts once the last rank has launched it and the wire is free. The optimizer follows, and the
next step starts where each rank's own step ends. `Disturbance` is what goes wrong. A fleet with the same seed and
without it has the same noise to the last bit: the difference of the two is what the disturbance costs.

Frames are those of the real probe: full, light and bare steps by its own schedule, each with its stamps.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.probe.derive import HOOKS_PERIOD
from ddpwatch.sampling.levels import is_timed, is_watched
from ddpwatch.sampling.schedule import SamplingSchedule, is_sampled
from ddpwatch.wire.messages import DEFAULT_GROUP, Mark, Span, Step, StepStatus
from tests.support.fleet_noise import NO_NOISE, Noise

START_NS = 10**15
BUCKETS, PARAMS, LAYER_PARAMS, BUCKET_BYTES = 8, 48, 4, 4 << 20
PER_BUCKET = PARAMS // BUCKETS
LAG_NS = 40_000  # from a bucket's last gradient to its launch
TAIL_NS = 20_000  # from the last launch to the end of the backward, and from a sync to the optimizer

# of the nominal step; a bucket travels for 4 %, so only the last one's transfer is exposed
DATA, BETWEEN, FORWARD, BACKWARD, OPTIMIZER, TRANSFER = 0.002, 0.013, 0.28, 0.55, 0.10, 0.04

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What a job is like while nothing is wrong.

    Attributes:
        step_ns: What the phases of a step are shares of; nearly its duration.
        watched_period: One step in so many is watched; 1: all but one in 32.
        full_period: Of the watched steps, one in so many is full.
    """

    world: int
    steps: int
    step_ns: int = 120_000_000
    noise: Noise = NO_NOISE
    watched_period: int = 1
    full_period: int = 8
    seed: int = 0


@dataclass
class Disturbance:
    """What goes wrong: time added to every step (first axis) on every rank (second axis), in ns.

    Attributes:
        backward: Each with the position of the first gradient, in firing order, that comes later.
        gap: Between a step and the one before it.
        wire: By which factor transfers take longer, for every step.
        marks: Step, rank, kind and name of what else a rank reports: a collection is in the forward, all else in the
            gap before the step.
    """

    shape: Shape
    data: Ints = field(init=False)
    forward: Ints = field(init=False)
    gap: Ints = field(init=False)
    backward: list[tuple[int, Ints]] = field(default_factory=list)
    wire: npt.NDArray[np.float64] = field(init=False)
    marks: dict[int, list[tuple[int, str, str]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.data, self.forward, self.gap = (zeros(self.shape) for _ in range(3))
        self.wire = np.ones(self.shape.steps)

    def mark(self, step: int, rank: int, kind: str, name: str) -> None:
        """Adds a mark."""
        self.marks.setdefault(step, []).append((rank, kind, name))


def zeros(shape: Shape) -> Ints:
    """Nothing, for every step and rank."""
    return np.zeros((shape.steps, shape.world), np.int64)


class Played(NamedTuple):
    """One step as it took place: absolute times (ns), per rank, or per rank and bucket.

    Attributes:
        transfer: When each bucket's transfer starts and ends on the wire.
        before: When each rank's step before it ended.
        fires: When each gradient came.
    """

    number: int
    status: StepStatus
    before: Ints
    start: Ints
    data_end: Ints
    forward: tuple[Ints, Ints]
    backward: tuple[Ints, Ints]
    fires: Ints
    launch: Ints
    transfer: tuple[Ints, Ints]
    sync_end: Ints
    end: Ints
    marks: tuple[Mark, ...]

    @property
    def last_launch_ns(self) -> int:
        """When the last bucket's last rank launched it: until then ranks wait for that rank, then for the wire."""
        return int(self.launch[:, -1].max())

    @property
    def last_rank(self) -> int:
        """The rank that launched the last bucket last."""
        return int(self.launch[:, -1].argmax())

    def waits(self) -> Ints:
        """For how long each rank, with nothing left to compute, waits for the last launch."""
        return np.asarray(np.maximum(0, self.last_launch_ns - self.backward[1]))

    def exposed(self) -> Ints:
        """For how long each rank waits for transfers after that."""
        return np.asarray(self.transfer[1][-1] - np.maximum(self.last_launch_ns, self.backward[1]))


class Fleet:
    """A made-up job.

    Attributes:
        names: Of its parameters and buckets.
    """

    def __init__(self, shape: Shape, disturbance: Disturbance | None = None) -> None:
        self.shape = shape
        self.disturbance = disturbance or Disturbance(shape)
        self.names = FleetNames()
        self._schedule = SamplingSchedule()
        self._schedule.full.value, self._schedule.watched.value = shape.full_period, shape.watched_period
        self._ranks = tuple(range(shape.world))

    def status(self, number: int) -> StepStatus:
        """How much of a step is recorded."""
        if number == 0:
            return "warmup"
        if self._schedule.is_bare(number):
            return "unwatched"
        return "shadow" if self._schedule.is_light(number) else "ok"

    # -- the schedule ----------------------------------------------------------------------------------------

    def play(self) -> Iterator[Played]:
        """All steps, in order."""
        shape = self.shape
        rng = np.random.default_rng(shape.seed)
        noise = shape.noise.draw(rng, (shape.steps, shape.world), shape.step_ns)
        wire = 1 + (0.05 * rng.standard_normal((shape.steps, BUCKETS)) if noise.any else np.zeros((1, BUCKETS)))
        end = np.full(shape.world, START_NS, np.int64)
        for number in range(shape.steps):
            deviations = {phase: values[number] for phase, values in noise.phases.items()}
            yield (played := self._step(number, end, deviations, wire[number % len(wire)]))
            end = played.end

    def _step(self, number: int, before: Ints, noise: dict[str, Ints], wire: npt.NDArray[np.float64]) -> Played:
        wrong = self.disturbance
        start = before + wrong.gap[number]
        data_end = start + self._takes(DATA, noise["data"]) + wrong.data[number]
        forward_start = data_end + self._takes(BETWEEN)
        forward_end = forward_start + self._takes(FORWARD, noise["forward"]) + wrong.forward[number]
        backward_start = forward_end + TAIL_NS
        fires = self._fires(number, backward_start, self._takes(BACKWARD, noise["backward"]))
        launch = fires[:, PER_BUCKET - 1 :: PER_BUCKET] + LAG_NS
        backward_end = launch[:, -1] + TAIL_NS
        transfer = _on_the_wire(launch, (self.shape.step_ns * TRANSFER * wrong.wire[number] * wire).astype(np.int64))
        sync_end = np.maximum(backward_end, transfer[1][-1] + noise["completion"])
        end = sync_end + TAIL_NS + self._takes(OPTIMIZER, noise["optimizer"])
        forward, backward = (forward_start, forward_end), (backward_start, backward_end)
        marks = tuple(self._marks(number, before, start, forward))
        return Played(
            number, self.status(number), before, start, data_end, forward, backward, fires, launch, transfer, sync_end,
            end, marks,
        )  # fmt: skip

    def _takes(self, share: float, deviation: Ints | int = 0) -> Ints:
        """How long a phase takes: never less than a fifth of what is usual."""
        usual = int(share * self.shape.step_ns)
        return np.maximum(usual + deviation, usual // 5)

    def _fires(self, number: int, start: Ints, takes: Ints) -> Ints:
        positions = np.arange(1, PARAMS + 1)
        fires = start[:, None] + takes[:, None] * positions // PARAMS
        for position, late in self.disturbance.backward:
            fires[:, position:] += late[number][:, None]
        return np.asarray(fires)

    def _marks(self, number: int, before: Ints, start: Ints, forward: tuple[Ints, Ints]) -> Iterator[Mark]:
        for rank, kind, name in self.disturbance.marks.get(number, ()):
            if kind == "gc":
                first = int(forward[0][rank])
                last = first + int(self.disturbance.forward[number, rank])
            else:
                first, last = int(before[rank]), int(start[rank])
            yield Mark(rank=rank, kind=kind, name=name, start_ns=first, end_ns=last)  # type: ignore[arg-type]

    # -- frames ----------------------------------------------------------------------------------------------

    def across(self, played: Played) -> StepAcrossRanks:
        """The step as all ranks send it."""
        across = StepAcrossRanks(played.number, members=self.members)
        for frame in self.frames(played):
            across.add_step(frame)
        return across

    def members(self, group: int) -> tuple[int, ...] | None:
        """All ranks are in one group."""
        return self._ranks if group == DEFAULT_GROUP else None

    def frames(self, played: Played) -> Iterator[Step]:
        """One frame per rank."""
        durations, starts = (played.end - played.start).tolist(), played.start.tolist()
        about: dict[str, Any] = {"step": played.number, "status": played.status, "epoch": 2}
        if played.status == "unwatched":
            for rank, (start, duration) in enumerate(zip(starts, durations, strict=True)):
                yield Step(rank=rank, start_ns=start, duration_ns=duration, synced=False, own_ns=2_000, **about)
            return
        about |= _COLUMNS | {"comm_first_seq": played.number * BUCKETS}
        rows = zip(starts, durations, self._rows(played), strict=True)
        for rank, (start, duration, columns) in enumerate(rows):
            yield Step(rank=rank, start_ns=start, duration_ns=duration, **about, **columns)

    def _rows(self, played: Played) -> Iterator[dict[str, Any]]:
        """What differs between ranks, besides start and duration."""
        start = played.start[:, None]
        stamps = [played.data_end, *played.forward, *played.backward, played.sync_end, played.end]
        offsets = (np.stack(stamps, axis=1) - start).tolist()
        launch = (played.launch - start).tolist()
        ready = (played.launch - LAG_NS - start).tolist()
        timed = played.status != "shadow"
        done = (played.transfer[1] + (played.sync_end - played.transfer[1][-1])[:, None].clip(0) - start).tolist()
        hooked = has_hooks(played.number, played.status)
        fires = (played.fires - start).tolist() if hooked else [[]] * self.shape.world
        for row, launches, readies, dones, at in zip(offsets, launch, ready, done, fires, strict=True):
            data, forward, forward_end, backward, backward_end, sync_end, end = row
            yield {
                "data": [(0, data)],
                "spans": [
                    Span("forward", forward, forward_end), Span("backward", backward, backward_end),
                    Span("sync", backward_end, sync_end), Span("optimizer", sync_end + TAIL_NS, end),
                ],
                "comm_ready": readies, "comm_launch": launches, "comm_done": dones if timed else _NOT_TIMED,
                "hook_param": _FIRING_ORDER if hooked else [], "hook_ns": at,
            }  # fmt: skip


def has_hooks(number: int, status: StepStatus) -> bool:
    """Whether a watched step's frame shows when gradients came."""
    return is_timed(status) or (is_watched(status) and is_sampled(number, HOOKS_PERIOD))


_FIRING_ORDER = list(range(PARAMS))[::-1]
_NOT_TIMED = [None] * BUCKETS
_COLUMNS: dict[str, Any] = {
    "comm_seq": list(range(BUCKETS)), "comm_module": [0] * BUCKETS, "comm_label": list(range(BUCKETS)),
    "comm_bytes": [BUCKET_BYTES] * BUCKETS, "own_ns": 90_000,
}  # fmt: skip


def _on_the_wire(launch: Ints, takes: Ints) -> tuple[Ints, Ints]:
    """When each bucket's transfer starts and ends."""
    starts, ends, free = [], [], 0
    for last, duration in zip(launch.max(axis=0).tolist(), takes.tolist(), strict=True):
        starts.append(max(last, free))
        free = starts[-1] + duration
        ends.append(free)
    return np.array(starts), np.array(ends)


class FleetNames:
    """The names of a fleet's parameters. They belong to layers of `LAYER_PARAMS`, and fire in descending order."""

    def layer(self, param: int, rank: int | None = None) -> str:
        """A parameter's name."""
        return f"blocks.{param // LAYER_PARAMS}.weight_{param % LAYER_PARAMS}"

    def bucket_params(self, index: int, rank: int | None = None, module: int | None = None) -> list[str]:
        """The names of a bucket's parameters."""
        return [self.layer(param) for param in _FIRING_ORDER[index * PER_BUCKET : (index + 1) * PER_BUCKET]]

    def unit(self, rank: int | None = None, module: int | None = None) -> str:
        """See `LayerNames`."""
        return "bucket"

    def bucket_layer(self, index: int, rank: int | None = None, module: int | None = None) -> str:
        """The name of a bucket's first parameter."""
        return next(iter(self.bucket_params(index)), "")
