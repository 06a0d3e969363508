import dataclasses
import re
from itertools import chain, combinations, product

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.diagnosis.words.verdict import Verdict
from ddpwatch.analysis.diagnosis.words.why_unwatched import Why
from ddpwatch.common.text import ms
from ddpwatch.tui.models.devices import DeviceLine, DeviceLines, mean_history, worst_first
from ddpwatch.tui.models.history import SPARK_STEPS, HistoryPoint, StepHistory
from ddpwatch.tui.models.host_names import host_names
from ddpwatch.tui.models.overview import Link, LinkState, OverviewBuilder
from ddpwatch.tui.paint.canvas import plain
from ddpwatch.tui.paint.chart import chart, chart_rows
from ddpwatch.tui.paint.device_limits import limit_fields
from ddpwatch.tui.paint.devices import DeviceCard, meter, paint_device_panel, paint_devices
from ddpwatch.tui.paint.header import badge_of, paint_header, paint_verdict, verdict_lines
from ddpwatch.tui.paint.history import GUTTER, paint_history
from ddpwatch.tui.paint.overview import paint_overview
from ddpwatch.tui.paint.page import paint_page
from ddpwatch.tui.paint.screen_layout import layout
from ddpwatch.tui.paint.split import paint_split
from ddpwatch.tui.paint.table import paint_table
from ddpwatch.wire.messages import RankSample, Status
from tests.support.frames import (
    MS,
    beat,
    bye,
    device,
    enveloped,
    hello,
    killed,
    light,
    run,
    state_of,
    status,
    step,
    synchronous,
)

LIVE = LinkState(Link.LIVE)


def overview(messages, link=LIVE):
    return OverviewBuilder().build(state_of(list(messages)), link)


def lines_of(messages):
    state = state_of(messages)
    return DeviceLines().build(state, host_names(state))


def page(model, width, height, first=None):
    return paint_page(model, width, height, lambda *size: paint_overview(model, *size, first))


def text(rows):
    return "\n".join(plain(rows))


