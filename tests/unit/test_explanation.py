"""The difference between sampled stacks of two ranks: what is beyond noise is named, and nothing else."""

from __future__ import annotations

import re
from typing import Any

import pytest

from ddpwatch.analysis.explain.explanation import SHOWN_LINES, Explanations, explain
from ddpwatch.analysis.explain.lines import FEWEST_STEPS, WORTH
from ddpwatch.analysis.explain.sentences import where
from ddpwatch.common.text import clean
from ddpwatch.common.units import NS_PER_S
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.export.anonymize import anonymous
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import Drawn, report_of
from ddpwatch.report.explained import explained_in, render_explanation, tables_below
from ddpwatch.report.html import render_html
from ddpwatch.report.markdown import render_markdown
from ddpwatch.report.tables import explanation_table
from ddpwatch.report.text import render_report
from ddpwatch.sampling.lease import LEAD_STEPS
from ddpwatch.sampling.stack_order import FIRST_INCIDENT, LEAD_NS, MOST_PROFILED, PARTIAL, RUN_ENDED, StackOrder
from ddpwatch.viewer.explain import RECENT_STEPS, SAMPLED_S, request_of
from ddpwatch.viewer.first_incident import FirstIncident
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import OUTSIDE, Bye, SampledLine, StackSamples
from tests.support.frames import enveloped, run, step
from tests.support.runs import record, run_of
from tests.support.sampled import FEED, LOSS, MS, WAIT, a_pair, noisy, samples_of
from tests.unit.test_pauses import stalled

END = 1_800_000_000_000_000_000


def test_the_function_is_named_with_its_line_and_module() -> None:
    found = explain(a_pair())
    assert found is not None
    assert found.text.startswith("rank 3 spends 6")
    assert found.text.endswith(" ms more a step in augment() (data.py:88), in the forward of blocks.2")
    assert found.next_step == "look at what augment() (data.py:88) does on rank 3, and not on rank 0"
    first = found.lines[0]
    assert (first.function, first.line, first.peer_ms) == ("augment", 88, 0.0)
    assert first.difference_ms == pytest.approx(61, abs=4)
    assert [line.certain for line in found.lines if line.function in ("read", "main") and line.phase != "sync"] == [
        False,
        False,
    ]
    assert found.lines[-1].phase == "sync"  # what it spends less in comes last
    phases = {row[0] for row in explanation_table(found).rows}
    assert "waits" in phases
    assert not phases & {"sync", "input", "between"}
    assert found.steps == 60


@pytest.mark.parametrize(("forward", "says"), [(1.8, "does the same as rank 0, 2.0 times as long"), (1.0, "spends")])
def test_twice_the_work_is_not_one_line_s(forward: float, says: str) -> None:
    """As with longer samples, or a slower core: all lines take more, and none is named."""
    mlp = SampledLine("forward", "blocks.1", "model.py", 40, "forward", "linear.py:134 in forward")
    norm = SampledLine("forward", "blocks.2", "model.py", 38, "forward", "layer_norm")
    lines = (LOSS, mlp, norm, FEED)

    def rank(number: int, *ms: float) -> StackSamples:
        rows = [
            (line, noisy(mean, 10 * number + seed)) for seed, (line, mean) in enumerate(zip(lines, ms, strict=True))
        ]
        return samples_of(number, rows)

    found = explain([rank(3, 100.0, 30.0 * forward, 2.0 * forward, 0.3), rank(0, 50.0, 30.0, 2.0, 0.3)])
    assert found is not None
    assert found.text.startswith(f"rank 3 {says}")
    assert found.next_step.startswith("its code is not why" if "times" in says else "profile it, ")
    if says == "spends":
        assert found.text.endswith(" ms more a step in main() (main.py:20), in the backward: in torch's operators")


