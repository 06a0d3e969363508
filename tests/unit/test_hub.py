"""What the collector keeps for a viewer that attaches late, and how long."""

from __future__ import annotations

import itertools
import tracemalloc
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from ddpwatch.analysis.retention import KEEP_STEPS
from ddpwatch.collector.hub import (
    KEEP_ALL_SAMPLES,
    KEEP_BYTES,
    KEEP_DEVICE_BYTES,
    KEEP_EXCHANGES,
    KEEP_RANK_LAYOUTS,
    KEEP_STILL,
    Hub,
)
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import (
    Beat,
    BucketLayout,
    Bye,
    ClockExchange,
    Device,
    EndReason,
    Hello,
    Layout,
    Mark,
    Message,
    Node,
    NodeStep,
    RankSample,
    Stack,
    Status,
    Step,
    decode,
    encode,
)  # fmt: skip
from ddpwatch.wire.node_step import expand, pack
from tests.support import frames

SECOND_NS = 10**9
TEN_MINUTES_S = 600


def keep(hub: Hub, message: Message, now_ns: int = 0) -> None:
    hub.keep(message, encode(message), now_ns)


def device(kind: str, index: int, second: int) -> Device:
    return Device(host="node", kind=kind, index=index, at_ns=second * SECOND_NS, temperature_c=float(second))  # type: ignore[arg-type]


def kept(hub: Hub) -> list[Message]:
    return [decode(envelope.frame) for envelope in hub.snapshot()]


def test_ten_minutes_of_every_device_are_kept() -> None:
    hub = Hub()
    keys = [("cpu", 0), *(("cuda", index) for index in range(8))]
    for second in range(TEN_MINUTES_S + 50):
        for kind, index in keys:
            keep(hub, device(kind, index, second), second * SECOND_NS)
    newest = range(50, TEN_MINUTES_S + 50)
    assert kept(hub) == [device(kind, index, second) for second in newest for kind, index in keys]


def test_devices_of_hosts_of_one_name_have_their_own_ten_minutes() -> None:
    hub = Hub()
    for second in range(600):
        for boot_id in ("one", "two"):
            keep(hub, replace(device("cpu", 0, second), boot_id=boot_id), second * SECOND_NS)
    assert Counter(m.boot_id for m in kept(hub) if isinstance(m, Device)) == {"one": 600, "two": 600}


