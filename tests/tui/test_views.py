"""Every view and every key, by Pilot, on synthetic frames."""

import base64
import json
import re
from itertools import chain
from pathlib import Path

import msgspec
import pytest
from textual import events
from textual.command import CommandList

from ddpwatch.errors import UsageError
from ddpwatch.messages import Device, Hello, Mark, Node, Span, Step
from ddpwatch.tui.models.ranks import METRICS as RANK_METRICS
from ddpwatch.tui.screens import HELP, SIGNS, AskScreen, HelpScreen
from ddpwatch.tui.settings import Settings, load_settings
from ddpwatch.tui.views import VIEWS
from tests.support.dashboards import FakeJobs, ended_recording, live_app, replay_app, screen_text, until
from tests.support.frames import (
    MS,
    START_NS,
    beat,
    bye,
    device,
    hello,
    killed,
    run,
    shadow,
    step,
    synchronous,
    unwatched,
)

KEYS = {view.NAME: key for key, view in VIEWS.items()}


async def watching(pilot, messages):
    """Attaches to run-1 and applies all messages."""
    messages = list(messages)
    pilot.app.jobs.sources["run-1"].put(messages)
    await until(pilot, lambda: pilot.app.session.state.frames >= len(messages))


def app_on(**changes):
    jobs = FakeJobs("run-1")
    app = live_app(jobs, **changes)
    app.jobs = jobs
    return app


def body(app):
    """The lines between verdict and footer."""
    return "\n".join(screen_text(app).splitlines()[3:-1])


def whose(text):
    """A body without the words on what costs and shares are of: the run so far, or the recording."""
    return re.sub(r"of the (run so far|recording) *| {2,}", " ", text.replace("cost so far", "cost"))


class TestEveryView:
    @pytest.mark.parametrize("key", VIEWS)
    async def test_takes_every_key_and_every_size(self, key):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press(key)  # before the first frame
            await watching(pilot, [*run(12, world=3, late_rank=1), device(0), device(1, 70.0, "cuda")])
            await pilot.press("j", "k", "m", "v", "s", "o", "T", "pagedown")
            assert app.view is app.views.by_key[key]
            await pilot.press("enter", "j", "escape")
            for size in ((5, 3), (1, 1), (200, 50)):
                await pilot.resize_terminal(*size)
                await pilot.pause()
                assert len(screen_text(app).splitlines()) == size[1]

    @pytest.mark.parametrize("key", VIEWS)
    async def test_draws_an_unwatched_step(self, key):
        app = app_on()
        frames = [m for m in run(40) if not (isinstance(m, Step) and m.step % 4 == 3)]
        async with app.run_test(size=(120, 36)) as pilot:
            await watching(pilot, [*frames, *(unwatched(rank, n) for n in range(3, 40, 4) for rank in (0, 1))])
            await pilot.press(key, "space", "left", "left", "left", "left", "left", "m", "m", "m", "m", "m")
            app.session.select(27)
            await pilot.press("r", "r", "j", "enter")
            assert app.is_running

    @pytest.mark.parametrize("key", VIEWS)
    async def test_pause_freezes_it_and_the_stream_goes_on(self, key):
        app = app_on()
        async with app.run_test(size=(120, 36)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            await pilot.press(key, "space")
            await until(pilot, lambda: not app.view.pending)
            frozen = body(app)
            app.jobs.sources["run-1"].put([step(rank, n) for n in range(20, 60) for rank in (0, 1)])
            app.jobs.sources["run-1"].put([killed(1, 59)])
            await until(pilot, lambda: len(app.session.state.steps) == 60 and app.session.state.ends)
            assert body(app) == frozen
            await pilot.press("space")
            assert body(app) != frozen

    @pytest.mark.parametrize("key", VIEWS)
    async def test_a_replay_looks_the_same(self, key):
        messages = [*run(20, late_rank=1), device(0)]
        live, replayed = app_on(), replay_app(messages, every_ms=1)
        async with live.run_test(size=(120, 36)) as pilot:
            await watching(pilot, messages)
            await pilot.press(key)
            await until(pilot, lambda: not live.view.pending)
            live_body = body(live)
        async with replayed.run_test(size=(120, 36)) as pilot:
            await pilot.press("full_stop", key)
            await until(pilot, lambda: replayed.session.over)
            await until(pilot, lambda: replayed.session.whole.ready and not replayed.view.pending)
            assert whose(body(replayed)) == whose(live_body)

    @pytest.mark.parametrize("key", VIEWS)
    async def test_hostile_names_reach_no_cell(self, key):
        evil = "\x1b[2J\x07\r\n\u202ex\u200b\x9b模e\u0301" * 20
        names = dict.fromkeys(("run_id", "host", "backend", "torch", "module", "script", "timing_source"), evil)
        sample, death = device(0), bye(1, "exception", detail=evil, phase=evil)
        sample.name = sample.host = evil
        mark = Mark(rank=0, name=evil, start_ns=START_NS + 20 * MS)
        frames = [hello(0, 2, **names), hello(1, 2, **names), step(0), step(1), sample, mark, beat(0, 1, evil), death]
        app = app_on()
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, frames)
            for keys in ([key], ["enter"], ["A"]):
                await pilot.press(*keys)
                assert all(line.isprintable() for line in screen_text(app).splitlines())

    async def test_a_click_on_a_tab(self):
        app = app_on()
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, run(12))
            x = screen_text(app).splitlines()[-1].index("3 Buckets")
            await pilot.click(offset=(x + 2, 29))
            await until(pilot, lambda: app.view is app.views.buckets)

    @pytest.mark.parametrize("view", VIEWS.values())
    def test_the_help_page_fits_on_80_columns(self, view):
        lines = f"{HELP}{view.DEFINITIONS}\n{SIGNS}".splitlines()
        assert max(len(re.sub(r"\[/?b\]|\\", "", line)) for line in lines) <= 72

    async def test_help_is_about_the_view(self):
        app = app_on()
        async with app.run_test(size=(100, 40)) as pilot:
            for name in ("Overview", "Buckets", "Log"):
                await pilot.press(KEYS[name], "question_mark")
                assert isinstance(app.screen, HelpScreen)
                assert name in app.export_screenshot()
                await pilot.press("escape")


