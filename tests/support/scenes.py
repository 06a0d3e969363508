"""Made-up runs in the states that an engineer should recognise at a glance, for the dashboard's tests and pictures.

Each scene is the frames of a run up to the moment at which somebody looks. What is wrong is found by the diagnosis
itself: a scene holds what ranks and agents would send, and no incident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import itemgetter

import numpy as np

from ddpwatch.wire.messages import (
    Beat,
    BucketLayout,
    ClockExchange,
    Device,
    Hello,
    Layout,
    Message,
    Node,
    Stack,
    Status,
    Step,
    encode,
)
from ddpwatch.wire.transport import Envelope, Frame
from tests.support.fleet import (
    BUCKET_BYTES,
    BUCKETS,
    PARAMS,
    PER_BUCKET,
    START_NS,
    Disturbance,
    Fleet,
    FleetNames,
    Shape,
)
from tests.support.fleet_noise import Noise

S, MS = 10**9, 10**6
EPOCH_NS = 1_700_000_000 * S
STEP_NS = 120 * MS
BEAT_NS = S // 2
LATE_NS = 30 * MS
LAYER = 16  # the position of the first gradient that comes late
Timed = Iterator[tuple[int, Message]]  # with the time on the clock of rank 0's host


@dataclass(frozen=True)
class Job:
    """How the ranks of a scene are spread over hosts.

    Attributes:
        unseen: The host whose agent is not connected at the end; None: all are.
    """

    fleet: Fleet
    hosts: int = 1
    gpus: bool = True
    unseen: int | None = None

    @property
    def per_host(self) -> int:
        """Ranks of a host."""
        return self.fleet.shape.world // self.hosts

    def host(self, rank: int) -> int:
        """A rank's host."""
        return rank // self.per_host

    def name(self, host: int) -> str:
        """A host's name."""
        return f"node{host:0{len(str(self.hosts - 1))}d}"


def healthy() -> list[Frame]:
    """Eight ranks, nothing wrong."""
    return _scene(Job(_fleet(8, 120)))


def constant() -> list[Frame]:
    """Rank 5 is late in every step from 60 on."""
    return _scene(Job(_fleet(8, 120, 5, range(60, 120))))


def intermittent() -> list[Frame]:
    """Rank 5 is late in every fourth step from 60 on."""
    return _scene(Job(_fleet(8, 200, 5, range(60, 200, 4))))


def ended() -> list[Frame]:
    """Rank 5 was late in steps 60 to 119; the run has been healthy since."""
    return _scene(Job(_fleet(8, 260, 5, range(60, 120))))


def hang(lasts_s: int = 75, world: int = 8) -> list[Frame]:
    """Rank 5 stands still in the forward of step 120, in the user's code; the others wait for it in their backward."""
    job = Job(_fleet(world, 120))
    return _scene(job, _hang(job, 5, lasts_s))


def two_hosts() -> list[Frame]:
    """Two hosts with two ranks each; rank 3, on the second, is late."""
    return _scene(Job(_fleet(4, 120, 3, range(60, 120)), hosts=2, gpus=False))


def many_hosts(hosts: int = 128, bad: int = 77, unseen: int | None = 101) -> list[Frame]:
    """128 hosts with eight ranks each. One host's ranks are late together; another one is not connected any more."""
    world, steps = 8 * hosts, 20
    shape = Shape(world=world, steps=steps, step_ns=STEP_NS, noise=Noise("gauss", 0.01), seed=1)
    wrong = Disturbance(shape)
    late = np.zeros((steps, world), np.int64)
    late[1:, 8 * bad : 8 * bad + 8] = LATE_NS + np.random.default_rng(1).integers(-3 * MS, 3 * MS, (steps - 1, 8))
    wrong.backward.append((LAYER, late))
    return _scene(Job(Fleet(shape, wrong), hosts, unseen=unseen))


SCENES: Mapping[str, Callable[[], list[Frame]]] = {
    "healthy": healthy, "constant": constant, "intermittent": intermittent, "hang": hang, "ended": ended,
    "two-hosts": two_hosts, "many-hosts": many_hosts,
}  # fmt: skip


# -- frames --------------------------------------------------------------------------------------------------


def _fleet(world: int, steps: int, rank: int = 0, strikes: range = range(0)) -> Fleet:
    """A job with a little noise, in which a rank's backward is late in some steps, from a layer on."""
    shape = Shape(world=world, steps=steps, step_ns=STEP_NS, noise=Noise("gauss", 0.01), seed=1)
    wrong = Disturbance(shape)
    late = np.zeros((steps, world), np.int64)
    late[list(strikes), rank] = LATE_NS
    wrong.backward.append((LAYER, late))
    return Fleet(shape, wrong)


def _scene(job: Job, rest: Iterable[tuple[int, Message]] = ()) -> list[Frame]:
    """All frames in the order of their times, as the root receives them."""
    timed = [*_introduction(job), *_training(job), *rest]
    end = max(at for at, _ in timed)
    timed += [*_samples(job, end), *_nodes(job, end)]
    return [
        (message, Envelope(seq, EPOCH_NS + at - START_NS, encode(message)))
        for seq, (at, message) in enumerate(sorted(timed, key=itemgetter(0)), start=1)
    ]


