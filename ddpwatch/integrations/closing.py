"""A summary of a run, for the loggers of the process that trained: its collector has the figures."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ddpwatch.analysis.figures import Report
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.common.text import counted
from ddpwatch.errors import UsageError
from ddpwatch.report.headline import exposed_sentence, step_sentence
from ddpwatch.report.lost import lost_sentence
from ddpwatch.run import rundir
from ddpwatch.viewer.live_source import SNAPSHOT_S, LiveSource

PREFIX = "ddpwatch"
STARTING_S = 5.0
LAG_S = 3.0
LOOK_S = 0.05
_log = logging.getLogger("ddpwatch")


@dataclass(frozen=True)
class Closing:
    """The end of a run: one paragraph, and its figures as ``ddpwatch/steps/step_ms`` and so on."""

    text: str
    metrics: Mapping[str, float]


def closing() -> Closing | None:
    """Returns the summary of this process's run; None if the process is not watched, or the collector does not answer.

    It covers the steps that the collector retains: the newest 512. Call it on one rank, after the training.
    """
    from ddpwatch.probe.watch import current_run

    run_id, steps = current_run()
    if not run_id:
        return None
    try:
        return closing_of(_report(_endpoint(run_id), steps))
    except Exception as error:  # an error of ddpwatch's must not reach the job
        _log.warning("ddpwatch has no summary: %s", error)
        return None


def _endpoint(run_id: str) -> str:
    """Returns where the run publishes. The collector of a short run may still be starting."""
    deadline = time.monotonic() + STARTING_S
    while time.monotonic() < deadline and all(info.run_id != run_id for info in rundir.live_runs()):
        time.sleep(LOOK_S)
    return rundir.find(run_id).publish


def _report(endpoint: str, steps: int) -> Report:
    """Returns a report on what the collector retains. Waits up to `LAG_S` for the last steps of all ranks.

    Raises:
        UsageError: The collector does not answer.
    """
    source, builder = LiveSource(endpoint), ReportBuilder()
    until_s, has_answered = time.monotonic() + SNAPSHOT_S, False
    try:
        while time.monotonic() < until_s and not _complete(builder, steps):
            for message, envelope in source.read(LOOK_S):
                builder.apply_message(message, envelope.received_ns)
            if builder.ranks and not has_answered:
                until_s, has_answered = time.monotonic() + LAG_S, True
    finally:
        source.close()
    if not builder.ranks:
        raise UsageError("the run does not answer", "`ddpwatch ls` shows whether it is still live")
    return builder.report()


def _complete(builder: ReportBuilder, steps: int) -> bool:
    """Returns whether the last step of every rank has come."""
    ranks = builder.ranks.values()
    world_size = max((rank.hello.world_size for rank in ranks if rank.hello is not None), default=None)
    newest = [-1 if rank.last_step is None else rank.last_step.step for rank in ranks]
    return len(newest) == world_size and min(newest) >= steps - 1


def closing_of(report: Report) -> Closing | None:
    """Returns the summary of a report; None if it has no steps."""
    steps = report.steps
    return None if steps.step_ms is None else Closing(_paragraph(report), dict(_numbers(PREFIX, report.as_json())))


def _paragraph(report: Report) -> str:
    run = report.run
    parts = [
        f"{counted(run.world_size, 'rank')}, {counted(report.steps.count, 'step')}",
        step_sentence(report),
        exposed_sentence(report),
        lost_sentence(report).rstrip("."),
        *[incident.message.rstrip(".") for incident in report.incidents[:1]],
    ]
    return f"ddpwatch: {'. '.join(part for part in parts if part)}."


def _numbers(name: str, value: object) -> Iterator[tuple[str, float]]:
    """Yields all numbers that are in no list, by their path."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{name}/{key}", item)
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)
