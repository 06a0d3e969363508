"""The pure parts of `demo/whatif.py`; what it trains is run by hand, as it takes a minute."""

from __future__ import annotations

import pytest

from ddpwatch.whatif.answer import Prediction, ReplayedSetting, WhatIfAnswer
from demo.whatif import best_cap, main, outcome


def scenario(cap_mib: float, gain_ms: float) -> Prediction:
    return Prediction(
        change=f"bucket cap {cap_mib:g} MiB", kind="cap", cap_mib=cap_mib, step_ms=100 - gain_ms, low=95 - gain_ms,
        high=105 - gain_ms, p90_ms=104 - gain_ms, exposed_ms=0.0, gain_ms=gain_ms, gain=gain_ms / 100,
        gain_low_ms=gain_ms, gain_high_ms=gain_ms, more_steps=0, why="", assumes="", code="",
    )  # fmt: skip


def answer(*scenarios: Prediction) -> WhatIfAnswer:
    replayed = ReplayedSetting(step_ms=100, measured_ms=100, measured_p90_ms=104, error=0, exposed_ms=0)
    return WhatIfAnswer(
        steps=50, since_step=None, before=0, left_out=0, replayed=replayed, scenarios=scenarios, refused=()
    )


def test_the_best_cap_is_that_which_gains_most() -> None:
    best = best_cap(answer(scenario(1, -20), scenario(5, 12), scenario(10, 3)))
    assert best is not None
    assert best.cap_mib == 5


def test_what_gains_hardly_anything_is_not_worth_a_try() -> None:
    assert best_cap(answer(scenario(1, -20), scenario(5, 1))) is None
    assert best_cap(answer()) is None


@pytest.mark.parametrize(("measured_ms", "place", "off"), [(90.0, "within", "-2.2%"), (80.0, "outside", "+10.0%")])
def test_predicted_against_measured(measured_ms: float, place: str, off: str) -> None:
    line = outcome(scenario(5, 12), measured_ms)
    assert line.startswith("bucket cap 5 MiB: predicted 88 ms (83 to 93), measured ")
    assert f"{place} that" in line
    assert f"{off} off" in line
    assert line.endswith(f"{1 - measured_ms / 100:.0%} shorter than before")


def test_a_failed_training_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def failing(*_: object) -> int:
        raise RuntimeError("ranks ended with [1, 1]")

    monkeypatch.setattr("demo.whatif.why_not", lambda: "needs root")
    monkeypatch.setattr("demo.whatif.close_the_circle", failing)
    assert main([]) == 1
    said = capsys.readouterr()
    assert "over loopback" in said.out
    assert said.err == "whatif.py: error: ranks ended with [1, 1]\n"
