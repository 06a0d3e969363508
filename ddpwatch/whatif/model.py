"""Takes a run apart: what ranks compute, what the wire has to move, and how much the two slow each other."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import exp, log, sqrt
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

from ddpwatch.common.intervals import union
from ddpwatch.whatif.cost import (
    Curve,
    Expected,
    Guess,
    Panel,
    WorkSample,
    calibrated,
    curve_of,
    evened,
    in_service,
    link_of,
    shares_of,
    slowdown_of,
    workers_of,
)
from ddpwatch.whatif.recorded import RankStep, Recorded
from ddpwatch.whatif.wire import Wire

SEGMENTS = 16  # of a backward, to see whether communication slows it
MOST_SLOWDOWN = 2.0
PRIOR_SLOWDOWN = 0.25  # standard deviation of what is likely before anything is seen
BUCKETS_TO_COMPARE = 5  # with fewer, a slow wire looks like the slowdown of the buckets at the end
UNSEEN_SLOWDOWN = 0.1
SWEEP_DOUBT = 0.5  # of a sweep's slowdown: its compute and its traffic are not the job's
SHARINGS = tuple(0.5 + 0.02 * n for n in range(26))
LIKELY_SHARING, SHARING_PRIOR = 0.5, 0.05  # before anything is seen: all of a full wire, and its standard error
LEAST_SHARING_ERROR = 0.02
LEAST_UNEVEN = 1e-3  # of a step's time on the wire: no wire is more even than that
LIKELY_COPY = {False: 0.3, True: 0.002}  # ns per byte, on a host and on a GPU, where no copy was seen
LEAST_COPY = 0.001  # ns per byte; below, DDP copied nothing
COPIES_PER_CAST = 2.0  # a cast there and back costs about as much as so many copies
COPIES_PER_THIN = 20.0  # and so do PowerSGD's products, with the copies and sums around them
CAST_DOUBT = 0.6  # of either
LIKELY_RANK_ONE = 0.5  # of PowerSGD's cost with more: a product with a vector is faster than one with a thin matrix
LIKELY_LAUNCH = 0.4  # of PowerSGD's cost that comes before its first all-reduce: two of five passes over the gradients
CONTENDED = 0.15  # how much longer compute takes beside collectives where threads of a rank compete for cores
QUARTERS = 4
MOST_LINK = 2.0  # share of a collective's time: over 1 where the job's collectives seem faster than the link
LINK_DOUBT = 0.6  # standard error of the link's share, as a share of what is not known of it
UNEVEN_LINK = 0.03  # by which the mean step's bytes are slower than the fastest step's where the link is the limit
NO_ERROR = 1e-4  # a smaller standard error moves nothing
_RANGES = {
    "compute_slowdown": (0.0, MOST_SLOWDOWN),
    "comm_slowdown": (0.0, MOST_SLOWDOWN),
    "sharing": (0.5, 1.0),
    "cast": (0.0, 100.0),
    "thin": (0.0, 100.0),
    "link": (0.0, MOST_LINK),
}


@dataclass(frozen=True)
class Physics:
    """How communication and compute behave.

    Attributes:
        curve: What a collective takes alone, by its size.
        workers: How many collectives are in flight at once.
        sharing: How fast each of two is, as a share of its speed alone.
        compute_slowdown: How much longer compute takes beside a collective, less 1.
        comm_slowdown: How much longer a collective takes beside compute, less 1.
        link: The share of a collective's time, but for its latency, that another link changes. The rest is the host's.
        link_rate: ns that the link takes for a byte, as a sweep found; 0 without one.
        cast: ns that a comm hook takes to make a byte of gradient fp16 and large again.
        bf16: What a cast to bf16 takes, as a multiple of that.
        thin: ns that PowerSGD takes for a byte of gradient, there and back, besides its collectives.
        rank_one: What it takes with rank 1, as a multiple of that.
        thin_launch: The share of that which comes before the first all-reduce, on the thread that launches it.
        contended: From 0 to 1: whether what other threads of a rank compute takes cores from its compute.
        copy: ns that DDP takes to copy a byte back after the wait.
        lag: ns from a bucket's last gradient to its launch.
    """

    curve: Curve
    workers: int
    sharing: Guess
    compute_slowdown: Guess
    comm_slowdown: Guess
    link: Guess
    link_rate: float
    cast: Guess
    bf16: float
    thin: Guess
    rank_one: float
    thin_launch: float
    contended: float
    copy: float
    lag: float

    def variations(self) -> Iterator[tuple[str, Physics, Physics]]:
        """Yields each uncertain number's name, and the same physics with it a standard error below and above."""
        below, above = (replace(self, curve=replace(self.curve, lean=lean)) for lean in (-1.0, 1.0))
        yield "curve", below, above
        below, above = (replace(self, curve=replace(self.curve, hop_lean=lean)) for lean in (-1.0, 1.0))
        yield "hops", below, above
        for name, (least, most) in _RANGES.items():
            guess: Guess = getattr(self, name)
            if guess.error > NO_ERROR:
                below, above = (
                    self._with(name, Guess(min(most, max(least, guess.value + shift)), guess.error))
                    for shift in (-guess.error, guess.error)
                )
                yield name, below, above

    def _with(self, name: str, guess: Guess) -> Physics:
        changed: dict[str, Any] = {name: guess}
        return replace(self, **changed)


