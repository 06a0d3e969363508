"""Jobs without DDP's or FSDP2's wrapper, and others that train in their own way: ``any_loop.py NAME [FOLDER]``.

Each is a small model trained as its users do it, and knows nothing of ddpwatch. Every rank prints a digest of its
losses and parameters. In FOLDER, it leaves ``RANK.json``: how many updates it made, and how many collectives torch's
own flight recorder had counted at each, by process group and operation (set ``TORCH_FR_BUFFER_SIZE``). ``SLOW=RANK``
makes one rank slow where such jobs are, for enough steps to name it.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, normalize
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

STEPS, WIDTH, ROWS = 20 if "SLOW" in os.environ else 12, 32, 8
JOBS: dict[str, Callable[[], None]] = {}
updates = 0
counts: list[dict[str, dict[str, int]]] = []  # of collectives, at each update
digest = hashlib.sha256()


def job(function: Callable[[], None]) -> Callable[[], None]:
    """Names what it trains."""
    JOBS[function.__name__] = function
    return function


def layers(count: int = 3, width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*(part for _ in range(count) for part in (nn.Linear(width, width), nn.Tanh())))


def batch(step: int, owner: int | None = None) -> Tensor:
    owner = dist.get_rank() if owner is None else owner
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + owner))


def be_slow() -> None:
    """Takes 20 ms longer on the rank that is to be slow."""
    if os.environ.get("SLOW") == os.environ.get("RANK"):
        time.sleep(0.02)


def trained(loss: Tensor | None, module: nn.Module | None = None) -> None:
    """Notes an update; at the end, the parameters."""
    global updates
    updates += module is None
    if len(sys.argv) > 2 and dist.is_initialized():
        counts.append(counted())
    if loss is not None:
        digest.update(repr(loss.item()).encode())
    for parameter in () if module is None else module.parameters():
        local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        digest.update(local.detach().float().numpy().tobytes())


def plainly(model: nn.Module, parameters: Any = None, steps: int = STEPS) -> None:
    """Trains as a tutorial does."""
    optimizer = torch.optim.AdamW(model.parameters() if parameters is None else parameters, lr=1e-3)
    for step in range(steps):
        loss = model(batch(step)).square().mean()
        be_slow()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


# -- wrappers ----------------------------------------------------------------------------------------------------------


@job
def fsdp1() -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    plainly(
        FullyShardedDataParallel(
            layers(), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), device_id=torch.device("cpu")
        )
    )


def deepspeed_of(stage: int) -> None:
    import deepspeed

    settings = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": stage, "reduce_bucket_size": 4096, "allgather_bucket_size": 4096},
        "zero_allow_untested_optimizer": True,
    }
    model = layers()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=settings)
    for step in range(STEPS):
        loss = engine(batch(step)).square().mean()
        be_slow()
        engine.backward(loss)
        engine.step()
        trained(loss)


@job
def deepspeed_zero1() -> None:
    deepspeed_of(1)


@job
def deepspeed_zero2() -> None:
    deepspeed_of(2)


@job
def deepspeed_zero3() -> None:
    deepspeed_of(3)


# -- meshes ------------------------------------------------------------------------------------------------------------


def parallel(model: nn.Sequential, mesh: Any) -> nn.Module:
    """Splits pairs of linear layers by column and by row."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    linear = [name for name, module in model.named_children() if isinstance(module, nn.Linear)]
    plan = {name: RowwiseParallel() if place % 2 else ColwiseParallel() for place, name in enumerate(linear)}
    return parallelize_module(model, mesh, plan)


@job
def fsdp2_and_tp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel(layers(4), mesh["tp"])
    plainly(fully_shard(model, mesh=mesh["dp"]))


@job
def ddp_and_tp() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallel(layers(4), mesh["tp"])
    _pre_dp_module_transform(model)
    plainly(DistributedDataParallel(model, process_group=mesh["dp"].get_group()))


