"""What an agent may ask: answers are those of reports, short, typed, in time; errors are one line."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import anyio.to_thread
import jsonschema
import pytest
from mcp import Client

from ddpwatch.analysis.diagnosis.incident_json import Figures
from ddpwatch.cli import main
from ddpwatch.mcp import runs, server
from ddpwatch.mcp.server import make_server
from ddpwatch.mcp.tools import MOST, MOST_POINTS, TOOLS
from ddpwatch.report.build import report_of
from tests.support.frames import run
from tests.support.runs import BEGIN, MS, record, run_of

pytestmark = [pytest.mark.same_everywhere, pytest.mark.usefixtures("run_directory")]
SHORT = 16_000  # characters


async def called(name: str, /, *folders: Path, **arguments: object) -> Any:
    async with Client(make_server(folders)) as client:
        return await client.call_tool(name, arguments)


async def asked(name: str, /, **arguments: object) -> dict[str, Any]:
    """The answer, which is short, as text and as data."""
    result = await called(name, **arguments)
    (content,) = result.content
    assert not result.is_error, content.text
    assert len(content.text) <= SHORT
    assert json.loads(content.text) == result.structured_content
    return dict(result.structured_content)


async def refused(name: str, /, **arguments: object) -> str:
    """What an agent reads if there is no answer."""
    result = await called(name, **arguments)
    (content,) = result.content
    assert result.is_error
    assert "\n" not in content.text
    assert "; hint: " in content.text
    return str(content.text)


def recorded(path: Path, steps: int = 200) -> str:
    """A recording of two ranks, of which one is late."""
    return str(record(path, ((one, BEGIN + 50 * MS * at) for at, one in enumerate(run(steps, late_rank=1)))))


@pytest.fixture
def late(tmp_path: Path) -> str:
    return recorded(tmp_path / "late.mcap")


async def test_every_tool_only_reads_and_says_what_it_takes_and_gives() -> None:
    async with Client(make_server([])) as client:
        tools = (await client.list_tools()).tools
    assert [tool.name for tool in tools] == [function.__name__ for function in TOOLS]
    for tool in tools:
        assert tool.description
        assert tool.annotations
        assert tool.annotations.read_only_hint
        for schema in (tool.input_schema, tool.output_schema):
            assert schema is not None
            assert schema["type"] == "object"
            jsonschema.Draft202012Validator.check_schema(schema)
        assert all("description" in field for field in tool.input_schema["properties"].values()), tool.name


async def test_answers_are_those_of_the_report(late: str) -> None:
    report = json.loads(json.dumps(report_of(late).as_json()))
    found = await asked("summary", run=late)
    for key in ("verdict", "run", "steps", "phases_ms", "overlap", "cost"):
        assert found[key] == report[key], key
    assert found["lost_share"] == report["lost"]["lost_share"]
    assert found["latest_ranks"][0] == report["ranks"][1]
    assert found["source"] == {
        "run": late, "kind": "recording", "id": report["run"]["id"], "ranks": 2, "steps": 200, "notes": [],
    }  # fmt: skip
    assert (await asked("incidents", run=late))["incidents"] == report["incidents"]
    lost = await asked("lost_time", run=late)
    assert (lost["accounts"], lost["left_out"]) == (report["lost"]["accounts"][:MOST], 0)
    assert lost["unit"]


async def test_a_part_of_a_recording(late: str) -> None:
    found = await asked("summary", run=late, steps="50:100", ranks="1")
    assert (found["source"]["steps"], [row["rank"] for row in found["latest_ranks"]]) == (50, [1])
    assert "it has none of the selected steps" in await refused("summary", run=late, steps="900:")
    assert "'x'" in await refused("summary", run=late, steps="x")


async def test_a_timeline_is_short_and_of_one_step_says_what_each_rank_did(late: str) -> None:
    found = await asked("step_timeline", run=late)
    assert 1 < len(found["points"]) < MOST_POINTS
    assert found["ranks"] == []
    single = await asked("step_timeline", run=late, steps="120:121")
    assert [point["step"] for point in single["points"]] == [120]
    assert {row["rank"] for row in single["ranks"]} == {0, 1}


async def test_recordings_are_compared(tmp_path: Path) -> None:
    a, b = (str(record(tmp_path / f"{name}.mcap", run_of(steps=60))) for name in "ab")
    found = await asked("compare", a=a, b=b)
    assert (found["verdict"], found["ratio"]) == ("same", 0.0)
    assert "is no recording; hint: record it first" in await refused("compare", a=a, b="train-120000-abcd")


async def test_what_if(tmp_path: Path) -> None:
    file = str(record(tmp_path / "run.mcap", run_of(steps=60)))
    found = await asked("whatif", run=file, links="2")
    assert [one["change"] for one in found["scenarios"]] == ["a link 2 times as fast"]
    assert "--link x is not a list of numbers" in await refused("whatif", run=file, links="x")


async def test_recordings_are_listed(tmp_path: Path, late: str) -> None:
    (tmp_path / "ranks").mkdir()
    recorded(tmp_path / "late.0000.mcap", 3)  # an older part
    for rank in range(2):
        recorded(tmp_path / "ranks" / f"rank0000{rank}.mcap", 3)
    result = await called("list_runs", tmp_path)
    listed = result.structured_content
    assert listed["live"] == []
    assert {row["run"] for row in listed["recordings"]} == {late, str(tmp_path / "ranks")}
    by_name = await called("summary", tmp_path, run="late.mcap")
    assert by_name.structured_content["source"]["run"] == late


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("no_tool", {}, "there is no tool 'no_tool'"),
        ("summary", {}, "no live run"),
        ("summary", {"run": "no-such-run"}, "no live run called 'no-such-run'"),
        ("summary", {"run": "no/such.mcap"}, "no/such.mcap: "),
        ("summary", {"run": "ssh://node"}, "start it there: ssh NODE ddpwatch mcp"),
        ("summary", {"run": 5}, "summary: Expected `str`, got `int`"),
        ("summary", {"file": "x"}, "summary: Object contains unknown field `file`"),
        ("compare", {"a": "x.mcap"}, "missing required field `b`"),
    ],
)
async def test_errors_are_one_line_with_a_hint(name: str, arguments: dict[str, object], words: str) -> None:
    assert words in await refused(name, **arguments)


async def test_over_http_only_the_address_with_the_token_is_answered() -> None:
    command = [sys.executable, "-m", "ddpwatch", "mcp", "--http"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            assert address.startswith("http://127.0.0.1:")
            async with Client(address) as client:
                assert len((await client.list_tools()).tools) == len(TOOLS)
                assert (await client.call_tool("list_runs", {})).structured_content == {"live": [], "recordings": []}
            base, token, _ = address.rsplit("/", 2)
            for wrong in (f"{base}/mcp", f"{base}/{token[:-1]}/mcp"):
                with pytest.raises(HTTPError, match="404") as refused_with:
                    await anyio.to_thread.run_sync(urlopen, Request(wrong, data=b"{}", method="POST"))
                refused_with.value.close()
        finally:
            process.terminate()
            _, printed = process.communicate(timeout=60)
    assert printed == ""


async def test_what_takes_too_long_is_an_error(late: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "LIMIT_S", -1.0)
    assert "not answered within" in await refused("summary", run=late)


async def test_what_hangs_is_an_error_and_so_is_a_bug(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def hangs(_: object) -> Figures:
        """Hang."""
        go_on.wait()
        raise ZeroDivisionError

    monkeypatch.setattr(server, "TOOLS", (hangs,))
    monkeypatch.setattr(server, "LIMIT_S", 0.05)
    monkeypatch.setattr(server, "SPARE_S", 0.05)
    assert "not answered within" in await refused("hangs")
    go_on.set()
    assert "ddpwatch failed: ZeroDivisionError" in await refused("hangs")


def test_without_its_extra_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "mcp.server.stdio", None)
    monkeypatch.setattr(sys, "argv", ["ddpwatch", "mcp"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert "the library mcp is not installed" in capsys.readouterr().err
