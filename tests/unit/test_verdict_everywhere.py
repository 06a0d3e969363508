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
from tests.support.dashboards import ended_recording
from tests.support.frames import run


def test_the_verdict_is_the_same_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = ended_recording(tmp_path / "a.last.mcap", list(run(60, late_rank=1)))
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
