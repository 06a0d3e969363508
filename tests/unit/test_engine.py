"""The engine of the diagnosis: who is blamed for what, on steps whose truth is known."""

import random

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.late.cause import StepFacts
from ddpwatch.analysis.diagnosis.late.late_rank import LateRank
from ddpwatch.analysis.diagnosis.late.streak import Streak
from ddpwatch.analysis.diagnosis.words.evidence_sentences import evidence_sentences
from ddpwatch.analysis.run import Run
from ddpwatch.wire.messages import Group, Layout, Mark, Span
from tests.support.diagnosis_cases import Case, job_of
from tests.support.diagnosis_score import play
from tests.support.fleet import LAYER_PARAMS, PARAMS, Disturbance, Fleet, Shape, zeros
from tests.support.fleet_noise import Noise
from tests.support.frames import (
    MS,
    START_NS,
    bare,
    beat,
    bye,
    diagnosed,
    enveloped,
    hello,
    layout,
    light,
    run,
    state_of,
    step,
    synchronous,
)

pytestmark = pytest.mark.same_everywhere


def report_diagnosis(messages):
    """The diagnosis of a report, which assembles steps without keeping them."""
    found = Run()
    assert list(found.steps(enveloped(messages)))
    return found.diagnosis


def incidents(lateness, **changes):
    return diagnosed(lateness, **changes).diagnosis.incidents()


def late_ones(found):
    return [incident for incident in found if len(incident.ranks) == 1]


def noisy(steps, world, ms, seed):
    rng = random.Random(seed)
    return [[rng.randint(0, ms) for _ in range(world)] for _ in range(steps)]


def moved_to_forward(one):
    """The step with its lateness of 60 ms in the forward, in place of the backward."""
    forward, backward, *rest = one.spans
    spans = [Span("forward", forward.start, forward.end + 60 * MS), Span("backward", 91 * MS, backward.end), *rest]
    return replace(one, spans=spans, hook_param=[], hook_ns=[])


