"""`ddpwatch metrics`: what is exported, and how Prometheus and an OpenTelemetry collector get it."""

from __future__ import annotations

import json
import queue
import re
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ddpwatch.cli import main
from ddpwatch.errors import UsageError
from ddpwatch.metrics.figures import METRICS, OTHERS, TOP, Board, Meter, Metric, Sample
from ddpwatch.metrics.follow import follow, follow_all
from ddpwatch.metrics.otlp import metrics_url, pushing
from ddpwatch.metrics.prometheus import listening, parse_listen
from ddpwatch.run.rundir import RunInfo
from ddpwatch.wire.messages import RankSample, Step, Trained
from tests.support.dashboards import FakeJobs, FakeSource
from tests.support.frames import RUN, beat, bye, hello, layout, run, state_of, status, synchronous
from tests.support.prometheus import check_with_promtool, scrape

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "docs" / "grafana.json"
LATE_MS = [rank * 7 % 97 for rank in range(1024)]
ONE_FLEET = pytest.mark.xdist_group("fleet")  # which takes seconds to make


@pytest.fixture(scope="module")
def board() -> Board:
    counted = [beat(0, dropped=3, trained=Trained(n, samples=8 * n, tokens=700 * n)) for n in (0, 40)]
    about = [*(hello(rank, peak_flops=1e12) for rank in (0, 1)), *counted, status()]
    about += [RankSample(rank=1, at_ns=0, span_ns=1, memory_bytes=nbytes) for nbytes in (7, 5)]
    state = state_of([*run(40, late_rank=1), *about])
    return Board(RUN, Meter().read(state))


def value(board: Board, name: str, *labels: str) -> float:
    (found,) = (sample.value for sample in board.values[name] if sample.labels == labels)
    return found


def test_the_figures_are_those_of_the_state(board: Board) -> None:
    assert value(board, "step") == pytest.approx(0.14)
    assert value(board, "exposed_communication") == pytest.approx(0.03)  # 10 ms on the late rank, 50 on the other
    assert value(board, "late", "1") == pytest.approx(0.04)
    assert value(board, "late", "0") == 0
    assert value(board, "dropped_frames") == 3
    assert value(board, "frames") == 10
    assert value(board, "steps") == 40
    assert value(board, "tokens") == pytest.approx(700 / 0.14)
    assert (value(board, "memory", "1", "host"), value(board, "memory_peak", "host")) == (5, 7)
    assert 0.5 < value(board, "goodput") < 1
    assert value(board, "ranks", "running") == 2
    assert value(board, "open_incidents", "straggler") == 1
    assert sum(sample.value for sample in board.values["phase"]) == pytest.approx(value(board, "step"))
    transferred = max(value(board, "bus_bandwidth", "0", bucket, "", "all_reduce") for bucket in "01")
    assert transferred == pytest.approx((4 << 20) / 0.02, rel=0.5)


def test_every_series_is_there_once() -> None:
    """FSDP2 gathers a parameter group and scatters its gradients: these are two series."""
    messages = [
        replace(message, comm_op=["all_gather", "reduce_scatter"], comm_label=[0, 0])
        if isinstance(message, Step)
        else message
        for message in run(40)
    ]
    values = Meter().read(state_of(messages))
    for name, samples in values.items():
        assert len({sample.labels for sample in samples}) == len(samples), name
    assert {sample.labels for sample in values["bus_bandwidth"]} == {
        ("0", "0", "", "all_gather_backward"),
        ("0", "0", "", "reduce_scatter"),
    }


def test_what_is_not_known_is_left_out() -> None:
    values = Meter().read(state_of([hello(0), hello(1)]))
    assert "step" not in values
    assert "overlap" not in values
    assert "cost" not in values
    assert {sample.labels: sample.value for sample in values["ranks"]}[("running",)] == 2


@pytest.fixture(scope="module")
def fleet() -> Board:
    """1,024 ranks, of which each but those that 97 divides is late."""
    world = len(LATE_MS)
    introductions = (message for rank in range(world) for message in (hello(rank, world), layout(rank)))
    steps = (step for ranks in synchronous([LATE_MS] * 12, statuses={0: "warmup"}) for step in ranks)
    return Board(RUN, Meter().read(state_of([*introductions, *steps, status()])))


@ONE_FLEET
def test_the_number_of_series_is_bounded(fleet: Board) -> None:
    assert len(fleet.values["late"]) == TOP + 1
    assert sum(map(len, fleet.values.values())) < 100


@ONE_FLEET
def test_the_latest_ranks_and_the_others_add_up_to_all(fleet: Board) -> None:
    *latest, others = fleet.values["late"]
    first = sorted(range(len(LATE_MS)), key=lambda rank: (-LATE_MS[rank], rank))[:TOP]
    assert [sample.labels for sample in latest] == [(str(rank),) for rank in first]
    assert [sample.value for sample in latest] == pytest.approx([LATE_MS[rank] / 1000 for rank in first])
    assert others.labels == (OTHERS,)
    assert others.value + sum(sample.value for sample in latest) == pytest.approx(sum(LATE_MS) / 1000)


