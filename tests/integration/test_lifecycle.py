"""Collectors that come and go on one host: who may remove what, who may take whose place, and how they end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch.probe.collector_process import CollectorProcess
from ddpwatch.recording.part import Part
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.run import rundir
from ddpwatch.wire.messages import Bye, Step
from tests.integration.test_collector import Stage, step
from tests.support.fork_server import ADDRESS, server_address
from tests.support.jobs import (
    DDPWATCH,
    PATIENCE_S,
    ROOT,
    SCRIPTS,
    Job,
    ddpwatch,
    finished,
    forked_command,
    live,
    messages,
    read_until,
    running,
    wait_for,
)

TRAIN = ROOT / "demo" / "train.py"
NAMESPACE = ["unshare", "--pid", "--fork", "--mount-proc"]


@pytest.fixture
def stage(run_directory: Path, tmp_path: Path) -> Iterator[Stage]:
    stage = Stage(tmp_path / "run.mcap")
    stage.send(stage.hello(), step(1))
    wait_for(rundir.live_runs, "the run is listed")
    yield stage
    stage.close()


def test_a_viewer_in_another_pid_namespace_does_not_delete_a_live_run(stage: Stage, run_directory: Path) -> None:
    if subprocess.run([*NAMESPACE, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs the right to create a pid namespace")
    listed = finished(*NAMESPACE, *DDPWATCH, "ls")
    assert stage.run_id in listed.stdout
    assert (run_directory / f"{stage.run_id}.json").exists()
    assert (run_directory / f"{stage.run_id}.pub").exists()
    stage.finish()
    assert list(run_directory.glob("*.json")) == []


@pytest.mark.seconds(15)
@pytest.mark.usefixtures("run_directory")
def test_two_jobs_with_one_name_do_not_harm_each_other(tmp_path: Path) -> None:
    """As two torchruns below one `ddpwatch run --record`: both are watched to their end, each in its recording."""
    options = ["--model", "mlp:width=64", "--data", "digits", "--watch", "--inject", "slow-forward:ms=20"]
    endless = [*options, "--record", str(tmp_path / "run.mcap"), "--steps", "100000"]

    def job(name: str) -> Job:
        return Job(TRAIN, *endless, ranks=1, log=tmp_path / name, DDPWATCH_RUN="train-120000-abcd")

    with job("first") as first, job("second") as second:
        wait_for(lambda: len(rundir.live_runs()) == 2, "both are live")
        for info in rundir.live_runs():
            with live(info) as viewer:
                read_until(viewer, lambda frames: len(messages(frames, Step)) >= 20, "its steps")
        for one in (first, second):
            one.ranks()[0].terminate()
            assert one.wait() == 0, one.output()
    wait_for(lambda: not rundir.live_runs(), "both collectors end")
    done = [int(one.output().split("stopped as asked after step ")[1].split()[0]) for one in (first, second)]
    steps = [len(messages(list(Recording(file)), Step)) for file in tmp_path.glob("run*.mcap")]
    assert sorted(steps) == sorted(done)
    assert sorted(one.output().count("run.mcap exists") for one in (first, second)) == [0, 1]


def test_a_job_that_cannot_be_watched_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", "/proc/no-such-directory")
    with Job(SCRIPTS / "unwatchable.py", log=tmp_path / "log") as job:
        assert job.wait() == 0, job.output()
    assert job.output().count("training goes on") == 1, job.output()
    assert len(job.output().splitlines()) == 1, job.output()


def test_the_jobs_directory_is_not_on_the_collectors_path(
    run_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A `zmq.py` or `logging.py` next to a training script is none of the collector's business."""
    for name in ("zmq", "msgspec", "logging"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('imported {name}.py of the job')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.setattr(sys, "argv", ["-c"])  # a script's name as `python -c` has it, and no option
    collector = CollectorProcess("train-1", 1, None)
    wait_for(collector.is_ready, "the collector is ready")
    (info,) = rundir.live_runs()
    collector.leave()
    os.kill(info.pid, signal.SIGKILL)
    assert "of the job" not in rundir.log("train-1").read_text()


AUTOGROUP = Path("/proc/self/autogroup")


@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel does not group processes by session")
@pytest.mark.parametrize(("leads", "niceness"), [(True, 10), (False, 0)])
@pytest.mark.usefixtures("run_directory")
def test_a_collector_steps_back_but_not_with_a_session_that_others_are_in(leads: bool, niceness: int) -> None:
    start = f"import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:], start_new_session={leads}))"
    collector = [sys.executable, "-m", "ddpwatch.collector", "--run-id=one", "--world-size=1"]
    with running(sys.executable, "-c", start, *collector, f"--watch-pid={os.getpid()}") as parent:
        wait_for(rundir.live_runs, "the collector is up")
        (info,) = rundir.live_runs()
        groups = [Path(f"/proc/{pid}/autogroup").read_text().split()[-1] for pid in (info.pid, parent.pid)]
        os.kill(info.pid, signal.SIGTERM)
        assert parent.wait(PATIENCE_S) == 0
    assert groups == [str(niceness), "0"]


@pytest.mark.usefixtures("run_directory")
def test_a_signal_that_comes_with_the_announcement_of_the_run_ends_it_properly() -> None:
    program = (
        "import os; from ddpwatch.run import rundir; from ddpwatch.collector.__main__ import main\n"
        "publish = rundir.publish\n"
        "rundir.publish = lambda *run: (publish(*run), os.kill(os.getpid(), 15)); main()"
    )
    options = ("--run-id=one", "--world-size=1", f"--watch-pid={os.getpid()}")
    done = finished(sys.executable, "-c", program, *options)
    assert done.returncode == 0, done
    assert not rundir.live_runs()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_collector_that_is_ended_by_a_signal_says_goodbye_and_closes_its_recording(
    stage: Stage, tmp_path: Path, run_directory: Path, number: signal.Signals
) -> None:
    with live(stage.info) as viewer:
        read_until(viewer, lambda frames: messages(frames, Step), "the step")
        stage.process.send_signal(number)
        frames = read_until(viewer, lambda frames: messages(frames, Bye), "the run's goodbye")
        assert stage.process.wait(PATIENCE_S) == 0
    (bye,) = messages(frames, Bye)
    assert (bye.rank, bye.by, bye.reason, bye.detail) == (
        None,
        "collector",
        "killed",
        f"the collector got {number.name}",
    )
    part = Part(tmp_path / "run.mcap")
    assert part.index.complete
    assert part.end
    assert bye in [message for message, _ in Recording(tmp_path / "run.mcap")]
    assert {path.suffix for path in run_directory.iterdir()} <= {".mcap", ".log"}


def test_a_signal_to_the_whole_job_keeps_the_goodbyes_of_its_ranks(stage: Stage, tmp_path: Path) -> None:
    """As scancel sends it: the ranks have just died, and nobody has reaped them."""
    with subprocess.Popen(["sleep", "100"]) as rank:
        hello = stage.hello(0)
        hello.pid = rank.pid
        with live(stage.info) as viewer:
            stage.send(hello, step(2))
            read_until(viewer, lambda frames: len(messages(frames, Step)) == 2, "the second step")
        rank.terminate()
        os.waitid(os.P_PID, rank.pid, os.WEXITED | os.WNOWAIT)
        stage.process.send_signal(signal.SIGTERM)
        assert stage.process.wait(PATIENCE_S) == 0
    recorded = [message for message, _ in Recording(tmp_path / "run.mcap")]
    assert [(bye.rank, bye.detail) for bye in recorded if isinstance(bye, Bye)] == [
        (0, "SIGTERM"),
        (None, "the collector got SIGTERM"),
    ]


@pytest.mark.usefixtures("run_directory")
def test_a_job_whose_ranks_record_by_themselves_is_reported_with_its_files(tmp_path: Path) -> None:
    """Also on the nodes of other ranks than 0, whose `ddpwatch run` gave the run another name."""
    folder = tmp_path / "files"
    (folder / "of-another-job").mkdir(parents=True)
    RecordingWriter(folder / "of-another-job" / "rank00000.mcap").close()
    script = forked_command(
        0, None, SCRIPTS / "unmodified" / "spawned.py", str(tmp_path / "store"), "--fork", tears_down=True
    )
    environment = {"DDPWATCH_RECORD_DIR": str(folder), ADDRESS: server_address()}
    done = ddpwatch("run", "--headless", "--", *script, **environment)
    assert done.returncode == 0, done.stderr
    assert "nothing was watched" not in done.stderr
    (run,) = [path for path in folder.iterdir() if path.name != "of-another-job"]
    assert f"ddpwatch: 2 ranks recorded to {run}: rank00000.mcap, rank00001.mcap\n" in done.stderr
    assert done.stderr.endswith(f"ddpwatch: recorded: ddpwatch report {run}\n")
    for rank in (0, 1):  # to the end, although multiprocessing ends a process that it has forked without atexit
        kept = [message for message, _ in Recording(run / f"rank{rank:05}.mcap")]
        assert [m.step for m in messages([(m, None) for m in kept], Step)] == list(range(12))
        assert [m.reason for m in kept if isinstance(m, Bye)] == ["finished"]
    assert "of-another-job" not in done.stderr
