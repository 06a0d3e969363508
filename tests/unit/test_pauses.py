"""Pauses: whose a stall was, what explains it, and which collections, checkpoints and stalls are warnings."""

import random
from dataclasses import replace

import pytest

from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.rules.pause_or_hang import joined
from ddpwatch.analysis.diagnosis.rules.pauses import _sentence
from ddpwatch.analysis.diagnosis.rules.recurring import Pause, with_pause
from ddpwatch.analysis.diagnosis.words.lost_time import account_text
from ddpwatch.wire.messages import Device, Mark, RankSample, Span, Stack
from tests.support.frames import (
    MS,
    START_NS,
    bare,
    beat,
    diagnosed,
    hello,
    light,
    state_of,
    step,
    synchronous,
)
from tests.unit.test_engine import incidents, late_ones

pytestmark = pytest.mark.same_everywhere


def among_others(stalls, always, meanwhile):
    """The incidents of steps of 100 ms but for these, of ranks that wait for a core during a share of the time."""
    messages, at, sampled = [hello(0), hello(1)], 0, 0
    for number in range(240):
        took = stalls.get(number, 100)
        messages += [step(r, number, start_ns=START_NS + at * MS, duration_ns=took * MS) for r in range(2)]
        at += took
        while sampled + 1000 <= at:
            sampled += 1000
            wait = meanwhile if took > 1000 else always
            about = {"at_ns": START_NS + sampled * MS, "span_ns": 1000 * MS, "run_ns": 50 * MS}
            messages += [RankSample(rank=r, wait_ns=int(wait * 1000) * MS, **about) for r in range(2)]
    return [one for one in state_of(messages).diagnosis.incidents() if one.kind == "pause"]


def with_collections(late):
    """The incidents of single ranks in a run whose ranks are late (ms), rank 1 because of a collection each time."""
    messages = []
    for number, ranks in enumerate(synchronous(late)):
        if ms := max(late[number]):
            start = ranks[1].start_ns + 40 * MS
            messages.append(Mark(rank=1, kind="gc", name="gc", start_ns=start, end_ns=start + ms * MS))
        messages += ranks
    return late_ones(state_of([hello(0), hello(1), *messages]).diagnosis.incidents())


