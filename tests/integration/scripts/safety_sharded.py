"""FSDP2, HSDP and the new ``replicate``: small trainings, each with another feature, watched by hand.

``safety_sharded.py DIRECTORY`` runs the cases for that many ranks, records there, and leaves there when each case
started and ended. With ``DDPWATCH=0`` in the environment the same script is its own unwatched twin.
"""

import hashlib
import json
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

import ddpwatch
from ddpwatch.probe.watch import Watch

STEPS = 5
BLOCKS = 3
DIRECTORY = Path(sys.argv[1])
CASES: dict[str, Callable[[], None]] = {}


def case(name: str, ranks: int = 2) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        if ranks == int(os.environ["WORLD_SIZE"]):
            CASES[name] = function
        return function

    return add


def block() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh())


def model() -> nn.Sequential:
    return nn.Sequential(*[block() for _ in range(BLOCKS)], nn.Linear(32, 5))


def sharded(
    module: nn.Sequential | None = None, shard: Callable[..., nn.Module] = fully_shard, **options: object
) -> FSDPModule:
    """A model whose blocks are parameter groups; the rest is the root's."""
    module = model() if module is None else module
    for one in list(module)[:BLOCKS]:
        shard(one, **options)
    return shard(module, **options)


def mesh() -> dist.DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def watch(module: nn.Module) -> Watch:
    return ddpwatch.watch(module, record=DIRECTORY / "run.mcap")


def local(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def tell(module: nn.Module) -> None:
    """Prints one digest of this rank's parameters, buffers and gradients."""
    sha = hashlib.sha256()
    for tensor in [*module.parameters(), *module.buffers()]:
        for part in (tensor, tensor.grad):
            sha.update(b"none" if part is None else local(part).reshape(-1).view(torch.uint8).numpy().tobytes())
    print("parameters", sha.hexdigest()[:16], flush=True)


def batches() -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return lambda width=32: torch.randn(4, width, generator=generator)


def train(module: nn.Module, steps: int = STEPS, before: Callable[[int], None] = lambda step: None) -> None:
    """The plain loop."""
    batch, optimizer = batches(), torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9)
    for step in range(steps):
        before(step)
        module(batch()).float().square().mean().backward()
        optimizer.step()
        tell(module)
        optimizer.zero_grad()


@case("FSDP2", ranks=4)
def plain() -> None:
    """`fully_shard` on each block and on the model; a rank has nothing of the last layer"""
    ours = sharded()
    watch(ours)
    train(ours)


@case("FSDP2: reshard_after_forward off")
def no_reshard() -> None:
    """parameters are gathered once a step"""
    ours = sharded(reshard_after_forward=False)
    watch(ours)
    train(ours)


@case("FSDP2: reshard_after_forward on")
def reshard() -> None:
    """the root, too, is gathered again for the backward"""
    ours = sharded(reshard_after_forward=True)
    watch(ours)
    train(ours)


@case("FSDP2: nested wrapping")
def nested() -> None:
    """blocks inside blocks"""
    whole = model()
    for one in list(whole)[:BLOCKS]:
        fully_shard(one[0])
    ours = sharded(whole)
    watch(ours)
    train(ours)


@case("FSDP2: several modules in one group")
def grouped() -> None:
    """`fully_shard([a, b])`"""
    whole = model()
    fully_shard([whole[0], whole[1]])
    ours = fully_shard(whole)
    watch(ours)
    train(ours)


@case("FSDP2: mixed precision")
def mixed() -> None:
    """bfloat16 parameters, reduced in float32"""
    ours = sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    watch(ours)
    train(ours)


@case("FSDP2: CPU offload")
def offload() -> None:
    """`CPUOffloadPolicy`"""
    ours = sharded(offload_policy=CPUOffloadPolicy(pin_memory=False))
    watch(ours)
    train(ours)


