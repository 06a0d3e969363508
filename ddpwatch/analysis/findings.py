"""Notes, which are no incidents, and findings, which are both. Keys and kinds are part of the report's JSON."""

from __future__ import annotations

import msgspec

from ddpwatch.analysis.diagnosis.incident import End, Severity
from ddpwatch.analysis.diagnosis.incident_json import IncidentFigures
from ddpwatch.analysis.diagnosis.words.wording import where_ended
from ddpwatch.analysis.figures import Finding, Report, RunFigures
from ddpwatch.analysis.step import MUCH_REST
from ddpwatch.common.text import percent, spans
from ddpwatch.version import GROUPS_HAVE_HOOKS, release_of, untested

NAMED_RANKS = 16
OTHER_COLLECTIVES = 0.5  # per step
_WHERE = {  # by the phase before
    "": "before the first phase",
    "data": "between the wait for data and the forward",
    "between": "before the forward",
    "forward": "between the forward and the backward (the loss; in a pipeline, sends and receives)",
    "backward": "between the backward and the optimizer's step (clipping, unscaling, a sharded optimizer's own work)",
    "optimizer": "after an optimizer's step (a sharded optimizer's own work, another optimizer, logging)",
}


def findings(report: Report) -> list[Finding]:
    """Returns what stands out in a report, worst first: its incidents, and notes on the recording."""
    incidents = (_of_incident(incident) for incident in report.incidents if incident.kind != "death")
    return _worst_first([*_ends(report), *incidents, *notes(report)])


def notes(report: Report) -> list[Finding]:
    """Returns what is worth knowing and no incident: frames that are missing, ranks that count differently."""
    about = (_off, _recording, _missing_ranks, _drops, _counts, _others, _rest, _torch)
    return _worst_first([finding for notes_of in about for finding in notes_of(report)])


def _torch(report: Report) -> list[Finding]:
    torch = report.run.torch or ""
    beyond = untested(torch)
    text = f"torch {torch} is {beyond}: parts of ddpwatch may be off; ddpwatch doctor tries them"
    return [_finding("untested_torch", "info", text, torch=torch)] if beyond else []


def _worst_first(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: ("error", "warning", "info").index(finding.severity))


def _of_incident(incident: IncidentFigures) -> Finding:
    rank = incident.ranks[0] if len(incident.ranks) == 1 else None
    evidence = {**msgspec.to_builtins(incident.evidence), "seconds": incident.seconds, "share": incident.share}
    return Finding(incident.kind, incident.severity, rank, incident.bucket, incident.message, evidence)


def _finding(
    kind: str, severity: Severity, message: str, rank: int | None = None, bucket: int | None = None, **evidence: object
) -> Finding:
    return Finding(kind, severity, rank, bucket, message, evidence)


def describe_end(end: End) -> str:
    """Returns how a rank ended: the reason, where it was, and which buckets were in flight.

    The text is part of the report's JSON, so it keeps its words, where a verdict has others.

    Args:
        end: A rank's ``end`` in the report.
    """
    if end.reason == "finished":
        return "finished"
    known = {"killed": f"was killed ({end.detail})", "exception": f"raised {end.detail}"}
    text = known.get(end.reason, f"was lost: {end.detail}") + where_ended(end.step, end.phase, ())
    return text + (f", bucket {', '.join(map(str, end.in_flight))} in flight" if end.in_flight else "")


def _ends(report: Report) -> list[Finding]:
    """Returns every rank that did not finish, the earliest first: the others are consequences."""
    ends = [(row.end, row.rank) for row in report.ranks if row.end is not None and row.end.reason != "finished"]
    return [
        _finding("rank_ended", "error", f"rank {rank} {describe_end(end)}", rank=rank, **msgspec.structs.asdict(end))
        for end, rank in sorted(ends, key=lambda pair: pair[0].at_ns)
    ]


def _recording(report: Report) -> list[Finding]:
    recording = report.recording
    if recording is None:
        return []
    found = []
    if restarts := recording.collector_restarts:
        count, often = recording.missing_steps, "once" if restarts == 1 else f"{restarts} times"
        text = f"the collector died and was started again {often}: {count} rank steps are missing"
        found.append(_finding("collector_restarts", "warning", text, restarts=restarts, missing_steps=count))
    elif recording.cut_tail:
        found.append(_finding("cut_tail", "info", "the recording was cut off; it is complete up to the cut"))
    if dropped := recording.dropped_parts:
        text = f"the oldest {dropped} parts of the recording were dropped to stay within --max-size"
        found.append(_finding("dropped_parts", "info", text, dropped_parts=dropped))
    if skipped := recording.skipped:
        text = f"frames left out: {skipped}, damaged or of a type unknown to this version of ddpwatch"
        found.append(_finding("skipped", "info", text, skipped=skipped))
    if lost := recording.lost:
        text = (
            f"{lost} frames are not in the recording: the disk was full, gone or too slow, or the recording viewer was"
        )
        found.append(_finding("recording_lost", "warning", text, lost=lost))
    if missing := recording.missing_parts:
        text = f"{missing} parts of the recording are missing: --max-size did not remove them"
        found.append(_finding("missing_parts", "warning", text, missing_parts=missing))
    return found