class TestHeader:
    def test_figures_with_their_units(self):
        shown = text(paint_header(overview(run()), 200))
        for figure in ("step 100 ms", "10.0 it/s", "overlap 67 %", "exposed 10.0 ms (10 % of step)"):
            assert figure in shown
        assert "overhead –" in shown  # no bare steps
        assert "slowest rank –" in shown

    @pytest.mark.parametrize(("width", "text_shown"), [(200, "3 lost messages   "), (80, "lost 3  ")])
    def test_lost_messages_are_counted_where_there_are_any(self, width, text_shown):
        assert "lost" not in text(paint_header(overview(run()), width))
        assert text_shown in text(paint_header(overview([*run(), beat(1, 40, dropped=3)]), width))

    def test_at_80_columns_nothing_of_it_is_missing(self):
        shown = text(paint_header(overview(run(late_rank=1)), 80))
        for figure in (
            "step 140 ms",
            "it/s",
            "overlap",
            "exposed",
            "rank 1 +40.0 ms",
            "overhead –",
            "step 39",
            "39 of 39 steps in full",
        ):
            assert figure in shown

    @pytest.mark.parametrize("ppm", [None, 10_000])
    def test_what_is_sampled_is_counted(self, ppm):
        levels = [step(0, n) if n % 4 == 0 else light(0, n) for n in range(100)]
        model = overview([hello(0), *levels, Status(at_ns=1, frames=1, bytes=1, lease_ppm=ppm)])
        assert "  12 of the newest 50 steps timed in full  " in text(paint_header(model, 200))
        assert "  12 of 50 steps in full  " in text(paint_header(model, 80))

    def test_sparklines_are_as_long_as_there_is_room(self):
        model = overview([*run(30, late_rank=1), *chain.from_iterable(synchronous([(200, 0)], 30, start_ms=30 * 140))])
        lengths = {}
        for width in (80, 120, 160, 200):
            line = plain(paint_header(model, width))[1]
            step_spark = re.search(rf"{ms(model.summary.step_ns)} ms([ ▁▂▃▄▅▆▇█]*)", line)[1].strip()
            lengths[width] = len(step_spark)
            assert set(step_spark[:-1]) <= {"▆"}
            assert step_spark[-1:] in ("", "█")
        assert lengths[80] == 0
        assert 0 < lengths[120] <= lengths[160] < lengths[200] == SPARK_STEPS
        assert len(re.findall(r"[▁▂▃▄▅▆▇█]{16}", plain(paint_header(model, 200))[1])) == 4

    def test_sparklines_leave_out_what_is_not_whole(self):
        line = plain(paint_header(overview([*run(30), step(0, 30, 900)]), 200))[1]
        assert "█" not in line

    def test_no_sparkline_of_what_is_not_known(self):
        unmeasured = [step(r, n, comm_done=[None, None]) for n in range(20) for r in (0, 1)]
        line = plain(paint_header(overview([hello(0), hello(1), *unmeasured]), 200))[1]
        assert re.search(r"overlap –   exposed –   slowest", line)

    def test_unknown_figures_are_dashes(self):
        shown = text(paint_header(overview([]), 120))
        assert "0" not in shown
        assert "step –" in shown

    @pytest.mark.parametrize(
        ("link", "badge"),
        [
            (LIVE, "LIVE"),
            (LinkState(Link.LIVE, paused=True), "PAUSED"),
            (LinkState(Link.REPLAY, speed=0.5, replay=True), "REPLAY 0.5×"),
            (LinkState(Link.REPLAY, paused=True, replay=True), "REPLAY 1× PAUSED"),
            (LinkState(Link.ENDED, replay=True), "REPLAY ENDED"),
            (LinkState(Link.WAITING), "WAITING"),
            (LinkState(Link.GONE), "COLLECTOR GONE"),
            (LinkState(Link.GONE, trouble="node: ssh ended"), "NOT CONNECTED"),
        ],
    )
    def test_badge(self, link, badge):
        assert badge_of(overview(run(2), link))[0] == badge

    def test_an_ended_run_says_why(self):
        assert badge_of(overview([*run(2), bye(None, "killed")], LinkState(Link.ENDED)))[0] == "ENDED: killed"

    def test_recording_is_mentioned(self):
        recording = status()
        recording.recording, recording.recording_bytes = "x.mcap", 3 << 20
        assert "recording 3.0 MiB" in text(paint_header(overview([*run(2), recording]), 200))
        over = text(paint_header(overview([*run(2), recording, bye(None)]), 200))
        assert "recorded" in over
        assert "MiB" not in over, "it has grown since"

    def test_verdict_wraps(self):
        rows = plain(paint_verdict(overview(run(late_rank=1)), 60, 2))
        assert rows[0].startswith(" ✗ rank 1 is late by 40 ms in each step: its backward takes")
        assert rows[1].startswith("   ")

    @pytest.mark.parametrize(
        ("width", "said"),
        [(50, ""), (58, "; also ongoing: slow input (rank 0)"), (80, "; also ongoing: slow input (rank 0), imbalance")],
    )
    def test_others_are_named_where_a_second_row_has_room(self, width, said):
        text = "rank 1 is late: its backward takes 40 ms longer, from layer b on"
        found = Verdict("straggler", "bad", text, others=("slow input (rank 0)", "imbalance", "buffers"))
        lines = verdict_lines(dataclasses.replace(overview([]), verdict=found), width)
        assert (" ".join(lines), len(lines) <= 2) == (text + said, True)


class TestTable:
    def rows(self, messages, width=100, height=5, first=0):
        return plain(paint_table(overview(messages).ranks, width, height, first))

    def test_one_line_per_rank_with_medians(self):
        rows = self.rows(run())
        assert rows[0].split()[:2] == ["rank", "status"]
        assert rows[1].split() == ["0", "running", "39", "100", "0.0", "0.0", "67", "%", "10.0"]

    def test_lost_messages_are_counted_where_there_are_any(self):
        rows = self.rows([*run(), beat(1, 40, dropped=3)])
        assert rows[0].split()[-2:] == ["lost", "messages"]
        assert [row.split()[-1] for row in rows[1:3]] == ["0", "3"]

    def test_memory_is_there_where_it_is_measured(self):
        used = RankSample(rank=1, at_ns=0, span_ns=1, memory_bytes=3 << 30)
        rows = self.rows([*run(), used], width=120)
        assert rows[0].split()[-2:] == ["host", "mem"]
        assert rows[1].endswith(" –")
        assert rows[2].endswith(" 3.0 GiB")
        gpu = beat(0, 40, memory_reserved=6 << 30, memory_allocated=5 << 30, memory_peak=7 << 30)
        rows = self.rows([*run(), used, gpu], width=120)
        assert rows[0].split()[-4:] == ["host", "mem", "GPU", "mem"]
        assert rows[1].endswith(" 6.0 GiB")

    def test_the_slowest_is_marked(self):
        rows = self.rows(run(late_rank=1))
        assert "1◀" in rows[2]
        assert "40.0" in rows[2]
        assert "◀" not in rows[1]

    def test_ranks_that_wait_are_silent_or_ended(self):
        waiting = self.rows([*run(10), beat(0, 10, "sync", 12, in_flight=[1])])
        assert "waiting 12 s for bucket 1" in waiting[1]
        quiet = state_of([*run(10), *(beat(0, 10) for _ in range(100))])
        assert "silent 5 s" in text(paint_table(OverviewBuilder().build(quiet, LIVE).ranks, 100, 5))
        assert "ended: killed SIGKILL in backward, bucket 1" in self.rows([*run(10), killed()])[2]
        assert "ended: finished" in self.rows([*run(10), bye(0)])[1]

    def test_how_a_rank_died_is_readable_at_80_columns(self):
        assert "ended: killed SIGKILL in backward, bucket 1" in self.rows([*run(10), killed()], width=80)[2]

    def test_host_and_pid_where_there_is_room(self):
        assert "node1 / 4000" in self.rows(run(), width=140)[1]

    def test_unknown_is_a_dash(self):
        assert self.rows([hello(0, 1)])[1].split() == ["0", "running", "–", "–", "–", "–", "–", "–"]

    def test_scrolls(self):
        rows = self.rows(run(3, world=20), height=5, first=999)
        assert [row.split()[0] for row in rows[1:]] == ["16", "17", "18", "19"]