def accumulate(ours: FSDPModule, switch: Callable[[bool], None]) -> None:
    batch, optimizer = batches(), torch.optim.SGD(ours.parameters(), lr=0.05)
    for _ in range(STEPS):
        for micro in range(3):
            switch(micro == 2)
            ours(batch()).square().mean().backward()
        optimizer.step()
        tell(ours)
        optimizer.zero_grad()


@case("FSDP2: gradient accumulation")
def accumulation() -> None:
    """`set_requires_gradient_sync(False)` for two micro-batches of three"""
    ours = sharded()
    watch(ours)
    accumulate(ours, ours.set_requires_gradient_sync)


@case("FSDP2: activation checkpointing")
def checkpointing() -> None:
    """blocks are computed again in the backward"""
    ours = sharded(nn.Sequential(*[checkpoint_wrapper(block()) for _ in range(BLOCKS)], nn.Linear(32, 5)))
    watch(ours)
    train(ours)


@case("FSDP2: explicit prefetch")
def prefetch() -> None:
    """forward and backward prefetch two blocks ahead; `unshard(async_op=True)` before the forward"""
    ours = sharded()
    blocks = list(ours)[:BLOCKS]
    blocks[0].set_modules_to_forward_prefetch(blocks[1:])
    blocks[-1].set_modules_to_backward_prefetch(blocks[-2::-1])
    watch(ours)
    train(ours, before=lambda step: ours.unshard(async_op=True))


@case("FSDP2: asynchronous all-gathers")
def asynchronous() -> None:
    """of every parameter group"""
    ours = sharded()
    ours._set_unshard_async_op(True)
    watch(ours)
    train(ours)


@case("FSDP2: torch.compile")
def compiled() -> None:
    """each block by itself"""
    torch._dynamo.reset()
    whole = model()
    for one in list(whole)[:BLOCKS]:
        one.compile(backend="aot_eager")
    ours = sharded(whole)
    watch(ours)
    train(ours)


@case("FSDP2: ignored parameters")
def ignored() -> None:
    """one layer's stay whole, on each rank its own"""
    whole = model()
    ours = sharded(whole, ignored_params=set(whole[1].parameters()))
    watch(ours)
    train(ours)


class OwnAllGather:
    """A job's own all-gather, of twice the size that is needed."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(2 * size[0], dtype=dtype, device=device)[: size[0]]

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: object, async_op: bool = False
    ) -> object:
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


@case("FSDP2: own all-gather")
def own_all_gather() -> None:
    """`set_custom_all_gather`, once before `watch()` and once in mid-training: ddpwatch steps aside"""
    ours = sharded()
    ours[0].set_custom_all_gather(OwnAllGather())
    watch(ours)
    train(ours, before=lambda step: ours[1].set_custom_all_gather(OwnAllGather()) if step == 2 else None)
    print("is there", type(ours[1]._get_fsdp_state()._fsdp_param_group._all_gather_comm).__name__)


@case("FSDP2: memory from the process group")
def group_memory() -> None:
    """FSDP2's own communication objects are exchanged in mid-training"""
    ours = sharded()
    watch(ours)
    train(ours, before=lambda step: ours.set_allocate_memory_from_process_group_for_comm(step % 2 == 1))