@ONE_FLEET
def test_promtool_has_nothing_to_say_of_1024_ranks(fleet: Board) -> None:
    with listening(fleet, "127.0.0.1:0") as url:
        check_with_promtool(url)


def test_a_hostile_name_stays_a_label() -> None:
    state = state_of([hello(0, module='x"}\n# EOF\n' + "y" * 500)])
    with listening(Board(RUN, Meter().read(state)), "127.0.0.1:0") as url:
        ((_, module, _, _),) = scrape(url)["ddpwatch_run_details"]
    assert len(module) <= 80


def test_a_scrape(board: Board) -> None:
    with listening(board, "127.0.0.1:0") as url:
        assert url.startswith("http://127.0.0.1:")
        found = scrape(url)
    assert found.keys() == {metric.sample_name for metric in METRICS if metric.name in board.values}
    assert len(found) > len(METRICS) - 4
    assert found["ddpwatch_step_seconds"] == {(): value(board, "step")}
    assert found["ddpwatch_late_seconds"].keys() == {("0",), ("1",)}
    with pytest.raises(OSError):  # noqa: PT011
        scrape(url)


def test_names_follow_the_conventions() -> None:
    for metric in METRICS:
        assert re.fullmatch(r"[a-z]+(_[a-z]+)*", metric.name)
        assert metric.unit in ("", "seconds", "ratio", "bytes", "bytes_per_second", "per_second")
        assert metric.help[0].isupper()
    assert len({metric.sample_name for metric in METRICS}) == len(METRICS)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("127.0.0.1:9464", ("127.0.0.1", 9464)),
        (":80", ("127.0.0.1", 80)),
        ("[::1]:1", ("::1", 1)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
    ],
)
def test_where_to_listen(text: str, found: tuple[str, int]) -> None:
    assert parse_listen(text) == found


@pytest.mark.parametrize("text", ["", "9464", "localhost:", "localhost:http", "localhost:65536"])
def test_nowhere_to_listen(text: str) -> None:
    with pytest.raises(UsageError, match="is not an address to listen on"):
        parse_listen(text)


def test_a_port_that_is_taken(board: Board) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match="cannot listen on"), listening(board, listen):
            pass


class Stub(ThreadingHTTPServer):
    """An OpenTelemetry collector that keeps what it gets."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answer)
        self.posted: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()


class Answer(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            import gzip

            body = gzip.decompress(body)
        assert isinstance(self.server, Stub)
        self.server.posted.put((self.path, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def stub() -> Iterator[Stub]:
    server = Stub()
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_push(board: Board, stub: Stub) -> None:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest

    with pushing(board, f"http://127.0.0.1:{stub.server_port}", every_ms=3_600_000) as url:
        assert url.endswith("/v1/metrics")
    path, body = stub.posted.get(timeout=60)  # at the end
    assert path == "/v1/metrics"
    request = ExportMetricsServiceRequest.FromString(body)
    (resource,) = request.resource_metrics
    about = {item.key: item.value.string_value for item in resource.resource.attributes}
    assert about["service.name"] == "ddpwatch"
    found = {metric.name: metric for scope in resource.scope_metrics for metric in scope.metrics}
    assert set(found) == {f"ddpwatch.{metric.name}" for metric in METRICS if metric.name in board.values}
    for metric in METRICS:
        if metric.name in board.values:
            check_pushed(found[f"ddpwatch.{metric.name}"], metric, board.values[metric.name])


def check_pushed(found: Any, metric: Metric, samples: Sequence[Sample]) -> None:
    """The kind, the unit (after UCUM), and each value with its attributes."""
    units = {"seconds": "s", "ratio": "1", "bytes": "By", "bytes_per_second": "By/s", "per_second": "1/s", "": "1"}
    assert (found.unit, found.description) == (units[metric.unit], metric.help)
    assert found.WhichOneof("data") == ("sum" if metric.counter else "gauge")
    if metric.counter:
        assert found.sum.is_monotonic
        assert found.sum.aggregation_temporality == 2  # cumulative
    points = (found.sum if metric.counter else found.gauge).data_points
    pushed = {
        frozenset((item.key, item.value.string_value) for item in point.attributes): point.as_double for point in points
    }
    named = ({"run": RUN, **dict(zip(metric.labels, sample.labels, strict=True))} for sample in samples)
    assert pushed == {frozenset(labels.items()): sample.value for labels, sample in zip(named, samples, strict=True)}
    assert len(points) == len(samples)


@pytest.mark.parametrize("text", ["", "127.0.0.1:4318", "ftp://host", "http://"])
def test_no_url(text: str) -> None:
    with pytest.raises(UsageError, match="is not a collector's URL"):
        metrics_url(text)


def test_a_url_with_a_path_stays() -> None:
    assert metrics_url("https://host/otlp/metrics") == "https://host/otlp/metrics"
    assert metrics_url("https://host/") == "https://host/v1/metrics"


@pytest.mark.parametrize(
    ("options", "modules", "said"),
    [
        ([], ["prometheus_client"], "prometheus-client is not installed"),
        (["--otlp", "http://127.0.0.1:1"], ["opentelemetry.sdk.metrics"], "OpenTelemetry's SDK is not installed"),
    ],
)
def test_the_extra_is_missing(
    options: list[str],
    modules: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", str(tmp_path))
    for module in modules:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(sys, "argv", ["ddpwatch", "metrics", *options])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    message = capsys.readouterr().err
    assert said in message
    assert "hint: pip install 'ddpwatch[metrics]'" in message


def test_a_run_is_followed_to_its_end() -> None:
    source, board = FakeSource(), Board()
    source.put([*run(40), bye(0), bye(1), bye()])
    follow(board, "run-1", lambda _: source)
    assert source.closed
    assert value(board, "live") == 0
    assert value(board, "step") == pytest.approx(0.1)


def test_each_run_is_followed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ended run stays listed for some seconds."""
    jobs, followed = FakeJobs("first"), []

    def next_one(board: Board, endpoint: str, _: int) -> None:
        assert board.values == {"live": (Sample((), 0.0),)}
        followed.append(endpoint)
        if endpoint == "second":
            raise KeyboardInterrupt
        board.values = {}

    def live_runs() -> list[RunInfo]:
        listed = [*jobs.runs]
        if followed:
            jobs.start("second")  # for the look after the one that finds nothing new
        return listed

    monkeypatch.setattr("ddpwatch.metrics.follow.rundir.live_runs", live_runs)
    monkeypatch.setattr("ddpwatch.metrics.follow.follow", next_one)
    with pytest.raises(KeyboardInterrupt):
        follow_all(Board())
    assert followed == ["first", "second"]


