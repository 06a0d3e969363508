"""Causes outside the job, from made-up samples: found, told apart, and not found where there are none."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
from msgspec.structs import replace

from ddpwatch.analysis.clocks import Shift
from ddpwatch.analysis.diagnosis.causes.devices import MOST_SERIES, DeviceCauses
from ddpwatch.analysis.diagnosis.causes.series import FULL_ROWS, MEAN_ROWS, MOST_MEANS, Series
from ddpwatch.wire.messages import BATCH_WAIT, BusyProcess, Device, Hello, Mark, RankSample

SECOND = 1_000_000_000
HEAT, POWER, IDLE = 0x40, 0x04, 0x01
FAULT = (60, 90)  # seconds from when until when it lasts


def hello(rank: int, host: str = "a", gpu: bool = False, boot_id: str = "") -> Hello:
    uuid = f"GPU-{rank}" if gpu else ""
    return Hello(run_id="r", rank=rank, world_size=8, host=host, boot_id=boot_id, pid=1, device_uuid=uuid)


def waiting(rank: int, second: int, share: float, run: float = 0.5) -> RankSample:
    return RankSample(
        rank=rank, at_ns=second * SECOND, span_ns=SECOND, wait_ns=int(share * SECOND), run_ns=int(run * SECOND)
    )


def host(name: str, second: int, **figures: Any) -> Device:
    return Device(host=name, kind="cpu", at_ns=second * SECOND, **figures)


def gpu(rank: int, second: int, clock: float, reasons: int) -> Device:
    return Device(
        host="a", kind="cuda", at_ns=second * SECOND, index=rank, uuid=f"GPU-{rank}", sm_clock_mhz=clock,
        max_sm_clock_mhz=1980.0, throttle_reasons=reasons,
    )  # fmt: skip


def hosts(figures: Mapping[str, float | str], quiet: Mapping[str, float | str], names: str = "a") -> DeviceCauses:
    """Hosts of one rank each; the first one has these figures during the fault, and the quiet ones before."""
    causes = DeviceCauses()
    for rank, name in enumerate(names):
        causes.placement.add_hello(hello(rank, name))
    for second in range(1, FAULT[1] + 1):
        for name in names:
            bad = name == names[0] and second > FAULT[0]
            causes.add_device(host(name, second, **(figures if bad else quiet)))
    return causes


def starved(shares: Iterable[float], before: float = 0.0, run: float = 0.5) -> DeviceCauses:
    """A rank per share of the time that it waits for a core during the fault."""
    causes = DeviceCauses()
    for rank, share in enumerate(shares):
        causes.placement.add_hello(hello(rank))
        for second in range(1, FAULT[1] + 1):
            causes.add_rank_sample(waiting(rank, second, share if second > FAULT[0] else before, run))
    return causes


def text(causes: DeviceCauses, rank: int | None = 0) -> str:
    cause = causes.cause(rank, FAULT[0] * SECOND, FAULT[1] * SECOND)
    return "" if cause is None else cause.text


def test_a_rank_that_waits_for_a_core_is_starved() -> None:
    cause = starved([0.38, 0.01, 0.0, 0.02]).cause(0, FAULT[0] * SECOND, FAULT[1] * SECOND)
    assert cause is not None
    assert cause.text == "CPU starved: waited 38 % of the time for a core"
    assert cause.evidence.cause == "wait"
    assert cause.evidence.value == pytest.approx(0.38)
    assert cause.evidence.peers < 0.05
    assert cause.evidence.before == 0.0


@pytest.mark.parametrize(("share", "explains"), [(0.0, True), (0.75, True), (0.77, False)])
def test_a_shortage_is_a_cause_if_it_explains_half_of_what_an_incident_takes(share: float, explains: bool) -> None:
    """A rank's wait for data took 44 of 89 ms, of which it waited 7 ms for a core: that was said to be why."""
    took = FAULT[0] * SECOND, FAULT[1] * SECOND, share
    waits = starved([0.38, 0.01, 0.0])
    assert (waits.cause(0, *took) is not None) is explains
    assert (starved([0.38] * 3).cause(None, *took) is not None) is explains
    assert (waits.cause_among([0, 1], *took) is not None) is explains
    assert (hosts({"steal": 38.0}, {"steal": 0.0}).cause(0, *took) is not None) is explains
    assert hosts({"net_rx_drops_s": 340.0}, {"net_rx_drops_s": 0.0}).cause(0, *took) is not None  # no share of time


