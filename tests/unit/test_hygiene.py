"""Who imports what, proved in fresh interpreters."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "textual", "plotext", "zmq", "mcap", "pynvml", "numpy")


def imported_by(statement: str) -> set[str]:
    code = f"import sys\n{statement}\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statement", "allowed"),
    [
        ("import ddpwatch", set()),
        ("import ddpwatch.cli", set()),
        ("import ddpwatch.state, ddpwatch.analysis.report_figures, ddpwatch.report.text", set()),
        ("import ddpwatch.report.build", {"mcap"}),
        ("import ddpwatch.analysis.whatif.answer, ddpwatch.report.whatif_text", set()),
        ("import ddpwatch.report.whatif", {"mcap"}),
        ("import ddpwatch.recording", set()),
        ("from ddpwatch.recording import open_recording", {"mcap"}),
        ("import ddpwatch.export.writers, ddpwatch.report.files", {"mcap"}),
        ("import ddpwatch.plain", {"zmq"}),
        ("import ddpwatch.collector.service", {"zmq", "mcap"}),
        ("import ddpwatch.tui.app", {"textual", "zmq", "plotext", "mcap"}),
    ],
)
def test_imports_stay_light(statement: str, allowed: set[str]) -> None:
    assert imported_by(statement) <= allowed | ({"zmq"} if "mcap" in allowed else set())


def test_the_probe_never_meets_the_dashboard() -> None:
    found = imported_by("from ddpwatch import watch")
    assert "torch" in found
    assert not found & {"textual", "plotext", "mcap"}  # torch itself brings pynvml in, where there is one


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "ddpwatch", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ddpwatch ")
