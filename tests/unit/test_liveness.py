"""Hangs and deaths, on made-up heartbeats: who is named, how soon, what it cost, and what is no hang."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.hangs.liveness import RankLiveness
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.thresholds import KEEP_INCIDENTS
from ddpwatch.analysis.diagnosis.words.next_steps import JobPlaces, next_step
from ddpwatch.analysis.diagnosis.words.verdict import verdict
from ddpwatch.analysis.diagnosis.words.wording import error_quoted, stack_lines
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.window import Summary
from ddpwatch.sampling.stillness import Stillness
from ddpwatch.wire.messages import INTERRUPTED_LAUNCHER, NO_LONGER_WATCHED, Beat, Bye, Group, Stack
from tests.support.frames import EPOCH_NS, beat, bye, hello, killed, step

S = 1_000_000_000
BEAT_S = 0.5
CLOCK_NS = EPOCH_NS - 1000 * S  # of the ranks, behind that of the collector
Position = Mapping[str, Any]


class Run:
    """Ranks that send a heartbeat every half second, from wherever the test puts them."""

    def __init__(self, world: int = 2, groups: Mapping[int, list[int]] | None = None) -> None:
        self.now_s = 0.0
        known = Groups()
        known.apply_message(hello(0, world))
        for group, ranks in (groups or {}).items():
            for rank in ranks:
                known.apply_message(Group(rank=rank, id=group, ranks=ranks))
        self.liveness = RankLiveness(known)
        self.places: dict[int, dict[str, Any]] = {}
        for rank in range(world):
            self.liveness.add_hello(rank, self.received_ns)
            self.put(rank, "forward", step=40)

    @property
    def received_ns(self) -> int:
        return EPOCH_NS + int(self.now_s * S)

    @property
    def clock_ns(self) -> int:
        return CLOCK_NS + int(self.now_s * S)

    def put(self, rank: int, phase: str, **about: Any) -> None:
        """Moves a rank to a phase, now."""
        if about.get("activity"):
            about["activity_since_ns"] = self.clock_ns
        self.places[rank] = {"step": 40, **about, "phase": phase, "since_ns": self.clock_ns}

    def go(self, seconds: float, silent: tuple[int, ...] = ()) -> list[Incident]:
        """Lets time pass; what is found at its end."""
        end_s = self.now_s + seconds
        while self.now_s < end_s:
            self.now_s += BEAT_S
            for rank, place in self.places.items():
                if rank not in silent:
                    self.liveness.add_beat(Beat(rank=rank, at_ns=self.clock_ns, **place), self.received_ns)
            self.liveness.pass_time(self.received_ns)
        return self.found()

    def found(self) -> list[Incident]:
        """What is found now."""
        return [*self.liveness.deaths(self.received_ns), *self.liveness.hangs(self.received_ns)]

    def end_step(self, rank: int, number: int = 40, duration_s: float = 1.0) -> None:
        """The rank sends a step that ends now."""
        start_ns = self.clock_ns - int(duration_s * S)
        one = step(rank, number, start_ns=start_ns, duration_ns=int(duration_s * S))
        self.liveness.add_step(one, self.received_ns)

    def leave(self, rank: int, message: Any) -> None:
        del self.places[rank]
        self.liveness.add_bye(message, self.received_ns)


def only(found: list[Incident]) -> Incident:
    assert len(found) == 1
    return found[0]


def named_after(run: Run, limit_s: float = 60.0) -> float:
    """How many seconds pass until something is found."""
    start_s = run.now_s
    while not run.go(BEAT_S):
        assert run.now_s - start_s < limit_s
    return run.now_s - start_s


def test_on_nccl_the_rank_that_is_one_collective_behind_is_named() -> None:
    """Hosts run ahead, so nobody waits in ``sync``: all are between their steps, where the next wait came."""
    run = Run(8)
    for rank in range(8):
        run.put(rank, "input", step=41, issued_in=[(0, 120 if rank == 5 else 121)])
    assert named_after(run) <= 4.0
    found = only(run.go(1.0))
    assert (found.kind, found.ranks, found.phase, found.since_step, found.open) == ("hang", (5,), "between", 41, True)
    behind = "it has issued 120 collectives, the ranks that wait 121"
    assert found.message == f"rank 5 is stuck between steps at step 41 for 4 s; {behind}"
    assert found.evidence.issued[5] == 120


def test_the_rank_that_does_not_wait_is_named_where_collectives_are_not_counted() -> None:
    run = Run()
    run.put(0, "sync", in_flight=[0, 1])
    run.put(1, "backward")
    found = only(run.go(14.0))
    assert found.message == "rank 1 is stuck in backward of step 40 for 14 s; rank 0 waits for buckets 0, 1"
    assert (found.ranks, found.phase, found.bucket) == ((1,), "backward", 0)


def test_if_all_wait_nobody_is_named() -> None:
    run = Run()
    for rank in (0, 1):
        run.put(rank, "sync", in_flight=[1], issued_in=[(0, 7)])
    found = only(run.go(12.0))
    assert (found.ranks, found.message) == ((), "ranks 0, 1 have been waiting for bucket 1 for 12 s in step 40")


@pytest.mark.parametrize("counts", [None, (43, 43)])
def test_a_rank_that_stopped_is_silent(counts: tuple[int, int] | None) -> None:
    run = Run()
    for rank in (0, 1):
        run.put(rank, "sync", in_flight=[1], issued_in=[(0, counts[rank])] if counts else [])
    run.go(1.0)
    found = only(run.go(6.0, silent=(1,)))
    assert found.ranks == (1,)
    assert found.message == "rank 1 has been silent for 6 s, last seen in step 40; rank 0 waits for bucket 1"
    assert found.evidence.no_stack == {1: "it sends nothing: stopped, or in C code that holds the GIL"}


def test_a_rank_that_stopped_is_named_though_others_wait_outside_of_their_steps() -> None:
    """In a collective of the script's own. What it has issued since its last heartbeat is not known."""
    run = Run(3)
    for rank in range(3):
        run.put(rank, "sync" if rank == 2 else "input", issued_in=[(0, 9)])
    run.go(1.0)
    assert only(run.go(5.0, silent=(2,))).ranks == (2,)


