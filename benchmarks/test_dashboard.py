"""What the benchmark of the dashboard says where it has no frames."""

from __future__ import annotations

from benchmarks.dashboard import WARM_UP_FRAMES, Measurement, report


def measurement(frames: int, first_paint_s: float | None = 1.5) -> Measurement:
    costs = [(0.004, 0.003)] * frames
    return Measurement(12.0, costs, costs, [0.01] if frames else [], 0.25, 1000.0, first_paint_s, 50 << 20)


def test_a_slow_baseline_without_a_frame_is_reported() -> None:
    measured = {(8, "ddpwatch"): measurement(40), (8, "Rich table"): measurement(0, first_paint_s=None)}
    heading, dashboard, baseline, missing, done = report(measured, 4)
    assert "frame ms p50" in heading
    assert "4.0" in dashboard
    assert "–" not in dashboard
    assert baseline.count("–") == 7
    assert missing == "8 ranks, Rich table: no frame in 12 s"
    assert done == "stopped after 2 of 4 rows"


def test_warm_up_frames_alone_give_no_frame_time() -> None:
    lines = report({(1024, "Rich table"): measurement(WARM_UP_FRAMES)}, 1)
    assert lines[-2:] == [f"1024 ranks, Rich table: only {WARM_UP_FRAMES} frames in 12 s", "1 row"]
