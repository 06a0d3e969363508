"""What the dashboard knows of a run as its frames arrive, in whatever order."""

from ddpwatch.tui.session import ViewerSession
from tests.support.frames import enveloped, hello, step


def test_a_step_that_is_held_back_is_not_worked_out(monkeypatch):
    """Another rank's step with its number is there already."""
    session = ViewerSession()
    session.apply_frames(enveloped([hello(0), hello(1), step(0, 1)]))
    assert list(session.state.steps[1].ranks) == [0]
    monkeypatch.setattr(session.state._run._matcher, "add_step", lambda _: [])  # holds it back
    session.apply_frames(enveloped([step(1, 1)]))
    assert list(session.state.steps[1].ranks) == [0]
