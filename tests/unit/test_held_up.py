"""A stall in a step that nobody watched: whom the others waited for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from cProfile import Profile

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.accounts.accounts import AccountKey
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.wire.messages import Beat, Message, Step
from tests.support.frames import MS, START_NS, STEP_MS, bare, beat, bye, hello, state_of, step

pytestmark = pytest.mark.same_everywhere

CALM, STALL_MS = 40, 2000
START_MS = CALM * STEP_MS  # of the stall's step


def stalled(rank: int, number: int, start_ms: int, duration_ms: int) -> Step:
    one = bare(rank, number)
    one.start_ns, one.duration_ns = START_NS + start_ms * MS, duration_ms * MS
    return one


def beats(rank: int, issued: int | None, at_ms: Iterable[int] = (600, 1100, 1600)) -> list[Beat]:
    """What a rank sends in the stall's step, from its start (ms), having issued so many collectives."""
    return [
        beat(rank, CALM, phase="", issued=issued, at_ns=START_NS + (START_MS + at) * MS, since_ns=START_NS)
        for at in at_ms
    ]


def stalls(
    messages: Sequence[Message], ranks: int = 3, took: Sequence[tuple[int, int]] | None = None
) -> list[Incident]:
    """The pauses of a run whose last step stalls, unless each rank's start (ms in that step) and duration are given."""
    calm = [step(rank, number) for number in range(CALM) for rank in range(ranks)]
    ends = took or [(0, STEP_MS + STALL_MS)] * ranks
    last = [stalled(rank, CALM, START_MS + start, duration) for rank, (start, duration) in enumerate(ends)]
    state = state_of([*(hello(rank, ranks) for rank in range(ranks)), *calm, *messages, *last])
    return [one for one in state.diagnosis.incidents() if one.kind == "pause"]


def test_it_is_the_rank_that_has_issued_fewer_collectives() -> None:
    """Of real stalls of two seconds, a third were said to be every rank's."""
    (found,) = stalls([*beats(0, 120), *beats(1, 118), *beats(2, 120)])
    assert (found.ranks, found.cost_ns) == ((1,), 2 * STALL_MS * MS)
    assert found.message == f"rank 1 paused for {STALL_MS} ms at step {CALM}"


@pytest.mark.parametrize("behind", [0, 2])
def test_twice_the_ranks_are_twice_the_work(behind: int) -> None:
    """All pairs of heartbeats were compared, for each rank again: with 1,000 ranks, a stall froze the viewer."""

    def calls(ranks: int) -> int:
        meanwhile = [one for rank in range(ranks) for one in beats(rank, 118 if rank < behind else 120)]
        between = [replace(one, phase="input") for one in sorted(meanwhile, key=lambda one: one.at_ns)]
        profile = Profile()
        (found,) = profile.runcall(stalls, between, ranks)
        assert (found.ranks, found.phase) == ((), "between")
        codes = ((getattr(entry.code, "co_filename", ""), entry.callcount) for entry in profile.getstats())
        return sum(count for file, count in codes if file.endswith(("held_up.py", "stall.py")))

    assert calls(48) < 3 * calls(24)


def test_it_is_the_rank_that_sends_nothing_as_one_that_is_stopped() -> None:
    (found,) = stalls([*beats(0, 120), *beats(1, 120), *beats(2, 118, at_ms=(10, 2090))])
    assert found.ranks == (2,)


def test_it_is_the_rank_whose_one_heartbeat_comes_late_and_shows_fewer_collectives() -> None:
    """It was stopped for less than two heartbeats take, and had not gone on by its next one."""
    (found,) = stalls([*beats(0, 120, at_ms=(600,)), *beats(1, 120, at_ms=(600,)), *beats(2, 118, at_ms=(2090,))])
    assert found.ranks == (2,)


def test_it_is_the_rank_that_is_overdue_while_half_of_the_stall_is_still_to_come() -> None:
    """A stall of two heartbeats' time: one came in it, and the others' are no usual step before that."""
    early, late = (600,), (2090,)
    calm = [one for rank in (0, 2) for one in [*beats(rank, 122, early), *beats(rank, 122, late)]]
    (found,) = stalls([*calm, *beats(1, 118, (605,)), *beats(1, 122, late)])
    assert found.ranks == (1,)
    (found,) = stalls([*calm, *beats(1, 118, (150,)), *beats(1, 122, late)])  # not yet overdue
    assert found.ranks == ()
    (found,) = stalls([*beats(0, 122, (1600,)), *beats(1, 118, (1605,)), *beats(2, 122, (1600,))])  # after most of it
    assert found.ranks == ()


def test_it_is_nobody_s_while_all_go_on_through_collectives() -> None:
    """A validation of all ranks, with a collective in each batch: heartbeats a moment apart differ by some."""
    going_on = [*beats(0, 120, (500,)), *beats(0, 160, (1150,)), *beats(1, 123, (560,)), *beats(1, 163, (1200,))]
    (found,) = stalls(going_on, ranks=2)
    assert found.ranks == ()