def limits(sample):
    return [(field.full, field.style) for field in limit_fields(sample)]


class TestDevices:
    def test_a_gpu_comes_before_the_host_and_is_charted(self):
        rows = lines_of([device(0), device(0, 90.0, "cuda"), device(1, 90.0, "cuda")])
        assert [row.device.kind for row in rows] == ["cuda", "cpu"]
        shown = text(paint_device_panel(rows, 60, 20))
        for figure in ("GPU0", "NVIDIA H200", "90 %", "power 312 of 700 W", "temp 61.0 °C", "GPU busy %", "CPU"):
            assert figure in shown

    def test_with_more_than_fit_the_worst_come_first(self):
        """The lowest clock, as of GPU 3; then the least busy, as GPU 5, not sampled at all, and GPU 1."""
        samples = []
        for index in range(8):
            sample = device(0, {1: 20.0, 5: None}.get(index, 95.0), "cuda", index)
            sample.sm_clock_mhz = 1410.0 if index == 3 else 1965.0 + index
            samples.append(sample)
        rows = lines_of([*samples, device(0)])
        worst = worst_first(rows)
        assert [line.device.index for line in worst[:4]] == [3, 5, 1, 0]
        assert worst[-1].device.kind == "cpu"
        heading, first, *_ = text(paint_device_panel(rows, 60, 6)).splitlines()
        assert "worst first: 6 more" in heading
        assert "GPU3" in first
        assert "worst" not in text(paint_device_panel(rows, 60, 40))

    def test_what_a_device_does_not_say_is_a_dash(self):
        silent = replace(device(0, None, "cuda"), power_w=None, power_limit_w=None, temperature_c=None)
        shown = text(paint_device_panel(lines_of([silent]), 60, 8))
        assert "power –" in shown
        assert "temp –" in shown
        assert "0 %" not in shown
        assert "power" not in text(paint_device_panel(lines_of([device(0, None)]), 60, 8)), "a host has none"

    def test_what_limits_a_gpu_stands_out(self):
        free = replace(device(0, 90.0, "cuda"), sm_clock_mhz=1980.0, max_sm_clock_mhz=1980.0, throttle_reasons=1)
        slow = replace(free, sm_clock_mhz=1200.0, throttle_reasons=0x48, ecc_errors=3)
        assert limits(free) == [("SM clock 1980 of 1980 MHz", "dim"), ("not throttled", "dim")]
        assert limits(slow)[1:] == [("throttled by heat", "warn"), ("ECC errors 3", "warn")]
        assert limits(device(0, 90.0, "cuda")) == []

    def test_what_a_host_lacks_stands_out(self):
        host = replace(device(0), steal=31.0, cgroup_throttled=0.0, swap_in_bytes_s=2.0e6, swap_out_bytes_s=0.0)
        host = replace(host, net_rx_errors_s=340.0, net_tx_errors_s=0.0, net_faulty="eth0\x1b[2J")
        assert dict(limits(host)) == {
            "stolen 31 %": "warn", "quota used up 0 %": "dim", "swap 1.9 MiB/s": "warn", "eth0[2J 340 errors/s": "warn",
        }  # fmt: skip
        assert "stolen 31 %" in text(paint_devices([DeviceCard(DeviceLine(host, "node1"), 1, None)], (80, 12), 0))
        assert limits(device(0)) == []

    def test_history_is_by_whole_seconds_so_that_a_chart_lasts_one(self):
        half_seconds = []
        for index in range(9):
            sample = device(0, 10.0 * index)
            sample.at_ns += index * 500_000_000
            half_seconds.append(sample)
        (row,) = lines_of(half_seconds)
        assert row.history == ((4, 5.0), (3, 25.0), (2, 45.0), (1, 65.0))

    def test_several_gpus_share_a_chart(self):
        rows = lines_of([device(s, 20.0 + 60 * i, "cuda", i) for s in range(3) for i in range(2)])
        assert mean_history(rows) == ((2, 50.0), (1, 50.0))

    def test_chart_has_axes_in_percent_and_seconds(self):
        lines = chart(((20, 10.0), (10, 90.0), (0, 50.0)), 40, 8)
        assert len(lines) == 8
        assert max(map(len, lines)) <= 40
        assert "100" in lines[0]
        assert {"-30 s", "now"} <= {lines[-1].strip()[:5], lines[-1].split()[-1]}

    def test_a_chart_is_made_once(self):
        rows = chart_rows(((20, 10.0), (0, 50.0)), 40, 8)
        assert chart_rows(((20, 10.0), (0, 50.0)), 40, 8) is rows
        assert {style for row in rows for _, style in row} == {"chart", "dim"}

    def test_meter(self):
        assert meter(25.0, 8) == [("━━", "chart"), ("━━━━━━", "faint")]
        assert meter(None, 3) == [("┄┄┄", "faint")]

    def test_nothing_sampled_yet(self):
        assert "no sample" in text(paint_device_panel((), 40, 5))


