"""Measures what a recording costs: bytes per step, time per frame, and to open it, to seek, and to report on it.

    python benchmarks/recording.py [MIB ...]     sizes of the files to open, default 100 and 1100

Takes about four minutes and 1.1 GiB in the temporary directory. Budget: at most 600 bytes per step of 60 events, at
most 1 s to open a recording of any size, at least 20,000 rank-steps of report per second.

A step has 60 events: 50 hook fires and 5 buckets' launch and done, with jitter as real stamps have. A chunk ends every
tenth step, as in a recording of 20 steps a second.

The first table has one row per figure, with its budget; a rank-step is one rank's step. The others show how long it
takes to open a file of each size and to find something in it, also where its end is missing.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ddpwatch.analysis.kept_steps import KEPT
from ddpwatch.analysis.window import Summary, summarise
from ddpwatch.common.text import size, table
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.report.build import report_of
from ddpwatch.tui.models.devices import HISTORY_S
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Hello, Message, Span, Step, encode
from ddpwatch.wire.transport import Envelope
from tests.support.rounds import Rounds, rounds_done

MS = 1_000_000
START_NS = 1_700_000_000 * 10**9
HOOKS, BUCKETS, STEPS_PER_CHUNK = 50, 5, 10
POOL = 500  # steps made beforehand, so that making them is not measured
SMALL = 20_000  # rank-steps in the first file
WORLDS = (2, 8, 64)  # ranks of the recordings that are reported on
FIGURES, LOOKUPS = 4 + len(WORLDS), 8  # rows of the tables
SIZES_MIB = (100, 1100)


def step_of(jitter: random.Random) -> Step:
    """One step of 100 ms; rank, number and start are filled in later."""

    def at(ms: float) -> int:
        return int(ms * MS) + jitter.randrange(MS // 2)

    return Step(
        rank=0, step=0, start_ns=0, duration_ns=at(100), own_ns=at(0.05),
        spans=[Span("forward", at(2), at(29)), Span("backward", at(30), at(84)), Span("sync", at(85), at(92)),
               Span("optimizer", at(93), at(99))],
        hook_param=list(range(HOOKS))[::-1], hook_ns=[at(31 + n) for n in range(HOOKS)],
        comm_module=[0] * BUCKETS, comm_label=list(range(BUCKETS)), comm_bytes=[25 << 20] * BUCKETS,
        comm_ready=[at(40 + 10 * n) for n in range(BUCKETS)],
        comm_launch=[at(41 + 10 * n) for n in range(BUCKETS)],
        comm_done=[at(50 + 10 * n) for n in range(BUCKETS)],
    )  # fmt: skip


class Source:
    """Steps without end, of the ranks in turn."""

    def __init__(self, world: int = 2) -> None:
        self._world = world
        jitter = random.Random(1)
        self._pool = [step_of(jitter) for _ in range(POOL)]
        self._order = jitter.choices(range(POOL), k=1 << 16)
        self.count = 0

    def next(self) -> tuple[Step, int]:
        """The next step, and when it was received."""
        number, rank = divmod(self.count, self._world)
        step = self._pool[self._order[self.count & 0xFFFF]]
        step.rank, step.step, step.start_ns = rank, number, number * 100 * MS
        self.count += 1
        return step, START_NS + number * 100 * MS + rank


def write(path: Path, stop: Callable[[int, int], bool], world: int = 2) -> int:
    """Writes until ``stop(rank_steps, nbytes)``; the number of rank-steps."""
    source, writer, nbytes = Source(world), RecordingWriter(path), 0
    for rank in range(world):
        hello = Hello(run_id="bench", rank=rank, world_size=world, host="h", pid=1, boot_id="b")
        writer.write_message(hello, Envelope(1, START_NS, encode(hello)))
    while not stop(source.count, nbytes):
        step, received_ns = source.next()
        writer.write(Envelope(source.count, received_ns, encode(step)), "step", step.step)
        if source.count % (world * STEPS_PER_CHUNK) == 0:
            nbytes = writer.flush()
    writer.close()
    return source.count


def seconds(work: Callable[[], object]) -> float:
    """How long the work takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def figures(folder: Path) -> Iterator[list[str]]:
    """The rows of the first table: bytes and time per rank-step."""
    file = folder / "small.mcap"
    source, frames = Source(), list[bytes]()
    writing = seconds(lambda: write(file, lambda rank_steps, _: rank_steps >= SMALL))
    encoding = seconds(lambda: frames.extend(encode(source.next()[0]) for _ in range(SMALL)))
    yield ["recording, bytes per rank-step", f"{file.stat().st_size / SMALL:.0f}", "≤ 600"]
    yield ["the same as msgpack frames", f"{sum(map(len, frames)) / SMALL:.0f}", ""]
    yield ["writing a frame, µs (compression included)", f"{1e6 * (writing - encoding) / SMALL:.1f}", ""]
    for world in WORLDS:
        of_world = folder / f"{world}-ranks.mcap"
        count = write(of_world, lambda rank_steps, _: rank_steps >= SMALL, world)
        started, used = time.perf_counter(), time.process_time()
        report_of(of_world)
        rate, of_cpu = (count / spent for spent in (time.perf_counter() - started, time.process_time() - used))
        yield [f"report of {world} ranks, rank-steps/s (per second of CPU)", f"{rate:,.0f} ({of_cpu:,.0f})", "≥ 20,000"]
    cut_off = _without_end(file)
    yield ["opening it without its end, ms", f"{1000 * seconds(lambda: Recording(cut_off).steps):.1f}", "≤ 1000"]