class Work(NamedTuple):
    """What one rank does in one step, without the wire. ns.

    Attributes:
        before: From the step's start to the backward.
        at: Per unit, when its gradient is there, on the rank's own clock, with ``backward`` as zero.
        latest: Per unit, the latest of that and of all units before it.
        compute: What the backward computes, as if nothing were beside it.
        tail: From the end of the wait for buckets to the step's end.
        data, optimizer: Parts of ``before`` and ``tail``; data is None if it is not known.
    """

    before: float
    at: list[float]
    latest: list[float]
    compute: float
    tail: float
    data: float | None
    optimizer: float


class StepWork(NamedTuple):
    """One step: its ranks, the stretches in which compute was slowed, and how slow the wire was per bucket.

    Attributes:
        ranks: By position.
        busy: Per rank, ends of the stretches (from the backward's start) and the time lost up to there.
        residuals: Per recorded bucket, its work over what the curve says.
    """

    ranks: list[Work]
    busy: list[Busy]
    residuals: list[float]


class Busy:
    """How much of a backward was lost to communication beside it: a line from each start or end of a stretch on."""

    __slots__ = ("_offsets", "_rates", "_times")

    def __init__(self, stretches: Sequence[tuple[float, float]], loss: float) -> None:
        self._times: list[float] = []
        self._offsets, self._rates, lost = [0.0], [1.0], 0.0
        for start, end in stretches if loss else ():
            self._times += (start, end)
            self._offsets += (loss * start - lost, -(lost := lost + loss * (end - start)))
            self._rates += (1 - loss, 1.0)

    def worked(self, moments: Sequence[float]) -> list[float]:
        """Returns the work done by each."""
        times, offsets, rates = self._times, self._offsets, self._rates
        return [offsets[i := bisect_right(times, at)] + rates[i] * at for at in moments]


class Wired(NamedTuple):
    """The wire in one recorded step: when each bucket began to move and was done on the last rank, absolute."""

    starts: list[float]
    dones: list[float]
    computed: float


def wired(step: Sequence[RankStep], workers: int) -> Wired:
    """Reduces a step's ranks to what the wire did."""
    launches = list(accumulate((max(column) for column in zip(*(rank.start_of for rank in step), strict=True)), max))
    dones = [max(column) for column in zip(*(rank.done for rank in step), strict=True)]
    return Wired(in_service(launches, dones, workers), dones, max(rank.computed for rank in step))


def fit(recorded: Recorded, wire: Wire | None = None) -> Physics:
    """Fits everything to the recorded steps; what a sweep measured comes first."""
    workers = workers_of(recorded.backend)
    seen = [wired(step, workers) for step in recorded.steps]
    sharing = _sharing(recorded, seen, workers, wire)
    compute = _compute_slowdown(recorded, seen, wire)
    comm = comm_slowdown(recorded.sizes, seen, sharing.value, compute, wire)
    samples = _samples(recorded.sizes, seen, sharing.value, comm.value)
    curve, copy = curve_of(samples), _copy(recorded)
    link = link_share(samples, curve.latency, len(recorded.sizes))
    link_rate = 0.0
    if wire is not None:
        curve, link_rate = calibrated(wire, curve, len(recorded.ranks)), link_of(wire, len(recorded.ranks))
        link = link_of_sweep(link_rate, curve, recorded.sizes)
    return Physics(
        curve=curve,
        workers=workers,
        sharing=sharing,
        compute_slowdown=compute,
        comm_slowdown=comm,
        link=link,
        link_rate=link_rate,
        cast=_hook_cost("fp16", wire) or _copies(COPIES_PER_CAST, copy, recorded.gpu),
        bf16=(wire and wire.cost_ratio("bf16", "fp16")) or 1.0,
        thin=_hook_cost("powersgd-2", wire) or _copies(COPIES_PER_THIN, copy, recorded.gpu),
        rank_one=(wire and wire.cost_ratio("powersgd-1", "powersgd-2")) or LIKELY_RANK_ONE,
        thin_launch=LIKELY_LAUNCH if wire is None else wire.launch_share.get("powersgd-2", LIKELY_LAUNCH),
        contended=0.0 if recorded.gpu else min(1.0, max(0.0, compute.value) / CONTENDED),
        copy=copy,
        lag=_lag(recorded),
    )