class TestPauses:
    def test_a_stall_of_one_rank(self):
        """A stall of 12 s was not in the report at all."""
        diagnosis = diagnosed([(0, 12_000 if n == 30 else 0) for n in range(60)]).diagnosis
        (stall,) = late_ones(diagnosis.incidents())
        named = [account_text(account) for account in diagnosis.lost().accounts if account.ns == stall.cost_ns]
        assert named == ["waiting for rank 1 (pause)"]  # it was three words: waiting (backward), pause, pauses
        assert (stall.kind, stall.ranks, stall.phase, stall.since_step) == ("pause", (1,), "backward", 30)
        assert stall.cost_ns == 11_990 * MS
        assert not stall.open
        own = [account.ns for account in diagnosis.lost().accounts if account.phase == "pause" and account.rank is None]
        assert own == [12_000 * MS]  # it was the backward's in the accounts, and a pause in the goodput

    def test_a_stall_amid_far_shorter_delays_stays_a_pause(self):
        """It was taken for one of the late steps, and gone."""
        found = {
            one.kind: one for one in late_ones(incidents([(0, 0)] * 28 + [(0, 20)] * 2 + [(0, 2000)] + [(0, 20)] * 30))
        }
        assert found["straggler"].since_step == 28
        assert (found["pause"].ranks, found["pause"].since_step) == ((1,), 30)

    @pytest.mark.parametrize("before", [3, 4, 5])
    def test_a_stall_soon_after_late_steps_stays_a_pause(self, before):
        """It was taken for a part of theirs, which were pauses at first."""
        late = [(0, 0)] * 28 + [(0, 300)] * before + [(0, 6000)] + [(0, 300)] * 15
        (pause,) = [one for one in late_ones(incidents(late)) if one.kind == "pause"]
        assert (pause.ranks, pause.until_step) == ((1,), 28 + before)

    def test_a_stall_in_a_bare_step_is_nobody_s_without_more(self):
        steps = [step(rank, n) for n in range(40) for rank in range(2)]
        stalls = [bare(rank, 40) for rank in range(2)]
        for stall in stalls:
            stall.duration_ns = 12_100 * MS
        found = state_of([hello(0), hello(1), *steps, *stalls]).diagnosis.incidents()
        (stall,) = [incident for incident in found if incident.kind == "pause"]
        assert (stall.ranks, stall.cost_ns) == ((), 2 * 12_000 * MS)

    def test_a_stall_names_what_the_machine_did_meanwhile(self):
        """As that of all ranks while the hypervisor gave their cores to others."""
        messages, at = [hello(0), hello(1)], 0
        for number in range(60):
            took, stolen = (3000, 60.0) if number == 30 else (100, 0.0)
            for second in range(at // 1000 + 1, (at + took) // 1000 + 1):
                sampled = START_NS + second * 1000 * MS
                messages.append(Device(host="node1", boot_id="boot", kind="cpu", at_ns=sampled, steal=stolen))
            messages += [step(r, number, start_ns=START_NS + at * MS, duration_ns=took * MS) for r in range(2)]
            at += took
        (stall,) = [one for one in state_of(messages).diagnosis.incidents() if one.kind == "pause"]
        assert (stall.ranks, stall.device) == ((), "45 % of CPU time stolen")
        assert stall.evidence.device.cause == "steal"

    @pytest.mark.parametrize(("always", "meanwhile", "severity"), [
        (0.0, 0.9, "info"), (0.4, 0.9, "info"), (0.0, 0.0, "warning"), (0.4, 0.02, "warning"),
    ])  # fmt: skip
    def test_a_stall_that_others_on_the_machine_explain_is_no_warning(self, always, meanwhile, severity):
        """Other processes took the cores, and 52 of 610 clean steps were warnings. Who is stopped waits for none."""
        found = among_others({150: 3000}, always, meanwhile)
        assert [(one.kind, one.severity, bool(one.device)) for one in found] == [
            ("pause", severity, severity == "info")
        ]

    def test_stalls_that_others_on_the_machine_explain_are_one_incident(self):
        (found,) = among_others({150: 2000, 170: 4000, 190: 3000}, 0.4, 0.95)
        assert (found.severity, found.steps, found.since_step, found.until_step) == ("info", 3, 150, 190)
        assert found.cost_ns == 2 * (1900 + 3900 + 2900) * MS
        assert found.message == "every rank paused 3 times, for up to 3900 ms"

    @pytest.mark.parametrize(("stall_ms", "severity"), [(900, "info"), (12_000, "warning")])
    def test_a_stall_is_compared_with_what_the_job_s_other_steps_take_now_and_then(self, stall_ms, severity):
        """One step in 20 takes up to half a second longer, and nobody knows why."""
        rng = random.Random(1)
        longer = [int(100 * rng.paretovariate(3)) * (rng.random() < 0.05) for _ in range(400)]
        steps, at = [hello(0), hello(1)], 0
        for number, ms in enumerate(longer):
            took = 100 + (stall_ms if number == 350 else min(ms, 500))
            steps += [step(r, number, start_ns=START_NS + at * MS, duration_ns=took * MS) for r in range(2)]
            at += took
        found = [one for one in state_of(steps).diagnosis.incidents() if one.kind == "pause" and one.since_step == 350]
        assert [one.severity for one in found] == [severity]

    @pytest.mark.parametrize(("steps", "is_open"), [(100, True), (116, True), (117, False)])
    def test_a_collection_that_recurs(self, steps, is_open):
        """In every tenth step of the first hundred. It is over if twice that time has gone by."""
        found = with_collections([(0, 30 if n % 10 == 5 and n < 100 else 0) for n in range(steps)])
        assert [(one.kind, one.ranks, one.phase, one.period) for one in found] == [("intermittent", (1,), "gc", 10)]
        assert (found[0].cost_ns, found[0].open) == (10 * 20 * MS, is_open)
        assert found[0].gain == pytest.approx(20 / (10 * 100 + 30), rel=0.02)

    def test_a_far_shorter_collection_is_not_one_of_those_that_recur(self):
        """It came long before them, and they seemed to have come since then, and to be due for as long."""
        late = [(0, 2 if n == 5 else 30 if n % 10 == 0 and 100 <= n < 200 else 0) for n in range(260)]
        found = with_collections(late)
        recurring = next(one for one in found if one.kind == "intermittent")
        assert (recurring.since_step, recurring.period, recurring.open) == (100, 10, False)

    @pytest.mark.parametrize(
        ("hang", "one"),
        [
            ({}, True),
            ({"ranks": (0,)}, False),
            ({"since_step": 41, "until_step": 44}, False),
            ({"cost_ns": 9_000 * MS}, False),  # the collection explains less than half of it
            ({"open": True}, False),
        ],
    )
    @pytest.mark.parametrize("regular", [{"period": 10}, {"struck": (30, 40, 50)}])
    def test_a_long_collection_that_recurs_and_the_hang_that_it_seemed_are_one_incident(self, regular, hang, one):
        evidence = Evidence(longest_ms=4000.0, ranks=2)
        steps = {"since_step": 30, "until_step": 50, "steps": 3, **regular}
        recurring = Incident("intermittent", "warning", "", (1,), "gc", cost_ns=9_000 * MS, evidence=evidence, **steps)
        stuck = {
            "ranks": (1,),
            "since_step": 39,
            "until_step": 40,
            "cost_ns": 4_400 * MS,
            "evidence": Evidence(stacks={}),
        }
        found = joined([recurring], [Incident("hang", "error", "", **(stuck | hang))])
        assert [incident.kind for incident in found] == ["intermittent", "hang"][: 2 - one]
        assert (found[0].evidence.stacks is not None) == one
        assert found[0].cost_ns == 9_000 * MS

    @pytest.mark.parametrize("regular", [{"period": 30}, {"struck": (30, 60, 90)}])
    def test_a_pause_that_recurs_and_the_hangs_that_it_seemed_count_once(self, regular):
        evidence = Evidence(longest_ms=9000.0, ranks=2)
        about = {"since_step": 30, "until_step": 90, "steps": 3, "cost_ns": 27_000 * MS, "evidence": evidence}
        recurring = Incident("pause", "info", "every rank paused", (), "between", **about, **regular)
        hangs = [
            Incident("hang", "error", "", (1,), since_step=number, until_step=number, cost_ns=4_500 * MS)
            for number in (30, 60, 90)
        ]
        assert joined([recurring], hangs) == [replace(recurring, cost_ns=13_500 * MS), *hangs]
        (found,) = joined([replace(recurring, ranks=(1,))], hangs)
        assert found.cost_ns == 27_000 * MS
        other = Incident("hang", "error", "", (1,), since_step=45, until_step=45, cost_ns=4_500 * MS)
        assert joined([recurring], [other]) == [recurring, other]

    def test_a_short_collection_is_no_warning(self):
        (found,) = with_collections([(0, 15 if n == 30 else 0) for n in range(60)])
        assert (found.kind, found.phase, found.severity) == ("pause", "gc", "info")
        assert with_collections([(0, 13 if n == 30 else 0) for n in range(60)]) == []  # it was listed, with 0.00 s

    @pytest.mark.parametrize(("every", "severity"), [(4, "warning"), (10, "info")])  # 1.2 and 0.5 %
    def test_collections_are_a_warning_where_they_cost_a_hundredth_of_a_step(self, every, severity):
        (found,) = with_collections([(0, 15 if n % every == every - 1 else 0) for n in range(160)])
        assert (found.kind, found.severity) == ("intermittent", severity)

    def test_what_a_mark_shows_a_part_of_is_one_pause(self):
        """A checkpoint of 80 ms in a stall of 350 was two of them, and the newest one of three."""
        messages, now = [hello(0), hello(1)], 0
        for number in range(60):
            long = {20: 350, 40: 160}.get(number, 0)
            start = START_NS + now * MS
            if long:
                messages.append(Mark(rank=1, kind="save", name="save", start_ns=start, end_ns=start + 80 * MS))
                seen = {"phase": "input", "activity": "save", "issued": None, "since_ns": start}
                messages.append(beat(1, number, at_ns=start + 200 * MS, **seen))
                seen = {"phase": "", "issued": None, "since_ns": start + 5 * MS}
                messages.append(beat(0, number, at_ns=start + 200 * MS, **seen))
            for rank in range(2):
                one = bare(rank, number) if long else step(rank, number)
                one.start_ns, one.duration_ns = start, (100 + long) * MS
                messages.append(one)
            now += 100 + long
        (found,) = [one for one in state_of(messages).diagnosis.incidents() if one.phase == "checkpoint"]
        assert (found.ranks, found.since_step, found.until_step, found.steps) == ((1,), 20, 40, 2)
        assert found.evidence.longest_ms == 350 - 80

    def test_a_mark_within_stalls_of_its_rank_is_no_pause_beside_them(self):
        """A save of 14 ms, and 700 ms in which the disk was waited for: two pauses every 10 steps."""
        messages, now = [hello(0), hello(1)], 0
        for number in range(60):
            long = 700 if number in (20, 30, 40, 50) else 0
            start = START_NS + now * MS
            if long:
                messages.append(Mark(rank=1, kind="save", name="save", start_ns=start, end_ns=start + 14 * MS))
                messages.append(beat(1, number, at_ns=start + 400 * MS, phase="input", since_ns=start, issued=None))
                seen = {"phase": "", "issued": None, "since_ns": start + 5 * MS}
                messages.append(beat(0, number, at_ns=start + 400 * MS, **seen))
            both = [bare(0, number), bare(1, number)]
            if number not in (20, 30, 40):
                both = [step(0, number, wait_ms=long), step(1, number, late_ms=long)]
            for one in both:
                one.start_ns, one.duration_ns = start, (100 + long) * MS
            messages += both
            now += 100 + long
        found = [one for one in state_of(messages).diagnosis.incidents() if one.kind == "pause"]
        assert [(one.ranks, one.steps, one.period) for one in found] == [((1,), 4, 10)]

    def test_a_pause_after_a_step_s_last_launch_delays_the_next_step(self):
        """Others waited for it there for a rank that was late by chance, and it cost nothing here."""
        messages, now = [hello(0), hello(1)], 0
        for number in range(40):
            late, start = 2000 * (number == 20), START_NS + now * MS
            if late:
                about = {"name": "gc", "start_ns": start + 95 * MS, "end_ns": start + (95 + late) * MS}
                messages.append(Mark(rank=0, kind="gc", **about))
            before = 2000 * (number == 21)
            messages.append(step(0, number, start_ns=start, duration_ns=(100 + late) * MS))
            began = {"start_ns": start - before * MS, "duration_ns": (100 + before) * MS}
            messages.append(step(1, number, wait_ms=before, **began))
            now += 100 + late
        diagnosis = state_of(messages).diagnosis
        (found,) = late_ones(diagnosis.incidents())
        assert (found.kind, found.ranks, found.phase, found.since_step) == ("pause", (0,), "gc", 21)
        assert found.cost_ns == pytest.approx(2000 * MS, rel=0.01)
        waited = {
            (one.rank, one.phase): one.ns for one in diagnosis.lost().accounts if one.name in ("waiting", "jitter")
        }
        assert waited == {(0, "gc"): found.cost_ns}

    def test_a_checkpoint_is_no_warning(self):
        messages, at = [], 0
        for number in range(40):
            at += 500 if number == 20 else 0
            start = START_NS + (number * 100 + at) * MS
            for rank in range(2):
                if number == 20:
                    save = Mark(rank=rank, kind="save", name="torch.save", start_ns=start - 500 * MS, end_ns=start)
                    messages.append(save)
                messages.append(step(rank, number, start_ns=start))
        state = state_of([hello(0), hello(1), *messages])
        (found,) = [one for one in state.diagnosis.incidents() if one.phase == "checkpoint"]
        assert (found.kind, found.severity, found.ranks, found.cost_ns) == ("pause", "info", (), 1000 * MS)


def stack_at(now, rank, number):
    """Rank 0 draws, in another line each time, and rank 1 waits in a collective."""
    calls = f'plot.py", line {number} in fill\n  File "/job.py", line 88 in draw'
    calls = 'torch/distributed/distributed_c10d.py", line 1 in barrier' if rank else calls
    text = f'Thread 0x1 (most recent call first):\n  File "/{calls}\n  File "/job.py", line 9 in train'
    return Stack(rank=rank, step=number, at_ns=now, since_ns=now - 300 * MS, text=text)


def with_stalls(*at, **stalls):
    """What is found in a run with stalls."""
    return stalled(*at, **stalls).diagnosis


def stalled(at, took=600, others=(), steps=240):
    """A run whose rank 1 is between steps for so long (ms) before some steps, bare ones of which heartbeats tell."""
    messages, now = [hello(0), hello(1)], 0
    for number in range(steps):
        long = took if number in at else others.get(number, 0) if others else 0
        start, longer = START_NS + now * MS, {"start_ns": START_NS + now * MS, "duration_ns": (100 + long) * MS}
        if long and number not in others:
            said = {"at_ns": start + 2 * long // 3 * MS, "issued": None}
            messages.append(beat(0, number, phase="", since_ns=start + 5 * MS, **said))
            messages.append(beat(1, number, phase="input", since_ns=start, **said))
        for rank in range(2):
            one = bare(rank, number) if long else step(rank, number)
            one.start_ns, one.duration_ns = longer["start_ns"], longer["duration_ns"]
            messages.append(one)
        now += 100 + long
    return state_of(messages)


def after(one, ms, meets=None, number=0):
    """The same step, with something that takes so long before its forward.

    If it is given when the rank comes to a barrier (ms), that ends it, and is among its collectives.
    """
    for name in ("hook_ns", "comm_ready", "comm_launch", "comm_done"):
        setattr(one, name, [None if at is None else at + ms * MS for at in getattr(one, name)])
    one.spans = [Span(span.phase, span.start + ms * MS, span.end + ms * MS) for span in one.spans]
    one.duration_ns += ms * MS
    if meets is not None:
        about = {"module": 0, "label": 99, "bytes": 4, "ready": None, "launch": meets * MS, "done": ms * MS}
        about |= {"wait_begin": meets * MS, "wait_end": ms * MS}
        one.comm_wait_begin, one.comm_wait_end = [None, None], [None, None]
        for name, value in about.items():
            setattr(one, f"comm_{name}", [value, *getattr(one, f"comm_{name}")])
        one.comm_op = ["barrier", "all_reduce", "all_reduce"]
        one.comm_first_seq, one.comm_seq = 3 * number, [0, 1, 2]
        one.spans = [Span("sync", meets * MS, ms * MS), *one.spans]
    return one


def meetings(kind, issued, world=2):
    """What is found in a run whose ranks do something for 200 ms before some steps, and the last one for 600.

    The others wait for it at a barrier.

    Args:
        kind: Makes a step of those.
        issued: By such a step, when heartbeats come (ms), and how many collectives each rank has issued by then.
    """
    messages, now = [hello(rank, world) for rank in range(world)], 0
    for number in range(150):
        meets = number in issued
        for rank in range(world):
            about = {"start_ns": START_NS + now * MS}
            if meets and kind is bare:
                one = bare(rank, number)
                one.start_ns, one.duration_ns = about["start_ns"], 700 * MS
            elif meets and kind is step:
                one = after(step(rank, number, **about), 600, 600 if rank == world - 1 else 200, number)
            else:
                one = (kind if meets else step)(rank, number, **about)
                one = after(one, 600) if meets else one
            for at, counts in (issued[number] or ()) if meets else ():
                seen = {"at_ns": one.start_ns + at * MS, "since_ns": one.start_ns, "issued": counts[rank]}
                messages.append(beat(rank, number, phase="input", **seen))
            messages.append(one)
        now += 700 if meets else 100
    diagnosis = state_of(messages).diagnosis
    lost = diagnosis.lost()
    assert sum(one.ns for one in lost.accounts) == lost.rank_ns
    assert min(one.ns for one in lost.accounts) > 0
    found = {one.ranks: one for one in diagnosis.incidents() if one.kind == "pause"}
    return found, sum(one.ns for one in lost.accounts if one.name == "waiting")


def meeting_late(began_ms, every=12, steps=60):
    """A run whose ranks average parameters in every so many steps, and in which rank 1 begins later than rank 0."""
    messages, now = [hello(0), hello(1)], [0, began_ms]
    for number in range(steps):
        meets = number % every == every - 1
        for rank in range(2):
            wait = max(now) - now[rank] if meets else 0
            one = step(rank, number, wait_ms=wait, status="ok" if number else "warmup", synced=meets)
            if not meets:
                for name in ("comm_module", "comm_label", "comm_bytes", "comm_ready", "comm_launch", "comm_done"):
                    setattr(one, name, [])
            one.start_ns, one.duration_ns = START_NS + now[rank] * MS, (100 + wait) * MS
            messages.append(one)
        now = [(max(now) if meets else at) + 100 for at in now]
    return messages


def test_a_rank_that_begins_later_has_not_paused():
    """The others wait for it in the first collective, which comes in the twelfth step."""
    diagnosis = state_of(meeting_late(3000)).diagnosis
    assert diagnosis.incidents() == []
    accounts = {(account.name, account.rank): account.ns for account in diagnosis.lost().accounts}
    assert accounts["startup", None] == 3000 * MS - 10 * MS + 200 * MS  # 10 ms are the transfer; two first steps
    assert not [key for key in accounts if key[0] in ("waiting", "jitter")]


class TestRhythms:
    def test_from_the_third_on_they_are_one_incident_with_a_period_and_live(self):
        """Six uploads were six incidents, and the verdict had none of them."""
        for times, is_open in ((2, False), (3, True), (4, True)):
            at = range(50, 50 * times + 1, 50)
            diagnosis = with_stalls(at, steps=at[-1] + 10)
            (found,) = [one for one in diagnosis.incidents() if one.kind == "pause"]
            assert (found.ranks, found.phase, found.steps, found.open) == ((1,), "between", times, is_open)
            assert found.period == (50 if is_open else None)
            assert found.cost_ns == times * 600 * MS
        assert found.message == "rank 1 alone paused between steps every 50 steps, for up to 600 ms"
        assert found.severity == "warning"
        assert found.gain == pytest.approx(600 / (50 * 100 + 600), rel=0.05)
        assert (found.counts, "less often" in found.next_step) == (True, True)

    def test_one_of_which_nothing_is_known_is_theirs_if_it_was_due(self):
        for unknown, steps in ((200, 4), (220, 3)):
            found = [
                one for one in with_stalls((50, 100, 150), others={unknown: 700}).incidents() if one.kind == "pause"
            ]
            assert sorted((one.ranks, one.steps) for one in found) == sorted([((1,), steps)] + [((), 1)] * (steps == 3))
            (rhythm,) = [one for one in found if one.ranks]
            assert (rhythm.period, rhythm.cost_ns) == (50, (1800 + 700 * (steps == 4)) * MS)

    @pytest.mark.parametrize(("short_ms", "counts"), [(240, True), (160, False)])
    @pytest.mark.parametrize("full", [(50, 75, 100), (50, 100, 150), (75, 100, 125)])
    def test_those_somewhat_below_the_limit_that_keep_time_are_theirs(self, short_ms, counts, full):
        """It was over while it went on: saves of 250 ms are 247 to 253 ms longer than other steps."""
        shorter = {at: short_ms for at in (*range(25, 275, 25), 140) if at not in full}
        diagnosis = with_stalls(full, took=260, others=shorter, steps=255)
        (found,) = [one for one in diagnosis.incidents() if one.kind == "pause"]
        times = 10 if counts else 3
        assert (found.steps, found.since_step, found.open) == (times, 25 if counts else full[0], counts)
        assert found.cost_ns == (780 + (times - 3) * short_ms) * MS

    @pytest.mark.parametrize(
        ("every", "now_and_then", "kind"), [(50, 0, "pause"), (25, 20, "pause"), (1, 0, "straggler")]
    )
    def test_a_rank_that_is_late_only_when_it_pauses_is_not_late_besides(self, every, now_and_then, kind):
        """Three uploads in watched steps were late steps; those in bare ones were lost in these."""
        late = [(0, 600 if n and not n % every else now_and_then * (n in (1, 11, 44, 63))) for n in range(240)]
        (found,) = late_ones(incidents(late))
        assert (found.kind, found.ranks, found.cost_ns) == (kind, (1,), pytest.approx(239 // every * 600 * MS, rel=0.1))
        assert found.period == (every if every > 1 else None)

    def test_what_is_planned_is_the_verdict_if_it_takes_5_percent(self):
        """Checkpoints of one rank took a quarter of the run, beside "nothing stands out".

        The other one adds its random state, as with Accelerate: it was said that every rank paused.
        """
        for save_ms, every, counts in ((400, 40, True), (100, 40, False), (30, 1, True)):
            messages, now = [hello(0), hello(1)], 0
            for number in range(170):
                due = number % every == 0 and number > 0
                start, late = START_NS + now * MS, save_ms if due else 0
                if due:
                    for rank, ms in enumerate((late, late // 10)):
                        about = {"name": "torch.save", "start_ns": start, "end_ns": start + ms * MS}
                        messages.append(Mark(rank=rank, kind="save", **about))
                messages.append(step(0, number, start_ns=start + late * MS))
                messages.append(step(1, number, wait_ms=late, start_ns=start, duration_ns=(100 + late) * MS))
                now += 100 + late
            (found,) = [one for one in state_of(messages).diagnosis.incidents() if one.phase == "checkpoint"]
            assert (found.ranks, found.severity, found.period, found.open) == ((0,), "info", every, True)
            assert (found.counts, f"every {every} steps" in found.message) == (counts, every > 1)

    @pytest.mark.parametrize("known", [0, 2])
    def test_a_rank_that_others_wait_for_does_not_wait_itself(self, known):
        """Rank 0 drew histograms "waiting for buckets": in one of its stalls, only the others' wait was seen."""
        found = []
        for at, step_number in enumerate((30, 60, 90)):
            ranks, phase = ((), "exposed_comm") if at == known else ((0,), "between")
            pause = Pause(ranks, phase, step_number, ranks_in_run=3)
            pause.add_step(step_number, 500 * MS, 1000 * MS)
            found = with_pause(found, pause)
        (one,) = found
        assert (one.ranks, one.phase, one.period) == ((0,), "between", 30)

    def test_steps_one_after_another_are_no_two_pauses(self):
        """Without its cores, a pipeline took ten times as long: "every rank paused 2 times", 93 % of all time."""
        found = []
        for first in (21, 41):
            pause = Pause((), "forward", first, ranks_in_run=2)
            pause.add_step(first, 500 * MS, 1000 * MS)
            for step_number in range(first + 1, first + 18):
                after = Pause((), "forward", step_number, ranks_in_run=2)
                after.add_step(step_number, 500 * MS, 1000 * MS)
                pause.merge(after, again=False)
            found = with_pause(found, pause)
        assert [(one.times, one.count) for one in found] == [(2, 36)]
        assert _sentence(found[0]) == "every rank paused in 36 steps in forward, for up to 500 ms"

    def test_what_all_do_and_by_how_much_one_takes_longer_are_two(self):
        """A validation of 400 ms of which one rank's took 900 was one of all, and nobody was waited for."""
        messages, now = [hello(0), hello(1)], 0
        for number in range(170):
            validates, start = number % 40 == 0 and number > 0, START_NS + now * MS
            for rank, ms in enumerate((900, 400)):
                if validates:
                    about = {"name": "validation", "start_ns": start, "end_ns": start + ms * MS}
                    messages.append(Mark(rank=rank, kind="validation", **about))
                after = ms if validates else 0
                wait = 500 * rank if validates else 0
                messages.append(
                    step(rank, number, wait_ms=wait, start_ns=start + after * MS, duration_ns=(100 + wait) * MS)
                )
            now += 1000 if validates else 100
        found = {one.ranks: one for one in state_of(messages).diagnosis.incidents() if one.phase == "validation"}
        assert found.keys() == {(), (0,)}
        assert found[()].message == "every rank paused (validation) every 40 steps, for up to 400 ms"
        assert found[0,].message == "rank 0 paused (validation) every 40 steps, for up to 500 ms longer than others"
        assert (found[()].cost_ns, found[0,].cost_ns) == (4 * 800 * MS, pytest.approx(4 * 500 * MS, rel=0.05))

    @pytest.mark.parametrize("kind", [bare, light, step])
    @pytest.mark.parametrize("world", [2, 3])
    def test_what_the_others_do_before_they_wait_at_a_barrier_is_not_waited(self, kind, world):
        """All saved for 0.3 s and one for 0.6: it was alone to blame for all of it, or nobody was, for 0.6 s of each.

        Of steps in which the barrier is timed, it is known how long; else from when on ranks were seen to wait.
        """
        level, ahead = [5] * world, [6] * (world - 1) + [5]
        issued = {30: [(180, level)], 60: [(400, ahead)], 90: [(250, ahead)], 120: [(500, ahead)]}
        found, waited = meetings(kind, dict.fromkeys(issued, None) if kind is step else issued, world)
        usual_wait = 10
        alike, late, others = 200 - usual_wait if kind is step else 250, (world - 1,), world - 1
        assert found.keys() == {(), late}
        assert found[()].message == f"every rank paused between steps every 30 steps, for up to {alike} ms"
        longer = f"paused between steps every 30 steps, for up to {600 - alike} ms longer than others"
        assert found[late].message == f"rank {late[0]} {longer}"
        assert found[()].cost_ns == pytest.approx(4 * world * alike * MS, rel=0.01)
        assert found[late].cost_ns == pytest.approx(4 * others * (600 - alike) * MS, rel=0.03)
        assert waited == found[late].cost_ns

    @pytest.mark.parametrize("stalls", [[(600, 250), (1800, 0)], [(1800, 0), (600, 250)], [(600, 200), (600, 400)]])
    def test_what_all_took_alike_is_taken_from_each_stall_by_itself(self, stalls):
        """Where they were joined with stalls in which that was not so, or not as long, the others waited all of it."""
        messages, now, others, world = [hello(rank, 3) for rank in range(3)], 0, 2, 3
        for number in range(60 + 30 * len(stalls)):
            excess, alike = stalls[number // 30 - 1] if number in (30, 60) else (0, 0)
            for rank in range(world):
                one = step(rank, number, start_ns=START_NS + now * MS)
                messages.append(after(one, excess, excess if rank == others else alike, number) if excess else one)
            now += 100 + excess
        diagnosis = state_of(messages).diagnosis
        found = {one.ranks: one for one in diagnosis.incidents() if one.kind == "pause"}
        assert found.keys() == {(), (others,)}
        longer, common = sum(excess - alike for excess, alike in stalls), sum(alike for _, alike in stalls)
        assert found[others,].cost_ns == pytest.approx(others * longer * MS, rel=0.03)
        assert found[()].cost_ns == pytest.approx(world * common * MS, rel=0.06)  # less than a usual step's wait
        assert sum(one.ns for one in diagnosis.lost().accounts if one.name == "waiting") == found[others,].cost_ns

    @pytest.mark.parametrize(("at", "who"), [(400, "rank 1"), (200, "rank 1 alone")])
    def test_a_rank_is_alone_if_the_others_wait_for_most_of_it(self, at, who):
        """Nothing is known of them before that, so they may well have waited: it costs that."""
        found, waited = meetings(bare, {number: [(at, (6, 5))] for number in (30, 60, 90)})
        assert found.keys() == {(1,)}
        assert found[1,].message == f"{who} paused between steps every 30 steps, for up to 600 ms"
        assert found[1,].cost_ns == waited == 3 * 600 * MS

    def test_what_all_ranks_do_again_and_again_is_no_warning(self):
        """Each iteration of a PPO starts with a phase of its own."""
        messages, now = [hello(0), hello(1)], 0
        for number in range(80):
            long = 1000 if number % 16 == 0 and number else 0
            start = START_NS + now * MS
            for rank in range(2):
                one = bare(rank, number) if long else step(rank, number)
                one.start_ns, one.duration_ns = start, (100 + long) * MS
                if long:
                    messages.append(
                        beat(rank, number, phase="input", issued=None, at_ns=start + 600 * MS, since_ns=start)
                    )
                messages.append(one)
            now += 100 + long
        (found,) = [one for one in state_of(messages).diagnosis.incidents() if one.kind == "pause"]
        assert (found.ranks, found.severity, found.period, found.steps) == ((), "info", 16, 4)
        assert found.message == "every rank paused between steps every 16 steps, for up to 1000 ms"

    @pytest.mark.parametrize("in_step", [bare, step])
    @pytest.mark.parametrize(("stalls", "ranks"), [((0, 0, 9), (0,)), ((0, 1, 0), ()), ((0, 9, 9), ())])
    def test_heartbeats_late_in_several_stalls_show_together_whose_they_were(self, stalls, ranks, in_step):
        """Rank 0 draws for half a second, the others stand at a barrier: one heartbeat of each falls into that.

        What is timed of a step does not show it: the barrier is not among its collectives.
        """
        messages, now = [hello(0), hello(1)], 0
        for number in range(120):
            long = 500 if number in (30, 60, 90) else 0
            start, slow = START_NS + now * MS, stalls[number // 30 - 1]
            for rank in range(2):
                one = (in_step if long else step)(rank, number)
                one.start_ns, one.duration_ns = start, (100 + long) * MS
                if number in (60, 90) and not rank:
                    messages.append(stack_at(start + 300 * MS, rank, number))
                if long:
                    about = {"at_ns": start + (450 if rank == slow else 440) * MS, "since_ns": start}
                    messages.append(beat(rank, number, phase="input", issued=number + (rank != slow), **about))
                messages.append(one)
            now += 100 + long
        diagnosis = state_of(messages).diagnosis
        (found,) = [one for one in diagnosis.incidents() if one.kind == "pause"]
        waiting = {one.rank: one.ns for one in diagnosis.lost().accounts if one.name == "waiting"}
        assert (found.ranks, found.period, found.steps) == (ranks, 30, 3)
        assert found.message.endswith("ms: job.py:88 in draw")
        assert (found.cost_ns, waiting) == ((1500 * MS, {0: 1500 * MS}) if ranks else (3000 * MS, {}))

    @pytest.mark.parametrize("without_stacks", [30, 60, 90])
    def test_the_only_rank_that_is_in_no_collective_is_waited_for(self, without_stacks):
        """Rank 0 draws samples, and the other one waits in a broadcast: it was said that every rank paused."""
        messages, now = [hello(0), hello(1)], 0
        for number in range(120):
            long = 500 if number in (30, 60, 90) else 0
            for rank in range(2):
                one = (bare if long else step)(rank, number)
                one.start_ns, one.duration_ns = START_NS + now * MS, (100 + long) * MS
                if long and number != without_stacks:
                    messages.append(stack_at(one.start_ns + 300 * MS, rank, number))
                messages.append(one)
            now += 100 + long
        (found,) = [one for one in state_of(messages).diagnosis.incidents() if one.kind == "pause"]
        assert (found.period, found.steps, found.cost_ns) == (30, 3, 1500 * MS)
        assert found.message == "rank 0 alone paused every 30 steps, for up to 500 ms: job.py:88 in draw"

    @pytest.mark.parametrize(("phase", "severity"), [("input", "info"), ("forward", "warning")])
    def test_what_all_ranks_do_between_steps_is_the_loop_s(self, phase, severity):
        """A job generates for half a minute between its updates, once so far."""
        messages, now = [hello(0), hello(1)], 0
        for number in range(80):
            long = 33_000 if number == 40 else 0
            start = START_NS + now * MS
            for rank in range(2):
                one = bare(rank, number) if long else step(rank, number)
                one.start_ns, one.duration_ns = start, (100 + long) * MS
                if long:
                    seen = {"phase": phase, "issued": None, "since_ns": start}
                    messages += [beat(rank, number, at_ns=start + at * 1000 * MS, **seen) for at in range(17, 33)]
                messages.append(one)
            now += 100 + long
        (found,) = [one for one in state_of(messages).diagnosis.incidents() if one.kind == "pause"]
        assert (found.ranks, found.severity, found.steps) == ((), severity, 1)

    @pytest.mark.parametrize("seconds", [(4, 3), (3, 4), (4, 4)])
    def test_a_stall_in_which_all_wait_for_data_is_of_all_and_counts_once(self, seconds):
        """Workers start again, and have no core: one rank's need longer, and the other waits for it in the end."""
        messages, now = [hello(0), hello(1)], 0
        for number in range(90):
            stalls = [10 + (second * 1000 if number in (40, 80) else 0) for second in seconds]
            longest = max(stalls)
            for rank, stall in enumerate(stalls):
                one = step(rank, number, wait_ms=longest - stall)
                for name in ("hook_ns", "comm_ready", "comm_launch", "comm_done"):
                    setattr(one, name, [at + stall * MS for at in getattr(one, name)])
                one.spans = [Span(at.phase, at.start + stall * MS, at.end + stall * MS) for at in one.spans]
                one.start_ns, one.duration_ns = START_NS + now * MS, (100 + longest) * MS
                one.data = [(0, stall * MS)]
                seen = {"phase": "input", "since_ns": one.start_ns}
                for at in range(500, stall, 500):
                    messages.append(beat(rank, number, at_ns=one.start_ns + at * MS, issued=number - rank, **seen))
                messages.append(one)
            now += 100 + longest
        incidents = state_of(messages).diagnosis.incidents()
        found = {one.kind: one for one in incidents if one.kind in ("pause", "slow_input")}
        assert sorted((one.kind, one.ranks) for one in incidents if one.phase == "data") == [
            ("pause", ()), ("slow_input", ()),
        ]  # fmt: skip
        hung = sum(one.cost_ns for one in incidents if one.kind == "hang" and not one.open)
        assert found["pause"].cost_ns + hung == pytest.approx(2 * 2 * 4000 * MS, rel=0.01)
        assert found["slow_input"].cost_ns <= 2 * 90 * 12 * MS  # a stall costs once
