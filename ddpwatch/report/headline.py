"""The figures of a run that every report begins with, for every kind of text."""

from __future__ import annotations

from collections.abc import Mapping

from ddpwatch.analysis.diagnosis.words.account_names import rank_seconds
from ddpwatch.analysis.diagnosis.words.lost_time import LEAST_SHARE
from ddpwatch.analysis.figures import OverlapFigures, Report
from ddpwatch.analysis.means import ENOUGH_FULL
from ddpwatch.common.text import UNKNOWN, adding_up, number, percent, plus_minus, short_count, three_digits
from ddpwatch.common.units import S_PER_HOUR

PART_NAMES = {  # of a job's time, besides steps
    "pauses": "pauses with waits for them", "hangs": "hangs and deaths with waits for them", "startup": "start-up",
    "between_runs": "between runs", "other": "other",
}  # fmt: skip


def step_sentence(report: Report) -> str:
    """Returns what a step takes, of all steps."""
    steps = report.steps
    return (
        f"step {number(steps.step_ms)} ms (mean of all {steps.averaged} steps but warm-up and aborted ones; "
        f"p50 {number(steps.step_ms_p50)} ms, p90 {number(steps.step_ms_p90)} ms)"
    )


def exposed_sentence(report: Report) -> str:
    """Returns what communication adds to a step, and how much of it compute hides."""
    overlap, steps, waits = report.overlap, report.steps, report.phases_ms.get("exposed_comm")
    if waits and not steps.full and steps.watched > steps.shadow:
        return f"waits for collectives {number(waits)} ms; overlap {UNKNOWN}: when some of them ended is not known"
    parts = " + ".join(f"{text} {name}" for name, text in exposed_parts(overlap).items())
    return (
        f"exposed communication {_exposed(overlap)} ms{f' ({parts})' if parts else ''}, overlap {_overlap(overlap)} "
        f"of {number(overlap.comm_ms)} ms; {rests_on(report)}"
    )


def rests_on(report: Report) -> str:
    """Returns how many steps show communication, or that they are too few."""
    full, steps = report.steps.full, report.steps.averaged
    few = f", of {ENOUGH_FULL} needed: too few steps" if 0 < full < ENOUGH_FULL else ""
    return f"from the {full} of {steps} steps that are timed in full{few}"


def throughput_sentence(report: Report) -> str:
    """Returns what the job gets done, and what that rests on; empty if nothing is counted."""
    done, ranks = report.throughput, report.run.world_size
    if done is None:
        return ""
    found = [
        f"{short_count(rate)} {what}/s ({short_count(per_step)} a step)"
        for what, rate, per_step in (
            ("samples", done.samples_s, done.samples_per_step),
            ("tokens", done.tokens_s, done.tokens_per_step),
        )
        if per_step is not None
    ]
    if done.flops_per_step is not None:
        of_peak = "" if done.peak_flops_s is None else f" of {short_count(done.peak_flops_s, ' ')}FLOP/s"
        found.append(f"MFU {percent(done.mfu, 1)}{of_peak}: {short_count(done.flops_s, ' ')}FLOP/s by {done.flops_by}")
    return f"throughput: {', '.join(found) or UNKNOWN}; counted by {done.ranks} of {ranks or UNKNOWN} ranks"


def goodput_sentence(report: Report) -> str:
    """Returns which share of the job's rank-time steps took, what the rest was, and what lost time costs.

    Empty if a part of the recording was selected.
    """
    found = report.goodput
    if found is None:
        return ""
    unit, per_unit = rank_seconds(report.run.timing_source), 1
    if found.rank_seconds >= S_PER_HOUR:
        unit, per_unit = unit.replace("seconds", "hours"), S_PER_HOUR
    left = {PART_NAMES[part]: seconds for part, seconds in found.seconds.items() if part != "steps"}
    rest = [f"{three_digits(s / per_unit)} {name}" for name, s in left.items() if s >= LEAST_SHARE * found.rank_seconds]
    runs = f" in {len(found.runs)} runs" if len(found.runs) > 1 else ""
    whole = f"{three_digits(found.rank_seconds / per_unit)} {unit}{runs}"
    parts = [
        f"goodput: {percent(found.ratio, 1)} of {whole} are steps, with what is lost in them",
        f"the rest ({unit}): {', '.join(rest)}" if rest else "",
        f"lost in all: {three_digits(found.lost_hours * S_PER_HOUR / per_unit)} {unit}",
        f"cost: {three_digits(found.cost)}, {three_digits(found.lost_cost)} of it lost" if found.cost else "",
        f"the run before, {found.missing}, is not here" if found.missing else "",
    ]
    return "; ".join(filter(None, parts))


def exposed_parts(overlap: OverlapFigures) -> dict[str, str]:
    """Returns waiting and transfer (ms), which add up to what is exposed as it is shown, and what may be either."""
    if overlap.exposed_ms is None:
        return {}
    values = {
        "waiting": overlap.waiting_ms or 0.0,
        "transfer": overlap.transfer_ms or 0.0,
        "waiting or transfer": overlap.unsplit_ms or 0.0,
    }
    if values["waiting or transfer"] < 0.05:
        values["transfer"] += values.pop("waiting or transfer")
    elif values["waiting"] + values["transfer"] < 0.05:
        values = {"waiting or transfer": overlap.exposed_ms}
    return dict(zip(values, adding_up(overlap.exposed_ms, list(values.values())), strict=True))


def tiles(report: Report) -> Mapping[str, str]:
    """Returns the figures by name, with their units."""
    steps, overlap = report.steps, report.overlap
    return {
        "steps": str(steps.count),
        "step": number(steps.step_ms, unit=" ms"),
        "step p50": number(steps.step_ms_p50, unit=" ms"),
        "step p90": number(steps.step_ms_p90, unit=" ms"),
        "overlap": _overlap(overlap),
        "communication": number(overlap.comm_ms, unit=" ms"),
        "exposed": f"{_exposed(overlap)} ms",
        **{name: f"{text} ms" for name, text in exposed_parts(overlap).items()},
        "communication is": rests_on(report),
        **({"throughput": text.removeprefix("throughput: ")} if (text := throughput_sentence(report)) else {}),
        **({"goodput": text.removeprefix("goodput: ")} if (text := goodput_sentence(report)) else {}),
    }


def _exposed(overlap: OverlapFigures) -> str:
    return plus_minus(number(overlap.exposed_ms), number(overlap.exposed_reach_ms))


def _overlap(overlap: OverlapFigures) -> str:
    if overlap.ratio is None:
        return UNKNOWN
    ratio, reach = (percent(value).removesuffix(" %") for value in (overlap.ratio, overlap.ratio_reach))
    return f"{plus_minus(ratio, reach)} %"
