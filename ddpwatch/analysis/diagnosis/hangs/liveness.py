"""Hangs and deaths, as incidents, from what ranks send about themselves. Knows no clock: all times come with frames.

The rules are in docs/diagnosis.md, "Hangs". What is found depends on the frames alone, and not on when somebody asks.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ddpwatch.analysis.diagnosis.hangs.blame import Blame, RankLife, blame, counts_of
from ddpwatch.analysis.diagnosis.hangs.call_stack import CallStack, call_stack, grouped, told_apart
from ddpwatch.analysis.diagnosis.hangs.sentences import (
    death_message,
    hang_message,
    mismatch_message,
    past_hang_message,
    stopped_message,
    witness_message,
)
from ddpwatch.analysis.diagnosis.incident import (
    Evidence,
    Incident,
    StackGroup,
    collective_failed,
    end_of,
    is_by_ctrl_c,
    is_by_launcher,
)
from ddpwatch.analysis.diagnosis.thresholds import KEEP_INCIDENTS
from ddpwatch.analysis.groups import Groups
from ddpwatch.sampling.stillness import SILENT_NS, STILL_NS
from ddpwatch.wire.messages import NO_LONGER_WATCHED, Beat, Bye, Node, Stack, Step

SHOWN_STACKS = 8  # groups, in an incident, and ranks without a stack
CHECK_NS = 250_000_000  # between two looks at all ranks
GAP_NS = 2_000_000_000  # without any frame: the collector, or the machine, was stopped
SETTLE_NS = 60_000_000_000  # after a hang's end, for the steps in which ranks waited
PHASES = {
    "input": "between", "between": "other", "sync": "exposed_comm", "save": "checkpoint", "compile": "compilation",
    "graph": "", NO_LONGER_WATCHED: "",
}  # fmt: skip


@dataclass(slots=True)
class _Hang:
    """A hang that lasts, or that is over and whose cost is not settled yet.

    Attributes:
        blame: The newest.
        still: From when on each rank of it has been standing still, on its own clock, until it is accounted for.
        ended: When that rank went on, once the hang is over, for ranks that send no step after it.
        ended_ns: When it was found to be over (receive time); 0 while it lasts.
        shown: The incident as it was last seen to last.
    """

    blame: Blame
    still: dict[int, int]
    shown: Incident
    ended: dict[int, int] = field(default_factory=dict)
    ended_ns: int = 0
    cost_ns: int = 0
    stuck_ns: int = 0
    took_ns: int = 0
    until_step: int | None = None

    def settle(self, rank: int, until_ns: int, step: int | None = None) -> None:
        """Accounts for a rank that stood still until then, in that step."""
        took_ns = max(0, until_ns - self.still.pop(rank))
        self.took_ns = max(self.took_ns, took_ns)
        self.cost_ns += took_ns * (rank in self.blame.waiting)
        self.stuck_ns += took_ns * (rank in self.blame.ranks)
        if step is not None:
            self.until_step = step if self.until_step is None else max(step, self.until_step)

    def so_far(self, until_ns: Mapping[int, int]) -> Incident:
        """Returns it with what it has cost, where ranks that are not accounted for stand still until then."""
        took = {rank: max(0, until_ns[rank] - since) for rank, since in self.still.items()}
        cost_ns = self.cost_ns + sum(ns for rank, ns in took.items() if rank in self.blame.waiting)
        stuck_ns = self.stuck_ns + sum(ns for rank, ns in took.items() if rank in self.blame.ranks)
        return replace(self.shown, cost_ns=cost_ns, stuck_ns=stuck_ns)


class _HowEnded(NamedTuple):
    """The ends of ranks that did not finish.

    Attributes:
        dead: They, the first one first.
        hung: The hang in which they did.
        stopped: Whether somebody stopped the job by Ctrl-C.
    """

    dead: list[RankLife]
    hung: _Hang | None
    stopped: bool


class RankLiveness:
    """Follows the ranks of a run.

    Args:
        groups: Their process groups, kept up to date by the caller.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._lives: dict[int, RankLife] = {}
        self._hangs: dict[int, _Hang] = {}  # those that last, by the lowest rank of those that depend on each other
        self._settling: list[_Hang] = []
        self._ended: list[tuple[int, int, Incident, _Hang]] = []  # a heap: the cheapest first
        self._deadly: dict[int, _Hang] = {}  # by rank, the hang in which it died
        self._count = 0
        self._now_ns = self._due_ns = 0
        self._over = False
        self._unseen: dict[int, set[int]] = {}  # ranks, by node

    # -- what ranks send -------------------------------------------------------------------------------------

    def add_hello(self, rank: int, received_ns: int) -> None:
        """Takes a rank's introduction: it is there, whatever was said before."""
        self._life(rank).bye = None
        self._deadly.pop(rank, None)
        self.note_seen(rank, received_ns)

    def note_seen(self, rank: int, received_ns: int) -> None:
        """Notes that anything came from a rank."""
        self._life(rank).seen_ns = received_ns
        self._check(received_ns)

    def add_beat(self, beat: Beat, received_ns: int) -> None:
        """Takes a rank's heartbeat."""
        life = self._life(beat.rank)
        is_first = life.beat is None
        life.stillness.add_beat(beat)
        life.received_ns = received_ns
        for hang in self._hangs.values() if is_first else ():  # it was found before that was known
            if beat.rank in hang.still:
                hang.still[beat.rank] = life.stillness.since_ns
        self.note_seen(beat.rank, received_ns)

    def add_step(self, step: Step, received_ns: int) -> None:
        """Takes a rank's step, numbered as the rank numbers it."""
        life = self._lives.get(step.rank) or self._life(step.rank)
        life.stepped_ns = self._now_ns
        life.stillness.add_step(step)
        if self._hangs or self._settling:
            self._account(step)
        life.seen_ns = received_ns
        self._check(received_ns)

    def _account(self, step: Step) -> None:
        """Takes from a step that ends after a rank stood still for how long it did."""
        rank, end_ns = step.rank, step.start_ns + step.duration_ns
        for hang in (*self._hangs.values(), *self._settling):
            if rank in hang.still and end_ns > hang.still[rank] + STILL_NS:
                hang.settle(rank, end_ns, step.step)

    def add_stack(self, stack: Stack) -> None:
        """Takes a rank's stack."""
        self._life(stack.rank).stack = call_stack(stack)

    def add_bye(self, bye: Bye, received_ns: int) -> None:
        """Takes the end of a rank, or of the run."""
        if bye.rank is None:
            self._over = True
        else:
            life = self._life(bye.rank)
            life.bye, life.bye_ns, life.seen_ns = bye, received_ns, received_ns
            for hang in (*self._hangs.values(), *self._settling):
                if bye.rank in hang.still:
                    hang.settle(bye.rank, life.clock_ns(received_ns))
                    if bye.reason != "finished" and not hang.ended_ns:
                        self._deadly[bye.rank] = hang
        if self._hangs:  # it may be over; nothing else needs a look at all ranks for each that ends
            self._due_ns = 0
        self._check(received_ns)

    def add_node(self, node: Node) -> None:
        """Takes what the root says: whether a node's agent is there."""
        silent = not node.connected or node.at_ns - node.seen_ns > SILENT_NS
        self._unseen[node.node] = set(node.ranks) if silent else set()

    def pass_time(self, now_ns: int) -> None:
        """Lets time pass while ranks are silent: the collector said something, as it does twice a second."""
        self._due_ns = 0
        self._check(now_ns)

    def note_collector(self, now_ns: int) -> None:
        """Notes that the collector went on. Of ranks, it says nothing: it keeps samples longer than heartbeats."""
        self._pass_to(now_ns)

    def hangs(self, now_ns: int) -> list[Incident]:
        """Returns those that last and those that are over, costliest first.

        Args:
            now_ns: The receive time of the run's newest frame, of any sender.
        """
        self._check(now_ns)
        hangs = [self._lasting(hang) for hang in self._hangs.values()]
        past = [(self._past(hang), hang) for hang in self._settling]
        past += [(incident, hang) for _, _, incident, hang in self._ended]
        end = self._find_end()
        stopped = end.hung if end is not None and end.stopped else None
        hangs += [_stopped_in(shown, end.dead) if end and hang is stopped else shown for shown, hang in past]
        return sorted(hangs, key=lambda incident: -incident.cost_ns)

    def deaths(self, now_ns: int) -> list[Incident]:
        """Returns one incident for all ranks that died, since the others follow from the first; none if none died.

        Whoever stops a job by Ctrl-C ends no rank that went on, or had hung until then. It is a death if only one rank
        got the signal, and others wait for it.

        A rank whose collective failed is a witness. It is named only where all others have ended, or go on.

        Args:
            now_ns: As for `hangs`.
        """
        self._check(now_ns)
        end = self._find_end()
        if end is None:
            return []
        dead, hung = end.dead, end.hung
        first = dead[0]
        assert first.bye is not None
        if end.stopped:
            return [] if hung is not None else [_stopped(first.bye, first.bye_ns)]
        alive = [life for life in self._lives.values() if life.bye is None]
        not_by_itself = is_by_launcher(first.bye) or is_by_ctrl_c(first.bye)
        held_up = hung.blame.ranks if hung is not None and (not_by_itself or collective_failed(first.bye)) else ()
        others = [life.rank for life in dead[1:]]
        is_seen = hung is None and collective_failed(first.bye) and not self._over  # by a witness
        is_known = not is_seen or all(self._outlives(life, first) for life in alive)
        message = death_message(first.bye, others, alive) if is_known else witness_message(first.bye, others)
        return [
            Incident(
                kind="death",
                severity="error",
                message=message if hung is None else f"{self._past(hung).message}; then {message}",
                ranks=held_up or ((first.rank,) if is_known else ()),
                phase=PHASES.get(first.bye.phase, first.bye.phase),
                bucket=min(first.bye.in_flight, default=None),
                since_step=first.bye.step,
                until_step=first.bye.step,
                steps=0 if first.bye.step is None else 1,
                cost_ns=self._waited_for(first),
                in_steps=False,
                found_ns=first.bye_ns,
                open=bool(alive) and not self._over,
                evidence=Evidence(
                    ends={life.rank: end_of(life.bye) for life in dead if life.bye is not None},
                    hung=None if hung is None else list(hung.blame.ranks),
                ),
            )
        ]

    def _find_end(self) -> _HowEnded | None:
        """Returns how ranks ended that did not finish; None if none did."""
        dead = [life for life in self._lives.values() if life.bye is not None and life.bye.reason != "finished"]
        if not dead:
            return None
        interrupts = [life.ended_ns for life in dead if life.bye is not None and is_by_ctrl_c(life.bye)]
        stop_ns = min(interrupts, default=0)
        dead.sort(key=lambda life: (is_by_launcher(life.bye), collective_failed(life.bye), life.ended_ns))
        dead.sort(key=lambda life: life.ended_ns >= stop_ns - STILL_NS)  # nobody stopped those that ended before
        first, hung = dead[0], self._deadly.get(dead[0].rank)
        assert first.bye is not None
        if is_by_launcher(first.bye) or is_by_ctrl_c(first.bye):  # of them, any
            hung = next(iter(self._deadly.values()), None)
        outlast = self._goes_on if hung is not None else self._outlast  # they waited before, too
        return _HowEnded(dead, hung, is_by_ctrl_c(first.bye) and not outlast(stop_ns + STILL_NS))

    def _life(self, rank: int) -> RankLife:
        if rank not in self._lives:
            self._lives[rank] = RankLife(rank)
        return self._lives[rank]

    # -- hangs -----------------------------------------------------------------------------------------------

    def _check(self, now_ns: int) -> None:
        """Looks at all ranks, now and then."""
        self._pass_to(now_ns)
        if self._now_ns < self._due_ns:
            return
        self._due_ns = self._now_ns + CHECK_NS
        found = {} if self._over or self._all_go_on() else {ls[0].rank: self._blame(ls) for ls in self._dependent()}
        for key in [key for key in self._hangs if found.get(key) is None]:
            self._end(self._hangs.pop(key))
        for key, blamed in found.items():
            if blamed is not None:
                self._go_on(key, blamed)
        self._settle()

    def _pass_to(self, now_ns: int) -> None:
        before_ns = self._now_ns
        if now_ns > before_ns:
            self._now_ns = now_ns
        if before_ns and self._now_ns - before_ns > GAP_NS:
            for life in self._lives.values():  # nobody is to blame that no frames came at all
                life.seen_ns = max(life.seen_ns, min(life.seen_ns + self._now_ns - before_ns, self._now_ns))

    def _all_go_on(self) -> bool:
        """Returns whether no rank has ended or stands still, so that nobody can be to blame."""
        return not any(life.bye is not None or life.stands_still(self._now_ns) for life in self._lives.values())

    def _blame(self, lives: list[RankLife]) -> Blame | None:
        alive = [life for life in lives if life.bye is None]
        if any(life.rank in unseen for unseen in self._unseen.values() if unseen for life in alive):
            return None
        if not all(life.stands_still(self._now_ns) for life in alive):
            return None
        gone = {life.rank: life.bye.reason for life in lives if life.bye is not None}
        if set(gone.values()) - {"finished"} or (gone and not any(life.phase == "sync" for life in alive)):
            return None  # a death says it all; and what comes after training takes its time
        counts = {life.rank: counts_of(life.beat, self._groups.of_rank(life.rank)) for life in alive}
        found = blame(alive, counts, self._now_ns)
        if found is not None and found.why == "unknown" and gone:
            return replace(found, why="finished", ranks=tuple(gone))
        return found

    def _dependent(self) -> Iterator[list[RankLife]]:
        """Yields the ranks that share groups, directly or through others; of each such set, in ascending order."""
        own = {rank: self._groups.of_rank(rank) for rank in sorted(self._lives)}
        parent: dict[int, int] = {}
        for first, *others in set(own.values()):  # thousands of ranks may have the same
            for group in others:
                parent[_root(parent, group)] = _root(parent, first)
        sets: dict[int, list[RankLife]] = {}
        for rank, groups in own.items():
            sets.setdefault(_root(parent, groups[0]), []).append(self._lives[rank])
        yield from sets.values()

    def _go_on(self, key: int, blamed: Blame) -> None:
        """Starts a hang, or lets it last."""
        hang = self._hangs.get(key)
        if hang is None:
            lives = (self._lives[rank] for rank in (*blamed.ranks, *blamed.waiting))
            still = {life.rank: life.stillness.since_ns for life in lives if life.bye is None}
            shown = Incident("hang", "error", "", found_ns=self._now_ns)
            hang = self._hangs[key] = _Hang(blamed, still, shown)
        hang.blame = blamed
        hang.shown = replace(self._incident(blamed), found_ns=hang.shown.found_ns)

    def _end(self, hang: _Hang) -> None:
        """Ends a hang. What it cost is known once the ranks have sent the step in which they waited."""
        hang.ended_ns = self._now_ns
        hang.ended = {rank: self._lives[rank].clock_ns(self._now_ns) for rank in hang.still}
        self._settling.append(hang)

    def _settle(self) -> None:
        """Files the hangs of which all is known, or nothing more to be expected."""
        for hang in self._settling[:]:
            if hang.still and not self._over and self._now_ns - hang.ended_ns <= SETTLE_NS:
                continue
            for rank in list(hang.still):
                hang.settle(rank, hang.ended[rank])
            self._settling.remove(hang)
            self._count += 1
            past = self._past(hang)
            heapq.heappush(self._ended, (past.cost_ns, self._count, past, hang))
            if len(self._ended) > KEEP_INCIDENTS:
                heapq.heappop(self._ended)

    # -- incidents -------------------------------------------------------------------------------------------

    def _incident(self, blamed: Blame) -> Incident:
        """Returns a hang, without what it has cost."""
        lives = {rank: self._lives[rank] for rank in (*blamed.ranks, *blamed.waiting)}
        first = lives[(blamed.waiting if blamed.why == "finished" else blamed.ranks or blamed.waiting)[0]]
        sites = self._sites(blamed)
        stacks, no_stack = self._stacks(blamed)
        mismatch = self._mismatch(blamed, sites)
        buckets = {index for rank in blamed.waiting for index in _in_flight(lives[rank])}
        step = None if first.beat is None else first.beat.step
        return Incident(
            kind="hang",
            severity="error",
            message=mismatch or hang_message(blamed, self._lives, self._now_ns, sites.get(first.rank, "")),
            ranks=blamed.ranks,
            phase=_phase(first),
            bucket=min(buckets, default=None),
            since_step=step,
            until_step=step,
            steps=0 if step is None else 1,
            in_steps=False,
            open=True,
            evidence=Evidence(
                why="mismatch" if mismatch else blamed.why,
                issued=dict(blamed.issued),
                call_sites=sites,
                stacks=stacks,
                no_stack=no_stack,
            ),
        )

    def _lasting(self, hang: _Hang) -> Incident:
        """Returns a hang that lasts, with what it has cost so far."""
        return hang.so_far({rank: self._lives[rank].clock_ns(self._now_ns) for rank in hang.still})

    def _past(self, hang: _Hang) -> Incident:
        """Returns a hang that is over. Ranks that have not sent their step yet count up to when they went on."""
        took = {rank: max(0, hang.ended[rank] - since) for rank, since in hang.still.items()}
        took_ns = max(hang.took_ns, *took.values()) if took else hang.took_ns
        shown, until = hang.so_far(hang.ended), hang.until_step
        since = shown.since_step
        sites, mismatch = shown.evidence.call_sites or {}, shown.evidence.why == "mismatch"
        last = since if until is None or since is None else max(since, until)
        return replace(
            shown,
            message=past_hang_message(hang.blame, shown.phase, since, took_ns, sites, mismatch),
            in_steps=until is not None,
            until_step=last,
            steps=0 if since is None or last is None else last - since + 1,
            open=False,
        )

    def _sites(self, blamed: Blame) -> dict[int, str]:
        """Returns where the first rank that is behind is, and the first that waits.

        Of a hang that is nobody's, any two.
        """
        stacks = dict(self._fresh((*blamed.ranks[:1], *blamed.waiting)))
        if blamed.ranks:
            waiting = next((rank for rank in blamed.waiting if rank in stacks), None)
            return told_apart({rank: stacks[rank] for rank in (blamed.ranks[0], waiting) if rank in stacks})
        first = next(iter(stacks), None)
        other = next(
            (rank for rank, stack in stacks.items() if first is not None and stack.differs(stacks[first])), None
        )
        return told_apart({rank: stacks[rank] for rank in (first, other) if rank is not None})

    def _mismatch(self, blamed: Blame, sites: Mapping[int, str]) -> str:
        """Says that both ranks wait in different calls; "" if they do not."""
        if len(set(sites.values())) < 2:
            return ""
        stacks = dict(self._fresh(sites))
        unsure = [rank for rank in sites if rank in blamed.ranks or not blamed.ranks]  # the others do wait
        if not all(stacks[rank].in_collective or self._lives[rank].phase == "sync" for rank in unsure):
            return ""
        return mismatch_message(sites, [self._lives[rank] for rank in sites])

    def _stacks(self, blamed: Blame) -> tuple[list[StackGroup], dict[int, str]]:
        """Returns which ranks have the same stack, and why there is none."""
        ranks = (*blamed.ranks, *blamed.waiting)
        stacks = dict(self._fresh(ranks))
        silent = {
            rank: "it sends nothing: stopped, or in C code that holds the GIL"
            for rank in ranks[:SHOWN_STACKS]
            if rank not in stacks and self._lives[rank].silent_ns(self._now_ns)
        }
        return grouped(stacks.items(), set(blamed.ranks))[:SHOWN_STACKS], silent

    def _fresh(self, ranks: Iterable[int]) -> Iterator[tuple[int, CallStack]]:
        """Yields the stacks that ranks have taken since they have been standing still."""
        for rank in ranks:
            stack = self._lives[rank].fresh_stack
            if stack is not None:
                yield rank, stack

    def _outlast(self, until_ns: int) -> bool:
        """Returns whether there are ranks after that time, or were some that waited for others when they ended."""
        late = [life for life in self._lives.values() if life.bye is not None and life.ended_ns > until_ns]
        if any(collective_failed(life.bye) or (life.phase == "sync" and not life.activity) for life in late):
            return True
        return self._goes_on(until_ns)

    def _goes_on(self, until_ns: int) -> bool:
        """Returns whether there are ranks after that time."""
        return self._now_ns > until_ns and not self._over and any(life.bye is None for life in self._lives.values())

    def _outlives(self, life: RankLife, dead: RankLife) -> bool:
        """Returns whether a rank has sent heartbeats since that goodbye, which were not on their way before."""
        return life.received_ns > dead.bye_ns + SILENT_NS

    def _waited_for(self, dead: RankLife) -> int:
        """Returns the rank-time of all others after a death, unless they train on."""
        ns = 0
        for life in self._lives.values():
            until_ns = life.bye_ns if life.bye is not None else self._now_ns
            if life is not dead and life.stepped_ns <= dead.bye_ns + STILL_NS:
                ns += max(0, until_ns - dead.bye_ns)
        return ns


def _stopped(bye: Bye, found_ns: int) -> Incident:
    """Returns that somebody stopped the job by Ctrl-C."""
    step, text = bye.step, stopped_message(bye)
    about = Incident("stopped", "info", text, since_step=step, until_step=step, steps=0 if step is None else 1)
    return replace(about, in_steps=False, found_ns=found_ns)


def _stopped_in(hang: Incident, dead: Sequence[RankLife]) -> Incident:
    """Returns a hang that somebody ended by Ctrl-C."""
    ends = {life.rank: end_of(life.bye) for life in dead if life.bye is not None}
    how = f"{hang.message}; then {stopped_message(dead[0].bye)}" if dead[0].bye is not None else hang.message
    return replace(hang, message=how, evidence=hang.evidence | Evidence(ends=ends))


def _root(parent: Mapping[int, int], group: int) -> int:
    while (above := parent.get(group, group)) != group:
        group = above
    return group


def _phase(life: RankLife) -> str:
    name = "" if life.beat is None else life.beat.activity or life.beat.phase
    return PHASES.get(name, name)


def _in_flight(life: RankLife) -> list[int]:
    return [] if life.beat is None else life.beat.in_flight
