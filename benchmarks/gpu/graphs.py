"""CUDA graphs and torch.compile under a watched DDP module, with NCCL in a world of one.

    python benchmarks/gpu/graphs.py

Takes half a minute, most of it for the compiler. Every case runs unwatched, watched, and unwatched again, each time
from the same seeds; one that breaks what comes after it, in a process of its own.

The columns:
    case         what is captured or compiled
    equal        whether the parameters are bit-identical with and without a probe
    repeatable   whether those of both unwatched jobs are; if not, `equal` says nothing
    ok           steps with times; a replayed graph runs no hook, and has none
    unresolved   steps without times, such as one that is captured
    captures     of another thread: those that went well, and those that broke; after the slash, unwatched
    error        of the probe, or of the job
"""

from __future__ import annotations

import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.gpu.job import Watched, graphed, nccl_alone
from benchmarks.gpu.part import Row, run

WIDTH, BATCH = 512, 64
NOT_SIMULATED = "CUDA graphs need a GPU"


class Case:
    """A job, watched or not.

    Args:
        watch: Whether it is.
        wrap: What becomes of the model before DDP gets it.

    Attributes:
        captures: Of another thread, by how they went.
    """

    def __init__(self, watch: bool, wrap: Callable[[nn.Module, torch.Tensor], Any] = lambda model, data: model) -> None:
        layers = [layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
        device = torch.device("cuda", 0)
        self.data = torch.randn(BATCH, WIDTH, device=device)
        model = wrap(nn.Sequential(*layers).to(device), self.data)
        self.job = Watched(DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=2), device, watch=watch)
        self.optimizer = torch.optim.SGD(self.job.ddp.parameters(), lr=1e-2)
        self.captures: Counter[str] = Counter()

    def step(self, model: Any = None, between: Callable[[], None] = lambda: None) -> None:
        """Trains a step; ``between`` forward and backward, something else happens."""
        loss = (model or self.job.ddp)(self.data).square().mean()
        between()
        loss.backward()
        self.job.update(self.optimizer)
        self.optimizer.zero_grad(set_to_none=False)


def whole_step(watch: bool) -> Case:
    """A whole step is captured and replayed, then steps go on without a graph."""
    side, current = torch.cuda.Stream(), torch.cuda.current_stream()
    with torch.cuda.stream(side):
        case = Case(watch)
    side.wait_stream(current)
    with torch.cuda.stream(side):
        for _ in range(11):  # DDP wants as many before a capture
            case.step()
    current.wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        case.step()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    for _ in range(5):
        case.step()
    return case


def graphed_module(watch: bool) -> Case:
    """The module inside DDP replays its forward and backward."""
    case = Case(watch, graphed)
    for _ in range(20):
        case.step()
    return case


def captured_between(watch: bool) -> Case:
    """The job captures a graph of its own between a forward and its backward."""
    case, extra = Case(watch), torch.zeros(8, device="cuda")

    def capture() -> None:
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            extra.add_(1)

    for step in range(12):
        case.step(between=capture if step == 6 else lambda: None)
    return case


def captured_beside(watch: bool, mode: str) -> Case:
    """Another thread captures graphs while this one trains; in mode "global", a query of any thread breaks that."""
    case, over = Case(watch), threading.Event()

    def capture() -> None:
        extra = torch.zeros(8, device="cuda")
        while not over.is_set():
            try:
                with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode=mode):
                    for _ in range(50):
                        extra.add_(1)
                case.captures["fine"] += 1
            except Exception:
                case.captures["broken"] += 1
            time.sleep(0.002)

    case.step()
    torch.cuda.synchronize()
    thread = threading.Thread(target=capture)
    thread.start()
    try:
        for _ in range(60):
            case.step()
    finally:
        over.set()
        thread.join()
    return case


def compiled(watch: bool, mode: str | None = None, inside: bool = True) -> Case:
    """The module inside DDP is compiled, or DDP itself."""
    torch._dynamo.reset()
    compiler = partial(torch.compile, mode=mode)
    case = Case(watch, (lambda model, data: compiler(model)) if inside else (lambda model, data: model))
    trained = case.job.ddp if inside else compiler(case.job.ddp)
    for _ in range(25):
        if mode == "reduce-overhead":
            torch.compiler.cudagraph_mark_step_begin()
        case.step(trained)
    return case


CASES: dict[str, Callable[[bool], Case]] = {
    "whole step captured": whole_step,
    "graphed module": graphed_module,
    "a capture between": captured_between,
    "captures on another thread, thread_local": partial(captured_beside, mode="thread_local"),
    "captures on another thread, global": partial(captured_beside, mode="global"),
    "module compiled": compiled,
    "module compiled, reduce-overhead": partial(compiled, mode="reduce-overhead"),
    "DDP compiled": partial(compiled, inside=False),
}
POISONOUS = frozenset(
    {"captures on another thread, global"}
)  # a broken capture also breaks what the process does later


@dataclass
class Trained:
    """What became of a job: a digest of its parameters, or the error that ended it."""

    digest: str
    status: Counter[str] = field(default_factory=Counter)
    captures: str = ""
    error: str | None = None


def on_gpu() -> Iterator[Row]:
    enter_group()
    for name in CASES:
        yield row(name, trained_apart if name in POISONOUS else trained)
    dist.destroy_process_group()


def enter_group() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    nccl_alone(torch.device("cuda", 0))


def row(name: str, train: Callable[[str, bool], Trained]) -> Row:
    first, watched, again = (train(name, watch) for watch in (False, True, False))
    return {
        "case": name,
        "equal": first.digest == watched.digest,
        "repeatable": first.digest == again.digest,
        "ok": watched.status["ok"],
        "unresolved": watched.status["unresolved"],
        "captures": " / ".join(filter(None, (watched.captures, first.captures))) or None,
        "error": watched.error,
    }


def trained(name: str, watch: bool) -> Trained:
    """Runs a job. One that fails has to fail the same way unwatched."""
    torch.manual_seed(1)
    try:
        case = CASES[name](watch)
        digest = case.job.finish()
    except Exception as error:
        return Trained(said(error), error=said(error))
    status = Counter(str(record.status) for record in case.job.records)
    captures = ", ".join(f"{count} {how}" for how, count in case.captures.items())
    return Trained(digest, status, captures, next(map(said, case.job.errors), None))


def trained_apart(name: str, watch: bool) -> Trained:
    """Runs a job in a process of its own."""
    with ProcessPoolExecutor(1, get_context("spawn"), enter_group) as process:
        return process.submit(trained, name, watch).result()


def said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


if __name__ == "__main__":
    sys.exit(run("graphs", __doc__, on_gpu, NOT_SIMULATED))
