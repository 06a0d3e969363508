"""Many small trainings, one after the other, each with another feature of DDP. Knows nothing of ddpwatch.

Prints a digest of all parameters after every step, and tracebacks of what was raised. ``safety.py DIRECTORY
[--quick]`` leaves there when each case began and ended, so that a recording can be divided among them.
"""

# No `from __future__ import annotations` here: DDP compares a comm hook's annotations with the types themselves.

import copy
import faulthandler
import gc
import hashlib
import io
import json
import pickle
import re
import sys
import time
import traceback
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

if __name__ == "__main__":  # slow to import, and not for a DataLoader's worker that spawn starts
    from torch._dynamo.utils import counters
    from torch.distributed.algorithms.ddp_comm_hooks import (
        ddp_zero_hook,
        debugging_hooks,
        default_hooks,
        optimizer_overlap_hooks,
        powerSGD_hook,
    )
    from torch.distributed.optim import ZeroRedundancyOptimizer, _apply_optimizer_in_backward, as_functional_optim

STEPS = 6


@dataclass
class Case:
    """One training. Its function's docstring is its line in the documentation."""

    run: Callable[[], None]
    slow: bool = False
    reduces: bool = True  # whether torch gets as far as a reduction here


CASES: dict[str, Case] = {}


def case(name: str, **properties: bool) -> Callable[[Callable[[], None]], Callable[[], None]]:
    def add(function: Callable[[], None]) -> Callable[[], None]:
        CASES[name] = Case(function, **properties)
        return function

    return add


# -- models and the plain loop ---------------------------------------------------------------------------------


def mlp() -> nn.Sequential:
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(64, 64), nn.Tanh())], nn.Linear(64, 4))


class Branchy(nn.Module):
    """Leaves one branch out every other step: its parameters get no gradient. Returns a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 4)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        self.calls += 1
        x = self.first(x)
        return {"logits": self.head(x if self.calls % 2 else self.second(x))}


class Checkpointed(nn.Module):
    """Recomputes its middle in the backward."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.middle, self.head, self.reentrant = nn.Linear(64, 64), mlp(), nn.Linear(4, 4), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant))


def wrap(module: nn.Module | None = None, **options: object) -> DDP:
    """A DDP module with many small buckets."""
    return DDP(mlp() if module is None else module, **{"bucket_cap_mb": 0.01, **options})


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


class Batches:
    """Random batches, other ones on each rank."""

    def __init__(self) -> None:
        self._generator = torch.Generator().manual_seed(dist.get_rank())

    def __call__(self, width: int = 64) -> torch.Tensor:
        return torch.randn(8, width, generator=self._generator)


def loss_of(output: torch.Tensor | dict[str, torch.Tensor]) -> torch.Tensor:
    return (output["logits"] if isinstance(output, dict) else output).float().square().mean()


def tell(*models: nn.Module) -> None:
    """Prints one digest of all parameters, buffers and gradients."""
    sha = hashlib.sha256()
    for model in models:
        for tensor in [*model.parameters(), *model.buffers()]:
            for part in (tensor, tensor.grad):
                part = part.to_local() if hasattr(part, "to_local") else part  # of FSDP2: this rank's shard
                sha.update(b"none" if part is None else part.detach().reshape(-1).view(torch.uint8).numpy().tobytes())
    print("parameters", sha.hexdigest()[:16], flush=True)


def caught(error: Exception) -> None:
    """Prints what was raised, with its traceback."""
    print(f"caught {error}\n{traceback.format_exc()}", flush=True)


