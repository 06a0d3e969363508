"""Lost time: accounts that add up."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.wire.messages import Mark
from tests.support.frames import (
    MS,
    START_NS,
    bare,
    bye,
    diagnosed,
    hello,
    state_of,
    step,
    synchronous,
)

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
