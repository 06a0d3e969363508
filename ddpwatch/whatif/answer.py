"""Asks a run what if: each prediction with its interval, its gain, its reason, and what it assumes.

A prediction is the measured step plus the *difference* between two replays, so that what both get wrong cancels. The
90 % interval adds up what is uncertain: the mean of the recorded steps and that of the run to come, each fitted number,
by replaying with the number a standard error off, and what the replay of the recorded setting itself gets wrong.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from statistics import NormalDist, stdev

from ddpwatch.analysis.diagnosis.incident_json import Figures
from ddpwatch.common.text import size
from ddpwatch.common.units import NS_PER_MS
from ddpwatch.errors import UsageError
from ddpwatch.whatif.assignment import MIB
from ddpwatch.whatif.model import Physics, fit, noise, take_apart
from ddpwatch.whatif.recorded import FULL, Recorded
from ddpwatch.whatif.replay import Outcome, Replay
from ddpwatch.whatif.scenarios import SWEEP, Change, completed, own_time, plan, recorded_limits, refusal
from ddpwatch.whatif.wire import Wire
from ddpwatch.whatif.wording import assumptions, code_of, name_of

Z90 = NormalDist().inv_cdf(0.95)
T90_OF_QUARTERS = 2.353  # Student's t: the deviation of a run's four quarters has three degrees of freedom
CAPS_MIB = (1.0, 2.0, 5.0, 10.0, 25.0, 50.0, 100.0)
FIRST_CAPS_MIB = (1.0,)
_ANOTHER_CAP = Change(cap_mib=1.0)
MOST_STEPS = 256  # played per change; of more, one of n, n being a power of two
BUCKET_STEPS = 12_288  # at most so many buckets in them
FEW_STEPS = 16  # played with a number that is off
MODEL_ERROR = 0.15  # that the model may miss of the exposed communication that is new, or that is left of the old
RUN_TO_RUN = 0.01  # by which two runs of one job differ, at least, beyond what their own drift explains
MOST_GUESS = 0.10  # of the step: what a slower link or PowerSGD may be off by (with 90 %), if no sweep has measured it
NOTABLE = 0.01  # of a step: from here on, something is worth a word


class Prediction(Figures, frozen=True):
    """One change, of this `Change.kind`. Times in ms; ``gain`` is the share of the measured step that goes away.

    ``low`` and ``high`` are the 90 % interval of another run's mean step. ``gain_low_ms`` and ``gain_high_ms`` are that
    of the gain in a run that would be as this one was: each step is compared with itself, so how much steps and runs
    differ does not count. ``more_steps``: further full steps from which on, were they like these, the interval would
    leave out 0; 0 if it does, None if steps alone cannot do that. ``p90_ms``: nine in ten of the recorded steps would
    take no longer.
    ``exposed_ms`` is the part of the step in which the mean rank waits for buckets. ``cap_mib`` is the bucket cap under
    the change, None where buckets stay; ``code`` is empty if no code makes it.
    """

    change: str
    kind: str
    cap_mib: float | None
    step_ms: float
    low: float
    high: float
    p90_ms: float
    exposed_ms: float
    gain_ms: float
    gain: float
    gain_low_ms: float
    gain_high_ms: float
    more_steps: int | None
    why: str
    assumes: str
    code: str

    @property
    def sure(self) -> bool:
        """Whether it helps, as far as that can be known: the gain's interval leaves out 0."""
        return self.gain_low_ms > 0


class ReplayedSetting(Figures, frozen=True):
    """The recorded setting, measured and replayed; ``error`` is by how much the replay is off, as a share."""

    step_ms: float
    measured_ms: float
    measured_p90_ms: float
    error: float
    exposed_ms: float


class Refused(Figures, frozen=True):
    """A change that the run carries no prediction of, and why."""

    change: str
    why: str


