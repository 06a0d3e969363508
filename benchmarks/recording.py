"""What a recording costs: bytes per step, time per frame, and how long it takes to open, to seek and to report.

A step has 60 events: 50 gradient hooks and 5 buckets' launch and completion, with jitter as real stamps have. Chunks
are closed every tenth step, as the recorder does at 20 steps a second. Beside it the same steps as JSON lines, and as
torch.profiler's trace of a model with as many parameters.

    python benchmarks/recording.py [MiB ...]     sizes of the files to open, default 100 and 1100
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import msgspec

from ddpwatch.analysis.window import Summary, summarise
from ddpwatch.messages import Hello, Message, Span, Step, encode
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.report.build import report_of
from ddpwatch.report.format import size, table
from ddpwatch.state import KEEP_STEPS, RunState
from ddpwatch.transport import Envelope
from ddpwatch.tui.models.devices import HISTORY_S

MS = 1_000_000
BEGIN = 1_700_000_000 * 10**9
HOOKS, BUCKETS, PER_CHUNK, POOL = 50, 5, 10, 500
PROFILED_STEPS = 10


def step_of(dice: random.Random) -> Step:
    """One step of 100 ms; numbers are filled in later."""

    def at(ms: float) -> int:
        return int(ms * MS) + dice.randrange(MS // 2)

    return Step(
        rank=0, step=0, start_ns=0, duration_ns=at(100), own_ns=at(0.05),
        spans=[Span("forward", at(2), at(29)), Span("backward", at(30), at(84)), Span("sync", at(85), at(92)),
               Span("optimizer", at(93), at(99))],
        hook_param=list(range(HOOKS))[::-1], hook_ns=[at(31 + n) for n in range(HOOKS)],
        bucket_module=[0] * BUCKETS, bucket_index=list(range(BUCKETS)), bucket_bytes=[25 << 20] * BUCKETS,
        bucket_ready=[at(40 + 10 * n) for n in range(BUCKETS)],
        bucket_launch=[at(41 + 10 * n) for n in range(BUCKETS)],
        bucket_done=[at(50 + 10 * n) for n in range(BUCKETS)],
    )  # fmt: skip


class Source:
    """Steps without end, two ranks in turn."""

    def __init__(self) -> None:
        dice = random.Random(1)
        self._pool = [step_of(dice) for _ in range(POOL)]
        self._order = dice.choices(range(POOL), k=1 << 16)
        self.count = 0

    def next(self) -> tuple[Step, int]:
        """The next step and when it came in."""
        number, rank = divmod(self.count, 2)
        step = self._pool[self._order[self.count & 0xFFFF]]
        step.rank, step.step, step.start_ns = rank, number, number * 100 * MS
        self.count += 1
        return step, BEGIN + number * 100 * MS + rank


def write(path: Path, stop: Callable[[int, int], bool]) -> int:
    """Writes until ``stop(steps, bytes)``; returns the number of rank-steps."""
    source, writer, nbytes = Source(), RecordingWriter(path), 0
    for rank in (0, 1):
        hello = Hello(run_id="bench", rank=rank, world_size=2, host="h", pid=1, boot_id="b")
        writer.write_message(hello, Envelope(1, BEGIN, encode(hello)))
    while not stop(source.count, nbytes):
        step, received_ns = source.next()
        writer.write(Envelope(source.count, received_ns, encode(step)), "step", step.step)
        if source.count % (2 * PER_CHUNK) == 0:
            nbytes = writer.flush()
    writer.close()
    return source.count


def seconds(work: Callable[[], object]) -> float:
    """How long it takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def small(folder: Path) -> list[list[str]]:
    """Bytes and time per rank-step."""
    count = 20_000
    took = seconds(lambda: write(folder / "a.mcap", lambda steps, _: steps >= count))
    source, frames = Source(), list[bytes]()
    encoding = seconds(lambda: frames.extend(encode(source.next()[0]) for _ in range(count)))
    nbytes = (folder / "a.mcap").stat().st_size / count
    reporting = count / seconds(lambda: report_of(folder / "a.mcap"))
    cut = _without_end(folder)
    return [
        ["recording, bytes per rank-step", f"{nbytes:.0f}", "≤ 600"],
        ["the same as msgpack frames", f"{sum(map(len, frames)) / count:.0f}", ""],
        ["the same as JSON lines", f"{_json_bytes(count):.0f}", ""],
        ["torch.profiler's trace, per step", f"{_profiler_bytes(folder):.0f}", ""],
        ["writing a frame, µs (compression included)", f"{1e6 * (took - encoding) / count:.1f}", ""],
        ["report, rank-steps/s", f"{reporting:,.0f}", "≥ 20,000"],
        ["opening one without its end, ms", f"{1000 * seconds(lambda: Recording(cut).steps):.1f}", "≤ 1000"],
    ]


