"""One verdict: what plain lines end with is what reports, and `ddpwatch run` at its end, say."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpwatch.launch import Launch
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.report.markdown import plain, render_markdown
from ddpwatch.report.text import render_report
from ddpwatch.run import rundir
from ddpwatch.viewer.plain import replay_lines
from ddpwatch.wire.messages import Status
from tests.support.dashboards import ended_recording
from tests.support.frames import bye, run


def test_the_verdict_is_the_same_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Status(at_ns=0, frames=1, bytes=1, recording="run.mcap", recording_bytes=1, recording_error="disk full")
    file = ended_recording(tmp_path / "a.last.mcap", [*run(60, late_rank=1), recorded])
    report = report_of(file)
    said = report.verdict.text
    assert said.startswith("rank 1 is late by 40 ms in each step")
    replay_lines(Recording(file))
    assert any(line.endswith(said) for line in capsys.readouterr().out.splitlines())
    assert f"verdict: {said}" in render_report(report)
    assert f"**Verdict**: {plain(said)}" in render_markdown(report)
    launch = Launch(["true"], None, {})
    launch.name = "a"
    monkeypatch.setattr(rundir, "last_views", lambda: [file])
    assert launch.verdicts() == [f"a: {said}"]
    assert launch.recordings() == ["the recording is not complete: disk full", "recorded: ddpwatch report run.mcap"]


def test_that_somebody_stopped_the_run_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It costs nothing, as what lists only count; the verdict is on how the run went."""
    ended = [bye(rank, "exception", detail="KeyboardInterrupt", step=60) for rank in (0, 1)]
    file = ended_recording(tmp_path / "a.last.mcap", [*run(60, late_rank=1), *ended])
    report, stopped = report_of(file), "stopped by Ctrl-C (KeyboardInterrupt) at step 60"
    assert report.verdict.text.startswith("rank 1 is late by 40 ms in each step")
    replay_lines(Recording(file))
    listed = capsys.readouterr().out.partition("\nincidents: ")[2]
    texts = [listed, render_report(report), render_markdown(report).replace("\\", "")]
    assert [text.count(stopped) for text in texts] == [1, 1, 1]
    assert f"[info] {stopped} · step 60\n" in render_report(report)
    launch = Launch(["true"], None, {})
    launch.name = "a"
    monkeypatch.setattr(rundir, "last_views", lambda: [file])
    assert launch.verdicts() == [f"a: {stopped}; {report.verdict.text}"]
