"""A made-up job whose other settings are played as well: what is predicted from one recording must be what comes."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import pytest
from msgspec.structs import replace as replace_in

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.clocks import Shift
from ddpwatch.analysis.kept_steps import StepLimit
from ddpwatch.analysis.means import STARTING_STEPS
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.errors import UsageError
from ddpwatch.whatif import answer
from ddpwatch.whatif.answer import Prediction, WhatIf
from ddpwatch.whatif.assignment import MIB, limits_of
from ddpwatch.whatif.cost import Guess
from ddpwatch.whatif.model import LIKELY_RANK_ONE, fit, noise, segment_bounds
from ddpwatch.whatif.recorded import FEWEST_STEPS, FULL, Recorded, RecordedBuilder
from ddpwatch.whatif.replay import Replay
from ddpwatch.whatif.scenarios import Change, plan, recorded_limits
from ddpwatch.whatif.schedule import Speeds
from ddpwatch.whatif.summary import gain_text, interval_text, sentences
from ddpwatch.whatif.text import render_whatif
from ddpwatch.wire.messages import Step
from tests.support.whatif import DATA_MS, MS, MadeUpJob, built, edited, line, refused
from tests.unit.test_whatif_cost import wire

pytestmark = [pytest.mark.same_everywhere, pytest.mark.xdist_group("test_whatif"), pytest.mark.seconds(15)]  # not last
JOB = MadeUpJob()
GLOO = JOB.but(backend="gloo", speeds=Speeds(2, 0.5, 0.0, 0.0), cost=line(1.5, 4.0))
SLOWED = GLOO.but(speeds=Speeds(2, 0.5, 0.2, 0.0), wire_jitter=0.25)
LATE = JOB.but(ranks=4, late_ms=(0.0, 0.0, 25.0, 0.0))


def one(job: MadeUpJob, change: Change) -> Prediction:
    (found,) = WhatIf(job.recorded()).ask([change])
    return found


@pytest.mark.parametrize("job", [JOB, GLOO, SLOWED, LATE, JOB.but(cap_mib=None), JOB.but(ranks=5)])
def test_a_recording_reproduces_itself(job: MadeUpJob) -> None:
    asked = WhatIf(job.recorded())
    assert asked.replayed.mean == pytest.approx(asked.recorded.measured_ns, rel=0.005)


@pytest.mark.parametrize("job", [JOB, SLOWED, LATE])
def test_exposed_is_what_reports_call_exposed(job: MadeUpJob) -> None:
    asked, builder = WhatIf(job.recorded()), ReportBuilder()
    for message in job.messages():
        if not isinstance(message, Step) or message.step >= STARTING_STEPS:  # from which on steps are asked
            builder.apply_message(message)
    assert sum(asked.replayed.exposed) / MS == pytest.approx(builder.report().overlap.exposed_ms, rel=0.02)


@pytest.mark.parametrize("cap_mib", [0.5, 1.0, 4.0, 8.0])
@pytest.mark.parametrize("job", [JOB, GLOO, LATE])
def test_another_cap(job: MadeUpJob, cap_mib: float) -> None:
    truth = job.but(cap_mib=cap_mib, seed=2).step_ms
    found = one(job, Change(cap_mib=cap_mib))
    assert found.step_ms == pytest.approx(truth, rel=0.03 if job is GLOO else 0.02)  # of how two share, a guess
    assert found.low < truth < found.high


def test_another_cap_where_compute_is_slowed() -> None:
    for cap_mib in (1.0, 8.0):
        found = one(SLOWED, Change(cap_mib=cap_mib))
        assert found.step_ms == pytest.approx(SLOWED.but(cap_mib=cap_mib, seed=2).step_ms, rel=0.03)


@pytest.mark.parametrize("change", [Change(cap_mib=1.0), Change(static_graph=True)])
def test_buckets_that_are_never_rebuilt(change: Change) -> None:
    job = JOB.but(find_unused=True, cap_mib=4.0)
    truth = job.but(cap_mib=change.cap_mib or 4.0, find_unused=not change.static_graph, seed=2)
    assert recorded_limits(job.recorded()) == limits_of(4 * MIB, False)
    assert one(job, change).step_ms == pytest.approx(truth.step_ms, rel=0.02)


def test_gradients_of_buckets_that_are_never_rebuilt_come_in_the_order_of_their_hooks() -> None:
    """Their buckets list them in the order of registration, and are launched from the last one on."""
    recorded = JOB.but(find_unused=True, cap_mib=4.0).recorded()
    assert recorded.units == JOB.parameters[::-1]
    assert recorded.registered == list(range(len(recorded.units)))[::-1]


def with_several_clocks(job: MadeUpJob, ahead: Mapping[int, int], align: Callable[[StepAcrossRanks], None]) -> Recorded:
    """What the job shows if each rank's clock is so far ahead (ns), and steps are aligned like that."""
    builder = RecordedBuilder()
    for message in job.messages():
        if not isinstance(message, Step):
            builder.apply_message(message)
    for number, ranks in enumerate(job.played()):
        across = StepAcrossRanks(number, comparable=False)
        for step in ranks:
            across.add_step(replace_in(step, start_ns=step.start_ns + ahead.get(step.rank, 0)))
        align(across)
        builder.add_step(across)
    return builder.build()


