"""What a job's structure costs: unequal work, gradients reduced more than once, buffers, buckets of one parameter."""

from __future__ import annotations

import random

import pytest

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.next_steps import next_step
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.common.text import percent
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import BucketLayout, Layout, RankSample, Span, Step
from tests.support.frames import MS, START_NS, diagnosed, hello, layout, state_of, step, synchronous

STEPS = 100
SECOND = 1000 * MS


def incidents_of(state: RunState, kind: str) -> list[Incident]:
    return [incident for incident in state.diagnosis.incidents() if incident.kind == kind]


# -- imbalance -----------------------------------------------------------------------------------------------


def by_turns(world: int, seed: int = 0) -> list[list[int]]:
    """Any rank is late by up to 120 ms, another one each step."""
    dice = random.Random(seed)
    return [[dice.randrange(120) for _ in range(world)] for _ in range(STEPS)]


@pytest.mark.parametrize(("world", "severity"), [(2, "info"), (4, "info")])
def test_ranks_that_wait_for_each_other_by_turns(world: int, severity: str) -> None:
    lateness = by_turns(world)
    state = diagnosed(lateness)
    (found,) = incidents_of(state, "imbalance")
    waited = sum(max(0, max(late) - own - 10) for late in lateness for own in late)  # who computes on waits less
    assert found.cost_ns == pytest.approx(waited * MS, rel=0.15)
    assert (found.ranks, found.severity, found.open) == ((), severity, True)
    assert "a different rank is last in each step" in found.message
    assert "similar length" in found.next_step


def test_a_rank_that_is_always_late_is_no_imbalance() -> None:
    assert not incidents_of(diagnosed([[0, 0, 40]] * STEPS), "imbalance")


def test_little_waiting_is_no_imbalance() -> None:
    assert not incidents_of(diagnosed([[late % 20 for late in row] for row in by_turns(2)]), "imbalance")


# -- reductions ----------------------------------------------------------------------------------------------


def accumulated(rank: int, number: int, reductions: int) -> Step:
    """A step of 100 ms and four batches: each computes for 18 ms; after the last ones, 5 ms of transfer are exposed."""
    spans, launch, done = [], [], []
    for batch in range(4):
        start = 25 * batch * MS
        spans += [Span("forward", start, start + 6 * MS), Span("backward", start + 6 * MS, start + 18 * MS)]
        if batch >= 4 - reductions:
            spans.append(Span("sync", start + 18 * MS, start + 23 * MS))
            launch += [start + 10 * MS, start + 16 * MS]
            done += [start + 14 * MS, start + 23 * MS]
    spans.append(Span("optimizer", 98 * MS, 99 * MS))
    return step(
        rank, number, micro_steps=4, spans=spans, hook_param=[], hook_ns=[], start_ns=START_NS + number * 100 * MS,
        comm_module=[0, 0] * reductions, comm_label=[0, 1] * reductions, comm_bytes=[1 << 20, 4 << 20] * reductions,
        comm_ready=launch, comm_launch=launch, comm_done=done, data=[],
    )  # fmt: skip


def accumulating(reductions: int, light: int = 0) -> RunState:
    """So many of ten steps are light ones, of which no completion is known."""
    steps = [accumulated(rank, number, reductions) for number in range(40) for rank in range(2)]
    for one in steps:
        if one.step % 10 >= 10 - light:
            one.status, one.comm_done = "shadow", [None] * len(one.comm_done)
    return state_of([hello(0), hello(1), *steps])


@pytest.mark.parametrize("light", [0, 8])
def test_gradients_that_are_reduced_for_each_batch(light: int) -> None:
    """In a light step, a rank does not wait for the buckets of its next batch."""
    state = accumulating(4, light)
    (found,) = incidents_of(state, "repeated_reduction")
    assert (
        found.message == "gradients are reduced 4 times per update: transfers of the first 3 times take 15 % of a step"
    )
    assert "no_sync()" in found.next_step
    assert found.cost_ns == pytest.approx(2 * 40 * 15 * MS, rel=0.05)
    assert not incidents_of(state, "exposed_comm")  # what is left is 5 % of a step
    exposed = Incident("exposed_comm", "warning", "")  # what if: "0 steps timed in full, and 5 are needed"
    assert next_step(exposed, state.diagnosis.places) == found.next_step
    assert "ddpwatch whatif" in next_step(exposed, accumulating(1, light).diagnosis.places)


