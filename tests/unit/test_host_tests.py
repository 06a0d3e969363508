"""Tests that simulate hosts are skipped only where that is not possible."""

from __future__ import annotations

import os
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.support.fork_server import ROOT
from tests.support.hosts import REQUIRED, skip


def test_a_test_is_skipped_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(REQUIRED, raising=False)
    with pytest.raises(pytest.skip.Exception, match="no right"):
        skip("no right")


def test_it_fails_where_it_has_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUIRED, "required")
    with pytest.raises(pytest.fail.Exception, match="no right, though namespaces work here"):
        skip("no right")


@pytest.mark.parametrize("works", [True, False])
def test_ci_finds_out_whether_they_have_to_run(works: bool, tmp_path: Path) -> None:
    for name, text in {"unshare": "exit 0" if works else "exit 1", "make": f"echo $1: ${REQUIRED}"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != REQUIRED}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    done = subprocess.run([ROOT / ".ci" / "run"], env=environment, capture_output=True, text=True, check=True)
    ran = Counter(done.stdout.splitlines())
    suffix = " required" if works else ""
    assert ran[f"check:{suffix}"] == ran[f"test:{suffix}"] == 1
    assert ran[f"compat-install:{suffix}"] == ran[f"compat:{suffix}"] == 2
    assert ran.total() == 6
    assert ("will be skipped" in done.stderr) is not works


@pytest.mark.parametrize("required", ["", "required"])
def test_a_python_that_is_missing_is_one_line_and_fails_where_it_has_to_be_there(required: str) -> None:
    command = [ROOT / ".ci" / "compat", "2.15.0", "python3.99", "-m", "pytest"]
    done = subprocess.run(command, env={**os.environ, "COMPAT_TESTS": required}, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("", int(bool(required)))
    assert done.stderr == "not tested with torch 2.15.0: no python3.99 here that can make a virtual environment\n"
