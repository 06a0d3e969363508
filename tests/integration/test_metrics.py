"""`ddpwatch metrics` beside a job with a late rank: what it serves, and what the real Prometheus makes of it.

And what else asks about a live job: alerts, and an agent through `ddpwatch mcp`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from mcp import Client, StdioServerParameters

from ddpwatch.metrics.figures import METRICS
from ddpwatch.run.rundir import RunInfo
from ddpwatch.sampling.lease import FULL_PPM
from ddpwatch.wire.messages import Hello, Layout, Status, Step
from tests.support.jobs import (
    DDPWATCH,
    ROOT,
    SMALL_GPT,
    Frames,
    Job,
    live,
    messages,
    read_until,
    running,
    the_run,
    wait_for,
)
from tests.support.prometheus import Scrape, check_with_promtool, needs, scrape

pytestmark = [
    pytest.mark.same_everywhere,
    pytest.mark.xdist_group("metrics"),
    pytest.mark.seconds(12),
]  # one job for all
LATE_S = 0.1  # far more than what a busy machine adds
LATE = ("--inject", f"slow-backward:rank=1,ms={LATE_S * 1000:.0f}")
URL = re.compile(r"serving (http://127\.0\.0\.1:\d+/metrics)")


@dataclass(frozen=True)
class Served:
    """A run that is live, where its metrics are, and when it started at the earliest."""

    info: RunInfo
    url: str
    started_s: float


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The endpoint of a job with a late rank; it ends with the job."""
    folder, started = tmp_path_factory.mktemp("metrics"), time.monotonic()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(folder))
        patch.setenv("DDPWATCH_PEAK_TFLOPS", "0.1")  # of a CPU, nobody knows it
        script = ROOT / "demo" / "train.py"
        with Job(script, *SMALL_GPT, *LATE, "--watch", "--steps", "100000", log=folder / "log") as job:
            info = the_run(job)
            with running(*DDPWATCH, "metrics", info.run_id, "--listen", "127.0.0.1:0") as endpoint:
                assert endpoint.stderr is not None
                serving = URL.search(endpoint.stderr.readline())
                assert serving
                yield Served(info, serving[1], started)
                job.ranks()[0].terminate()
                assert job.wait() == 0, job.output()
                assert endpoint.wait() == 0


@pytest.fixture(scope="module")
def scraped(served: Served) -> Scrape:
    """The first answer that has everything, but for what watching costs: that takes hundreds of steps to measure."""
    found: list[Scrape] = []

    def complete() -> bool:
        found[:] = [scrape(served.url)]
        named = found[0].get("ddpwatch_open_incidents", {}).get(("straggler",))
        expected = {metric.sample_name for metric in METRICS if not metric.name.startswith("cost")}
        return bool(named) and found[0].keys() >= expected

    wait_for(complete, "every metric is served")
    return found[0]


def test_the_figures_are_those_of_the_job(served: Served, scraped: Scrape) -> None:
    """What was injected bounds them: whatever else the machine does makes steps longer, never shorter."""
    step = scraped["ddpwatch_step_seconds"][()]
    communication, exposed = (scraped[f"ddpwatch_{name}communication_seconds"][()] for name in ("", "exposed_"))
    late = scraped["ddpwatch_late_seconds"]
    assert step > LATE_S
    assert sum(scraped["ddpwatch_phase_seconds"].values()) == pytest.approx(step)
    assert LATE_S / 4 < exposed <= communication < step  # one of two ranks waits
    assert scraped["ddpwatch_overlap_ratio"][()] == pytest.approx(1 - exposed / communication)
    assert late.keys() == {("0",), ("1",)}
    assert late["1",] > max(LATE_S / 2, late["0",])


def test_a_command_is_called_for_the_late_rank(served: Served, tmp_path: Path) -> None:
    """Each viewer may do so, for the same incident, beside what it is there for."""
    out = tmp_path / "out"
    with running(*DDPWATCH, "attach", "--plain", served.info.run_id, "--on-incident", f"cat >> {out}") as viewer:

        def called_for_it() -> bool:
            assert viewer.poll() is None, viewer.communicate()
            return out.exists() and "straggler" in out.read_text()

        wait_for(called_for_it, "the command is called")
    called = [json.loads(line) for line in out.read_text().splitlines()]
    (late,) = [one for one in called if one["incident"]["kind"] == "straggler" and one["event"] in ("started", "over")]
    assert (late["run"]["id"], late["run"]["ranks"], late["incident"]["ranks"]) == (served.info.run_id, 2, [1])