@case("FSDP2: validation and clipping")
def validation() -> None:
    """forwards without gradients, and a norm over all ranks"""
    ours, batch = sharded(), batches()
    watch(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    for _ in range(STEPS):
        ours(batch()).square().mean().backward()
        norm = nn.utils.clip_grad_norm_(ours.parameters(), 0.1)
        optimizer.step()
        tell(ours)
        optimizer.zero_grad()
        with torch.no_grad():
            print(f"norm {local(norm).item()}, validation {ours(batch()).sum().item()}")


@case("FSDP2: checkpoint", ranks=4)
def checkpoint() -> None:
    """`torch.distributed.checkpoint` saves and loads"""
    ours, folder = sharded(), str(DIRECTORY / "checkpoint")
    watch(ours)
    train(ours, steps=3)
    dcp.save({"model": ours.state_dict()}, checkpoint_id=folder)
    train(ours, steps=2)
    state = {"model": ours.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    ours.load_state_dict(state["model"])
    train(ours, steps=3)


class SeenFunctions(TorchFunctionMode):
    """Counts the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function)] += 1
        return function(*args, **kwargs or {})


@case("FSDP2: TorchFunctionMode")
def function_mode() -> None:
    """around all; it sees the job's calls and no other"""
    with SeenFunctions() as mode:
        ours = sharded()
        watch(ours)
        train(ours)
    lines = [f"called {name} {count}" for name, count in sorted(mode.calls.items())]
    print(*[re.sub(" at 0x[0-9a-f]+", "", line) for line in lines], sep="\n")


@case("FSDP2: exception in the forward")
def forward_exception() -> None:
    """a batch of the wrong width; after `reset_iter_state` the model trains on"""
    ours, batch = sharded(), batches()
    watch(ours)
    optimizer = torch.optim.SGD(ours.parameters(), lr=0.05)
    for step in range(STEPS):
        try:
            ours(batch(31 if step == 2 else 32)).square().mean().backward()
            optimizer.step()
        except RuntimeError as error:
            print(f"caught {error}")
            ours.reset_iter_state()
        tell(ours)
        optimizer.zero_grad()


@case("FSDP2: closed and watched again")
def closed() -> None:
    """in mid-training"""
    ours = sharded()
    for _ in range(2):
        handle = watch(ours)
        train(ours, steps=2)
        if handle._probe is not None:
            handle._probe.close()  # and not the session: the cases share its recording
        train(ours, steps=2)


@case("FSDP2: as torchtitan trains")
def titan() -> None:
    """blocks are checkpointed, the last one stays gathered; two backwards a step, clipping, a learning rate schedule"""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    whole = nn.Sequential(*[checkpoint_wrapper(block()) for _ in range(BLOCKS)], nn.Linear(32, 5))
    for number, one in enumerate(list(whole)[:BLOCKS]):
        fully_shard(one, mp_policy=policy, reshard_after_forward=number < BLOCKS - 1)
    ours, batch = fully_shard(whole, mp_policy=policy), batches()
    watch(ours)
    optimizer = torch.optim.AdamW(ours.parameters(), lr=0.01, foreach=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 3))
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = sum(micro_step(ours, batch()) for _ in range(2))
        norm = nn.utils.clip_grad_norm_(ours.parameters(), 1.0, foreach=True)
        optimizer.step()
        schedule.step()
        dist.all_reduce(loss)
        print(f"loss {loss.item()}, norm {local(norm).item()}")
        tell(ours)


def micro_step(ours: FSDPModule, inputs: torch.Tensor) -> torch.Tensor:
    loss = ours(inputs).float().square().mean() / 2
    loss.backward()
    return loss.detach()


@case("HSDP", ranks=4)
def hsdp() -> None:
    """a 2 x 2 mesh"""
    ours = sharded(mesh=mesh())
    watch(ours)
    train(ours)


@case("HSDP: gradient accumulation", ranks=4)
def hsdp_accumulation() -> None:
    """`set_requires_all_reduce(False)` for two micro-batches of three"""
    ours = sharded(mesh=mesh())
    watch(ours)
    accumulate(ours, ours.set_requires_all_reduce)


@case("replicate")
def replicated() -> None:
    """the new one, that is FSDP2 without sharding"""
    ours = sharded(shard=replicate)
    watch(ours)
    train(ours)


def main() -> None:
    logging.basicConfig()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    times = {}
    for name, run in CASES.items():
        for stream in (sys.stdout, sys.stderr):
            print(f"== {name}", file=stream, flush=True)
        torch.manual_seed(7)
        begin = time.monotonic_ns()
        try:
            run()
        except Exception as error:
            print(f"raised {type(error).__name__}: {error}", flush=True)
        times[name] = [begin, time.monotonic_ns()]
        dist.barrier()
    for stream in (sys.stdout, sys.stderr):
        print("== the end", file=stream, flush=True)
    (DIRECTORY / f"times.{dist.get_rank()}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
