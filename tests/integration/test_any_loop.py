"""Jobs that train in their own way, unwatched and watched: the same digests, output and exit code.

Without a wrapper, their steps are their updates, and their collectives those of torch's own flight recorder.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from functools import partial
from importlib.metadata import version
from pathlib import Path

import pytest

from ddpwatch.recording.reader import Recording
from ddpwatch.wire.messages import Group, Step
from tests.integration.scripts.any_loop_ranks import RANKS
from tests.support.fork_server import ADDRESS, server_address
from tests.support.jobs import PROBE_IMPORTS, SCRIPTS, Job, ddpwatch, forked_command, require, together

pytestmark = [pytest.mark.seconds(10), pytest.mark.usefixtures("run_directory")]
NEEDS = {name: ("deepspeed",) for name in RANKS if name.startswith("deepspeed")}
WITHOUT_WRAPPER = {
    "fsdp1", "pipeline_1f1b", "own_optimizer", "own_optimizer_beside_the_backward", "averages_by_hand", "local_sgd",
    "diloco", "alone",
}  # fmt: skip
BESIDE_A_WRAPPER = {
    "lbfgs", "micro_batches_that_all_reduce", "update_inside_the_forward", "in_a_thread", "fused_into_the_backward",
}  # fmt: skip
if sys.version_info >= (3, 12):
    BESIDE_A_WRAPPER.add("a_method_in_place_of_the_forward")
SEES = sys.version_info >= (3, 12) or tuple(map(int, version("torch").split(".")[:2])) >= (2, 14)


@pytest.mark.parametrize("name", RANKS)
def test_it_trains_as_if_nobody_watched(name: str, tmp_path: Path) -> None:
    require(NEEDS.get(name, ()))
    script, ranks = SCRIPTS / "any_loop.py", RANKS[name]
    command = forked_command(ranks, None, script, name, str(tmp_path), preload=PROBE_IMPORTS)
    record = tmp_path / "ranks"
    about = {ADDRESS: server_address(), "DDPWATCH_DETAIL": "full", "DDPWATCH_RECORD_DIR": str(record)}
    watch = partial(ddpwatch, "run", "--headless", "--", *command)

    def unwatched() -> str:
        with Job(script, name, log=tmp_path / "log", ranks=ranks) as job:
            assert job.wait() == 0, job.output()
            return job.output()

    plain, watched = together(unwatched, partial(watch, TORCH_FR_BUFFER_SIZE="20000", **about))
    assert watched.returncode == 0, watched.stderr
    assert digests(plain) == digests(watched.stdout)
    assert len(digests(plain)) == ranks
    for rank in range(ranks) if name in WITHOUT_WRAPPER | BESIDE_A_WRAPPER else ():
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        steps_are_updates(record, rank, told["updates"], fused=name == "fused_into_the_backward")
        if name == "in_a_thread":
            assert all(step.data for step in steps_of(record, rank)[1:])
        if SEES and name in WITHOUT_WRAPPER and told["collectives"]:
            assert seen(record, rank) == issued(told["collectives"])


def steps_of(record: Path, rank: int) -> list[Step]:
    return [m for m, _ in Recording(record) if isinstance(m, Step) and m.rank == rank]


def steps_are_updates(record: Path, rank: int, updates: int, fused: bool = False) -> None:
    steps = steps_of(record, rank)
    assert [step.step for step in steps] == list(range(updates))
    warming_up = [step.step for step in steps if step.status == "warmup"]
    assert warming_up in ([0], [0, 1])  # an update inside the forward is found by the second one
    for step in steps[len(warming_up) :]:
        assert {"forward", "backward", *([] if fused else ["optimizer"])} <= {span.phase for span in step.spans}


def seen(record: Path, rank: int) -> Counter[tuple[str, str]]:
    """Counts the collectives of all steps but the first, by group and operation."""
    found: Counter[tuple[str, str]] = Counter()
    messages = [message for message, _ in Recording(record)]
    names = {message.id: message.name for message in messages if isinstance(message, Group)}
    for step in messages:
        if isinstance(step, Step) and step.rank == rank and step.step:
            ops = step.comm_op or ["all_reduce"] * len(step.comm_label)
            groups = step.comm_group or [0] * len(ops)
            found.update((names[group], op) for group, op in zip(groups, ops, strict=True))
    return as_recorded(found)


def as_recorded(found: Counter[tuple[str, str]]) -> Counter[tuple[str, str]]:
    """As the flight recorder of Gloo counts: what scatters is an all-reduce, and what goes to one rank is nothing."""
    counts: Counter[tuple[str, str]] = Counter()
    for (group, op), count in found.items():
        if op not in ("send", "recv"):
            counts[group, "all_reduce" if op == "reduce_scatter" else op] += count
    return counts


def issued(counts: list[dict[str, dict[str, int]]]) -> Counter[tuple[str, str]]:
    """Counts what was issued between the first update and the last."""
    first, last = (
        Counter({(group.partition(":")[0], op): n for group, ops in one.items() for op, n in ops.items()})
        for one in (counts[0], counts[-1])
    )
    last.subtract(first)
    return +last


def digests(output: str) -> list[str]:
    """What ranks print; lines of two ranks may run into each other."""
    return sorted(re.findall(r"rank \d [0-9a-f]{16}", output))


def test_all_jobs_are_tried() -> None:
    script = (SCRIPTS / "any_loop.py").read_text()
    assert re.findall(r"^@job\ndef (\w+)", script, re.MULTILINE) == list(RANKS)
