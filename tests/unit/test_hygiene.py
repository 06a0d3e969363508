"""Who imports what, proved in fresh interpreters."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAVY = ("torch", "textual", "plotext", "zmq", "mcap", "pynvml", "numpy")


LIGHT = ("import ddpwatch", "import ddpwatch.cli", "import ddpwatch.recording")
ANALYSIS = (
    "import ddpwatch.viewer.state, ddpwatch.analysis.report_builder",
    "import ddpwatch.report.text, ddpwatch.whatif.text", "import ddpwatch.whatif.answer",
)  # fmt: skip
READERS = (
    "import ddpwatch.report.build", "import ddpwatch.whatif.command", "from ddpwatch import open_recording",
    "import ddpwatch.export.writers, ddpwatch.report.files",
)  # fmt: skip


# What each folder beside the packages must not import: benchmarks stand on all others.
APART = {"tests": {"benchmarks"}, "demo": {"benchmarks", "tests"}, "trainer": {"benchmarks", "tests", "demo"}}


def imported_by(*statements: str) -> set[str]:
    """What these import together."""
    code = "\n".join(["import sys", *statements, f"print(*[name for name in {HEAVY!r} if name in sys.modules])"])
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    ("statements", "allowed"),
    [
        (LIGHT, set()),
        (ANALYSIS, {"numpy"}),
        (READERS, {"mcap", "zmq", "numpy"}),
        (("import ddpwatch.viewer.plain",), {"zmq", "numpy"}),
        (("import ddpwatch.collector.service",), {"zmq", "mcap"}),
        (("import ddpwatch.tui.app",), {"textual", "zmq", "plotext", "mcap", "numpy"}),
    ],
    ids=["light", "analysis", "readers", "plain", "collector", "dashboard"],
)
def test_imports_stay_light(statements: tuple[str, ...], allowed: set[str]) -> None:
    assert imported_by(*statements) <= allowed


def test_the_probe_never_meets_the_dashboard() -> None:
    found = imported_by("from ddpwatch import watch")
    assert "torch" in found
    assert not found & {"textual", "plotext", "mcap"}  # torch itself brings pynvml in, where there is one


def test_the_package_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "ddpwatch", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("ddpwatch ")


@pytest.mark.parametrize("folder", APART)
def test_folders_beside_the_package_import_one_way(folder: str) -> None:
    found = {(path, name) for path in (ROOT / folder).rglob("*.py") for name in folders_imported_by(path)}
    assert {(str(path), name) for path, name in found if name in APART[folder]} == set()


def folders_imported_by(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}
