"""Calls a command or a web address when an incident starts, grows worse or ends: ``--on-incident``, ``--notify``.

The calls are made on a thread of its own: neither the job nor whatever follows it waits for them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
import urllib.request
from collections.abc import Callable, Sequence
from queue import Full, Queue

import msgspec

from ddpwatch.analysis.diagnosis.incident_json import IncidentFigures, incident_row
from ddpwatch.analysis.diagnosis.words.incident_news import ABSENT_NS, IncidentNews, News
from ddpwatch.common.text import clean, counted
from ddpwatch.errors import UsageError
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.follow import Look
from ddpwatch.viewer.state import RunState

CALL_S = 60.0  # for one call of a command; then it is killed
CLOSE_S = 10.0  # for the calls that are due at the end: whoever ran the job waits for them
POLL_S = 0.1
ANSWER_S = 10.0  # for a web server
GAP_S = 1.0  # between two calls
WAITING = 64  # events that wait for their call; what comes on top is left out, and counted


class RunNames(msgspec.Struct):
    """Which run an event is of, and where its recording is; what is not known is empty."""

    id: str
    host: str
    ranks: int
    script: str
    recording: str


class Alert(msgspec.Struct):
    """News of an incident, as a command gets it on stdin in JSON.

    Attributes:
        event: ``started``, ``again``, ``worse``, ``ended``, or ``over`` if it was found when it was over.
        text: One line for people, and what to do.
    """

    event: str
    text: str
    run: RunNames
    incident: IncidentFigures


Call = Callable[[Alert, threading.Event], str]  # returns what went wrong; ends soon once the event is set


def calls_of(on_incident: str | None, notify: str | None) -> list[Call]:
    """Returns what is done with each alert: a shell command, a post to a web address.

    Raises:
        UsageError: It is no web address.
    """
    return [*([run_command(on_incident)] if on_incident else []), *([post_to(notify)] if notify else [])]


def run_command(command: str, limit_s: float = CALL_S) -> Call:
    """Returns what runs a shell command with an alert on its stdin. Its output goes nowhere."""

    def call(alert: Alert, stop: threading.Event) -> str:
        content: bytes | None = msgspec.json.encode(alert) + b"\n"
        started_s = time.monotonic()
        process = subprocess.Popen(
            command,
            shell=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        while True:
            try:
                process.communicate(content, POLL_S)
                break
            except subprocess.TimeoutExpired:
                content, taken_s = None, time.monotonic() - started_s  # it goes on with what it was given
            if taken_s >= limit_s or stop.is_set():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return f"--on-incident: the command was killed after {taken_s:.0f} s"
        return f"--on-incident: the command ended with {process.returncode}" if process.returncode else ""

    return call


def post_to(url: str) -> Call:
    """Returns what posts an alert to a webhook, as chat servers such as Slack and Mattermost take it.

    Raises:
        UsageError: It is no web address.
    """
    if not url.startswith(("http://", "https://")):
        raise UsageError(f"--notify: no web address: {clean(url)}", "it starts with https://")

    def call(alert: Alert, _: threading.Event) -> str:
        run = alert.run
        where = f"\nrecording: {run.host}:{run.recording}" if run.recording else ""
        body = msgspec.json.encode({"text": f"ddpwatch, {run.id}: {alert.text}{where}"})
        request = urllib.request.Request(url, body, {"Content-Type": "application/json"})
        try:
            urllib.request.urlopen(request, timeout=ANSWER_S).close()
        except (OSError, ValueError) as error:
            return f"--notify: {clean(str(error))}"
        return ""

    return call


class Notifier:
    """Makes one call after the other on a thread of its own.

    Args:
        calls: What each alert is passed to.
        say: Gets a line when a call fails for the first time, and at the end if events were left out.
        gap_s: Least time between two alerts.
        recording: That of whoever watches; empty for the job's own.
    """

    def __init__(
        self, calls: Sequence[Call], say: Callable[[str], object], gap_s: float = GAP_S, recording: str = ""
    ) -> None:
        self._calls = calls
        self._say = say
        self._gap_s = gap_s
        self._recording = recording
        self._alerts: Queue[Alert | None] = Queue(WAITING)
        self._stop = threading.Event()
        self._left_out = 0
        self._said: set[str] = set()
        self._thread = threading.Thread(target=self._run, name="ddpwatch-notify", daemon=True)
        self._thread.start()

    def looker(self, info: RunInfo | None) -> Look:
        """Returns what looks at a run, given what is known of it, and passes on what is new of its incidents."""
        news = IncidentNews()

        def look(state: RunState) -> None:
            found = news.take_incidents(state.diagnosis.incidents(), state.now_ns)
            if state.end is not None:  # and with it what lasted to the end
                found += news.take_incidents([], state.now_ns + ABSENT_NS)
            for item in found:
                if item.incident.severity != "info":
                    self.add_alert(alert_of(item, state, info, self._recording))

        return look

    def add_alert(self, alert: Alert) -> None:
        """Passes an alert on, later. Never waits."""
        try:
            self._alerts.put_nowait(alert)
        except Full:
            self._left_out += 1

    def close(self, patience_s: float = CLOSE_S) -> None:
        """Waits for the calls that are due, and then ends the one that is under way."""
        with contextlib.suppress(Full):
            self._alerts.put(None, timeout=patience_s)
        self._thread.join(patience_s)
        self._stop.set()
        self._thread.join(1.0)
        if left := self._left_out + sum(alert is not None for alert in list(self._alerts.queue)):
            self._say(f"{counted(left, 'event')} of incidents not passed on: too many, or too late")

    def _run(self) -> None:
        while not self._stop.is_set() and (alert := self._alerts.get()) is not None:
            for call in self._calls:
                try:
                    wrong = call(alert, self._stop)
                except Exception as error:  # no process, no memory: the next one may work
                    wrong = clean(f"an alert was not passed on: {error}")
                if wrong and wrong not in self._said:
                    self._said.add(wrong)
                    self._say(f"{wrong}; that is said once")
            if self._alerts.empty() or self._alerts.queue[0] is not None:  # a close does not wait for the gap
                time.sleep(self._gap_s)


def alert_of(news: News, state: RunState, info: RunInfo | None, recording: str = "") -> Alert:
    """Returns what is passed on of a run's news; ``recording`` as for `Notifier`."""
    hello = next((rank.hello for rank in state.ranks.values() if rank.hello is not None), None)
    status, incident = state.status, news.incident
    return Alert(
        event=news.what,
        text=clean(f"{news.text(state.unit)}; next: {incident.next_step}"),
        run=RunNames(
            id=clean(state.run_id),
            host=clean(info.host if info is not None else hello.host if hello is not None else ""),
            ranks=state.world_size,
            script=clean(hello.script if hello is not None else ""),
            recording=clean(recording or (status.recording if status is not None else "")),
        ),
        incident=incident_row(incident, state.layouts),
    )