def test_ranks_of_two_hosts_are_put_onto_one_time_line() -> None:
    job = JOB.but(ranks=4, cap_mib=1.0)
    ahead = {rank: 7_000_000_000 * (rank > 1) for rank in range(4)}
    shifts = {rank: Shift((f"host{rank // 2}", ""), ("host0", ""), -ns, 200_000) for rank, ns in ahead.items()}

    def align(across: StepAcrossRanks) -> None:
        if across.step != 20:  # of which the offsets are not known
            across.align(shifts)

    found = with_several_clocks(job, ahead, align)
    assert len(found.steps) == len(job.recorded().steps) - 1
    for change in (Change(cap_mib=8.0), Change(link=2.0)):
        (here,) = WhatIf(found).ask([change])
        assert here.step_ms == pytest.approx(one(job, change).step_ms, rel=0.01)


def test_without_a_common_time_line_there_is_no_answer() -> None:
    with pytest.raises(UsageError, match="different clocks"):
        with_several_clocks(JOB, {}, lambda across: None)


@pytest.mark.parametrize(("slowed", "late_ms", "expected"), [(20, 80.0, True), (3, 80.0, True), (20, 0.0, False)])
def test_steps_before_an_incident_changed_their_length_do_not_count(
    slowed: int, late_ms: float, expected: bool
) -> None:
    """The mean of both levels is that of no step: a rank late by 80 ms in half of them gained the half."""
    healthy = JOB.but(ranks=4)
    slow = healthy.but(late_ms=(0.0, 0.0, late_ms, 0.0))
    whole, late = RecordedBuilder(), list(slow.played())[-slowed:]
    for message in healthy.messages():
        if not isinstance(message, Step):
            whole.apply_message(message)
    played = list(healthy.played())
    for number, ranks in enumerate([*played, *late]):
        across = StepAcrossRanks(number)
        for step in ranks:
            across.add_step(replace_in(step, step=number))
        whole.add_step(across)
    mixed, found = whole.build(), whole.build(len(played))
    (gain,) = WhatIf(found).ask([Change(without_lateness_of=2)])
    text = " ".join(sentences(WhatIf(found).answer([gain])))
    begin = f"steps take another time since step {len(played)}, when the verdict's incident began; "
    if not expected:
        assert found == mixed
        assert "another time" not in text
    elif slowed < FEWEST_STEPS:
        assert (found.steps, found.before) == (mixed.steps, len(mixed.steps) - slowed)
        assert f"{begin}{found.before} of these {len(found.steps)} are older, and figures mix both" in text
    else:
        assert (len(found.steps), found.left_out, found.before) == (slowed, len(mixed.steps) - slowed, 0)
        assert gain.gain_ms == pytest.approx(slow.step_ms - healthy.step_ms, rel=0.1)
        assert f"{begin}these alone count" in text


def test_halves_are_not_cast_to_halves() -> None:
    """Also where only whole buckets are known, as on a GPU."""
    kinds = ["bfloat16 cuda:0"] * len(JOB.parameters)
    asked = built(edited(JOB, param_kind=kinds, hook_param=[], hook_ns=[], timing_source="cuda events"))
    (found,) = asked.ask([Change(hook="fp16")])
    assert found.gain <= 0
    (whole,) = built(edited(JOB, hook_param=[], hook_ns=[], timing_source="cuda events")).ask([Change(hook="fp16")])
    assert whole.gain > 0.1


