"""What an incident rests on, in sentences with units: one for each field of the evidence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from ddpwatch.analysis.diagnosis.incident import DeniedTime, DeviceFigures, End, Evidence, MemoryFigures
from ddpwatch.analysis.diagnosis.words.lost_time import LEAST_SHARE
from ddpwatch.analysis.diagnosis.words.wording import (
    how_ended,
    longer_than,
    ms_named,
    processes_named,
    ranks_named,
    where_ended,
)
from ddpwatch.common.text import percent, size, three_digits

# `wording.stack_lines` shows the stacks, and the incident's message says the rest.
ELSEWHERE: Final = (
    "stacks", "call_sites", "no_stack", "rest_after", "watched_steps", "excess_ms", "parts_ms", "share_of_step",
    "bucket_place",
)  # fmt: skip
_WHY: Final = {
    "behind": "blamed because others have issued more collectives",
    "elsewhere": "blamed because it does something else, while others wait for it",
    "silent": "blamed because nothing comes from it",
    "finished": "the others wait for ranks that have finished",
    "crossed": "nobody is blamed: each waits in another group",
    "unknown": "nobody is blamed: no rank is behind",
    "mismatch": "ranks wait for each other in different collectives",
}
_SHARES: Final = {  # of the time, by the name of a device's figure
    "wait": "a thread that wanted a core waited for one {} of the time",
    "run": "its threads ran {} of the time",
    "workers_run": "its DataLoader's workers ran {} of the time",
    "workers_wait": "its DataLoader's workers waited for a core {} of the time",
    "workers_read": "its DataLoader's workers wait for what they read, and ran {} of the time",
    "workers_ready": "batches were ready in {} of its waits for data",
    "lost_clock": "{} of the highest clock was lost",
    "steal": "{} of the CPU time went to other guests of the hypervisor",
    "cgroup_throttled": "the CPU limit was reached in {} of its periods",
    "cpu_pressure": "some thread waited for a core for {} of the time",
    "memory_pressure": "some thread waited for memory for {} of the time",
    "io_pressure": "some thread waited for a disk for {} of the time",
    "lost_pcie": "{} of the PCIe link's rate was lost",
}
_RATES: Final = {
    "preempted_s": "its threads lost their core {} times a second", "workers": "its DataLoader has {} workers",
    "net_rx_errors_s": "{} receive errors a second", "net_tx_errors_s": "{} transmit errors a second",
    "net_rx_drops_s": "{} incoming packets dropped a second", "net_tx_drops_s": "{} outgoing packets dropped a second",
    "link_downs_s": "{} network links went down a second", "retransmits_s": "{} packets sent again a second",
    "congestion_s": "{} congestion notifications a second", "oom_kills_s": "{} OOM kills a second",
    "new_ecc_errors": "{} uncorrected memory errors a sample", "clock_mhz": "its clock ran at {} MHz",
    "max_clock_mhz": "its highest clock is {} MHz", "new_link_errors": "{} PCIe and NVLink errors a sample",
    "new_xids": "{} XIDs a sample", "nvlinks_down": "{} of its NVLinks were down",
    "pcie_width": "its PCIe link had {} lanes", "pcie_max_width": "its PCIe link can have {} lanes",
    "pcie_generation": "its PCIe link was of generation {} then",
    "pcie_max_generation": "its PCIe link can be of generation {} here",
}  # fmt: skip
_SIZES: Final = {
    "workers_read_s": "its DataLoader's workers read {} a second from disks",
    "swapped_bytes": "{} of it is swapped out", "swap_in_bytes_s": "{} swapped in a second",
    "swap_out_bytes_s": "{} swapped out a second", "swap_bytes_s": "{} swapped a second",
}  # fmt: skip


def evidence_sentences(evidence: Evidence, steps: int = 0, occurrences: int = 1) -> list[str]:
    """Returns a sentence for each figure that an incident rests on, but for its stacks.

    Args:
        evidence: The figures.
        steps: How many it struck; 0 if that is not known.
        occurrences: How many times it came.
    """
    watched = evidence.watched_steps
    of = _count(steps) if watched is None else f"{steps} of the {_count(watched)} that were timed"
    found = [f"it struck {of}"] if steps else []
    if occurrences > 1:
        found.append(f"it came {occurrences} times")
    for name, value in evidence.known().items():
        if name not in ELSEWHERE:
            found += SENTENCES[name](value)
    return [text for text in found if text]


def _count(steps: int) -> str:
    return f"{steps} step{'' if steps == 1 else 's'}"


def _one(text: str) -> Callable[[Any], list[str]]:
    """Returns a sentence with a place for the figure."""
    return lambda value: [text.format(value)]


def _ms(text: str) -> Callable[[float], list[str]]:
    return lambda value: [text.format(ms_named(value))]


def _ranks(text: str) -> Callable[[Sequence[int]], list[str]]:
    return lambda value: [text.format(ranks_named(sorted(value)))]


def _issued(counts: Mapping[int, int]) -> list[str]:
    return [f"collectives issued: {', '.join(f'{count} by rank {rank}' for rank, count in [*counts.items()][:16])}"]


def _busbw(rates: Sequence[str]) -> str:
    if len(rates) == 1:
        return f"its data travels at {rates[0]} GB/s (bus bandwidth)"
    return f"bus bandwidth: {rates[0]} GB/s before, {rates[1]} GB/s since"


def _memory(memory: MemoryFigures) -> list[str]:
    return [f"it uses {size(memory.used_bytes)}", f"{size(memory.left_bytes)} are left there"]


def _ends(ends: Mapping[int, End]) -> list[str]:
    return [
        f"rank {rank} " + ("finished" if end.reason == "finished" else how_ended(end))
        + where_ended(end.step, end.phase, end.in_flight)
        for rank, end in [*ends.items()][:16]
    ]  # fmt: skip


def _device(found: DeviceFigures | DeniedTime) -> list[str]:
    if isinstance(found, DeniedTime):
        return [f"the machine let the job wait for {ms_named(found.denied_ms)}"]
    known = {found.cause: found.value, **found.figures, **(found.process or {})}
    said = [_figure(name, value) for name, value in known.items()]
    named = f"on host {found.host}" if found.host else ""
    whose = f"rank {found.rank}'s device" if found.rank is not None else ""
    compared = [
        f"{text} {_value(found.cause, value)}"
        for text, value in (("before, it was", found.before), ("with the other ranks, it was", found.peers))
        if value is not None
    ]
    also = [f"also: {text}" for text in found.also or ()]
    busy = [f"busiest: {processes_named(found.busy)}"] if found.busy else []
    return [*filter(None, [named, whose, said[0]]), *compared, *filter(None, said[1:]), *also, *busy]


def _value(name: str, value: float) -> str:
    if name in _SHARES:
        return percent(value, 1 if value < 0.095 else 0)
    return size(value) if name in _SIZES else three_digits(value)


def _figure(name: str, value: float) -> str:
    """Returns a device's figure as a text; empty for one that is 0, or shown as 0, and so says nothing."""
    if value < (LEAST_SHARE if name in _SHARES else 0) or not value:
        return ""
    text = {**_SHARES, **_RATES, **_SIZES}.get(name)
    if text is None:  # a reason for a lower clock, by its name
        text = f"{name} limits the clock {{}} of the time"
        return text.format(percent(value))
    return text.format(_value(name, value))