def pipeline(group: Any, stages: int, stage: int, wrap: Callable[[nn.Module], nn.Module]) -> None:
    """1F1B: four micro-batches, several forwards before the first backward."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    part = wrap(layers(2))
    place = PipelineStage(part, stage, stages, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(place, n_microbatches=4, loss_fn=lambda output, target: (output - target).square().mean())
    optimizer = torch.optim.SGD(part.parameters(), lr=1e-2)
    for step in range(STEPS):
        first, last, losses = stage == 0, stage == stages - 1, list[Tensor]()
        be_slow()
        arguments = [batch(step, 0)] if first else []
        schedule.step(*arguments, **({"target": batch(step, 1), "losses": losses} if last else {}))
        optimizer.step()
        optimizer.zero_grad()
        trained(torch.stack(losses).mean() if losses else None)
    trained(None, part)


@job
def pipeline_1f1b() -> None:
    """Over all ranks, whose group the mesh takes."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))
    pipeline(mesh.get_group(), 2, dist.get_rank(), lambda part: part)


@job
def pipeline_1f1b_and_ddp() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    group = mesh["dp"].get_group()
    pipeline(
        mesh["pp"].get_group(),
        2,
        mesh["pp"].get_local_rank(),
        lambda part: DistributedDataParallel(part, process_group=group),
    )


@job
def own_dp_and_tp() -> None:
    """Columns and rows of two matrices by hand, and gradients averaged by hand, as in Megatron."""
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()

    class Summed(torch.autograd.Function):
        @staticmethod
        def forward(context: Any, part: Tensor) -> Tensor:
            whole = part.clone()
            dist.all_reduce(whole, group=tp)
            return whole

        @staticmethod
        def backward(context: Any, *gradients: Tensor) -> Any:
            return gradients[0]

    model = layers(2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        rows = batch(step, mesh["dp"].get_local_rank())
        for layer in (model[0], model[2]):
            rows = Summed.apply(layer(rows)).tanh()
        be_slow()
        loss = rows.square().mean()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=dp)
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


# -- own collectives ---------------------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Tokens go to the rank of their expert, and back; experts are trained by their rank alone."""

    def __init__(self, own_group: bool = False) -> None:
        super().__init__()
        self.before, self.expert, self.after = layers(1), layers(1), layers(1)
        group = dist.new_group() if own_group else dist.group.WORLD
        self.expert_parallel_group = group

    def forward(self, rows: Tensor) -> Tensor:
        from torch.distributed.nn.functional import all_to_all_single

        hidden = self.before(rows)
        sent = all_to_all_single(torch.empty_like(hidden), hidden, group=self.expert_parallel_group)
        worked = self.expert(sent)
        be_slow()
        return self.after(all_to_all_single(torch.empty_like(worked), worked, group=self.expert_parallel_group))


