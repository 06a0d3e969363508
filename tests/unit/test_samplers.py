"""What the collector samples: counters of made-up kernels, a stand-in for NVML, and the scheduler of this machine."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddpwatch.collector.busy_processes import BusyProcesses, is_short_of_cores
from ddpwatch.collector.devices import DeviceSampler
from ddpwatch.collector.gpus import Gpus
from ddpwatch.collector.host_counters import HostCounters
from ddpwatch.collector.network import NetCounters
from ddpwatch.collector.rank_samples import MOST_READS, MOST_THREADS, RankSampler
from ddpwatch.viewer.state import RankStatus, RunState
from ddpwatch.wire.messages import Device, Hello, RankSample, decode, encode

SECOND = 1_000_000_000
FIGURES = (
    "steal", "iowait", "run_queue", "cpu_pressure", "memory_pressure", "swap_in_bytes_s", "swap_out_bytes_s",
    "cgroup_throttled", "io_pressure", "oom_kills_s",
)  # fmt: skip


def write(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


# -- processes -----------------------------------------------------------------------------------------------


def used(root: Path, pid: int, name: str, ticks: int) -> None:
    write(root, {f"{pid}/stat": f"{pid} ({name}) R 1 2 3 0 -1 4194304 5 0 0 0 {ticks} {ticks} 0 0 20 0 1 0 99\n"})


def test_the_busiest_processes_are_looked_for_while_cores_are_short(tmp_path: Path) -> None:
    write(tmp_path, {"stat": "cpu 1\n", "self/stat": ""})
    for pid in range(1, 6):
        used(tmp_path, pid, f"a) ({pid}", 100)
    processes, hz = BusyProcesses(tmp_path), os.sysconf("SC_CLK_TCK")
    assert processes.sample(True, 10 * SECOND) == []  # nothing to compare with
    for pid, cpu in ((2, 0.2), (3, 0.9), (4, 0.05), (5, 0.4)):
        used(tmp_path, pid, f"a) ({pid}", 100 + int(cpu * hz))
    found = [(one.pid, one.name, round(one.cpu)) for one in processes.sample(True, 12 * SECOND)]
    assert found == [(3, "a) (3", 90), (5, "a) (5", 40), (2, "a) (2", 20)]
    used(tmp_path, 4, "a) (4", 100 + 10 * hz)
    assert processes.sample(True, 13 * SECOND) == []  # so soon
    assert [one.pid for one in processes.sample(True, 30 * SECOND)] == [4]
    own = {6: "python\0-c\0run\0/a\0ddpwatch.collector\0r", 7: "/venv/bin/python\0/venv/bin/ddpwatch\0attach"}
    write(
        tmp_path,
        {f"{pid}/cmdline": command for pid, command in {**own, 4: "python\0train.py\0--project\0ddpwatch"}.items()},
    )
    for pid in (4, os.getpid(), *own):
        used(tmp_path, pid, "python", 100 + 12 * hz)
    assert processes.sample(True, 40 * SECOND) != []  # a reference for those that are new
    for pid in (4, os.getpid(), *own):
        used(tmp_path, pid, "python", 100 + 15 * hz)
    others = processes.sample(True, 51 * SECOND)
    assert [(one.pid, one.name) for one in others] == [(4, "train.py")]  # and none of ddpwatch's own
    used(tmp_path, 4, "a) (4", 100 + 20 * hz)
    assert processes.sample(False, 60 * SECOND) == []
    assert processes.sample(True, 61 * SECOND) == []  # a new reference


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("python3\0-u\0-X\0dev\0/jobs/big.py\0--lr\x001", "big.py"),
        ("/usr/bin/python\0-m\0torch.distributed.run\0big.py", "torch.distributed.run"),
        ("python\0-c\0from multiprocessing.spawn import spawn_main", "python"),
        ("make\0-j8", "python"),  # by its own name
        ("", "python"),
    ],
)
def test_a_busy_python_is_named_by_what_it_runs(tmp_path: Path, command: str, name: str) -> None:
    write(tmp_path, {"9/cmdline": f"{command}\0"})
    processes = BusyProcesses(tmp_path)
    for ticks, second in ((0, 10), (100, 12)):
        used(tmp_path, 9, "python", ticks)
        found = processes.sample(True, second * SECOND)
    assert [one.name for one in found] == [name]


@pytest.mark.parametrize(
    ("pressure", "wait", "short"),
    [(None, None, False), (19.0, 1, False), (21.0, None, True), (None, 6, True), (0.0, 4, False)],
)
def test_when_cores_are_short(pressure: float | None, wait: int | None, short: bool) -> None:
    host = Device(host="a", kind="cpu", at_ns=0, cpu_pressure=pressure)
    rank = RankSample(rank=0, at_ns=0, span_ns=SECOND, wait_ns=wait, run_ns=None if wait is None else 100 - wait)
    assert is_short_of_cores(host, [rank]) is short


# -- hosts ---------------------------------------------------------------------------------------------------


def kernel(root: Path, busy: int = 0, steal: int = 0, iowait: int = 0, waited_us: int = 0, swapped: int = 0) -> None:
    write(
        root / "proc",
        {
            "stat": f"cpu  {100 + busy} 0 50 1000 {iowait} 0 0 {steal} 0 0\ncpu0 1 2 3\nintr 9\nprocs_running 5\n",
            "vmstat": f"nr_free_pages 1\npswpin {swapped}\npswpout {2 * swapped}\noom_kill {swapped // 500}\n",
            "pressure/cpu": f"some avg10=1.00 avg60=0 avg300=0 total={waited_us}\nfull avg10=0 total=0\n",
            "pressure/io": f"some avg10=1.00 avg60=0 avg300=0 total={3 * waited_us}\nfull avg10=0 total=7\n",
            "pressure/memory": f"some avg10=1.00 avg60=0 avg300=0 total={2 * waited_us}\nfull avg10=0 total=7\n",
        },
    )


def quota(folder: Path, periods: int, throttled: int) -> None:
    write(folder, {"cpu.stat": f"usage_usec 5\nnr_periods {periods}\nnr_throttled {throttled}\nthrottled_usec 9\n"})


def test_rates_of_a_host(tmp_path: Path) -> None:
    kernel(tmp_path)
    counters = HostCounters(tmp_path / "proc", tmp_path / "cgroup")
    first = counters.figures(10 * SECOND)
    assert {name: value for name, value in first.items() if value is not None} == {"run_queue": 5}
    kernel(tmp_path, busy=60, steal=30, iowait=10, waited_us=500_000, swapped=1000)
    page = os.sysconf("SC_PAGESIZE")
    assert counters.figures(12 * SECOND) == {
        "steal": 30.0, "iowait": 10.0, "run_queue": 5, "cpu_pressure": 25.0, "memory_pressure": 50.0,
        "swap_in_bytes_s": 500 * page, "swap_out_bytes_s": 1000 * page, "cgroup_throttled": None,
        "io_pressure": 75.0, "oom_kills_s": 1.0,
    }  # fmt: skip


def test_a_kernel_that_counts_nothing(tmp_path: Path) -> None:
    counters = HostCounters(tmp_path / "proc", tmp_path / "cgroup")
    counters.figures(SECOND)
    assert counters.figures(2 * SECOND) == dict.fromkeys(FIGURES)


def test_a_counter_that_goes_back_is_no_rate_below_zero(tmp_path: Path) -> None:
    kernel(tmp_path, busy=1, iowait=50)
    counters = HostCounters(tmp_path / "proc", tmp_path / "cgroup")
    counters.figures(SECOND)
    kernel(tmp_path, busy=200, iowait=40)
    assert counters.figures(2 * SECOND)["iowait"] == 0.0


def test_a_counter_that_catches_up_is_no_more_than_all_the_time(tmp_path: Path) -> None:
    kernel(tmp_path)
    counters = HostCounters(tmp_path / "proc", tmp_path / "cgroup")
    counters.figures(SECOND)
    kernel(tmp_path, busy=10, waited_us=1_020_000)
    assert counters.figures(2 * SECOND)["cpu_pressure"] == 100.0


CGROUPS = [
    ("0::/job/rank0\n", "", "job/rank0"),  # version 2
    ("0::/job/rank0\n", "", "job"),  # the quota is that of the cgroup around it
    ("0::/\n", "", "."),  # in a container
    ("0::/kubepods/far/away\n", "", "."),  # in a container without a namespace for cgroups
    ("0::/../../outside\n", "", "."),
    ("9:name=systemd:/x\n4:cpu,cpuacct:/job\n0::/x\n", "cpu,cpuacct", "job"),  # version 1
    ("1:cpu:/job\n0::/\n", "cpu", "job"),
    ("2:cpuacct,cpu:/job\n0::/\n", "cpu", "job"),
]


@pytest.mark.parametrize(("own", "base", "folder"), CGROUPS)
def test_throttled_by_a_cgroup(tmp_path: Path, own: str, base: str, folder: str) -> None:
    limited = tmp_path / "cgroup" / base / folder
    write(tmp_path / "proc", {"self/cgroup": own})
    quota(limited, 100, 10)
    counters = HostCounters(tmp_path / "proc", tmp_path / "cgroup")
    counters.figures(SECOND)
    quota(limited, 110, 12)
    assert counters.figures(2 * SECOND)["cgroup_throttled"] == 20.0
    assert counters.figures(3 * SECOND)["cgroup_throttled"] == 0.0  # it slept


def test_a_host_of_this_machine() -> None:
    sampler = DeviceSampler()
    host = next(device for device in sampler.sample() if device.kind == "cpu")
    assert (host.run_queue is not None) == Path("/proc/stat").exists()
    assert decode(encode(host)) == host


# -- network -------------------------------------------------------------------------------------------------


def interface(sent: int = 0, **faults: int) -> SimpleNamespace:
    counts = {"bytes_sent": sent, "bytes_recv": 0, "errin": 0, "errout": 0, "dropin": 0, "dropout": 0}
    return SimpleNamespace(**(counts | faults))


def test_rates_of_interfaces_and_which_is_the_worst(tmp_path: Path) -> None:
    net = NetCounters(tmp_path, tmp_path)
    assert net.figures({"lo": interface(), "eth0": interface()}, SECOND) == {}
    figures = net.figures(
        {"lo": interface(100, dropin=2), "eth0": interface(300, errin=680), "new": interface(9)}, 3 * SECOND
    )
    assert figures["net_tx_bytes_s"] == 200.0
    assert figures["net_rx_errors_s"] == 340.0
    assert figures["net_rx_drops_s"] == 1.0
    assert figures["net_tx_errors_s"] == 0.0
    assert figures["net_faulty"] == "eth0"
    quiet = net.figures({"lo": interface(100, dropin=2), "eth0": interface(0, errin=5)}, 4 * SECOND)
    assert quiet["net_rx_errors_s"] == 0.0  # the driver was loaded again
    assert quiet["net_faulty"] == ""


def port(root: Path, name: str, **counts: int) -> None:
    hardware = ("packet_seq_err", "local_ack_timeout_err", "rp_cnp_handled")
    folders = {each: "hw_counters" if each in hardware else "counters" for each in counts}
    write(root / "infiniband" / name, {f"{folders[each]}/{each}": f"{count}\n" for each, count in counts.items()})


def test_infiniband_ports_are_interfaces(tmp_path: Path) -> None:
    zero = dict.fromkeys(("port_xmit_data", "symbol_error", "port_rcv_errors", "link_downed", "packet_seq_err"), 0)
    port(tmp_path, "mlx5_0/ports/1", **zero)
    port(tmp_path, "mlx5_1/ports/1", **zero, rp_cnp_handled=0)
    net = NetCounters(tmp_path, tmp_path)
    assert net.figures({}, SECOND) == {}
    port(tmp_path, "mlx5_0/ports/1", port_xmit_data=500, symbol_error=4, port_rcv_errors=2, link_downed=1)
    port(tmp_path, "mlx5_1/ports/1", packet_seq_err=60, rp_cnp_handled=5000)
    assert net.figures({}, 3 * SECOND) == {
        "net_tx_bytes_s": 1000.0, "net_rx_errors_s": 3.0, "link_downs_s": 0.5, "retransmits_s": 30.0,
        "congestion_s": 2500.0, "net_faulty": "mlx5_0/1",
    }  # fmt: skip


def test_a_link_that_goes_down_and_segments_that_are_sent_again(tmp_path: Path) -> None:
    def counted(downs: int, segments: int) -> None:
        write(tmp_path, {"net/eth0/device": "", "net/eth0/carrier_down_count": f"{downs}\n"})
        write(tmp_path, {"proc/net/snmp": f"Ip: A\nIp: 1\nTcp: InSegs RetransSegs\nTcp: 9 {segments}\n"})

    counted(1, 100)
    net = NetCounters(tmp_path, tmp_path / "proc")
    net.figures({"eth0": interface(), "veth1": interface()}, SECOND)
    counted(2, 180)
    figures = net.figures({"eth0": interface(), "veth1": interface()}, 2 * SECOND)
    assert (figures["link_downs_s"], figures["retransmits_s"], figures["net_faulty"]) == (1.0, 80.0, "eth0")
    assert "congestion_s" not in figures  # nobody counts it here


# -- GPUs ----------------------------------------------------------------------------------------------------


class NvmlError(Exception):
    pass


NVML_NUMBERS = {
    "NVML_TEMPERATURE_GPU": 0, "NVML_CLOCK_SM": 0, "NVML_PCIE_UTIL_TX_BYTES": 0, "NVML_VOLATILE_ECC": 0,
    "NVML_CLOCK_MEM": 1, "NVML_PCIE_UTIL_RX_BYTES": 1, "NVML_MEMORY_ERROR_TYPE_UNCORRECTED": 1,
    "NVML_VALUE_TYPE_UNSIGNED_INT": 1, "NVML_NVLINK_MAX_LINKS": 36, "nvmlEventTypeXidCriticalError": 8,
    "NVML_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": 52, "NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX": 138,
}  # fmt: skip


class Nvml:
    """`pynvml` on a machine with one GPU.

    Args:
        reasons: What limits its clocks.
        old: Whether the driver only knows older names.
        ecc: Its uncorrected errors; None if it has no ECC.
        links: Whether it has four NVLinks, of which one is down.
        xids: What will come as events.
    """

    NVMLError = NvmlError

    def __init__(
        self, reasons: int = 0, old: bool = False, ecc: int | None = 0, links: bool = False, xids: Sequence[int] = ()
    ) -> None:
        self._reasons, self._old, self._ecc, self._links = reasons, old, ecc, links
        self.xids = list(xids)
        self.sent_kib = 0

    def link_state(self, handle: object, link: int) -> int:
        if not self._links or link > 3:
            raise NvmlError
        return int(link != 2)

    def field_values(self, handle: object, fields: list[tuple[int, int]]) -> list[SimpleNamespace]:
        kind, value = (
            (1, SimpleNamespace(uiVal=7)) if fields[0][0] == 52 else (3, SimpleNamespace(ullVal=self.sent_kib))
        )
        return [SimpleNamespace(nvmlReturn=0 if self._links else 3, valueType=kind, value=value)]

    def wait(self, events: object, timeout_ms: int) -> SimpleNamespace:
        if not self.xids:
            raise NvmlError
        return SimpleNamespace(device="handle", eventData=self.xids.pop(0))

    def __getattr__(self, name: str) -> object:
        known = {
            "nvmlInit": None, "nvmlDeviceGetCount": 1, "nvmlDeviceGetHandleByIndex": "handle",
            "nvmlDeviceGetUUID": b"GPU-1", "nvmlDeviceGetName": "NVIDIA H200", "nvmlDeviceGetClockInfo": 1200,
            "nvmlDeviceGetMaxClockInfo": 1980, "nvmlDeviceGetPowerUsage": 700_000,
            "nvmlDeviceGetCurrentClocksThrottleReasons": self._reasons,
        } | ({} if self._old else {"nvmlDeviceGetCurrentClocksEventReasons": self._reasons})  # fmt: skip
        if self._ecc is not None:
            known["nvmlDeviceGetTotalEccErrors"] = self._ecc
        if self._links:
            known |= {
                "nvmlDeviceGetCurrPcieLinkWidth": 8, "nvmlDeviceGetMaxPcieLinkWidth": 16,
                "nvmlDeviceGetCurrPcieLinkGeneration": 5, "nvmlDeviceGetMaxPcieLinkGeneration": 5,
                "nvmlDeviceGetPcieReplayCounter": 2, "nvmlEventSetCreate": "set", "nvmlDeviceRegisterEvents": None,
                "nvmlDeviceGetIndex": 0,
            }  # fmt: skip

        if name in NVML_NUMBERS:
            return NVML_NUMBERS[name]
        if name.startswith("NVML_FI_"):
            raise AttributeError(name)
        if name in (calls := {
            "nvmlDeviceGetNvLinkState": self.link_state, "nvmlDeviceGetFieldValues": self.field_values,
            "nvmlEventSetWait_v2": self.wait,
        }):  # fmt: skip
            return calls[name]

        def call(*_: object) -> object:
            if name not in known:
                raise NvmlError(name)
            return known[name]

        return call


def gpu_of(nvml: Nvml) -> Device:
    return next(device for device in DeviceSampler(nvml).sample() if device.kind == "cuda")


@pytest.mark.parametrize("old", [False, True])
def test_what_limits_the_clocks_of_a_gpu(old: bool) -> None:
    device = gpu_of(Nvml(reasons=0x04, old=old, ecc=3))
    assert (device.sm_clock_mhz, device.max_sm_clock_mhz) == (1200, 1980)
    assert (device.throttle_reasons, device.ecc_errors) == (4, 3)
    assert decode(encode(device)) == device


def test_a_gpu_without_ecc_has_no_count_of_errors() -> None:
    device = gpu_of(Nvml(ecc=None))
    assert device.ecc_errors is None
    assert device.throttle_reasons == 0
    assert device.temperature_c is None


def test_the_links_of_a_gpu() -> None:
    nvml = Nvml(links=True)
    gpus = Gpus(nvml)
    (first,) = gpus.sample("a", "boot")
    assert (first.pcie_width, first.pcie_max_width, first.pcie_generation) == (8, 16, 5)
    assert (first.nvlinks_down, first.link_errors) == (1, 7 + 2)
    assert first.nvlink_tx_bytes_s is None  # nothing to compare with
    nvml.sent_kib = 1000
    (second,) = gpus.sample("a", "boot")
    rate = 1000 * 1024 * SECOND / (second.at_ns - first.at_ns)
    assert second.nvlink_tx_bytes_s == pytest.approx(rate, rel=0.5)
    assert second.nvlink_rx_bytes_s is None  # this pynvml does not know it
    assert decode(encode(second)) == second


def test_xids_are_counted_and_the_newest_is_named() -> None:
    nvml = Nvml(links=True, xids=[13, 79])
    gpus = Gpus(nvml)
    (device,) = gpus.sample("a", "boot")
    assert (device.xid, device.xids) == (79, 2)
    (device,) = gpus.sample("a", "boot")
    assert (device.xid, device.xids) == (79, 2)


def test_what_an_old_driver_does_not_know_is_not_known() -> None:
    device = gpu_of(Nvml())
    names = ("pcie_width", "pcie_generation", "link_errors", "nvlinks_down", "xid", "xids", "nvlink_tx_bytes_s")
    assert [getattr(device, name) for name in names] == [None] * len(names)


# -- ranks ---------------------------------------------------------------------------------------------------


def process(root: Path, pid: int, threads: dict[int, str], preempted: int = 0, swapped_kib: int | None = 0) -> None:
    swap = "" if swapped_kib is None else f"VmSwap:\t{swapped_kib} kB\n"
    files = {"status": f"Name:\tx\n{swap}nonvoluntary_ctxt_switches:\t{preempted}\n"}
    for thread, times in threads.items():
        files |= {f"task/{thread}/schedstat": times, f"task/{thread}/comm": "python\n"}
    write(root / str(pid), files)


def test_a_rank_waits_as_long_as_its_busiest_thread(tmp_path: Path) -> None:
    process(tmp_path, 7, {7: "1000 50 3", 8: "2000 10 5", 9: "0 0 0"})
    sampler = RankSampler(tmp_path)
    assert sampler.sample({3: 7}) == []
    process(tmp_path, 7, {7: "1500 60 4", 8: "2100 910 6", 10: "0 5000 1"}, preempted=4, swapped_kib=2)
    (sample,) = sampler.sample({3: 7})
    assert (sample.rank, sample.run_ns, sample.wait_ns) == (3, 100, 900)
    assert (sample.preempted, sample.swapped_bytes) == (4, 2048)
    assert sample.span_ns > 0
    assert decode(encode(sample)) == sample


def test_an_idle_thread_that_waits_for_most_of_its_time_does_not_speak_for_a_rank(tmp_path: Path) -> None:
    process(tmp_path, 7, {7: "1000 50 3", 8: "10 10 5"})
    sampler = RankSampler(tmp_path)
    sampler.sample({3: 7})
    process(tmp_path, 7, {7: "1900 55 4", 8: "13 80 6"})
    (sample,) = sampler.sample({3: 7})
    assert (sample.run_ns, sample.wait_ns) == (900, 5)


def test_another_process_of_a_rank_starts_afresh(tmp_path: Path) -> None:
    process(tmp_path, 7, {7: "1000 50 3"})
    process(tmp_path, 8, {8: "9000 5000 3"})
    sampler = RankSampler(tmp_path)
    assert sampler.sample({0: 7}) == []
    assert sampler.sample({0: 8}) == []
    assert len(sampler.sample({0: 8})) == 1
    assert sampler.sample({}) == []
    assert sampler.sample({0: 8}) == []


@pytest.mark.parametrize("times", ["", "0 0 0", "7"], ids=["none", "not counted", "strange"])
def test_a_kernel_that_does_not_count_waits(tmp_path: Path, times: str) -> None:
    process(tmp_path, 7, {7: times})
    sampler = RankSampler(tmp_path)
    assert sampler.sample({0: 7, 1: 4711}) == []
    assert sampler.sample({0: 7, 1: 4711}) == []


def test_of_many_threads_the_main_one_and_those_of_the_backward_are_read(tmp_path: Path) -> None:
    count = MOST_THREADS + 50
    autograd = 7 + count - 1

    def all_threads(wait: int) -> dict[int, str]:
        return {7 + i: f"10 {wait if 7 + i in (7, autograd) else 0} 1" for i in range(count)}

    process(tmp_path, 7, all_threads(0))
    write(tmp_path / "7", {f"task/{autograd}/comm": "pt_autograd_0\n"})
    sampler = RankSampler(tmp_path)
    sampler.sample({0: 7})
    write(tmp_path / "7", {f"task/{autograd}/schedstat": "20 5000 2"})
    (sample,) = sampler.sample({0: 7})
    assert sample.wait_ns == 5000


def test_many_ranks_share_what_is_read(tmp_path: Path) -> None:
    ranks = MOST_READS // 2
    for pid in range(1, ranks + 1):
        process(tmp_path, pid, {pid: "10 0 1", 100_000 + pid: "10 0 1", 200_000 + pid: "10 0 1"})
    sampler = RankSampler(tmp_path)
    sampler.sample({pid: pid for pid in range(1, ranks + 1)})
    assert sum(len(seen.threads) for seen in sampler._seen.values()) <= MOST_READS


def test_a_sample_of_a_rank_is_no_sign_of_its_life() -> None:
    state = RunState()
    state.apply_message(Hello(run_id="r", rank=0, world_size=1, host="a", pid=1), SECOND)
    sample = RankSample(rank=0, at_ns=60 * SECOND, span_ns=SECOND, wait_ns=7)
    state.apply_message(sample, 60 * SECOND)
    assert state.ranks[0].sample == sample
    assert state.status_of(0) is RankStatus.SILENT


def worker(root: Path, pid: int, parent: int, times: str, read: int, name: str = "pt_data_worker") -> None:
    files = {
        "stat": f"{pid} (a) b) S {parent} 1 1",
        "comm": f"{name}\n",
        "schedstat": times,
        "io": f"read_bytes: {read}\n",
    }
    write(root / str(pid), files)


def test_what_a_ranks_data_loader_workers_do(tmp_path: Path) -> None:
    process(tmp_path, 7, {7: "1000 50 3"})
    worker(tmp_path, 20, 7, "100 10 1", 0)
    worker(tmp_path, 21, 7, "100 10 1", 0)
    worker(tmp_path, 22, 7, "100 10 1", 0, name="python")  # another child
    worker(tmp_path, 23, 8, "100 10 1", 0)  # another job's
    sampler = RankSampler(tmp_path)
    assert sampler.sample({0: 7}) == []
    worker(tmp_path, 20, 7, "400 30 2", 4096)
    worker(tmp_path, 21, 7, "200 20 2", 0)
    worker(tmp_path, 24, 7, "900 0 1", 0)  # has just started
    (sample,) = sampler.sample({0: 7})
    assert (sample.workers, sample.workers_run_ns, sample.workers_wait_ns) == (2, 400, 30)
    assert sample.workers_read_bytes == 4096
    for pid in (20, 21, 24):
        shutil.rmtree(tmp_path / str(pid))
    (sample,) = sampler.sample({0: 7})
    assert sample.workers is None


# -- this machine --------------------------------------------------------------------------------------------

_SPIN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
print("ready", flush=True)
end = time.monotonic() + 30
while time.monotonic() < end:
    pass
"""


@contextlib.contextmanager
def spinning(core: int) -> Iterator[int]:
    """A process that is busy on that core until the end of the block."""
    command = [sys.executable, "-c", _SPIN, str(core)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as spinner:
        try:
            assert spinner.stdout is not None
            assert spinner.stdout.readline() == "ready\n"
            yield spinner.pid
        finally:
            spinner.kill()


@pytest.mark.skipif(not Path("/proc/self/schedstat").exists(), reason="this kernel does not count waits for a core")
def test_a_process_that_shares_its_core_is_starved() -> None:
    core = min(os.sched_getaffinity(0))
    with spinning(core) as victim, spinning(core):
        sampler = RankSampler()
        sampler.sample({0: victim})
        samples: list[RankSample] = []
        while sum(sample.span_ns for sample in samples) < 1.5 * SECOND:
            time.sleep(0.25)  # what is measured is time that passes
            samples += sampler.sample({0: victim})
    waited, ran = (sum(getattr(sample, name) for sample in samples) for name in ("wait_ns", "run_ns"))
    assert waited / (waited + ran) > 0.3
    assert waited / sum(sample.span_ns for sample in samples) > 0.3
    assert sum(sample.preempted or 0 for sample in samples) > 0