def _samples(sizes: Sequence[int], seen: Sequence[Wired], sharing: float, comm_slowdown: float) -> list[WorkSample]:
    return [sample for step in seen for sample in alone(step, sizes, sharing, comm_slowdown)]


def alone(step: Wired, sizes: Sequence[int], sharing: float, comm_slowdown: float) -> list[WorkSample]:
    """Returns what each bucket would have taken alone, and with no compute beside it; never less than 1 µs."""
    shares = evened(*shares_of(step.starts, step.dones, sharing), sizes)
    lost = comm_slowdown / (1 + comm_slowdown)
    found = []
    for nbytes, start, done, (work, doubt) in zip(sizes, step.starts, step.dones, shares, strict=True):
        beside = max(0.0, min(done, step.computed) - start) / max(1.0, done - start)
        found.append(WorkSample(float(nbytes), max(1000.0, work * (1 - lost * beside)), doubt))
    return found


def link_share(samples: Sequence[WorkSample], latency: float, buckets: int) -> Guess:
    """Returns the link's share of what bytes take, as the job's own steps show it.

    In the step in which bytes moved fastest, the link's share is what they took, at least; at most, it is all of what
    they take on average: chance made that step faster, too, and what the host does may overlap with what the link does.
    The share is taken to be in the middle.

    Args:
        samples: All collectives, step by step.
        latency: What each takes besides its bytes (ns).
        buckets: Collectives per step.
    """
    steps = [samples[i : i + buckets] for i in range(0, len(samples), buckets)]
    rates = [
        max(0.0, sum(sample.work for sample in step) - latency * buckets) / sum(sample.nbytes for sample in step)
        for step in steps
    ]
    least = min(1.0, (1 + UNEVEN_LINK) * min(rates) / max(1e-9, fmean(rates)))
    return Guess((1 + least) / 2, LINK_DOUBT * (1 - least))


def link_of_sweep(best: float, curve: Curve, sizes: Sequence[int]) -> Guess:
    """Returns the link's share of what bytes take, as a sweep shows it.

    Args:
        best: Ns per byte in the sweep, which nothing was beside.
        curve: What the job's collectives take.
        sizes: Those of its buckets.
    """
    taken = sum(curve.work(nbytes) - min(curve.latency, curve.work(nbytes)) for nbytes in sizes)
    return Guess(min(MOST_LINK, (1 + UNEVEN_LINK) * best * sum(sizes) / max(1.0, taken)), UNEVEN_LINK)


def _sharing(recorded: Recorded, seen: Sequence[Wired], workers: int, wire: Wire | None) -> Guess:
    """Finds the sharing by which a step's buckets take the most even time together, from where it usually is."""
    if workers == 1:
        return Guess(1.0, 0.0)
    if wire is not None and wire.sharing is not None:
        return Guess(wire.sharing, 0.03)
    # A step's work if nothing is lost by sharing, and if half is; in between, it is a straight line.
    apart, shared = [sum(_lengths(s)) for s in seen], [sum(shares_of(s.starts, s.dones, 0.5)[0]) for s in seen]
    logs = []
    for sharing in SHARINGS:
        totals = [half + (2 * sharing - 1) * (whole - half) for whole, half in zip(apart, shared, strict=True)]
        uneven = stdev(totals) / fmean(totals) if len(totals) > 1 else 0.0
        likely = -0.5 * ((sharing - LIKELY_SHARING) / SHARING_PRIOR) ** 2
        logs.append(likely - len(totals) * log(max(LEAST_UNEVEN, uneven)))
    best = SHARINGS[logs.index(max(logs))]
    weights = [exp(each - max(logs)) for each in logs]
    spread = sum(weight * (sharing - best) ** 2 for weight, sharing in zip(weights, SHARINGS, strict=True))
    return Guess(best, max(LEAST_SHARING_ERROR, sqrt(spread / sum(weights))))


