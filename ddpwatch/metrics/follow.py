"""Follows live runs, and keeps the figures that are exported up to date."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

from ddpwatch.common.text import counted
from ddpwatch.metrics.figures import NO_RUN, Board, Meter
from ddpwatch.metrics.otlp import pushing
from ddpwatch.metrics.prometheus import listening
from ddpwatch.run import rundir
from ddpwatch.run.rundir import RunInfo
from ddpwatch.viewer.follow import follow_run, new_runs
from ddpwatch.viewer.live_source import LiveSource, Source
from ddpwatch.viewer.state import RunState


def export(
    info: RunInfo | None, endpoint: str | None, listen: str | None, otlp: str | None, budget_ppm: int = 0
) -> None:
    """Exports a run's figures until it ends; without a run, those of the newest one, and of the next, forever.

    Args:
        info: The run.
        endpoint: Its publishing endpoint, instead.
        listen: Where Prometheus may scrape, as ``HOST:PORT``.
        otlp: URL of an OpenTelemetry collector.
        budget_ppm: See `LiveSource`.

    Raises:
        UsageError: A library is missing, or an address is not valid.
    """
    board, open_source = Board(), partial(LiveSource, budget_ppm=budget_ppm)
    with ExitStack() as stack:
        if listen is not None:
            _narrate(f"serving {stack.enter_context(listening(board, listen))}")
        if otlp is not None:
            _narrate(f"pushing to {stack.enter_context(pushing(board, otlp))}")
        if endpoint is not None or info is not None:
            follow(board, endpoint or info.publish, open_source)  # type: ignore[union-attr]
            return
        follow_all(board, open_source)


def follow_all(board: Board, open_source: Callable[[str], Source] = LiveSource) -> None:
    """Puts the figures of one run after the other on the board, forever; in between, only that none is live."""
    for info in new_runs(rundir.live_runs):
        _narrate(f"following {info.run_id}, {counted(info.world_size, 'rank')}")
        follow(board, info.publish, open_source)
        board.run_id, board.values = "", NO_RUN


def follow(board: Board, endpoint: str, open_source: Callable[[str], Source] = LiveSource) -> None:
    """Puts a run's figures on the board until it ends, or its collector is gone."""
    source, meter = open_source(endpoint), Meter()

    def read(state: RunState) -> None:
        board.run_id, board.values = state.run_id, meter.read(state)

    follow_run(source, endpoint, read)
    if source.over:
        _narrate(source.trouble)


def _narrate(text: str) -> None:
    print(f"ddpwatch: {text}", file=sys.stderr, flush=True)
