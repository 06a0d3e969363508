"""Measures what watching adds to the CPU time of a loop without a wrapper that issues many small collectives.

    step ms, CPU ms    of the training thread, unwatched: the median over the rounds of a job's mean, and of its median
    adds               to that CPU time, by jobs in turns, with a 95 % interval (`paired.hodges_lehmann`)
    with its threads   the same of the mean, of the whole process: with full steps, ddpwatch's and Gloo's threads

A job is one rank. Its first steps are left out: in these, ddpwatch learns what it costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

import ddpwatch
from ddpwatch.common.text import table
from tests.support.paired import hodges_lehmann, ratios

KINDS = ("unwatched", "watched", "unwatched again")


def main() -> None:
    """Prints a row for each number of collectives."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--collectives", type=int, nargs="+", default=[1000, 0], help="of 32 bytes, in a step")
    parser.add_argument("--later", action="store_true", help="waited for once all of a step are issued")
    parser.add_argument("--width", type=int, default=512, help="of the model's three layers")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--first", type=int, default=100, help="steps that are left out")
    parser.add_argument("--rounds", type=int, default=8)
    chosen = parser.parse_args()
    rows = []
    for collectives in chosen.collectives:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
        for turn in range(chosen.rounds):
            for kind in KINDS:
                found[kind].append(_forked(kind == "watched", collectives, chosen))
            print(f"{collectives} collectives: round {turn + 1} of {chosen.rounds}", file=sys.stderr)
        bare = found["unwatched"]
        wall, cpu = (median(one[name] for one in bare) * 1e3 for name in ("wall", "thread"))
        added = [_added(found[kind], bare, name) for kind in KINDS[1:] for name in ("thread", "process")]
        rows.append([str(collectives), f"{wall:.1f}", f"{cpu:.2f}", *added])
    heads = ["collectives a step", "step ms", "CPU ms", "adds", "with its threads", "unwatched again", "with threads"]
    print("\n".join(table(heads, rows)))


def _added(found: list[dict[str, float]], bare: list[dict[str, float]], name: str) -> str:
    pairs = ratios([one[name] for one in found], [one[name] for one in bare])
    value, low, high = (100 * part for part in hodges_lehmann([ratio - 1 for ratio in pairs]))
    return f"{value:+.1f} % ({low:.1f} to {high:.1f})"


def _forked(watched: bool, collectives: int, chosen: argparse.Namespace) -> dict[str, float]:
    """Runs a job in a child, as each is another run; returns seconds a step."""
    reads, writes = os.pipe()
    if (child := os.fork()) == 0:
        try:
            found = _job(watched, collectives, chosen)
            os.write(writes, json.dumps(found).encode())
        finally:
            os._exit(0)
    os.close(writes)
    os.waitpid(child, 0)
    with open(reads) as file:
        measured: dict[str, float] = json.load(file)
    return measured


def _job(watched: bool, collectives: int, chosen: argparse.Namespace) -> dict[str, float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    watch = ddpwatch.watch() if watched else None
    width = chosen.width
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    optimizer, batch, values = torch.optim.SGD(model.parameters(), lr=0.01), torch.ones(16, width), torch.ones(8)
    began: tuple[float, ...] = ()
    ends: list[float] = []
    for step in range(chosen.steps):
        if step == chosen.first:
            began, ends = _times(), [time.thread_time()]
        works = [dist.all_reduce(values, async_op=chosen.later) for _ in range(collectives)]
        for work in works if chosen.later else ():
            work.wait()
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ends.append(time.thread_time())
    count = chosen.steps - chosen.first
    wall, process = ((end - start) / count for start, end in zip(began, _times(), strict=True))
    thread = median(after - before for before, after in itertools.pairwise(ends))
    if watch is not None:
        watch.close()
    return {"wall": wall, "thread": thread, "process": process}


def _times() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


if __name__ == "__main__":
    main()