def test_who_is_behind_is_named_though_one_that_waits_is_silent() -> None:
    """As a rank is that waits in C code with the GIL held."""
    run = Run(3)
    for rank in range(3):
        run.put(rank, "backward", issued_in=[(0, 8 if rank == 1 else 9)])
    run.go(1.0)
    assert only(run.go(5.0, silent=(2,))).ranks == (1,)


def test_silence_alone_is_no_hang_while_the_others_train() -> None:
    run = Run()
    for number in range(20):
        run.put(0, "forward", step=number)
        assert run.go(BEAT_S, silent=(1,)) == []


def test_a_gap_in_all_frames_is_nobodys_silence() -> None:
    """The collector was stopped, or started again."""
    run = Run()
    run.go(1.0)
    run.now_s += 20.0
    assert run.found() == []
    for rank in (0, 1):
        run.put(rank, "forward", step=80)
    assert run.go(1.0) == []


@pytest.mark.parametrize(
    ("activity", "lasts_s", "named"),
    [
        ("validation", 30, False), ("compile", 60, False), ("save", 90, False), ("graph", 1000, False),
        ("unwatched", 1000, False), ("data", 6, False), ("data", 8, True), ("validation", 601, True),
    ],
)  # fmt: skip
def test_what_may_last_is_no_hang(activity: str, lasts_s: float, named: bool) -> None:
    run = Run()
    run.put(0, "sync", in_flight=[0], issued_in=[(0, 12)])
    run.put(1, "" if activity == NO_LONGER_WATCHED else "input", activity=activity, issued_in=[(0, 10)])
    found = run.go(lasts_s)
    assert [incident.ranks for incident in found] == ([(1,)] if named else [])
    if activity == "data" and named:
        assert found[0].phase == "data"
        assert found[0].message == "rank 1 is stuck waiting for data at step 40 for 8 s; rank 0 waits for bucket 0"


@pytest.mark.parametrize("phase", ["input", ""])  # "" in a step that nobody watches
def test_all_ranks_may_wait_for_data(phase: str) -> None:
    """As at the start of an epoch, when the loader starts its processes."""
    run = Run()
    for rank in (0, 1):
        run.put(rank, phase, activity="data", issued_in=[(0, 7)])
    assert run.go(29.0) == []
    assert only(run.go(2.0)).ranks == ()


def test_long_steps_are_no_hang_and_the_first_takes_its_time() -> None:
    run = Run()
    for number in range(8):
        for rank in (0, 1):
            run.end_step(rank, number, 10.0)
    run.put(0, "sync", in_flight=[0])
    run.put(1, "backward")
    assert run.go(19.0) == []
    assert only(run.go(2.0)).ranks == (1,)
    first = Run()
    first.put(0, "sync", step=0)
    first.put(1, "forward", step=0)
    assert first.go(59.0) == []
    assert only(first.go(2.0)).ranks == (1,)


def test_between_the_steps_all_ranks_may_do_what_is_not_known() -> None:
    run = Run()
    for rank in (0, 1):
        run.put(rank, "input", issued_in=[(0, 7)])
    assert run.go(29.0) == []
    assert only(run.go(2.0)).message == "ranks 0, 1 are stuck between steps at step 40 for 31 s"