def _missing_ranks(report: Report) -> list[Finding]:
    """Says which ranks of the job are not in the recording: each has its own file, or all went to one collector."""
    recording, world_size = report.recording, report.run.world_size or 0
    files = None if recording is None else recording.rank_files
    there = [row.rank for row in report.ranks] if files is None else files
    missing = sorted(set(range(world_size)) - set(there))
    if recording is None or not there or not missing:
        return []
    names, many = spans(missing, NAMED_RANKS, ", "), len(missing) > 1
    whose = f"{len(missing)} of {world_size} ranks ({names})" if many else f"rank {names}"
    if files is None:
        text = f"the collector never heard of {whose}, so the recording says nothing of {'them' if many else 'it'}"
    else:
        text = f"the recording of {whose} is missing: every rank records into its own file, and it is not here"
    return [_finding("missing_ranks", "warning", text, ranks=missing[:NAMED_RANKS], count=len(missing))]


def _off(report: Report) -> list[Finding]:
    """Returns what ddpwatch has stopped seeing after an error of its own."""
    return [
        _finding("off", "warning", off.message, feature=off.feature, ranks=list(off.ranks), step=off.step)
        for off in report.off
    ]


def _drops(report: Report) -> list[Finding]:
    return [
        _finding("drops", "warning", f"rank {row.rank} lost {row.dropped} frames", row.rank, dropped=row.dropped)
        for row in report.ranks
        if row.dropped
    ]


def _counts(report: Report) -> list[Finding]:
    """Reports ranks that lost nothing, and yet count different steps: one of them skips batches."""
    rows = [row for row in report.ranks if not row.dropped and row.end is not None and row.end.reason == "finished"]
    counts = {row.rank: row.steps for row in rows}
    if report.recording is not None and report.recording.missing_steps:
        return []
    if max(counts.values(), default=0) <= 1 + min(counts.values(), default=0):
        return []
    fewest, most = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
    text = f"the ranks count different steps: rank {fewest} {counts[fewest]}, rank {most} {counts[most]}"
    return [
        _finding("step_counts", "info", f"{text}; they are matched by their collectives", rank=fewest, steps=counts)
    ]


def _others(report: Report) -> list[Finding]:
    """Reports collectives of the job that are not DDP's, unless they would be seen: then only buffers are left."""
    if any(row.kind == "call" for row in report.collectives) or _sees_own(report.run):
        return []
    counts = [group.other_collectives_per_step or 0.0 for group in report.groups]
    most = max(counts, default=0.0)
    if most < OTHER_COLLECTIVES:
        return []
    text = f"{most:.1f} collectives a step on a watched group are not DDP's buckets"
    text += " (SyncBatchNorm, buffers, metrics, …): they are not timed, so waits in them count as their phase;"
    text += " on CPUs, Python 3.12 or torch 2.14 times them"
    return [_finding("other_collectives", "info", text, per_step=most)]


def _sees_own(run: RunFigures) -> bool:
    """Returns whether a job's own collectives are seen for sure: on CPUs, where process groups have hooks."""
    return run.timing_source == "host" and (release_of(run.torch or "") or (0, 0)) >= GROUPS_HAVE_HOOKS


def _rest(report: Report) -> list[Finding]:
    """Says where the part of a step lies that is in no phase, if much of a step is known to be in none."""
    known = [ms for ms in report.phases_ms.values() if ms is not None]
    share = (report.phases_ms.get("other") or 0.0) / sum(known) if sum(known) else 0.0
    after = max(report.rest_after, key=report.rest_after.__getitem__, default=None)
    if share * sum(report.rest_after.values()) <= MUCH_REST or after is None:
        return []
    text = (
        f"the rest is {percent(share)} of the mean step: {percent(report.rest_after[after])} of it lies {_WHERE[after]}"
    )
    return [_finding("rest", "info", text, share=share, after=after)]