SENTENCES: Final[Mapping[str, Callable[[Any], list[str]]]] = {
    "host": _one("on host {}"),
    "late_ranks": _ranks("late are {}"),
    "late_ms": _ms("late by {} in such a step"),
    "throughout": lambda throughout: ["all of its gradients come more slowly"] if throughout else [],
    "step_ms": _ms("a typical step took {} when it was found"),
    "group": _ranks("compared among {}"),
    "own_stage": lambda _: ["these have other stages of its pipeline: it may have more to do"],
    "why": lambda why: [_WHY.get(why, "")],
    "issued": _issued,
    "longest_ms": _ms("the longest took {}"),
    "ranks": lambda ranks: [f"in a run of {ranks} rank{'' if ranks == 1 else 's'}"],
    "unwatched": lambda unwatched: ["in steps of which only the duration is known"] if unwatched else [],
    "beyond_tail": lambda beyond: [f"{'' if beyond else 'no '}longer than this job's long steps usually are"],
    "denied": lambda denied: ["for most of it, the machine did not let the job run"] if denied else [],
    "ends": _ends,
    "hung": _ranks("before, {} held up the others"),
    "steps": lambda steps: [f"nothing was reduced in {_count(steps)}"],
    "reductions": lambda times: [f"{times} reductions per update"],
    "growth": lambda share: [f"a step takes {longer_than(1 + share, 'at first')}"],
    "longer": lambda share: [f"a step takes {longer_than(1 + share, 'before')}"],
    "stayed": lambda _: ["steps stayed as long as that: it is usual from then on"],
    "slower": lambda times: [f"transfers take {longer_than(times, 'before')}"],
    "busbw_gbps": lambda rates: [_busbw([three_digits(rate) for rate in rates])],
    "memory": _memory,
    "device": _device,
}
assert {*SENTENCES, *ELSEWHERE} == set(Evidence.__struct_fields__), "each figure has its sentence"