def test_what_comes_after_training_is_no_hang() -> None:
    run = Run()
    run.put(0, "input", issued_in=[(0, 7)])
    run.leave(1, bye(1))
    assert run.go(100.0) == []


def test_a_rank_that_finished_early_is_named() -> None:
    run = Run()
    run.put(0, "sync", in_flight=[0])
    run.go(1.0)
    run.leave(1, bye(1))
    assert only(run.go(4.0)).message == "rank 1 has finished; rank 0 waits for bucket 0"


def test_two_groups_that_do_not_depend_on_each_other_are_two_runs() -> None:
    run = Run(4, {1: [0, 1], 2: [2, 3]})
    run.put(0, "sync", in_flight=[0], issued_in=[(1, 9)])
    run.put(1, "backward", issued_in=[(1, 8)])
    for second in range(10):
        for rank in (2, 3):
            run.put(rank, "forward", step=41 + second, issued_in=[(2, 5)])
        found = run.go(BEAT_S)
    assert only(found).ranks == (1,)
    assert only(found).evidence.issued == {0: 9, 1: 8}


def test_who_is_behind_because_it_waits_in_another_group_is_not_to_blame() -> None:
    """Rank 1 waits for rank 2, and holds up rank 0 thereby."""
    run = Run(3, {1: [0, 1], 2: [1, 2]})
    run.put(0, "sync", issued_in=[(1, 9)])
    run.put(1, "sync", issued_in=[(1, 8), (2, 5)])
    run.put(2, "backward", issued_in=[(2, 4)])
    assert only(run.go(5.0)).ranks == (2,)
    run.put(2, "sync", issued_in=[(2, 5), (1, 7)])  # and if it waits in that of the others, they all do
    run.put(1, "sync", issued_in=[(1, 8), (2, 6)])
    run.go(1.0)
    found = next(incident for incident in run.go(5.0) if incident.open)
    assert found.ranks == (2,) or found.evidence.why == "crossed"


def test_each_waits_in_another_group() -> None:
    run = Run(2, {1: [0, 1], 2: [0, 1]})
    run.put(0, "sync", in_flight=[0], issued_in=[(1, 9), (2, 4)])
    run.put(1, "sync", in_flight=[1], issued_in=[(1, 8), (2, 5)])
    found = only(run.go(5.0))
    assert (found.ranks, found.evidence.why) == ((), "crossed")
    assert found.message == "ranks 0, 1 have been waiting for bucket 0 for 5 s in step 40; each waits in another group"