class TestTimeline:
    async def test_cursor_zoom_pan_and_measure(self):
        app = app_on()
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("2", "space")
            assert "rank 0 at 50.0 ms" in body(app)
            await pilot.press("m", "right", "right", "l", "shift+right")
            assert "measured 13.0 ms from 50.0 ms" in body(app)
            assert "rank 0 at 63.0 ms" in body(app)
            await pilot.press("plus", "plus")
            assert app.view.window.length_ns == 25 * MS
            await pilot.press("H")
            assert app.view.window.start_ns < 63 * MS - 12 * MS
            await pilot.press("0", "m", "j")
            assert not app.view.window.zoomed
            assert "measured" not in body(app)
            assert "rank 1 at" in body(app)

    async def test_jumps(self):
        late = [(80, 80), *([(0, 0)] * 17), (300, 300), *([(0, 0)] * 9)]
        messages = [*run(12), *chain.from_iterable(synchronous(late, 12, statuses={12: "aborted"}))]
        app = app_on()
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, messages)
            await pilot.press("2", "S")
            assert "step 30" in body(app)
            await pilot.press("N")
            assert "step 12 (aborted)" in body(app)
            await pilot.press("n")
            assert "step 30" in body(app)
            await pilot.press("g", "7", "enter")
            assert "step 7" in body(app)
            assert app.session.paused

    async def test_rolling_seconds(self):
        app = app_on()
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, run(60))
            await pilot.press("2", "r")
            assert "the last 3.0 s, steps 30–59" in body(app)
            await pilot.press("r")
            assert "the last" not in body(app)

    async def test_a_click_sets_the_cursor(self):
        app = app_on()
        async with app.run_test(size=(111, 30)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("2")
            await pilot.click(offset=(10 + 72, 10))
            assert "at 72.5 ms" in body(app)


class TestBuckets:
    async def test_sorted_by_any_column_and_drilled_into(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            await pilot.press("3")
            assert "bucket▼" in body(app)
            assert [row.index for row in app.view.rows()] == [0, 1]
            await pilot.press("s")
            assert [row.index for row in app.view.rows()] == [1, 0]
            await pilot.press("o")
            assert [row.index for row in app.view.rows()] == [0, 1]
            await pilot.press("down", "enter")
            assert "bucket 1: 4.0 MiB, 2 parameters" in body(app)
            fired = [line.split() for line in body(app).splitlines()[-25:] if line.strip().endswith((" a", " b"))]
            assert fired == [["0", "29.0", "1", "b"], ["1", "39.0", "0", "a"]]
            await pilot.press("escape")
            assert "bytes▼" in body(app)

    async def test_completions_are_those_of_full_steps_however_long_ago(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, [hello(0, world=1), step(0, 1), step(0, 2), *(shadow(0, n) for n in range(3, 90))])
            await pilot.press("3")
            assert [row.done is not None for row in app.view.rows()] == [True, True]


class TestRanks:
    async def test_every_figure_and_one_rank(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, [*run(20, world=4, late_rank=2), device(0), Mark(rank=2, name="save", start_ns=1)])
            await pilot.press("4")
            for metric in RANK_METRICS:
                assert metric.title in body(app)
                await pilot.press("m")
            assert "2◀" in body(app)
            await pilot.press("f", "enter")
            assert "rank 2 on node1, pid 4002: running" in body(app)
            assert "late 40.0 ms" in body(app)
            assert "◆ save" in body(app)
            assert "CPU 8 CPUs" in body(app)

    async def test_a_thousand_ranks_fit_in_groups_or_scroll(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(3, world=200))
            await pilot.press("4")
            assert "worst of 13 ranks a row" in body(app)
            assert "195–199" in body(app)
            await pilot.press("v", *["pagedown"] * 20)
            assert "199" in body(app)
            assert "lateness by rank and step" in body(app)

    async def test_lateness_says_that_it_has_waits_for_buffers_in_it(self):
        messages = list(run(12))
        for message in messages:
            if isinstance(message, Step):
                message.spans[:0] = [Span("forward", MS, MS), Span("sync", MS, 2 * MS)]
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, messages)
            await pilot.press("4")
            assert re.search(r"^ lateness with waits for buffers  0\.0 ms .* [\d.]+ ms", body(app), re.MULTILINE)
            await pilot.press("m")
            assert "buffers" not in body(app)

    async def test_before_the_first_step_a_view_says_that_there_is_none(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, [hello(0), hello(1)])
            for key in "248":
                await pilot.press(key)
                assert "no step" in body(app)

    async def test_one_rank_s_figures_fit_on_80_columns(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("4", "enter")
            assert "…" not in "\n".join(body(app).splitlines()[1:5])
            for name in ("drops 0", "data 1.0 ms", "exposed 10.0 ms", "optim 4.0 ms", "other "):
                assert name in body(app)

    async def test_many_hosts_are_rows_the_worst_first(self):
        """24 hosts of 2 ranks; rank 41, on host20, is late, and host03 is not connected."""
        app = app_on()
        async with app.run_test(size=(100, 20)) as pilot:
            await watching(pilot, [*on_hosts(run(20, world=48, late_rank=41), 2), unseen_node(3, [6, 7])])
            await pilot.press("4")
            assert re.match(r" host20 +40–41", first_row(app))
            assert "worst of 2 ranks a row" in body(app)
            assert re.search(r"host03 +6–7.* unseen", body(app))
            await pilot.press("v")
            assert re.match(r" host00–host02 +0–4", first_row(app))
            await pilot.press("v", "f")
            assert re.search(r"host20 +41◀", body(app))
            await pilot.press("v")
            assert re.search(r"^ 13 more +╵step", body(app), re.MULTILINE)
            await pilot.press("5", "v")
            assert re.search(r"^ +host +ranks .* 11 more $", body(app), re.MULTILINE)
            await pilot.press(*["down"] * 11)
            assert " more" not in body(app)

    async def test_ranks_of_few_hosts_have_rows_of_their_own(self):
        app = app_on()
        async with app.run_test(size=(100, 20)) as pilot:
            await watching(pilot, on_hosts(run(20, world=4), 2))
            await pilot.press("4")
            assert re.match(r" host00 +0 ", first_row(app))
            await pilot.resize_terminal(60, 20)
            await pilot.pause()
            assert re.match(r" +0 ", first_row(app))


class TestHostsOfOneName:
    """Two containers, both called "trainer", of two ranks each; the second one's agent is not connected."""

    async def shown(self, pilot):
        messages = [
            msgspec.structs.replace(message, host="trainer", boot_id=f"boot {message.rank // 2}")
            if isinstance(message, Hello)
            else message
            for message in run(20, world=4)
            if not isinstance(message, Device)
        ]
        messages += [
            msgspec.structs.replace(device(1, busy), host="trainer", boot_id=f"boot {host}", name="8 CPUs")
            for host, busy in enumerate((11.0, 77.0))
        ]
        gone = msgspec.structs.replace(unseen_node(1, [2, 3]), host="trainer")
        await watching(pilot, [*messages, gone])

    async def test_each_has_a_line_of_its_own_and_its_own_figures(self):
        app = app_on()
        async with app.run_test(size=(120, 30)) as pilot:
            await self.shown(pilot)
            await pilot.press("5", "v")
            assert re.search(r"trainer \(2,3\) +2,3 .*unseen", body(app))
            assert re.search(r"trainer \(0,1\) +0,1 .*11 %", body(app))

    async def test_every_view_says_which(self):
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await self.shown(pilot)
            assert re.search(r" 3 +trainer \(2,3\) ", body(app))
            assert re.search(r"CPU.* trainer \(0,1\) ", body(app))
            await pilot.press("4")
            assert re.search(r"trainer \(0,1\) +1 ", body(app))
            await pilot.press("5")
            assert "CPU 8 CPUs trainer (2,3)" in body(app)
            await pilot.press("7", "m")
            assert "host trainer is not connected: ranks 2, 3 unseen" in body(app)

    async def test_rows_of_hosts_are_theirs(self):
        app = app_on()
        async with app.run_test(size=(80, 10)) as pilot:
            await self.shown(pilot)
            await pilot.press("4")
            assert re.search(r"trainer \(2,3\) +2–3 ", body(app))
            assert re.search(r"trainer \(0,1\) +0–1 ", body(app))


def first_row(app):
    """The heatmap's first row, below the incidents."""
    rows = body(app).splitlines()
    return rows[next(y for y, row in enumerate(rows) if row.startswith(" incidents")) + 1]


def on_hosts(messages, per_host):
    """The same run, with so many ranks on each host."""

    def moved(message):
        host = f"host{message.rank // per_host:02d}" if isinstance(message, Hello) else ""
        return msgspec.structs.replace(message, host=host) if host else message

    return [moved(message) for message in messages]


def unseen_node(number, ranks):
    return Node(node=number, host=f"host{number:02d}", ranks=ranks, at_ns=0, seen_ns=0, connected=False)


class TestDevices:
    async def test_a_hosts_network_is_shown(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            host = msgspec.structs.replace(device(1), net_tx_bytes_s=12e6, net_rx_bytes_s=3e3)
            await watching(pilot, [*run(20), host])
            await pilot.press("5")
            assert "net ↑ 11.4 MiB/s ↓ 2.9 KiB/s" in body(app)

    async def test_with_more_than_fit_the_least_busy_come_first(self):
        app = app_on()
        async with app.run_test(size=(80, 15)) as pilot:
            busy = [device(0, 90.0 - 5 * (7 * index % 8), "cuda", index) for index in range(8)]
            await watching(pilot, [*run(20), *busy, device(0)])
            await pilot.press("5")
            assert "4 of 9 devices, 5 not shown" in body(app)
            assert re.findall(r"GPU\d|CPU", body(app)) == ["GPU1", "GPU2", "GPU3", "GPU4"]
            await pilot.press(*["down"] * 8)
            assert re.findall(r"▶?(?:GPU\d|CPU) ", body(app)) == ["GPU6 ", "GPU7 ", "GPU0 ", "▶CPU "]

    async def test_one_line_each_where_cards_of_all_do_not_fit(self):
        app = app_on()
        async with app.run_test(size=(80, 28)) as pilot:
            await watching(pilot, [*run(20), *(device(0, 90.0, "cuda", index) for index in range(8)), device(0)])
            await pilot.press("5")
            assert "not shown" not in body(app)
            lines = re.findall(r"^[▶ ](GPU\d|CPU) .* \d\d % .*mem .* GiB", body(app), re.MULTILINE)
            assert lines == [*(f"GPU{index}" for index in range(8)), "CPU"]
            assert re.search(r"^ CPU .* waiting 10 % ", body(app), re.MULTILINE)  # the ranks that are on it
            await pilot.press(*["down"] * 8)
            await pilot.resize_terminal(80, 70)
            await pilot.pause()
            assert re.findall(r"▶(GPU\d|CPU)", body(app)) == ["CPU"]
            assert body(app).count("\n busy ") == 9

    async def test_busy_that_is_only_waiting_is_seen(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, [*run(20, late_rank=1), device(0, 100.0), device(1, 99.0)])
            await pilot.press("5")
            assert "waiting 21 %" in body(app)  # of rank 0's step 36 %, of rank 1's 7 %
            assert "busy % over the last seconds" in body(app)


class TestLog:
    async def test_an_incident_starts_and_ends_and_leads_to_its_step(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            await pilot.press("7")
            assert re.search(r"● straggler +1 +backward b +1–", body(app))
            assert "watched steps 19" in body(app)
            hidden = list(synchronous([(0, 0)] * 110, 20, start_ms=20 * 140, comm_done=[60 * MS, 80 * MS]))
            app.jobs.sources["run-1"].put(chain.from_iterable(hidden[:70]), 10)
            await until(pilot, lambda: app.session.overview.verdict.kind != "straggler")
            app.jobs.sources["run-1"].put(chain.from_iterable(hidden[70:]), 50)
            await until(pilot, lambda: "✓ straggler" in body(app))
            assert "attached" not in body(app)
            assert re.search(r"straggler, over, steps 1–\d+: cost 0\.\d+ rank-s, \d\.\d % of the run", body(app))
            cost = re.search(r"cost (.* rank-s)", body(app))[1]  # its share falls as the run goes on
            await pilot.press("m")
            assert re.search(rf"step 19 +ended: rank 1 was late by 40 ms in each step: .*; cost {cost}", body(app))
            assert "cleared" not in body(app)
            assert len(re.findall("rank 1 (?:is|was) late", body(app).partition("attached")[2])) == 2  # start and end
            await pilot.press("m", "m", "enter")
            assert app.view is app.views.timeline
            assert app.session.paused
            assert "step 1 " in body(app)

    async def test_a_view_that_was_hidden_shows_the_step_chosen_meanwhile(self):
        app = app_on()
        async with app.run_test(size=(140, 30)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            await pilot.press("2", "space", "7", "m")
            app.view.chosen = 1
            await pilot.press("up")
            chosen = app.view.current.step
            await pilot.press("enter")
            assert chosen not in (None, 19)
            assert f"step {chosen}" in body(app)

    async def test_the_job_s_output(self, output_buffer):
        output_buffer.add(b"loss 3.2\n\x1b[31mloss 3.1\nunfinished")
        app = app_on(output=output_buffer)
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, run(3))
            await pilot.press("7", "m")
            await until(pilot, lambda: "loss 3.1" in body(app))
            assert "incidents 0   events and incidents 4   the job's output 3" in body(app)
            output_buffer.add(b" no more\n")
            await until(pilot, lambda: "unfinished no more" in body(app))
            await pilot.press("space")
            output_buffer.add(b"later\n")
            await until(pilot, lambda: "later" in app.session.output.lines[-1].text)
            assert "later" not in body(app)

    async def test_output_is_shown_before_the_run_starts_and_is_kept_then(self, output_buffer):
        output_buffer.add(b"downloading\n")
        jobs = FakeJobs()
        app = live_app(jobs, job="torchrun train.py", output=output_buffer)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: "torchrun train.py" in screen_text(app))
            await pilot.press("7")
            await until(pilot, lambda: "downloading" in screen_text(app))
            jobs.start("run-1").put(list(run(3)))
            await until(pilot, lambda: "rank 0 attached" in screen_text(app))
            await pilot.press("m")
            assert "downloading" in body(app)

    async def test_output_after_the_end_of_the_run(self, output_buffer):
        app = app_on(output=output_buffer)
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, [*run(3), bye(0), bye(1), bye()])
            await until(pilot, lambda: app.session.over)
            output_buffer.add(b"saved the model\n")
            await until(pilot, lambda: app.session.output.lines)


class TestEverywhere:
    async def test_filter(self):
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(12, world=8))
            await pilot.press("slash", *"2-3,7", "enter")
            assert "2-3,7: 3 shown" in screen_text(app)
            assert [row.rank for row in app.session.overview.ranks] == [2, 3, 7]
            await pilot.press("2")
            assert app.view.timeline().ranks == [2, 3, 7]
            await pilot.press("slash", *["backspace"] * 5, "enter")
            assert len(app.session.overview.ranks) == 8
            await pilot.press("slash", "x", "escape")
            assert not isinstance(app.screen, AskScreen)
            assert len(app.session.overview.ranks) == 8

    async def test_a_filter_that_selects_no_rank(self):
        app = app_on()
        async with app.run_test(size=(120, 40)) as pilot:
            await watching(pilot, run(12, world=2))
            await pilot.press("slash", *"99", "enter")
            for key in VIEWS:
                await pilot.press(key)
                app.view.scroll_ranks(1)
                assert "0 shown" in screen_text(app)

    async def test_follow_the_slowest_rank(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12, world=64, late_rank=50))
            assert re.search(r"^ +50◀ running", screen_text(app), re.MULTILINE)  # the worst comes first
            assert not re.search(r"^ +49 ", screen_text(app), re.MULTILINE)
            await pilot.press("f")
            assert re.search(r"^ +49 .*\n +50◀ running", screen_text(app), re.MULTILINE)
            await pilot.press("2")
            assert "rank 50 at" in body(app) or "r50 " in body(app)

    async def test_the_rank_that_the_verdict_names_is_in_sight_until_another_one_is_selected(self):
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12, world=64, late_rank=50))
            await pilot.press("2")
            assert "rank 50 at" in body(app)
            await pilot.press("4", "v", "enter")
            assert " rank 50 on node1" in body(app)
            await pilot.press("escape", "k", "enter")
            assert " rank 49 on node1" in body(app)
            await pilot.press("2")
            assert "rank 49 at" in body(app)

    async def test_copy_is_what_the_terminal_is_sent(self, monkeypatch):
        app = app_on()
        sent = []
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(20, late_rank=1))
            monkeypatch.setattr(app._driver, "write", sent.append)
            await pilot.press("y")
            await pilot.pause()
        copied = re.search(r"\x1b\]52;c;([A-Za-z0-9+/=]+)\a", "".join(sent))
        assert copied is not None
        assert base64.b64decode(copied[1]).decode().startswith("rank 1 is late by 40 ms in each step: its backward")

    async def test_a_picture_is_saved(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("P")
            (picture,) = tmp_path.glob("ddpwatch-run-1-*.svg")
            assert "<svg" in picture.read_text()

    async def test_the_step_shown_is_exported(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        app = app_on()
        async with app.run_test(size=(80, 24)) as pilot:
            await pilot.press("E")
            mark = Mark(rank=0, name="evaluate", start_ns=START_NS + 9 * 100 * MS + 20 * MS)
            await watching(pilot, [*run(12), mark])
            await pilot.press("left", "left", "E")
            await until(pilot, lambda: not app.workers)
            trace = json.loads((tmp_path / "ddpwatch-run-1-step9.json").read_text())
            await pilot.press("right", "E")
            await until(pilot, lambda: len(list(tmp_path.iterdir())) == 2 and not app.workers)
            assert "evaluate" not in (tmp_path / "ddpwatch-run-1-step10.json").read_text()
        names = {(event["pid"], event["name"]) for event in trace["traceEvents"] if event["ph"] != "M"}
        assert {(0, "step 9"), (1, "step 9"), (0, "bucket 1"), (0, "evaluate"), (1, "d")} <= names
        assert not any(event["name"] == "step 8" for event in trace["traceEvents"])

    @pytest.mark.parametrize("key", ["P", "E"])
    async def test_what_cannot_be_saved_is_one_line(self, key, monkeypatch):
        app = app_on()
        notices = []
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12))
            monkeypatch.setattr(app, "_file", lambda end: Path("/proc/none") / end)
            monkeypatch.setattr(app, "notify", lambda text, **_: notices.append(text))
            await pilot.press(key)
            await until(pilot, lambda: notices)
        assert notices == ["not saved: /proc/none: No such file or directory"]

    async def test_the_command_palette(self):
        app = app_on()
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("colon", *"view: ranks")
            found = app.screen.query_one(CommandList)
            await until(pilot, lambda: found.option_count and "Ranks" in str(found.get_option_at_index(0).prompt))
            await pilot.press("down", "enter")
            await until(pilot, lambda: app.view is app.views.ranks)

    async def test_ascii_draws_nothing_else(self):
        app = app_on(settings=Settings(theme="none", ascii=True))
        async with app.run_test(size=(140, 40)) as pilot:
            await watching(pilot, [*run(20, late_rank=1), device(0)])
            for key in VIEWS:
                await pilot.press(key)
                assert screen_text(app).isascii()

    async def test_the_wheel_and_a_click_select(self):
        app = app_on()
        async with app.run_test(size=(140, 40)) as pilot:
            await watching(pilot, run(20, world=4))
            await pilot.press("4")
            await pilot.click(offset=(30, 8))
            first = app.session.rank
            wheel = {"x": 5, "y": 10, "delta_x": 0, "button": 0, "shift": False, "meta": False, "ctrl": False}
            app.view.post_message(events.MouseScrollDown(app.view, delta_y=1, **wheel))
            await pilot.pause()
            assert app.session.rank == first + 1


