"""What plain lines and the log say of incidents, look by look."""

from __future__ import annotations

from dataclasses import replace

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.incident_news import ABSENT_NS, IncidentNews

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
        [("started", "info")], [], [("started", "warning")], [], [], [], [("ended", "warning")],
    ]  # fmt: skip


def test_it_ends_when_the_verdict_drops_it_and_comes_again() -> None:
    """What is over and may come back goes on; later it is the same one, and said to be back."""
    news = IncidentNews()
    held, over = replace(WORSE, open=False, counts=True, until_step=9), replace(WORSE, open=False, until_step=9)
    back = replace(WORSE, until_step=80, spells=((5, 9), (70, 80)))
    looks = [WORSE, held, WORSE, held, over, over, back, replace(back, open=False)]
    said = [news.take_incidents([look], at) for at, look in enumerate(looks)]
    assert [[one.what for one in found] for found in said] == [
        ["started"], [], [], [], ["ended"], [], ["again"], ["ended"],
    ]  # fmt: skip
    assert said[6][0].text("GPU-seconds") == "again: rank 1 is late"
    assert [one.needs_step for found in said for one in found] == [True, False, True, False]


def test_an_earlier_one_is_not_its_end() -> None:
    earlier = replace(WORSE, open=False, until_step=9)
    later = replace(WORSE, since_step=600, until_step=610)
    news = IncidentNews()
    found = news.take_incidents([later, earlier], 0)
    assert [one.what for one in found] == ["started", "over"]
    assert all(one.needs_step for one in found)
    assert news.take_incidents([earlier], 1) == []
    (ended,) = news.take_incidents([earlier], ABSENT_NS)
    assert (ended.what, ended.incident.since_step) == ("ended", 600)


def test_a_cost_of_nothing_is_not_said() -> None:
    death = Incident(kind="death", severity="error", message="rank 1 was killed (SIGTERM)", ranks=(1,), share=0.0)
    over = [replace(death, cost_ns=cost, share=share) for cost, share in ((0, 0.0), (4_000_000_000, 0.02), (0, None))]
    said = [IncidentNews().take_incidents([one], 0)[0].text("GPU-seconds") for one in over]
    costs = ["", "; cost 4.00 GPU-seconds, 2.0 % of all ranks' time", "; cost 0.00 GPU-seconds, – of all ranks' time"]
    assert said == [f"rank 1 was killed (SIGTERM){cost}" for cost in costs]


def test_a_death_is_told_again_once_it_is_known_whose_it_is() -> None:
    """Its witness comes first, and is not said to be over."""
    seen = Incident(kind="death", severity="error", message="a collective of rank 0 failed", since_step=5, open=True)
    death = replace(seen, message="rank 1 was killed (SIGKILL)", ranks=(1,), open=False)
    news, at = IncidentNews(), 0
    said = [news.take_incidents([one], at := at + ABSENT_NS) for one in (seen, seen, death, death)]
    assert [[(one.what, one.incident.ranks) for one in found] for found in said] == [
        [("started", ())], [], [("over", (1,))], [],
    ]  # fmt: skip