def test_a_hang_that_ends_keeps_what_it_cost() -> None:
    """Ranks 0 and 2 waited from second 2 on, until their step ended after 14 s in all."""
    run = Run(3)
    for number in range(40 * 3):
        run.end_step(number % 3, number // 3)
    run.go(1.0)
    run.put(1, "backward", issued_in=[(0, 8)])
    run.go(1.0)
    for rank in (0, 2):
        run.put(rank, "sync", in_flight=[1], issued_in=[(0, 9)])
    lasting = only(run.go(10.0))
    assert lasting.open
    assert lasting.cost_ns == pytest.approx(2 * 10 * S, abs=0.6 * S)
    run.now_s += 0.25
    for rank in range(3):
        run.end_step(rank, 40, 12.25)
        run.put(rank, "forward", step=41)
    past = only(run.go(2.0))
    assert (past.open, past.in_steps) == (False, True)
    assert (past.ranks, past.since_step, past.until_step, past.steps) == ((1,), 40, 40, 1)
    assert past.cost_ns == 2 * int(10.25 * S)
    assert past.message == "rank 1 was stuck for 11 s, in backward, at step 40; ranks 0, 2 waited"
    run.put(1, "backward", step=41)  # another one
    run.put(0, "sync", step=41)
    run.put(2, "sync", step=41)
    assert [incident.open for incident in run.go(5.0)] == [False, True]


@pytest.mark.parametrize("ended", [(0, 1), (1, 0)])
def test_a_hang_ends_with_the_run(ended: tuple[int, int]) -> None:
    """Whoever's end is known first: the rank that hung was SIGTERM's victim, and the hang of 175 s nothing."""
    run = Run()
    run.put(0, "sync", in_flight=[0])
    run.put(1, "forward")
    run.go(6.0)
    for rank in ended:
        run.leave(rank, bye(rank, "killed", detail="SIGTERM", signal=15))
    run.liveness.add_bye(bye(), run.received_ns)
    found = run.go(1.0)
    assert {incident.kind for incident in found} == {"hang", "death"}
    assert not any(incident.open or incident.in_steps for incident in found)
    assert next(incident.cost_ns for incident in found if incident.kind == "hang") == 6 * S
    death = next(incident for incident in found if incident.kind == "death")
    assert death.ranks == (1,)
    assert death.message.startswith(
        "rank 1 was stuck for 6 s, in forward, at step 40; rank 0 waited; then rank 0 was killed (SIGTERM)"
    )


def test_a_death_after_a_hang_is_no_part_of_it() -> None:
    run = Run()
    run.put(0, "sync", in_flight=[0])
    run.put(1, "forward")
    run.go(6.0)
    for number in range(41, 44):
        for rank in (0, 1):
            run.put(rank, "forward", step=number)
        run.go(1.0)
    run.leave(1, killed())
    (death,) = [incident for incident in run.go(1.0) if incident.kind == "death"]
    assert death.message.startswith("rank 1 was killed (SIGKILL)")


def test_a_death_shows_who_waits_for_it() -> None:
    run = Run()
    run.put(0, "sync", in_flight=[1])
    run.go(1.0)
    run.leave(1, killed())
    found = only(run.go(10.0))  # no hang as well
    assert (found.kind, found.ranks, found.phase, found.since_step, found.open) == ("death", (1,), "backward", 39, True)
    assert found.message == (
        "rank 1 was killed (SIGKILL) at step 39 in backward, bucket 1 in flight; rank 0 waits for bucket 1"
    )
    assert found.cost_ns == 10 * S
    assert found.evidence.ends[1].signal == 9


BY_ITSELF = " without saying goodbye"
INTERRUPTED = {"reason": "exception", "detail": "KeyboardInterrupt", "step": 39, "phase": "sync"}


@pytest.mark.parametrize(
    ("end", "how"),
    [
        (bye(1, **INTERRUPTED), "stopped by Ctrl-C (KeyboardInterrupt) at step 39"),
        (bye(1, "killed", detail="SIGINT", signal=2), "stopped by Ctrl-C (SIGINT)"),
        (bye(1, "lost", detail="exited with code 130"), "stopped by Ctrl-C (exited with code 130)"),
        (
            bye(1, "lost", detail=f"exited with code 130{BY_ITSELF}"),
            f"stopped by Ctrl-C (exited with code 130{BY_ITSELF})",
        ),
        (
            bye(1, "killed", detail=f"SIGTERM{INTERRUPTED_LAUNCHER}", signal=15),
            "stopped by Ctrl-C (SIGTERM from the launcher, which got SIGINT)",
        ),
        (
            bye(1, "killed", detail=f"SIGKILL{INTERRUPTED_LAUNCHER}", signal=9),
            "stopped by Ctrl-C (SIGKILL from the launcher, which got SIGINT)",
        ),
    ],
    ids=["exception", "signal", "code", "no goodbye", "SIGTERM", "SIGKILL"],
)
def test_who_stops_a_job_by_ctrl_c_ends_no_rank(end: Bye, how: str) -> None:
    run = Run(3)
    run.put(0, "sync", in_flight=[0])
    run.put(1, "forward")
    run.go(1.0)
    run.leave(0, bye(0, "killed", detail="SIGTERM", signal=15))  # torchrun's: it ends who is left
    run.leave(1, end)
    run.leave(2, bye(2, "exception", detail="RuntimeError: Connection closed by peer"))
    found = only(run.go(1.0))
    assert (found.kind, found.severity, found.message, found.ranks, found.cost_ns) == ("stopped", "info", how, (), 0)


def leaves(run: Run, rank: int, **end: Any) -> None:
    """A rank ends now, as its goodbye says on its own clock."""
    run.leave(rank, replace(bye(rank, **end), at_ns=run.clock_ns))


TIMED_OUT = {"reason": "exception", "detail": "RuntimeError: Timed out waiting 600000ms for recv operation"}


@pytest.mark.parametrize("end", [INTERRUPTED, TIMED_OUT, None], ids=["ctrl-c", "timeout", "waiting"])
def test_an_interrupt_of_one_rank_for_which_the_others_wait_is_a_death(end: dict[str, Any] | None) -> None:
    run = Run(3)
    for rank in range(3):
        run.put(rank, "sync", in_flight=[0])
    run.go(1.0)
    leaves(run, 1, reason="killed", detail="SIGINT", signal=2)
    run.go(60.0)
    for rank in (0, 2) if end is not None else ():
        leaves(run, rank, **end)  # type: ignore[arg-type]
    found = only(run.go(1.0))
    then = "; then ranks 0, 2 ended too" if end is not None else "; ranks 0, 2 wait for bucket 0"
    assert (found.kind, found.severity, found.ranks, found.open) == ("death", "error", (1,), end is None)
    assert found.message == f"rank 1 was stopped by Ctrl-C (SIGINT){then}"
    assert found.cost_ns >= 120 * S


def test_a_rank_that_saves_when_somebody_stops_the_job_is_no_death() -> None:
    run = Run()
    run.go(1.0)
    leaves(run, 1, **INTERRUPTED)
    run.put(0, "between", activity="save")
    run.go(30.0)
    leaves(run, 0, **INTERRUPTED)
    assert only(run.go(1.0)).kind == "stopped"


@pytest.mark.parametrize(
    ("end", "how"),
    [
        ({**TIMED_OUT, "detail": "RuntimeError: Connection reset by peer"}, "died of an exception (RuntimeError: "),
        ({"reason": "killed", "detail": "SIGTERM", "signal": 15}, "was killed (SIGTERM)"),
    ],
    ids=["connection", "SIGTERM"],
)
def test_a_death_stays_one_when_somebody_then_stops_the_others(end: dict[str, Any], how: str) -> None:
    run = Run(3)
    for rank in range(3):
        run.put(rank, "sync", in_flight=[0])
    run.go(1.0)
    leaves(run, 1, **end)
    run.go(30.0)
    for rank in (0, 2):
        leaves(run, rank, **INTERRUPTED)
    found = only(run.go(1.0))
    assert (found.kind, found.ranks) == ("death", (1,))
    assert found.message.startswith(f"rank 1 {how}")


@pytest.mark.parametrize(
    ("detail", "quoted"),
    [
        ("ValueError: bad batch", "ValueError: bad batch"),
        (
            "RuntimeError: [/__w/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by "
            "peer [127.0.0.1]:8619. This is typically caused by a remote worker crashing. Check the logs of the remote "
            "worker before this one.",
            "RuntimeError: Connection closed by peer [127.0.0.1]:8619",
        ),
        (
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of "
            "79.10 GiB of which 1.16 GiB is free.",
            "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: "
            "../torch/csrc/distributed/c10d/NCCLUtils.cpp:317, remote process exited or there was a network error, "
            "NCCL version 2.20.5",
            "torch.distributed.DistBackendError: NCCL error in: remote process exited or there was a network err…",
        ),
    ],
    ids=["short", "Gloo", "memory", "NCCL"],
)
def test_an_exception_is_quoted_in_short_sentences(detail: str, quoted: str) -> None:
    assert error_quoted(detail) == quoted


def test_a_hang_that_somebody_ends_by_ctrl_c_is_one() -> None:
    run = Run()
    run.put(0, "sync", in_flight=[0])
    run.put(1, "between")
    run.go(9.0)
    for rank in (0, 1):
        run.leave(rank, bye(rank, **INTERRUPTED))
    for waited_s in (1.0, 10.0):  # also once all is known of the hang
        hang = only(run.go(waited_s))
        assert (hang.kind, hang.severity, hang.ranks, hang.open) == ("hang", "error", (1,), False)
        assert hang.message.startswith("rank 1 was stuck for ")
        assert hang.message.endswith("; rank 0 waited; then stopped by Ctrl-C (KeyboardInterrupt) at step 39")
        assert set(hang.evidence.ends) == {0, 1}
        found = verdict(Summary(), [hang], 2, bye(None, "exception"))
        assert (found.kind, found.severity, found.text) == ("hang", "bad", hang.message)


def test_a_rank_that_is_stopped_in_a_hang_alone_leaves_the_others() -> None:
    run = Run()
    run.put(0, "sync", in_flight=[0])
    run.put(1, "between")
    run.go(9.0)
    leaves(run, 1, **INTERRUPTED)
    assert only(run.go(1.0)).kind == "hang"  # the other one may be about to end
    (death,) = [incident for incident in run.go(9.0) if incident.kind == "death"]
    assert (death.open, death.ranks) == (True, (1,))
    assert " was stopped by Ctrl-C (KeyboardInterrupt) at step 39" in death.message


def test_the_victims_of_the_launcher_are_not_to_blame() -> None:
    run = Run()
    run.leave(0, bye(0, "killed", detail="SIGTERM", signal=15))
    lost = bye(1, "lost", detail="its process is gone, how is not known")
    lost.at_ns += 1
    run.leave(1, lost)
    found = only(run.go(1.0))
    assert found.message == "rank 1 is lost (its process is gone, how is not known); then rank 0 ended too"
    assert set(found.evidence.ends) == {0, 1}


def test_the_first_death_is_the_cause_whatever_its_host_calls_the_time() -> None:
    """The clock of rank 0's host is ahead by more than an hour; the other rank's end was noticed a second later."""
    run, ahead_ns = Run(), 5000 * S
    for rank, clock_ns in ((0, run.clock_ns + ahead_ns), (1, run.clock_ns)):
        beat = Beat(rank=rank, at_ns=clock_ns, step=40, phase="backward", since_ns=clock_ns)
        run.liveness.add_beat(beat, run.received_ns)
    first, then = killed(0), bye(1, "exception", detail="RuntimeError: Connection closed by peer")
    first.at_ns, then.at_ns = run.clock_ns + ahead_ns + S, run.clock_ns + 2 * S
    run.now_s += 3
    run.leave(0, first)
    run.leave(1, then)
    assert only(run.found()).ranks == (0,)


def test_who_was_killed_is_the_cause_though_the_others_exceptions_came_first() -> None:
    run = Run()
    run.put(0, "sync", in_flight=[1])
    run.put(1, "forward")
    run.leave(0, bye(0, "exception", detail="RuntimeError: Read error: Connection reset by peer"))
    run.now_s += 1
    run.leave(1, killed())
    assert only(run.found()).ranks == (1,)


def test_a_rank_whose_connection_was_lost_is_a_witness_until_it_is_known_who_else_ended() -> None:
    """The collector waits for the goodbye of a rank that was killed; what its peers say comes first."""
    lost = {"reason": "exception", "detail": "RuntimeError: Connection reset by peer", "step": 40}
    run = Run(3)
    run.go(1.0)
    leaves(run, 0, **lost)
    seen = only(run.go(BEAT_S, silent=(1,)))
    says = "failed (RuntimeError: Connection reset by peer) at step 40; no other rank's end is known yet"
    assert (seen.kind, seen.ranks, seen.open) == ("death", (), True)
    assert seen.message == f"a collective of rank 0 {says}"
    assert next_step(seen, JobPlaces()).startswith("wait some seconds")
    leaves(run, 2, **lost)
    seen = only(run.go(9.0, silent=(1,)))
    assert (seen.ranks, seen.message) == ((), f"collectives of ranks 0, 2 {says}")
    leaves(run, 1, reason="killed", detail="SIGKILL", signal=9)
    found = only(run.found())
    assert (found.ranks, found.message) == ((1,), "rank 1 was killed (SIGKILL); then ranks 0, 2 ended too")


def test_a_rank_whose_connection_was_lost_is_named_once_all_others_have_outlived_it() -> None:
    """It lost one of its own, as that to a server of data."""
    run = Run(3)
    run.go(1.0)
    leaves(run, 0, reason="exception", detail="ConnectionError: Connection reset by peer", step=40)
    assert only(run.go(1.0)).ranks == ()
    found = only(run.go(1.5))
    assert (found.ranks, found.open) == ((0,), True)
    assert found.message == "rank 0 died of an exception (ConnectionError: Connection reset by peer) at step 40"


def test_a_rank_whose_collective_timed_out_is_not_to_blame_for_the_hang() -> None:
    run = Run()
    run.put(0, "sync", in_flight=[0])
    run.put(1, "forward")
    run.go(6.0)
    run.leave(0, bye(0, "exception", detail="RuntimeError: Timed out waiting 6000ms for recv operation"))
    (death,) = [incident for incident in run.go(1.0) if incident.kind == "death"]
    assert death.ranks == (1,)
    assert death.message.startswith("rank 1 was stuck for 6 s, in forward, at step 40; rank 0 waited; then rank 0 died")


def test_a_rank_that_exited_with_a_code_is_the_cause_though_it_said_that_it_had_finished() -> None:
    """Its goodbye comes again, corrected; the other's collective has failed because of that."""
    run = Run()
    run.go(1.0)
    left = bye(1, "finished", step=40)
    left.at_ns = run.clock_ns
    run.leave(1, left)
    run.go(1.0)
    run.liveness.add_bye(replace(left, by="collector", reason="lost", detail="exited with code 3"), run.received_ns)
    run.leave(0, bye(0, "exception", detail="RuntimeError: Connection closed by peer"))
    found = only(run.found())
    assert found.message == "rank 1 exited with code 3 at step 40; then rank 0 ended too"


def test_a_rank_that_exits_on_torchrun_s_sigterm_is_not_the_cause() -> None:
    """It handles SIGTERM, as trainers do to save a checkpoint; the ranks whose collective timed out ended before."""
    run = Run()
    run.put(0, "sync", in_flight=[0])
    run.put(1, "backward")
    run.go(6.0)
    run.leave(0, bye(0, "exception", detail="RuntimeError: Timed out waiting 6000ms for recv operation"))
    run.now_s += 10
    left = bye(1, "lost", detail="exited with code 143", step=40, phase="backward")
    left.at_ns = run.clock_ns
    run.leave(1, left)
    (death,) = [incident for incident in run.go(1.0) if incident.kind == "death"]
    assert death.ranks == (1,)  # that is, the hang's
    assert ", in backward, at step 40; rank 0 waited; then rank 0 died" in death.message


def stack(run: Run, rank: int, *frames: str) -> None:
    lines = "".join(f'  File "{file}", line {line} in {name}\n' for file, line, name in (f.split() for f in frames))
    text = f"Thread 0x00007f (most recent call first):\n{lines}\nThread 0x1 (most recent call first):\n"
    text += '  File "other.py", line 1 in other\n'
    run.liveness.add_stack(Stack(rank=rank, at_ns=run.clock_ns, since_ns=0, step=40, text=text, threads=2))


TORCH = "/venv/lib/python3.11/site-packages/torch"


@pytest.mark.parametrize(
    ("inner", "in_flight", "found"),
    [
        ("/job.py 7 generate", [], False),
        (f"{TORCH}/distributed/distributed_c10d.py 4000 barrier", [], True),
        ("/job.py 7 generate", [1], True),
    ],
)
def test_ranks_that_all_work_between_steps_and_wait_for_nobody_do_not_hang(
    inner: str, in_flight: list[int], found: bool
) -> None:
    run = Run()
    for rank in (0, 1):
        run.put(rank, "input", issued_in=[(0, 7)], in_flight=in_flight)
    run.go(5.0)
    stack(run, 0, "/job.py 7 generate")
    stack(run, 1, inner, "/job.py 9 main")
    assert bool(run.go(30.0)) is found
    assert only(run.go(600.0)).kind == "hang"  # for ever is too long


def test_the_call_sites_are_shown() -> None:
    run = Run(3)
    stack(run, 1, "/old.py 1 before")  # of the rank, when it stood still before
    run.go(1.0)
    run.put(0, "sync", in_flight=[1])
    run.put(1, "backward")
    run.put(2, "sync", in_flight=[1])
    run.go(4.0)
    stack(
        run,
        1,
        "/usr/lib/python3.11/threading.py 600 wait",
        "/home/me/ddpwatch/cli.py 31 fetch",
        "/home/me/t.py 9 main",
    )
    stack(
        run, 2, f"{TORCH}/autograd/graph.py 80 _engine_run_backward", f"{TORCH}/_tensor.py 6 backward", "/me/t.py 7 f"
    )
    found = only(run.go(1.0))
    assert found.evidence.call_sites == {1: "cli.py:31 in fetch", 2: "t.py:7 in f"}
    where = "rank 1 is stuck in backward of step 40 for 5 s (cli.py:31 in fetch)"
    assert found.message.startswith(where)  # also in plain lines
    assert found.evidence.stacks[0].frames[0] == "/usr/lib/python3.11/threading.py:600 in wait"
    assert not any("other.py" in frame for frame in found.evidence.stacks[0].frames)
    lines = stack_lines(found.ranks, found.evidence)
    assert lines[:2] == [
        "rank 1 holds up the others at cli.py:31 in fetch (wait)",
        "rank 2 waits at t.py:7 in f (_engine_run_backward)",
    ]
    assert lines[2:4] == ["rank 1, innermost call first:", "  /usr/lib/python3.11/threading.py:600 in wait"]


def test_a_mismatch_shows_both_calls() -> None:
    """Each rank waits in another collective. One that computes, instead, would hold up the other."""
    run = Run()
    run.put(0, "sync", in_flight=[1], issued_in=[(0, 9)])
    run.put(1, "between", issued_in=[(0, 9)])
    run.go(4.0)
    stack(run, 0, f"{TORCH}/autograd/graph.py 80 _engine_run_backward", "/me/train.py 30 step")
    stack(run, 1, f"{TORCH}/distributed/distributed_c10d.py 2800 all_reduce", "/me/metrics.py 9 gather")
    found = only(run.go(1.0))
    assert (found.ranks, found.evidence.why) == ((1,), "mismatch")
    assert found.message == (
        "ranks wait in different calls for 5 s in step 40: "
        "rank 1 at metrics.py:9 in gather, rank 0 at train.py:30 in step"
    )
    stack(run, 1, "/me/metrics.py 12 compute", f"{TORCH}/distributed/distributed_c10d.py 83 wrapper")
    assert only(run.go(1.0)).evidence.why == "elsewhere"


C10D = f"{TORCH}/distributed/distributed_c10d.py"


@pytest.mark.parametrize(
    ("first", "second", "soon"),
    [
        ([f"{C10D} 4181 all_reduce"], [f"{C10D} 4055 broadcast"], True),
        ([f"{C10D} 4181 all_reduce"], [f"{C10D} 4181 all_reduce"], False),
        ([f"{C10D} 70 _object_to_tensor", f"{C10D} 90 all_gather_object"], [f"{C10D} 91 all_gather_object"], False),
        ([f"{C10D} 2500 send"], [f"{C10D} 2600 recv"], False),
        ([f"{C10D} 5800 new_group"], [f"{C10D} 4181 all_reduce"], False),
        ([f"{C10D} 4181 all_reduce"], [f"{TORCH}/distributed/_functional_collectives.py 80 wait_tensor"], False),
        ([f"{C10D} 4181 all_reduce"], [], False),
    ],
)
def test_ranks_that_wait_between_steps_in_different_collectives_never_meet(
    first: list[str], second: list[str], soon: bool
) -> None:
    """Even at one line."""
    run = Run()
    for rank, calls in enumerate((first, second)):
        run.put(rank, "input", issued_in=[(0, 67)])
        run.now_s += 1.0
        stack(run, rank, *calls, f"{TORCH}/distributed/c10d_logger.py 83 wrapper", "/me/w.py 90 after")
    assert run.go(6.0) == []
    if not soon:
        assert run.go(20.0) == []
        assert only(run.go(600.0)).evidence.why == "unknown"
        return
    found = only(run.go(2.0))
    assert (found.ranks, found.evidence.why) == ((), "mismatch")
    said = "w.py:90 in after (all_reduce), rank 1 at w.py:90 in after (broadcast)"
    assert found.message == f"ranks wait in different calls for 10 s in step 40: rank 0 at {said}"
    run.leave(0, bye(0, "exception", detail="RuntimeError: Timed out waiting 25000ms for recv operation", step=40))
    (death,) = [incident for incident in run.found() if incident.kind == "death"]
    assert f" s in step 40: rank 0 at {said}; then rank 0 died of" in death.message


def test_ranks_of_other_groups_may_be_in_other_collectives() -> None:
    run = Run(3, {1: [0, 1], 2: [1, 2]})
    for rank, groups in enumerate(([(1, 5)], [(1, 5), (2, 5)], [(2, 5)])):
        run.put(rank, "input", issued_in=groups)
        run.now_s += 1.0
        stack(run, rank, f"{C10D} 1 {('all_reduce', 'all_reduce', 'broadcast')[rank]}", "/me/w.py 90 after")
    assert run.go(25.0) == []


def test_the_costliest_hangs_are_kept() -> None:
    run = Run()
    for number in range(KEEP_INCIDENTS + 4):
        at = {"step": 40 + number}
        run.put(0, "sync", **at)
        run.put(1, "backward", **at)
        run.go(5.0 if number == 2 else 4.0)
        for rank in (0, 1):
            run.end_step(rank, 40 + number, 1.0)
            run.put(rank, "forward", step=41 + number)
        run.go(1.0)
    found = run.found()
    assert len(found) == KEEP_INCIDENTS
    assert found[0].since_step == 42


def test_many_ranks_cost_no_more_each_than_a_few() -> None:
    def cpu_per_rank(world: int) -> float:
        run = Run(world)
        for rank in range(world):
            run.put(rank, "sync", in_flight=[1], issued_in=[(0, 9 - (rank == 60))])
        before = time.process_time()
        assert only(run.go(10.0)).ranks == (60,)
        return (time.process_time() - before) / world

    assert cpu_per_rank(1024) < 5 * cpu_per_rank(64)


@pytest.mark.parametrize("world", [2, 4])
def test_goodbyes_long_after_all_other_frames_are_no_hang(world: int) -> None:
    """As in `report --steps`, which selects a part of the steps, and always the goodbyes."""
    run = Run(world)
    for rank in range(world):
        run.put(rank, "sync", issued_in=[(0, 120 + rank)])
    run.go(1.5)
    run.now_s += 1000.0
    for rank in range(world):
        run.leave(rank, bye(rank))
    assert run.found() == []


def test_that_collectives_are_counted_only_once_a_rank_stands_still_does_not_mean_that_it_goes_on() -> None:
    """A loop without a wrapper counts them then; that took the hang's first second from it."""
    still = Stillness()
    at_ns = [1_000_000_000 * second for second in range(1, 6)]
    for at, issued in zip(at_ns, (None, 7, 7, 7, 8), strict=True):
        counts = [] if issued is None else [(0, issued)]
        still.add_beat(beat(0, 5, phase="", at_ns=at, since_ns=500_000_000, issued=issued, issued_in=counts))
        assert still.since_ns == (at if issued == 8 else 500_000_000)
