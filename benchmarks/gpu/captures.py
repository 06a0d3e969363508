"""What CUDA calls on one thread do to a CUDA graph that another thread captures.

    python benchmarks/gpu/captures.py

Takes some seconds. ddpwatch's stamps, made by the training thread, have to leave a capture on any other thread alone.

The columns:
    call      on a thread beside the capture
    capture   the capture's mode: in "global", torch's default, it forbids some calls to all threads
    queries   as they are, or inside `cuda_calls.query_mode`, as those of ddpwatch
    graph     what became of the capture
    result    of the call
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext

import torch

from benchmarks.gpu.part import Row, run
from ddpwatch.probe.cuda import CudaEvent
from ddpwatch.probe.cuda_calls import cuda_clock, make_event, query_mode

NOT_SIMULATED = "what breaks a capture is the driver's choice"
Context = Callable[[], AbstractContextManager[None]]


def on_gpu() -> Iterable[Row]:
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    stream = torch.cuda.current_stream()
    first, second = make_event(), make_event()
    for event in (first, second):
        event.record(stream)
    torch.cuda.synchronize()
    calls: dict[str, Callable[[], object]] = {
        "event.query()": first.query,
        "event.elapsed_time()": lambda: first.elapsed_time(second),
        "event.record()": lambda: recorded(stream),
    }
    for mode in ("global", "thread_local", "relaxed"):
        for name, call in calls.items():
            for context in ("as they are", "query_mode") if mode == "global" else ("as they are",):
                graph, result = beside(call, mode, query_mode() if context == "query_mode" else nullcontext)
                yield {"call": name, "capture": mode, "queries": context, "graph": graph, "result": result}
    clock = cuda_clock(device)
    clock()
    graph, result = beside(lambda: int(clock()) > 0, "global", nullcontext)
    yield {"call": "a stamp", "capture": "global", "queries": "query_mode", "graph": graph, "result": result}


def recorded(stream: torch.cuda.Stream) -> CudaEvent:
    event = make_event()
    event.record(stream)
    return event


def beside(call: Callable[[], object], mode: str, context: Context) -> tuple[str, str]:
    """Calls on another thread while this one captures; what became of the capture, and of the call."""
    results: list[str] = []

    def other() -> None:
        try:
            with context():
                results.append(type(call()).__name__)
        except Exception as error:
            results.append(first_line(error))

    graph, data = torch.cuda.CUDAGraph(), torch.zeros(8, device="cuda")
    try:
        with torch.cuda.graph(graph, capture_error_mode=mode):
            data.add_(1)
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            data.add_(1)
        graph.replay()
        torch.cuda.synchronize()
    except Exception as error:
        torch.cuda.synchronize()
        return first_line(error), results[0]
    return "fine", results[0]


def first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:100]


if __name__ == "__main__":
    sys.exit(run("captures", __doc__, on_gpu, NOT_SIMULATED))