@pytest.mark.parametrize(("slow", "module"), [(range(32), "blocks"), ([7], "blocks.7")])
def test_a_function_of_many_layers_is_named_with_what_it_takes_in_all(slow: range | list[int], module: str) -> None:
    """Though none of them takes so much longer that it is beyond chance."""

    def rank(number: int, ms: float) -> StackSamples:
        layers = [SampledLine("forward", f"blocks.{n}", "model.py", 40, "forward") for n in range(32)]
        masks = [SampledLine("forward", f"blocks.{n}", "mask.py", 12, "mask_spans") for n in slow]
        rows = [(line, noisy(1.5, 100 * number + at, spread=1.0)) for at, line in enumerate(layers)]
        rows += [(line, noisy(ms / len(slow), 100 * number + at, spread=1.0)) for at, line in enumerate(masks, 50)]
        return samples_of(number, [(LOSS, noisy(50, 100 * number + 99)), *rows])

    found = explain([rank(3, 40.0), rank(0, 0.0)])
    assert found is not None
    assert found.text.endswith(f" ms more a step in mask_spans() (mask.py:12), in the forward of {module}")
    assert found.lines[0].difference_ms == pytest.approx(40, abs=4)


def test_a_larger_batch_makes_no_update_longer() -> None:
    """None of its many lines takes so much longer that it is beyond chance."""
    layers = [SampledLine("forward", "blocks", "model.py", 40 + n, f"part{n}", "linear.py:134") for n in range(12)]
    adam = SampledLine("optimizer", "", "main.py", 70, "train", "adam.py:99")

    def rank(number: int, times: float) -> StackSamples:
        passes = [(LOSS, 30.0 * times), *((layer, 2.0 * times) for layer in layers), (adam, 8.0)]
        rows = [(line, noisy(mean, 50 * number + seed)) for seed, (line, mean) in enumerate(passes)]
        return samples_of(number, rows)

    found = explain([rank(3, 1.5), rank(0, 1.0)])
    assert found is not None
    says = "rank 3 does the same as rank 0, forward and backward 1.5 times as long: a larger batch, or longer"
    assert found.text.startswith(says)
    assert sum(line.certain for line in found.lines if line.phase == "forward") < len(layers) / 2


def test_steps_that_were_sampled_in_part_do_not_count() -> None:
    pair = a_pair()
    found = explain(pair)
    assert found is not None
    assert found.ranks[0].step_ms == pytest.approx(sum(pair[0].sample_ns[1:-1]) / 60 / MS)


def test_bare_steps_do_not_count_whose_phases_are_unknown() -> None:
    bare = SampledLine("", "blocks.2", "data.py", 88, "augment")
    rows = [(LOSS, [50.0] * 10 + [0.0] * 2), (bare, [0.0] * 10 + [90.0] * 2)]
    found = explain([samples_of(3, rows), samples_of(0, rows[:1])])
    assert found is not None
    assert found.steps == 10
    assert [line.phase for line in found.lines] == ["backward"]
    all_bare = explain([samples_of(3, [(bare, [90.0] * 10)]), samples_of(0, [(bare, [60.0] * 10)])])
    assert all_bare is not None
    assert all_bare.text == "rank 3 spends 30.0 ms more a step in augment() (data.py:88), in blocks.2"


def test_alike_ranks_do_not_differ() -> None:
    """Not even in one line of thirty, in any of 40 pairs."""
    lines = [SampledLine("forward", f"blocks.{n}", "model.py", n, f"part{n}") for n in range(30)]
    for seed in range(0, 80, 2):
        rows = [
            [(line, noisy(3, 1000 * (seed + rank) + n, 40, 0.9)) for n, line in enumerate(lines)] for rank in (0, 1)
        ]
        found = explain(samples_of(rank, rows[rank], explained=1) for rank in (0, 1))
        assert found is not None
        assert found.text == "no difference beyond noise between rank 1 and rank 0"


@pytest.mark.parametrize("steps", [6, 20, 23, 41])
def test_what_is_sampled_in_a_single_step_is_chance(steps: int) -> None:
    """Whichever step that is."""
    for once in range(steps):
        rows = [(LOSS, noisy(22, 1, steps)), (FEED, [44.0 if step == once else 0.0 for step in range(steps)])]
        found = explain([samples_of(3, rows), samples_of(0, rows[:1])])
        assert found is not None
        assert found.lines[0].difference_ms == pytest.approx(44 / steps)
        assert not found.lines[0].certain


def test_stretches_that_are_alike_by_chance_hide_no_noise() -> None:
    """Steps vary, but the first twenty stretches of two do not."""
    rows = [(LOSS, noisy(22, 1, 40)), (FEED, [44.0, 0.0] * 20)]
    found = explain([samples_of(3, rows), samples_of(0, [rows[0], (FEED, [12.0] * 40)])])
    assert found is not None
    assert found.lines[0].difference_ms == pytest.approx(10)
    assert not any(line.certain for line in found.lines)