class TestAfterTheRun:
    async def test_the_last_run_is_shown_until_one_starts(self, tmp_path):
        jobs, ended = FakeJobs(), ended_recording(tmp_path / "old-run.mcap", [*run(20), bye(0), bye(1), bye()])
        app = live_app(jobs, list_ended=lambda: [ended], wall=lambda: ended.stat().st_mtime + 190)
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: "LAST RUN, ended 3 min ago" in screen_text(app))
            await until(pilot, lambda: "step 19" in screen_text(app))
            assert app.view.stale
            await pilot.press("2", "left")
            jobs.start("run-1").put(list(run(12)))
            await until(pilot, lambda: " LIVE " in screen_text(app))
            assert "LAST RUN" not in screen_text(app)

    async def test_ended_runs_can_be_chosen(self, tmp_path):
        first = ended_recording(tmp_path / "first.mcap", [*run(20), killed(), bye(None, "killed")])
        jobs = FakeJobs("run-1")
        app = live_app(jobs, list_ended=lambda: [first])
        app.jobs = jobs
        async with app.run_test(size=(100, 30)) as pilot:
            await watching(pilot, run(12))
            await pilot.press("a", "down", "enter")
            await until(pilot, lambda: "LAST RUN, killed" in screen_text(app))
            await pilot.press("a", "enter")
            jobs.sources["run-1"].put(list(run(12)))
            await until(pilot, lambda: " LIVE " in screen_text(app))

    async def test_one_that_cannot_be_read_is_passed_over(self, tmp_path):
        broken = tmp_path / "broken.mcap"
        broken.write_bytes(b"nonsense")
        app = live_app(FakeJobs(), list_ended=lambda: [broken])
        async with app.run_test(size=(100, 30)) as pilot:
            await until(pilot, lambda: "looking in /run/ddpwatch" in screen_text(app))
            assert app.failure is None