def _introduction(job: Job) -> Timed:
    names, order = FleetNames(), list(range(PARAMS))[::-1]
    buckets = [BucketLayout(i, BUCKET_BYTES, order[i * PER_BUCKET : (i + 1) * PER_BUCKET]) for i in range(BUCKETS)]
    params = [names.layer(param) for param in range(PARAMS)]
    for rank in range(job.fleet.shape.world):
        host = job.host(rank)
        yield START_NS, Hello(
            run_id="made-up", rank=rank, local_rank=rank % job.per_host, world_size=job.fleet.shape.world,
            host=job.name(host), pid=4000 + rank, boot_id=f"boot {host}", torch="2.13.0", module="GPT",
            parameters=25_000_000, script="train.py", backend="nccl" if job.gpus else "gloo",
            device_kind="cuda" if job.gpus else "cpu", timing_source="cuda events" if job.gpus else "host",
            device_uuid=f"GPU-{rank}" if job.gpus else "",
        )  # fmt: skip
        yield START_NS, Layout(rank=rank, epoch=2, params=params, buckets=buckets)


def _training(job: Job) -> Timed:
    for played in job.fleet.play():
        for step, end in zip(job.fleet.frames(played), played.end.tolist(), strict=True):
            if job.unseen is None or job.host(step.rank) != job.unseen or played.number < job.fleet.shape.steps - 4:
                yield end, step
        for mark in played.marks:
            yield mark.end_ns or mark.start_ns, mark


def _samples(job: Job, end: int) -> Timed:
    """What the operating systems say, once a second, and the ranks' heartbeats at the end."""
    dice = np.random.default_rng(2)
    for at in range(START_NS, end, S):
        yield at, Status(at_ns=at, frames=1, bytes=1)
        for host in range(job.hosts):
            yield at, Device(
                host=job.name(host), boot_id=f"boot {host}", kind="cpu", at_ns=at, name="16 CPUs",
                utilization=35 + 10 * dice.random(), memory_used=40 << 30, memory_total=128 << 30,
                net_tx_bytes_s=2.1e8 * (0.9 + 0.2 * dice.random()),
                net_rx_bytes_s=2.1e8 * (0.9 + 0.2 * dice.random()),
            )  # fmt: skip
        for rank in range(job.fleet.shape.world if job.gpus else 0):
            yield at, Device(
                host=job.name(job.host(rank)), boot_id=f"boot {job.host(rank)}", kind="cuda", at_ns=at,
                index=rank % job.per_host, uuid=f"GPU-{rank}", name="Made-up GPU",
                utilization=88 + 10 * dice.random(), memory_used=61 << 30, memory_total=139 << 30,
                power_w=420 + 60 * dice.random(), power_limit_w=700.0, temperature_c=58.0,
            )  # fmt: skip


def _nodes(job: Job, end: int) -> Timed:
    """What the root knows of the other hosts: their clocks agree with its own, as far as pings can show."""
    for host in range(1, job.hosts):
        ranks = list(range(host * job.per_host, (host + 1) * job.per_host))
        for at in range(START_NS, end, S // 4):
            sent, there = at, 60_000 + 100 * host
            yield at, ClockExchange(
                node=host, node_boot_id=f"boot {host}", root_boot_id="boot 0", sent_ns=sent, received_ns=sent + there,
                replied_ns=sent + there, returned_ns=sent + 2 * there,
            )  # fmt: skip
        gone = host == job.unseen
        yield (
            end,
            Node(
                node=host, host=job.name(host), ranks=ranks, at_ns=end, seen_ns=end - 7 * S * gone, connected=not gone
            ),
        )


def _hang(job: Job, stuck: int, lasts_s: int) -> Timed:
    """Heartbeats and stacks of ranks that do not go on after the last step."""
    shape = job.fleet.shape
    since = max(step.start_ns + step.duration_ns for _, step in _training(job) if isinstance(step, Step))
    for rank in range(shape.world):
        phase, flight = ("forward", []) if rank == stuck else ("sync", [0, 1, 2])
        still = since + (5 if rank == stuck else 60) * MS
        issued = BUCKETS * shape.steps + (0 if rank == stuck else 3)
        for at in range(still, since + lasts_s * S, BEAT_NS):
            yield at, Beat(
                rank=rank, at_ns=at, step=shape.steps, phase=phase, since_ns=still, in_flight=flight,
                issued_in=[(0, issued)],
            )  # fmt: skip
        text = _STUCK if rank == stuck else _WAITING
        yield still + 4 * S, Stack(rank=rank, at_ns=still + 4 * S, since_ns=still, step=shape.steps, text=text)


_TORCH = "/opt/venv/lib/python3.12/site-packages/torch"
_STUCK = """Thread 0x01 (most recent call first):
  File "/home/ada/gpt/tokens.py", line 87 in read_shard
  File "/home/ada/gpt/model.py", line 41 in forward
  File "/home/ada/gpt/train.py", line 112 in train_step
  File "/home/ada/gpt/train.py", line 160 in main
"""
_WAITING = f"""Thread 0x01 (most recent call first):
  File "{_TORCH}/autograd/graph.py", line 824 in _engine_run_backward
  File "{_TORCH}/autograd/__init__.py", line 353 in backward
  File "{_TORCH}/_tensor.py", line 647 in backward
  File "/home/ada/gpt/train.py", line 115 in train_step
  File "/home/ada/gpt/train.py", line 160 in main
"""
