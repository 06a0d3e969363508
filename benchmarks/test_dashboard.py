"""Checks what the benchmark of the dashboard says where it has no frames."""

from __future__ import annotations

from benchmarks.dashboard import WARM_UP_FRAMES, Measurement, report


def measurement(frames: int, first_paint_s: float | None = 1.5) -> Measurement:
    costs = [(0.004, 0.003)] * frames
    return Measurement(12.0, costs, costs, [0.01] if frames else [], 0.25, 1000.0, first_paint_s, 50 << 20)


def test_a_dashboard_without_a_frame_is_reported() -> None:
    measured = {8: measurement(40), 64: measurement(0, first_paint_s=None), 1024: measurement(WARM_UP_FRAMES)}
    heading, dashboard, never, _, *missing, done = report(measured, 4)
    assert "frame ms p50" in heading
    assert "4.0" in dashboard
    assert "–" not in dashboard
    assert never.count("–") == 7
    assert missing == ["64 ranks: no frame in 12 s", f"1024 ranks: only {WARM_UP_FRAMES} frames in 12 s"]
    assert done == "stopped after 3 of 4 rows"
