"""What an answer comes to, in sentences: the command prints them first, and the dashboard above its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ddpwatch.common.text import counted, percent, three_digits
from ddpwatch.whatif.answer import NOTABLE, Prediction, Refused, WhatIfAnswer
from ddpwatch.whatif.scenarios import Change
from ddpwatch.whatif.wording import name_of

_BOUND = name_of(Change(perfect=True))
_OF_CODE = {"cap": "bucket cap", "hook": "comm hook", "option": "option of DDP"}


def sentences(answer: WhatIfAnswer) -> list[str]:
    """Returns what would gain most, whether a change of code would, and what none exceeds; none contradicts a row.

    If steps have changed their level, that comes first.
    """
    return [*_level(answer), *_gained(answer)]


def _level(answer: WhatIfAnswer) -> Iterator[str]:
    """Yields since when steps take another time, if they do, and whether these are of both levels."""
    if answer.since_step is not None:
        older = f"{answer.before} of these {answer.steps} are older, and figures mix both: record more (--detail high)"
        used = older if answer.before else "these alone count"
        yield f"steps take another time since step {answer.since_step}, when the verdict's incident began; {used}"


def _gained(answer: WhatIfAnswer) -> list[str]:
    fault, code = surest(answer.scenarios, ["fault"]), best(answer.scenarios)
    if code is not None:
        first = [fault] if fault is not None and fault.gain_low_ms > code.gain_low_ms else []
        return [*map(_gains, [*first, code]), *_at_most(answer)]
    most = fault or surest(answer.scenarios, ["other"])
    return [*map(_gains, filter(None, [most])), *_nothing_sure(answer.scenarios), *_at_most(answer)]


def best(predictions: Iterable[Prediction]) -> Prediction | None:
    """Returns the change of code to the same training that is surest to gain; None if none is."""
    return surest(predictions, _OF_CODE)


def surest(predictions: Iterable[Prediction], kinds: Iterable[str]) -> Prediction | None:
    """Returns the change of these kinds that gains most, at the low end of the interval; None if none is sure to."""
    found = (one for one in predictions if one.kind in kinds and one.sure)
    return max(found, key=lambda one: one.gain_low_ms, default=None)


def not_predicted(refused: Iterable[Refused]) -> Iterator[tuple[str, str]]:
    """Yields changes, those that were refused for one reason together, and the reason."""
    reasons: dict[str, list[str]] = {}
    for one in refused:
        reasons.setdefault(one.why, []).append(one.change)
    yield from ((", ".join(names), why) for why, names in reasons.items())


def gain_text(value_ms: float) -> str:
    """Returns three digits, two decimals at most, and no negative zero."""
    return f"{round(value_ms, 2) + 0.0:.2f}" if abs(value_ms) < 9.995 else three_digits(value_ms)


def interval_text(found: Prediction, to: str = " to ") -> str:
    """Returns the 90 % interval of the gain."""
    return f"{gain_text(found.gain_low_ms)}{to}{gain_text(found.gain_high_ms)}"


def _gains(found: Prediction) -> str:
    interval = f"{interval_text(found)}; {percent(found.gain, 1)}"
    where = "over these steps, " if found.kind == "fault" else ""  # a rank late in others may be another one
    return f"{where}{found.change} would gain {gain_text(found.gain_ms)} ms a step ({interval})"


def _nothing_sure(predictions: Sequence[Prediction]) -> Iterator[str]:
    """Yields which kinds of changes are not sure to help: all, or those of code; nothing if there are none."""
    changes = [one for one in predictions if one.kind != "bound"]
    if any(one.sure for one in changes):
        changes = [one for one in changes if one.kind in _OF_CODE]
        what = _or([name for kind, name in _OF_CODE.items() if kind in {one.kind for one in changes}])
    else:
        what = "change"
    if changes:
        more = min(filter(None, (one.more_steps for one in changes)), default=None)
        record = f"record {counted(more, 'more step')} timed in full (--detail high)"
        yield f"no {what} here is sure to help; {'more steps would not change that' if more is None else record}"


def _or(names: Sequence[str]) -> str:
    *others, last = ["", *names]
    return f"{', '.join(filter(None, others))} or {last}" if len(names) > 1 else last


def _at_most(answer: WhatIfAnswer) -> Iterator[str]:
    """Yields what the bound alone says, if anything notable is exposed."""
    replayed = answer.replayed
    bound = next((one for one in answer.scenarios if one.change == _BOUND), None)
    if bound is None or replayed.exposed_ms < NOTABLE * replayed.measured_ms:
        return
    gains = "may gain nothing, and" if bound.gain_low_ms <= 0 else "gains"
    most = f"{gains} at most {gain_text(max(bound.gain_ms, 0.0))} ms ({interval_text(bound)})"
    text = f"any cap, hook or link {most}, if communication took no time"
    stays = f"; ranks still wait {gain_text(bound.exposed_ms)} ms for the last one"
    yield text + (stays if bound.exposed_ms > NOTABLE * replayed.measured_ms else "")
