import pytest

from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS
from ddpwatch.analysis.diagnosis.verdict import Presence, verdict
from ddpwatch.analysis.window import summarise
from ddpwatch.messages import Span
from tests.support.frames import MS, START_NS, beat, bye, hello, killed, run, shadow, state_of, step


def judged(messages):
    state = state_of(list(messages))
    return verdict(summarise(state.recent()), state.presence(), state.end, len(state.ranks) >= state.world_size)


class TestSummary:
    def test_medians(self):
        summary = summarise(state_of(run(20)).recent())
        assert summary.count == 19  # without warm-up
        assert summary.rate == pytest.approx(10)
        assert (summary.step_ns, summary.exposed_ns) == (100 * MS, 10 * MS)
        assert summary.overlap == pytest.approx(20 / 30)
        assert summary.cost == pytest.approx(0.002)
        assert summary.bucket_exposed_ns == {0: 0, 1: 10 * MS}
        assert sum(summary.ranks[0].phases_ns.values()) == 100 * MS

    def test_no_step_no_figure(self):
        summary = summarise([])
        assert (summary.count, summary.step_ns, summary.overlap, summary.straggler) == (0, None, None, None)

    def test_a_late_rank_its_bucket_and_its_cause(self):
        slowest = summarise(state_of(run(20, late_rank=1)).recent()).straggler
        assert slowest is not None
        assert (slowest.rank, slowest.late_ns, slowest.bucket) == (1, 40 * MS, 1)
        assert (slowest.phase, slowest.excess_ns) == ("backward", 40 * MS)

    def test_noise_has_no_slowest_rank(self):
        def noisy():
            for number in range(50):
                for rank in range(2):
                    yield step(rank, number, late_ms=(number * 7 + rank * 5) % 11)

        assert summarise(state_of([hello(0), hello(1), *noisy()]).recent()).straggler is None

    def test_one_late_step_in_four_is_not_a_late_rank(self):
        steps = [step(rank, n, 40 if rank and not n % 4 else 0) for n in range(40) for rank in range(2)]
        assert summarise(state_of([hello(0), hello(1), *steps]).recent()).straggler is None

    def test_a_late_rank_among_many(self):
        slowest = summarise(state_of(run(20, world=8, late_rank=5)).recent()).straggler
        assert slowest is not None
        assert slowest.rank == 5

    def test_ranks_that_cannot_be_compared_have_none(self):
        steps = [step(rank, n, 40 * rank) for n in range(20) for rank in range(2)]
        summary = summarise(state_of([hello(0), hello(1, boot_id="other"), *steps]).recent())
        assert summary.straggler is None
        assert summary.ranks[1].late_ns is None


class Named:
    """What the two buckets of the synthetic run are called."""

    def layer(self, param, rank=None):
        return "abcd"[param]

    def bucket_layer(self, index, rank=None):
        return next(iter(self.bucket_params(index, rank)), "")

    def bucket_params(self, index, rank=None):
        return [["c", "d"], ["a", "b"]][index]