class TestHistoryAndSplit:
    def test_columns_grow_with_the_step_and_exposure_is_hatched(self):
        rows = paint_history([HistoryPoint(0, 100, 50, True), HistoryPoint(1, 50, 0, True)], GUTTER + 11, 5, shown=0)
        assert [row[-3] for row in (line.ljust(GUTTER + 11) for line in plain(rows)[1:])] == ["▾", "█", "╱", "╱"]
        assert [row[-2] for row in (line.ljust(GUTTER + 11) for line in plain(rows)[1:])] == [" ", " ", "█", "█"]

    def test_split_adds_up_to_the_step(self):
        rows = plain(paint_split(overview(run()).ranks, 60, 6))
        unseen = plain(paint_split(overview([hello(0, 1), *(step(0, n, data=None) for n in range(20))]).ranks, 60, 6))
        assert unseen[2].split()[:4] == ["0", "–", "2.0", "28.0"]
        narrow = plain(
            paint_split(overview(run()).ranks, 34, 6)
        )  # whole milliseconds where there is no room for tenths
        assert narrow[2].split() == ["0", "1.0", "1.0", "28", "49", "10", "4.0", "7.0"]
        assert rows[2].split() == ["0", "1.0", "1.0", "28.0", "49.0", "10.0", "4.0", "7.0"]


class TestLayout:
    @pytest.mark.parametrize("ranks", [0, 1, 2, 64, 1024])
    def test_boxes_stay_on_screen_and_apart(self, ranks):
        widths, heights = (0, 1, 5, 40, 80, 109, 110, 120, 200, 300), (0, 1, 3, 6, 10, 24, 36, 50, 100)
        for width, height in product(widths, heights):
            boxes = layout(width, height, ranks, (2 + 4 * ranks, 2 + 8 * ranks), 2 + 2 * ranks)
            drawn = [(name, getattr(boxes, name)) for name in boxes.__dataclass_fields__]
            drawn = [(name, box) for name, box in drawn if box.width > 0 and box.height > 0]
            for name, box in drawn:
                inside = box.x >= 0 and box.y >= 0 and box.x + box.width <= width and box.y + box.height <= height
                assert inside, (name, width, height)
            for (name, box), (other, beside) in combinations(drawn, 2):
                across = box.x < beside.x + beside.width and beside.x < box.x + box.width
                down = box.y < beside.y + beside.height and beside.y < box.y + box.height
                assert not (across and down), (name, other, width, height)

    def test_at_80x24_two_ranks_have_everything(self):
        boxes = layout(80, 19, 2, (8, 12), 6)  # two for the header, two for the verdict, one for the tabs
        assert boxes.lanes.height >= 8
        assert boxes.table.height == 3
        assert boxes.devices.height >= 6