class TestSettings:
    def test_defaults_where_there_is_no_file(self, tmp_path):
        assert load_settings(tmp_path / "none.toml") == Settings()

    def test_what_is_written_holds(self, tmp_path):
        path = tmp_path / "config.toml"
        path.write_text('theme = "light"\nascii = true\nview = "ranks"\nrepaint_hz = 4\n')
        assert load_settings(path) == Settings(theme="light", ascii=True, view="ranks", repaint_hz=4)

    @pytest.mark.parametrize("text", ['theme = "pink"', "repaint_hz = 1000", "colour = 1", "theme ="])
    def test_a_mistake_is_named(self, tmp_path, text):
        path = tmp_path / "config.toml"
        path.write_text(text)
        with pytest.raises(UsageError, match=r"config\.toml"):
            load_settings(path)

    def test_the_terminal_decides(self, monkeypatch):
        monkeypatch.delenv("COLORTERM", raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert Settings().resolved_theme() == "dark"
        monkeypatch.setenv("TERM", "linux")
        assert Settings().resolved_theme() == "ansi"
        monkeypatch.setenv("NO_COLOR", "1")
        assert Settings().resolved_theme() == "none"
        assert Settings().override("contrast", True) == Settings(theme="contrast", ascii=True)
        with pytest.raises(UsageError):
            Settings().override("pink", None)

    async def test_the_first_view(self):
        app = app_on(settings=Settings(theme="light", view="ranks"))
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12))
            assert "lateness by rank and step" in body(app)