def _without_end(file: Path) -> Path:
    data = file.read_bytes()
    cut_off = file.with_name("cut-off.mcap")
    cut_off.write_bytes(data[: len(data) * 2 // 3])
    return cut_off


def lookups(file: Path, mib: int, rounds: Rounds) -> Iterator[list[str]]:
    """The rows of a further table: a file of that size, as it is and without its end."""
    count = write(file, lambda _, nbytes: nbytes >= mib << 20 or rounds.stop_requested)
    middle = count // 4
    middle_ns = START_NS + middle * 100 * MS
    work: dict[str, Callable[[], object]] = {
        "open, first and last step": lambda: Recording(file).steps,
        "open and read one step in the middle": lambda: _steps(file, Selection(middle, middle + 1)),
        "open and seek to the middle, first frame": lambda: _first_step_at(file, middle_ns),
        "go there in a replay, figures included": lambda: _state_at(file, middle_ns),
    }
    name = f"{size(file.stat().st_size)}, {count:,} rank-steps"
    if rounds.stop_requested:
        return
    for what, call in work.items():
        yield [name, what, f"{1000 * seconds(call):.0f} ms"]
    os.truncate(file, file.stat().st_size * 9 // 10)
    for what, call in work.items():
        yield [f"{name}, end cut off", what, f"{1000 * seconds(call):.0f} ms"]


def _steps(file: Path, selection: Selection) -> list[Message]:
    found: list[Message] = [message for message, _ in Recording(file).select(selection) if isinstance(message, Step)]
    if not found:
        raise AssertionError("the step was not found")
    return found


def _first_step_at(file: Path, at_ns: int) -> Message:
    return next(message for message, _ in Recording(file).seek(at_ns) if isinstance(message, Step))


def _state_at(file: Path, at_ns: int) -> Summary:
    """What the dashboard does when a replay seeks."""
    recording, state = Recording(file), RunState()
    for message, envelope in recording.select(recording.lead_in(at_ns, KEPT.of(recording.world_size), HISTORY_S)):
        if envelope.received_ns > at_ns:
            break
        state.apply_message(message, envelope.received_ns)
    return summarise(state.recent())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sizes", type=int, nargs="*", default=SIZES_MIB, metavar="MIB", help="sizes of files to open")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name, Rounds() as rounds:
        folder = Path(name)
        show(["what", "measured", "budget"], list(rounds.over(figures(folder), "figures", FIGURES)), FIGURES)
        for mib in args.sizes:
            rows = lookups(folder / f"{mib}.mcap", mib, rounds)
            show(["file", "what", "time"], list(rounds.over(rows, f"{mib} MiB", LOOKUPS)), LOOKUPS)


def show(header: list[str], rows: list[list[str]], planned: int) -> None:
    """Prints a table of the rows that were measured."""
    if rows:
        print("\n".join(table(header, rows)))
    print(rounds_done(len(rows), planned, "row"), end="\n\n", flush=True)


if __name__ == "__main__":
    main()
