"""What slows all ranks alike, on steps whose truth is known: transfers, links, drift, and what is not sound."""

import pytest

from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.rules.buffers import buffers_sentence
from ddpwatch.analysis.diagnosis.rules.level_shift import HighShare
from ddpwatch.analysis.diagnosis.words.verdict import of_incident
from ddpwatch.wire.messages import Device, Group, Layout, RankSample, Span
from tests.support.frames import MS, START_NS, hello, layout, state_of, step

pytestmark = pytest.mark.same_everywhere

SECOND = 1000 * MS


def test_a_link_that_becomes_slower():
    """Transfers of 10 ms take 30 ms from step 40 on, 20 ms of them exposed."""
    slow = {"comm_done": [60 * MS, 110 * MS], "duration_ns": 120 * MS}
    spans = [Span("forward", 2 * MS, 30 * MS), Span("backward", 31 * MS, 80 * MS), Span("sync", 80 * MS, 110 * MS)]
    steps = [step(r, n, **(slow | {"spans": spans} if n >= 40 else {})) for n in range(80) for r in range(2)]
    found = state_of([hello(0), hello(1), *steps]).diagnosis.incidents()
    (link,) = [incident for incident in found if incident.kind == "slow_link"]
    assert (link.since_step, link.ranks) == (40, ())
    before, since = link.evidence.busbw_gbps
    assert before == pytest.approx(5 / 3 * since, rel=0.01)
    assert link.cost_ns == pytest.approx(40 * 2 * 18 * MS, rel=0.1)


def test_the_link_of_one_pair_becomes_slower():
    """Transfers of 30 ms in all take 50 ms among ranks 2 and 3 from step 40 on."""
    slow = {"comm_done": [60 * MS, 110 * MS], "duration_ns": 120 * MS}
    slow["spans"] = [Span("forward", 2 * MS, 30 * MS), Span("sync", 80 * MS, 110 * MS)]
    pairs = {8: [0, 1], 9: [2, 3]}
    messages = [Group(rank=rank, id=group, ranks=ranks) for group, ranks in pairs.items() for rank in ranks]
    for number in range(80):
        for group, ranks in pairs.items():
            about = {"start_ns": START_NS + number * 120 * MS, "comm_group": [group, group]}
            about |= slow if group == 9 and number >= 40 else {}
            messages += [step(rank, number, **about) for rank in ranks]
    found = state_of([*(hello(rank, 4) for rank in range(4)), *messages]).diagnosis.incidents()
    (link,) = [incident for incident in found if incident.kind == "slow_link"]
    assert (link.since_step, link.ranks) == (40, (2, 3))
    assert not of_incident(link).ranks  # nobody waits for these
    assert "; without it, a step would be" in of_incident(link).text
    assert link.message.startswith("transfers among ranks 2, 3 take 67 % longer than before (busbw ")


