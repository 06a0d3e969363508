"""Fixtures for all tests: a private rendezvous directory, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import process_count


def pytest_configure(config: pytest.Config) -> None:
    """Counts the processes that the tests start."""
    process_count.pytest_configure(config)


@pytest.fixture
def run_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A rendezvous directory of the test's own, with a path short enough for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="dw-"))
    monkeypatch.setenv("DDPWATCH_DIR", str(path))
    monkeypatch.setenv("XDG_STATE_HOME", str(path / "state"))
    yield path
    for info in path.rglob("*.json"):  # of runs whose collectors were killed
        for kind in ("box*", "lease"):
            for page in Path(f"/dev/shm/ddpwatch-{os.getuid()}").glob(f"{info.stem}.{kind}"):
                page.unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)