class TestNamesAndChange:
    def summary(self, *lateness):
        return summarise(self.state(*lateness).recent())

    def state(self, *lateness):
        """Steps with rank 1 that late (ms)."""
        at, steps = START_NS, []
        for n, late in enumerate(lateness):
            steps += [step(0, n, 0, late, start_ns=at), step(1, n, late, start_ns=at)]
            at += (100 + late) * MS
        return state_of([hello(0), hello(1), *steps])

    def test_bucket_and_layer_are_named(self):
        found = verdict(self.summary(*[40] * 20), {0: Presence(), 1: Presence()}, names=Named())
        assert found.text == (
            "rank 1 is late: launches bucket 1 (a) 40 ms after the first rank (p50 of 16 steps); "
            "its backward takes 40 ms longer, from b on"
        )
        exposed = verdict(self.summary(*[0] * 20), {0: Presence(), 1: Presence()}, names=Named())
        assert exposed.text.endswith("last bucket 1 (a) alone 10 ms")

    def test_a_rank_that_becomes_slow_is_named_within_20_steps_and_cleared_within_20(self):
        assert self.summary(*[0] * 60).straggler is None
        assert self.summary(*[0] * 40, *[40] * 20).straggler.rank == 1
        assert self.summary(*[0] * 40, *[40] * 40, *[0] * 20).straggler is None

    @pytest.mark.parametrize("parity", [0, 1])
    def test_so_it_is_where_every_second_step_is_not_watched(self, parity):
        def seen(late):
            views = self.state(*late).recent()
            return summarise([view for view in views if view.step % 2 == parity]).straggler

        assert seen([0] * 60) is None
        assert seen([0] * 40 + [40] * 20).rank == 1
        assert seen([0] * 40 + [40] * 40 + [0] * 20) is None

    @staticmethod
    def mostly_without_lateness(late, since, period=32):
        """Summary where one step in so many has launches, the newest ``since`` steps ago."""
        bare = {"comm_module": [], "comm_label": [], "comm_bytes": [], "comm_ready": [], "comm_launch": [],
                "comm_done": []}  # fmt: skip
        steps = [
            step(rank, n, late(n) if rank else 0) if n % period == 0 else shadow(rank, n, **bare)
            for n in range(20 * period + since)
            for rank in range(2)
        ]
        return summarise(state_of([hello(0), hello(1), *steps]).recent(12 * period))

    def test_a_rank_that_is_always_late_is_named_where_few_steps_have_lateness(self):
        """It was named only while one of the newest 16 steps was such a step."""
        assert self.mostly_without_lateness(lambda n: 40, since=7).straggler.rank == 1
        assert self.mostly_without_lateness(lambda n: 40, since=25).straggler.rank == 1

    def test_one_late_step_is_not_a_late_rank_where_few_steps_have_lateness(self):
        """Of the newest 16 steps, one had lateness: it alone was judged, for 16 steps."""
        assert self.mostly_without_lateness(lambda n: 40 * (n == 640), since=7).straggler is None

    def test_slow_input_on_one_rank_and_on_all(self):
        late = {"spans": [Span("forward", 42 * MS, 70 * MS), Span("backward", 71 * MS, 120 * MS)],
                "comm_launch": [90 * MS, 110 * MS], "comm_ready": [90 * MS, 110 * MS],
                "comm_done": [100 * MS, 122 * MS], "duration_ns": 125 * MS, "data": [(1 * MS, 41 * MS)]}  # fmt: skip
        one = [step(rank, n, **(late if rank == 0 else {"data": []})) for n in range(20) for rank in range(2)]
        found = judged([hello(0), hello(1), *one])
        assert (found.kind, found.rank) == ("straggler", 0)
        assert found.text.endswith("its wait for data takes 40 ms longer")
        both = [step(rank, n, **late) for n in range(20) for rank in range(2)]
        found = judged([hello(0), hello(1), *both])
        assert found.kind == "slow_input"
        assert found.text == "slow input: the loop waits 40 ms of 125 ms (32 %) for data"

    @pytest.mark.parametrize("seen", [True, False])
    def test_work_between_the_optimizer_and_the_next_batch_is_not_input(self, seen):
        """48 ms of it on one rank, and then 12 ms of a trainer's own bookkeeping on both."""

        def after(ms, number, rank):
            return step(
                rank, number, data=[((ms - 1) * MS, ms * MS)] if seen else None, duration_ns=(100 + ms) * MS,
                spans=[
                    Span("forward", (ms + 2) * MS, (ms + 30) * MS), Span("backward", (ms + 31) * MS, (ms + 80) * MS),
                ],
                **{f"comm_{name}": [at * MS for at in (50 + ms, 70 + ms)] for name in ("ready", "launch")},
                comm_done=[(60 + ms) * MS, (80 + ms) * MS],
            )  # fmt: skip

        one = judged([hello(0), hello(1), *(after(48 if r == 0 else 1, n, r) for n in range(20) for r in range(2))])
        assert (one.kind, one.rank) == ("straggler", 0)
        assert one.text.endswith("; what it does between optimizer and forward takes 47 ms longer")
        both = judged([hello(0), hello(1), *(after(12, n, r) for n in range(20) for r in range(2))])
        assert both.kind == "hidden"