def test_no_more_time_is_accounted_for_than_has_passed(served: Served, scraped: Scrape) -> None:
    accounts = {name: seconds for (name,), seconds in scraped["ddpwatch_rank_time_seconds"].items()}
    assert sum(accounts.values()) <= 2 * (time.monotonic() - served.started_s)
    assert accounts["compute"] > 0
    assert 0 < accounts["waiting"] / sum(accounts.values()) <= scraped["ddpwatch_lost_time_ratio"][()] < 1


def total(served: Served, name: str) -> float:
    return scrape(served.url).get(f"ddpwatch_{name}_total", {}).get((), 0.0)


def test_the_counts_are_those_of_another_viewer(served: Served) -> None:
    with live(served.info) as viewer:
        kinds = (Step, Layout, Status)
        before = read_until(viewer, lambda seen: all(messages(seen, kind) for kind in kinds), "steps and a status")
        steps = 1 + max(step.step for step in messages(before, Step))
        wait_for(lambda: total(served, "steps") >= steps, "the newest step is counted")
        status = min(status.frames for status in messages(before, Status))  # this viewer has seen all since then
        wait_for(lambda: total(served, "frames") >= status, "a status that it has seen counts")
        found = scrape(served.url)
        counted, frames = found["ddpwatch_steps_total"][()], found["ddpwatch_frames_total"][()]

        def caught_up(new: Frames) -> bool:
            seen = before + new
            has_step = any(step.step + 1 >= counted for step in messages(seen, Step))
            return has_step and any(status.frames >= frames for status in messages(seen, Status))

        seen = before + read_until(viewer, caught_up, "what the endpoint has counted")
    hello = messages(seen, Hello)[0]
    details = (hello.backend, hello.module, served.info.run_id, hello.torch)
    assert found["ddpwatch_run_details"] == {details: 1}
    assert found["ddpwatch_world_size"][()] == 2
    assert sum(found["ddpwatch_ranks"].values()) == 2
    assert (found["ddpwatch_live"][()], found["ddpwatch_missing_steps_total"][()]) == (1, 0)
    assert (found["ddpwatch_dropped_frames_total"][()], found["ddpwatch_refused_frames_total"][()]) == (0, 0)
    assert frames in {status.frames for status in messages(seen, Status)}
    newest = max(messages(seen, Layout), key=lambda layout: layout.epoch)
    sizes = {(str(bucket.index), "dp 2", "0", "all_reduce"): bucket.nbytes for bucket in newest.buckets}
    bandwidths = found["ddpwatch_bus_bandwidth_bytes_per_second"]
    assert bandwidths.keys() == sizes.keys()
    step = found["ddpwatch_step_seconds"][()]
    assert all(bandwidths[labels] > sizes[labels] / step for labels in sizes)  # a transfer is part of a step


def test_promtool_has_nothing_to_say(served: Served, scraped: Scrape) -> None:
    check_with_promtool(served.url)


