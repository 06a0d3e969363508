"""All ranks slower from a step on: devices show why, or it is said in which phase."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.accounts.accounts import StepSplit
from ddpwatch.analysis.diagnosis.causes.devices import DeviceCauses
from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.rules.level_shift import LevelShift
from ddpwatch.analysis.diagnosis.rules.slow_device import SlowDevice, common_work
from ddpwatch.analysis.diagnosis.standing import rejoined
from ddpwatch.analysis.diagnosis.words.next_steps import JobPlaces, next_step
from ddpwatch.wire.messages import Device, Hello, RankSample
from tests.support.frames import step

MS = 1_000_000
SECOND = 1000 * MS
SLOW = range(200, 400)  # steps
EVERY = 2  # steps, one of which is watched


def throttled(rank: int, at_ns: int, is_slow: bool) -> tuple[Device | None, RankSample | None]:
    """A GPU whose clock is limited by power while steps are slow."""
    about = {"sm_clock_mhz": 1400.0, "throttle_reasons": 0x04} if is_slow else {"sm_clock_mhz": 1980.0}
    gpu = {"index": rank, "uuid": f"GPU-{rank}", "max_sm_clock_mhz": 1980.0, "throttle_reasons": 0, **about}
    return Device(host="a", kind="cuda", at_ns=at_ns, **gpu), None  # type: ignore[arg-type]


def starved(rank: int, at_ns: int, is_slow: bool) -> tuple[Device | None, RankSample | None]:
    """A rank whose threads wait for a core while steps are slow."""
    wait_ns = int(0.3 * is_slow * SECOND)
    return None, RankSample(rank=rank, at_ns=at_ns, span_ns=SECOND, wait_ns=wait_ns, run_ns=SECOND // 2)


def full(rank: int, at_ns: int, is_slow: bool) -> tuple[Device | None, RankSample | None]:
    """A host on which threads wait for cores while steps are slow: other threads of a rank than those before."""
    sample = RankSample(
        rank=rank, at_ns=at_ns, span_ns=SECOND, wait_ns=SECOND // 6, run_ns=SECOND // (2 if is_slow else 12)
    )
    return Device(host="a", kind="cpu", at_ns=at_ns, cpu_pressure=97.0 if is_slow else 23.0), sample


def always_starved(rank: int, at_ns: int, is_slow: bool) -> tuple[Device | None, RankSample | None]:
    """A rank whose threads wait for a core all the time."""
    return starved(rank, at_ns, is_slow=True)


def healthy(rank: int, at_ns: int, is_slow: bool) -> tuple[Device | None, RankSample | None]:
    """A rank with a core and a clock of its own."""
    return starved(rank, at_ns, is_slow=False)


Samples = Callable[[int, int, bool], tuple[Device | None, RankSample | None]]


def work(took: int, grows: str = "backward") -> Mapping[str, int]:
    """What all ranks do in a step of 100 ms, and in a longer one, in which that phase grows."""
    usual = {"forward": 30 * MS, "backward": 60 * MS, "optimizer": 5 * MS, "between": 5 * MS, "other": 0}
    return {phase: ns + (took - 100 * MS) * (phase == grows) for phase, ns in usual.items()}


def found(samples: Samples, steps: int = 300, ranks: int = 4, grows: str = "backward") -> list[Incident]:
    """The incidents of a run whose steps take 100 ms, and 140 ms while it is slow."""
    causes, at, sampled = DeviceCauses(), 0, 0
    slow = SlowDevice(causes)
    for rank in range(ranks):
        causes.placement.add_hello(
            Hello(run_id="r", rank=rank, world_size=ranks, host="a", boot_id="", pid=1, device_uuid=f"GPU-{rank}")
        )
    for number in range(steps):
        took = (140 if number in SLOW else 100) * MS
        split = StepSplit(number, ranks * took, start_ns=at, end_ns=at + took)
        slow.add_split(split, work(took, grows) if number % EVERY == 0 else None)
        at += took
        if at - sampled >= SECOND:
            sampled = at
            for rank in range(ranks):
                device, sample = samples(rank, at, number in SLOW)
                if device is not None:
                    causes.add_device(device)
                if sample is not None:
                    causes.add_rank_sample(sample)
    return slow.incidents()


@pytest.mark.parametrize(
    ("samples", "severity", "device"),
    [
        (throttled, "warning", "clocks throttled by power (1,"),
        (starved, "info", "CPU starved: waited "),  # others had the cores
        (full, "info", "CPU starved: some thread waited "),
    ],
)
def test_all_ranks_are_slower_and_devices_show_why(samples: Samples, severity: str, device: str) -> None:
    (one,) = found(samples)
    assert (one.kind, one.ranks, one.open, one.severity) == ("slow_device", (), True, severity)
    assert one.device.startswith(device)
    assert one.since_step == pytest.approx(SLOW.start, abs=16 * EVERY)
    assert one.cost_ns == pytest.approx(100 * 4 * 40 * MS, rel=0.15)
    assert one.gain == pytest.approx(1 - 100 / 140, abs=0.02)
    assert one.message.startswith("all ranks are slower: a step takes ")
    assert one.evidence.longer == pytest.approx(0.4, abs=0.05)  # the first block is partly as fast as before


def test_it_is_over_when_steps_are_as_fast_as_before() -> None:
    (one,) = found(throttled, 600)
    assert not one.open
    assert one.message.startswith("all ranks were slower: a step took ")
    assert one.evidence.longer == pytest.approx(0.4, abs=0.05)  # the last block is partly as fast as before
    assert one.until_step == pytest.approx(SLOW.stop, abs=16 * EVERY)
    assert one.cost_ns == pytest.approx(200 * 4 * 40 * MS, rel=0.15)


@pytest.mark.parametrize(("samples", "is_short"), [(healthy, False), (always_starved, True)])
def test_a_job_that_does_more_from_a_step_on_is_an_info_that_says_where(samples: Samples, is_short: bool) -> None:
    (one,) = found(samples)
    assert (one.severity, one.phase, one.open, one.device) == ("info", "backward", True, "")
    assert one.message.endswith(" longer than before, most of it in the backward")
    assert one.evidence.longer == pytest.approx(0.4, abs=0.05)
    shown, other = next_step(one, JobPlaces()), f"see what the job does otherwise from step {one.since_step} on"
    assert shown.startswith("`ps -eo pid,pcpu,comm --sort=-pcpu` shows who has the cores" if is_short else other)
    assert (f"; else {other}" in shown) is is_short


def test_what_is_no_work_of_all_ranks_is_for_other_rules() -> None:
    assert not found(healthy, grows="data")
    for grows in ("optimizer", "between"):
        (one,) = found(healthy, grows=grows)
        assert one.phase == grows


def test_what_half_of_the_ranks_take_longer_is_not_common() -> None:
    across, alike = StepAcrossRanks(3), StepAcrossRanks(3)
    for rank in range(4):
        across.add_step(step(rank, 3, duration_ns=(100 + 40 * (rank > 1)) * MS))
        alike.add_step(step(rank, 3, duration_ns=100 * MS))
    assert common_work(across) == common_work(alike)
    assert sum(common_work(alike).values()) > 50 * MS


def test_steps_that_vary_are_no_level_of_their_own() -> None:
    """Every third one is as long as all are later on."""
    slow = SlowDevice(DeviceCauses())
    for number in range(400):
        took = (140 if number % 3 == 0 or number in SLOW else 100) * MS
        slow.add_split(StepSplit(number, took, start_ns=number * took), work(took))
    assert not slow.incidents()


def test_after_some_time_that_is_how_the_job_goes_on() -> None:
    slow = SlowDevice(DeviceCauses())
    for number in range(1200):
        took = (100 if number < 200 else 140 if number < 700 else 200) * MS
        slow.add_split(StepSplit(number, took, start_ns=number * took), work(took))
    found = rejoined(slow.incidents())
    assert [(one.since_step, one.open) for one in found] == [(200, False), (700, False)]
    assert all(one.evidence.stayed for one in found)
    assert all(one.message.startswith("all ranks were slower: a step took 4") for one in found)


def test_a_level_starts_where_values_stay_high_and_not_with_a_single_one_before() -> None:
    level = LevelShift(1.15)
    for at in range(100):
        long = at >= 60 or at in (53, 56)
        if level.add_value(at, (130 if long else 100) + at % 3):
            break
    assert level.since == 60
