"""Loops without a wrapper, in which watching has done harm before: ``unharmed_loops.py NAME...``.

The job takes some steps, so that it is watched, and then does what each one's docstring says. It prints all that must
be as if nobody watched. It knows nothing of ddpwatch.
"""

from __future__ import annotations

import pickle
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

BACKWARD = torch.autograd.backward
CASES: dict[str, Callable[[torch.nn.Module, torch.optim.Optimizer], None]] = {}


def case(function: Callable[..., None]) -> Callable[..., None]:
    CASES[function.__name__] = function
    return function


# -- ends --------------------------------------------------------------------------------------------------------------


@case
def exits_with_a_handle(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The collective under way ends while the interpreter of one rank does."""
    if dist.get_rank() == 1:
        time.sleep(0.5)
    CASES["kept"] = dist.all_reduce(torch.ones(1000), async_op=True)  # type: ignore[assignment]


@case
def exits_without_its_peer(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The other rank never comes."""
    if dist.get_rank() == 0:
        CASES["kept"] = dist.all_reduce(torch.ones(1000), async_op=True)  # type: ignore[assignment]


@case
def destroys_with_a_handle(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The group ends first."""
    if dist.get_rank() == 1:
        time.sleep(0.5)
    CASES["kept"] = dist.all_reduce(torch.ones(1000), async_op=True)  # type: ignore[assignment]
    dist.destroy_process_group()


@case
def groups_come_and_go(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    values = torch.ones(8)
    for _ in range(100):
        group = dist.new_group()
        dist.all_reduce(values, async_op=True, group=group).wait()
        dist.all_reduce(values.fill_(1), group=group)
        dist.destroy_process_group(group)
    print(values.tolist())


@case
def threads_have_ended(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """They had groups of their own, which nobody destroys. A wrapped model takes the loop's place meanwhile."""
    groups = [dist.new_group() for _ in range(3)]
    threads = [threading.Thread(target=reduces_often, args=(group,)) for group in groups]
    for thread in threads:
        thread.start()
    steps(model, optimizer, 4)
    for thread in threads[:2]:
        thread.join()
    torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))


def reduces_often(group: dist.ProcessGroup) -> None:
    for _ in range(200):
        dist.all_reduce(torch.ones(4), group=group)


# -- what others look at -----------------------------------------------------------------------------------------------