def train(
    ddp: DDP,
    steps: int = STEPS,
    optimizer: torch.optim.Optimizer | None = None,
    context: Callable[[], AbstractContextManager[object]] = nullcontext,
    set_to_none: bool = True,
    own: bool = True,
    call: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> None:
    """The plain loop: forward (by ``call``, in ``context``), backward, step. ``own=False``: the backward steps."""
    batches, optimizer = Batches(), optimizer or sgd(ddp)
    call = ddp if call is None else call  # a compiled DDP module has no truth value
    for _ in range(steps):
        with context():
            loss = loss_of(call(batches()))
        loss.backward()
        if own:
            optimizer.step()
        tell(ddp)
        optimizer.zero_grad(set_to_none=set_to_none)


# -- optimizers inside the backward: first, as it only ends a step while no optimizer has ever stepped by itself -------


@case("optimizer in the comm hook")
def fused_optimizer() -> None:
    """`_register_fused_optim`, that is `_hook_then_optimizer`"""
    ddp = wrap()
    ddp._register_fused_optim(torch.optim.SGD, 0.05)
    train(ddp, own=False)


@case("optimizer in the comm hook, own hook")
def hook_then_optimizer() -> None:
    """`_hook_then_optimizer` around `fp16_compress_hook`"""
    ddp = wrap()
    state = optimizer_overlap_hooks._OptimizerHookState(as_functional_optim(torch.optim.SGD, 0.05))
    hook = optimizer_overlap_hooks._hook_then_optimizer(default_hooks.fp16_compress_hook, state)
    ddp.register_comm_hook(None, hook)
    train(ddp, own=False)


# -- compiled optimizers: before others for the same reason ----------------------------------------------------------


class OwnOptimizer(torch.optim.Optimizer):
    """Follows the gradient, in one graph: torch's own optimizers break theirs."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.05})

    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-group["lr"])


def compiled_step(optimizer_of: Callable[[DDP], torch.optim.Optimizer], **options: bool) -> None:
    """The plain loop with a step that calls a compiled optimizer's, and how it was compiled."""
    torch._dynamo.reset()
    counters.clear()
    ddp = wrap()
    optimizer = optimizer_of(ddp)
    optimizer.step = torch.compile(optimizer.step, backend="eager", **options)
    train(ddp, optimizer=optimizer)
    print("graphs", counters["stats"]["unique_graphs"], "calls", counters["stats"]["calls_captured"])


@case("torch.compile(optimizer.step), own", slow=True)
def compiled_own_optimizer() -> None:
    """one of the job's own, which is one graph; also with `fullgraph=True`"""
    for fullgraph in (False, True):
        compiled_step(lambda ddp: OwnOptimizer(ddp.parameters()), fullgraph=fullgraph)
        print("breaks", sum(counters["graph_break"].values()))


@case("torch.compile(optimizer.step), torch's", slow=True)
def compiled_optimizer() -> None:
    """as many graphs"""
    compiled_step(sgd)


# -- DDP's own options -----------------------------------------------------------------------------------------


@case("plain")
def plain() -> None:
    """forward, backward, optimizer step"""
    train(wrap())


@case("gradient_as_bucket_view")
def bucket_view() -> None:
    """gradients live in the buckets"""
    train(wrap(gradient_as_bucket_view=True))


@case("gradient_as_bucket_view, zeroed in place")
def bucket_view_in_place() -> None:
    """`zero_grad(set_to_none=False)` with gradients in the buckets"""
    train(wrap(gradient_as_bucket_view=True), set_to_none=False)


@case("gradients zeroed in place")
def in_place() -> None:
    """`zero_grad(set_to_none=False)`"""
    train(wrap(), set_to_none=False)


@case("static_graph")
def static_graph() -> None:
    """buckets are rebuilt one step later"""
    train(wrap(static_graph=True))


@case("find_unused_parameters")
def find_unused() -> None:
    """a branch is left out every other step"""
    train(wrap(Branchy(), find_unused_parameters=True))


@case("unused parameter error", reduces=False)
def unused_error() -> None:
    """the same without `find_unused_parameters`: DDP raises at the next forward"""
    train(wrap(Branchy()))


@case("buffers")
def buffers() -> None:
    """batch norm: DDP broadcasts its buffers in every forward"""
    train(wrap(nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 4))))


# -- no_sync and the shape of a step ---------------------------------------------------------------------------


def accumulate(
    forward: bool = True,
    backward: bool = True,
    silent: Callable[[int, int], bool] = lambda step, micro: micro < 2,
    **options: object,
) -> None:
    """Three micro-batches a step; ``no_sync`` around the forward and the backward of those that are to be silent."""
    ddp, batches = wrap(**options), Batches()
    optimizer = sgd(ddp)
    for step in range(STEPS):
        for micro in range(3):
            with ddp.no_sync() if forward and silent(step, micro) else nullcontext():
                loss = loss_of(ddp(batches()))
            with ddp.no_sync() if backward and silent(step, micro) else nullcontext():
                loss.backward()
        optimizer.step()
        tell(ddp)
        optimizer.zero_grad()


@case("no_sync")
def no_sync() -> None:
    """around forward and backward of two micro-batches of three"""
    accumulate()