@pytest.mark.parametrize("size", [(0, 0), (1, 1), (5, 3), (10, 5), (20, 8), (40, 12), (80, 24), (110, 9), (200, 50)])
@pytest.mark.parametrize("world", [1, 2, 64])
def test_every_size_is_painted_to_the_cell(size, world):
    model = overview([*run(6, world=world), device(0), device(1, 80.0, "cuda")])
    for first in (0, 3, 999):
        rows = page(model, *size, first)
        assert [sum(len(run_text) for run_text, _ in row) for row in rows] == [size[0]] * size[1]


@pytest.mark.parametrize("size", [(5, 3), (80, 24), (200, 50)])
def test_hostile_names_reach_no_cell(size):
    evil = "\x1b[2J\x07\r\n\u202ex\u200b\x9b" * 20
    names = dict.fromkeys(("run_id", "host", "backend", "torch", "module", "script", "timing_source"), evil)
    sample = device(0)
    sample.name = sample.host = evil
    death = bye(1, "exception", detail=evil, phase=evil)
    model = overview([hello(0, 2, **names), hello(1, 2, **names), step(0), step(1), sample, beat(0, 1, evil), death])
    for row in plain(page(model, *size)):
        assert row.isprintable()


def test_states_before_the_first_step():
    for link in (LinkState(Link.WAITING, directory="/run/x"), LinkState(Link.ATTACHING, name="run-1"), LIVE):
        for size in ((5, 3), (80, 24)):
            assert len(page(overview([], link), *size)) == size[1]
    why = Why("a process group of 2 ranks, and no optimizer has stepped so far", 40 * "word ")
    started = LinkState(Link.WAITING, job="torchrun train.py", why=why)
    drawn = text(page(overview([], started), 80, 24))
    assert all(part in drawn for part in ("nothing is watched yet", why.text, "torchrun train.py"))
    assert drawn.count("word") == 40  # wrapped, not cut
    waiting = overview([], LinkState(Link.WAITING, directory="/run/x"))
    assert "looking in /run/x" in text(page(waiting, 80, 24))
    assert "waiting for every rank's first step" in text(page(overview([hello(0)]), 80, 24))


def test_the_newest_step_with_timed_collectives_is_shown():
    model = overview([*run(30), *(light(rank, n) for n in range(30, 35) for rank in (0, 1))])
    assert model.newest_step == 34
    assert model.lanes.step == 29
    assert "step 34" in plain(paint_header(model, 120))[0]
    assert overview([hello(0), *(light(0, n) for n in range(20))]).lanes.step == 19


def test_the_step_shown_and_how_late_ranks_are_are_those_of_the_incident():
    """Beside a rank that was late by 26 ms stood the timeline of a step before, and 0.3 ms."""
    for fault, full, shown in ((30, 29, 49), (30, 44, 44), (50, 44, 44)):
        statuses = {number: "shadow" for number in range(30, 50) if number != full}
        steps = synchronous([(0, 40 * (n >= fault)) for n in range(50)], statuses=statuses)
        model = overview([hello(0), hello(1), *chain.from_iterable(steps)])
        assert model.lanes.step == shown
        late = [line.summary.late_ns for line in model.ranks]
        assert late == ([0, 40 * MS] if fault < 50 else [0, 0])
        assert model.ranks[0].summary.wait_ns == late[1]


def test_what_was_not_measured_is_not_drawn_as_nothing_exposed():
    model = overview([*run(30), *(light(rank, n) for n in range(30, 35) for rank in (0, 1))])
    rows = paint_history(model.history, 80, 6)
    assert "grey: not measured" in plain(rows)[0]
    assert {style for row in rows[1:] for text, style in row if text.strip()} >= {"history", "exposed", "faint"}


def test_the_history_works_a_step_out_once_per_rank_that_sends_it():
    state, history = state_of([*run(30), step(0, 30)]), StepHistory()
    before = history.points(list(state.steps.values()), 2)
    assert [point.complete for point in before] == [True] * 29 + [False]
    assert before[-2].overlap == pytest.approx(2 / 3)
    assert before[-1].overlap is None
    state.apply_message(step(1, 30), state.now_ns)
    after = history.points(list(state.steps.values()), 2)
    assert all(old is new for old, new in zip(before[:-1], after[:-1], strict=True))
    assert after[-1].complete


def test_frames_are_enveloped_in_order():
    assert [envelope.seq for _, envelope in enveloped([hello(0), step(0)])] == [1, 2]