@pytest.mark.parametrize(
    ("stalls", "elsewhere", "is_sure"),
    [((7, 27, 47), 0.0, True), ((7, 27), 0.0, True), ((7,), 0.0, False), ((7, 27, 47), 20.0, False)],
)
def test_what_a_rank_does_in_its_stalls_is_named(stalls: tuple[int, ...], elsewhere: float, is_sure: bool) -> None:
    """Its mean is uncertain. A line that takes much of all other steps, too, may be there by chance."""
    saves = [400.0 if step in stalls else elsewhere for step in range(50)]
    own = samples_of(3, [(LOSS, noisy(22, 1, 50)), (FEED, saves)])
    peer = samples_of(0, [(LOSS, noisy(22, 2, 50)), (FEED, [elsewhere] * 50), (WAIT, saves)])
    found = explain([own, peer])
    assert found is not None
    assert found.lines[0].certain == is_sure
    if is_sure:
        assert found.text.startswith(
            f"rank 3 spends 400.0 ms more in read() (data.py:31), before the forward, in {len(stalls)} st"
        )
        assert found.next_step == "look at what read() (data.py:31) does on rank 3, and not on rank 0"
        assert f"400.0 in {len(stalls)} steps" in render_explanation(found)


def test_what_is_hardly_longer_is_not_worth_a_word() -> None:
    step = 100.0
    tiny = step * WORTH / 2
    pair = [
        samples_of(3, [(LOSS, noisy(step, 1, spread=0.0)), (FEED, noisy(5 + tiny, 1, spread=0.0))]),
        samples_of(0, [(LOSS, noisy(step, 1, spread=0.0)), (FEED, noisy(5, 1, spread=0.0))]),
    ]
    found = explain(pair)
    assert found is not None
    assert found.lines[0].difference_ms == pytest.approx(tiny)
    assert not found.lines[0].certain


def test_a_rank_that_had_no_core_does_the_same_work() -> None:
    pair = [
        samples_of(3, [(LOSS, noisy(50, 2))], run_ns=10 * MS, wait_ns=2_000 * MS),
        samples_of(0, [(LOSS, noisy(50, 3))], run_ns=10 * MS, wait_ns=0),
    ]
    found = explain(pair)
    assert found is not None
    assert found.text.startswith("rank 3 does what rank 0 does; it waited for a core for 5")
    assert found.ranks[0].preempted is None
    assert "`ps -eo pid,pcpu,comm --sort=-pcpu` shows who has the cores" in found.next_step