def test_the_dashboard_for_grafana() -> None:
    made = json.loads(DASHBOARD.read_text())
    targets = [target for panel in made["panels"] for target in panel["targets"]]
    variables = [one["query"] for one in made["templating"]["list"] if one["type"] == "query"]
    assert [complaints(target["expr"], target["legendFormat"]) for target in targets] == [[]] * len(targets)
    assert [complaints(query) for query in variables] == [[]]
    assert len({name for target in targets for name in named_in(target["expr"])}) > len(METRICS) - 6
    assert len({panel["id"] for panel in made["panels"]}) == len(made["panels"])
    boxes = [panel["gridPos"] for panel in made["panels"]]
    cells = [(x, y) for b in boxes for x in range(b["x"], b["x"] + b["w"]) for y in range(b["y"], b["y"] + b["h"])]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24


@pytest.mark.parametrize(
    ("query", "legend", "wrong"),
    [
        ("ddpwatch_steps", "", "ddpwatch_steps"),
        ("rate(ddpwatch_step_seconds[1m]) + ddpwatch_lost_ratio", "", "ddpwatch_lost_ratio"),
        ("up", "", "no metric"),
        ('ddpwatch_late_seconds{instance="a", host!="b"}', "", "host"),
        ("sum by (bucket, rank) (ddpwatch_late_seconds)", "", "bucket"),
        ("ddpwatch_late_seconds", "rank {{rank}} of {{world}}", "world"),
    ],
)
def test_a_query_of_what_is_not_exported_is_noticed(query: str, legend: str, wrong: str) -> None:
    assert complaints(query, legend) == [wrong]


def named_in(query: str) -> list[str]:
    return re.findall(r"ddpwatch_\w+", query)


def complaints(query: str, legend: str = "") -> list[str]:
    """Metrics and labels of a query and of its legend that are not exported."""
    known = {metric.sample_name: set(metric.labels) for metric in METRICS}
    names = named_in(query)
    if not names or not known.keys() >= set(names):
        return [name for name in names if name not in known] or ["no metric"]
    grouped = " ".join(re.findall(r"(?:by|without) *\(([^)]*)\)", query))
    asked = re.findall(r"(\w+) *!?=", query) + re.findall(r"\w+", grouped) + re.findall(r"{{(\w+)}}", legend)
    labels = {"instance", "job"}.union(*(known[name] for name in names))
    return [label for label in asked if label not in labels]


def test_every_metric_is_documented() -> None:
    page = (ROOT / "docs" / "operators.md").read_text()
    rows = [[cell.strip() for cell in line.split("|")] for line in page.splitlines() if line.startswith("| `ddpwatch_")]
    listed = {name.strip("`"): labels for _, name, labels, *_ in rows}
    assert listed == {m.sample_name: ", ".join(f"`{label}`" for label in m.labels) for m in METRICS}
