"""Memory that grows: what is named, since when, and how soon it is full; and what is no growth."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.rules.memory_growth import MemoryGrowth
from ddpwatch.analysis.diagnosis.standing import Standing, urgency
from ddpwatch.analysis.diagnosis.words.verdict import verdict
from ddpwatch.analysis.figures import RankMemory
from ddpwatch.analysis.memory import NOT_MEASURED, Memory
from ddpwatch.analysis.window import Summary
from ddpwatch.collector.hub import Hub
from ddpwatch.collector.memory_left import MemoryLeft
from ddpwatch.collector.rank_samples import RankSampler
from ddpwatch.wire.messages import Beat, Device, Hello, Message, RankSample, decode, encode
from tests.support.frames import beat, hello

SECOND = 1_000_000_000
MB = 1_000_000
GIB = 1 << 30
PER_S = 10  # steps
Use = Callable[[int], float]  # MB by step


def host(
    seconds: int,
    use: Use,
    left: int = 100 * GIB,
    peer: Use = lambda step: 1000,
    step_at: Callable[[int], int] = lambda second: second * PER_S,
) -> list[Incident]:
    """What is found on a host of two ranks: rank 1 uses so much, and rank 0 as its peer does."""
    rule = MemoryGrowth()
    for rank in (0, 1):
        rule.add_hello(hello(rank))
    for second in range(seconds):
        step, at_ns = step_at(second), second * SECOND
        for rank, mb in ((0, peer(step)), (1, use(step))):
            rule.apply_message(beat(rank, step, at_ns=at_ns))
            used = round(mb * MB)
            rule.apply_message(
                RankSample(rank=rank, at_ns=at_ns, span_ns=SECOND, memory_bytes=used, memory_left_bytes=left)
            )
    return list(rule.incidents())


def test_a_megabyte_a_step_is_named_with_its_forecast() -> None:
    dice = random.Random(4)
    (found,) = host(120, lambda step: 2000 + step + dice.gauss(0, 3), left=1900 * MB)
    assert (found.kind, found.ranks, found.severity, found.open) == ("memory", (1,), "error", True)
    assert found.since_step == pytest.approx(0, abs=80)
    assert found.evidence.memory is not None
    assert found.evidence.memory.step_bytes == pytest.approx(MB, rel=0.05)
    assert found.evidence.memory.steps_left == pytest.approx(1900, rel=0.05)
    assert "rank 1 takes" in found.message
    assert "is full in some 1,900 steps" in found.message


def test_growth_in_each_step_goes_on_as_steps_take_longer() -> None:
    """From the 100th second on five times as long."""
    (found,) = host(160, lambda step: 2000 + step, step_at=lambda second: 4 * min(second, 100) + second)
    assert found.open
    assert found.evidence.memory is not None
    assert found.evidence.memory.step_bytes == pytest.approx(MB, rel=0.01)


def test_what_grows_while_no_step_ends_is_no_growth_in_each_step() -> None:
    """A long validation grows, after steps that all came within a second."""
    uses = iter([1010, *range(1000, 1063)])
    assert host(64, lambda _: next(uses), step_at=lambda second: 400 * min(second, 1)) == []


def test_what_ends_a_run_soon_is_the_verdict_beside_what_makes_it_slower() -> None:
    late = Incident("straggler", "warning", "rank 0 is late", ranks=(0,), since_step=9, gain=0.06, open=True)
    # full in 3 minutes; in 30, of which 2 were seen; in 3 hours
    for left, kind in ((1900 * MB, "memory"), (18_000 * MB, "straggler"), (100 * GIB, "straggler")):
        standing, both = Standing(), [late, *host(120, lambda step: 2000 + step, left)]
        standing.look([late], range(100), 0.0, 0)
        standing.look(both, range(100), 0.0, SECOND)
        assert verdict(Summary(), standing.judged(both, range(100)), 2, finished_steps=1200).kind == kind


def test_ranks_that_grow_on_one_host_share_what_is_left() -> None:
    found = host(60, lambda step: step, left=3000 * MB, peer=lambda step: 2 * step)
    assert sorted(one.ranks for one in found) == [(0,), (1,)]
    assert all(one.evidence.memory and one.evidence.memory.steps_left == pytest.approx(1000) for one in found)
    assert all("(other ranks grow there, too)" in one.message for one in found)
    assert max(found, key=urgency).ranks == max(reversed(found), key=urgency).ranks == (0,)  # it grows fastest


def test_it_may_start_late_and_end() -> None:
    (found,) = host(400, lambda step: 1000 + max(0, step - 3000))
    assert found.open
    assert found.since_step == pytest.approx(3000, abs=400)
    (over,) = host(700, lambda step: 1000 + min(max(0, step - 3000), 1000))
    assert not over.open
    assert over.severity == "info"


def test_a_long_run_in_little_memory() -> None:
    (found,) = host(4000, lambda step: step / 10, left=GIB)
    assert found.evidence.memory is not None
    assert found.evidence.memory.step_bytes == pytest.approx(MB / 10, rel=0.05)
    assert found.since_step is not None
    assert found.since_step < 1000


def saw(step: int, period: int = 150, height: float = 400) -> float:
    return 1000 + height * (step % period) / period


@pytest.mark.parametrize(
    "use",
    [
        lambda step: 1000,
        lambda step: 1000 + 4000 * (1 - 2 ** (-step / 200)),
        lambda step: 1000 + 500 * min(step // 700, 3),
        saw,
        lambda step: saw(step, 1000, 50) + 200 * (step > 900),
        lambda step: 1000 + min(step, 150) * 20,
        lambda step: 1000 + step / 5000,
    ],
    ids=["flat", "warm-up", "blocks", "garbage", "garbage and a block", "a start", "too slow to matter"],
)
def test_no_growth(use: Use) -> None:
    for seconds in (40, 100, 300, 900):
        assert not [one for one in host(seconds, use) if one.severity != "info"], seconds


@pytest.mark.parametrize("seed", range(3))
def test_noise_is_no_growth(seed: int) -> None:
    dice = random.Random(seed)
    level = 1000.0

    def wanders(step: int) -> float:
        nonlocal level
        level += dice.gauss(0, 1)
        return level + abs(dice.gauss(0, 100))

    assert not host(1500, wanders)


def test_memory_of_a_gpu() -> None:
    rule = MemoryGrowth()
    rule.add_hello(hello(0, device_uuid="GPU-1"))
    for second in range(100):
        step, at_ns = second * PER_S, second * SECOND
        reserved = 20 * MB * (step // 20)  # the allocator takes blocks
        rule.apply_message(beat(0, step, at_ns=at_ns, memory_reserved=reserved, memory_allocated=reserved // 2))
        about = {"host": "node1", "boot_id": "boot", "kind": "cuda", "uuid": "GPU-1", "at_ns": at_ns}
        rule.apply_message(Device(**about, memory_used=78 * 1000 * MB + reserved, memory_total=80 * 1000 * MB))
    (found,) = rule.incidents()
    assert "its GPU is full" in found.message
    assert found.evidence.memory is not None
    assert found.evidence.memory.steps_left == pytest.approx(1000, rel=0.05)


def test_who_looks_late_knows_of_growth_at_once() -> None:
    """A collector keeps samples of ranks, but of heartbeats only the newest."""
    hub, seen = Hub(), MemoryGrowth()

    def sends(message: Message, at_ns: int) -> None:
        hub.keep(message, encode(message), at_ns)
        tell(seen, message)

    sends(hello(0, device_uuid="GPU-1"), 0)
    for second in range(100):
        at_ns, used = second * SECOND, second * PER_S * MB
        of_gpu = {"host": "node1", "boot_id": "boot", "kind": "cuda", "uuid": "GPU-1", "at_ns": at_ns}
        sends(Device(**of_gpu, memory_used=used, memory_total=80 * 1000 * MB), at_ns)
        sends(beat(0, second * PER_S, at_ns=at_ns, memory_reserved=used), at_ns)
        of_rank = RankSample(rank=0, at_ns=at_ns, span_ns=SECOND, memory_bytes=2 * used, memory_left_bytes=GIB)
        sends(hub.placed(of_rank), at_ns)
    late = MemoryGrowth()
    for envelope in hub.snapshot():
        tell(late, decode(envelope.frame))
    found = list(late.incidents())
    assert [one.evidence.memory and one.evidence.memory.of for one in found] == ["gpu", "host"]
    assert found == list(seen.incidents())


def tell(rule: MemoryGrowth, message: Message) -> None:
    if isinstance(message, Hello):
        rule.add_hello(message)
    elif isinstance(message, (Beat, RankSample, Device)):
        rule.apply_message(message)


def test_where_nobody_says_what_is_left_nothing_is_foretold() -> None:
    rule = MemoryGrowth()
    for step in range(0, 1000, 10):
        rule.apply_message(beat(0, step, at_ns=step * SECOND // 10, memory_reserved=step * MB))
    assert not list(rule.incidents())


def test_what_ranks_use_and_the_most_that_was_seen() -> None:
    memory = Memory()
    for used in (5, 9, 7):
        memory.apply_message(RankSample(rank=0, at_ns=0, span_ns=SECOND, memory_bytes=used))
        memory.apply_message(beat(1, memory_reserved=10 * used, memory_allocated=used, memory_peak=30 + used))
    memory.apply_message(RankSample(rank=0, at_ns=0, span_ns=SECOND))
    memory.apply_message(beat(0))
    assert memory.of_rank(0) == RankMemory(7, 9, None, None, None, None)
    assert memory.of_rank(1) == RankMemory(None, None, 70, 90, 7, 39)
    assert memory.of_rank(2) == NOT_MEASURED


# -- what is left --------------------------------------------------------------------------------------------


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_the_tightest_limit_counts(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc, meminfo="MemTotal: 9000 kB\nMemAvailable: 800 kB\n")
    write(proc / "7", cgroup="0::/jobs/one\n")
    write(cgroups / "jobs" / "one", memory__max="max\n", memory__current="1\n")
    assert MemoryLeft(proc, cgroups).left(7) == 800 * 1024
    write(cgroups / "jobs", memory__max="1000\n", memory__current="900\n", memory__stat="anon 5\ninactive_file 300\n")
    assert MemoryLeft(proc, cgroups).left(7) == 400
    write(cgroups / "jobs", memory__stat="inactive_file 0\n", memory__current="2000\n")
    assert MemoryLeft(proc, cgroups).left(7) == 0


def test_the_first_version_of_cgroups(tmp_path: Path) -> None:
    write(tmp_path / "7", cgroup="5:cpu,memory:/job\n4:cpuset:/\n0::/\n")
    files = {
        "memory__limit_in_bytes": "1000",
        "memory__usage_in_bytes": "700",
        "memory__stat": "total_inactive_file 50",
    }
    write(tmp_path / "cgroup" / "memory" / "job", **files)
    assert MemoryLeft(tmp_path, tmp_path / "cgroup").left(7) == 350


def test_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert MemoryLeft(tmp_path, tmp_path).left(7) is None


def test_files_pages_are_not_a_ranks_own(tmp_path: Path) -> None:
    status = "VmRSS:\t900 kB\nRssAnon:\t100 kB\nRssFile:\t700 kB\nRssShmem:\t100 kB\nVmSwap:\t20 kB\n"
    write(tmp_path / "7", status=status)
    write(tmp_path / "7" / "task" / "7", schedstat="1 1 1")
    sampler = RankSampler(tmp_path, tmp_path)
    sampler.sample({0: 7})
    (sample,) = sampler.sample({0: 7})
    assert sample.memory_bytes == 220 * 1024
    assert sample.memory_left_bytes is None