@pytest.mark.parametrize(
    ("longer", "ran", "is_core"),
    [(40.0, 0.0, True), (40.0, 0.05, True), (40.0, 0.2, False), (65.0, 0.0, True), (90.0, 0.0, False)],
)
def test_what_a_rank_spends_more_for_want_of_a_core_is_not_its_code_s(longer: float, ran: float, is_core: bool) -> None:
    span_ns = 60 * 200 * MS  # of which it waits for a core for a quarter: 50 ms a step
    pair = [
        samples_of(3, [(LOSS, noisy(100, 2)), (FEED, noisy(50 + longer, 4))], wait_ns=span_ns // 4),
        samples_of(0, [(LOSS, noisy(100, 3)), (FEED, noisy(50, 5))], wait_ns=0),
    ]
    pair[0].run_ns, pair[1].run_ns = int((0.5 + ran) * span_ns), int(0.6 * span_ns)
    for each in pair:
        each.start_ns, each.end_ns = 0, span_ns
    found = explain(pair)
    assert found is not None
    assert found.text.startswith("rank 3 spends ")
    between = ", as it" if is_core else "; it"
    assert found.text.endswith(f"{between} waited for a core for 25 % of the time, rank 0 for 0 %")
    assert ("shows who has the cores" in found.next_step) is is_core


def test_without_a_peer_it_says_where_the_time_goes() -> None:
    alone = samples_of(3, [(LOSS, [50.0] * 8), (FEED, [60.0] * 8)], peer=None)
    found = explain([alone])
    assert found is not None
    assert found.text == "rank 3 spends most in read() (data.py:31): 60.0 ms a step, before the forward"
    assert found.lines[0].difference_ms is None
    assert "more" not in render_explanation(found)
    lonely = explain(a_pair()[:1])
    assert lonely is not None
    assert lonely.text.endswith("; rank 0 has sent no samples")
    assert explain(a_pair()[1:]) is None


@pytest.mark.parametrize("steps", [0, 1, FEWEST_STEPS - 1])
def test_too_few_steps_are_not_compared(steps: int) -> None:
    rows = [(LOSS, [50.0] * max(steps, 1))]
    pair = [samples_of(3, rows), samples_of(0, rows)]
    if not steps:
        pair[1].slots = [slot + 1000 for slot in pair[1].slots]
    found = explain(pair)
    assert found is not None
    assert found.steps == steps
    assert "few steps" in found.text or "not sampled in a whole step" in found.text
    assert not any(line.certain for line in found.lines)
    assert "next: sample more steps: `ddpwatch explain --rank 3 --steps 100`" in render_explanation(found)


@pytest.mark.parametrize(
    ("steps", "says", "then"),
    [
        (60, r"rank 3 spends .* of blocks\.2; of 60 of 200 steps: the run ended", "look at what augment"),
        (4, r"too few steps of rank 3 were .*, 4 of 200 steps: the run ended", f"next time, .*{FIRST_INCIDENT}"),
    ],
)  # fmt: skip
def test_what_the_end_of_the_run_has_cut_short_is_said_so(steps: int, says: str, then: str) -> None:
    pair = a_pair(ordered=200, cut_short=RUN_ENDED)
    pair[1].slots = [slot + 60 - steps for slot in pair[1].slots]
    found = explain(pair)
    assert found is not None
    assert re.fullmatch(says, found.text)
    assert re.match(then, found.next_step)


def test_a_screen_holds_it() -> None:
    many = [(SampledLine("forward", f"blocks.{n}", "model.py", n, f"part{n}"), noisy(3, n)) for n in range(100)]
    found = explain([samples_of(3, many), samples_of(0, many)])
    assert found is not None
    assert len(found.lines) == SHOWN_LINES
    text = render_explanation(found)
    assert len(text.splitlines()) <= 23
    assert max(map(len, text.splitlines())) <= 80


def test_a_recording_shows_it_again_and_hides_names(tmp_path) -> None:  # type: ignore[no-untyped-def]
    nasty = SampledLine("forward", "b\x1b[31m", "<script>.py", 7, "crop*")
    pair = [samples_of(3, [(nasty, noisy(70, 1)), (LOSS, noisy(50, 2))]), samples_of(0, [(LOSS, noisy(50, 3))])]
    path = record(tmp_path / "run.mcap", iter([*run_of(steps=30), *((each, END) for each in pair)]))
    (found,) = explained_in(Recording(path), rank=3)
    assert found == explain(pair)
    with pytest.raises(UsageError, match="those sampled are of 3, and not of rank 1"):
        explained_in(Recording(path), rank=1)
    report = report_of(path)
    assert report.explained == [found]
    assert clean(found.text) in render_report(report)
    assert "\x1b" not in render_report(report) + render_explanation(found)
    assert r"crop\*" in render_markdown(report)

    assert b"<script>.py" not in render_html(report, Drawn(), "1")
    for each in pair:
        hidden = anonymous(each)
        assert isinstance(hidden, StackSamples)
        assert not {"crop*", "<script>.py", "b\x1b[31m", "main", "main.py", LOSS.inner} & {
            text for line in hidden.lines for text in (line.module, line.file, line.function, line.inner)
        }
        assert [(line.phase, line.line) for line in hidden.lines] == [(line.phase, line.line) for line in each.lines]
    with pytest.raises(UsageError, match="no stacks were sampled"):
        explained_in(Recording(record(tmp_path / "bare.mcap", run_of(steps=30))))


def test_orders_are_kept_apart_and_bounded() -> None:
    gathered = Explanations()
    for order in range(1, 200):
        for each in a_pair()[:2]:
            each.order = order
            gathered.add_samples(each)
    assert gathered.answer(199).keys() == {3, 0}
    assert not gathered.answer(1)
    assert len(gathered.all()) == 64


@pytest.mark.parametrize("column", ["sample_slot", "sample_line"])
@pytest.mark.parametrize("number", [-1, 10_000])
def test_samples_of_no_step_or_line_are_ignored(column: str, number: int) -> None:
    gathered, (wrong, _) = Explanations(), a_pair()
    getattr(wrong, column)[5] = number
    gathered.add_samples(wrong)
    assert gathered.all() == []


def test_places_of_the_step_are_in_words() -> None:
    found = explain(a_pair())
    assert found is not None
    assert {where(line) for line in found.lines} >= {
        "in the forward of blocks.2",
        "in the backward",
        "before the forward",
    }


def test_the_first_late_rank_is_explained_once() -> None:
    ordered: list[StackOrder] = []
    first, state = FirstIncident(ordered.append), RunState()
    for message, envelope in enveloped([*run(60, late_rank=1)]):
        first.look(state)
        state.apply_message(message, envelope.received_ns)
    first.look(state)
    assert [(order.rank, order.peer) for order in ordered] == [(1, 0)]
    assert not first.is_over
    for samples, rank in zip(a_pair(), (1, 0), strict=True):
        samples.rank, samples.order = rank, ordered[0].number
        state.apply_message(samples, 1)
    first.look(state)
    assert first.is_over


def test_who_is_sampled_is_a_rank_that_is_named_late_or_given_and_one_that_is_not() -> None:
    state = RunState()
    for message, received_ns in run_of(ranks=3, steps=12):
        if not isinstance(message, Bye):
            state.apply_message(message, received_ns)
    with pytest.raises(UsageError, match="no rank is named late") as refused:
        request_of(state, None)
    assert refused.value.hint == "choose one, e.g. --rank 2, and --with 0 to compare it with"
    with pytest.raises(UsageError, match="there is no rank 7 that is watched"):
        request_of(state, 7)
    order = request_of(state, 2, steps=40).order
    assert (order.rank, order.peer, order.steps) == (2, 0, 40 + PARTIAL)
    assert request_of(state, 2, steps=10, profiler=True).order.steps == 10
    request = request_of(state, 2, 1)
    with_the_start = LEAD_NS / NS_PER_S + (LEAD_STEPS + request.order.steps) * request.step_s
    assert request.text.endswith(f", some {with_the_start:.0f} s")
    assert (request.order.steps - PARTIAL) * request.step_s == pytest.approx(SAMPLED_S, abs=request.step_s)
    with pytest.raises(DdpwatchError, match="rank 2 has sent no samples"):
        request.answer(state)


def test_it_takes_as_long_as_the_newest_steps_do() -> None:
    state = RunState()
    for message, envelope in enveloped([*run(RECENT_STEPS + 12)]):
        state.apply_message(message, envelope.received_ns)
    usual_s = request_of(state, 1).step_s
    slower = [
        step(rank, 100 + at, duration_ns=round(9 * usual_s * NS_PER_S)) for at in range(RECENT_STEPS) for rank in (0, 1)
    ]
    for message, envelope in enveloped(slower):
        state.apply_message(message, envelope.received_ns)
    assert request_of(state, 1).step_s == pytest.approx(9 * usual_s)


def test_of_two_ranks_that_were_both_late_one_is_compared_with_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    state = RunState()
    for message, envelope in enveloped([*run(12)]):
        state.apply_message(message, envelope.received_ns)
    monkeypatch.setattr("ddpwatch.viewer.explain._late_ranks", lambda _: [1, 0])
    assert request_of(state, None).order.peer == 0
    assert request_of(state, 0).order.peer == 1


def profile_of(rank: int, rows: dict[str, tuple[int, list[float]]], **about: Any) -> StackSamples:
    """A profile of a rank: in the forward, of each operator the calls in a step, and ms in each step."""
    lines = [(SampledLine("forward", "", "", 0, name), ms) for name, (_, ms) in rows.items()]
    samples = samples_of(rank, lines, profiler=True, **about)
    samples.slots = samples.slots[1:-1]  # all are whole
    samples.sample_slot = [slot - 1 for slot in samples.sample_slot[1:-1]]
    samples.sample_line, samples.sample_ns = samples.sample_line[1:-1], samples.sample_ns[1:-1]
    samples.calls = [calls * len(samples.slots) for calls, _ in rows.values()]
    return samples


STEADY = [10.0, 11.0, 9.0, 10.5, 9.5, 10.0, 11.0, 9.0, 10.0]


def test_a_rank_that_pauses_in_a_rhythm_is_sampled_for_a_whole_period():
    """The steps between two pauses are alike: the pause at job.py:27 was "no difference beyond noise"."""
    state = stalled((50, 100, 150), steps=160)
    assert request_of(state, 1).order.steps == 50 + PARTIAL > request_of(state, 0).order.steps


def test_an_operator_that_is_called_more_often_is_named_with_its_calls() -> None:
    here = {"aten::addmm": (20, [5 * ms for ms in STEADY]), OUTSIDE: (0, STEADY)}
    found = explain([profile_of(3, here), profile_of(0, {"aten::addmm": (4, STEADY), OUTSIDE: (0, STEADY)})])
    assert found is not None
    more = "rank 3 spends 40.0 ms more a step in aten::addmm, in the forward: 20 calls a step, its peer 4"
    assert found.text == more
    assert "aten::addmm" in found.next_step
    rendered = render_explanation(found)
    assert re.search(r"phase +calls +operator", rendered)
    assert re.search(r"forward +20 : 4 +aten::addmm +50.0 +10.0 ", rendered)
    assert max(map(len, rendered.splitlines()[2:])) <= 80
    assert "20 : 4" in "\n".join(tables_below(found, 60))  # no figure is cut


def test_names_are_cut_where_they_say_least() -> None:
    def rank(number: int, times: float) -> StackSamples:
        line = SampledLine("forward", "decoder.blocks.1", "a_training_script.py", 40, "mask_spans")
        return samples_of(number, [(line, [times * ms for ms in STEADY])])

    found = explain([rank(3, 2.0), rank(0, 1.0)])
    assert found is not None
    _, _, header, line, *_ = tables_below(found, 72)
    assert header.endswith("sure")
    assert re.match(r" *forward +…cks.1 +mask_spans\(\) \(….*py:40\) +20.0 +10.0 .* yes$", line)
    assert len(header) == len(line) == 72


def test_the_same_operators_that_all_take_longer_are_not_named() -> None:
    def rank(number: int, times: float) -> StackSamples:
        rows = {name: (4, [times * ms for ms in STEADY]) for name in ("aten::addmm", "aten::gelu", "aten::bmm")}
        samples = profile_of(number, rows)
        samples.lines[1].phase = "backward"
        return samples

    found = explain([rank(3, 1.4), rank(0, 1.0)])
    assert found is not None
    assert found.text == "rank 3 runs the same operators as rank 0, 1.4 times as long: each takes more"


@pytest.mark.parametrize(
    ("elements", "of_peer", "says", "next_step"),
    [
        (16_384, 8192, "1.4 times as long: on inputs 2 times as large", "compare the ranks' batch sizes"),
        (8192, 8192, "1.4 times as long: each takes more, on inputs as large", "its code is not why"),
        (8192, 0, "1.4 times as long: each takes more", "its code is not why"),
    ],
)
def test_larger_inputs_are_told_from_a_slow_device(elements: int, of_peer: int, says: str, next_step: str) -> None:
    def rank(number: int, times: float, elements: int) -> StackSamples:
        rows = {name: (4, [times * ms for ms in STEADY]) for name in ("aten::addmm", "aten::gelu", "aten::bmm")}
        samples = profile_of(number, rows, input_elements=[elements] * len(STEADY))
        samples.lines[1].phase = "backward"
        return samples

    pair = [rank(3, 1.4, elements), rank(0, 1.0, of_peer)]
    found = explain(pair)
    assert found is not None
    assert found.text == f"rank 3 runs the same operators as rank 0, {says}"
    assert found.next_step.startswith(next_step)
    assert [rank.input_elements for rank in found.ranks] == [elements, of_peer or None]


@pytest.mark.parametrize(
    ("larger", "lengths", "says"),
    [
        (1.0, [512] * 9, ""),
        (1.5, [512] * 9, "; its model's inputs are 1.5 times as large"),
        (1.2, [700, 400, 650, 380, 500, 610, 405, 512, 450], ""),  # by chance, as far as is known
    ],
)
def test_larger_inputs_are_said_where_time_does_not_show_them(larger: float, lengths: list[int], says: str) -> None:
    rows = {"aten::addmm": (4, [10.0, 90.0] * 4 + [50.0])}
    elements = [round(larger * length) for length in lengths]
    pair = [profile_of(3, rows, input_elements=elements), profile_of(0, rows, input_elements=sorted(lengths))]
    found = explain(pair)
    assert found is not None
    where = "in a line between" if says else "between"
    assert found.text == f"no difference beyond noise {where} rank 3 and rank 0{says}"
    assert ("batch sizes" in found.next_step) is bool(says)


@pytest.mark.parametrize(("ms", "next_step"), [(12, "compare the ranks' batch sizes"), (60, "look at what read()")])
def test_larger_inputs_explain_no_line_that_grows_more(ms: float, next_step: str) -> None:
    def rank(number: int, ms: float, elements: int) -> StackSamples:
        lines = [(LOSS, noisy(100, number)), (FEED, noisy(ms, number + 1, spread=0.1))]
        return samples_of(number, lines, input_elements=[elements] * 62)

    found = explain([rank(3, ms, 1500), rank(0, 6, 1000)])
    assert found is not None
    assert found.text.startswith("rank 3 spends ")
    assert found.text.endswith("in read() (data.py:31), before the forward; its model's inputs are 1.5 times as large")
    assert found.next_step.startswith(next_step)


def test_inputs_that_do_not_fit_the_steps_are_ignored() -> None:
    gathered = Explanations()
    gathered.add_samples(profile_of(3, {"aten::addmm": (4, STEADY)}, input_elements=[1, 2]))
    assert gathered.all() == []


def test_other_operators_are_certain_even_where_their_time_is_not() -> None:
    rows = [{"aten::addmm": (calls, [10.0, 90.0] * 4), "aten::gelu": (4, STEADY[:8])} for calls in (20, 4)]
    found = explain([profile_of(3, rows[0]), profile_of(0, rows[1])])
    assert found is not None
    assert found.text == (
        "rank 3 runs other operators than rank 0, at no cost beyond noise: aten::addmm, in the forward: "
        "20 calls a step, its peer 4"
    )


def test_parameters_that_need_gradients_on_one_rank_alone_are_what_to_look_for() -> None:
    """Of all that their backward calls, this alone says so."""
    costs = {"aten::addmm": (4, STEADY), "aten::mm": (39, [10.0, 90.0] * 4 + [50.0]), "AccumulateGrad": (80, [0.1] * 9)}
    usual = {**costs, "aten::mm": (23, [90.0, 10.0] * 4 + [50.0]), "AccumulateGrad": (48, [0.1] * 9)}
    found = explain([profile_of(3, costs), profile_of(0, usual)])
    assert found is not None
    assert found.text.endswith(" noise: AccumulateGrad, in the forward: 80 calls a step, its peer 48")
    assert found.next_step == "look for parameters that need gradients on one of them alone"
    dear = explain(
        [profile_of(3, {**costs, "aten::mm": (39, [30.0] * 9)}), profile_of(0, {**usual, "aten::mm": (23, STEADY)})]
    )
    assert dear is not None
    assert dear.text.startswith("rank 3 spends 20.0 ms more a step in aten::mm, in the forward: 39 calls a step")
    assert dear.next_step == found.next_step


def test_an_operator_that_costs_nothing_is_no_reason() -> None:
    """Such as that which makes a rank's inputs larger."""

    def rank(number: int, times: float, elements: int) -> StackSamples:
        rows = {name: (4, [times * ms for ms in STEADY]) for name in ("aten::addmm", "aten::gelu", "aten::bmm")}
        samples = profile_of(
            number, {**rows, "aten::cat": (number, [0.1] * 9)}, input_elements=[elements] * len(STEADY)
        )
        samples.lines[1].phase = "backward"
        return samples

    found = explain([rank(3, 1.4, 1000), rank(0, 1.0, 500)])
    assert found is not None
    assert found.text == "rank 3 runs the same operators as rank 0, 1.4 times as long: on inputs 2 times as large"


def test_a_profiled_rank_that_had_no_core_is_said_so_too() -> None:
    rows = {"aten::addmm": (4, STEADY)}
    pair = [profile_of(3, rows, wait_ns=60 * MS, run_ns=MS), profile_of(0, rows, wait_ns=0, run_ns=MS)]
    for each in pair:
        each.end_ns = 100 * MS
    found = explain(pair)
    assert found is not None
    assert found.text.endswith("; it waited for a core for 60 % of the time, rank 0 for 0 %")
    assert "shows who has the cores" in found.next_step
    pair[0].input_elements, pair[1].input_elements = [20] * len(STEADY), [10] * len(STEADY)
    larger = explain(pair)
    assert larger is not None
    assert larger.next_step.startswith("compare the ranks' batch sizes")


def test_a_rank_without_a_core_that_runs_other_operators_is_late_by_these() -> None:
    here = {"aten::addmm": (4, STEADY), "aten::mm": (20, [ms / 2 for ms in STEADY])}
    pair = [profile_of(3, here, wait_ns=60 * MS, run_ns=MS), profile_of(0, {"aten::addmm": (4, STEADY)}, wait_ns=0)]
    for each in pair:
        each.end_ns = 100 * MS
    found = explain(pair)
    assert found is not None
    assert ": 20 calls a step, its peer 0; it waited for a core for 60 %" in found.text
    assert "shows who has the cores" not in found.next_step


@pytest.mark.parametrize(
    ("steps", "then"),
    [
        (FEWEST_STEPS, f"--how profiler --steps {MOST_PROFILED}`"),
        (MOST_PROFILED - 1, "sample stacks, which say where: `ddpwatch explain --rank 3`"),
        (MOST_PROFILED, "sample stacks, which say where: `ddpwatch explain --rank 3`"),
    ],
)
def test_a_profile_that_shows_nothing_does_not_ask_for_the_same_again(steps: int, then: str) -> None:
    found = explain([profile_of(rank, {"aten::addmm": (4, (STEADY * 3)[:steps])}) for rank in (3, 0)])
    assert found is not None
    assert found.text.startswith("no difference beyond noise")
    assert found.next_step.endswith(then)


@pytest.mark.parametrize(("wait", "says"), [(60, "; both waited for a core, for 60 % and 60 % of the time"), (15, "")])
def test_ranks_that_both_had_no_core_are_said_so(wait: int, says: str) -> None:
    pair = [profile_of(rank, {"aten::addmm": (4, STEADY)}, wait_ns=wait * MS, run_ns=MS) for rank in (3, 0)]
    for each in pair:
        each.end_ns = 100 * MS
    found = explain(pair)
    assert found is not None
    assert found.text == f"no difference beyond noise between rank 3 and rank 0{says}"
    assert ("shows who has the cores" in found.next_step) is bool(says)


@pytest.mark.parametrize(
    ("run_ms", "says"), [(83, "; it computes there"), (20, "; it waits there, and does not compute"), (50, "")]
)
def test_whether_it_computes_or_waits_is_said_where_that_is_clear(run_ms: int, says: str) -> None:
    """Of steps of 58 ms it waits 8 for its buckets, and spends 30 more in the forward than its peer, which computes."""

    def rank(number: int, ms: float) -> StackSamples:
        rows = {"aten::addmm": (4, STEADY), OUTSIDE: (0, [ms / 10 * one for one in STEADY]), "wait": (1, [8.0] * 9)}
        samples = profile_of(number, rows, run_ns=(run_ms if number else 71) * MS, wait_ns=0)
        samples.lines[2].phase, samples.end_ns = "sync", samples.start_ns + 100 * MS
        return samples

    found = explain([rank(3, 40), rank(0, 10)])
    assert found is not None
    assert found.text.endswith(f" ms more a step outside of operators, in the forward{says}")


def test_what_python_does_between_operators_is_for_stacks_to_say() -> None:
    here = {"aten::addmm": (4, STEADY), OUTSIDE: (0, [4 * ms for ms in STEADY])}
    found = explain([profile_of(3, here), profile_of(0, {"aten::addmm": (4, STEADY), OUTSIDE: (0, STEADY)})])
    assert found is not None
    assert found.text.endswith(" ms more a step outside of operators, in the forward")
    assert found.next_step == "sample stacks, which say where: `ddpwatch explain --rank 3`"


@pytest.mark.parametrize("rank", [3, 0])
def test_why_a_rank_was_not_profiled_is_said(rank: int) -> None:
    pair = [profile_of(each, {"aten::addmm": (4, STEADY)}) for each in (3, 0)]
    next(each for each in pair if each.rank == rank).obstacle = "the job has a profiler of its own"
    found = explain(pair)
    assert found is not None
    assert found.text == f"rank {rank} was not profiled: the job has a profiler of its own"
    assert found.next_step == "sample stacks, which say where: `ddpwatch explain --rank 3`"
    pair[0].calls = []
    assert explain(pair) is not None
    gathered = Explanations()
    gathered.add_samples(pair[0])
    assert gathered.all() == []