def test_where_cores_are_short_for_all_the_ranks_own_waits_say_how_much() -> None:
    full = {"cpu_pressure": 93.0}, {"cpu_pressure": 0.0}
    took = FAULT[0] * SECOND, FAULT[1] * SECOND
    for wait, share, expected in ((0.1, 0.2, "waited 10 %"), (0.04, 0.1, ""), (0.045, 0.08, "some thread waited")):
        causes = hosts(*full)
        for second in range(1, FAULT[1] + 1):
            causes.add_rank_sample(waiting(0, second, wait if second > FAULT[0] else 0.0))
        cause = causes.cause(None, *took, share)
        assert expected in ("" if cause is None else cause.text)
        assert (cause is None) == (not expected)


def test_ranks_that_all_wait_are_not_late_for_that_but_slow() -> None:
    causes = starved([0.45] * 4, before=0.45)
    assert text(causes, 0) == ""
    assert text(causes, None) == ""  # no more than before
    whole = causes.cause(None, 0, FAULT[1] * SECOND)  # the whole run: there is no before
    assert whole is not None
    assert whole.text.startswith("CPU starved: waited 45 %")


def test_a_rank_that_sleeps_less_than_its_peers_is_not_starved_more() -> None:
    """It computes longer and so waits longer for a core, as everybody on this full host would."""
    causes = DeviceCauses()
    for rank, (wait, run) in enumerate([(0.45, 0.45), (0.2, 0.2), (0.22, 0.22)]):
        causes.placement.add_hello(hello(rank))
        for second in range(1, FAULT[1] + 1):
            causes.add_rank_sample(waiting(rank, second, wait, run))
    assert text(causes) == ""


@pytest.mark.parametrize(
    ("run", "wait", "expected"),
    [
        (0.97, 0.01, "the DataLoader's workers are busy: they run 97 % of the time"),
        (0.5, 0.4, "the DataLoader's workers are CPU starved: wait 44 % of the time for a core"),
        (0.08, 0.0, "the DataLoader's workers wait for what they read: they run 8 % of the time, and read 5.7 MiB/s"),
        (0.7, 0.01, ""),
    ],
)
def test_what_limits_the_workers_of_a_data_loader(run: float, wait: float, expected: str) -> None:
    causes = DeviceCauses()
    for rank in range(2):
        causes.placement.add_hello(hello(rank))
        for second in range(1, FAULT[1] + 1):
            figures = {"workers_run_ns": int(2 * run * SECOND), "workers_wait_ns": int(2 * wait * SECOND)}
            read = {"workers": 2, "workers_read_bytes": 3_000_000 * (1 + rank)}
            causes.add_rank_sample(RankSample(rank=rank, at_ns=second * SECOND, span_ns=SECOND, **figures, **read))
    for rank in (None, 1):
        cause = causes.workers(rank, FAULT[0] * SECOND, FAULT[1] * SECOND)
        assert ("" if cause is None else cause.text).startswith(expected.replace("5.7", "5.7" if rank else "4.3"))
        assert (cause is None) == (not expected)
    assert DeviceCauses().workers(None, 0, SECOND) is None
    for rank in range(2):
        for at in range(FAULT[0] + 1, FAULT[1] + 1):
            wait_ns = {"start_ns": at * SECOND - 6_000_000, "end_ns": at * SECOND}
            causes.add_mark(Mark(rank=rank, kind="data", name=BATCH_WAIT, workers=2, ready=at % 5 != rank, **wait_ns))
    cause = causes.workers(None, FAULT[0] * SECOND, FAULT[1] * SECOND)
    assert cause is not None  # whatever else workers do meanwhile
    assert cause.text == "batches were ready in 80 % of the waits: receiving them takes that long"


def test_a_rank_alone_is_compared_with_itself() -> None:
    assert text(starved([0.38])).startswith("CPU starved")
    assert text(starved([0.38], before=0.38)) == ""