def comm_slowdown(
    sizes: Sequence[int], seen: Sequence[Wired], sharing: float, compute: Guess, wire: Wire | None = None
) -> Guess:
    """Compares buckets that are beside compute in some steps more than in others with those that always are.

    By how much a bucket is beside compute is what it would be if it took as long as usual: one that takes longer for
    another reason would look less so. Ranks that want the same cores slow both: without a sweep, collectives are
    expected to be slowed about as much as compute.
    """
    expected = compute.value or None if wire is None else wire.slowdown
    if len(sizes) < BUCKETS_TO_COMPARE:
        return _combined(None, expected, UNSEEN_SLOWDOWN)
    usual = [max(1.0, fmean(column)) for column in zip(*map(_lengths, seen), strict=True)]
    panel: Panel = []
    for step in seen:
        works, _ = shares_of(step.starts, step.dones, sharing)
        hidden = [
            min(1.0, max(0.0, (step.computed - start) / length))
            for start, length in zip(step.starts, usual, strict=True)
        ]
        panel.append(list(zip(hidden, works, strict=True)))
    return _combined(slowdown_of([panel]), expected, UNSEEN_SLOWDOWN)


def _lengths(step: Wired) -> list[float]:
    """Returns how long each bucket moved."""
    return [done - start for start, done in zip(step.starts, step.dones, strict=True)]


def _compute_slowdown(recorded: Recorded, seen: Sequence[Wired], wire: Wire | None) -> Guess:
    """Compares equal stretches of a backward, in steps where communication covered more or less of them."""
    expected = None if wire is None or wire.compute_beside is None else wire.compute_beside - 1
    if not recorded.by_parameter or recorded.gpu:
        return _combined(None, expected, UNSEEN_SLOWDOWN)
    bounds = segment_bounds(recorded)
    panels: list[Panel] = [[] for _ in recorded.ranks]
    for step, on_wire in zip(recorded.steps, seen, strict=True):
        quiet = Busy(union(zip(map(int, on_wire.starts), map(int, on_wire.dones), strict=True)), 1.0)
        for rank, row in enumerate(step):
            marks = [at for bound in bounds if (at := row.fires[bound]) is not None]
            if len(marks) == len(bounds) and all(b > a for a, b in pairwise(marks)):
                panels[rank].append(_covered(marks, quiet.worked(marks)))
    return _combined(slowdown_of(panels), expected, UNSEEN_SLOWDOWN)


def segment_bounds(recorded: Recorded) -> list[int]:
    """Returns the units at which segments of the backward start and end, each as long as the others or longer.

    What lies between the gradients of a layer's weight and its bias is no compute, but it may hold a launch.
    """
    backwards = [step[0] for step in recorded.steps]
    usual: list[float] = []
    for unit in range(len(recorded.units)):
        seen = [at - rank.backward for rank in backwards if (at := rank.fires[unit]) is not None]
        usual.append(max(fmean(seen) if seen else 0.0, usual[-1] if usual else 0.0))
    least, bounds = (usual[-1] - usual[0]) / SEGMENTS, [0]
    for unit, at in enumerate(usual):
        if at - usual[bounds[-1]] >= least:
            bounds.append(unit)
    return bounds


def _covered(marks: Sequence[float], alone: Sequence[float]) -> list[tuple[float, float]]:
    """Returns per stretch between two marks, in which share of it something moved, and how long it took.

    ``alone`` is the time up to each mark in which nothing moved.
    """
    taken = [b - a for a, b in pairwise(marks)]
    return [(1 - (b - a) / ns, ns) for (a, b), ns in zip(pairwise(alone), taken, strict=True)]


def _combined(seen: tuple[float, float] | None, expected: float | None, unseen: float = 0.0) -> Guess:
    """Draws what the job shows towards what a sweep found (or towards none) by as much as it is uncertain.

    ``unseen`` is the standard error where neither shows anything.
    """
    prior = Guess(0.0, PRIOR_SLOWDOWN) if expected is None else Guess(expected, max(0.05, SWEEP_DOUBT * expected))
    if seen is None:
        return Guess(0.0, unseen) if expected is None else prior
    value, error = Expected(*prior).drawn(*seen)
    return Guess(min(MOST_SLOWDOWN, max(0.0, value)), error)