@case("no_sync, gradient_as_bucket_view")
def no_sync_bucket_view() -> None:
    """the same with gradients in the buckets"""
    accumulate(gradient_as_bucket_view=True)


@case("no_sync around the forward only")
def no_sync_forward() -> None:
    """the backward is outside"""
    accumulate(backward=False)


@case("no_sync around the backward only")
def no_sync_backward() -> None:
    """the forward is outside, so DDP reduces all the same"""
    accumulate(forward=False)


@case("no_sync in the first steps")
def no_sync_first() -> None:
    """the first reduction comes late"""
    accumulate(silent=lambda step, micro: step < 2)


@case("no_sync always", reduces=False)
def no_sync_always() -> None:
    """nothing is ever reduced"""
    accumulate(silent=lambda step, micro: True)


@case("several backwards a step")
def backwards() -> None:
    """each of them reduces"""
    accumulate(silent=lambda step, micro: False)


@case("two backwards through one forward")
def retained() -> None:
    """`retain_graph=True`"""
    ddp, batches = wrap(), Batches()
    optimizer = sgd(ddp)
    for _ in range(STEPS):
        output = ddp(batches())
        loss_of(output).backward(retain_graph=True)
        output.mean().backward()
        optimizer.step()
        tell(ddp)
        optimizer.zero_grad()


@case("forward without backward")
def validation() -> None:
    """between steps: once under `no_grad`, once with a graph that nobody uses"""
    ddp, batches = wrap(), Batches()
    optimizer = sgd(ddp)
    for _ in range(STEPS):
        loss_of(ddp(batches())).backward()
        optimizer.step()
        tell(ddp)
        optimizer.zero_grad()
        with torch.no_grad():
            print(f"validation {loss_of(ddp(batches())).item()}")
        ddp(batches())


@case("optimizer with a closure")
def closure() -> None:
    """forward and backward run inside `optimizer.step`"""
    ddp, batches = wrap(), Batches()
    optimizer = sgd(ddp)

    def forward_and_backward() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(ddp(batches()))
        loss.backward()
        return loss

    for _ in range(STEPS):
        optimizer.step(forward_and_backward)
        tell(ddp)


@case("Join")
def join() -> None:
    """uneven inputs: each rank has one batch more than the one before"""
    ddp = wrap()
    with Join([ddp]):
        train(ddp, steps=STEPS + dist.get_rank())


@case("two modules (GAN)")
def gan() -> None:
    """generator and discriminator with an optimizer each; one backward goes through both"""
    generator, critic, batches = wrap(), wrap(nn.Linear(4, 1)), Batches()
    for_generator, for_critic = sgd(generator), sgd(critic)
    for _ in range(STEPS):
        for_critic.zero_grad()
        (loss_of(critic(batches(4))) - loss_of(critic(generator(batches()).detach()))).backward()
        for_critic.step()
        for_generator.zero_grad()
        loss_of(critic(generator(batches()))).backward()
        for_generator.step()
        tell(generator, critic)


@case("activation checkpointing")
def checkpointing() -> None:
    """non-reentrant"""
    train(wrap(Checkpointed(reentrant=False)))


@case("activation checkpointing, static_graph")
def checkpointing_static() -> None:
    """non-reentrant"""
    train(wrap(Checkpointed(reentrant=False), static_graph=True))


@case("activation checkpointing, reentrant")
def checkpointing_reentrant() -> None:
    """a backward inside the backward"""
    train(wrap(Checkpointed(reentrant=True)))


@case("bf16 autocast")
def autocast() -> None:
    """the forward runs in bfloat16"""
    train(wrap(), context=lambda: torch.autocast("cpu", torch.bfloat16))


@case("GradScaler")
def scaler() -> None:
    """with one overflow: that step is skipped"""
    ddp, batches, grad_scaler = wrap(), Batches(), torch.amp.GradScaler("cpu")
    optimizer = sgd(ddp)
    for step in range(STEPS):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(ddp(batches())) * (float("inf") if step == 2 else 1.0)
        grad_scaler.scale(loss).backward()
        grad_scaler.step(optimizer)
        grad_scaler.update()
        print(f"scale {grad_scaler.get_scale()}")
        tell(ddp)
        optimizer.zero_grad()


# -- comm hooks of the user's own ------------------------------------------------------------------------------


@case("comm hook: Python")
def python_hook() -> None:
    """`fp16_compress_hook`; a second registration raises DDP's error"""
    ddp = wrap()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    train(ddp)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)