def _without_end(folder: Path) -> Path:
    data = (folder / "a.mcap").read_bytes()
    (folder / "cut.mcap").write_bytes(data[: len(data) * 2 // 3])
    return folder / "cut.mcap"


def _json_bytes(count: int) -> float:
    source = Source()
    return sum(len(msgspec.json.encode(source.next()[0])) + 1 for _ in range(count)) / count


def _profiler_bytes(folder: Path) -> float:
    """Bytes of a Chrome trace per step of a model with `HOOKS` parameters, in a process of its own."""
    code = f"""
import torch
from torch.profiler import ProfilerActivity, profile
model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range({HOOKS // 2})])
optimizer = torch.optim.SGD(model.parameters(), 0.01)
with profile(activities=[ProfilerActivity.CPU]) as profiler:
    for _ in range({PROFILED_STEPS}):
        optimizer.zero_grad(); model(torch.randn(32, 64)).sum().backward(); optimizer.step()
profiler.export_chrome_trace({str(folder / "trace.json")!r})
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    return (folder / "trace.json").stat().st_size / PROFILED_STEPS


def large(folder: Path, mib: int) -> list[list[str]]:
    """Opening and seeking in a file of that size; and without its end."""
    file = folder / "large.mcap"
    count = write(file, lambda _, nbytes: nbytes >= mib << 20)
    middle = count // 4
    rows: list[tuple[str, Callable[[], object]]] = [
        ("open, first and last step", lambda: Recording(file).steps),
        ("open and read one step in the middle", lambda: _steps(file, Selection(middle, middle + 1))),
        ("open and seek to a moment, first frame", lambda: _first_step_at(file, BEGIN + middle * 100 * MS)),
        ("go there in a replay, figures included", lambda: _state_at(file, BEGIN + middle * 100 * MS)),
    ]
    told = f"{size(file.stat().st_size)}, {count:,} rank-steps"
    cells = [[told, what, f"{1000 * seconds(work):.0f} ms"] for what, work in rows]
    os.truncate(file, file.stat().st_size * 9 // 10)
    cells += [[f"{told}, end cut off", what, f"{1000 * seconds(work):.0f} ms"] for what, work in rows]
    file.unlink()
    return cells


def _steps(file: Path, selection: Selection) -> list[Message]:
    found: list[Message] = [message for message, _ in Recording(file).select(selection) if isinstance(message, Step)]
    if not found:
        raise AssertionError("the step was not found")
    return found


def _first_step_at(file: Path, at_ns: int) -> Message:
    return next(message for message, _ in Recording(file).seek(at_ns) if isinstance(message, Step))


def _state_at(file: Path, at_ns: int) -> Summary:
    """What the dashboard does when a replay goes to a place."""
    recording, state = Recording(file), RunState()
    for message, envelope in recording.seek(recording.lead_in(at_ns, KEEP_STEPS, HISTORY_S)):
        if envelope.received_ns > at_ns:
            break
        state.apply(message, envelope.received_ns)
    return summarise(state.recent())


def main() -> None:
    """Prints two tables."""
    sizes = [int(argument) for argument in sys.argv[1:]] or [100, 1100]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print("\n".join(table(["what", "measured", "budget"], small(folder))), flush=True)
        for mib in sizes:
            print("\n".join(["", *table(["file", "what", "took"], large(folder, mib))]), flush=True)


if __name__ == "__main__":
    main()
