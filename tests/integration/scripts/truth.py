"""Schedules that are known in advance: layers whose backward takes a set time, collectives that take a set time.

Prints, per case and step, what the script itself stamped (with no help of ddpwatch) and what the probe sent; the test
compares. Delays are sleeps, so nothing here competes for the processor; what counts is what the stamps say, not what
was asked for.
"""

import contextlib
import json
import sys
import threading
import time
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as fsdp_collectives
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpwatch
from ddpwatch.probe import ddp as probe
from ddpwatch.probe import session
from ddpwatch.probe.ddp_collectives import GroupHooks
from ddpwatch.probe.recorder import StepRecord

STEPS = 12
COMPARED = slice(3, -1)  # by then DDP has rebuilt its buckets, and told; it logs a step with the next one
MS = 1e-3


class Stamps:
    """The script's own view of one step, absolute ns."""

    def __init__(self) -> None:
        self.compute: list[tuple[int, int]] = []  # forward, then backward
        self.comm: dict[tuple[str, int], list[int]] = {}  # module and bucket -> [launch, done]
        self.waits: list[tuple[int, int]] = []  # for collectives of FSDP2
        self.hooks: dict[str, int] = {}  # parameter -> its gradient was accumulated
        self.end = 0  # the backward has returned


stamps = Stamps()


class SlowBackward(torch.autograd.Function):
    """Does nothing forward; sleeps backward."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        time.sleep(ctx.seconds)
        return gradient, None


class Layer(nn.Module):
    """A linear layer whose gradients arrive ``seconds`` after the backward has reached it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear, self.seconds = nn.Linear(16, 16), seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SlowBackward.apply(self.linear(x), self.seconds)


class Both(Layer):
    """The same, and its forward takes ``seconds`` as well."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        time.sleep(self.seconds)
        return super().forward(x)


class Pause(nn.Module):
    """Backward time behind the last gradient: nothing is left to communicate then."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SlowBackward.apply(x, self.seconds)


def delayed(delays: list[float], module: str, bucket: dist.GradBucket) -> Future[torch.Tensor]:
    """A comm hook that takes the time it is told and moves nothing."""
    index, future = bucket.index(), Future()
    stamps.comm[module, index] = [time.monotonic_ns(), 0]

    def finish() -> None:
        stamps.comm[module, index][1] = time.monotonic_ns()
        future.set_result(bucket.buffer())

    threading.Timer(delays[index % len(delays)], finish).start()
    return future


def take_time(ddp: DDP, delays: list[float], module: str = "") -> None:
    """Gives a module `delayed` for a comm hook. It issues nothing, so it must be wrapped to be seen, on any torch."""
    GroupHooks.supported = staticmethod(lambda group: False)  # type: ignore[method-assign]
    hook = partial(delayed, delays)
    hook.__qualname__ = hook.__name__ = "delayed"
    ddp.register_comm_hook(module, hook)


class LateWork(dist.Work):
    """A collective that moves nothing and is over after a set time."""

    def __init__(self, seconds: float, key: tuple[str, int]) -> None:
        super().__init__()
        self.future, self.key = Future(), key
        threading.Timer(seconds, self.finish, (stamps,)).start()

    def finish(self, step: Stamps) -> None:
        step.comm[self.key][1] = time.monotonic_ns()
        self.future.set_result(None)

    def get_future(self) -> Future[None]:
        return self.future

    def wait(self, timeout: object = None) -> bool:
        begin = time.monotonic_ns()
        self.future.wait()
        stamps.waits.append((begin, time.monotonic_ns()))
        return True


@contextlib.contextmanager
def collectives_that_take(gather_s: float, scatter_s: float) -> None:
    """FSDP2's own collectives move nothing for a while."""
    gather, scatter = fsdp_collectives.DefaultAllGather, fsdp_collectives.DefaultReduceScatter
    before = gather.__call__, scatter.__call__

    def of_time(seconds: float, op: str) -> object:
        def call(self: object, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *rest: object) -> object:
            begin, key = time.monotonic_ns(), (op, len(stamps.comm))
            stamps.comm[key] = [begin, 0]
            output_tensor.copy_(input_tensor.repeat(2) if op == "gather" else input_tensor[: output_tensor.numel()])
            work = LateWork(seconds, key)
            if rest and rest[-1] is True:
                return work
            work.future.wait()
            stamps.comm[key][1] = time.monotonic_ns()
            stamps.waits.append(tuple(stamps.comm[key]))
            return None

        return call

    gather.__call__, scatter.__call__ = of_time(gather_s, "gather"), of_time(scatter_s, "scatter")
    try:
        yield
    finally:
        gather.__call__, scatter.__call__ = before


