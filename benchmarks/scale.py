"""Measures what very many ranks cost the viewer and the commands that read a recording.

    python benchmarks/scale.py [--worlds 1024 4096 8192] [--rank-steps 262144] [--mixture attended]

Takes about a quarter of an hour. Every world gets the same number of rank-steps, so memory and time are bounded, and a
cost that grows faster than the ranks shows as more per rank-step. Each row is a process of its own; all figures are CPU
time, which other programs on the machine change less than the clock. Nodes of 8 ranks send packed steps
(`tests/support/made_up_nodes.py`); `many_agents.py --agents 128` (512, 1024) measures root, agents and link.

The columns, per rank-step:
    viewer µs       what a viewer takes to read frames and to apply them; in the next column to apply them alone
    picture µs      figures and incidents, asked for twice a second
    report, html, compare µs      the commands; compare reads the recording twice
    whatif µs       the same
    seek s          to the middle, as a replay goes there
MiB is the memory of the process, at most. What fails is a dash: `whatif` needs five full steps of all ranks.
"""

from __future__ import annotations

import argparse
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from ddpwatch.analysis.kept_steps import KEPT
from ddpwatch.analysis.window import Summariser
from ddpwatch.common.garbage import few_collections
from ddpwatch.common.text import UNKNOWN, table
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.tui.models.devices import HISTORY_S
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Message, NodeStep, Step, decode, encode
from ddpwatch.wire.node_step import pack
from ddpwatch.wire.transport import Envelope
from tests.support.made_up_nodes import (
    FIRST_STEP,
    MIXTURES,
    PER_NODE,
    SAMPLED_STEPS,
    STEP_NS,
    STEPS_PER_S,
    node_steps,
    others,
)
from tests.support.rounds import Rounds, rounds_done
from tests.support.synthetic import EPOCH_NS, START_NS, Fleet

JITTER_NS = 200_000  # by which ranks start a step apart
WARM_SHARE = 0.25  # of the steps, before the viewer's cost is measured
BATCH, LOOK_NS = 512, 5 * 10**8  # frames between two measurements; time between two looks at the figures
LIMIT_GIB = 12  # of a process's address space