def test_another_first_cap_alone_keeps_the_jobs_cap() -> None:
    found = one(JOB.but(cap_mib=4.0), Change(first_mib=1.0))
    both = one(JOB.but(cap_mib=4.0), Change(first_mib=1.0, cap_mib=4.0))
    assert (found.change, found.cap_mib) == ("bucket cap 4 MiB, the first 1 MiB", 4.0)
    assert "bucket_cap_mb_list=[1, 4]" in found.code
    assert found.step_ms == both.step_ms


def test_a_rhythm_is_not_taken_for_every_step() -> None:
    """A rank is late in every second step, and one of two is played."""
    job = JOB.but(steps=400, late_ms=(0.0, 40.0), late_every=2)
    assert one(job, Change(without_lateness_of=1)).gain_ms == pytest.approx(job.step_ms - JOB.step_ms, rel=0.15)


def test_most_steps_take_no_longer() -> None:
    """Nine in ten."""
    job = JOB.but(late_ms=(0.0, 40.0), late_every=4)
    found = one(job, Change(without_lateness_of=1))
    usual = one(job, Change(cap_mib=JOB.cap_mib))
    assert usual.p90_ms > usual.step_ms + 10
    assert found.p90_ms < found.step_ms + 8


def test_a_sweep_must_be_of_the_jobs_backend() -> None:
    with pytest.raises(UsageError, match="measured over gloo, and the job uses nccl"):
        WhatIf(JOB.recorded(), wire())


def test_a_sweep_must_be_of_the_jobs_kind_of_device() -> None:
    with pytest.raises(UsageError, match="measured on cuda, and the job runs on CPUs"):
        WhatIf(GLOO.recorded(), wire(device="cuda"))


def test_each_cast_costs_what_a_sweep_found_for_it() -> None:
    found = {}
    for fp16, bf16 in ((0.2, 0.2), (0.2, 1.0)):
        asked = WhatIf(GLOO.recorded(), wire(encode_ns_per_byte={"fp16": fp16, "bf16": bf16, "copy": 0.1}))
        found[bf16] = [answer.step_ms for answer in asked.ask([Change(hook="fp16"), Change(hook="bf16")])]
    assert found[0.2][0] == found[0.2][1]
    assert max(found[1.0]) > 1.01 * min(found[1.0]) == 1.01 * found[0.2][0]


def test_power_sgd_costs_what_a_sweep_found_for_its_rank() -> None:
    known = {"powersgd-1": 1.0, "powersgd-2": 4.0}
    costs = {rank: fitted_cost(f"powersgd-{rank}", known) for rank in (1, 2, 3)}
    assert costs == pytest.approx({1: 1.0, 2: 4.0, 3: 4.0})
    without = fitted_cost("powersgd-2", {})
    assert fitted_cost("powersgd-1", {}) == pytest.approx(LIKELY_RANK_ONE * without)


def fitted_cost(hook: str, known: dict[str, float]) -> float:
    """Ns that a hook computes for a byte, which compute pays for where cores are taken."""
    recorded = GLOO.recorded()
    physics = replace(fit(recorded, wire(encode_ns_per_byte=known)), contended=1.0)
    found = plan(recorded, physics, Change(hook=hook))
    return sum(found.encode) / sum(found.sizes)


def test_a_sweep_carries_what_one_bucket_size_does_not() -> None:
    """The sweep says 1 ms per MiB and 0.5 more; the job's buckets of 20 MiB take 3.5 times that."""
    job = GLOO.but(cap_mib=100, cost=line(1.75, 3.5))
    (found,) = WhatIf(job.recorded(), wire(compute_beside=None)).ask([Change(cap_mib=5.0)])
    assert found.step_ms == pytest.approx(job.but(cap_mib=5.0, seed=2).step_ms, rel=0.05)


@pytest.mark.parametrize(("slowed", "drag"), [(0.0, 0.0), (0.2, 0.0), (0.15, 0.1)])
def test_what_slows_what_is_found(slowed: float, drag: float) -> None:
    job = GLOO.but(speeds=Speeds(2, 0.5, slowed, drag), wire_jitter=0.2)
    found = fit(job.recorded())
    assert found.compute_slowdown.value == pytest.approx(slowed, abs=0.015)
    assert found.comm_slowdown.value == pytest.approx(drag, abs=0.03)