@pytest.mark.parametrize(
    "messages",
    [
        [beats(0, 120), beats(1, 120), beats(2, 120)],  # the network, perhaps
        [beats(0, None), beats(1, None), beats(2, None)],
        [beats(0, 118), beats(1, 118), beats(2, 120)],
        [beats(0, 120, [50]), beats(1, 118, [50]), beats(2, 120, [50])],  # before the stall
        [[*beats(0, 118, [600]), *beats(0, 120, [1600])], beats(1, 119), beats(2, 120)],  # another one later
        [beats(0, 120), [], []],  # two are silent
    ],
)
def test_it_is_nobody_s_if_nothing_shows_whose(messages: list[list[Beat]]) -> None:
    (found,) = stalls([one for of_rank in messages for one in of_rank])
    assert (found.ranks, found.cost_ns) == ((), 3 * STALL_MS * MS)


def test_a_rank_that_stalls_after_its_last_collective_ends_its_step_last_and_starts_the_next_one_last() -> None:
    long, usual = STEP_MS + STALL_MS, STEP_MS
    (found,) = stalls([], took=[(0, usual), (0, long), (0, usual)])
    assert (found.ranks, found.cost_ns) == ((1,), 0)  # nobody waits in this step
    waiting = places((700, "", 5, ""), (2050, "", STALL_MS, ""), (1500, "", 5, ""))
    (found,) = stalls(waiting, took=[(0, long), (STALL_MS, usual), (0, long)])
    assert (found.ranks, found.cost_ns) == ((1,), 2 * STALL_MS * MS)


def test_both_steps_of_such_a_stall_are_one_incident() -> None:
    long, usual = STEP_MS + STALL_MS, STEP_MS
    after = [stalled(0, CALM + 1, START_MS + usual, long), stalled(1, CALM + 1, START_MS + long, usual)]
    calm = [step(rank, number) for number in range(CALM) for rank in range(2)]
    last = [stalled(0, CALM, START_MS, usual), stalled(1, CALM, START_MS, long)]
    state = state_of([hello(0), hello(1), *calm, *last, *after])
    (found,) = [one for one in state.diagnosis.incidents() if one.kind == "pause"]
    assert (found.ranks, found.cost_ns, found.until_step) == ((1,), STALL_MS * MS, CALM + 1)
    accounts = {(account.name, account.rank): account.ns for account in state.diagnosis.lost().accounts}
    assert accounts["waiting", 1] == STALL_MS * MS


def places(*at_ms: tuple[int, str, int, str]) -> list[Beat]:
    """Heartbeats in the stall's step: of each rank, when, in which phase, since when, and what it does besides."""
    shown = []
    for rank, (at, phase, since, activity) in enumerate(at_ms):
        at_ns, since_ns = (START_NS + (START_MS + ms) * MS for ms in (at, since))
        shown.append(beat(rank, CALM, phase=phase, issued=None, at_ns=at_ns, since_ns=since_ns, activity=activity))
    return shown


def test_it_is_the_rank_that_was_still_between_steps_while_the_others_were_in_theirs() -> None:
    """Of six uploads of 0.6 s, three were said to be every rank's: too short for counts to be compared."""
    messages = places((700, "", 5, ""), (700, "input", 0, ""), (1500, "", 5, ""))
    (found,) = stalls(messages)
    assert (found.ranks, found.phase, found.cost_ns) == ((1,), "between", 2 * STALL_MS * MS)
    assert found.message == f"rank 1 paused for {STALL_MS} ms between steps at step {CALM}"


@pytest.mark.parametrize(
    "messages",
    [
        places((700, "", 5, ""), (700, "input", 0, ""), (1500, "input", 0, "")),  # two are
        places((700, "", 5, ""), (100, "input", 0, ""), (1500, "", 5, "")),  # as in any step
        places((700, "", 5, ""), (700, "input", 0, ""), (1900, "", 1200, "")),  # and another one was for most of it
        places((700, "", 0, ""), (700, "input", 0, ""), (900, "", 0, "")),  # a loop whose bare steps show no forward
        [
            *places((2, "optimizer", 1, "")),
            *places((1200, "input", 0, ""), (700, "input", 0, ""), (700, "input", 0, "")),
        ],
    ],
)
def test_it_is_nobody_s_if_others_were_between_steps_too(messages: list[Beat]) -> None:
    """Nor if they still were in their step before as this one began, or if nothing shows that."""
    (found,) = stalls(messages, took=[(5, STEP_MS + STALL_MS), *[(0, STEP_MS + STALL_MS)] * 2])
    assert (found.ranks, found.cost_ns) == ((), 3 * STALL_MS * MS)