class TestBlame:
    def test_a_rank_that_is_always_late(self):
        (found,) = late_ones(incidents([(0, 40)] * 20))
        assert (found.kind, found.ranks, found.phase, found.bucket, found.param) == (
            "straggler", (1,), "backward", 1, 1,
        )  # fmt: skip
        assert found.open
        assert (found.since_step, found.until_step, found.steps) == (0, 19, 20)
        assert found.cost_ns == 20 * 30 * MS  # rank 0 computes for 10 ms after its own launch
        assert found.gain == pytest.approx(30 / 140)

    @pytest.mark.parametrize("buckets", [1, 2])
    def test_an_only_bucket_is_no_place(self, buckets):
        """It was late "from bucket 0 (f.4.weight) on", where there was no other."""
        steps = [one for ranks in synchronous([(0, 40)] * 20) for one in ranks]
        for one in steps:
            for name in ("module", "label", "bytes", "ready", "launch", "done"):
                setattr(one, f"comm_{name}", getattr(one, f"comm_{name}")[-buckets:])
            one.hook_param = one.hook_ns = []
        (found,) = late_ones(report_diagnosis([hello(0), hello(1), *steps]).incidents())
        assert (found.kind, found.phase, found.bucket) == ("straggler", "backward", 1 if buckets == 2 else None)

    def test_it_is_named_within_10_steps_and_cleared_within_10(self):
        assert late_ones(incidents([(0, 0)] * 60)) == []
        (found,) = late_ones(incidents([(0, 0)] * 40 + [(0, 40)] * 10))
        assert (found.since_step, found.open) == (40, True)
        (found,) = late_ones(incidents([(0, 0)] * 40 + [(0, 40)] * 40 + [(0, 0)] * 10))
        assert (found.since_step, found.until_step, found.open) == (40, 79, False)
        assert found.cost_ns == 40 * 30 * MS

    @pytest.mark.parametrize("period", [2, 3, 4, 7, 16])
    def test_one_that_is_late_every_so_many_steps(self, period):
        """A rank that takes 60 ms longer in every fourth step of 60 ms stood out nowhere, as its median is 0."""
        late = [(0, 60 if n >= 32 and n % period == 0 else 0) for n in range(32 + 24 * period)]
        (found,) = late_ones(incidents(late))
        assert (found.kind, found.ranks, found.period) == ("intermittent", (1,), period)
        assert found.cost_ns == 24 * 50 * MS

    def test_one_that_was_late_now_and_then_and_is_late_in_every_step_since(self):
        """The rhythm had not been given up yet, and took some of the steps for its own: the rest named nobody."""
        noise = random.Random(7)
        late = [
            [noise.randint(0, 4), noise.randint(0, 4) + 55 * ((40 <= n < 140 and n % 5 == 1) or 200 <= n < 215)]
            for n in range(215)
        ]
        now, before = late_ones(incidents(late))
        assert (before.kind, before.period, before.since_step, before.until_step) == ("intermittent", 5, 41, 136)
        assert (now.kind, now.since_step, now.phase, now.open) == ("straggler", 200, "backward", True)

    def test_one_that_is_late_now_and_then(self):
        rng = random.Random(5)
        late = [(0, 60 * (rng.random() < 0.2), 0) for _ in range(300)]
        (found,) = late_ones(incidents(late))
        assert (found.kind, found.ranks, found.period) == ("intermittent", (1,), None)
        assert 50 <= found.steps <= sum(at > 0 for _, at, _ in late)

    @pytest.mark.parametrize(("world", "seed"), [(2, 0), (2, 1), (3, 0), (3, 1), (8, 0), (8, 1), (8, 2), (8, 3)])
    def test_noise_is_nobody_s(self, world, seed):
        """Of 8 healthy ranks with 0 to 20 ms of noise, the report blamed one each time."""
        state = diagnosed(noisy(150, world, 20, seed))
        assert late_ones(state.diagnosis.incidents()) == []
        accounts = {account.name for account in state.diagnosis.lost().accounts}
        assert "jitter" in accounts
        assert "waiting" not in accounts

    @pytest.mark.parametrize(("ms", "kinds"), [(220, []), (700, ["pause"])])
    def test_one_disturbed_step_among_the_first_is_no_straggler(self, ms, kinds):
        """Noise seemed smaller than it is: the three steps before exceeded a threshold that they no longer exceed."""
        late = [(5, 0), (0, 0), (0, 0), (0, 28), (0, 35), (0, 50), (0, ms)]
        assert [one.kind for one in late_ones(incidents(late))] == kinds

    def test_a_straggler_is_named_from_three_steps_at_least(self):
        late = [(0, 0)] * 8 + [(0, 20), (0, 20), (0, 100), (0, 100)]
        assert late_ones(incidents(late)) == []
        (found,) = late_ones(incidents([*late, (0, 100)]))
        assert (found.kind, found.steps) == ("straggler", 3)

    def test_a_late_rank_in_noise(self):
        late = [[*row[:5], row[5] + 30, *row[6:]] for row in noisy(100, 8, 20, 7)]
        (found,) = late_ones(incidents(late))
        assert (found.kind, found.ranks, found.phase) == ("straggler", (5,), "backward")

    def test_two_at_once(self):
        found = late_ones(incidents([(0, 40, 0, 60, 0)] * 60))
        assert sorted(incident.ranks for incident in found) == [(1,), (3,)]

    def test_a_fault_that_moves_on(self):
        late = [(40, 0, 0)] * 30 + [(0, 40, 0)] * 30 + [(0, 0, 40)] * 30
        found = sorted(late_ones(incidents(late)), key=lambda incident: incident.since_step)
        assert [(one.ranks, one.since_step, one.until_step) for one in found] == [
            ((0,), 0, 29), ((1,), 30, 59), ((2,), 60, 89),
        ]  # fmt: skip
        assert {one.kind for one in found} == {"straggler"}

    @pytest.mark.parametrize("seed", [2, 3, 6, 9])
    def test_a_constant_fault_after_steps_that_were_late_by_chance(self, seed):
        """They were one incident of 27 ms in 14 of 70 steps, where the truth is 100 ms in each step since step 56."""
        late, rng = noisy(70, 2, 8, seed), random.Random(seed)
        for number, row in enumerate(late):
            row[1] += 100 if number >= 56 else rng.randint(22, 32) * (rng.random() < 0.12)
        found = late_ones(incidents(late))
        now = next(one for one in found if one.open)
        assert (now.kind, now.ranks, now.since_step, now.steps) == ("straggler", (1,), 56, 14)
        assert now.evidence.late_ms == pytest.approx(100, abs=5)
        assert now.cost_ns == pytest.approx(14 * 90 * MS, rel=0.05)
        assert all(one.until_step < 56 for one in found if one is not now)

    def test_one_that_becomes_constant_is_another_incident(self):
        """What the first one cost stays with it, and its cause does, too."""
        late = [(0, 60 if n >= 64 or n % 4 == 0 else 0) for n in range(140)]
        steps = [
            moved_to_forward(one) if one.step >= 64 and one.rank else one
            for ranks in synchronous(late)
            for one in ranks
        ]
        found = late_ones(state_of([hello(0), hello(1), layout(), *steps]).diagnosis.incidents())
        assert sorted((one.since_step, one.until_step, one.kind, one.period, one.phase, one.open) for one in found) == [
            (0, 60, "intermittent", 4, "backward", False), (64, 139, "straggler", None, "forward", True),
        ]  # fmt: skip
        assert sorted(one.cost_ns for one in found) == [16 * 50 * MS, 76 * 50 * MS]

    @pytest.mark.parametrize("seed", [0, 1, 2, 5])
    def test_one_that_is_late_at_random_does_not_change(self, seed):
        rng = random.Random(seed)
        late = [(rng.randint(0, 8), rng.randint(0, 8) + 80 * (rng.random() < 0.3)) for _ in range(400)]
        assert [one.kind for one in late_ones(incidents(late))] == ["intermittent"]

    def test_one_that_gets_later_and_later(self):
        found = late_ones(incidents([(0, n // 4) for n in range(200)]))
        assert [(one.kind, one.ranks) for one in found] == [("drift", (1,))]

    def test_a_rank_of_two_groups(self):
        """Each rank reduces one bucket within its pair and one with all; rank 3 is late in both."""
        pairs = {1: [0, 1], 2: [2, 3]}
        messages = [hello(rank, 4) for rank in range(4)]
        messages += [Group(rank=rank, id=pair, ranks=ranks) for pair, ranks in pairs.items() for rank in ranks]
        for ranks in synchronous([(0, 0, 0, 40)] * 30):
            for one in ranks:
                one.comm_group = [1 if one.rank < 2 else 2, 0]
                messages.append(one)
        state = state_of(messages)
        (found,) = late_ones(state.diagnosis.incidents())
        assert (found.ranks, found.cost_ns) == ((3,), 30 * 3 * 30 * MS)
        lost = state.diagnosis.lost()
        assert sum(account.ns for account in lost.accounts) == lost.rank_ns

    def test_half_of_the_steps_bare(self):
        """What they cost is taken from watched steps that took as long."""
        messages = []
        for number, ranks in enumerate(synchronous([(0, 40)] * 60)):
            for one in ranks:
                changes = {"start_ns": one.start_ns, "duration_ns": one.duration_ns}
                messages.append(one if number < 20 or number % 2 else _bare(one, changes))
        (found,) = late_ones(state_of([hello(0), hello(1), layout(), *messages]).diagnosis.incidents())
        assert found.cost_ns == pytest.approx(60 * 30 * MS, rel=0.03)

    def test_what_is_found_late_costs_as_much_since_its_start(self):
        """With short steps, few are watched: until a fault is found, thousands pass."""
        late, messages = [40 * (number // 64 % 4 == 0) for number in range(64 * 48)], []
        for number, ranks in enumerate(synchronous([(0, ms) for ms in late])):
            for one in ranks:
                changes = {"start_ns": one.start_ns, "duration_ns": one.duration_ns}
                messages.append(_bare(one, changes) if number % 64 else one)
        (found,) = late_ones(state_of([hello(0), hello(1), layout(), *messages]).diagnosis.incidents())
        assert found.cost_ns == pytest.approx(sum(map(bool, late)) * 30 * MS, rel=0.1)


def _bare(one, changes):
    left = bare(one.rank, one.step)
    for name, value in changes.items():
        setattr(left, name, value)
    return left


def test_the_layer_is_where_the_backward_loses_most():
    """Whatever the forward and other layers add to the lateness."""
    shape = Shape(world=2, steps=40)
    wrong, late = Disturbance(shape), zeros(shape)
    late[:, 1] = MS
    wrong.forward += 30 * late
    wrong.backward += [(position, 4 * late) for position in (4, 8, 12, 16)] + [(20, 40 * late)]
    fleet, engine = Fleet(shape, wrong), Diagnosis()
    for played in fleet.play():
        engine.add_step(fleet.across(played))
    (found,) = late_ones(engine.incidents())
    assert (found.phase, found.param) == ("backward", PARAMS - 1 - 20)


@pytest.mark.parametrize("noise", [0.002, 0.02])
def test_a_larger_batch_costs_what_it_makes_others_wait_whatever_figure_shows_it(noise):
    """Rank 2 takes 12 ms longer for its forward and 21 ms for its backward: it was late by 17 ms, as one of them."""
    shape = Shape(world=3, steps=120, noise=Noise("gauss", noise), seed=3)
    wrong, late = Disturbance(shape), zeros(shape)
    late[20:, 2] = MS
    wrong.forward += 12 * late
    wrong.backward += [(position, late * 21 // 12) for position in range(0, PARAMS, LAYER_PARAMS)]
    fleet, engine, waited = Fleet(shape, wrong), Diagnosis(), 0
    for played, calm in zip(fleet.play(), Fleet(shape).play(), strict=True):
        engine.add_step(fleet.across(played))
        waited += (played.waits()[:2] - calm.waits()[:2]).sum()
    (found,) = late_ones(engine.incidents())
    assert (found.ranks, found.phase, found.param) == ((2,), "backward", None)
    assert found.evidence.late_ms == pytest.approx(33, rel=0.1)
    assert found.cost_ns == pytest.approx(waited, rel=0.1)
    assert found.evidence.throughout
    assert found.evidence.parts_ms == pytest.approx({"backward": 21, "forward": 12}, rel=0.1)
    assert " longer throughout; its forward 1" in found.message


def test_a_rank_may_be_late_between_phases():
    """Such as in its loss, or where it reduces gradients itself: no cause was named."""
    for backward, said in (
        (Span("backward", 51 * MS, 100 * MS), "what it does between forward and backward (the loss) takes"),
        (Span("backward", 31 * MS, 80 * MS), "what it does between backward and optimizer takes"),
    ):
        messages = [hello(0), hello(1)]
        for ranks in synchronous([(0, 20)] * 30):
            ranks[1].spans[1] = backward
            messages += ranks
        (found,) = late_ones(state_of(messages).diagnosis.incidents())
        assert (found.kind, found.phase) == ("straggler", "other")
        assert said in found.message


def test_of_a_step_of_several_batches_the_last_one_shows_the_layer():
    """Each of four batches takes 10 ms longer, and hooks fire in the last one only."""
    messages = [hello(0), hello(1)]
    for ranks in synchronous([(0, 40)] * 30, micro_steps=4):
        ranks[1].hook_ns = [40 * MS, 50 * MS, 70 * MS, 80 * MS]
        messages += ranks
    (found,) = late_ones(state_of(messages).diagnosis.incidents())
    assert (found.phase, found.param) == ("backward", 1)


def test_two_things_of_one_rank_at_a_time():
    """Its backward is longer now and then; meanwhile, its forward is so in every fourth step."""
    rng = random.Random(1)
    messages, at = [], 0
    for number in range(260):
        forward = 60 * (number >= 160 and number % 4 == 1)
        backward = 60 * (rng.random() < 0.2 and not forward)
        about = {"start_ns": START_NS + at * MS}
        late = forward + backward
        rows = [step(0, number, late, **about), step(1, number, 0, late, **about), step(2, number, 0, late, **about)]
        messages += [moved_to_forward(rows[0]) if forward else rows[0], *rows[1:]]
        at += 100 + late
    found = {
        one.phase: one
        for one in late_ones(state_of([*(hello(r, 3) for r in range(3)), *messages]).diagnosis.incidents())
    }
    assert found["backward"].open
    assert (found["forward"].kind, found["forward"].period) == ("intermittent", 4)
    assert found["forward"].since_step == pytest.approx(160, abs=4)


def played(kind, size, world, noise, seed=0):
    return play(job_of(Case(kind, size, world, seed, noise)))


def test_a_phase_shows_what_lateness_hides():
    """A wait for data of a tenth of a step, where forward and backward vary by more: its own variation is small."""
    (score,) = played("slow_input", 0.10, 2, "uniform").scores
    assert score.rank
    assert score.named_after[1] <= 10


@pytest.mark.parametrize(
    ("kind", "size", "world", "noise", "seed"),
    [
        ("periodic", 0.10, 2, "quiet", 3),  # seen to start 25 steps too early, as noise was as late
        ("periodic", 0.10, 8, "uniform", 0),  # in every 16th step, in noise of 0 to 20 ms
        ("constant", 0.05, 2, "quiet", 2),  # in the mean of 64 steps; few of them exceed a threshold
        ("drift", 0.10, 2, "slow", 0),  # where noise lasts
        ("periodic", 0.05, 8, "quiet", 1),  # the first strike in a watched step is its sixth
    ],
)
def test_small_faults_in_noise(kind, size, world, noise, seed):
    (score,) = played(kind, size, world, noise, seed).scores
    assert score.rank
    assert score.period is not False


def test_a_longer_phase_that_makes_nobody_late_is_no_incident():
    """As that of a rank whose forward waits for others, while they launch as late as it does."""
    steps = []
    for ranks in synchronous([(0, 0)] * 40):
        one, other = ranks
        data, spans = 30 * MS, [Span(one.phase, one.start, one.end) for one in other.spans]
        steps += [one, replace(other, data=[(0, data)], spans=spans)]
    assert late_ones(state_of([*(hello(rank, 2) for rank in range(2)), layout(), *steps]).diagnosis.incidents()) == []


def test_what_a_rank_costs_leaves_out_what_chance_waits_for():
    """Somebody is always last: a late rank is waited for longer than it is late."""
    (score,) = played("constant", 0.20, 8, "gauss", seed=3).scores
    assert abs(score.cost) < 0.05


def test_steps_without_lateness_are_no_evidence():
    state = state_of([hello(0), hello(1), *(light(r, n, comm_launch=[], comm_label=[], comm_module=[], comm_bytes=[],
                      comm_ready=[], comm_done=[]) for n in range(40) for r in range(2))])  # fmt: skip
    assert late_ones(state.diagnosis.incidents()) == []


def test_a_step_of_a_single_rank_is_diagnosed():
    diagnosis = Diagnosis()
    across = StepAcrossRanks(0)
    across.add_step(step(0, 0))
    diagnosis.add_step(across)
    assert diagnosis.lost().rank_ns == 100 * MS


def test_a_late_rank_among_many():
    found = late_ones(state_of(run(20, world=8, late_rank=5)).diagnosis.incidents())
    assert [incident.ranks for incident in found] == [(5,)]


@pytest.mark.parametrize("build", [lambda messages: state_of(messages).diagnosis, report_diagnosis])
def test_a_step_that_one_rank_lost_is_counted_once_and_ends_nothing(build):
    lost = (1, 300)
    sent = [one for ranks in synchronous([(0, 0)] * 600) for one in ranks if (one.rank, one.step) != lost]
    found = build([hello(0), hello(1), layout(), *sent, bye()])
    took = {rank: [one for one in sent if one.rank == rank] for rank in (0, 1)}
    spans = [ones[-1].start_ns + ones[-1].duration_ns - ones[0].start_ns for ones in took.values()]
    assert found.lost().rank_ns == sum(spans)
    (exposed,) = [one for one in found.incidents() if one.kind == "exposed_comm"]
    assert (exposed.until_step, exposed.open) == (599, True)


def test_shares_have_one_base_while_a_hang_lasts():
    """What ranks wait in it is in no step yet, and more than all steps took; the rank that hangs takes as long."""
    found = Run()
    frames = enveloped(run(late_rank=1))
    for message, envelope in frames:
        found.apply_message(message, envelope.received_ns)
    since_ns, received_ns = START_NS + 41 * 110 * MS, frames[-1][1].received_ns
    for half_s in range(120):
        waited_ns = half_s * 500 * MS
        for rank, phase in enumerate(("sync", "forward")):
            still = beat(rank, 40, phase, at_ns=since_ns + waited_ns, since_ns=since_ns)
            found.apply_message(still, received_ns + waited_ns)
    hang, late = (one for one in found.incidents() if one.ranks == [1])
    assert (hang.kind, hang.open, late.kind) == ("hang", True, "straggler")
    total = found.lost().rank_seconds
    assert total == pytest.approx(2 * (40 * 0.14 + hang.seconds), rel=0.01)  # steps are 140 ms long, as rank 1 is late
    assert hang.share == pytest.approx(hang.seconds / total)
    assert late.share == pytest.approx(late.seconds / total)


class TestWhatCannotBeSplit:
    def test_exposed_time_without_all_ranks_is_not_said_to_be_transfers(self):
        """Rank 2 is late in every step, and not recorded."""
        sent = [one for ranks in synchronous([(0, 0, 40)] * 40) for one in ranks if one.rank < 2]
        found = state_of([hello(0, 3), hello(1, 3), layout(), *sent, bye()]).diagnosis
        (exposed,) = [one for one in found.incidents() if one.kind == "exposed_comm"]
        assert "exposed transfer or waiting" in exposed.message
        (split,) = [one for one in incidents([(0, 0, 0)] * 40) if one.kind == "exposed_comm"]
        assert "exposed transfer: transfers that" in split.message
        rate = 4 * (1 << 20) / (15 * MS)
        assert [text for text in evidence_sentences(split.evidence) if "GB/s" in text] == [
            f"its data travels at {rate:.2f} GB/s (bus bandwidth)"
        ]

    def test_a_pause_in_exposed_time_is_counted_once_on_another_clock(self):
        messages = [hello(0), hello(1, boot_id="other")]
        for number in range(20):
            for rank in (0, 1):
                one = step(rank, number)
                one.start_ns += rank * 7000 * MS
                if rank == 1:
                    start = one.start_ns + 82 * MS
                    messages.append(Mark(rank=1, kind="gc", name="gc", start_ns=start, end_ns=start + 5 * MS))
                messages.append(one)
        lost = state_of([*messages, bye()]).diagnosis.lost()
        accounts = {account.phase: account.ns for account in lost.accounts if account.name == "pause"}
        assert accounts == {"gc": 20 * 5 * MS}
        assert lost.rank_ns == sum(one.duration_ns for one in messages if hasattr(one, "duration_ns"))


class TestWhatIsMended:
    def test_gradients_that_are_reduced_again(self):
        steps = [step(rank, n, reduced=n >= 5) for n in range(45) for rank in range(2)]
        found = state_of([hello(0), hello(1), *steps]).diagnosis.incidents()
        (one,) = [incident for incident in found if incident.kind == "not_reduced"]
        assert (one.steps, one.until_step, one.open) == (5, 4, False)
        assert one.message.startswith("gradients were not reduced: in 5 steps")

    @pytest.mark.parametrize("seen_in", ["full", "shadow"])
    def test_parameters_that_are_averaged_by_hand(self, seen_in):
        """A hook that hands its buckets back, and collectives of the job's own in every tenth step."""

        def one(rank, number):
            first_seq = number if number % 10 == 9 else None
            if first_seq and seen_in == "shadow":
                return light(rank, number, comm_first_seq=first_seq)
            return step(rank, number, reduced=False, comm_first_seq=first_seq)

        steps = [one(rank, number) for number in range(45) for rank in range(2)]
        for count, expected in ((16, ["not_reduced"]), (len(steps), [])):
            found = state_of([hello(0), hello(1), *steps[:count]]).diagnosis.incidents()
            assert [incident.kind for incident in found if incident.kind == "not_reduced"] == expected

    def test_a_light_step_does_not_say_that_gradients_are_reduced_again(self):
        steps = [step(rank, n, reduced=False) if n < 20 else light(rank, n) for n in range(40) for rank in range(2)]
        found = state_of([hello(0), hello(1), *steps]).diagnosis.incidents()
        assert [one.open for one in found if one.kind == "not_reduced"] == [True]

    def test_layouts_on_which_all_ranks_agree_later(self):
        first = [layout(), Layout(rank=1, epoch=2, params=["a", "b"], buckets=[])]
        later = [replace(layout(rank), epoch=3) for rank in (0, 1)]
        for messages, lasts in ((first, True), ([*first, *later], False)):
            found = state_of([hello(0), hello(1), *messages, step(0), step(1)]).diagnosis.incidents()
            (one,) = [incident for incident in found if incident.kind == "layouts_differ"]
            assert (one.open, "differ from" in one.message) == (lasts, lasts)


def test_a_late_step_that_a_peer_is_missing_of_does_not_say_why():
    """Another step of that number was compared."""
    late = LateRank(Streak(1, 100.0 * MS, 0, 9, 40.0 * MS), (0, 1))
    for number in range(10):
        late.streak.add_step(number, 40 * MS, MS, p=0.01)
    across = StepAcrossRanks(5)
    across.add_step(step(1, 5))
    late.add_facts(StepFacts(across, StepSplit(5)))
    assert late.cause.steps == 0