def test_exposed_communication_that_comes_and_goes_is_one_incident():
    """It counts only while it is exposed."""
    exposed = {"spans": [Span("forward", 2 * MS, 30 * MS), Span("sync", 60 * MS, 90 * MS)]}
    hidden = {"comm_done": [60 * MS, 82 * MS]}
    steps = [step(r, n, **(exposed if n // 40 % 2 else hidden)) for n in range(200) for r in range(2)]
    found = state_of([hello(0), hello(1), *steps]).diagnosis.incidents()
    (one,) = [incident for incident in found if incident.kind == "exposed_comm"]
    assert one.since_step == pytest.approx(40, abs=8)
    assert one.until_step == pytest.approx(168, abs=8)
    assert one.steps == pytest.approx(80, abs=24)
    assert one.resting  # it may come back once more


def test_a_link_that_becomes_slower_after_communication_was_exposed():
    exposed = {"spans": [Span("forward", 2 * MS, 30 * MS), Span("sync", 60 * MS, 90 * MS)]}
    hidden = {"comm_done": [60 * MS, 82 * MS]}
    slow = {"comm_done": [60 * MS, 110 * MS], "duration_ns": 120 * MS}
    slow["spans"] = [Span("forward", 2 * MS, 30 * MS), Span("sync", 80 * MS, 110 * MS)]
    about = [exposed if 20 <= n < 60 else slow if n >= 120 else hidden for n in range(180)]
    steps = [step(r, n, start_ns=START_NS + n * 120 * MS, **about[n]) for n in range(180) for r in range(2)]
    found = {one.kind: one for one in state_of([hello(0), hello(1), *steps]).diagnosis.incidents()}
    assert found["slow_link"].since_step == 120
    assert found["exposed_comm"].until_step < 120
    assert not found["exposed_comm"].open


def test_a_link_that_was_slower_once_explains_nothing_later():
    """From step 120 on, the backward is shorter: as long as before, transfers are exposed."""
    slow = {"comm_done": [60 * MS, 110 * MS], "duration_ns": 120 * MS}
    slow["spans"] = [Span("forward", 2 * MS, 30 * MS), Span("sync", 80 * MS, 110 * MS)]
    ends = Span("backward", 29 * MS, 31 * MS), Span("sync", 31 * MS, 90 * MS)
    short = {"spans": [Span("forward", 2 * MS, 29 * MS), *ends]}
    long = {"spans": [Span("forward", 2 * MS, 30 * MS), Span("backward", 31 * MS, 95 * MS)]}
    about = [slow if 40 <= n < 80 else short if n >= 120 else long for n in range(160)]
    steps = [step(r, n, start_ns=START_NS + n * 120 * MS, **about[n]) for n in range(160) for r in range(2)]
    found = state_of([hello(0), hello(1), *steps]).diagnosis.incidents()
    (link,) = [incident for incident in found if incident.kind == "slow_link"]
    assert not link.open
    (exposed,) = [incident for incident in found if incident.kind == "exposed_comm"]
    assert exposed.open
    assert exposed.since_step == pytest.approx(120, abs=16)


def growing(number, at_ns):
    """Both ranks' step, whose optimizer takes a millisecond longer every eight steps; and when it ends."""
    longer = number // 8
    spans = [Span("forward", 2 * MS, 30 * MS), Span("backward", 31 * MS, 80 * MS)]
    spans.append(Span("optimizer", 91 * MS, (95 + longer) * MS))
    about = {"start_ns": at_ns, "duration_ns": (100 + longer) * MS, "spans": spans}
    return [step(rank, number, **about) for rank in range(2)], at_ns + (100 + longer) * MS


def test_a_run_that_gets_slower_and_slower():
    messages, at = [hello(0), hello(1)], START_NS
    for number in range(320):
        steps, at = growing(number, at)
        messages += steps
    found = state_of(messages).diagnosis.incidents()
    assert [incident.ranks for incident in found if incident.kind == "drift"] == [()]


def test_a_run_that_is_slower_from_a_step_on_does_not_drift():
    messages = [
        step(rank, n, start_ns=START_NS + n * 200 * MS, duration_ns=(100 if n < 160 else 140) * MS)
        for n in range(320)
        for rank in range(2)
    ]
    assert not [one for one in state_of(messages).diagnosis.incidents() if one.kind == "drift"]


def test_gradients_that_nobody_reduces():
    steps = [step(rank, n, reduced=False) for n in range(20) for rank in range(2)]
    (found,) = [one for one in state_of([hello(0), hello(1), *steps]).diagnosis.incidents() if one.severity == "error"]
    assert (found.kind, found.steps) == ("not_reduced", 20)


def test_layouts_that_differ():
    other = Layout(rank=1, epoch=2, params=["a", "b"], buckets=[])
    found = state_of([hello(0), hello(1), layout(), other, step(0), step(1)]).diagnosis.incidents()
    assert [(one.kind, one.ranks) for one in found if one.severity == "error"] == [("layouts_differ", (1,))]


def test_the_rank_whose_layout_differs_from_most_is_named():
    other = Layout(rank=0, epoch=2, params=["a", "b"], buckets=[])
    known = [hello(0, 3), hello(1, 3), hello(2, 3), other, layout(1), layout(2)]
    found = state_of([*known, *(step(rank) for rank in range(3))]).diagnosis.incidents()
    assert [(one.kind, one.ranks) for one in found if one.severity == "error"] == [("layouts_differ", (0,))]


def samples(rank, at_ns, share):
    """A second in which the rank waited for a core for that share of the time."""
    return RankSample(rank=rank, at_ns=at_ns, span_ns=SECOND, wait_ns=int(share * SECOND), run_ns=SECOND // 2)


def test_all_ranks_are_slower_as_others_take_their_cores():
    messages, at = [hello(rank, 3) for rank in range(3)], START_NS
    for number in range(320):
        took = 140 if number >= 160 else 100
        messages += [step(rank, number, start_ns=at, duration_ns=took * MS) for rank in range(3)]
        at += took * MS
        if number % 8 == 7:
            messages += [samples(rank, at, 0.3 * (number >= 160)) for rank in range(3)]
    (slow,) = [one for one in state_of(messages).diagnosis.incidents() if one.kind == "slow_device"]
    assert (slow.ranks, slow.severity) == ((), "info")
    assert slow.since_step == pytest.approx(160, abs=16)
    assert of_incident(slow).text == (
        "all ranks are slower: a step takes 40 % longer than before (CPU starved: waited 30 % of the time for a core); "
        "without it, a step would be 29 % shorter"
    )


@pytest.mark.parametrize(
    ("before", "since", "expected"),
    [
        ([0.0, 0.0, 0.0], [0.4, 0.0, 0.0], "rank 0: CPU starved: waited 40 % of the time for a core"),
        ([0.0, 0.0, 0.0], [0.4, 0.3, 0.2], "CPU starved: waited 30 % of the time for a core"),  # all: the median one
        ([0.0, 0.0, 0.0], [0.0, 0.0, 0.0], ""),
        ([0.4, 0.0, 0.0], [0.4, 0.0, 0.0], ""),  # as always
    ],
)
def test_a_link_is_slow_because_ranks_that_move_bytes_get_no_core(before, since, expected):
    """Transfers take three times as long from step 200 on; ranks wait for a core for these shares of the time."""
    slow = {"comm_done": [60 * MS, 110 * MS]}
    slow["spans"] = [Span("forward", 2 * MS, 30 * MS), Span("sync", 80 * MS, 110 * MS)]
    messages = [hello(rank, 3) for rank in range(3)]
    for number in range(300):
        at = START_NS + number * 120 * MS
        about = {"start_ns": at, **(slow if number >= 200 else {}), "duration_ns": 120 * MS}
        messages += [step(rank, number, **about) for rank in range(3)]
        if number % 8 == 7:
            shares = since if number >= 200 else before
            messages += [samples(rank, at + 120 * MS, shares[rank]) for rank in range(3)]
    (link,) = [one for one in state_of(messages).diagnosis.incidents() if one.kind == "slow_link"]
    assert link.device == expected
    assert (link.evidence.device is not None) == bool(expected)


def test_a_run_gets_slower_as_its_gpus_get_hot():
    messages, at = [hello(rank, 2, device_uuid=f"GPU-{rank}") for rank in range(2)], START_NS
    for number in range(320):
        steps, at = growing(number, at)
        messages += steps
        if number % 8 == 7:
            clock = 2000.0 - 15 * (number // 8)
            about = {"max_sm_clock_mhz": 2000.0, "sm_clock_mhz": clock, "throttle_reasons": 0x40}
            messages += [
                Device(host="node1", boot_id="boot", kind="cuda", at_ns=at, index=rank, uuid=f"GPU-{rank}", **about)
                for rank in range(2)
            ]
    (drift,) = [one for one in state_of(messages).diagnosis.incidents() if one.kind == "drift"]
    assert drift.device.startswith("clocks throttled by heat (1,")
    assert drift.evidence.device.cause == "lost_clock"


def test_what_takes_nothing_of_its_steps_is_not_said():
    """A minute's pause lies in the spell, in which 5 % of the steps were what is looked for."""
    share = HighShare(0.02, lambda split: split.buffers_ns)
    for number in range(60):
        share.add_split(StepSplit(number, 200 * MS, buffers_ns=10 * MS), 10 * MS)
    (found,) = share.incidents("buffers", "exposed_comm", 0.1, buffers_sentence)
    assert found.message.endswith("takes 5 % of a step")
    share.add_split(StepSplit(60, 120_000 * MS), None)
    assert share.incidents("buffers", "exposed_comm", 0.1, buffers_sentence) == []