def test_an_optimizer_that_calls_its_closure_several_times_needs_each_reduction() -> None:
    steps = [accumulated(rank, number, 4) for number in range(40) for rank in range(2)]
    for one in steps:
        one.spans = [Span("optimizer", 0, 0), *one.spans]
    state = state_of([hello(0), hello(1), *steps])
    assert not incidents_of(state, "repeated_reduction")
    assert incidents_of(state, "exposed_comm")
    for one in steps:  # as Lightning's, whose optimizer calls the last batch's forward and backward
        one.spans = [*one.spans[1:10], Span("optimizer", 75 * MS, 75 * MS), *one.spans[10:]]
    assert incidents_of(state_of([hello(0), hello(1), *steps]), "repeated_reduction")


def test_gradients_that_are_reduced_once() -> None:
    assert not incidents_of(accumulating(1), "repeated_reduction")


# -- ranks apart ---------------------------------------------------------------------------------------------


def skipping(rank: int, number: int, forwards: int) -> Step:
    """A step with as many forwards, and one backward; before each forward, buffers are waited for."""
    spans = [Span("backward", 40 * MS, 80 * MS), Span("sync", 80 * MS, 90 * MS), Span("optimizer", 91 * MS, 95 * MS)]
    for at in reversed(range(0, 10 * forwards * MS, 10 * MS)):
        spans = [Span("forward", at, at), Span("sync", at, at + MS), Span("forward", at + MS, at + 9 * MS), *spans]
    return step(rank, number, spans=spans)


@pytest.mark.parametrize("who", [(1,), (0, 1), ()])
def test_a_rank_that_left_out_a_backward(who: tuple[int, ...]) -> None:
    """Where all leave it out, they stay together."""
    steps = [
        skipping(rank, number, 2 if rank in who and number == 30 else 1) for number in range(40) for rank in range(2)
    ]
    found = incidents_of(state_of([hello(0), hello(1), *steps]), "ranks_apart")
    assert [(one.ranks, one.since_step) for one in found] == ([((1,), 30)] if who == (1,) else [])
    assert all("left out a backward (step 30)" in one.message for one in found)


def test_a_stage_whose_forward_waits_for_what_it_sends_left_out_nothing() -> None:
    """Waits cut a pipeline's forward on one stage into three."""

    def spans(waits: int) -> list[Span]:
        cut: list[Span] = []
        for at in range(0, 10 * waits * MS, 10 * MS):
            cut += [Span("forward", at, at + 8 * MS), Span("sync", at + 8 * MS, at + 10 * MS)]
        return [*cut, Span("forward", 10 * waits * MS, 30 * MS), Span("backward", 40 * MS, 90 * MS)]

    steps = [step(rank, number, spans=spans(2 * rank)) for number in range(40) for rank in range(2)]
    assert not incidents_of(state_of([hello(0), hello(1), *steps]), "ranks_apart")


# -- threads -------------------------------------------------------------------------------------------------


def crowded(threads: int, cores: int, waits: float) -> RunState:
    """Two ranks of one host, whose threads wait for a core for a share of the time, from the first step on."""
    hellos = [hello(rank, threads=threads, cores=cores) for rank in range(2)]
    steps = [step(rank, number) for number in range(60) for rank in range(2)]
    wait, run = int(waits * SECOND), int(0.4 * SECOND)
    samples = [
        RankSample(rank=rank, at_ns=START_NS + at * SECOND, span_ns=SECOND, wait_ns=wait, run_ns=run)
        for at in range(1, 7)
        for rank in range(2)
    ]
    return state_of([*hellos, *samples, *steps])


