"""Recordings are untrusted: whatever is in valid frames, reports, comparisons and exports work or say why not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ddpwatch.errors import DdpwatchError
from ddpwatch.export.writers import FORMATS, export
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.report.build import Drawn, compare_recordings, report_of
from ddpwatch.report.compare_text import render_compare
from ddpwatch.report.files import text_report, write_html
from ddpwatch.report.markdown import render_markdown
from ddpwatch.report.text import render_report
from ddpwatch.wire.messages import (
    Beat,
    BucketLayout,
    Bye,
    Device,
    Hello,
    Layout,
    Mark,
    Message,
    Span,
    Status,
    Step,
)
from tests.support.runs import BEGIN, hello_of, record, run_of, step_of

pytestmark = pytest.mark.same_everywhere

MOST_NS, MOST_COUNT, MOST_RANK = (1 << 62) - 1, (1 << 53) - 1, (1 << 20) - 1
NS = st.sampled_from([0, 1, -1, 1_000, 10**8, 10**8 + 1, -(10**8), MOST_NS, -MOST_NS])
LENGTH = st.sampled_from([0, 1, 10**8, MOST_NS])
COUNT = st.sampled_from([0, 1, 2, 3, MOST_COUNT])
RANK = st.sampled_from([0, 0, 1, MOST_RANK])
NAME = st.sampled_from(["", "a", "b", "\0\r\n\x1b]0;x\x07", "=1+1", "</script>", "\u202e\u2028é", "x" * 1024])
GAUGE = st.sampled_from([None, 0.0, -1.0, 1e308, float("inf"), float("nan")])
HELLOS = st.builds(
    Hello, run_id=NAME, attempt=COUNT, rank=RANK, world_size=st.sampled_from([1, 2, 1 << 20]), host=NAME, pid=COUNT,
    boot_id=NAME, device_kind=NAME, backend=NAME, torch=NAME, module=NAME, parameters=COUNT, timing_source=NAME,
    ddp=st.dictionaries(NAME, st.one_of(NAME, COUNT, GAUGE), max_size=2),
)  # fmt: skip
BUCKETS = st.builds(BucketLayout, index=COUNT, nbytes=COUNT, params=st.lists(COUNT, max_size=2))
LAYOUTS = st.builds(
    Layout, rank=RANK, module=COUNT, epoch=COUNT, param_base=COUNT, params=st.lists(NAME, max_size=3),
    buckets=st.lists(BUCKETS, max_size=2),
)  # fmt: skip
OTHERS = st.one_of(
    st.builds(Beat, rank=RANK, at_ns=NS, step=COUNT, phase=NAME, since_ns=NS, in_flight=st.lists(COUNT, max_size=2)),
    st.builds(Mark, rank=RANK, kind=st.sampled_from(["user", "gc"]), name=NAME, start_ns=NS, end_ns=st.none() | NS),
    st.builds(
        Device, host=NAME, kind=st.sampled_from(["cpu", "cuda"]), at_ns=NS, index=COUNT, name=NAME, utilization=GAUGE,
        memory_used=st.none() | COUNT, sm_clock_mhz=GAUGE,
    ),
    st.builds(
        Bye, rank=st.none() | RANK, by=st.sampled_from(["rank", "collector"]), detail=NAME, at_ns=NS, phase=NAME,
        reason=st.sampled_from(["finished", "exception", "killed", "lost"]), step=st.none() | COUNT,
        in_flight=st.lists(COUNT, max_size=2),
    ),
    st.builds(Status, at_ns=NS, frames=COUNT, bytes=COUNT, refused=st.dictionaries(NAME, COUNT), recording=NAME),
)  # fmt: skip
SPANS = st.builds(Span, st.sampled_from(["forward", "backward", "sync", "optimizer"]), NS, NS)


@st.composite
def steps(draw: st.DrawFn) -> Step:
    def column(values: st.SearchStrategy[Any], length: int) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    hooks, buckets = draw(st.integers(0, 2)), draw(st.integers(0, 4))
    return Step(
        rank=draw(RANK), step=draw(COUNT), status=draw(st.sampled_from(["ok", "ok", "shadow", "warmup", "aborted"])),
        epoch=draw(COUNT), start_ns=draw(NS), duration_ns=draw(LENGTH), spans=draw(st.lists(SPANS, max_size=4)),
        hook_param=column(NS, hooks), hook_ns=column(NS, hooks), comm_module=column(NS, buckets),
        comm_label=column(NS, buckets), comm_bytes=column(NS, buckets), comm_launch=column(NS, buckets),
        comm_ready=column(st.none() | NS, buckets), comm_done=column(st.none() | NS, buckets),
        data=draw(st.none() | st.lists(st.tuples(NS, NS), max_size=3)), reduced=draw(st.booleans()),
        own_ns=draw(COUNT), sender_ns=draw(COUNT), cpu_ns=draw(st.none() | COUNT),
        dropped=draw(COUNT),
    )  # fmt: skip


@st.composite
def runs(draw: st.DrawFn) -> list[Message]:
    """Any frames in any order, and sometimes so many steps that they are compared; the same numbers come twice."""
    found = draw(st.lists(st.one_of(steps(), steps(), HELLOS, LAYOUTS, OTHERS), max_size=12))
    if not draw(st.booleans()):
        return found
    pattern = draw(st.lists(steps(), min_size=1, max_size=4))
    return found + [pattern[place % len(pattern)] for place in range(48)]


def look(source: Path, other: Path, folder: Path, selection: Selection) -> None:
    """Every way to look at a recording; our own errors are answers."""

    def reported() -> None:
        report = report_of(source, selection, drawn := Drawn())
        json.loads(json.dumps(report.as_json(), allow_nan=False))
        render_report(report)
        render_markdown(report)
        text_report(report, drawn)

    def compared() -> None:
        found = compare_recordings([source, other, source], selection)
        json.dumps(found.as_json(), allow_nan=False)
        render_compare(found)
        render_compare(compare_recordings([other, source], selection))

    def exported(form: str, hide: bool) -> Callable[[], object]:
        return lambda: export(Recording(source), form, folder / form, selection, hide)

    ways: list[Callable[[], object]] = [
        reported, compared, lambda: write_html(source, folder / "report.html", selection),
        *(exported(form, hide) for form in FORMATS for hide in (False, True)),
    ]  # fmt: skip
    for way in ways:
        with contextlib.suppress(DdpwatchError):
            way()


@pytest.fixture(scope="module")
def ordinary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return record(tmp_path_factory.mktemp("ordinary") / "run.mcap", run_of(steps=40))


@pytest.mark.seconds(8)
@given(
    frames=runs(), selection=st.sampled_from([Selection(), Selection(first=1, stop=3), Selection(ranks=frozenset({0}))])
)
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_frames_break_anything(frames: list[Message], selection: Selection, ordinary: Path, tmp_path: Path) -> None:
    (tmp_path / "run.mcap").unlink(missing_ok=True)  # of the example before
    source = record(tmp_path / "run.mcap", iter([(m, BEGIN + place * 10**7) for place, m in enumerate(frames)]))
    look(source, ordinary, tmp_path, selection)


def lasting(durations: list[int], numbers: list[int] | None = None) -> Iterator[tuple[Message, int]]:
    """A rank whose steps take so long (ns), and nothing else."""
    yield hello_of(0, 1), BEGIN
    for place, ns in enumerate(durations):
        number = place if numbers is None else numbers[place]
        yield Step(rank=0, step=number, start_ns=place * 10**8, duration_ns=ns), BEGIN + place * 10**8


def test_steps_that_take_no_time(ordinary: Path, tmp_path: Path) -> None:
    nothing = record(tmp_path / "nothing.mcap", lasting([0] * 40))
    text = render_compare(compare_recordings([nothing, ordinary]))
    assert "steps of nothing take no time: no ratio to them" in text
    assert compare_recordings([ordinary, nothing]).differences[0].ratio == -1
    halved = record(tmp_path / "halved.mcap", lasting([0, 0, 0, 0, 10**8]))
    assert "### The mean step" in render_markdown(report_of(halved))
    assert "### The mean step" not in render_markdown(report_of(nothing))
    look(nothing, ordinary, tmp_path, Selection())


def test_step_numbers_that_come_twice(tmp_path: Path) -> None:
    """As after a restart from a checkpoint; equally long, too."""
    source = record(tmp_path / "run.mcap", lasting([10**8] * 12, numbers=[0, 1] * 6))
    report = report_of(source, drawn=(drawn := Drawn()))
    assert [across.step for across, _ in drawn.outline.details()] == [0, 1]
    assert text_report(report, drawn)


def test_launches_that_are_further_apart_than_64_bits_reach(ordinary: Path, tmp_path: Path) -> None:
    far = (1 << 62) - 1
    steps = []
    for number in range(20):
        for rank, at in ((0, far), (1, -far)):
            one = step_of(rank, number)
            one.start_ns, one.comm_launch, one.comm_ready = at, [at, at], [at, at]
            steps.append((one, BEGIN + number))
    hellos = [(hello_of(rank, 2), BEGIN) for rank in (0, 1)]
    look(record(tmp_path / "far.mcap", iter([*hellos, *steps])), ordinary, tmp_path, Selection())