@pytest.mark.parametrize(
    ("activity", "phase", "account"),
    [
        ("validation", "validation", ("pause", "validation")),
        ("data", "data", ("input", "data")),
        ("", "between", ("other", "pause")),  # it was a gap in the accounts, and pauses in the goodput
    ],
)
def test_what_all_ranks_did_meanwhile_has_its_account(activity: str, phase: str, account: AccountKey) -> None:
    calm = [step(rank, number) for number in range(CALM) for rank in range(2)]
    meanwhile = places((700, "input", 0, activity), (900, "input", 0, activity))
    last = [stalled(rank, CALM, START_MS, STEP_MS + STALL_MS) for rank in range(2)]
    diagnosis = state_of([hello(0), hello(1), *calm, *meanwhile, *last]).diagnosis
    (found,) = [one for one in diagnosis.incidents() if one.kind == "pause"]
    assert (found.ranks, found.phase) == ((), phase)
    assert found.severity == ("warning" if phase == "data" else "info")
    accounts = {(one.name, one.phase): one.ns for one in diagnosis.lost().accounts}
    assert accounts[account] >= 2 * STALL_MS * MS * 0.98  # what is longer than the longest step like it


@pytest.mark.parametrize(("waited_ms", "ranks"), [(1500, ()), (700, (1,))])
def test_a_wait_of_all_for_data_is_nobody_s_though_one_rank_s_is_longer(waited_ms: int, ranks: tuple[int, ...]) -> None:
    """Of loaders whose workers start again: the others wait for theirs for most of it, and then for the rank."""

    def waiting(rank: int, until_ms: int) -> list[Beat]:
        early = [at for at in (600, 1100, 1600) if at < until_ms]
        after = beats(rank, 120, (at for at in (600, 1100, 1600) if at >= until_ms))
        start = {"phase": "input", "activity": "data", "issued": 118, "since_ns": START_NS}
        return [beat(rank, CALM, at_ns=START_NS + (START_MS + at) * MS, **start) for at in early] + after

    (found,) = stalls([*waiting(0, waited_ms), *waiting(1, 2000), *waiting(2, waited_ms)])
    assert found.ranks == ranks


def test_a_rank_that_saves_after_a_validation_of_all_is_not_to_blame_for_that() -> None:
    """Saving ends what lies before its step, which so starts late, and the others' step was the longer one."""
    messages = places((700, "input", 0, "validation"), (1200, "input", 0, "validation"))
    for known in (messages, []):  # not even if nothing shows what the others did
        (found,) = stalls(known, ranks=2, took=[(STALL_MS, STEP_MS), (0, STALL_MS + STEP_MS)])
        assert found.ranks == ()
    (found,) = stalls(
        places((700, "input", 0, ""), (1200, "", 5, "")), 2, [(STALL_MS, STEP_MS), (0, STALL_MS + STEP_MS)]
    )
    assert found.ranks == (0,)


def test_a_validation_of_one_rank_while_the_others_wait_in_a_collective_of_their_own() -> None:
    """All of their watched step lies between two, and nobody launched a bucket late."""
    calm = [step(rank, number) for number in range(CALM) for rank in range(2)]
    counts = [beats(0, 118), beats(1, 119)]
    for seen, activity in zip(counts, ("validation", ""), strict=True):
        for one in seen:
            one.phase, one.activity = "input", activity
    last = [step(rank, CALM, duration_ns=(STEP_MS + STALL_MS) * MS) for rank in range(2)]
    for one in last:  # between its start and its forward
        one.spans = [type(span)(span.phase, span.start + STALL_MS * MS, span.end + STALL_MS * MS) for span in one.spans]
        for column in ("comm_ready", "comm_launch", "comm_done", "hook_ns"):
            setattr(one, column, [at + STALL_MS * MS for at in getattr(one, column)])
    diagnosis = state_of([hello(0), hello(1), *calm, *counts[0], *counts[1], *last]).diagnosis
    (found,) = [one for one in diagnosis.incidents() if one.kind == "pause"]
    assert (found.ranks, found.phase, found.severity) == ((0,), "validation", "info")
    assert found.cost_ns == STALL_MS * MS
    accounts = {(one.name, one.rank): one.ns for one in diagnosis.lost().accounts if one.phase == "validation"}
    assert accounts == {("waiting", 0): STALL_MS * MS, ("pause", None): STALL_MS * MS}


@pytest.mark.parametrize("ends", [True, False])
def test_a_hang_whose_step_never_ended_is_lost_time_of_all_ranks(ends: bool) -> None:
    """Rank 0 waits for rank 1 for ten seconds, until its group loses its patience, or for longer."""
    calm = [step(rank, number) for number in range(CALM) for rank in range(2)]
    waits = [one for at in range(600, 10_000, 500) for one in (*beats(0, 120, [at]), *beats(1, 118, [at]))]
    for one in waits:
        one.phase, one.since_ns = "sync" if one.rank == 0 else "forward", START_NS + START_MS * MS
    died = [
        bye(0, "exception", at_ns=waits[-1].at_ns + 500 * MS),
        bye(1, "exception", at_ns=waits[-1].at_ns + 500 * MS),
    ]
    state = state_of([hello(0), hello(1), *calm, *waits, *(died if ends else [])])
    steps_ns = CALM * STEP_MS * 2 * MS
    lost = state.diagnosis.lost()
    waited = sum(one.ns for one in lost.accounts if (one.name, one.rank) == ("waiting", 1))
    assert waited == pytest.approx(9500 * MS, rel=0.1)
    assert lost.rank_ns == pytest.approx(steps_ns + 2 * waited, rel=0.01)
    assert sum(one.ns for one in lost.accounts) == lost.rank_ns
