import re
from dataclasses import replace

import pytest

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.standing import Standing
from ddpwatch.analysis.diagnosis.thresholds import ENOUGH_STEPS
from ddpwatch.analysis.diagnosis.words.verdict import verdict
from ddpwatch.analysis.digest import StepDigest
from ddpwatch.analysis.kept_steps import StepLimit
from ddpwatch.analysis.window import Summariser, summarise
from ddpwatch.wire.messages import Mark, Span
from tests.support.frames import MS, bare, beat, bye, hello, killed, layout, light, run, state_of, step, synchronous

UNKNOWN_OTHERWISE = "no bucket was seen; whether the ranks communicate otherwise is not known"


def judged(messages):
    state = state_of(list(messages))
    return state.verdict(summarise(state.recent()), state.diagnosis.incidents())


class TestSummary:
    def test_medians(self):
        summary = summarise(state_of(run(20)).recent())
        assert summary.count == 19  # without warm-up
        assert summary.rate == pytest.approx(10)
        assert (summary.step_ns, summary.exposed_ns) == (100 * MS, 10 * MS)
        assert summary.estimate.overlap == pytest.approx(20 / 30)
        assert sum(summary.ranks[0].phases_ns.values()) == 100 * MS

    def test_no_step_no_figure(self):
        summary = summarise([])
        assert (summary.count, summary.step_ns, summary.estimate.overlap) == (0, None, None)

    def test_ranks_that_cannot_be_compared_have_no_lateness(self):
        steps = [step(rank, n, 40 * rank) for n in range(20) for rank in range(2)]
        summary = summarise(state_of([hello(0), hello(1, boot_id="other"), *steps]).recent())
        assert summary.ranks[1].late_ns is None

    def test_a_step_that_stays_in_the_window_is_digested_once_bare_or_not(self, monkeypatch):
        digested = []
        monkeypatch.setattr(
            "ddpwatch.analysis.window.StepDigest", lambda across: digested.append(across.step) or StepDigest(across)
        )
        steps = ((bare if n % 2 else step)(rank, n) for n in range(20) for rank in range(2))
        state, summariser = state_of([hello(0), hello(1), *steps]), Summariser()
        for _ in range(2):
            summary = summariser.summarise(state.window())
        assert len(digested) == len(set(digested)) == len(state.window()) > summary.count


