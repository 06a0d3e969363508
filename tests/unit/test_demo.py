"""The main demo: Ctrl-C ends it without a traceback, and what it installs is what it runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.support.jobs import ROOT, wait_for

TORCHRUN = """#!/bin/sh
trap 'touch ending' TERM
touch started
until [ -e over ]; do sleep 0.05; done
"""


def test_ctrl_c_while_the_training_ends(tmp_path: Path) -> None:
    """A dashboard that is left at once, and a training that takes its time."""
    for name, text in {
        "ddpwatch": "#!/bin/sh\nuntil [ -e started ]; do sleep 0.05; done\n",
        "torchrun": TORCHRUN,
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    ours, its = os.openpty()
    script = "import sys, runpy; sys.executable = sys.argv[2]; runpy.run_path(sys.argv[1], run_name='__main__')"
    command = [sys.executable, "-c", script, str(ROOT / "demo" / "main_job.py"), str(tmp_path / "python")]
    demo = subprocess.Popen(
        ["setsid", "--ctty", *command], stdin=its, stdout=its, stderr=subprocess.PIPE, cwd=tmp_path, text=True
    )
    os.close(its)
    try:
        wait_for((tmp_path / "ending").exists, "the training is told to end")
        os.write(ours, b"\x03")
        _, errors = demo.communicate()
    finally:
        (tmp_path / "over").touch()
        os.close(ours)
    assert (demo.returncode, errors) == (130, "")


def test_the_demo_installs_no_framework() -> None:
    done = subprocess.run(["make", "--dry-run", "--always-make", "demo"], cwd=ROOT, capture_output=True, text=True)
    (installed,) = re.findall(r"pip install (.*--editable.*)", done.stdout)
    assert "--group" not in installed
    assert "--quiet" not in installed  # minutes without a word look like a hang
