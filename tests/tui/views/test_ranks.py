"""The view of ranks and hosts, by Pilot."""

import re

import msgspec

from ddpwatch.tui.models.ranks import METRICS as RANK_METRICS
from ddpwatch.tui.models.ranks import HeatMaps
from ddpwatch.wire.messages import Device, Hello, Mark, Node, Span, Step
from tests.support.dashboards import app_on, body, watching
from tests.support.frames import MS, device, hello, run, state_of


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
            for name in ("data 1.0 ms", "exposed 10.0 ms", "optim 4.0 ms", "rest "):
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
            assert re.search(r"^ 14 more +╵step", body(app), re.MULTILINE)
            await pilot.press("5", "v")
            assert re.search(r"^ +host +ranks .* 12 more $", body(app), re.MULTILINE)
            await pilot.press(*["down"] * 12)
            assert not re.search(r"\d more", body(app))

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


def test_a_heatmap_of_other_ranks_keeps_no_cells_of_those_before():
    steps = list(state_of(run(5, world=4, late_rank=2)).steps.values())
    maps, late = HeatMaps(), RANK_METRICS[0]
    without, having = (maps.build(steps, late, groups) for groups in ([[0, 1], [3]], [[0, 2], [3]]))
    assert without.groups != having.groups
    assert max(without.columns[-1]) == 0
    assert having.columns[-1][0] == 40 * MS
