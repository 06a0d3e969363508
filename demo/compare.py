"""Compares the trainer's strategies: trains the same work with each, watched, and prints one table.

    torchrun --standalone --nproc-per-node=4 demo/compare.py

Takes about two minutes. "state" is what a rank keeps: parameters, gradients, the optimizer's state. The recordings
remain; open one with ``ddpwatch replay``.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import Bye, Step

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the trainer is in the checkout only
from trainer import TrainConfig, Trainer, TrainerError, build_task
from trainer.cli import fail
from trainer.comm_hooks import HookOptions
from trainer.distributed import World, process_group
from trainer.strategies import DDP, ONE_PROCESS
from trainer.watching import watched

VARIANTS = (
    "single", "manual", "param-hooks-sync", "param-hooks", "bucketed-hooks", "ddp", "ddp:fp16", "ddp:powersgd",
    "fsdp2", "hsdp",
)  # fmt: skip
COLLECTOR_PATIENCE_S = 20.0
CHART_WIDTH = 60  # characters
MIB = 1 << 20


@dataclass(frozen=True)
class Row:
    """One line of the table; None where nothing was measured."""

    variant: str
    step_ms: float
    overlap: float | None
    exposed_ms: float
    wire_mib: float
    state_mib: float
    reverse: float | None
    loss: float

    def cells(self) -> list[str]:
        """The line as text."""
        return [
            self.variant,
            f"{self.step_ms:.0f} ms",
            "–" if self.overlap is None else f"{self.overlap:.0%}",
            f"{self.exposed_ms:.0f} ms",
            f"{self.wire_mib:.1f} MiB",
            f"{self.state_mib:.1f} MiB",
            "–" if self.reverse is None else f"{self.reverse:.0%} reverse",
            f"{self.loss:.4f}",
        ]


def main(argv: Sequence[str] | None = None) -> int:
    """Trains every variant, prints the table and the chart, and returns the exit code."""
    args = build_parser().parse_args(argv)
    try:
        world = World.from_environment(args.device)
        configs = {variant: config_for(variant, args, world) for variant in args.variants}
        for config in configs.values():
            build_task(config, world_for(config, world))
    except TrainerError as error:
        return fail(error)
    args.out.mkdir(parents=True, exist_ok=True)
    with process_group(world):
        files = {variant: args.out / f"{variant.replace(':', '-')}.mcap" for variant in configs}
        if world.rank == 0:  # which starts the recorders: no recording is overwritten
            for file in files.values():
                file.unlink(missing_ok=True)
        results = {variant: run(config, world, files[variant]) for variant, config in configs.items()}
    if world.rank == 0:
        rows = [row(variant, files[variant], *result) for variant, result in results.items()]
        print(f"\n{world.size} ranks, {args.steps} steps each, {args.model} on {args.data}\n")
        print("\n".join(table(rows)), end="\n\n")
        print("\n".join(chart(rows)))
        print(f"\nrecordings: {args.out}/  (ddpwatch replay FILE)")
    return 0


# -- running -----------------------------------------------------------------------------------------------------


def config_for(variant: str, args: argparse.Namespace, world: World) -> TrainConfig:
    """The configuration of a variant. All see the same samples; ``single`` sees those of all ranks at once."""
    strategy, _, hook = variant.partition(":")
    return TrainConfig(
        model=args.model,
        data=args.data,
        strategy=strategy,
        comm_hook=hook or None,
        hook_options=HookOptions(powersgd_start=2, powersgd_rank=4),
        steps=args.steps,
        batch_sizes=(args.batch_size * (world.size if strategy in ONE_PROCESS else 1),),
        log_every=args.steps,
        device=args.device,
    )


def world_for(config: TrainConfig, world: World) -> World:
    """The ranks that train together; ``single`` trains alone."""
    return replace(world, rank=0, size=1) if config.strategy in ONE_PROCESS else world


def run(config: TrainConfig, world: World, file: Path) -> tuple[float, float, float]:
    """Trains one variant, watched and recorded.

    Returns:
        The mean loss of the last step, the bytes on the wire relative to those of the gradients, and what the rank
        keeps in memory (MiB): parameters, gradients and the optimizer's state.
    """
    group = world_for(config, world)
    idle = group.size == 1 and world.rank > 0
    trainer = Trainer(config, group)
    with watched(trainer.strategy, file):
        loss = torch.tensor(0.0 if idle else trainer.fit().loss, device=world.device)
        dist.all_reduce(loss)
    hook = trainer.strategy.comm_hook if isinstance(trainer.strategy, DDP) else None
    return loss.item() / group.size, 1.0 if hook is None else hook.wire_ratio(), state_mib(trainer)


def state_mib(trainer: Trainer) -> float:
    """What a rank keeps from step to step, and its gradients, which are as large as its parameters."""
    params = list(trainer.model.parameters())
    states = [value for state in trainer.optimizer.state.values() for value in state.values()]
    return (2 * sum(map(bytes_here, params)) + sum(map(bytes_here, states))) / MIB


def bytes_here(tensor: object) -> int:
    """The bytes of a tensor on this rank: of one that is sharded, its shard."""
    if isinstance(tensor, DTensor):
        tensor = tensor.to_local()
    return tensor.nbytes if isinstance(tensor, torch.Tensor) else 0


# -- reading the recordings --------------------------------------------------------------------------------------


def row(variant: str, file: Path, loss: float, wire_ratio: float, state_mib: float) -> Row:
    """Reads a recording into a line of the table."""
    wait_until_complete(file)
    report = report_of(file)
    steps = list(counted_steps(file))
    return Row(
        variant=variant,
        step_ms=report.steps.step_ms or 0.0,
        overlap=report.overlap.ratio,
        exposed_ms=report.overlap.exposed_ms or 0.0,
        wire_mib=sum(steps[-1].comm_bytes) * wire_ratio / MIB,
        state_mib=state_mib,
        reverse=reverse_share(steps[-1].hook_param),
        loss=loss,
    )


def wait_until_complete(file: Path) -> None:
    """Waits for the collector, which still writes for a moment after the ranks' goodbyes."""
    deadline = time.monotonic() + COLLECTOR_PATIENCE_S
    while time.monotonic() < deadline and not is_complete(file):
        time.sleep(0.1)