class TestVerdict:
    def test_hidden(self):
        found = judged(step(0, n, comm_done=[60 * MS, 82 * MS]) for n in range(20))
        assert (found.kind, found.severity) == ("hidden", "ok")
        assert "exposed only 2.0 ms of 100 ms (2 %)" in found.text

    def test_exposed_names_the_worst_bucket(self):
        found = judged(run())
        assert (found.kind, found.severity, found.bucket) == ("exposed_comm", "warn", 1)
        assert found.text == "exposed communication 10 ms of 100 ms (10 %): last bucket 1 alone 10 ms"

    def test_a_disturbed_full_step_is_no_verdict_on_the_others(self):
        """One step in 20 is full and exposes 10 ms; of the rest, each backward waits for 2 ms."""

        def waiting(n, waits):
            spans = [Span("forward", 2 * MS, 30 * MS), Span("backward", 31 * MS, 80 * MS)]
            spans += [Span("sync", 80 * MS, (80 + waits) * MS), Span("optimizer", 91 * MS, 95 * MS)]
            return shadow(0, n, spans=spans)

        for waits, kind, figure in (
            (2, "hidden", "backward waits 2.0 ms"),
            (30, "exposed_comm", "communication 10 ms"),
        ):
            found = judged([hello(0), *(waiting(n, waits) if n % 20 else step(0, n) for n in range(60))])
            assert found.kind == kind
            assert figure in found.text

    def test_full_steps_are_looked_for_further_back(self):
        state = state_of([hello(0, world=1), *(shadow(0, n) if n % 64 else step(0, n) for n in range(1, 300))])
        recent = state.recent()
        assert [view.step for view in recent[-50:]] == list(range(250, 300))
        assert [view.step for view in recent if view.timed] == [128, 192, 256]
        assert verdict(summarise(recent), state.presence()).kind == "exposed_comm"

    def test_full_steps_outlive_the_others_where_there_is_room_for_few(self, monkeypatch):
        monkeypatch.setattr("ddpwatch.state.KEEP_RANK_STEPS", 20)
        state = state_of([hello(0, world=1), *(shadow(0, n) if n % 64 else step(0, n) for n in range(1, 300))])
        assert list(state.steps) == [128, 192, 256, *range(280, 300)]

    def test_late_rank_goes_before_exposed(self):
        found = judged(run(late_rank=1))
        assert (found.kind, found.rank, found.bucket) == ("straggler", 1, 1)
        assert found.text.startswith("rank 1 is late: launches bucket 1 40 ms after the first rank (p50 of 16 steps)")
        assert found.text.endswith("its backward takes 40 ms longer")

    def test_a_killed_rank_and_who_waits_for_it(self):
        found = judged([*run(), killed(), beat(0, 40, "sync", 2, in_flight=[1])])
        assert found.text == (
            "rank 1 was killed (SIGKILL) at step 39 in backward, bucket 1 in flight; rank 0 waits for bucket 1"
        )
        assert (found.kind, found.severity, found.rank) == ("rank_ended", "bad", 1)

    def test_the_launcher_s_victims_are_not_to_blame(self):
        early = bye(0, "killed", detail="SIGTERM", signal=15)
        lost = bye(1, "lost", detail="its process is gone, how is not known")
        lost.at_ns = early.at_ns + 1
        found = judged([*run(), early, lost])
        assert found.rank == 1
        assert found.text == "rank 1 is lost (its process is gone, how is not known); then rank 0 ended too"

    def test_an_exception(self):
        found = judged([*run(), bye(0, "exception", detail="ValueError: no", step=7, phase="forward")])
        assert found.text == "rank 0 died of an exception (ValueError: no) at step 7 in forward"

    def test_a_hang_blames_the_rank_that_is_not_waiting(self):
        found = judged([*run(), beat(0, 40, "sync", 12, in_flight=[0, 1]), beat(1, 40, "backward", 14)])
        assert (found.kind, found.rank) == ("hang", 1)
        assert found.text == "rank 1 in backward of step 40 for 14 s; rank 0 waits for buckets 0, 1"

    def test_a_hang_in_which_all_wait(self):
        found = judged([*run(), beat(0, 40, "sync", 12, in_flight=[1]), beat(1, 40, "sync", 12, in_flight=[1])])
        assert found.text == "ranks 0, 1 waiting for bucket 1 for 12 s in step 40"

    def test_a_hang_in_a_step_that_is_not_watched(self):
        """Who has issued fewer collectives is awaited; who is outside of a step, by all."""
        beats = [beat(rank, 40, "", 12, issued=count) for rank, count in enumerate((43, 41))]
        found = judged([*run(), *beats])
        assert (found.kind, found.rank) == ("hang", 1)
        assert found.text == (
            "rank 1 in an unknown phase of step 40 for 12 s; others wait: it has issued 41 collectives, they 43"
        )
        assert judged([*run(), beats[0], beat(1, 40, "input", 12, issued=43)]).text.startswith(
            "rank 1 between steps at step 40"
        )

    def test_a_hang_in_which_nobody_is_known_to_be_behind(self):
        for issued in (None, 43):
            found = judged([*run(), *(beat(rank, 40, "", 12, issued=issued) for rank in (0, 1))])
            assert (found.kind, found.rank) == ("hang", None)
            assert found.text == "ranks 0, 1 in an unknown phase of step 40 for 12 s"

    def test_a_silent_rank(self):
        beats = [beat(0, 40, "sync", 1, in_flight=[1]) for _ in range(100)]
        found = judged([*run(), beat(1, 40, "forward"), *beats])
        assert found.text == "rank 1 silent for 5 s, last seen in step 40; rank 0 waits for bucket 1"

    def test_one_rank_alone(self):
        empty = {f"comm_{name}": [] for name in ("module", "label", "bytes", "ready", "launch", "done")}
        found = judged([hello(0, 1), *(step(0, n, **empty) for n in range(20))])
        assert found.text == "no communication: one rank has nobody to talk to"

    def test_completion_not_measured(self):
        found = judged(step(0, n, comm_done=[None, None]) for n in range(20))
        assert found.kind == "unmeasured"

    def test_too_early_to_say(self):
        assert judged([]).kind == "starting"
        assert judged([hello(0)]).kind == "starting"
        found = judged(run(4))
        assert found.text == f"collecting: 3 of {ENOUGH_STEPS} steps for a first verdict"

    def test_a_short_run_that_is_over(self):
        found = judged([*run(4), bye(0), bye(1), bye()])
        assert (found.kind, found.severity, found.text) == ("ended", "ok", "finished after 4 steps")

    def test_a_finished_run_keeps_its_finding(self):
        assert judged([*run(late_rank=1), bye(0), bye(1), bye()]).kind == "straggler"