HOST_CASES = [
    ({"steal": 31.0}, "31 % of CPU time stolen"),
    ({"cgroup_throttled": 22.0}, "cgroup CPU limit: throttled in 22 % of its periods"),
    ({"memory_pressure": 60.0}, "short of memory: some thread waited for it for 60 % of the time"),
    ({"swap_in_bytes_s": 9e6, "swap_out_bytes_s": 3e6}, "host swaps (12 MB/s)"),
    ({"net_rx_errors_s": 340.0, "net_faulty": "eth0"}, "eth0: 340 receive errors/s"),
    ({"net_tx_drops_s": 1340.0, "net_faulty": "eth0"}, "eth0: 1,340 outgoing packets dropped per second"),
    ({"io_pressure": 40.0}, "short of disk: some thread waited for it for 40 % of the time"),
    ({"oom_kills_s": 1.0}, "the kernel killed a process for want of memory (OOM)"),
    ({"link_downs_s": 1.0, "net_faulty": "mlx5_0/1"}, "mlx5_0/1: a network link went down"),
    ({"retransmits_s": 340.0}, "340 packets/s are lost and sent again"),
    ({"congestion_s": 20_000.0}, "20,000 congestion notifications/s slow RDMA down"),
    ({"cpu_pressure": 80.0}, "CPU starved: some thread waited for a core for 80 % of the time"),
]


@pytest.mark.parametrize(("figures", "expected"), HOST_CASES, ids=[next(iter(case[0])) for case in HOST_CASES])
def test_what_is_wrong_with_a_host(figures: dict[str, float | str], expected: str) -> None:
    quiet: dict[str, float | str] = {name: 0.0 for name, value in figures.items() if isinstance(value, float)}
    assert text(hosts(figures, quiet)) == expected
    assert text(hosts(figures, quiet, "abc")) == f"host a: {expected}"
    assert text(hosts(quiet, quiet)) == ""
    assert text(hosts(figures, figures)) == ""  # as before
    assert text(hosts(figures, figures, "abc")) == ""  # as everywhere
    assert text(hosts(figures, {})) == ""  # nothing to compare with


@pytest.mark.parametrize(("figure", "shows"), [("cpu_pressure", True), ("steal", False)])
def test_where_cores_are_short_the_busiest_processes_are_known(figure: str, shows: bool) -> None:
    busy = [BusyProcess(9, "make", 97.0)]
    for rank in (0, None):
        causes = hosts({figure: 80.0}, {figure: 0.0})
        for seen in (None, busy if shows else None):
            cause = causes.cause(rank, FAULT[0] * SECOND, FAULT[1] * SECOND)
            assert cause is not None
            assert cause.evidence.busy == seen
            causes.add_device(host("a", FAULT[1], **{figure: 80.0}, busy=busy))


def test_with_peers_it_does_not_matter_how_long_it_has_been_so() -> None:
    causes = hosts({"steal": 31.0}, {"steal": 0.0}, "abc")
    assert causes.cause(0, 70 * SECOND, 90 * SECOND) is not None
    assert causes.cause(1, 70 * SECOND, 90 * SECOND) is None


def test_the_pressure_on_a_host_says_nothing_of_a_rank_whose_waits_are_known() -> None:
    causes = hosts({"cpu_pressure": 80.0}, {"cpu_pressure": 0.0})
    for second in range(1, FAULT[1] + 1):
        causes.add_rank_sample(waiting(0, second, 0.0))
    assert text(causes) == ""


def gpus(clocks: list[tuple[float, int]]) -> DeviceCauses:
    causes = DeviceCauses()
    for rank, (clock, reasons) in enumerate(clocks):
        causes.placement.add_hello(hello(rank, gpu=True))
        for second in range(1, FAULT[1] + 1):
            causes.add_device(gpu(rank, second, clock, reasons))
    return causes


