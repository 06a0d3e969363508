"""What the views say of an HSDP job: what each collective does with which parameter group."""

import pytest

from tests.support.dashboards import FakeJobs, live_app, screen_text, until
from tests.support.sharded import BLOCKS, hsdp_run

LATE_BLOCK = BLOCKS // 2 + 1


@pytest.mark.parametrize("size", [(80, 24), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_timeline_and_table(size):
    """The late rank's replica waits in the reduce-scatter, the other one in the all-reduce."""
    jobs, messages = FakeJobs("run-1"), [*hsdp_run(20, 20)]
    jobs.sources["run-1"].put(messages)
    app = live_app(jobs)
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.session.state.frames == len(messages))
        timeline, table, detail = [await shown(app, pilot, keys) for keys in (("2",), ("3",), ("enter",))]
    assert f"group {LATE_BLOCK} all-reduce" in timeline  # at the cursor
    assert "waits for its parameter group" in timeline
    assert "bucket" not in timeline
    if size[0] == 200:
        assert f" {LATE_BLOCK} all-reduce " in comm_of(timeline, 0)
        assert f" {LATE_BLOCK} reduce-scatter " in comm_of(timeline, 2)
    assert "group▼" in table
    rows = [line.split()[:3] for line in table.splitlines() if line.lstrip()[:2] == f"{LATE_BLOCK} "]
    assert [row[1] for row in rows] == ["gather", "gather", "scatter", "reduce"]
    assert "group 0, all-gather: 1.0 MiB, 1 parameter, " in detail
    assert "in group  parameter" in detail
    assert "fired" not in detail  # FSDP2 has no hooks that say when a gradient was there


async def shown(app, pilot, keys):
    await pilot.press(*keys)
    await until(pilot, lambda: not app.view.pending)
    await pilot.pause()
    return screen_text(app)


def comm_of(screen, rank):
    """A rank's row of communication; the cursor may be in it."""
    lines = screen.splitlines()
    start = next(i for i, line in enumerate(lines) if line[1:].startswith(f"rank {rank}"))
    return next(line for line in lines[start:] if line.startswith(" comm")).replace("│", " ")
