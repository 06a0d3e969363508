"""The command line of a training run."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainer import spec
from trainer.comm_hooks import COMM_HOOKS, HookOptions
from trainer.config import TrainConfig
from trainer.data import DATA
from trainer.distributed import DEVICES
from trainer.errors import TrainerError
from trainer.faults import FAULTS
from trainer.models import MODELS
from trainer.module_hooks import MODULE_HOOKS
from trainer.optimization import OPTIMIZERS, SCHEDULES
from trainer.strategies import STRATEGIES

DEFAULTS = TrainConfig()
HOOK_DEFAULTS = HookOptions()


class _Parser(argparse.ArgumentParser):
    """A parser that raises the trainer's error: one line, printed once."""

    def error(self, message: str) -> NoReturn:
        raise TrainerError(message)


class _Once(argparse.Action):
    """An option that must not be given twice."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        if getattr(namespace, self.dest) is not None:
            parser.error("DDP takes one comm hook; to cast around another, name both: fp16+powersgd")
        setattr(namespace, self.dest, values)


def parse_config(argv: Sequence[str] | None = None) -> tuple[TrainConfig, argparse.Namespace]:
    """Read the command line.

    Returns:
        The configuration, and all arguments, with those that are not part of it (``watch``, ``record``).

    Raises:
        TrainerError: It cannot be parsed.
    """
    args = build_parser().parse_args(argv)
    fields = {name: getattr(args, name) for name in vars(args) if name in TrainConfig.__dataclass_fields__}
    hook_fields = {name: getattr(args, name) for name in vars(args) if name in HookOptions.__dataclass_fields__}
    fields["module_hooks"], fields["inject"] = tuple(args.module_hooks), tuple(args.inject)
    return TrainConfig(**fields, hook_options=HookOptions(**hook_fields)), args


def build_parser() -> argparse.ArgumentParser:
    """Describe the command line, one group per topic."""
    parser = _Parser(prog=Path(sys.argv[0]).name, description="Train data-parallel, watched by ddpwatch or not.")
    for add in (_add_work, _add_strategy, _add_loop, _add_files, _add_faults, _add_watching):
        add(parser)
    return parser


def fail(error: TrainerError) -> int:
    """Print an error, once per host, and return the exit code."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr)
    return error.exit_code


def _add_work(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("what to train", "NAME may carry options: gpt:width=128,layers=2")
    group.add_argument("--model", default=DEFAULTS.model, metavar="NAME", help=spec.describe(MODELS))
    group.add_argument("--data", default=DEFAULTS.data, metavar="NAME", help=spec.describe(DATA))
    group.add_argument(
        "--text", type=Path, metavar="PATH", help="text to use instead of the standard library's sources"
    )
    _add_device(group)


def _add_device(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--device",
        default=DEFAULTS.device,
        metavar="NAME",
        help=f"{', '.join(DEVICES)} (default: CUDA if there is any)",
    )


def _add_strategy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("how gradients are synchronised")
    group.add_argument("--strategy", default=DEFAULTS.strategy, metavar="NAME", help=", ".join(STRATEGIES))
    group.add_argument(
        "--comm-hook", action=_Once, metavar="NAME", help=f"for ddp: {', '.join(COMM_HOOKS)}, fp16+NAME, bf16+NAME"
    )
    group.add_argument(
        "--module-hook", action="append", default=[], dest="module_hooks", metavar="SPEC",
        help=f"repeatable: {spec.describe(MODULE_HOOKS)}",
    )  # fmt: skip
    group.add_argument("--bucket-cap-mb", type=float, metavar="MIB", help="largest bucket (default: 25, the first 1)")
    group.add_argument("--find-unused-parameters", action="store_true", help="ddp: expect some without a gradient")
    _add_hook_options(parser.add_argument_group("comm hook options"))


def _add_hook_options(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--powersgd-rank", type=int, default=HOOK_DEFAULTS.powersgd_rank, metavar="R")
    group.add_argument("--powersgd-start", type=int, default=HOOK_DEFAULTS.powersgd_start, metavar="STEP")
    group.add_argument(
        "--no-error-feedback",
        action="store_false",
        dest="powersgd_error_feedback",
        help="powersgd: drop what a step's compression loses",
    )
    group.add_argument(
        "--no-warm-start",
        action="store_false",
        dest="powersgd_warm_start",
        help="powersgd: start each step from random factors",
    )
    group.add_argument(
        "--weights",
        type=weights,
        metavar="W,W,...|samples",
        help="weighted: one per rank, or by local samples (default)",
    )
    group.add_argument(
        "--aggregate",
        choices=("mean", "median", "trimmed-mean"),
        default=HOOK_DEFAULTS.aggregate,
        help="gathered: how to combine",
    )
    group.add_argument(
        "--trim",
        type=int,
        default=HOOK_DEFAULTS.trim,
        metavar="K",
        help="trimmed-mean: drop the K largest and smallest",
    )


def _add_loop(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("loop")
    group.add_argument("--steps", type=int, default=DEFAULTS.steps, help="optimizer steps")
    group.add_argument(
        "--batch-size", type=whole_numbers, default=DEFAULTS.batch_sizes, dest="batch_sizes", metavar="N[,N...]",
        help="samples per micro-batch, the same for all ranks or one number per rank",
    )  # fmt: skip
    group.add_argument(
        "--accumulate", type=int, default=DEFAULTS.accumulate, metavar="N", help="micro-batches per step"
    )
    group.add_argument(
        "--accumulate-wrong", action="store_true", help="synchronise after each micro-batch, to see the cost"
    )
    group.add_argument("--seed", type=int, default=DEFAULTS.seed)
    group.add_argument("--optimizer", default=DEFAULTS.optimizer, metavar="NAME", help=", ".join(OPTIMIZERS))
    group.add_argument("--lr", type=float, default=DEFAULTS.lr, help="peak learning rate")
    group.add_argument("--schedule", default=DEFAULTS.schedule, metavar="NAME", help=", ".join(SCHEDULES))
    group.add_argument("--warmup-steps", type=int, default=DEFAULTS.warmup_steps, metavar="N")
    group.add_argument("--amp", action="store_true", help="forward in bfloat16 where that is safe")
    group.add_argument("--evaluate", action="store_true", help="measure loss and accuracy on test data at the end")
    group.add_argument("--log-every", type=int, default=DEFAULTS.log_every, metavar="N")


def _add_files(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("checkpoints")
    group.add_argument("--checkpoint", type=Path, metavar="DIR", help="save here at the end, and when interrupted")
    group.add_argument("--checkpoint-every", type=int, metavar="N", help="save every N steps as well")
    group.add_argument("--resume", action="store_true", help="continue from the newest; torchrun's restarts always do")
    group.add_argument("--save-params", type=Path, metavar="FILE", help="rank 0 writes the final parameters here")


def _add_faults(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("faults to learn from")
    group.add_argument(
        "--inject", action="append", default=[], metavar="SPEC", help=f"repeatable: {spec.describe(FAULTS)}"
    )


def _add_watching(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("watching")
    group.add_argument("--watch", action="store_true", help="watch the run; `ddpwatch` shows it")
    group.add_argument("--record", type=Path, metavar="FILE", help="record the run to FILE (implies --watch)")


def weights(text: str) -> tuple[float, ...] | None:
    """Parse ``samples`` (None) or one weight per rank."""
    return None if text == "samples" else tuple(float(weight) for weight in text.split(","))


def whole_numbers(text: str) -> tuple[int, ...]:
    """Parse one number, or one per rank."""
    return tuple(int(number) for number in text.split(","))