def test_clocks_that_are_throttled() -> None:
    full = (1980.0, 0)
    assert text(gpus([(1200.0, POWER), full, full])) == "clocks throttled by power (1,200 of 1,980 MHz)"
    assert text(gpus([(1200.0, HEAT | 0x08), full, full])) == "clocks throttled by heat (1,200 of 1,980 MHz)"
    assert text(gpus([(1200.0, 0x02), full, full])) == "clocks limited by a setting (1,200 of 1,980 MHz)"
    assert text(gpus([(345.0, IDLE), full, full])) == ""  # an idle GPU slows down by itself
    assert text(gpus([(1200.0, POWER)] * 3)) == ""
    assert text(gpus([(1200.0, POWER)] * 3), None) == ""  # no more than before
    cause = gpus([(1200.0, POWER)] * 3).cause(None, 0, FAULT[1] * SECOND)
    assert cause is not None
    assert cause.text == "clocks throttled by power (1,200 of 1,980 MHz)"
    assert cause.evidence.figures["clock_mhz"] == 1200.0


def test_a_gpu_of_another_job_is_no_peer() -> None:
    causes = gpus([(1700.0, POWER), (1700.0, POWER), (1700.0, POWER)])
    for second in range(1, FAULT[1] + 1):
        for rank in range(10, 20):
            causes.add_device(gpu(rank, second, 1980.0, 0))
    assert text(causes) == ""


def test_new_memory_errors_of_a_gpu() -> None:
    causes = DeviceCauses()
    causes.placement.add_hello(hello(0, gpu=True))
    for second in range(1, FAULT[1] + 1):
        errors = 7 if second < FAULT[1] - 5 else 9
        causes.add_device(Device(host="a", kind="cuda", at_ns=second * SECOND, uuid="GPU-0", ecc_errors=errors))
    assert text(causes) == "uncorrected errors in the GPU's memory (ECC)"


LINK = {"pcie_width": 16, "pcie_max_width": 16, "pcie_generation": 5, "pcie_max_generation": 5, "utilization": 90.0}
GPU_CASES = [
    ({"pcie_width": 8}, "PCIe link: x8 of 16"),
    ({"pcie_generation": 3}, "PCIe link: generation 3 of 5"),
    ({"nvlinks_down": 2}, "NVLinks are down: 2"),
    ({"pcie_generation": 1, "utilization": 0.0}, ""),  # an idle GPU saves power
]


@pytest.mark.parametrize(("figures", "expected"), GPU_CASES, ids=[next(iter(case[0])) for case in GPU_CASES])
def test_the_links_of_a_gpu(figures: dict[str, float], expected: str) -> None:
    def told(own: dict[str, float], others: dict[str, float]) -> str:
        causes = DeviceCauses()
        for rank in range(3):
            causes.placement.add_hello(hello(rank, gpu=True))
            for second in range(1, FAULT[1] + 1):
                known: dict[str, Any] = LINK | {"nvlinks_down": 0} | (others if rank else own)
                sample = Device(host="a", kind="cuda", at_ns=second * SECOND, uuid=f"GPU-{rank}", **known)
                causes.add_device(sample)
        return text(causes)

    assert told(figures, {}) == expected
    assert told({}, figures) == ""
    assert told(figures, figures) == ""  # as everywhere


@pytest.mark.parametrize(("counter", "expected"), [("xids", "error: XID 79"), ("link_errors", "errors/s")])
def test_new_events_and_errors_of_a_gpu(counter: str, expected: str) -> None:
    causes = DeviceCauses()
    causes.placement.add_hello(hello(0, gpu=True))
    for second in range(1, FAULT[1] + 1):
        new = 0 if second < FAULT[1] - 5 else 100 * (second - FAULT[1] + 6)
        known: dict[str, Any] = {counter: 3 + new, "xid": 79 if new else 13}
        causes.add_device(Device(host="a", kind="cuda", at_ns=second * SECOND, uuid="GPU-0", **known))
    assert expected in text(causes)


def test_the_worst_comes_first_and_the_others_are_evidence() -> None:
    causes = hosts({"steal": 12.0, "swap_in_bytes_s": 50e6}, {"steal": 0.0, "swap_in_bytes_s": 0.0})
    cause = causes.cause(0, FAULT[0] * SECOND, FAULT[1] * SECOND)
    assert cause is not None
    assert cause.text == "host swaps (50 MB/s)"
    assert cause.evidence.also == ["12 % of CPU time stolen"]


