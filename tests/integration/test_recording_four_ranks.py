"""A real run of four ranks: its trace is valid, and every way of looking at it gives the same figures."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpwatch import open_recording
from ddpwatch.analysis.step import PHASES
from ddpwatch.export.writers import export
from ddpwatch.recording.follow import follow_frames
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.whatif.command import answer, read_wire, recorded_in
from ddpwatch.whatif.scenarios import Change, recorded_limits
from ddpwatch.whatif.sweep import FEWEST_SIZES
from ddpwatch.whatif.wire import LARGE_BYTES
from ddpwatch.wire.messages import Step
from tests.support import chrome_trace
from tests.support.jobs import ROOT, SCRIPTS, Job, collector_pids, the_run, wait_for

pytestmark = [
    pytest.mark.same_everywhere,
    pytest.mark.xdist_group("recorded by four"),
    pytest.mark.seconds(12),
]  # one job for all
TRAIN = ROOT / "demo" / "train.py"
STEPS = 40


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four ranks, and what a viewer saw who only had the file while it grew."""
    folder = tmp_path_factory.mktemp("four")
    file = folder / "run.mcap"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(tmp_path_factory.mktemp("dw")))
        model = (
            "--model",
            "gpt:width=48,layers=2",
            "--bucket-cap-mb",
            "0.005",
        )  # eleven buckets at once
        options = (*model, "--steps", str(STEPS), "--record", str(file))
        with Job(TRAIN, *options, ranks=4, log=folder / "log") as job:
            info = the_run(job)
            wait_for(lambda: file.exists() and file.stat().st_size > 0, "the recording is there")
            followed = [message for message, _ in follow_frames(file)]
            assert job.wait() == 0, job.output()
        wait_for(lambda: not collector_pids(info.run_id), "the collector ends")
    assert followed == [message for message, _ in Recording(file)][: len(followed)]
    assert sum(isinstance(message, Step) for message in followed) == 4 * STEPS
    return file


def test_the_trace_is_valid(recorded: Path, tmp_path: Path) -> None:
    export(Recording(recorded), "chrome", tmp_path / "trace.json", Selection())
    chrome_trace.check(tmp_path / "trace.json", recorded)


def test_what_if_knows_the_buckets_and_reproduces_the_run(recorded: Path) -> None:
    """From the order in which gradients came and from their sizes follow the buckets that DDP really made."""
    found, notes = recorded_in(recorded)
    assert found.by_parameter, found.why_not
    assert not notes
    assert recorded_limits(found) is not None
    assert abs(answer(found, [Change(cap_mib=1.0)]).replayed.error) < 0.05


def test_a_sweep_writes_what_what_if_reads(recorded: Path, tmp_path: Path) -> None:
    file = tmp_path / "wire.json"
    options = ("-o", str(file), "--max-size", "1", "--seconds", "2")
    with Job(SCRIPTS / "sweep.py", *options, preload=["ddpwatch.whatif.sweep"], log=tmp_path / "log") as job:
        assert job.wait() == 0, job.output()
    wire = read_wire(file)
    assert (wire.backend, wire.world_size) == ("gloo", 2)
    assert set(wire.encode_ns_per_byte) == {"fp16", "bf16", "powersgd-1", "powersgd-2"}
    assert min(wire.encode_ns_per_byte.values()) > 0
    assert len(wire.sizes) >= FEWEST_SIZES  # on a slow machine, the largest ones do not fit into two seconds
    assert all((size.pair_ms is None) == (size.nbytes < LARGE_BYTES) for size in wire.sizes)
    found, _ = recorded_in(recorded)
    assert len(answer(found, [Change(cap_mib=1.0)], wire).scenarios) == 1


def test_tables_and_report_agree(recorded: Path) -> None:
    opened = open_recording(recorded)
    report = opened.metrics()
    rows = [row for row in opened.steps() if row.status in ("ok", "shadow")]
    assert report["steps"]["count"] == STEPS
    for rank in report["ranks"]:
        mine = sorted(row.step_ms for row in rows if row.rank == rank["rank"])
        assert mine[(len(mine) - 1) // 2] <= rank["step_ms_p50"] <= mine[len(mine) // 2]
    for row in rows:
        assert sum(getattr(row, f"{phase}_ms") for phase in PHASES) == pytest.approx(row.step_ms)
    assert opened.select(steps="3:5").columns("steps")["step"] == [3] * 4 + [4] * 4
