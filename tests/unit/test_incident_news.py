"""What plain lines and the log say of incidents, look by look."""

from __future__ import annotations

from dataclasses import replace

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.incident_news import IncidentNews

MINOR = Incident(
    kind="straggler", severity="info", message="rank 1 is late", ranks=(1,), phase="forward", since_step=5, open=True
)
WORSE = replace(MINOR, severity="warning")


def test_what_becomes_a_warning_is_news_once() -> None:
    """A late rank costs little at first: its warning never came."""
    news = IncidentNews()
    looks = [MINOR, MINOR, WORSE, WORSE, MINOR, WORSE, replace(MINOR, open=False)]
    said = [news.take_incidents([look], at) for at, look in enumerate(looks)]
    assert [[(one.what, one.incident.severity) for one in found] for found in said] == [
        [("started", "info")], [], [("started", "warning")], [], [], [], [("ended", "info")],
    ]  # fmt: skip