@job
def own_mixture_of_experts() -> None:
    """Without a wrapper; what all ranks share is averaged by hand."""
    model = Experts(own_group=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        for name, parameter in model.named_parameters():
            if not name.startswith("expert"):
                dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


@job
def mixture_of_experts() -> None:
    model = Experts()
    ignored = [name for name, _ in model.named_parameters() if name.startswith("expert")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = ddp(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


class Gathered(torch.autograd.Function):
    """All ranks' features; the gradient is this rank's part of the sum."""

    @staticmethod
    def forward(context: Any, features: Tensor) -> Tensor:
        whole = features.new_empty(dist.get_world_size() * len(features), features.shape[1])
        dist.all_gather_into_tensor(whole, features)
        return whole

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        gradient = gradients[0].contiguous()
        dist.all_reduce(gradient)
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


@job
def clip() -> None:
    class TwoTowers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.image, self.text = layers(2), layers(2)

        def forward(self, rows: Tensor) -> Tensor:
            be_slow()
            image, text = (Gathered.apply(normalize(tower(rows))) for tower in (self.image, self.text))
            return cross_entropy(image @ text.T * 10, torch.arange(len(image)))

    model = TwoTowers()
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = ddp(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


class ShardedAdam(torch.optim.Optimizer):
    """Reduce-scatters gradients, updates this rank's rows, and gathers the parameters."""

    def __init__(self, parameters: Any, overlap: bool = False) -> None:
        super().__init__(list(parameters), {"lr": 1e-3})
        self._works: dict[Tensor, tuple[Tensor, Any]] = {}
        for parameter in self.param_groups[0]["params"] if overlap else ():
            parameter.register_post_accumulate_grad_hook(self.reduce_scatter)

    def reduce_scatter(self, parameter: Tensor) -> None:
        assert parameter.grad is not None
        mine = torch.empty_like(parameter.grad[: len(parameter) // dist.get_world_size()])
        self._works[parameter] = mine, dist.reduce_scatter_tensor(mine, parameter.grad, async_op=True)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        parameters = [parameter for parameter in self.param_groups[0]["params"] if parameter.grad is not None]
        for parameter in parameters:
            if parameter not in self._works:
                self.reduce_scatter(parameter)
        gathered = []
        for parameter in parameters:
            mine, work = self._works.pop(parameter)
            work.wait()
            state = self.state[parameter]
            state.setdefault("mean", torch.zeros_like(mine)).lerp_(mine, 0.1)
            rows = parameter.chunk(dist.get_world_size())[dist.get_rank()].contiguous()
            rows.add_(state["mean"].sign(), alpha=-self.param_groups[0]["lr"])
            gathered.append(dist.all_gather_into_tensor(parameter, rows, async_op=True))
        for work in gathered:
            work.wait()


def with_own_optimizer(overlap: bool) -> None:
    model = layers()
    for parameter in model.parameters():
        dist.broadcast(parameter.detach(), 0)
    optimizer = ShardedAdam(model.parameters(), overlap)
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        be_slow()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


@job
def own_optimizer() -> None:
    with_own_optimizer(overlap=False)


@job
def own_optimizer_beside_the_backward() -> None:
    with_own_optimizer(overlap=True)


@job
def averages_by_hand() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        be_slow()
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            assert parameter.grad is not None
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


def now_and_then(every: int, outer: bool) -> None:
    """Local steps; every few, ranks meet: by their mean, or by an outer optimizer's step on what has changed."""
    model = layers()
    inner = torch.optim.SGD(model.parameters(), lr=1e-2)
    kept = [parameter.detach().clone().requires_grad_() for parameter in model.parameters()]
    meeting = torch.optim.SGD(kept, lr=0.7, momentum=0.9, nesterov=True)
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        be_slow()
        loss.backward()
        inner.step()
        inner.zero_grad()
        if not outer:
            trained(loss)
        if (step + 1) % every == 0:
            with torch.no_grad():
                for parameter, old in zip(model.parameters(), kept, strict=True):
                    mean = (old - parameter) if outer else parameter.clone()
                    dist.all_reduce(mean)
                    mean /= dist.get_world_size()
                    if outer:
                        old.grad = mean
                    else:
                        parameter.copy_(mean)
            if outer:
                meeting.step()
                with torch.no_grad():
                    for parameter, old in zip(model.parameters(), kept, strict=True):
                        parameter.copy_(old)
        if outer:
            trained(loss)
    trained(None, model)


@job
def local_sgd() -> None:
    now_and_then(4, outer=False)


@job
def diloco() -> None:
    now_and_then(5, outer=True)


# -- loops -------------------------------------------------------------------------------------------------------------


@job
def gan() -> None:
    maker, judge = DistributedDataParallel(layers(2)), DistributedDataParallel(layers(2))
    of_maker, of_judge = (torch.optim.Adam(model.parameters(), lr=1e-3) for model in (maker, judge))
    for step in range(STEPS):
        of_judge.zero_grad()
        loss = judge(batch(step)).square().mean() - judge(maker(batch(step)).detach()).square().mean()
        loss.backward()
        of_judge.step()
        of_maker.zero_grad()
        for parameter in judge.parameters():
            parameter.requires_grad_(False)
        judge(maker(batch(step))).square().mean().backward()
        for parameter in judge.parameters():
            parameter.requires_grad_(True)
        of_maker.step()
        trained(loss)
    trained(None, maker)


@job
def metrics_each_step() -> None:
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        be_slow()
        for name in range(4):  # as trainers gather losses, lengths, rewards
            every = [torch.empty(1) for _ in range(dist.get_world_size())]
            dist.all_gather(every, loss.detach().reshape(1) + name)
        trained(loss)
    trained(None, model)


@job
def reinforcement() -> None:
    """Generates for a while, then makes three updates of what was generated."""
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for round_ in range(5):
        rows = batch(round_)
        with torch.no_grad():
            for _ in range(10):
                rows = model.module(rows)
        be_slow()
        rewards = rows.mean()
        dist.all_reduce(rewards)
        for _ in range(3):
            loss = (model(rows) - rewards).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            trained(loss)
    trained(None, model)


@job
def accumulates_and_skips() -> None:
    """As many micro-batches as the step's number says; batches that are not finite are left out by all ranks."""
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        for micro in range(1 + step % 3):
            last = micro == step % 3
            with nullcontext() if last else model.no_sync():
                loss = model(batch(step)).square().mean()
                loss.backward()
        finite = torch.tensor(float(step % 7 != 6))
        dist.all_reduce(finite, op=dist.ReduceOp.MIN)
        if finite:
            optimizer.step()
            trained(loss)
        optimizer.zero_grad()
    trained(None, model)


@job
def fused_into_the_backward() -> None:
    model = DistributedDataParallel(layers())
    optimizers = {parameter: torch.optim.SGD([parameter], lr=1e-2) for parameter in model.parameters()}

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(update)
    for step in range(STEPS):
        loss = model(batch(step)).square().mean()
        be_slow()
        loss.backward()
        trained(loss)
    trained(None, model)


@job
def lbfgs() -> None:
    model = DistributedDataParallel(layers())
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    for step in range(STEPS):
        rows = batch(step)

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = model(rows).square().mean()  # noqa: B023
            loss.backward()
            return loss

        trained(optimizer.step(closure))
    trained(None, model)


@job
def micro_batches_that_all_reduce() -> None:
    """Without `no_sync`, and more of them than records are made for one step."""
    model = DistributedDataParallel(layers(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(4):
        for part in range(70):
            loss = model(batch(100 * step + part)).square().mean() / 70
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


@job
def update_inside_the_forward() -> None:
    """As Lightning's manual optimization does."""

    class Training(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers()
            self.optimizer = torch.optim.SGD(self.layers.parameters(), lr=1e-2)

        def forward(self, rows: Tensor) -> None:
            self.optimizer.zero_grad()
            loss = self.layers(rows).square().mean()
            model.reducer.prepare_for_backward([])
            loss.backward()
            self.optimizer.step()
            trained(loss)

    model = DistributedDataParallel(Training())
    model.require_backward_grad_sync = False
    for step in range(STEPS):
        model(batch(step))
    trained(None, model)


@job
def in_a_thread() -> None:
    """A DataLoader feeds it."""
    model = DistributedDataParallel(layers())
    rows = torch.cat([batch(step) for step in range(STEPS)])

    def train() -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        for part in DataLoader(rows, batch_size=ROWS):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = model(part).square().mean()
            loss.backward()
            optimizer.step()
            trained(loss)

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    trained(None, model)


@job
def a_method_in_place_of_the_forward() -> None:
    """As `train_step` is with OpenMMLab."""

    class Training(DistributedDataParallel):
        def train_step(self, rows: Tensor) -> Tensor:
            (given,), _ = self._pre_forward(rows)  # type: ignore[no-untyped-call]
            loss: Tensor = self._post_forward(self.module(given).square().mean())  # type: ignore[no-untyped-call]
            return loss

    model = Training(layers())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model.train_step(batch(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


@job
def alone() -> None:
    model = layers()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        loss = model(batch(step, 0)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        trained(loss)
    trained(None, model)


# -- the run -----------------------------------------------------------------------------------------------------------


def counted() -> dict[str, dict[str, int]]:
    """What torch's flight recorder has seen: collectives by process group and operation."""
    from torch._C._distributed_c10d import _dump_fr_trace

    found: dict[str, Counter[str]] = {}
    for entry in pickle.loads(_dump_fr_trace()).get("entries", ()):
        found.setdefault(":".join(entry["process_group"]), Counter())[entry["profiling_name"].partition(":")[2]] += 1
    return {group: dict(counts) for group, counts in found.items()}


def main(name: str, folder: Path | None = None) -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    if name != "alone":
        dist.init_process_group("gloo")
    JOBS[name]()
    print(f"rank {rank} {digest.hexdigest()[:16]}", flush=True)
    if folder is not None:
        (folder / f"{rank}.json").write_text(json.dumps({"updates": updates, "collectives": counts[:updates]}))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], *map(Path, sys.argv[2:3]))