class TestVerdict:
    def test_hidden(self):
        found = judged(step(0, n, comm_done=[60 * MS, 82 * MS]) for n in range(20))
        assert (found.kind, found.severity) == ("hidden", "ok")
        assert found.text == "nothing stands out; exposed communication 2.0 ms of 100 ms (2.0 %)"

    def test_less_than_a_tenth_lost_without_an_incident_is_no_warning(self):
        """A healthy job was told from its first line to its last that what-if predicts what would help."""
        steps = [step(0, n, comm_done=[60 * MS, 86 * MS]) for n in range(20)]
        found = judged(steps)
        assert (found.kind, found.severity) == ("lost", "info")
        assert found.next_step.startswith("see whether `ddpwatch whatif")
        stall = Incident("pause", "warning", "rank 1 paused", (1,), since_step=10, share=0.06)
        state = state_of(steps)
        assert state.verdict(summarise(state.recent()), [stall]).severity == "warn"

    def test_nothing_stands_out_is_not_said_beside_a_pause_that_took_most_of_the_run(self):
        quick = [step(0, n, comm_done=[60 * MS, 82 * MS]) for n in range(20)]
        state = state_of([hello(0, 1), *quick])
        for share, kind in ((0.89, "lost"), (0.04, "hidden")):
            pause = Incident("pause", "info", "every rank paused", (), "between", 10, share=share)
            found = state.verdict(summarise(state.recent()), [pause])
            assert (found.kind, "nothing stands out" in found.text) == (kind, kind == "hidden")

    def test_an_info_does_not_hide_what_was_graver(self):
        state = state_of([hello(0, 1), *(step(0, n) for n in range(20))])
        lasts = Incident("imbalance", "info", "another rank is last", share=0.06, gain=0.06, open=True, counts=True)
        stall = Incident("pause", "warning", "rank 1 paused", (1,), since_step=10, share=0.06)
        found = state.verdict(summarise(state.recent()), [lasts, stall])
        assert (found.kind, found.text.split("; ")[-1]) == (
            "imbalance", "earlier: pause (rank 1) at step 10, 6.0 % of all ranks' time",
        )  # fmt: skip

    def test_what_cost_more_and_is_over_is_named_beside_what_lasts(self):
        state = state_of([hello(0, 1), *(step(0, n) for n in range(20))])
        lasts = Incident("exposed_comm", "warning", "transfers", share=0.02, gain=0.12, open=True, counts=True)
        for share, said in ((0.10, True), (0.015, False)):
            stall = Incident("pause", "warning", "rank 1 paused", (1,), since_step=10, share=share)
            found = state.verdict(summarise(state.recent()), [lasts, stall])
            assert (found.kind, "earlier: pause (rank 1)" in found.text) == ("exposed_comm", said)

    def test_a_pause_that_is_over_is_called_what_marks_say_it_was(self):
        state = state_of([hello(0, 1), *(step(0, n) for n in range(20))])
        save = Incident("pause", "info", "rank 0 paused", (0,), "checkpoint", since_step=10, share=0.06)
        for phase, noun in (("checkpoint", "checkpoint"), ("gc", "garbage collection"), ("forward", "pause")):
            found = state.verdict(summarise(state.recent()), [replace(save, phase=phase)])
            assert f"; earlier: {noun} (rank 0) at step 10" in found.text

    def test_what_else_goes_on_and_counts_is_named(self):
        state = state_of([hello(0, 1), *(step(0, n) for n in range(20))])
        lasts = Incident("straggler", "warning", "rank 1 is late", (1,), gain=0.3, open=True, counts=True)
        others = [
            replace(lasts, kind=kind, ranks=ranks, gain=gain)
            for kind, ranks, gain in [("imbalance", (), 0.02), ("exposed_comm", (), 0.1), ("intermittent", (2,), 0.05)]
        ]
        over = replace(lasts, kind="pause", open=False), replace(lasts, kind="slow_link", counts=False)
        found = state.verdict(summarise(state.recent()), [*others, lasts, *over])
        also = "exposed transfer, late now and then (rank 2)"
        assert (found.kind, found.with_others()) == ("straggler", f"{found.text}; also ongoing: {also}")
        assert found.with_others(9).endswith(f"{also}, imbalance")
        assert "also" not in found.text

    def test_ranks_of_one_host_are_not_all(self):
        """As on a host whose `ddpwatch` shows its own ranks only: what the others do is not known there."""
        quick = {"comm_done": [60 * MS, 82 * MS]}
        steps = [step(rank, n, **quick) for n in range(20) for rank in (2, 3)]
        found = judged([hello(2, 4), hello(3, 4), *steps])
        assert (found.kind, found.severity) == ("partial", "none")
        assert found.text == (
            "only 2 of 4 ranks report here, so late ones do not show; exposed transfer 2.0 ms of 100 ms (2.0 %)"
        )

    def test_exposed_names_the_worst_bucket(self):
        found = judged(run())
        assert (found.kind, found.severity, found.bucket) == ("exposed_comm", "warn", 1)
        assert found.text == (
            "exposed transfer: transfers that no compute hides take 10 % of a step, most of it the last bucket 1 "
            "(a); without it, a step would be 10 % shorter"
        )

    def test_a_disturbed_full_step_is_no_verdict_on_the_others(self):
        """One step in 20 is full and exposes 10 ms; of the rest, each backward waits for 2 ms."""

        def waiting(n, waits):
            spans = [Span("forward", 2 * MS, 30 * MS), Span("backward", 31 * MS, 80 * MS)]
            spans += [Span("sync", 80 * MS, (80 + waits) * MS), Span("optimizer", 91 * MS, 95 * MS)]
            return light(0, n, spans=spans)

        for waits, kind in ((2, "hidden"), (30, "exposed_comm")):
            assert judged([hello(0, 1), *(waiting(n, waits) if n % 20 else step(0, n) for n in range(60))]).kind == kind

    def test_a_late_rank_goes_before_what_costs_less(self):
        found = judged(run(late_rank=1))
        assert (found.kind, found.severity, found.rank, found.bucket) == ("straggler", "bad", 1, 1)
        assert found.text == (
            "rank 1 is late by 40 ms in each step: its backward takes 40 ms longer, from b on; without the wait for "
            "it, a step would be 21 % shorter"
        )

    def test_slow_input_on_one_rank_and_on_all(self):
        late = {"spans": [Span("forward", 42 * MS, 70 * MS), Span("backward", 71 * MS, 120 * MS)],
                "comm_launch": [90 * MS, 110 * MS], "comm_ready": [90 * MS, 110 * MS],
                "comm_done": [100 * MS, 122 * MS], "duration_ns": 125 * MS, "data": [(1 * MS, 41 * MS)]}  # fmt: skip
        one = [step(rank, n, **(late if rank == 0 else {"data": []})) for n in range(20) for rank in range(2)]
        found = judged([hello(0), hello(1), *one])
        assert (found.kind, found.rank) == ("slow_input", 0)
        assert "rank 0 is late by 40 ms in each step: its wait for data takes 40 ms longer" in found.text
        assert "; without the wait for rank 0, a step would be " in found.text
        both = [step(rank, n, **late) for n in range(20) for rank in range(2)]
        found = judged([hello(0), hello(1), *both])
        assert (found.kind, found.rank) == ("slow_input", None)
        assert found.text.startswith("slow input: the loop waits for data during 32 % of a step")

    @pytest.mark.parametrize("seen", [True, False])
    def test_work_between_the_optimizer_and_the_next_batch_is_not_input(self, seen):
        """48 ms of it on one rank, and then 12 ms of a trainer's own bookkeeping on both."""

        def after(ms, number, rank, wait=0):
            return step(
                rank, number, data=[((ms - 1) * MS, ms * MS)] if seen else None, duration_ns=(100 + ms + wait) * MS,
                spans=[
                    Span("forward", (ms + 2) * MS, (ms + 30) * MS), Span("backward", (ms + 31) * MS, (ms + 80) * MS),
                ],
                **{f"comm_{name}": [at * MS for at in (50 + ms, 70 + ms)] for name in ("ready", "launch")},
                comm_done=[(60 + ms) * MS, (80 + ms + wait) * MS],
            )  # fmt: skip

        late = [one for n in range(20) for one in (after(48, n, 0), after(1, n, 1, wait=47))]
        one = judged([hello(0), hello(1), *late])
        assert (one.kind, one.rank) == ("straggler", 0)
        assert "its gap before the forward takes 47 ms longer" in one.text
        both = judged([hello(0), hello(1), *(after(12, n, r) for n in range(20) for r in range(2))])
        assert both.kind == "hidden"
        assert "the gap before the forward" not in both.text
        most = judged([hello(0), hello(1), *(after(80, n, r) for n in range(20) for r in range(2))])
        assert re.match("[45].? % of all ranks' time is the gap before the forward; ", most.text)
        assert "nothing stands out" not in most.text
        assert most.next_step.startswith("see what the loop does in the gap")

    def test_what_is_over_is_mentioned(self):
        late = [(40 * (64 <= number < 84), 40 * (20 <= number < 60)) for number in range(140)]
        steps = [one for ranks in synchronous(late) for one in ranks]
        for one in steps[168:]:
            one.comm_done = [60 * MS, 82 * MS]
        found = judged([hello(0), hello(1), layout(), *steps])
        assert (found.kind, found.severity) == ("lost", "warn")
        assert found.text.startswith("14.0 % of all ranks' time lost: 7.6 % exposed transfer, ")
        earlier = r"; no incident is ongoing; earlier: straggler \(rank 1\) in steps 20–59 and 2 more, \d+ % of all"
        assert re.search(earlier, found.text), found.text

    def test_ranks_that_drifted_apart_never_stand_well_again(self):
        hidden = {"comm_done": [60 * MS, 82 * MS]}
        steps = [step(rank, n, reduced=n >= 20, **hidden) for n in range(200) for rank in range(2)]
        found = judged([hello(0), hello(1), layout(), *steps])
        assert (found.kind, found.severity) == ("not_reduced", "bad")
        assert found.text.startswith("gradients were not reduced: in 20 steps")

    def test_what_lasts_and_costs_next_to_nothing_is_not_the_verdict(self):
        found = state_of([hello(0), hello(1), layout(), *run(40)])
        little = Incident("intermittent", "warning", "rank 0 paused 9 times", (0,), gain=0.001, open=True)
        summary = summarise(found.recent())

        def kind(incident):
            return verdict(summary, Standing().judged([incident], range(41)), 2).kind

        assert kind(little) != "intermittent"
        assert kind(replace(little, gain=0.01)) == "intermittent"
        assert kind(replace(little, gain=0.01, severity="info")) != "intermittent"
        assert kind(replace(little, gain=0.05, severity="info")) == "intermittent"  # whatever its severity

    def test_a_killed_rank_and_who_waits_for_it(self):
        found = judged([*run(), killed(), beat(0, 40, "sync", 2, in_flight=[1])])
        assert found.text == (
            "rank 1 was killed (SIGKILL) at step 39 in backward, bucket 1 in flight; rank 0 waits for bucket 1"
        )
        assert (found.kind, found.severity, found.rank) == ("death", "bad", 1)

    def test_a_run_that_was_stopped_by_ctrl_c_is_judged_as_one_that_finished(self):
        ends = [bye(rank, "exception", detail="KeyboardInterrupt", step=40, phase="sync") for rank in (0, 1)]
        end = bye(None, "exception")
        state = state_of([*run(late_rank=1), *ends, end])
        incidents = state.diagnosis.incidents()
        found = verdict(summarise(state.recent()), incidents, 2, end, finished_steps=40)
        assert found == verdict(summarise(state.recent()), incidents, 2, bye(None), finished_steps=40)
        assert found.text.startswith("rank 1 is late by 40 ms")

    def test_one_rank_alone(self):
        empty = {f"comm_{name}": [] for name in ("module", "label", "bytes", "ready", "launch", "done")}
        found = judged([hello(0, 1), *(step(0, n, **empty) for n in range(20))])
        assert found.text == "no communication: one rank has nobody to talk to"

    @pytest.mark.parametrize(
        ("issued", "kind", "text"),
        [
            ((7, 7), "no_comm", "no communication: no bucket was launched"),
            ((7, 9), "no_bucket", "no bucket was launched; the ranks' other collectives are not timed"),
            ((7,), "no_bucket", UNKNOWN_OTHERWISE),
            ((None, None), "no_bucket", UNKNOWN_OTHERWISE),
        ],
    )
    @pytest.mark.parametrize("off", ["", "collectives"])
    def test_without_buckets_only_sequence_numbers_show_that_nothing_was_communicated(self, issued, kind, text, off):
        """Parameters may be averaged by hand; and what nobody looked for is not absent."""
        empty = {f"comm_{name}": [] for name in ("module", "label", "bytes", "ready", "launch", "done")}
        steps = [step(rank, n, **empty) for n in range(20) for rank in range(2)]
        beats = [beat(1, n, issued=count) for n, count in enumerate(issued)]
        marks = [Mark(rank=0, name="ddpwatch: ours", start_ns=0, off=off)]
        found = judged([hello(0), hello(1), *marks, *beats, *steps])
        assert (found.kind, found.text) == (("no_bucket", UNKNOWN_OTHERWISE) if off else (kind, text))

    def test_completion_not_measured(self):
        found = judged(step(0, n, comm_done=[None, None]) for n in range(20))
        assert found.kind == "unmeasured"

    def test_too_early_to_say(self):
        assert judged([]).kind == "starting"
        assert judged([hello(0)]).kind == "starting"
        found = judged(run(4))
        assert found.text == f"too few steps to say: 3 of {ENOUGH_STEPS} are measured"

    def test_a_short_run_that_is_over(self):
        found = judged([*run(4), bye(0), bye(1), bye()])
        assert (found.kind, found.severity, found.text) == (
            "collecting", "none", f"finished after 4 steps; too few steps to say: 3 of {ENOUGH_STEPS} are measured"
        )  # fmt: skip

    def test_a_finished_run_keeps_its_finding(self):
        assert judged([*run(late_rank=1), bye(0), bye(1), bye()]).kind == "straggler"


class TestFullSteps:
    def test_they_are_looked_for_further_back(self):
        state = state_of([hello(0, world=1), *(light(0, n) if n % 64 else step(0, n) for n in range(1, 300))])
        recent = state.recent()
        assert [view.step for view in recent[-50:]] == list(range(250, 300))
        assert [view.step for view in recent if view.timed] == [128, 192, 256]

    def test_they_outlive_the_others_where_there_is_room_for_few(self, monkeypatch):
        monkeypatch.setattr("ddpwatch.analysis.kept_steps.KEPT", StepLimit(512, 20, 2))
        state = state_of([hello(0, world=1), *(light(0, n) if n % 64 else step(0, n) for n in range(1, 300))])
        assert list(state.steps) == [128, 192, 256, *range(280, 300)]