@case("comm hook: bf16")
def bf16_hook() -> None:
    """`bf16_compress_hook`, under another name: under its own, DDP refuses it where torch is built without CUDA"""

    def bf16(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        return default_hooks.bf16_compress_hook(state, bucket)

    ddp = wrap()
    ddp.register_comm_hook(None, bf16)
    train(ddp)


@case("comm hook: own")
def own_hook() -> None:
    """a method that weighs the ranks, and all-reduces in `then`'s chain"""

    class Weighted:
        def hook(self, state: torch.Tensor, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            weighted = bucket.buffer() * state
            future = dist.all_reduce(weighted, async_op=True).get_future()
            return future.then(lambda done: done.value()[0] / 2).then(lambda done: done.value() * 3)

    ddp = wrap()
    ddp.register_comm_hook(torch.tensor(1.0 + RANK), Weighted().hook)
    train(ddp)


@case("comm hook: built in")
def builtin_hook() -> None:
    """the C++ fp16 hook; a second registration raises DDP's error"""
    ddp = wrap()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    train(ddp)
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)


@case("comm hook: built-in all-reduce")
def builtin_allreduce() -> None:
    """the C++ all-reduce hook"""
    ddp = wrap()
    ddp._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    train(ddp)


@case("comm hook: PowerSGD")
def power_sgd() -> None:
    """two plain steps, then compressed ones"""
    # One bucket: with several in flight PowerSGD issues collectives from Gloo's worker threads in any order.
    ddp = wrap(bucket_cap_mb=25)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=2)
    ddp.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    train(ddp)


@case("comm hook: does nothing")
def noop_hook() -> None:
    """`noop_hook`: every rank keeps its own gradients"""
    ddp = wrap()
    ddp.register_comm_hook(None, debugging_hooks.noop_hook)
    train(ddp)


@case("comm hook: raises", reduces=False)
def raising_hook() -> None:
    """an exception out of the hook reaches the script"""

    def hook(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        raise ValueError(f"bucket {bucket.index()} is not to my liking")

    ddp = wrap()
    ddp.register_comm_hook(None, hook)
    train(ddp)


@case("comm hook: bad signature", reduces=False)
def bad_hook() -> None:
    """DDP's own check of a hook's annotations"""

    def hook(state: object, bucket: int) -> int:
        return bucket

    wrap().register_comm_hook(None, hook)


@case("comm hook: ddp_zero", reduces=False)
def ddp_zero() -> None:
    """`hook_with_zero_step`"""
    ddp = wrap()
    optimizer = ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.05)
    ddp.register_comm_hook(None, ddp_zero_hook.hook_with_zero_step(default_hooks.allreduce_hook, ddp, optimizer))
    train(ddp, optimizer=optimizer)


@case("ZeroRedundancyOptimizer")
def zero_optimizer() -> None:
    """without a hook: parameters are broadcast in `step`"""
    ddp = wrap()
    train(ddp, optimizer=ZeroRedundancyOptimizer(ddp.parameters(), torch.optim.SGD, lr=0.05))


@case("optimizer in the backward", reduces=False)
def optimizer_in_backward() -> None:
    """`_apply_optimizer_in_backward`: DDP registers a comm hook in the first forward"""
    module = mlp()
    _apply_optimizer_in_backward(torch.optim.SGD, module.parameters(), {"lr": 0.05})
    train(wrap(module), own=False)


# -- torch.compile ---------------------------------------------------------------------------------------------


def compiled(backend: str, inner: bool) -> None:
    torch._dynamo.reset()
    module = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 4))
    ddp = wrap(torch.compile(module, backend=backend) if inner else module, bucket_cap_mb=1)
    train(ddp, call=ddp if inner else torch.compile(ddp, backend=backend))


@case("torch.compile(ddp), aot_eager")
def compiled_ddp() -> None:
    """DDP's graph is split at the buckets"""
    compiled("aot_eager", inner=False)


@case("DDP(torch.compile(module)), aot_eager", slow=True)
def compiled_module() -> None:
    """one graph; all gradients at its end"""
    compiled("aot_eager", inner=True)


@case("torch.compile(ddp), inductor", slow=True)
def inductor_ddp() -> None:
    """needs a C++ compiler"""
    compiled("inductor", inner=False)


@case("DDP(torch.compile(module)), inductor", slow=True)
def inductor_module() -> None:
    """needs a C++ compiler"""
    compiled("inductor", inner=True)