def test_compute_is_compared_in_stretches_that_are_long_enough() -> None:
    """Not in what lies between the gradients of a weight and its bias, where a launch may be."""
    recorded = GLOO.recorded()
    bounds = segment_bounds(recorded)
    for rank in recorded.steps[0]:
        times = [at for bound in bounds if (at := rank.fires[bound]) is not None]
        assert len(times) == len(bounds) >= 10
        assert min(after - before for before, after in pairwise(times)) > 0.8 * (rank.computed - rank.backward) / 16


def test_a_slow_wire_is_no_slowdown_of_the_last_of_few_buckets() -> None:
    job = GLOO.but(speeds=Speeds(2, 0.5, 0.15, 0.1), cap_mib=8.0, wire_jitter=0.2)
    physics = fit(job.recorded())
    assert physics.comm_slowdown.value == pytest.approx(physics.compute_slowdown.value)  # too few to compare
    found = one(job, Change(cap_mib=1.0))
    assert found.low < job.but(cap_mib=1.0, seed=2).step_ms < found.high


def test_a_faster_link() -> None:
    found = one(JOB, Change(link=4))
    assert found.step_ms == pytest.approx(JOB.but(cost=line(0.4, 3.5 / 4), seed=2).step_ms, rel=0.02)
    assert "exposed communication" in found.why


def busy_host(link: float, seed: int) -> Callable[[float], float]:
    """2 ms per MiB over the link, and up to 4 more, in which the host does not get to it."""
    dice = random.Random(seed)
    return lambda nbytes: MS * (0.4 + (2.0 / link + 4.0 * dice.random()) * nbytes / MIB)


def test_a_slower_link_does_not_slow_the_host() -> None:
    """Were all of it the link's, a step would take longer. How much is the link's is not known well enough for more."""
    job = JOB.but(cost=busy_host(1.0, 1), wire_jitter=0.0, cap_mib=4.0)
    truth = job.but(cost=busy_host(0.75, 2), seed=2).step_ms
    found = one(job, Change(link=0.75))
    assert found.low < truth < found.high
    assert "no better than" in refused(WhatIf(job.recorded()), Change(link=0.05))
    (with_sweep,) = WhatIf(job.recorded(), wire(backend="nccl")).ask([Change(link=0.05)])
    assert with_sweep.step_ms > found.step_ms


@pytest.mark.parametrize(
    ("sharing", "faster", "expected"), [(0.5, 0.05, 0.5), (0.625, 0.05, 0.5082), (0.625, 20, 0.9348)]
)
def test_two_collectives_share_the_link_but_not_the_hosts(sharing: float, faster: float, expected: float) -> None:
    """With 60 % of the time on the link: two at once take 1.6 times as long as one alone if hosts do both at once."""
    physics = replace(fit(GLOO.recorded()), link=Guess(0.6, 0.1), sharing=Guess(sharing, 0.05))
    planned = [plan(GLOO.recorded(), physics, Change(link=link)) for link in (1.0, faster)]
    assert [one.sharing for one in planned] == pytest.approx([sharing, expected], abs=1e-4)


def test_a_link_that_the_job_seems_to_outrun_slows_all_of_it_and_a_faster_one_no_more_than_all() -> None:
    recorded = JOB.recorded()
    physics = replace(fit(recorded), link=Guess(1.2, 0.0))
    latency = physics.curve.latency
    for faster, share in ((0.1, 1.2 / 0.1 - 0.2), (10.0, 0.1)):
        works = plan(recorded, physics, Change(link=faster)).works
        for size, work in zip(recorded.sizes, works, strict=True):
            assert work == pytest.approx(latency + share * (physics.curve.work(size) - latency))


def test_a_slower_link_is_refused_where_latency_hides_what_bytes_take() -> None:
    asked = WhatIf(JOB.but(cost=lambda _: 4 * MS).recorded())
    assert asked.ask([Change(link=2.0)])
    assert asked.ask([Change(link=0.1)]) == []
    assert asked.refused[0][1].startswith("how much of their time collectives spend on the link")


