"""Fixtures for all tests: a private rendezvous directory, and nothing left behind."""

from __future__ import annotations

import fcntl
import gc
import os
import shlex
import shutil
import tempfile
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.support import process_count
from tests.support.fork_server import TESTS, ForkServer, close_the_server, heed_signals
from tests.support.jobs import forked_command

ID_LENGTH = 100
hypothesis.settings.register_profile("no limit of time: a loaded machine takes long", deadline=None)
hypothesis.settings.load_profile("no limit of time: a loaded machine takes long")


def pytest_addoption(parser: pytest.Parser) -> None:
    """An option for those that run all tests."""
    parser.addoption("--fork-workers", action="store_true", help="fork workers from one process: they share imports")


def pytest_configure(config: pytest.Config) -> None:
    """Counts the processes that the tests start. The workers of pytest-xdist share one fork server."""
    heed_signals()
    process_count.pytest_configure(config)
    if config.getoption("numprocesses", None):
        server = ForkServer()
        server.start_for_workers()
        config.add_cleanup(server.close)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Each worker would import torch, textual and all of ddpwatch by itself."""
    if config.getoption("fork_workers"):
        for spec in specs:
            spec.python = shlex.join(forked_command(0, None, "tests.support.xdist_worker", preload=TESTS))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Long texts and bytes are cut in a test's id, which goes with every message between pytest-xdist's processes."""
    if isinstance(val, (str, bytes)) and len(val) > ID_LENGTH:
        return f"{val[:ID_LENGTH]!r}..."
    return None


def seconds(item: pytest.Item) -> float:
    """About how long a test takes, if that is long."""
    mark = item.get_closest_marker("seconds")
    return 0.0 if mark is None else mark.args[0]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest tests start first, lest one be left at the end. Only tests with jobs run once more if they fail.

    The others of a module run in one process: so what they share is made once, not four times.
    """
    items.sort(key=seconds, reverse=True)
    for item in items:
        if "integration" not in item.path.parts:
            item.add_marker(pytest.mark.flaky(reruns=0))
            if not seconds(item):
                item.add_marker(pytest.mark.xdist_group(item.path.stem))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Builds the module's fixtures again for a rerun: something may have disturbed the first job."""
    if isinstance(item, pytest.Function) and getattr(item, "execution_count", 1) > 1:
        for fixtures in item._fixtureinfo.name2fixturedefs.values():
            for fixture in fixtures:
                if fixture.scope == "module":
                    fixture.finish(item._request)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector: pytest.Collector) -> Generator[None, Any, Any]:
    """In a fresh clone, the worker that comes first rewrites a module's asserts; the others load its bytecode."""
    if not isinstance(collector, pytest.Module):
        return (yield)
    with collector.path.open() as module:
        fcntl.flock(module, fcntl.LOCK_EX)
        return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """What is imported and collected lives to the end: the garbage collector need not look at it.

    With Python's own thresholds it takes a sixth of the dashboard's tests.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(20_000, 20, 20)
        gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _no_server_is_left() -> Iterator[None]:
    yield
    close_the_server()


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
