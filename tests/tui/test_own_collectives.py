"""What the views say of jobs that issue their collectives themselves."""

import msgspec
import pytest

from ddpwatch.wire.messages import Mark
from tests.support.dashboards import FakeJobs, live_app, screen_text, until
from tests.support.frames import START_NS, hello, light
from tests.support.own_collectives import experts, mesh, pipeline


async def screens(messages, size, *keys):
    """The views of these keys, and the header."""
    jobs, messages = FakeJobs("run-1"), [*messages]
    jobs.sources["run-1"].put(messages)
    app = live_app(jobs)
    found = []
    async with app.run_test(size=size) as pilot:
        await until(pilot, lambda: app.session.state.frames == len(messages))
        for key in keys:
            await pilot.press(key)
            await until(pilot, lambda: not app.view.pending)
            await pilot.pause()
            found.append(screen_text(app))
    return found


@pytest.mark.parametrize("size", [(80, 24), (200, 50)], ids=lambda size: f"{size[0]}x{size[1]}")
async def test_each_role_has_a_lane_and_the_slow_rank_a_name(size):
    timeline, table = await screens(mesh(), size, "2", "3")
    assert "dp 2 × tp 2" in timeline.splitlines()[0]
    assert "waits for rank 3" in timeline
    lanes = [line[1:10].strip() for line in timeline.splitlines() if line.startswith((" dp 2 ", " tp 2 "))]
    assert len(lanes) >= 6
    assert lanes[:4] == ["dp 2", "tp 2"] * 2  # as a mesh has them
    rows = [line.split() for line in table.splitlines() if ".py:" in line][-3:-1]
    assert {(row[0], row[1], " ".join(row[2:4])) for row in rows} >= {("layers.py:12", "all-reduce", "tp 2")}
    assert "3 100%" in table


async def test_the_costliest_comes_first_until_another_column_is_chosen():
    table, by_next = await screens(experts(), (200, 50), "3", "s")
    names = [line.split()[0] for line in table.splitlines() if line.lstrip().startswith(("moe.py", "train.py"))]
    assert names[:2] == ["moe.py:35", "train.py:88"]
    assert "exposed ms▼" in table
    assert "busbw GB/s▼" in by_next
    assert "moe.py:35, all-to-all in ep 2, 1 a step   20 steps" in table


async def test_what_is_not_known_is_a_dash():
    (table,) = await screens(pipeline(), (200, 50), "3")
    rows = [line.split() for line in table.splitlines() if "schedules" in line][:2]
    assert {row[2] for row in rows} == {"send", "receive"}
    assert all(row.count("–") == 5 for row in rows)  # wait, transfer, exposed, busbw, who is last


async def test_collectives_that_cannot_be_seen_are_not_said_to_be_none():
    why = "to see them takes Python 3.12 or torch 2.14"
    off = [Mark(rank=rank, name=f"ddpwatch watches: {why}", start_ns=START_NS, off="collectives") for rank in (0, 1)]
    steps = [light(rank, number) for number in range(20) for rank in (0, 1)]
    columns = ("comm_label", "comm_module", "comm_bytes", "comm_ready", "comm_launch", "comm_done")
    none: dict[str, list[int]] = {column: [] for column in columns}
    unseen = [msgspec.structs.replace(step, **none) for step in steps]
    (table,) = await screens([hello(0), hello(1), *off, *unseen], (120, 36), "3")
    assert "collectives not seen" in table.splitlines()[0]
    assert f"are not seen: {why}" in table
    assert "no collective in" not in table