def test_what_the_link_takes_as_a_sweep_says_is_no_latency() -> None:
    """All collectives take 4 ms, however large they are: of these, the link needs 1 ms per MiB."""
    recorded = JOB.but(cost=lambda _: 4 * MS, wire_jitter=0.0).recorded()
    physics = replace(fit(recorded), link_rate=MS / MIB)
    for faster in (0.1, 2.0):
        works = plan(recorded, physics, Change(link=faster)).works
        for size, work in zip(recorded.sizes, works, strict=True):
            assert work == pytest.approx(4 * MS + (1 / faster - 1) * min(4.0, size / MIB) * MS, rel=0.05)


def test_a_sweep_knows_the_link() -> None:
    """2 ms per MiB, of the 4 on average that the job's collectives take."""
    job = GLOO.but(cost=busy_host(1.0, 1), wire_jitter=0.0, cap_mib=4.0)
    sizes = [
        replace_in(size, alone_ms=2 * size.alone_ms, low_ms=2 * size.low_ms, pair_ms=4 * size.alone_ms)
        for size in wire().sizes
    ]
    (found,) = WhatIf(job.recorded(), wire(sizes=sizes, compute_beside=None)).ask([Change(link=0.05)])
    truth = job.but(cost=busy_host(0.05, 2), seed=2).step_ms
    assert found.step_ms == pytest.approx(truth, rel=0.1)
    assert found.low < truth < found.high


def test_what_the_host_does_with_a_gradient_does_not_shrink_with_its_bytes() -> None:
    recorded = JOB.recorded()
    physics = replace(fit(recorded), link=Guess(0.6, 0.0), cast=Guess(0.0, 0.0))
    whole, half = (plan(recorded, physics, change).works for change in (Change(), Change(hook="fp16")))
    latency = physics.curve.latency
    for size, full, less in zip(recorded.sizes, whole, half, strict=True):
        sent = physics.curve.work(size / 2) - min(latency, physics.curve.work(size / 2))
        assert less == pytest.approx(full - 0.6 * (full - latency - sent), rel=0.05)


def test_the_products_of_power_sgd_cost_the_host() -> None:
    recorded = JOB.recorded()
    physics = fit(recorded)
    none, one_column, more = (
        plan(recorded, replace(physics, thin=thin), Change(hook=f"powersgd-{rank}")).encode
        for rank, thin in ((2, Guess(0.0, 0.0)), (1, physics.thin), (2, physics.thin))
    )
    assert not any(none)
    assert [2 * each for each in one_column] == pytest.approx(more)


def test_where_cores_are_free_compute_pays_only_for_what_power_sgd_does_before_the_launch() -> None:
    recorded, change = JOB.recorded(), Change(hook="powersgd-2")
    physics = replace(fit(recorded), thin_launch=0.25)
    crowded, free = (plan(recorded, replace(physics, contended=share), change) for share in (1.0, 0.0))
    assert [4 * each for each in free.encode] == pytest.approx(crowded.encode)
    spared = [(e - less) for e, less in zip(crowded.encode, free.encode, strict=True)]
    later = [more - less for more, less in zip(free.works, crowded.works, strict=True)]
    assert later == pytest.approx(spared)


def test_whether_threads_compete_for_cores_shows_in_what_slows_compute() -> None:
    slowed = GLOO.but(speeds=Speeds(2, 0.5, 0.2, 0.0), wire_jitter=0.2).recorded()
    assert fit(slowed).contended == 1
    assert fit(replace(slowed, gpu=True)).contended == 0
    assert fit(JOB.recorded()).contended == pytest.approx(0, abs=0.2)
    assert fit(JOB.recorded(), wire(launch_share={"powersgd-2": 0.1})).thin_launch == 0.1


def test_half_the_bytes() -> None:
    found = one(JOB, Change(hook="fp16"))
    assert found.step_ms == pytest.approx(JOB.but(cost=line(0.4, 3.5 / 2), seed=2).step_ms, rel=0.05)
    assert "fp16_compress_hook" in found.code


def test_without_a_late_rank() -> None:
    found = one(LATE, Change(without_lateness_of=2))
    truth = LATE.but(late_ms=(), seed=2).step_ms
    assert found.step_ms == pytest.approx(truth, rel=0.02)
    assert found.gain_ms > 4  # of 25: then the wire is what they wait for