class WhatIfAnswer(Figures, frozen=True):
    """The answer, as ``ddpwatch whatif --json`` prints it.

    Attributes:
        steps: How many full steps it rests on; ``left_out`` are older ones.
        since_step: From which on steps are longer or shorter (see `Recorded`); ``before`` of the steps are older.
        scenarios: The surest to help first, then the bound.
    """

    steps: int
    left_out: int
    since_step: int | None
    before: int
    replayed: ReplayedSetting
    scenarios: Sequence[Prediction]
    refused: Sequence[Refused]


class WhatIf:
    """Answers for one run.

    Args:
        recorded: The run.
        wire: What a sweep has measured.

    Raises:
        UsageError: The sweep is of another backend, or of another kind of device.

    Attributes:
        refused: What was asked for and cannot be predicted, with the reason.
    """

    def __init__(self, recorded: Recorded, wire: Wire | None = None) -> None:
        if wire is not None and recorded.backend and wire.backend != recorded.backend:
            reason = f"wire.json was measured over {wire.backend}, and the job uses {recorded.backend}"
            raise UsageError(reason, f"run the sweep with --backend {recorded.backend}")
        if wire is not None and recorded.gpu != (wire.device != "cpu"):
            kind = "GPUs" if recorded.gpu else "CPUs"
            reason = f"wire.json was measured on {wire.device}, and the job runs on {kind}"
            raise UsageError(reason, "run the sweep where the job runs")
        self.recorded = recorded
        self.physics = fit(recorded, wire)
        self.refused: list[tuple[str, str]] = []
        self._wire = wire
        self._varied = list(self.physics.variations())
        self._replays: dict[tuple[int, int], tuple[Replay, Outcome]] = {}
        self._durations = recorded.durations
        self.replayed = self._replayed(self.physics, 1)[1]

    def ask(self, changes: Iterable[Change]) -> list[Prediction]:
        """Returns the predictions that the run carries, the surest gain first; `refused` takes the others."""
        found = []
        for asked in changes:
            change = completed(self.recorded, asked)
            reason = refusal(self.recorded, self.physics, change)
            prediction = None if reason else self._predict(change)
            if prediction is not None and self._wire is None:
                reason = _too_wide(change, prediction)
            if prediction is None or reason:
                self.refused.append((name_of(change), reason))
            else:
                found.append(prediction)
        return ranked(found)

    def _predict(self, change: Change) -> Prediction:
        planned = plan(self.recorded, self.physics, change)
        stride = self._stride(len(planned.buckets))
        replay, before = self._replayed(self.physics, stride)
        outcome, measured = replay.run(planned), self.recorded.measured_ns
        step = max(0.0, measured + outcome.mean - before.mean)
        model_doubt, chance_doubt = self._model_doubt(before, outcome), self._chance_doubt(change, before, outcome)
        gain, gain_doubt = measured - step, Z90 * math.hypot(model_doubt, chance_doubt)
        doubt = math.hypot(gain_doubt, Z90 * self._run_doubt(before, outcome))
        return Prediction(
            change=name_of(change),
            kind=change.kind,
            cap_mib=change.cap_mib,
            step_ms=step / NS_PER_MS,
            low=max(0.0, step - doubt) / NS_PER_MS,
            high=(step + doubt) / NS_PER_MS,
            p90_ms=self._p90(stride, before, outcome) / NS_PER_MS,
            exposed_ms=sum(outcome.exposed) / change.accumulate / NS_PER_MS,
            gain_ms=gain / NS_PER_MS,
            gain=gain / measured,
            gain_low_ms=(gain - gain_doubt) / NS_PER_MS,
            gain_high_ms=(gain + gain_doubt) / NS_PER_MS,
            more_steps=self._more_steps(gain / Z90, model_doubt, chance_doubt),
            why=self._why(change, before, outcome, planned.sizes),
            assumes="; ".join(assumptions(change, self.recorded, self._wire is not None)),
            code=code_of(change),
        )

    def _p90(self, stride: int, before: Outcome, after: Outcome) -> float:
        """Returns what nine in ten steps take at most: each recorded one, with what the change does to it (ns)."""
        took = [self._durations[number] for number in played_steps(len(self._durations), stride)]
        return _p90([ns + new - old for ns, new, old in zip(took, after.steps, before.steps, strict=True)])

    def _run_doubt(self, before: Outcome, after: Outcome) -> float:
        """Returns by how much this run and the next may differ (standard error, ns)."""
        recorded, scale = noise(self.replayed.steps), noise(before.steps)
        drifted = max(noise(after.steps) * (recorded / scale if scale else 1.0), recorded * after.mean / before.mean)
        return math.hypot(T90_OF_QUARTERS / Z90 * math.hypot(recorded, drifted), RUN_TO_RUN * after.mean)

    def _model_doubt(self, before: Outcome, after: Outcome) -> float:
        """Returns by how much what the change does may be wrong, however many steps there are (standard error, ns)."""
        exposed = sum(after.exposed)
        moved = min(exposed, abs(exposed - sum(before.exposed)))
        return math.hypot(MODEL_ERROR * moved / Z90, self.replayed.mean - self.recorded.measured_ns)

    def _chance_doubt(self, change: Change, before: Outcome, after: Outcome) -> float:
        """Returns by how much it may be wrong because steps are few (standard error, ns)."""
        fitted = self._fitted_doubt(change) if change != Change() else 0.0
        return math.hypot(paired_error(before.steps, after.steps), fitted)

    def _more_steps(self, gain: float, model_doubt: float, chance_doubt: float) -> int | None:
        """Returns `Prediction.more_steps`; ``gain`` is in units of the interval's half width."""
        known = len(self.recorded.steps)
        if gain > math.hypot(model_doubt, chance_doubt):
            return 0
        if gain <= model_doubt:
            return None
        needed = math.floor(known * chance_doubt**2 / (gain**2 - model_doubt**2)) + 1
        return needed - known if needed <= FULL.of(len(self.recorded.ranks)) else None

    def _fitted_doubt(self, change: Change) -> float:
        """Returns how much each fitted number changes the difference of the two replays, at most of both directions."""
        stride = max(1, len(self.recorded.steps) // FEW_STEPS)
        base = self._difference(change, self.physics, stride)
        shifts: list[float] = []
        for name, *pair in self._varied:
            if _matters(name, change):
                shifts.append(max(abs(self._difference(change, physics, stride) - base) for physics in pair))
        return math.hypot(*shifts)

    def _difference(self, change: Change, physics: Physics, stride: int) -> float:
        replay, before = self._replayed(physics, stride)
        return replay.run(plan(self.recorded, physics, change)).mean - before.mean

    def _stride(self, buckets: int) -> int:
        """Returns n, to play one of n steps."""
        most = max(FEW_STEPS, min(MOST_STEPS, BUCKET_STEPS // max(1, buckets)))
        return 1 << (math.ceil(len(self.recorded.steps) / most) - 1).bit_length()

    def _replayed(self, physics: Physics, stride: int) -> tuple[Replay, Outcome]:
        """Returns the replay of one of n steps, and what it makes of the recorded setting."""
        key = id(physics), stride
        found = self._replays.get(key)
        if found is None:
            steps = played_steps(len(self.recorded.steps), stride)
            replay = Replay(take_apart(self.recorded, physics, steps), physics)
            found = self._replays[key] = replay, replay.run(plan(self.recorded, physics, Change()))
        return found

    def _why(self, change: Change, earlier: Outcome, outcome: Outcome, sizes: Sequence[int]) -> str:
        """Returns what the change does to the exposed communication; otherwise what else it takes away."""
        if change.accumulate > 1:
            return f"buckets travel once in {change.accumulate} batches"
        if change.bucket_view and not change.moves_buckets and not change.hook:
            return "gradients are not copied back after the wait"
        before, after = sum(earlier.exposed), sum(outcome.exposed)
        reason = _reason(change)
        text = f"{reason}exposed communication {_ms(before)} → {_ms(after)} ms"
        rest = earlier.mean - outcome.mean - (before - after)
        notable = NOTABLE * self.recorded.measured_ns
        if (
            change.without_lateness_of is not None and rest > notable
        ):  # the mean rank's: with the other, that is the gain
            text = f"{reason}ranks' own work takes {_ms(rest)} ms less; {text.removeprefix(reason)}"
        if not reason and abs(rest) > max(abs(before - after), notable):
            return f"{text}; {'less' if rest > 0 else 'more'} moves beside compute, and slows it"
        if abs(before - after) < notable:
            return text if reason else f"{text}: hardly a difference"
        return f"{text}: {self._bucket(before > after, earlier, outcome, sizes)}"

    def _bucket(self, gains: bool, earlier: Outcome, outcome: Outcome, sizes: Sequence[int]) -> str:
        """Returns the bucket whose exposure changes most.

        Of other buckets, the one exposed most before or, if worse, after.
        """
        before, after = earlier.exposed, outcome.exposed
        stays = self.recorded.sizes == list(sizes)
        changed = [b - a for b, a in zip(before, after, strict=True)] if stays else before
        if not gains:
            changed = [a - b for b, a in zip(before, after, strict=True)] if stays else after
        held = self.recorded.sizes if gains else sizes
        most = max(range(len(changed)), key=changed.__getitem__)
        text = f"for bucket {most} ({_which(most, len(held))}, {size(held[most])})"
        if not gains:
            return f"ranks then wait {_ms(after[most])} ms {text}"
        rest = f", then {_ms(after[most])}" if stays else f"; then the last of {len(sizes)} has {size(sizes[-1])}"
        return f"ranks waited {_ms(before[most])} ms {text}{rest}"

    def default_changes(self) -> Iterator[Change]:
        """Yields what to try where nothing is asked for.

        All that is a change of code, and what would be gained at most.
        """
        recorded = self.recorded
        if not refusal(recorded, self.physics, _ANOTHER_CAP):
            yield from self._caps()
        if not refusal(recorded, self.physics, Change(hook="fp16")):
            yield from (Change(hook=hook) for hook in ("fp16", "bf16")[: 1 + recorded.gpu])
        if not recorded.flag("gradient_as_bucket_view"):
            yield Change(bucket_view=True)
        if recorded.flag("find_unused_parameters") and not recorded.flag("static_graph"):
            yield Change(static_graph=True)
        if recorded.micro_steps == 1:
            yield Change(accumulate=2)
        yield from self._others()

    def _caps(self) -> Iterator[Change]:
        """Yields other bucket caps, and with torch's list of them, another one of the first bucket."""
        recorded = self.recorded
        limits = recorded_limits(recorded)
        now = None if limits is None or limits.first != limits.cap else limits.cap / MIB
        caps = [cap for cap in CAPS_MIB if cap != now and cap < 2 * sum(recorded.sizes) / MIB]
        yield from (Change(cap_mib=cap) for cap in caps)
        if has_cap_list(recorded.torch):
            yield from (Change(first_mib=first, cap_mib=cap) for first in FIRST_CAPS_MIB for cap in caps if cap > first)

    def note_what_is_missing(self) -> None:
        """Says why no bucket caps and hooks are among the default changes, where they are not."""
        reason = refusal(self.recorded, self.physics, _ANOTHER_CAP)
        if reason:
            self.refused.append(("other bucket caps", reason))

    def _others(self) -> Iterator[Change]:
        """Yields what no line of code changes: the slowest rank, slow input, and communication itself."""
        own, step = own_time(self.recorded), self.recorded.measured_ns
        slowest = max(own, key=own.__getitem__)
        if own[slowest] - min(own.values()) > NOTABLE * step:
            yield Change(without_lateness_of=slowest)
        waits = [rank.data for ranks in self.recorded.steps for rank in ranks]
        if None not in waits and sum(filter(None, waits)) / len(waits) > NOTABLE * step:
            yield Change(no_input=True)
        yield Change(perfect=True)

    def answer(self, predictions: Sequence[Prediction]) -> WhatIfAnswer:
        """Returns the predictions, with what they rest on and what was refused."""
        measured = self.recorded.measured_ns
        return WhatIfAnswer(
            steps=len(self.recorded.steps),
            left_out=self.recorded.left_out,
            since_step=self.recorded.since_step,
            before=self.recorded.before,
            replayed=ReplayedSetting(
                step_ms=self.replayed.mean / NS_PER_MS,
                measured_ms=measured / NS_PER_MS,
                measured_p90_ms=_p90(self._durations) / NS_PER_MS,
                error=self.replayed.mean / measured - 1,
                exposed_ms=sum(self.replayed.exposed) / NS_PER_MS,
            ),
            scenarios=predictions,
            refused=[Refused(change, why) for change, why in self.refused],
        )


def ranked(predictions: Iterable[Prediction]) -> list[Prediction]:
    """Returns the surest gain first; bounds last, as no change reaches them."""
    return sorted(predictions, key=lambda found: (found.kind == "bound", -found.gain_low_ms))


def has_cap_list(torch: str) -> bool:
    """Returns whether that version of torch has ``bucket_cap_mb_list``; an unknown one may."""
    numbers = re.match(r"(\d+)\.(\d+)", torch)
    return numbers is None or (int(numbers[1]), int(numbers[2])) >= (2, 13)


def played_steps(count: int, stride: int) -> list[int]:
    """Picks one step at random of each so many. Every nth could always meet, or never, a rank late in every nth."""
    dice = random.Random(stride)
    return [dice.randrange(first, min(first + stride, count)) for first in range(0, count, stride)]


def paired_error(before: Sequence[float], after: Sequence[float]) -> float:
    """Returns the standard error of the mean difference between two replays of the same steps; 0 for a single one."""
    differences = [b - a for b, a in zip(before, after, strict=True)]
    return stdev(differences) / math.sqrt(len(differences)) if len(differences) > 1 else 0.0


def _too_wide(change: Change, prediction: Prediction) -> str:
    """Returns why what only a sweep can measure is not predicted.

    Empty if it is, or if there is nothing of that kind.
    """
    guess = "a slower link" if change.link < 1 else "what PowerSGD computes" if change.powersgd_rank else ""
    half_ms = prediction.gain_ms - prediction.gain_low_ms
    if not guess or half_ms <= MOST_GUESS * prediction.step_ms or not prediction.step_ms:
        return ""
    return f"{guess} is known to no better than ± {100 * half_ms / prediction.step_ms:.0f} %; {SWEEP}"


def _matters(number: str, change: Change) -> bool:
    """Returns whether a fitted number has a part in what the change does."""
    parts = {
        "cast": change.hook and not change.powersgd_rank,
        "thin": change.powersgd_rank,
        "link": change.link != 1 or change.hook,
        "hops": change.world or change.link != 1,
    }
    return bool(parts.get(number, True))


def _reason(change: Change) -> str:
    """Returns what ranks no longer wait for, before what that does to the buckets.

    Empty if the change is about those.
    """
    if change.without_lateness_of is not None:
        return f"the others no longer wait for rank {change.without_lateness_of}; "
    return "no rank waits for data; " if change.no_input else ""


def _p90(values: Sequence[float]) -> float:
    return sorted(values)[math.ceil(0.9 * len(values)) - 1]


def _which(bucket: int, count: int) -> str:
    """Returns a bucket's place among so many."""
    return "the only one" if count == 1 else f"the last of {count}" if bucket == count - 1 else f"of {count}"


def _ms(ns: float) -> str:
    return f"{ns / NS_PER_MS:.1f}"
