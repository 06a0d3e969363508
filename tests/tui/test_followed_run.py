"""A run as its frames arrive, in whatever order."""

from ddpwatch.tui.models.run import FollowedRun
from tests.support.frames import hello, step


def test_a_step_that_is_held_back_is_not_worked_out(monkeypatch):
    """Another rank's step with its number is there already."""
    run = FollowedRun()
    for message in (hello(0), hello(1), step(0, 1)):
        run.apply(message, 1)
    assert list(run.state.steps[1].ranks) == [0]
    monkeypatch.setattr(run.state._matcher, "add", lambda _: [])  # holds it back
    run.apply(step(1, 1), 2)
    assert list(run.state.steps[1].ranks) == [0]