def test_no_two_ranks_are_alike_in_the_same_step() -> None:
    recorded = LATE.recorded()
    rows = plan(recorded, fit(recorded), Change(without_lateness_of=2, world=16)).work_of
    assert len(set(rows)) == 16


def test_without_input() -> None:
    found = one(JOB, Change(no_input=True))
    assert found.gain_ms == pytest.approx(DATA_MS, rel=0.05)


def test_other_world_sizes() -> None:
    more, fewer = (one(JOB.but(ranks=4), Change(world=world)) for world in (16, 2))
    assert more.step_ms > JOB.but(ranks=4).step_ms > fewer.step_ms


def test_accumulation_is_per_batch() -> None:
    found = one(JOB, Change(accumulate=2))
    exposed = JOB.step_ms - one(JOB, Change(perfect=True)).step_ms
    assert exposed / 2 < found.gain_ms < exposed / 2 + 7  # of ms; an optimizer of 8 less in each second batch


def test_communication_for_free_is_a_bound() -> None:
    asked = WhatIf(JOB.recorded())
    (bound,) = asked.ask([Change(perfect=True)])
    assert (bound.change, bound.kind) == ("any cap, hook or link (at most)", "bound")
    others = asked.ask([*(Change(cap_mib=cap) for cap in (1, 5)), Change(link=9)])
    assert all(other.step_ms >= bound.step_ms for other in others)
    (said,) = sentences(asked.answer([replace_in(bound, exposed_ms=20.0)]))
    assert f"gains at most {gain_text(bound.gain_ms)} ms ({interval_text(bound)}), if communication took" in said
    assert said.endswith("ranks still wait 20.0 ms for the last one")
    (unsure,) = sentences(asked.answer([replace_in(bound, gain_low_ms=-1.0)]))
    assert "may gain nothing, and at most" in unsure
    table = render_whatif(asked.answer([*others, bound]), everything=True)
    assert f"≤ {gain_text(bound.gain_ms)} " in table
    assert "wait for a core" in bound.assumes
    (on_gpus,) = WhatIf(replace(JOB.recorded(), gpu=True)).ask([Change(perfect=True)])
    assert "wait for a core" not in on_gpus.assumes


def test_small_buckets_have_a_size() -> None:
    job = MadeUpJob(sizes_mib=(0.02,) * 8, cap_mib=0.03, cost=line(20.0, 4.0))
    assert " of 4, 41.0 KiB)" in one(job, Change(perfect=True)).why


def test_two_at_once_gain_more_than_one() -> None:
    asked = WhatIf(JOB.recorded())
    both, *alone = asked.ask([Change(hook="fp16"), Change(no_input=True), Change(no_input=True) | Change(hook="fp16")])
    assert both.change == "fp16 hook + no wait for data"
    assert all(both.gain_ms > single.gain_ms for single in alone)


def test_unasked_the_best_comes_first() -> None:
    asked = WhatIf(JOB.recorded())
    found = asked.ask(asked.default_changes())
    *changes, bound = found
    assert bound.kind == "bound"  # which gains most, and is no change
    assert [p.gain_low_ms for p in changes] == sorted((p.gain_low_ms for p in changes), reverse=True)
    best = min((p for p in found if p.cap_mib and "first" not in p.change), key=lambda p: p.step_ms)
    truth = {p.cap_mib: JOB.but(cap_mib=p.cap_mib, seed=2).step_ms for p in found if p.cap_mib}
    assert truth[best.cap_mib] <= 1.02 * min(truth.values())
    assert f"bucket_cap_mb={best.cap_mib:g}" in best.code


def test_a_run_that_drifts_says_less_about_the_next_one() -> None:
    dice = random.Random(1)
    steps = [dice.gauss(100, 2) for _ in range(40)]
    assert noise(steps) < 1.0
    assert noise([step + number / 4 for number, step in enumerate(steps)]) == pytest.approx(3.2, abs=1.0)
    assert noise([5.0]) == 0
    assert noise([1.0, 3.0]) == 1


def test_what_is_gained_at_least_leaves_out_how_much_runs_drift() -> None:
    found = one(JOB, Change(hook="fp16"))
    assert 0 < found.gain_low_ms < found.gain_ms
    assert found.gain_ms - found.gain_low_ms < 0.9 * (found.high - found.step_ms)