def sharded(layers: list[float], gather_s: float, scatter_s: float, prefetch: bool) -> list[dict]:
    """FSDP2 with a parameter group per layer. With ``prefetch``, a layer is gathered while the one before computes."""
    blocks = [Both(seconds) for seconds in layers]
    for block in blocks:
        fully_shard(block)
    for block, following in pairwise(blocks):
        block.set_modules_to_forward_prefetch([following] if prefetch else [])
    model, records = fully_shard(nn.Sequential(*blocks)), []
    model._set_unshard_async_op(prefetch)
    with ddpwatch.watch(model), collectives_that_take(gather_s, scatter_s):
        tap(records)
        seen, _ = train(model)
    return [
        {
            "compute": one.compute,
            "comm": sorted(one.comm.values()),
            "waits": sorted(one.waits),
            "step": message(record),
        }
        for one, record in zip(seen[COMPARED], records[COMPARED], strict=True)
    ]


def case(layers: list[float], delays: list[float] | None, pause: float = 0.0, one_bucket: bool = False) -> list[dict]:
    """Trains a few steps; the stamps of each: ours, the probe's, and what DDP logged.

    ``layers`` from the last to the first.
    """
    stack = (
        [Pause(pause), *[Layer(seconds) for seconds in reversed(layers)]]
        if pause
        else [Layer(seconds) for seconds in reversed(layers)]
    )
    ddp = DDP(nn.Sequential(*stack), bucket_cap_mb=25 if one_bucket else 0.0005)
    ddp._set_ddp_runtime_logging_sample_rate(1)
    note_gradients(ddp)
    records: list[StepRecord] = []
    with ddpwatch.watch(ddp):
        if delays is not None:
            take_time(ddp, delays)
        tap(records)
        seen, logged = train(ddp)
    return [
        {
            "compute": one.compute,
            "comm": sorted(one.comm.values()),
            "gradients": one.hooks,
            "step": message(record),
            "logged": {key: value for key, value in ddps.items() if key.startswith("backward_")},
        }
        for one, record, ddps in zip(seen[COMPARED], records[COMPARED], logged[COMPARED], strict=True)
    ]


def two_modules(layers: list[float], delays: tuple[list[float], list[float]], pause: float) -> list[dict]:
    """One after the other, each with buckets and a comm hook of its own; one backward goes through both."""
    first = DDP(nn.Sequential(Pause(pause), *[Layer(seconds) for seconds in layers]), bucket_cap_mb=0.0005)
    second = DDP(nn.Sequential(*[Layer(seconds) for seconds in layers]), bucket_cap_mb=0.0005)
    both, records = nn.Sequential(first, second), []
    with ddpwatch.watch(first), ddpwatch.watch(second):
        take_time(first, delays[0], "first")
        take_time(second, delays[1], "second")
        tap(records)
        seen, _ = train(both)
    return [
        {"compute": one.compute, "comm": sorted(one.comm.values()), "step": message(record)}
        for one, record in zip(seen[COMPARED], records[COMPARED], strict=True)
    ]


def train(model: nn.Module) -> tuple[list[Stamps], list[dict]]:
    """The steps' stamps, and what DDP logged of each, which it does one step late."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen, logged = [], []
    for _ in range(STEPS):
        seen.append(one_step(model, optimizer))
        logged.append(model._get_ddp_logging_data() if isinstance(model, DDP) else {})
    session.current.recorder.finish()
    return seen, [*logged[1:], {}]


def hook_fires(layers: list[float], statistics: bool) -> list[dict]:
    """When each gradient was accumulated: by a Python hook of the script's own, and by the probe.

    ``statistics``: the probe reads them from DDP, as it does where it can; otherwise from Python hooks of its own.
    """
    ddp = DDP(nn.Sequential(*[Layer(seconds) for seconds in reversed(layers)]), bucket_cap_mb=0.0005)
    note_gradients(ddp)
    records: list[StepRecord] = []
    if not statistics:
        probe.hasattr = lambda owner, name: name != "get_backward_stats" and hasattr(owner, name)
    with ddpwatch.watch(ddp):
        tap(records)
        seen, _ = train(ddp)
    if not statistics:
        del probe.hasattr
    names = [name for name, _ in ddp.module.named_parameters()]
    return [
        {"own": one.hooks, "probed": arrivals(record, names), "step": message(record)}
        for one, record in zip(seen[COMPARED], records[COMPARED], strict=True)
    ]


def arrivals(record: StepRecord, names: list[str]) -> dict[str, int]:
    """Returns the time of each parameter's gradient, as the probe sent it, by name."""
    sent = record.message(0, 0)
    base = min(sent.hook_param)
    return {names[id - base]: sent.start_ns + ns for id, ns in zip(sent.hook_param, sent.hook_ns, strict=True)}


