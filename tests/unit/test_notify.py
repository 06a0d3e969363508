"""What a command or a webhook is called for, and what happens if it hangs, fails or floods."""

from __future__ import annotations

import json
import os
import queue
import threading
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import psutil
import pytest

from ddpwatch.analysis.diagnosis.words.incident_news import IncidentNews, News
from ddpwatch.errors import UsageError
from ddpwatch.run import rundir
from ddpwatch.viewer import follow
from ddpwatch.viewer.follow import following
from ddpwatch.viewer.notify import WAITING, Alert, Notifier, alert_of, post_to, run_command
from tests.support.dashboards import FakeSource
from tests.support.frames import RUN, bye, run, state_of
from tests.unit.test_incident_news import WORSE

NEVER = threading.Event()
STATE = state_of([*run(40, late_rank=1)])


def event(what: str = "started", recording: str = "") -> Alert:
    return alert_of(News(WORSE, what), STATE, None, recording)  # type: ignore[arg-type]


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_command_gets_the_incident_as_json(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run_command(f"cat >> {out}")(event(), NEVER) == ""
    (got,) = lines(out)
    assert got["event"] == "started"
    assert str(got["text"]).startswith("rank 1 is late; next: ")
    assert got["run"] == {"id": RUN, "host": "node1", "ranks": 2, "script": "train.py", "recording": ""}
    assert got["incident"]["kind"] == "straggler"  # type: ignore[index]


def test_a_command_that_hangs_is_killed_with_what_it_has_started(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "never")
    wrong = run_command(f"sh -c 'echo $$ > {tmp_path}/pid; cat {tmp_path}/never'; true", limit_s=1.0)(event(), NEVER)
    assert wrong == "--on-incident: the command was killed after 1 s"
    pid = int((tmp_path / "pid").read_text())
    psutil.wait_procs([psutil.Process(pid)] if psutil.pid_exists(pid) else [])
    assert not psutil.pid_exists(pid)


def test_one_that_hangs_at_the_end_is_ended_with_the_job(tmp_path: Path) -> None:
    said: list[str] = []
    os.mkfifo(tmp_path / "started")
    notifier = Notifier([run_command(f"echo > {tmp_path}/started; exec sleep 1000")], said.append, gap_s=0)
    for _ in range(3):
        notifier.add_alert(event())
    (tmp_path / "started").read_text()
    notifier.close(patience_s=0)
    assert said[0].startswith("--on-incident: the command was killed after ")
    assert said[1:] == ["2 events of incidents not passed on: too many, or too late"]


def test_one_that_fails_is_said_once_and_goes_on(tmp_path: Path) -> None:
    said: list[str] = []
    notifier = Notifier([run_command(f"cat >> {tmp_path}/out; exit 3")], said.append, gap_s=0)
    for what in ("started", "worse", "ended"):
        notifier.add_alert(event(what))
    notifier.close()
    assert [one["event"] for one in lines(tmp_path / "out")] == ["started", "worse", "ended"]
    assert said == ["--on-incident: the command ended with 3; that is said once"]


def test_one_that_floods_its_output_is_no_harm(capfd: pytest.CaptureFixture[str]) -> None:
    assert run_command("yes | head -c 20000000; yes | head -c 1000000 >&2")(event(), NEVER) == ""
    assert capfd.readouterr() == ("", "")


def test_one_that_reads_nothing_is_no_error() -> None:
    assert run_command("exec 0<&-; true")(event(), NEVER) == ""


def test_events_never_wait_and_are_counted_if_they_are_too_many() -> None:
    said: list[str] = []
    begun, go_on = threading.Event(), threading.Event()

    def held(_: Alert, stop: threading.Event) -> str:
        begun.set()
        go_on.wait()
        return ""

    notifier = Notifier([held], said.append, gap_s=0)
    notifier.add_alert(event())
    begun.wait()
    for _ in range(WAITING + 5):
        notifier.add_alert(event())
    go_on.set()
    notifier.close()
    assert said == ["5 events of incidents not passed on: too many, or too late"]


def test_a_webhook_gets_a_text() -> None:
    got: queue.Queue[tuple[str | None, bytes]] = queue.Queue()

    class Chat(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.put((self.headers["Content-Type"], self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200 if self.path == "/hook" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Chat) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}"
        assert post_to(f"{address}/hook")(event(), NEVER) == ""
        assert "404" in post_to(f"{address}/other")(event(), NEVER)
        assert post_to(f"{address}/hook")(event(recording="/data/run.mcap"), NEVER) == ""
        server.shutdown()
    kind, body = got.get()
    assert kind == "application/json"
    (text,) = json.loads(body)["text"].splitlines()
    assert text.startswith(f"ddpwatch, {RUN}: rank 1 is late; next: ")
    got.get()
    assert json.loads(got.get()[1])["text"].splitlines() == [text, "recording: node1:/data/run.mcap"]
    assert post_to(address)(event(), NEVER).startswith("--notify: ")
    with pytest.raises(UsageError, match="no web address"):
        post_to("file:///etc/passwd")


def test_a_run_is_followed_beside_whatever_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    source, events = FakeSource(), queue.Queue[Alert]()
    monkeypatch.setattr(follow, "LiveSource", lambda _: source)
    source.put([*run(40, late_rank=1), bye(0), bye(1), bye()])

    def call(one: Alert, _: threading.Event) -> str:
        events.put(one)
        return ""

    notifier = Notifier([call], pytest.fail, gap_s=0)
    with following(lambda: [], [notifier.looker], "endpoint"):
        first = events.get(timeout=60)
    notifier.close()
    assert (first.event, first.incident.kind, list(first.incident.ranks)) == ("started", "straggler", [1])
    rest = [events.get() for _ in range(events.qsize())]
    assert [(one.event, one.incident.kind) for one in rest if one.incident.ranks == [1]] == [("ended", "straggler")]
    assert source.closed


def test_a_run_that_fails_once_is_followed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    source, sources = FakeSource(), list[str]()
    source.put([*run(40, late_rank=1), bye()])

    def open_source(endpoint: str) -> FakeSource:
        sources.append(endpoint)
        if len(sources) == 1:
            raise ValueError("a bug")
        return source

    monkeypatch.setattr(follow, "LiveSource", open_source)
    monkeypatch.setattr(follow, "AGAIN_S", 0.01)
    monkeypatch.setattr(rundir, "is_live", lambda _: True)
    looked = threading.Event()
    with following(lambda: [], [lambda _: lambda _: looked.set()], "endpoint"):
        assert looked.wait(60)
    assert sources == ["endpoint", "endpoint"]


def test_what_grows_worse_is_news() -> None:
    news = IncidentNews()
    looks = [WORSE, replace(WORSE, severity="error"), WORSE]
    said = [news.take_incidents([look], at) for at, look in enumerate(looks)]
    assert [[one.what for one in found] for found in said] == [["started"], ["worse"], []]
    assert said[1][0].text("GPU-seconds") == "worse: rank 1 is late"