def test_a_pause_between_two_samples_is_in_the_second() -> None:
    causes = starved([0.0, 0.0])
    causes.add_rank_sample(waiting(0, FAULT[1] + 1, 0.6))
    causes.add_rank_sample(waiting(1, FAULT[1] + 1, 0.0))
    start = FAULT[1] * SECOND + SECOND // 10
    assert causes.cause(0, start, start + SECOND // 5) is not None
    assert causes.cause(0, start - SECOND, start - SECOND // 2) is None


def test_hosts_on_other_clocks() -> None:
    causes = DeviceCauses()
    shift = 1000
    for rank, (name, steal) in enumerate([("a", 31.0), ("b", 0.0)]):
        causes.placement.add_hello(hello(rank, name))
        for second in range(1, 31):
            causes.add_device(host(name, second + shift * rank, steal=steal))
    assert causes.cause(0, 5 * SECOND, 25 * SECOND) is None  # nobody to compare with
    causes.note_clocks({1: Shift(("b", ""), ("a", ""), -shift * SECOND, 0)})
    assert causes.cause(0, 5 * SECOND, 25 * SECOND) is not None
    assert causes.cause(1, 5 * SECOND, 25 * SECOND) is None


def test_unknown_is_no_cause() -> None:
    causes = DeviceCauses()
    assert causes.cause(0, 0, SECOND) is None
    assert causes.cause(None, 0, SECOND) is None
    causes.placement.add_hello(hello(0))
    causes.add_device(host("a", 1))
    causes.add_rank_sample(RankSample(rank=0, at_ns=SECOND, span_ns=SECOND))
    assert causes.cause(0, 0, SECOND) is None
    assert causes.cause(None, 0, SECOND) is None


# -- memory --------------------------------------------------------------------------------------------------


def test_a_series_keeps_two_minutes_and_means_of_the_rest() -> None:
    series = Series(1)
    for second in range(1, 3601):
        series.add_sample(second * SECOND, [float(second)])
    assert series.count(0, 3600 * SECOND) <= FULL_ROWS + MEAN_ROWS * (MOST_MEANS + 1)
    assert series.means(3590 * SECOND, 3600 * SECOND) == [3595.5]
    ten_minutes = series.means(3000 * SECOND, 3600 * SECOND)[0]
    assert ten_minutes == pytest.approx(3300.5, abs=MEAN_ROWS)
    assert series.means(0, 60 * SECOND) == [None]


def test_a_series_leaves_out_what_was_not_measured() -> None:
    series = Series(2)
    series.add_sample(1, [1.0, None])
    series.add_sample(2, [None, None])
    series.add_sample(3, [3.0, None])
    assert series.means(0, 3) == [2.0, None]


def test_time_that_goes_back_is_another_clock() -> None:
    series = Series(1)
    series.add_sample(100, [1.0])
    series.add_sample(5, [2.0])
    assert series.means(0, 1000) == [2.0]


def stolen_from(second: int, boot_id: str) -> Device:
    """A sample of a host: in the fault, from that boot on."""
    return replace(host("node", second, steal=31.0 if boot_id == "two" and second > FAULT[0] else 0.0), boot_id=boot_id)


def test_hosts_of_one_name_are_two() -> None:
    causes = DeviceCauses()
    for rank, boot_id in enumerate(("one", "two")):
        causes.placement.add_hello(hello(rank, "node", boot_id=boot_id))
    for second in range(1, FAULT[1] + 1):
        for boot_id in ("two", "one"):
            causes.add_device(stolen_from(second, boot_id))
    assert [text(causes, rank) for rank in (0, 1)] == ["", "host node: 31 % of CPU time stolen"]


def test_devices_are_limited() -> None:
    causes = DeviceCauses()
    for index in range(MOST_SERIES + 10):
        causes.add_device(host(f"h{index}", 1, steal=1.0))
    assert len(causes._hosts.past) == MOST_SERIES
    assert len(causes._hosts.host_of) == MOST_SERIES


def test_a_thousand_ranks_take_little_memory() -> None:
    series = Series(10)
    for second in range(1000):
        series.add_sample(second, [0.5] * 10)
    tables = (series._rows, series._means)
    nbytes = sum(sys.getsizeof(column) for table in tables for column in (*table.columns, table.times))
    assert nbytes < 16_000