def test_nothing_changed_gains_nothing() -> None:
    found = one(JOB, Change(cap_mib=JOB.cap_mib))
    assert abs(found.gain) < 0.001
    assert found.low < found.step_ms < found.high


def test_of_many_steps_some_are_played(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded, changes = JOB.but(steps=300, jitter=0.1).recorded(), [Change(cap_mib=8.0), Change(perfect=True)]
    some = WhatIf(recorded).ask(changes)
    monkeypatch.setattr(answer, "MOST_STEPS", 1000)
    for few, whole in zip(some, WhatIf(recorded).ask(changes), strict=True):
        assert few.step_ms != whole.step_ms
        assert few.low < whole.step_ms < few.high


def test_the_more_ranks_the_fewer_steps_are_used_and_the_answer_says_how_many(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [FULL.of(ranks) for ranks in (2, 64, 1024, 8192)] == [512, 64, 8, 8]
    monkeypatch.setattr("ddpwatch.whatif.recorded.FULL", StepLimit(512, 40, 8))
    asked = built(JOB.but(ranks=4, steps=40).messages())
    found = asked.answer([])
    assert found.steps == 10
    assert found.left_out > 20
    assert f"over the newest 10 of {10 + found.left_out} steps timed in full;" in render_whatif(found, everything=True)


def test_steps_are_compared_with_themselves() -> None:
    before, after = [10.0, 12.0, 10.0, 12.0], [9.0, 11.0, 8.0, 10.0]  # differences of 1, 1, 2, 2
    assert answer.paired_error(before, after) == pytest.approx((1 / 3) ** 0.5 / 2)
    assert answer.paired_error(before, [value - 1 for value in before]) == 0
    assert answer.paired_error([1.0], [2.0]) == 0


@pytest.mark.parametrize(
    "change", [Change(cap_mib=4.0), Change(hook="fp16"), Change(without_lateness_of=1), Change(perfect=True)]
)
@pytest.mark.parametrize("steps", [18, 60])
def test_the_steps_that_are_missing_would_settle_it(change: Change, steps: int) -> None:
    """With so many more of the same steps, the interval would leave out 0; with fewer, it would not."""
    found = one(JOB.but(steps=steps, jitter=0.3), change)
    assert found.gain_low_ms < found.gain_ms < found.gain_high_ms
    assert (found.more_steps == 0) is found.sure


def test_where_nothing_is_sure_nothing_is_advised() -> None:
    asked = WhatIf(JOB.recorded())
    unsure = [
        replace_in(found, gain_ms=1.0, gain_low_ms=-1.0, more_steps=more)
        for found, more in zip(asked.ask([Change(cap_mib=4.0), Change(hook="fp16")]), (70, 30), strict=True)
    ]
    text = render_whatif(asked.answer([*unsure, *asked.ask([Change(perfect=True)])]), everything=False)
    assert "no change here is sure to help; record 30 more steps timed in full" in text
    assert not any(found.code in text for found in unsure)
    assert all(f"{found.change} (" in text.split("not sure to help: ")[1] for found in unsure)
    (doubled,) = asked.ask([Change(accumulate=2)])
    said = sentences(asked.answer([doubled, *unsure]))
    assert doubled.sure
    assert said[0].startswith("accumulation over 2 batches would gain ")
    assert said[1:] == [
        "no bucket cap or comm hook here is sure to help; record 30 more steps timed in full (--detail high)"
    ]
    late = replace_in(doubled, kind="fault")
    assert sentences(asked.answer([late, *unsure]))[0].startswith("over these steps, ")
    never = asked.answer([replace_in(found, more_steps=None) for found in unsure])
    assert "no change here is sure to help; more steps would not change that" in render_whatif(never, everything=True)


def test_plans_that_differ_in_name_only_are_played_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, played = WhatIf(JOB.recorded()), []
    run = Replay._run
    monkeypatch.setattr(Replay, "_run", lambda replay, plan: played.append(plan) or run(replay, plan))
    once = asked.ask([Change(cap_mib=100.0)])
    count = len(played)
    again = asked.ask([Change(cap_mib=200.0)])
    assert count
    assert len(played) == count
    assert (once[0].step_ms, once[0].high) == (again[0].step_ms, again[0].high)