def test_threads_that_take_the_cores_from_each_other() -> None:
    (found,) = incidents_of(crowded(threads=8, cores=2, waits=0.5), "too_many_threads")
    assert found.message == "too many threads: 2 ranks with 8 each share 2 cores"
    assert found.device == "CPU starved: waited 50 % of the time for a core"
    assert "OMP_NUM_THREADS" in found.next_step
    assert found.cost_ns == pytest.approx(0.5 * 60 * 2 * 100 * MS, rel=0.01)


@pytest.mark.parametrize(("threads", "cores", "waits"), [(8, 2, 0.01), (1, 2, 0.5), (1, 1, 0.5), (0, 0, 0.5)])
def test_threads_that_have_cores_or_that_nobody_counted(threads: int, cores: int, waits: float) -> None:
    assert not incidents_of(crowded(threads, cores, waits), "too_many_threads")


# -- cores that all ranks are short of ------------------------------------------------------------------------


@pytest.mark.parametrize(("waits", "is_why", "leads"), [(0.2, True, True), (0.06, True, False), (0.04, False, False)])
def test_transfers_that_wait_for_cores_have_these_as_their_cause(waits: float, is_why: bool, leads: bool) -> None:
    """They take 10 % of a step. The network was said to be why, beside two busy loops on two cores."""
    (found,) = incidents_of(crowded(threads=0, cores=0, waits=waits), "exposed_comm")
    assert found.device == (f"CPU starved: waited {percent(waits)} of the time for a core" if is_why else "")
    assert ("start fewer threads and workers" in found.next_step) is is_why
    assert ("; else `ddpwatch whatif" in found.next_step) is leads
    assert found.next_step.startswith("`ddpwatch whatif") is not leads


@pytest.mark.parametrize("waits", [0.3, 0.04])
def test_a_rank_that_is_late_while_all_are_short_of_cores(waits: float) -> None:
    """It was late for two seconds by where it ran, and that was over before the first sample came."""
    steps = [one for ranks in synchronous([(0, 40)] * 20 + [(0, 0)] * 60) for one in ranks]
    run, wait = int(0.5 * SECOND), int(waits * SECOND)
    samples = [
        RankSample(rank=rank, at_ns=START_NS + at * SECOND, span_ns=SECOND, wait_ns=wait, run_ns=run)
        for at in range(1, 4)
        for rank in range(2)
    ]
    state = state_of([hello(0, 2), hello(1, 2), layout(), *steps[:60], *samples, *steps[60:]])
    (found,) = incidents_of(state, "straggler")
    assert (found.ranks, found.until_step, found.open) == ((1,), 19, False)
    is_why = waits > 0.1
    assert found.device == ("CPU starved: waited 30 % of the time for a core" if is_why else "")
    assert ("start fewer threads and workers; else " in found.next_step) is is_why
    assert found.next_step.endswith("names the lines in which rank 1 spends more")


# -- buffers, and buckets of one parameter --------------------------------------------------------------------


def test_buffers_that_are_sent_before_each_forward() -> None:
    """All ranks come at once, and the broadcast takes 10 ms."""
    from tests.unit.test_buffer_waits import job

    state = state_of(job({}, dict.fromkeys(range(4), 10)))
    (found,) = incidents_of(state, "buffers")
    assert found.message == "buffers: DDP sends them before each forward, which takes 9 % of a step"
    assert "broadcast_buffers=False" in found.next_step
    assert not incidents_of(state_of(job({}, {})), "buffers")


@pytest.mark.parametrize(("sizes", "name"), [([4, 8, 4000, 4], "embedding"), ([], "bias")])
def test_a_bucket_is_named_by_its_largest_parameter(sizes: list[int], name: str) -> None:
    layouts = Layouts(Groups())
    params = ["bias", "weight", "embedding", "scale"]
    layouts.apply_layout(Layout(rank=0, params=params, param_bytes=sizes, buckets=[BucketLayout(0, 4016, [0, 2, 1])]))
    assert layouts.bucket_layer(0) == name