def _copy(recorded: Recorded) -> float:
    """Returns the time per byte by which DDP copies buckets back in turn, as explains each wait's end."""
    after = list(accumulate(reversed(recorded.sizes)))[::-1]
    rates = []
    for step in recorded.steps:
        for rank in step:
            bounds = [(rank.synced - done) / size for done, size in zip(rank.done, after, strict=True)]
            rates.append(max(0.0, min([(rank.synced - rank.computed) / after[0], *bounds])))
    return median(rates)


def _hook_cost(hook: str, wire: Wire | None) -> Guess | None:
    known = None if wire is None else wire.encode_ns_per_byte.get(hook)
    return None if known is None else Guess(known, SWEEP_DOUBT * known)


def _copies(count: float, copy: float, gpu: bool) -> Guess:
    """Returns what so many copies cost, where the job shows one, or as usual."""
    likely = count * (copy if copy > LEAST_COPY else LIKELY_COPY[gpu])
    return Guess(likely, CAST_DOUBT * likely)


def _lag(recorded: Recorded) -> float:
    lags = []
    for step in recorded.steps:
        for rank in step:
            before = 0.0
            for ready, launch in zip(rank.ready, rank.launch, strict=True):
                if ready is not None and ready > before:
                    lags.append(launch - ready)
                before = launch
    return max(0.0, median(lags)) if lags else 0.0


def wait_end(dones: Sequence[float], after: Sequence[float], copy: float) -> float:
    """Returns when the last bucket is copied back, as far as the wire decides; ``after``: bytes from each bucket on."""
    return max(done + copy * size for done, size in zip(dones, after, strict=True))


def take_apart(recorded: Recorded, physics: Physics, steps: Sequence[int]) -> list[StepWork]:
    """Returns the work of these steps under these physics."""
    after = list(accumulate(reversed(recorded.sizes)))[::-1]
    expected = [physics.curve.work(nbytes) for nbytes in recorded.sizes]
    loss = physics.compute_slowdown.value / (1 + physics.compute_slowdown.value)
    found = []
    for number in steps:
        step = recorded.steps[number]
        on_wire = wired(step, physics.workers)
        works = alone(on_wire, recorded.sizes, physics.sharing.value, physics.comm_slowdown.value)
        moving = _stretches(on_wire) if loss else []
        waited = wait_end(on_wire.dones, after, physics.copy)
        ranks, busy = [], []
        for rank in step:
            lost = Busy(
                [(max(0.0, a - rank.backward), b - rank.backward) for a, b in moving if b > rank.backward], loss
            )
            ranks.append(_work(rank, recorded, physics, lost, waited, after[0]))
            busy.append(lost)
        found.append(StepWork(ranks, busy, [one.work / most for one, most in zip(works, expected, strict=True)]))
    return found


def _stretches(on_wire: Wired) -> list[tuple[float, float]]:
    """Returns when anything moved beside compute."""
    pairs = zip(map(int, on_wire.starts), map(int, on_wire.dones), strict=True)
    return [(float(a), float(min(b, on_wire.computed))) for a, b in union(pairs) if a < on_wire.computed]


def _work(rank: RankStep, recorded: Recorded, physics: Physics, lost: Busy, waited: float, nbytes: int) -> Work:
    at = rank.fires if recorded.by_parameter else rank.ready
    known = [0.0 if t is None else t - rank.backward + physics.lag for t in at]
    if not recorded.by_parameter:
        known = [launch - rank.backward for launch in rank.launch]
    modelled = max(rank.computed + physics.copy * nbytes, waited)
    return Work(
        before=rank.backward - rank.start,
        at=known,
        latest=list(accumulate(known, max)),
        compute=lost.worked([rank.computed - rank.backward])[0],
        tail=rank.end - modelled,
        data=rank.data,
        optimizer=rank.optimizer,
    )


def noise(values: Sequence[float]) -> float:
    """Returns by how much their mean may be off: as much as quarters of the run differ, and no less than by chance.

    A machine drifts, so that more steps of one run say little about another run: it is like one more quarter.
    """
    if len(values) < 2:
        return 0.0
    quarter = len(values) // QUARTERS
    means = [fmean(values[i * quarter : (i + 1) * quarter]) for i in range(QUARTERS)] if quarter else [0.0, 0.0]
    return max(stdev(means), stdev(values) / sqrt(len(values)))