def test_the_devices_of_many_hosts_share_the_room() -> None:
    """Those of 8,192 ranks: the newest sample of each, and an older one."""
    hub = Hub()
    devices, seconds = 1024 * 9, 3
    for second in range(seconds):
        for index in range(devices):
            gpu = device("cuda", index, second)
            hub.keep(gpu, frame := encode(gpu) + bytes(700 - len(encode(gpu))), second * SECOND_NS)
    found = Counter(envelope.received_ns // SECOND_NS for envelope in hub.snapshot())
    assert found == {0: devices, seconds - 1: devices}
    assert 2 * devices * len(frame) < hub._kept_bytes == hub._own_bytes == hub._devices.size <= KEEP_DEVICE_BYTES


def rank_sample(rank: int, second: int) -> RankSample:
    return RankSample(rank=rank, at_ns=second * SECOND_NS, span_ns=SECOND_NS, wait_ns=second)


def test_ten_minutes_of_samples_of_every_rank_are_kept() -> None:
    hub = Hub()
    for second in range(TEN_MINUTES_S + 50):
        for rank in range(8):
            keep(hub, rank_sample(rank, second), second * SECOND_NS)
    newest = range(50, TEN_MINUTES_S + 50)
    assert kept(hub) == [rank_sample(rank, second) for second in newest for rank in range(8)]


def test_many_ranks_share_what_is_kept_of_their_samples() -> None:
    hub = Hub()
    for second in range(40):
        for rank in range(1024):
            keep(hub, rank_sample(rank, second), second * SECOND_NS)
    newest = KEEP_ALL_SAMPLES // 1024
    assert len(kept(hub)) == KEEP_ALL_SAMPLES
    assert {m.at_ns for m in kept(hub) if isinstance(m, RankSample) and m.rank == 7} == {
        second * SECOND_NS for second in range(40 - newest, 40)
    }


def test_a_sample_of_a_rank_is_no_sign_of_its_life() -> None:
    hub = Hub()
    keep(hub, step(0), 1)
    keep(hub, rank_sample(0, 60), 60 * SECOND_NS)
    assert hub.silent_ranks(61 * SECOND_NS, 5 * SECOND_NS) == [0]


def test_a_rank_cannot_send_samples_of_itself() -> None:
    hub = Hub()
    send(hub, rank_sample(0, 1))
    assert hub.refused == {"not a rank's to send": 1}


def bye(rank: int, reason: EndReason, at_ns: int) -> Bye:
    return Bye(rank=rank, by="rank", reason=reason, at_ns=at_ns)


def test_the_first_failure_is_the_reason_of_the_end() -> None:
    hub = Hub()
    assert hub.end_reason() == "lost"
    keep(hub, bye(0, "finished", 1), 1)
    assert hub.end_reason() == "finished"
    keep(hub, bye(1, "exception", 9), 9)
    keep(hub, bye(2, "killed", 5), 5)
    assert hub.end_reason() == "killed"


def test_the_first_failure_is_found_whatever_the_hosts_clocks_say() -> None:
    """Rank 0 is killed, which its collector says half a second later; rank 0's host has been up for longer."""
    hub, booted_s = Hub(), {0: 5_000, 1: 100}
    for rank, since in booted_s.items():
        keep(hub, Beat(rank=rank, at_ns=since * SECOND_NS, step=1, phase="", since_ns=0), 50 * SECOND_NS)
    keep(hub, bye(1, "exception", booted_s[1] * SECOND_NS + 1_100_000_000), 51_100_000_000)
    keep(hub, bye(0, "killed", booted_s[0] * SECOND_NS + 1_000_000_000), 51_500_000_000)
    assert hub.end_reason() == "killed"


# -- limits ----------------------------------------------------------------------------------------------------

MIB = 1 << 20
_noise = itertools.count()


def hello(rank: int) -> Hello:
    return Hello(run_id="r", rank=rank, world_size=8, host="node", pid=1)


def mark(rank: int) -> Mark:
    return Mark(rank=rank, name=f"mark {next(_noise)}", start_ns=1)


def step(rank: int, number: int = 0, hooks: int = 0) -> Step:
    at = list(range(1 << 40, (1 << 40) + hooks))
    return Step(rank=rank, step=number, start_ns=1, duration_ns=1, hook_param=at, hook_ns=at)


def layout(rank: int, epoch: int = 1, name: str = "weight") -> Layout:
    params = [f"blocks.{index}.{name}" for index in range(1200)]
    return Layout(rank=rank, epoch=epoch, params=params, buckets=[BucketLayout(0, 1, list(range(1200)))])


def padded(message: Message, nbytes: int = MIB) -> bytes:
    """The message with an unknown field, which readers skip."""
    fields = msgspec.msgpack.decode(encode(message))
    return msgspec.msgpack.encode({**fields, "padding": next(_noise).to_bytes(8, "big") * (nbytes // 8)})


def send(hub: Hub, *sent: Message | bytes) -> None:
    for one in sent:
        hub.accept([one if isinstance(one, bytes) else encode(one)], 0)


def size(hub: Hub) -> int:
    return sum(len(envelope.frame) for envelope in hub.snapshot())


def steps_of(hub: Hub, rank: int) -> list[int]:
    return [message.step for message in kept(hub) if isinstance(message, Step) and message.rank == rank]


@pytest.mark.parametrize("kind", [mark, hello, layout, step, lambda rank: bye(rank, "finished", 1)])
def test_padded_frames_of_any_kind_are_counted(kind: Callable[[int], Message]) -> None:
    hub = Hub()
    for rank in [*range(100)] * 2:
        send(hub, padded(kind(rank)))
    assert size(hub) <= KEEP_BYTES


def test_device_samples_count_with_all_else() -> None:
    hub = Hub()
    for second in range(300):
        for index in range(64):
            keep(hub, Device(host="n" * 1000, kind="cuda", index=index, at_ns=second))
    for number in range(200):
        send(hub, step(0, number, hooks=4000))
    assert 0.9 * KEEP_DEVICE_BYTES < hub._devices.size <= KEEP_DEVICE_BYTES
    assert steps_of(hub, 0)[-1] == 199
    assert size(hub) <= KEEP_BYTES


def test_the_newest_stacks_of_each_rank_are_kept() -> None:
    """They show whose a stall was, also to whoever looks later."""
    hub = Hub(world_size=2)
    stacks = [Stack(rank=rank, at_ns=at, since_ns=0, step=1, text="Thread 0x1") for at in range(20) for rank in (0, 1)]
    send(hub, *stacks)
    assert kept(hub) == stacks[-2 * (KEEP_STILL + 1) :]
    assert not hub.refused


def test_a_rank_that_is_not_of_this_job_is_refused() -> None:
    hub = Hub(world_size=4)
    send(hub, *[step(rank) for rank in range(3, 9)])
    assert [m.rank for m in kept(hub) if isinstance(m, Step)] == [3]
    assert hub.refused == {"foreign rank": 5}


def test_equal_layouts_share_memory() -> None:
    """Each would take 44 kB."""
    ranks = 128
    frames = {rank: encode(layout(rank)) for rank in (0, 63, 127)}
    hub = Hub()
    tracemalloc.start()
    try:
        for epoch, rank in itertools.product((1, 2), range(ranks)):
            send(hub, layout(rank, epoch))
        send(hub, layout(7, 2, "bias"))
        assert tracemalloc.get_traced_memory()[0] < 1 * MIB
    finally:
        tracemalloc.stop()
    snapshot = [envelope.frame for envelope in hub.snapshot()]
    assert len(snapshot) == 2 * ranks + 1
    assert all(snapshot[rank] == frame for rank, frame in frames.items())


def test_a_layout_is_kept_as_long_as_any_rank_has_it() -> None:
    hub = Hub()
    send(hub, layout(0), layout(1))
    for epoch in range(2, 8):
        send(hub, layout(0, epoch))
    assert [(m.rank, m.epoch) for m in kept(hub) if isinstance(m, Layout)] == [(1, 1), (0, 4), (0, 5), (0, 6), (0, 7)]
    for epoch in range(4, 8):
        send(hub, layout(1, epoch))
    assert len(hub._bodies) == 4
    assert hub._kept_bytes < 4 * len(encode(layout(0))) + 8 * 500


def test_the_layouts_of_every_module_are_kept() -> None:
    """Each of a job's modules has one at its start, and another after its first backward."""
    hub, sent = Hub(), [replace(layout(0, epoch), module=module) for epoch in (1, 2) for module in range(6)]
    send(hub, *sent)
    assert kept(hub) == sent
    send(hub, *[replace(layout(0), module=module) for module in range(1000)])
    assert len(kept(hub)) == KEEP_RANK_LAYOUTS


@pytest.mark.parametrize("kind", [mark, hello, layout, step])
def test_a_hostile_sender_costs_only_itself(kind: Callable[[int], Message]) -> None:
    hub = Hub(world_size=8)
    for rank in range(7):
        send(hub, hello(rank), layout(rank), mark(rank), *[step(rank, number, hooks=100) for number in range(300)])
    before = [m for m in kept(hub) if m.rank != 7]  # type: ignore[union-attr]
    for number in range(300):
        send(hub, padded(layout(7, number) if kind is layout else kind(7)))
    for rank in range(7):
        send(hub, step(rank, 300, hooks=100))
    after = [m for m in kept(hub) if m.rank != 7]  # type: ignore[union-attr]
    assert len(after) == len(before) + 7
    assert size(hub) <= KEEP_BYTES


def test_memory_is_shared_evenly_by_a_large_job() -> None:
    hub = Hub()
    for number, rank in itertools.product(range(40), range(512)):
        send(hub, step(rank, number, hooks=300))
    counts = {len(steps_of_rank) for steps_of_rank in (entry.steps for entry in hub.ranks.values())}
    assert max(counts) - min(counts) <= 1
    assert 0.9 * KEEP_BYTES < size(hub) <= KEEP_BYTES


def node_step(node: int, number: int, ranks: range) -> NodeStep:
    return pack(node, [frames.bare(rank, number) for rank in ranks])


def exchange(node: int, second: int) -> ClockExchange:
    at = second * SECOND_NS
    about = {"sent_ns": at, "received_ns": at, "replied_ns": at, "returned_ns": at}
    return ClockExchange(node=node, node_boot_id="boot", root_boot_id="root", **about)


def about_node(node: int, ranks: range, second: int = 0) -> Node:
    return Node(node=node, host=f"host{node}", ranks=list(ranks), at_ns=second * SECOND_NS, seen_ns=second * SECOND_NS)


def test_the_newest_steps_of_a_node_are_kept_packed() -> None:
    hub = Hub()
    sent = [node_step(1, number, range(4, 8)) for number in range(KEEP_STEPS + 3)]
    for number, message in enumerate(sent):
        keep(hub, message, number)
    assert kept(hub) == sent[3:]
    assert all(hub.ranks[rank].seen_ns == KEEP_STEPS + 2 for rank in range(4, 8))


def test_two_minutes_of_pings_and_the_newest_of_each_node_are_kept() -> None:
    hub = Hub()
    for second in range(KEEP_EXCHANGES + 5):
        for node in (0, 1):
            keep(hub, exchange(node, second))
            keep(hub, about_node(node, range(4), second))
    found = kept(hub)
    assert [m.at_ns // SECOND_NS for m in found if isinstance(m, Node)] == [KEEP_EXCHANGES + 4] * 2
    assert Counter(m.node for m in found if isinstance(m, ClockExchange)) == {0: KEEP_EXCHANGES, 1: KEEP_EXCHANGES}


def test_a_node_that_sends_too_much_loses_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpwatch.collector.hub.KEEP_BYTES", 200_000)
    hub = Hub()
    modest = [node_step(0, number, range(4)) for number in range(5)]
    for message in modest:
        keep(hub, message)
    for number in range(600):
        keep(
            hub,
            pack(1, [frames.step(rank, number, hook_param=[1] * 50, hook_ns=[number] * 50) for rank in range(4, 8)]),
        )
        assert sum(len(envelope.frame) for envelope in hub.snapshot()) < 200_000
    found = [m for m in kept(hub) if isinstance(m, NodeStep)]
    assert [m for m in found if m.node == 0] == modest
    assert [m.step for m in found if m.node == 1][-1] == 599


def test_a_node_speaks_for_itself_and_its_ranks_only() -> None:
    hub = Hub(world_size=8)
    mine = range(4, 8)

    def accepted(message: Message) -> bool:
        return hub.accept_from_node(encode(message), 1, mine, 0) is not None

    fine = [node_step(1, 0, mine), device("cpu", 0, 0), frames.hello(4), exchange(1, 0), rank_sample(5, 0)]
    assert all(map(accepted, [*fine, Bye(rank=4, by="collector", reason="killed", at_ns=0)]))
    assert not hub.refused
    run_ends = Bye(rank=None, by="collector", reason="finished", at_ns=0)
    foreign = [node_step(1, 0, range(3, 8)), hello(3), node_step(0, 0, mine), exchange(0, 0)]
    for message in [*foreign, frames.status(), run_ends, about_node(1, mine)]:
        assert not accepted(message)
    assert hub.accept_from_node(b"\xc1", 1, mine, 0) is None
    assert hub.refused == {"foreign rank": 2, "foreign node": 2, "not a node's to send": 3, "not msgpack": 1}


def test_a_node_bounds_no_clock_but_its_own_against_the_roots() -> None:
    hub = Hub()

    def accepted(message: Message, node: int) -> bool:
        return hub.accept_from_node(encode(message), node, range(4 * node, 4 * node + 4), 0) is not None

    assert accepted(frames.hello(4), 1)
    assert accepted(exchange(1, 0), 1)
    assert accepted(frames.hello(8, boot_id="other"), 2)
    assert not accepted(exchange(2, 0), 2)  # names the clock of node 1
    assert not accepted(replace(exchange(1, 0), root_boot_id="other"), 1)
    assert not accepted(replace(exchange(1, 0), node_time_ns="time:[1]"), 1)
    assert hub.refused == {"foreign clock": 3}


def test_a_nodes_step_with_a_rank_twice_is_refused() -> None:
    hub = Hub()
    raw = msgspec.msgpack.decode(encode(node_step(1, 0, range(4, 6))))
    twice = msgspec.msgpack.encode({**raw, "ranks": [4] * 4096})  # it would get the memory of as many ranks
    assert hub.accept_from_node(twice, 1, range(4, 8), 0) is None
    assert hub.refused == {"invalid": 1}


def test_a_late_viewer_gets_nodes_steps_as_they_came() -> None:
    hub = Hub()
    ranks = [frames.step(rank, 3, late_ms=rank) for rank in range(2)]
    keep(hub, pack(0, ranks))
    [message] = kept(hub)
    assert isinstance(message, NodeStep)
    assert expand(message) == ranks


def hung_run() -> list[tuple[Message, int]]:
    """Two ranks and a collector; rank 1 stands between steps for 40 s, and both send all the while."""
    found: list[tuple[Message, int]] = [(frames.hello(rank), frames.EPOCH_NS) for rank in (0, 1)]
    steps = [one for ranks in frames.synchronous([(0, 0)] * 40) for one in ranks]
    found += [(one, frames.EPOCH_NS + one.start_ns + one.duration_ns - steps[0].start_ns) for one in steps]
    last = steps[-1]
    since, began = last.start_ns + last.duration_ns, found[-1][1]
    for tenths in range(0, 400, 5):
        for rank, (phase, issued) in enumerate([("sync", 41), ("input", 40)]):
            at = (tenths + rank + 1) * 100_000_000
            one = Beat(rank=rank, at_ns=since + at, step=40, phase=phase, since_ns=since, issued_in=[(0, issued)])
            found.append((one, began + at))
        found.append((frames.status(), began + (tenths + 3) * 100_000_000))
        if tenths % 10 == 0:
            found.append((frames.device(tenths // 10), began + (tenths + 4) * 100_000_000))
    return found


def test_a_viewer_that_comes_late_to_a_hang_says_what_the_others_say() -> None:
    """It has the newest heartbeats only, and samples of devices from before; whichever frame came last."""
    sent = hung_run()
    for kept in range(len(sent) - 8, len(sent) - 3):
        hub, late, early = Hub(), RunState(), RunState()
        for message, at_ns in sent[:kept]:
            hub.keep(message, encode(message), at_ns)
        until = next(n for n, (message, _) in enumerate(sent) if n >= kept and isinstance(message, Status)) + 1
        for message, at_ns in sent[:until]:
            early.apply_message(message, at_ns)
        for envelope in hub.snapshot():
            late.apply_message(decode(envelope.frame), envelope.received_ns)
        for message, at_ns in sent[kept:until]:
            late.apply_message(message, at_ns)
        (said, *_), (found, *_) = early.diagnosis.incidents(), late.diagnosis.incidents()
        assert said.message.startswith("rank 1 is stuck between steps at step 40 for ")
        assert (found.message, found.ranks, found.cost_ns) == (said.message, said.ranks, said.cost_ns)


def test_heartbeats_from_while_a_step_stood_still_are_kept() -> None:
    """They show for whom the others waited. Of steps that go on, the newest two are, and of a hang so many."""
    hub = Hub()
    numbers = [*range(20), 19, 19, *range(20, 40)]
    for at, number in enumerate(numbers):
        keep(hub, frames.beat(0, number, at_ns=at))
    assert [beat.at_ns for beat in kept(hub) if isinstance(beat, Beat)] == [19, 20, 21, 40, 41]
    hub = Hub()
    for number, late_ms in ((3, 0), (4, 700), (5, 0)):  # a stall may have one heartbeat, and a stack
        keep(hub, frames.beat(0, number, at_ns=number))
        keep(hub, Stack(rank=0, at_ns=number, since_ns=0, step=number, text="job.py", threads=1))
        keep(hub, frames.step(0, number, late_ms=late_ms))
    assert [beat.at_ns for beat in kept(hub) if isinstance(beat, Beat)] == [4, 5]
    assert [stack.at_ns for stack in kept(hub) if isinstance(stack, Stack)] == [3, 4, 5]
    hub = Hub()
    for number in (3, 4, 5, 6, 7):  # a node's steps come when the slowest of its ranks has sent them
        keep(hub, frames.beat(0, number, at_ns=number))
        if number == 5:
            keep(hub, pack(1, [frames.step(rank, 4, late_ms=700 * rank) for rank in (0, 1)]))
    assert [beat.at_ns for beat in kept(hub) if isinstance(beat, Beat)] == [4, 6, 7]
    hub = Hub()
    for at in range(1000):
        keep(hub, frames.beat(0, 40, at_ns=100 + at))
    assert [beat.at_ns for beat in kept(hub) if isinstance(beat, Beat)] == [*range(1099 - KEEP_STILL, 1100)]
