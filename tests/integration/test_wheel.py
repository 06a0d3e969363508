"""What `pip install` brings: the package, and nothing that would collide with a user's own modules."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.jobs import ROOT


@pytest.mark.seconds(8)
def test_the_wheel_holds_ddpwatch_alone(tmp_path: Path) -> None:
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT)],
        check=True, timeout=300,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"ddpwatch"}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "ddpwatch").rglob("*") if path.is_file()}
    assert {name for name in names if name.startswith("ddpwatch/")} == {p for p in package if "__pycache__" not in p}