@pytest.fixture
def prometheus(served: Served, tmp_path: Path) -> Iterator[str]:
    """The API of the real Prometheus, which scrapes the endpoint as the docs say, but more often."""
    command = needs("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    target = urllib.parse.urlsplit(served.url).netloc
    job = {"job_name": "ddpwatch", "scrape_interval": "200ms", "static_configs": [{"targets": [target]}]}
    (tmp_path / "prometheus.yml").write_text(json.dumps({"scrape_configs": [job]}))  # JSON is YAML
    places = (f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data")
    with running(command, *places, f"--web.listen-address={address}", "--log.level=error") as server:
        api = f"http://{address}/api/v1"

        def up() -> bool:
            assert server.poll() is None, server.communicate()
            with contextlib.suppress(OSError):
                return [one["health"] for one in ask(api, "targets")["activeTargets"]] == ["up"]
            return False

        wait_for(up, "Prometheus has scraped the endpoint")
        yield api


def ask(api: str, path: str, **query: str) -> Any:
    """What Prometheus answers."""
    with urllib.request.urlopen(f"{api}/{path}?{urllib.parse.urlencode(query)}", timeout=30) as answer:
        found = json.load(answer)
    assert found["status"] == "success"
    return found["data"]


def test_the_real_prometheus_answers_each_query_of_the_dashboard(prometheus: str, served: Served) -> None:
    """Somebody looks meanwhile: so it is soon known what watching costs."""
    panels = json.loads((ROOT / "docs" / "grafana.json").read_text())["panels"]
    with live(served.info, budget_ppm=FULL_PPM):
        for asked in [target["expr"].replace("$instance", ".*") for panel in panels for target in panel["targets"]]:
            wait_for(lambda asked=asked: ask(prometheus, "query", query=asked)["result"], f"an answer to {asked}")
    (world,) = ask(prometheus, "query", query="ddpwatch_world_size")["result"]
    assert world["value"][1] == "2"
    (late,) = ask(prometheus, "query", query="topk(1, ddpwatch_late_seconds)")["result"]
    assert late["metric"]["rank"] == "1"
    known = ask(prometheus, "metadata")
    for metric in METRICS:
        (about,) = known[metric.sample_name.removesuffix("_total")]
        assert (about["type"], about["help"]) == ("counter" if metric.counter else "gauge", metric.help)


async def test_an_agent_gets_answers(served: Served, scraped: Scrape) -> None:
    """Ten questions about this job and about a recording, over stdio."""
    old = str(ROOT / "tests" / "data" / "written-by-0.1.mcap")
    command = StdioServerParameters(
        command=DDPWATCH[0], args=[*DDPWATCH[1:], "mcp", str(Path(old).parent)], env={**os.environ}
    )
    async with Client(command) as agent:

        async def ask(tool: str, **arguments: object) -> dict[str, Any]:
            result = await agent.call_tool(tool, arguments)
            assert not result.is_error, result.content
            return dict(result.structured_content)

        listed = await ask("list_runs")  # Which runs are there?
        (here,) = listed["live"]
        assert (here["run"], here["ranks"], here["verdict"]["kind"]) == (served.info.run_id, 2, "straggler")
        assert [one["run"] for one in listed["recordings"]] == [old]
        now = await ask("summary")  # What is it, and what matters most?
        assert (now["source"]["kind"], now["source"]["ranks"], now["run"]["backend"]) == ("live", 2, "gloo")
        assert now["verdict"]["text"].startswith("rank 1 is late")
        assert now["steps"]["step_ms"] > LATE_S * 1000  # How long is a step?
        assert sum(now["phases_ms"].values()) == pytest.approx(now["steps"]["step_ms"])
        assert now["latest_ranks"][0]["rank"] == 1  # Who is late, by how much?
        assert now["latest_ranks"][0]["late_ms_p50"] > LATE_S * 500
        found = (await ask("incidents", run=here["run"]))["incidents"]  # What went wrong, and what is to be done?
        (late,) = [one for one in found if one["kind"] == "straggler"]
        assert (late["ranks"], late["phase"], late["open"]) == ([1], "backward", True)
        assert late["next_step"]
        lost = await ask("lost_time")  # Where does the time go?
        waiting = [one for one in lost["accounts"] if one["account"] == "waiting" and one["rank"] == 1]
        assert sum(one["seconds"] for one in waiting) > 0
        line = await ask("step_timeline")  # How did it go?
        step = line["points"][-1]["step"]
        assert step > line["points"][0]["step"]
        past = await ask("summary", run=old)  # And this recording?
        assert past["source"]["kind"] == "recording"
        same = await ask("compare", a=old, b=old)  # Is it slower than that?
        assert same["verdict"] in ("same", "unclear")
        assert same["ratio"] == 0
        without = await ask("whatif", run=old, without_rank=1)  # What if rank 1 had not been late there, by 52 ms?
        assert without["scenarios"][0]["gain_ms"] == pytest.approx(52, abs=5)