@case
def compiles(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """With as many graphs, of as many operations; for the same reasons where it cannot."""
    from torch._dynamo.testing import CompileCounter

    class Plain(torch.optim.Optimizer):
        """Torch's own optimizers break their graphs themselves."""

        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: None = None) -> None:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                parameter.add_(parameter.grad, alpha=-0.1)

    def reduces(values: torch.Tensor) -> torch.Tensor:
        dist.all_reduce(doubled := values * 2)
        return doubled + 1

    def gathers(values: torch.Tensor) -> torch.Tensor:
        dist.all_gather_into_tensor(out := torch.empty(len(values) * dist.get_world_size()), values)
        return out * 2

    def gathers_a_list(values: torch.Tensor) -> torch.Tensor:
        dist.all_gather(parts := [torch.empty_like(values) for _ in range(dist.get_world_size())], values)
        return parts[0] * 2

    def scatters(values: torch.Tensor) -> torch.Tensor:
        dist.reduce_scatter_tensor(out := torch.empty(len(values) // dist.get_world_size()), values)
        return out

    def exchanges(values: torch.Tensor) -> torch.Tensor:
        dist.all_to_all_single(out := torch.empty_like(values), values)
        return out + 1

    def waits(values: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(doubled := values * 2, async_op=True)
        work.wait()
        return doubled + 1

    def goes_back(values: torch.Tensor) -> torch.Tensor:
        model(values).square().sum().backward()
        return values + 1

    def goes_back_by_function(values: torch.Tensor) -> torch.Tensor:
        torch.autograd.backward(model(values).square().sum())
        return values + 1

    plain = Plain(model.parameters())
    work = dist.all_reduce(torch.ones(4), async_op=True)

    def waits_for_another(values: torch.Tensor) -> torch.Tensor:
        work.wait()
        return values + 1

    for function in (
        reduces, gathers, gathers_a_list, scatters, exchanges, waits, waits_for_another, goes_back,
        goes_back_by_function,
    ):  # fmt: skip
        for whole in (True, False):
            counter = CompileCounter()
            outcome = tried(torch.compile(function, backend=counter, fullgraph=whole), torch.ones(4))
            print(function.__name__, whole, counter.frame_count, counter.op_count, outcome)
    torchs = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in (plain.step, torchs.step, lambda: plain.step(), lambda: torchs.step()):
        for whole in (True, False):
            for parameter in model.parameters():
                parameter.grad = torch.ones_like(parameter)
            counter = CompileCounter()
            outcome = tried(torch.compile(step, backend=counter, fullgraph=whole))
            print("step", whole, counter.frame_count, counter.op_count, outcome)


def tried(function: Callable[..., Any], *arguments: Any) -> str:
    torch._dynamo.reset()
    try:
        return str(function(*arguments))
    except Exception as error:
        return f"{type(error).__name__}: {error}".split("from user code")[0]


@case
def odd_optimizers(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Whose parameters are no leaves, or that have none."""

    class Differentiable(torch.optim.Optimizer):
        def __init__(self, values: torch.Tensor) -> None:
            super().__init__([values], {"differentiable": True})

        def step(self, closure: None = None) -> None:  # type: ignore[override]
            pass

    class Nameless(Differentiable):
        def __init__(self, values: torch.Tensor) -> None:
            super().__init__(values)
            self.param_groups = [{"names": ["a"]}]

    warnings.simplefilter("always")
    doubled = torch.ones(2, requires_grad=True) * 2
    for _ in range(3):
        Differentiable(doubled).step()
        Nameless(doubled).step()


@case
def others_know_backward(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """By what it is (torch.jit), by its name (pickle), and by who calls it (a warning)."""

    def goes_back(values: torch.Tensor) -> torch.Tensor:
        total = (values * values).sum()
        torch.autograd.backward([total])
        return total

    warnings.simplefilter("always")
    print(torch.jit.script(goes_back)(torch.ones(3, requires_grad=True)))
    print(pickle.loads(pickle.dumps(BACKWARD)) is torch.autograd.backward)
    torch.autograd.backward([model(torch.ones(2, 4)).sum()], grad_variables=[torch.tensor(1.0)])


@case
def sparse_gradients(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    embedding = torch.nn.Embedding(10, 3, sparse=True)
    plain = torch.optim.SGD(embedding.parameters(), lr=0.1)
    for step in range(4):
        embedding(torch.tensor([1, 2, 2 + step + dist.get_rank()])).sum().backward()
        dist.all_reduce(embedding.weight.grad)
        plain.step()
        plain.zero_grad()
    print(embedding.weight.sum().item().hex())


@case
def sees_each_function(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """A mode of the job's prints what is called, and so does a kind of tensor."""

    class Mode(TorchFunctionMode):
        def __torch_function__(self, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
            print("mode", getattr(function, "__qualname__", function))
            return function(*args, **(options or {}))

    class Kind(torch.Tensor):
        @classmethod
        def __torch_function__(cls, function: Any, kinds: Any, args: Any = (), options: Any = None) -> Any:
            print("kind", getattr(function, "__qualname__", function))
            return super().__torch_function__(function, kinds, args, options or {})

    with Mode():
        steps(model, optimizer, 2)
        dist.new_group()
        dist.all_reduce(torch.ones(4), async_op=True).wait()  # type: ignore[union-attr]
    dist.all_reduce(torch.ones(4).as_subclass(Kind))


@case
def raises_everywhere(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """In collectives and in backwards, and goes on."""
    for attempt in range(3):
        hidden = model(torch.ones(1, 4))
        hidden.register_hook(raises)
        for call in (
            lambda: dist.all_reduce("nothing"), lambda: dist.all_gather([], torch.ones(1)),  # type: ignore[arg-type]
            hidden.sum().backward,
        ):  # fmt: skip
            try:
                call()
            except Exception:
                *trace, error = traceback.format_exc().split('  File "')
                print(attempt, error, *(frame for frame in trace if "/ddpwatch/probe/calls.py" not in frame))
        steps(model, optimizer, 2)


def raises(gradient: torch.Tensor) -> None:
    raise ValueError("a gradient that nobody wants")


def steps(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> None:
    for step in range(count):
        model(torch.full((2, 4), dist.get_rank() + step + 1.0)).square().sum().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
    print([parameter.sum().item().hex() for parameter in model.parameters()])


def main(names: list[str]) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    early = [name for name in ("odd_optimizers", "sees_each_function") if name in names]  # where nothing is watched yet
    for name in early:
        CASES[name](model, optimizer)
    steps(model, optimizer, 4)
    for name in names:
        print("==", name)
        CASES[name](model, optimizer)


if __name__ == "__main__":
    main(sys.argv[1:])
