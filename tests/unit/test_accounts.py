"""Lost time: accounts that add up. Goodput: what steps took of all time."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.incident import Account, LostTime
from ddpwatch.analysis.goodput import RunSpan
from ddpwatch.analysis.window import summarise
from ddpwatch.wire.messages import Mark, Step
from tests.support.frames import (
    EPOCH_NS,
    MS,
    START_NS,
    bare,
    beat,
    bye,
    diagnosed,
    hello,
    state_of,
    step,
    synchronous,
)
from tests.unit.test_pauses import after

S = 1000 * MS
LATE = st.lists(st.integers(0, 300), min_size=3, max_size=3)
STATUS = st.sampled_from(["ok", "ok", "shadow", "shadow", "unwatched", "warmup", "aborted", "unresolved"])
MARK = st.tuples(st.sampled_from(["gc", "save", "compile", "validation"]), st.integers(0, 2), st.integers(0, 90))


@st.composite
def runs(draw):
    """Steps of three ranks, each with a status, a gap before it, and perhaps a mark."""
    messages, at = [], START_NS
    for number in range(draw(st.integers(1, 25))):
        late, status = draw(LATE), draw(STATUS)
        at += draw(st.sampled_from([0, 0, 0, 50 * MS, 3]))
        if draw(st.booleans()):
            kind, rank, since = draw(MARK)
            start = at + since * MS
            messages.append(Mark(rank=rank, kind=kind, name=kind, start_ns=start - 30 * MS, end_ns=start + 7 * MS + 1))
        for rank, own in enumerate(late):
            wait = max(late) - own
            if status in ("unwatched", "unresolved"):
                one = bare(rank, number)
                one.status, one.duration_ns = status, (100 + max(late)) * MS
            elif status == "shadow":
                one = step(rank, number, own, wait)
                one.status, one.comm_done, one.hook_param, one.hook_ns = "shadow", [None, None], [], []
            else:
                one = step(rank, number, own, wait)
                one.status = status
            one.start_ns = at + draw(st.integers(0, 5))
            one.duration_ns += draw(st.integers(0, 999)) - (one.start_ns - at)
            messages.append(one)
        at += (100 + max(late)) * MS + 1000
    return messages


@settings(max_examples=50)
@given(runs())
def test_accounts_add_up_to_the_last_nanosecond(messages):
    state = state_of([hello(0, 3), hello(1, 3), hello(2, 3), *messages, bye()])
    lost = state.diagnosis.lost()
    ends, starts, times = {}, {}, Counter()
    for message in messages:
        if not isinstance(message, Mark):
            rank, start = message.rank, message.start_ns
            starts.setdefault(rank, start)
            times[rank] += message.duration_ns + max(0, start - ends.get(rank, start))
            ends[rank] = max(ends.get(rank, 0), start + message.duration_ns)
    assert sum(account.ns for account in lost.accounts) == lost.rank_ns == times.total()
    assert all(account.ns > 0 for account in lost.accounts)
    assert 0 <= (lost.watched or 0) <= 1


def test_waits_are_the_last_rank_s_and_transfers_the_wire_s():
    """Rank 1 launches 40 ms late. Rank 0 computes for 10 ms of that, and waits; both then wait for the transfer."""
    lost = diagnosed([(0, 40)] * 20).diagnosis.lost()
    accounts = {(account.name, account.rank): account.ns for account in lost.accounts if account.phase != "optimizer"}
    assert accounts["waiting", 1] == 20 * 30 * MS
    assert accounts["transfer", None] == 20 * (20 + 10) * MS
    assert ("jitter", None) not in accounts


def test_light_steps_say_the_same():
    late = [one for ranks in synchronous([(0, 40)] * 20) for one in ranks]
    for one in late:
        one.status, one.comm_done, one.hook_param, one.hook_ns = "shadow", [None, None], [], []
    lost = state_of([hello(0), hello(1), *late]).diagnosis.lost()
    accounts = Counter({account.name: account.ns for account in lost.accounts if account.name != "compute"})
    assert accounts["waiting"] == 20 * 30 * MS
    assert accounts["transfer"] == 20 * (20 + 10) * MS


def test_light_steps_know_when_the_wire_is_busy() -> None:
    """Rank 1 launches its last bucket 20 ms late, while the first one's data still travels, until 2 ms before the end.
    Full steps show that nobody waits for rank 1, and how long transfers take."""
    steps = [one for ranks in synchronous([(0, 20)] * 60) for one in ranks]
    for one in steps:
        one.comm_done = [108 * MS, one.comm_done[1]]
        if one.step >= 20:
            one.status, one.comm_done, one.hook_param, one.hook_ns = "shadow", [None, None], [], []
    lost = state_of([hello(0), hello(1), *steps]).diagnosis.lost()
    accounts = Counter({account.name: account.ns for account in lost.accounts})
    assert accounts["waiting"] + accounts["jitter"] == 0
    assert accounts["transfer"] == 60 * (30 + 10) * MS


PARTS = ("steps", "pauses", "hangs", "startup", "other")


def time_of(*accounts, ranks=2, between_s=0, first=0):
    """The parts of a run of 100 s whose first step ends after 11 s and took 1 s."""
    span = RunSpan()
    for at_s, message in ((0, hello()), (11, step(0, first)), (100, bye())):
        span.apply_message(
            replace(message, duration_ns=S) if isinstance(message, Step) else message, EPOCH_NS + at_s * S
        )
    own = tuple(Account(name, None, phase, seconds * S) for name, phase, seconds in accounts)
    found = span.time(LostTime(accounts=own, between_steps_ns=between_s * S), ranks)
    assert sum(found.seconds.values()) == pytest.approx(ranks * (found.until - found.since))
    return [found.seconds[part] for part in PARTS], found.lost_seconds


def test_steps_are_what_neither_starts_pauses_nor_ends():
    accounts = [("compute", "forward", 80), ("transfer", "exposed_comm", 20), ("input", "data", 9), ("startup", "", 2)]
    accounts += [("pause", "checkpoint", 6), ("waiting", "checkpoint", 5), ("waiting", "backward", 7)]
    accounts += [("other", "", 12), ("other", "aborted", 3)]
    assert time_of(*accounts, between_s=8) == ([120, 11, 0, 22, 47], 47)


def test_a_hang_and_a_stall_take_the_time_of_all_ranks():
    accounts = [("compute", "", 100), ("waiting", "hang", 30), ("pause", "hang", 30)]
    accounts += [("waiting", "pause", 3), ("other", "pause", 7)]
    assert time_of(*accounts)[0] == [100, 10, 60, 20, 10]


def test_whoever_comes_later_judges_from_there_on():
    assert time_of(("compute", "", 150), first=700)[0] == [150, 0, 0, 0, 30]


def test_before_the_first_step_there_is_none():
    assert RunSpan().time(LostTime(), 2) is None


@pytest.mark.parametrize("watched", [True, False])
@pytest.mark.parametrize("together", [True, False])
def test_the_mean_step_has_the_time_in_which_one_rank_alone_is_between_steps(watched: bool, together: bool) -> None:
    """Every ten steps rank 0 saves for 900 ms: the other saves too, or waits for it in its next step."""
    messages, at = [hello(0), hello(1)], START_NS
    for number in range(100):
        saves = 900 * MS if number and number % 10 == 0 else 0
        for rank in range(2):
            in_step = saves if rank == 1 and not together else 0
            one = step(rank, number, wait_ms=in_step // MS) if watched or number < 10 else bare(rank, number)
            one.start_ns = at + saves - in_step
            one.duration_ns = 100 * MS + in_step
            messages.append(one)
        at += 100 * MS + saves
    state = state_of(messages)
    newest = summarise(state.window()).ranks
    assert newest[0].step_ns == pytest.approx(newest[1].step_ns)
    found = state.diagnosis._ledger.estimator.estimate()
    assert found.step_ns == pytest.approx(100 * MS if together else (at - START_NS) / 100)
    assert sum(found.phases_ns.values()) == pytest.approx(found.step_ns)


def test_stalls_of_which_half_are_bare_leave_the_other_steps_as_they_are() -> None:
    """Every 20 steps rank 0 computes for 2 s more. Between, there are more long steps than are kept as references."""
    lateness = [(2000, 0) if number % 20 == 19 else (0, 12 * (number % 3)) for number in range(240)]
    estimates = []
    for hidden in (False, True):
        messages: list[Step] = []
        for ranks in synchronous(lateness):
            for one in ranks:
                is_bare = hidden and (one.step % 40 == 39 or (one.step > 12 and one.step % 4 == 2))
                of_it = {"start_ns": one.start_ns, "duration_ns": one.duration_ns}
                messages.append(replace(bare(one.rank, one.step), **of_it) if is_bare else one)
        ledger = state_of([hello(0), hello(1), *messages]).diagnosis._ledger
        estimates.append((ledger.estimator.estimate(), ledger.as_estimated()))
    (known, accounts), (found, estimated) = estimates
    for phase, ns in known.phases_ns.items():
        assert found.phases_ns[phase] == pytest.approx(ns, rel=0.03), phase
    for account in (("transfer", "exposed_comm"), ("compute", "forward")):
        assert estimated[account] == pytest.approx(accounts[account], rel=0.03)


def test_pauses_are_their_rank_s_and_what_others_wait_for_it_whether_watched_or_not() -> None:
    """Every 40 steps rank 0 is in the gap for 700 ms more. Two bare ones come first, and two later."""
    messages, at = [hello(0), hello(1)], START_NS
    for number in range(300):
        pause = 700 if number % 40 == 39 else 0
        is_bare = number in (39, 79, 159, 239) or (number > 12 and number % 4 == 2)
        if pause and is_bare:
            about = {"at_ns": at + 500 * MS, "issued": None}
            messages.append(beat(0, number, phase="input", since_ns=at, **about))
            messages.append(beat(1, number, phase="", since_ns=at + 5 * MS, **about))
        for rank in range(2):
            one = step(rank, number, wait_ms=pause if rank else 0)
            one = one if rank else after(one, pause)
            one.start_ns = at
            longer = {"start_ns": at, "duration_ns": one.duration_ns}
            messages.append(replace(bare(rank, number), **longer) if is_bare else one)
        at += one.duration_ns
    lost = state_of(messages).diagnosis.lost()
    spent = Counter({(account.name, account.rank, account.phase): account.ns for account in lost.accounts})
    assert spent["waiting", 0, "pause"] == pytest.approx(7 * 700 * MS, rel=0.03)
    assert spent["other", None, "pause"] == pytest.approx(7 * 700 * MS, rel=0.1)
    assert sum(ns for (name, *_), ns in spent.items() if name == "jitter") < 0.02 * 7 * 700 * MS