def note_gradients(ddp: DDP) -> None:
    for name, param in ddp.module.named_parameters():
        param.register_post_accumulate_grad_hook(partial(fired, name))


def fired(name: str, param: torch.Tensor) -> None:
    stamps.hooks[name] = time.monotonic_ns()


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> Stamps:
    global stamps
    stamps = Stamps()
    x = torch.randn(4, 16, requires_grad=True)
    begin = time.monotonic_ns()
    output = model(x)
    stamps.compute.append((begin, time.monotonic_ns()))
    x.register_hook(lambda _: stamps.compute.append((backward_begin, time.monotonic_ns())))
    loss = output.square().mean()
    backward_begin = time.monotonic_ns()
    loss.backward()
    stamps.end = time.monotonic_ns()
    optimizer.step()
    optimizer.zero_grad()
    return stamps


def tap(records: list[StepRecord]) -> None:
    """Keeps what the recorder hands to the sender."""
    recorder = session.current.recorder
    emit = recorder._emit
    recorder._emit = lambda record: (records.append(record), emit(record))


def message(record: StepRecord) -> dict:
    while not record.settled() or record.later:  # completed by other threads: the collectives', the sender's
        time.sleep(0.005)
    sent = record.message(0, 0)
    return {
        "start_ns": sent.start_ns,
        "duration_ns": sent.duration_ns,
        "spans": [[span.phase, span.start, span.end] for span in sent.spans],
        "module": sent.comm_module,
        "index": sent.comm_label,
        "ready": sent.comm_ready,
        "launch": sent.comm_launch,
        "done": sent.comm_done,
        "op": sent.comm_op,
        "wait_begin": sent.comm_wait_begin,
        "wait_end": sent.comm_wait_end,
    }


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    anchor = DDP(nn.Linear(1, 1))
    late = 100 * MS if rank == 1 else 0.0
    cases = {
        "hidden": lambda: case([20 * MS] * 4, [10 * MS], pause=40 * MS),
        "exposed": lambda: case([15 * MS] * 3, [30 * MS], one_bucket=True),
        "half": lambda: case([20 * MS] * 2, [40 * MS], pause=20 * MS, one_bucket=True),
        "out of order": lambda: case([15 * MS] * 4, [70 * MS, 5 * MS, 20 * MS, 5 * MS]),
        "many": lambda: case([4 * MS] * 12, [12 * MS, 3 * MS]),
        "two modules": lambda: two_modules([20 * MS] * 2, ([50 * MS], [35 * MS]), pause=20 * MS),
        "gap": lambda: case([10 * MS, 100 * MS], [5 * MS, 30 * MS]),
        "late rank": lambda: case([10 * MS + late, 10 * MS, 10 * MS], None),
    }
    cases["sharded, blocking"] = lambda: sharded([20 * MS] * 2, 30 * MS, 20 * MS, prefetch=False)
    cases["sharded, prefetched"] = lambda: sharded([50 * MS] * 2, 30 * MS, 20 * MS, prefetch=True)
    cases["hooks, by DDP's statistics"] = lambda: hook_fires([15 * MS] * 4, statistics=True)
    cases["hooks, by Python hooks"] = lambda: hook_fires([15 * MS] * 4, statistics=False)
    with ddpwatch.watch(anchor):
        for name, run in cases.items():
            dist.barrier()
            emit(name, run())
    dist.destroy_process_group()


def emit(case: str, steps: list[dict]) -> None:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, steps)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps([case, everyone]), flush=True)


if __name__ == "__main__":
    sys.exit(main())