def messages(world: int, steps: int, mixture: str) -> Iterator[tuple[Message, int]]:
    """Yields the run's messages, and when each was received."""
    cycle = [[encode(step) for step in ranks] for _, ranks in islice(node_steps(mixture), SAMPLED_STEPS)]
    jitter = random.Random(1)
    for message in Fleet(world).introduction():
        yield message, EPOCH_NS
    for number in range(steps):
        received_ns = EPOCH_NS + (number + 1) * STEP_NS
        for node in range(world // PER_NODE):
            if number % STEPS_PER_S == 0:
                for message in others(node, number // STEPS_PER_S):
                    yield message, received_ns
            yield node_step(cycle[number % SAMPLED_STEPS], node, number, jitter), received_ns


def node_step(frames: list[bytes], node: int, number: int, jitter: random.Random) -> NodeStep:
    """One step of a node's ranks: those of the cycle, at another time, and each rank with another one's."""
    start_ns, steps = START_NS + number * STEP_NS, []
    for place in range(PER_NODE):
        step = decode(frames[(place + node + number) % PER_NODE])
        assert isinstance(step, Step)
        seq = None if step.comm_first_seq is None else 25 * (FIRST_STEP + number)
        about = {"rank": node * PER_NODE + place, "step": FIRST_STEP + number, "comm_first_seq": seq}
        steps.append(msgspec.structs.replace(step, start_ns=start_ns + jitter.randrange(JITTER_NS), **about))
    return pack(node, steps, {max(steps, key=lambda step: step.start_ns).rank})


def record(path: Path, world: int, steps: int, mixture: str) -> None:
    """Writes the run to a file, a chunk per second."""
    writer, flushed_ns = RecordingWriter(path), 0
    for seq, (message, received_ns) in enumerate(messages(world, steps, mixture), start=1):
        writer.write_message(message, Envelope(seq, received_ns, encode(message)))
        if received_ns - flushed_ns >= 10**9:
            writer.flush()
            flushed_ns = received_ns
    writer.close()


# -- in processes of their own -----------------------------------------------------------------------------------------


def view(path: Path) -> tuple[float, ...]:
    """Takes the recording in as a live viewer does; microseconds per rank-step: all, to apply, to look."""
    recording, state, summariser = Recording(path), RunState(), Summariser()
    first_ns, last_ns = recording.span_ns
    first_ns += int(WARM_SHARE * (last_ns - first_ns))
    frames = iter(recording)
    costs, looked_ns, rank_steps = [0.0, 0.0, 0.0], 0, 0
    while True:
        times = [time.process_time()]
        batch = list(islice(frames, BATCH))
        times.append(time.process_time())
        for message, envelope in batch:
            state.apply_message(message, envelope.received_ns, envelope.frame)
        times.append(time.process_time())
        if state.now_ns - looked_ns >= LOOK_NS:
            looked_ns = state.now_ns
            state.verdict(summariser.summarise(state.window()), state.diagnosis.incidents())
        times.append(time.process_time())
        if not batch:
            break
        if state.now_ns >= first_ns:
            rank_steps += sum(isinstance(message, Step) for message, _ in batch)
            costs = [so_far + b - a for so_far, a, b in zip(costs, times, times[1:], strict=False)]
    reading, applying, looking = (1e6 * cost / rank_steps for cost in costs)
    return reading + applying, applying, looking


def seek(path: Path) -> tuple[float, ...]:
    """Goes to the middle, as a replay does; CPU seconds."""
    started = time.process_time()
    recording, state = Recording(path), RunState()
    at_ns = sum(recording.span_ns) // 2
    chosen = recording.lead_in(at_ns, KEPT.of(recording.world_size), HISTORY_S)
    for message, envelope in recording.select(chosen):
        if envelope.received_ns > at_ns:
            break
        state.apply_message(message, envelope.received_ns, envelope.frame)
    Summariser().summarise(state.recent())
    return (time.process_time() - started,)


PARTS = {"view": view, "seek": seek}


# -- the table ---------------------------------------------------------------------------------------------------------


def spent(*command: str) -> tuple[float, int, str] | None:
    """Runs a command; its CPU seconds, its memory (MiB), and what it printed. None if it fails."""
    process = subprocess.Popen(
        [sys.executable, *command],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (LIMIT_GIB << 30, LIMIT_GIB << 30)),
    )
    assert process.stdout is not None
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        return None
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss >> 10, printed


def row(folder: Path, world: int, rank_steps: int, mixture: str, names: list[str]) -> list[str]:
    """The table's cells for so many ranks."""
    steps, file = rank_steps // world, folder / f"{world}.mcap"
    record(file, world, steps, mixture)
    each, found = 1e6 / (world * steps), [f"{world:,}", f"{steps:,}"]
    commands = {
        "report": ["report", str(file), "--json"],
        "html": ["report", str(file), "--html", str(folder / "report.html")],
        "compare": ["compare", str(file), str(file)],
        "whatif": ["whatif", str(file)],
    }
    for name in names:
        part = name in PARTS
        cost = spent(__file__, "--part", name, str(file)) if part else spent("-m", "ddpwatch", *commands[name])
        if cost is None:
            found += [UNKNOWN] * len(COLUMNS[name])
        else:
            cpu_s, mib, printed = cost
            found += [*(printed.split() if part else [f"{cpu_s * each:.1f}"]), f"{mib}"]
        print(f"{world} ranks, {name}: {found[2:]}", file=sys.stderr, flush=True)
    file.unlink()
    return found


COLUMNS = {
    "view": ("viewer µs", "apply µs", "picture µs", "MiB"),
    "seek": ("seek s", "MiB"),
    "report": ("report µs", "MiB"),
    "html": ("html µs", "MiB"),
    "compare": ("compare µs", "MiB"),
    "whatif": ("whatif µs", "MiB"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--worlds", type=int, nargs="*", default=[1024, 4096, 8192], help="ranks (default: %(default)s)"
    )
    parser.add_argument("--rank-steps", type=int, default=1 << 18, help="of each world (default: %(default)s)")
    parser.add_argument("--mixture", choices=MIXTURES, default="attended", help="of steps (default: %(default)s)")
    parser.add_argument("--only", nargs="*", choices=COLUMNS, default=list(COLUMNS), help="columns (default: all)")
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        with few_collections():
            print(*(f"{figure:.1f}" for figure in PARTS[args.part[0]](Path(args.part[1]))))
        return
    with tempfile.TemporaryDirectory() as name, Rounds() as rounds:
        rows = [
            row(Path(name), world, args.rank_steps, args.mixture, args.only)
            for world in rounds.over(args.worlds, "worlds")
        ]
    print("\n".join(table(["ranks", "steps", *(cell for each in args.only for cell in COLUMNS[each])], rows)))
    print(rounds_done(len(rows), len(args.worlds), "world"))


if __name__ == "__main__":
    main()