def is_complete(file: Path) -> bool:
    """Whether the recording contains the run's goodbye."""
    try:
        return any(isinstance(message, Bye) and message.rank is None for message, _ in Recording(file))
    except DdpwatchError:
        return False


def counted_steps(file: Path) -> Iterator[Step]:
    """Rank 0's full steps."""
    for message, _ in Recording(file):
        if isinstance(message, Step) and message.rank == 0 and message.status == "ok":
            yield message


def reverse_share(fired: Sequence[int]) -> float | None:
    """The share of hooks that fired for an earlier parameter of the model than the hook before them."""
    pairs = list(pairwise(fired))
    return sum(later < earlier for earlier, later in pairs) / len(pairs) if pairs else None


# -- printing ----------------------------------------------------------------------------------------------------


def table(rows: Sequence[Row]) -> list[str]:
    """The rows as a Markdown table."""
    header = ["strategy", "step", "overlap", "exposed", "on the wire", "state", "hook order", "loss"]
    lines = [header, *(row.cells() for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines)
    return [f"| {' | '.join(cells)} |" for cells in padded]


def chart(rows: Sequence[Row]) -> list[str]:
    """A bar for each variant's step: its exposed communication, and the rest."""
    scale = CHART_WIDTH / max(row.step_ms for row in rows)
    name_width = max(len(row.variant) for row in rows)
    lines = [f"{'':{name_width}} █ rest of the step   ░ exposed communication"]
    for row in rows:
        step, exposed = round(row.step_ms * scale), round(row.exposed_ms * scale)
        lines.append(f"{row.variant:{name_width}} {'█' * (step - exposed)}{'░' * exposed} {row.step_ms:.0f} ms")
    return lines


def build_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "variants", nargs="*", default=VARIANTS, metavar="VARIANT", help="a strategy, or ddp:HOOK; default: all"
    )
    parser.add_argument("--model", default="gpt", help="default: %(default)s")
    parser.add_argument("--data", default="text", help="default: %(default)s")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda (default: CUDA if there is any)")
    parser.add_argument("--steps", type=int, default=16, help="optimizer steps of each (default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=2, help="samples per rank (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("recordings"), metavar="DIR", help="for the recordings")
    return parser


if __name__ == "__main__":
    sys.exit(main())
