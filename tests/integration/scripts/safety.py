"""Trains many small models with and without ddpwatch in one job and prints one JSON line per case on rank 0.

A case's parameters must be bit-identical with and without; cases are independent of each other.
"""

import copy
import gc
import json
import pickle
import sys
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import ddpwatch
from ddpwatch.errors import UsageError

STEPS = 6


class Branchy(nn.Module):
    """Leaves one branch out every other step: its parameters get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        x = self.first(x)
        return {"logits": self.head(x if self.calls % 2 else self.second(x))}


class Checkpointed(nn.Module):
    """Recomputes its middle in the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.head = nn.Linear(64, 64), mlp(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.middle, self.first(x), use_reentrant=False))


def mlp() -> nn.Module:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 4))


def train(
    watched: bool,
    build: Callable[[], nn.Module] = mlp,
    options: dict | None = None,
    prepare: Callable[[DDP], None] = lambda ddp: None,
    accumulate: int = 1,
    set_to_none: bool = True,
    fail_at: int = -1,
    backwards: int = 1,
    validate: bool = False,
    uneven: bool = False,
    autocast: bool = False,
    second: bool = False,
) -> list[torch.Tensor]:
    torch.manual_seed(7)
    ddp = DDP(build(), **{"bucket_cap_mb": 0.01, **(options or {})})
    critic = DDP(nn.Linear(4, 1)) if second else None
    handles = [ddpwatch.watch(model) for model in (ddp, critic) if model is not None] if watched else []
    prepare(ddp)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05, momentum=0.9)
    data = torch.Generator().manual_seed(dist.get_rank())
    steps = STEPS + dist.get_rank() if uneven else STEPS
    with Join([ddp]) if uneven else nullcontext():
        for step in range(steps):
            try:
                for micro in range(accumulate * backwards):
                    with ddp.no_sync() if (micro + 1) % accumulate else nullcontext():
                        batch = torch.randn(8, 16 if build is Branchy else 64, generator=data)
                        with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                            output = ddp(batch)
                        output = output["logits"] if isinstance(output, dict) else output
                        loss = (output if critic is None else critic(output.float())).square().mean()
                        if step == fail_at:
                            loss.register_hook(_explode)
                        loss.backward()
            except RuntimeError as error:
                if str(error) != "boom":
                    raise
                continue
            optimizer.step()
            optimizer.zero_grad(set_to_none=set_to_none)
            if validate:
                with torch.no_grad():
                    ddp(batch)
                ddp(batch)  # and once with a graph that nobody uses
    for handle in handles:
        handle.close()
    return [p.detach().clone() for p in ddp.parameters()]


def _explode(gradient: torch.Tensor) -> None:
    raise RuntimeError("boom")


def python_hook(ddp: DDP) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


def builtin_hook(ddp: DDP) -> None:
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


def powersgd(ddp: DDP) -> None:
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


CASES: dict[str, dict] = {
    "plain": {},
    "gradient_as_bucket_view": {"options": {"gradient_as_bucket_view": True}},
    "bucket view, gradients zeroed in place": {
        "options": {"gradient_as_bucket_view": True},
        "set_to_none": False,
    },
    "gradients zeroed in place": {"set_to_none": False},
    "no_sync": {"accumulate": 3},
    "no_sync, bucket view": {"accumulate": 3, "options": {"gradient_as_bucket_view": True}},
    "static_graph": {"options": {"static_graph": True}},
    "find_unused_parameters": {"build": Branchy, "options": {"find_unused_parameters": True}},
    "user hook after": {"prepare": python_hook},
    "builtin hook after": {"prepare": builtin_hook},
    # One bucket: with several in flight PowerSGD issues collectives from Gloo's worker threads in any order.
    "PowerSGD after": {"prepare": powersgd, "options": {"bucket_cap_mb": 25}},
    "exception in the backward": {"fail_at": 3},
    "two backwards a step": {"backwards": 2},
    "validation between steps": {"validate": True},
    "Join with uneven inputs": {"uneven": True},
    "activation checkpointing": {"build": Checkpointed, "options": {"static_graph": True}},
    "bf16 autocast": {"autocast": True},
    "two modules in turn": {"build": mlp, "second": True},
}


def freed(watched: bool) -> list[int]:
    """References to the process group before and after a model's life: a watched model must not keep it alive."""
    group = dist.group.WORLD
    before = sys.getrefcount(group)
    train(watched)
    gc.collect()
    return [before, sys.getrefcount(group)]


def copies(watched: bool) -> dict[str, bool]:
    """A watched model can be copied and pickled, and the copy is not watched."""
    ddp = DDP(mlp())
    handle = ddpwatch.watch(ddp) if watched else nullcontext()
    ddp(torch.randn(8, 64)).sum().backward()
    inner = copy.deepcopy(ddp.module)
    whole = pickle.dumps(ddp)
    if watched:
        handle.close()
    loaded = pickle.loads(whole)
    same = all(torch.equal(a, b) for a, b in zip(loaded.module.parameters(), inner.parameters(), strict=True))
    loaded(torch.randn(8, 64)).sum().backward()
    return {"same": same, "foreign": b"ddpwatch" in whole}


def on_one_rank_only() -> dict[str, bool]:
    """watch() on rank 0 alone: the ranks' reductions still fit together."""
    torch.manual_seed(7)
    ddp = DDP(mlp(), bucket_cap_mb=0.01)
    if dist.get_rank() == 0:
        ddpwatch.watch(ddp)
    data = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        ddp.zero_grad()
        ddp(torch.randn(8, 64, generator=data)).square().mean().backward()
    gradient = next(ddp.parameters()).grad
    sums = [torch.zeros_like(gradient) for _ in range(dist.get_world_size())]
    dist.all_gather(sums, gradient)
    return {"same": all(torch.equal(sums[0], other) for other in sums)}


def refusals() -> dict[str, str]:
    """What watch() says where it cannot attach, and what DDP still refuses."""
    said = {}
    for name, prepare in (("python", python_hook), ("builtin", builtin_hook)):
        ddp = DDP(mlp())
        prepare(ddp)
        try:
            ddpwatch.watch(ddp)
        except UsageError as error:
            said[name] = str(error)
    ddp = DDP(mlp())
    with ddpwatch.watch(ddp):
        python_hook(ddp)
        try:
            python_hook(ddp)
        except RuntimeError as error:
            said["second"] = str(error)
    return said


def main() -> None:
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    anchor = DDP(mlp())
    with ddpwatch.watch(anchor) as handle:  # keeps one session, and one collector, for all cases
        again = ddpwatch.watch(anchor)
        report = {"case": "second watch()", "same": again is handle}
        emit(report)
        for name, case in CASES.items():
            plain, watched = train(False, **case), train(True, **case)
            same = all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
            moved = not torch.equal(plain[0], mlp_start(case))
            emit({"case": name, "same": same, "trained": moved})
        emit({"case": "freed", "plain": freed(False), "watched": freed(True)})
        emit({"case": "copies", "plain": copies(False), "watched": copies(True)})
        emit({"case": "one rank only", **on_one_rank_only()})
        emit({"case": "refusals", **refusals()})
    dist.destroy_process_group()


def mlp_start(case: dict) -> torch.Tensor:
    torch.manual_seed(7)
    return next(case.get("build", mlp)().parameters()).detach()


def emit(line: dict) -> None:
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, line)
    if dist.get_rank() == 0:
        print("RESULT " + json.dumps(everyone), flush=True)


if __name__ == "__main__":
    sys.exit(main())
