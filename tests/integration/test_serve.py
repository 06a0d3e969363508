"""The dashboard in a browser: it draws, takes keys, asks for nothing from elsewhere, and needs its token."""

from __future__ import annotations

import subprocess
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest

from tests.support import chromium
from tests.support.jobs import DDPWATCH, PATIENCE_S
from tests.support.runs import record, run_of

pytest.importorskip("textual_serve")
pytestmark = [
    pytest.mark.skipif(chromium.find() is None, reason="needs Chromium (apt install chromium)"),
    pytest.mark.same_everywhere,
]


def status(address: str) -> int:
    try:
        with urllib.request.urlopen(address, timeout=PATIENCE_S) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.seconds(10)
@pytest.mark.usefixtures("run_directory")
def test_the_dashboard_answers_to_keys_and_only_below_its_token(tmp_path: Path) -> None:
    file = record(tmp_path / "run.mcap", run_of(steps=30))
    command = [*DDPWATCH, "serve", str(file), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            scheme, _, host, token, _ = address.split("/")
            base = f"{scheme}//{host}"
            assert (host.split(":")[0], len(token)) == ("127.0.0.1", 32)
            assert status(address) == 200
            wrong = ("", "ws", "static/js/textual.js", f"{token[:-1]}/", f"{token[:-1]}/ws")
            assert [status(f"{base}/{path}") for path in wrong] == [404] * len(wrong)
            with chromium.Browser(tmp_path / "profile") as browser, chromium.Page(browser, address) as page:
                page.until_received(b"train-1")
                page.press("7")
                page.until_received(b"next list")
                assert {request[: len(address)] for request in page.requests} == {address}
                assert not [problem for problem in page.problems if "WebGL" not in problem]
                assert page.screenshot().startswith(b"\x89PNG")
                dashboards = psutil.Process(server.pid).children(recursive=True)
                assert dashboards
                server.terminate()
                assert psutil.wait_procs(dashboards, PATIENCE_S)[1] == []
        finally:
            server.terminate()
    assert server.returncode == 0