# -- what sees torch's functions -------------------------------------------------------------------------------


class SeenFunctions(TorchFunctionMode):
    """Counts the functions that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[str(function)] += 1
        return function(*args, **kwargs or {})


class OwnTensor(torch.Tensor):
    """Counts the functions that it is given to."""

    calls: ClassVar[Counter[str]] = Counter()

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls[str(function)] += 1
        return super().__torch_function__(function, types, args, kwargs or {})


def tell_calls(calls: Counter[str]) -> None:
    print(*[re.sub(" at 0x[0-9a-f]+", "", f"called {name} {count}") for name, count in sorted(calls.items())], sep="\n")


@case("TorchFunctionMode")
def function_mode() -> None:
    """around all, also a comm hook; it sees the job's calls and no other"""
    for hook in (None, default_hooks.fp16_compress_hook):
        with SeenFunctions() as mode:
            ddp = wrap(Branchy(), find_unused_parameters=True)
            if hook is not None:
                ddp.register_comm_hook(None, hook)
            train(ddp)
        tell_calls(mode.calls)


@case("subclass of tensors")
def own_tensors() -> None:
    """batches of a class with a `__torch_function__`, which sees the job's calls and no other"""
    ddp, OwnTensor.calls = wrap(), Counter()
    train(ddp, call=lambda batch: ddp(batch.as_subclass(OwnTensor)))
    tell_calls(OwnTensor.calls)


# -- exceptions, and the lives of models -----------------------------------------------------------------------


def explode(gradient: torch.Tensor) -> None:
    raise RuntimeError("boom")


@case("exception before the first gradient")
def early_exception() -> None:
    """a backward fails at once; the same model trains on"""
    ddp, batches = wrap(), Batches()
    optimizer = sgd(ddp)
    for step in range(STEPS):
        loss = loss_of(ddp(batches()))
        if step == 3:
            loss.register_hook(explode)
        try:
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            caught(error)
        tell(ddp)
        optimizer.zero_grad()


@case("exception in mid-backward")
def late_exception() -> None:
    """some buckets are in flight; DDP raises at the next forward; the module wrapped again trains on"""
    ddp, batches = wrap(), Batches()
    optimizer = sgd(ddp)
    for step in range(2 * STEPS):
        try:
            loss = loss_of(ddp(batches()))
            if step == 3:
                handle = ddp.module[2].weight.register_hook(explode)
            loss.backward()
            optimizer.step()
        except RuntimeError as error:
            caught(error)
            handle.remove()
            if "boom" not in str(error):
                ddp = wrap(ddp.module)
                optimizer = sgd(ddp)
        tell(ddp)
        optimizer.zero_grad()


@case("exception in the forward")
def forward_exception() -> None:
    """a batch of the wrong width; the same model trains on"""
    ddp, batches = wrap(), Batches()
    optimizer = sgd(ddp)
    for step in range(STEPS):
        try:
            loss_of(ddp(batches(63 if step == 2 else 64))).backward()
            optimizer.step()
        except RuntimeError as error:
            caught(error)
        tell(ddp)
        optimizer.zero_grad()


def attempt(what: Callable[[], object]) -> None:
    try:
        what()
    except Exception as error:
        caught(error)
    gc.collect()  # or a DataLoader that has raised ends its workers in those of the next


def refuse(batch: object) -> None:
    raise ValueError("a batch is not to my liking")


class Liar(IterableDataset):
    """Yields more than its length; and if it is asked to, raises."""

    def __init__(self, raises: bool = False) -> None:
        self.raises = raises

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[torch.Tensor]:
        if self.raises:
            raise ValueError("nothing is here")
        yield from torch.ones(2, 64)


@case("exceptions in what is called once")
def exceptions() -> None:
    """by DDP's constructor, a second comm hook, a dataset, a collate function, `torch.save`: with their tracebacks"""
    attempt(lambda: wrap(nn.Tanh()))
    for workers in (0, 2):
        attempt(lambda: list(DataLoader(Liar(raises=True), num_workers=workers)))  # noqa: B023 - called at once
        attempt(lambda: list(DataLoader(Liar(), collate_fn=refuse, num_workers=workers)))  # noqa: B023
    attempt(lambda: torch.save(lambda: None, io.BytesIO()))
    ddp = wrap()
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    attempt(lambda: ddp.register_comm_hook(None, default_hooks.fp16_compress_hook))
    train(ddp)


