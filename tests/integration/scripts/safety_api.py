"""Where and when ``ddpwatch.watch()`` may be called. Prints digests of parameters, and in ``said`` lines what it said.

With ``DDPWATCH=0`` in the environment the same script is its own unwatched twin.
"""

import gc
import hashlib
import logging
import pickle
import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import ddpwatch
from ddpwatch.errors import UsageError
from ddpwatch.probe.watch import Watch

STEPS = 6
CASES: dict[str, Callable[[], None]] = {}


def case(name: str) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = function
        return function

    return add


def model(**options: object) -> DDP:
    layers = [layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())]
    return DDP(nn.Sequential(*layers, nn.Linear(64, 4)), **{"bucket_cap_mb": 0.01, **options})


def train(ddp: DDP, steps: int = STEPS) -> None:
    data = torch.Generator().manual_seed(dist.get_rank())
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    for _ in range(steps):
        ddp(torch.randn(8, 64, generator=data)).square().mean().backward()
        optimizer.step()
        raw = b"".join(p.detach().numpy().tobytes() for p in ddp.parameters())
        print("parameters", hashlib.sha256(raw).hexdigest()[:16])
        optimizer.zero_grad()


def say(text: object) -> None:
    """Prints what differs between watched and not by intention."""
    print("said", text)


def watch(ddp: nn.Module) -> Watch | None:
    """``ddpwatch.watch``, with what it refuses."""
    try:
        return ddpwatch.watch(ddp)
    except UsageError as error:
        say(f"refused: {error}")
    return None


@case("watch() before init")
def before_init() -> None:
    """a bare module, before there is a process group; a DDP module after it"""
    watch(nn.Linear(4, 4))
    dist.init_process_group("gloo")
    ddp = model()
    watch(ddp)
    train(ddp)


@case("watch() twice")
def twice() -> None:
    """the second call returns the first's handle"""
    ddp = model()
    if watch(ddp) is watch(ddp):
        say("the same handle")
    train(ddp)


@case("watch() on rank 0 only")
def on_the_first() -> None:
    """the others train unwatched"""
    ddp = model()
    if dist.get_rank() == 0:
        watch(ddp)
    train(ddp)


@case("watch() on all ranks but rank 0")
def on_the_others() -> None:
    """the others train unwatched"""
    ddp = model()
    if dist.get_rank() != 0:
        watch(ddp)
    train(ddp)


@case("watch() in mid-training")
def late() -> None:
    """buckets have been rebuilt already"""
    ddp = model()
    train(ddp, steps=3)
    watch(ddp)
    train(ddp)


@case("closed and watched again")
def closed() -> None:
    """in mid-training"""
    ddp = model()
    for _ in range(2):
        handle = watch(ddp)
        train(ddp, steps=3)
        handle.close()
        train(ddp, steps=3)


@case("comm hook before watch(): Python")
def python_before() -> None:
    """`fp16_compress_hook`"""
    ddp = model()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    watch(ddp)
    train(ddp)


@case("comm hook before watch(): bf16")
def bf16_before() -> None:
    """`bf16_compress_hook`, under another name"""

    def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(state, bucket)

    ddp = model()
    ddp.register_comm_hook(None, bf16)
    watch(ddp)
    train(ddp)


@case("comm hook before watch(): own")
def own_before() -> None:
    """a function that all-reduces, then scales"""

    def hook(state: float, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
        return future.then(lambda done: done.value()[0] * state)

    ddp = model()
    ddp.register_comm_hook(0.25, hook)
    watch(ddp)
    train(ddp)


@case("comm hook before watch(): raises")
def raises_before() -> None:
    """at the second bucket of the third step: the exception reaches the script"""
    seen: list[int] = []

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        seen.append(bucket.index())
        if seen.count(1) == 3:
            raise ValueError(f"bucket {bucket.index()} is not to my liking")
        return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])

    ddp = model()
    ddp.register_comm_hook(None, hook)
    watch(ddp)
    try:
        train(ddp)
    except ValueError as error:
        print(f"raised {type(error).__name__}: {error}")


@case("comm hook before watch(): built in")
def builtin_before() -> None:
    """the C++ fp16 hook"""
    ddp = model()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    watch(ddp)
    train(ddp)


@case("comm hook before watch(): PowerSGD")
def power_sgd_before() -> None:
    """two plain steps, then compressed ones"""
    ddp = model(bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    watch(ddp)
    train(ddp)


@case("comm hook before watch(): optimizer")
def optimizer_before() -> None:
    """`_register_fused_optim`"""
    ddp = model()
    ddp._register_fused_optim(torch.optim.SGD, 0.05)
    watch(ddp)
    train(ddp)


@case("a watched model is freed")
def freed() -> None:
    """neither it nor the process group is kept alive"""
    group = dist.group.WORLD
    gc.collect()
    held = sys.getrefcount(group)
    ddp = model()
    handle = watch(ddp)
    train(ddp)
    del ddp, handle
    gc.collect()
    print("references to the group", sys.getrefcount(group) - held)


@case("a pickled model")
def pickled() -> None:
    """loads where ddpwatch is not installed, and trains there"""
    ddp = model()
    handle = watch(ddp)
    train(ddp)
    whole = pickle.dumps(ddp)
    print("names ddpwatch", b"ddpwatch" in whole)
    train(pickle.loads(whole))
    train(ddp)
    del handle


def main() -> None:
    logging.basicConfig()
    torch.set_num_threads(1)
    for name, run in CASES.items():
        for stream in (sys.stdout, sys.stderr):
            print(f"== {name}", file=stream, flush=True)
        torch.manual_seed(7)
        run()
        dist.barrier()
    for stream in (sys.stdout, sys.stderr):
        print("== the end", file=stream, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