@case("warnings")
def warned() -> None:
    """of DDP's constructor, and of a DataLoader: they name the script's line, and filters by module find them"""
    with warnings.catch_warnings(record=True) as warnings_of_torch:
        warnings.simplefilter("always")
        ddp = DDP(mlp(), bucket_cap_mb=0.01, check_reduction=True)
        for _ in DataLoader(Liar()):
            pass
    for one in warnings_of_torch:
        print(f"warned {Path(one.filename).name}:{one.lineno} {one.category.__name__}")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore")
        warnings.filterwarnings("error", category=FutureWarning, module=__name__)
        attempt(lambda: DDP(mlp(), check_reduction=True))
    train(ddp)


@case("models wrapped again and deleted")
def rewrapped() -> None:
    """a module is wrapped three times; each wrapper is freed when the script lets go of it"""
    module, group = mlp(), dist.group.WORLD
    gc.collect()
    held = sys.getrefcount(group)
    for _ in range(3):
        ddp = DDP(module, bucket_cap_mb=0.01)
        gone = weakref.ref(ddp)
        train(ddp, steps=2)
        del ddp
        gc.collect()
        print(f"freed {gone() is None}, references to the group {sys.getrefcount(group) - held}")


@case("pickle and deepcopy")
def copies() -> None:
    """copies of a model in training train on by themselves"""
    ddp = wrap()
    train(ddp, steps=2)
    for other in (copy.deepcopy(ddp), pickle.loads(pickle.dumps(ddp)), wrap(copy.deepcopy(ddp.module))):
        train(other, steps=2)
    train(ddp, steps=2)


# -- processes -------------------------------------------------------------------------------------------------


def with_workers(context: str, workers: int = 1) -> None:
    ddp, data = wrap(), TensorDataset(Batches()().repeat(STEPS, 1))
    optimizer = sgd(ddp)
    started = context if workers else None
    for (batch,) in DataLoader(data, batch_size=8, num_workers=workers, multiprocessing_context=started):
        loss_of(ddp(batch)).backward()
        optimizer.step()
        tell(ddp)
        optimizer.zero_grad()


@case("DataLoader workers by fork")
def forked() -> None:
    """a child with all our memory"""
    with_workers("fork")


@case("DataLoader workers by spawn", slow=True)
def spawned() -> None:
    """rank 0 has a child that imports everything again"""
    with_workers("spawn", workers=int(dist.get_rank() == 0))


@case("process group destroyed and made again")
def new_group() -> None:
    """before and after it a model trains"""
    train(wrap(), steps=3)
    dist.barrier()
    dist.destroy_process_group()
    join_group(f"file://{sys.argv[1]}/store")
    train(wrap())


# -- FSDP2: last, as its steps are full or unwatched ----------------------------------------------------------


@case("FSDP2")
def fully_sharded() -> None:
    """`fully_shard` on each layer and on the model; found by itself in the first forward"""
    from torch.distributed.fsdp import fully_shard

    module = mlp()
    for layer in module:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    train(fully_shard(module))


# -- all of them -----------------------------------------------------------------------------------------------


def join_group(address: str = "env://") -> None:
    world = {} if address == "env://" else {"rank": RANK, "world_size": WORLD}
    dist.init_process_group("gloo", address, timeout=timedelta(seconds=60), **world)


def main() -> None:
    directory, quick = Path(sys.argv[1]), "--quick" in sys.argv
    if not quick:
        from torch._inductor import compile_fx  # noqa: F401 - here, so that its warnings belong to no case
    times = {}
    for name, one in CASES.items():
        if quick and one.slow:
            continue
        for stream in (sys.stdout, sys.stderr):
            print(f"== {name}", file=stream, flush=True)
        faulthandler.dump_traceback_later(200)  # a hang says where it hangs; a compiler without a cache takes long
        torch.manual_seed(7)
        begin = time.monotonic_ns()
        try:
            one.run()
        except Exception as error:
            print(f"raised {type(error).__name__}: {error}\n{traceback.format_exc()}", flush=True)
        times[name] = [begin, time.monotonic_ns()]
        dist.barrier()
    for stream in (sys.stdout, sys.stderr):
        print("== the end", file=stream, flush=True)
    faulthandler.cancel_dump_traceback_later()
    (directory / f"times.{RANK}.json").write_text(json.dumps(times))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    join_group()
    RANK, WORLD = dist.get_rank(), dist.get_world_size()
    main()
