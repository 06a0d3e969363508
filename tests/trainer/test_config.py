"""Wrong names and impossible combinations: one clear line, before any process group."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.trainer.conftest import ALONE
from trainer import TrainConfig, TrainerError, build_task
from trainer.cli import parse_config
from trainer.comm_hooks import HookOptions
from trainer.distributed import World

TWO = World(0, 0, 2, torch.device("cpu"))
DIGITS = TrainConfig(model="mlp", data="digits")


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        (TWO, {"strategy": "magic"}, "no strategy is called 'magic'"),
        (TWO, {"model": "magic"}, "no model is called 'magic'"),
        (TWO, {"data": "magic"}, "no data is called 'magic'"),
        (TWO, {"optimizer": "magic"}, "no optimizer is called 'magic'"),
        (TWO, {"schedule": "magic"}, "no schedule is called 'magic'"),
        (TWO, {"comm_hook": "magic"}, "no comm hook is called 'magic'"),
        (TWO, {"comm_hook": "powersgd+fp16"}, "no comm hook is called 'powersgd+fp16'"),
        (TWO, {"comm_hook": "fp16+bf16"}, "casts twice"),
        (TWO, {"module_hooks": ("magic",)}, "no module hook is called 'magic'"),
        (TWO, {"module_hooks": ("clip:layer=magic",)}, "no layer matches 'magic'"),
        (TWO, {"module_hooks": ("clip:of=magic",)}, "neither weights nor flow"),
        (TWO, {"module_hooks": ("transform:op=magic",)}, "no gradient transform is called 'magic'"),
        (TWO, {"module_hooks": ("chunk:op=magic",)}, "no operation is called 'magic'"),
        (TWO, {"inject": ("magic",)}, "no fault is called 'magic'"),
        (TWO, {"inject": ("slow-input:rank=2",)}, "there is no rank 2 among 2"),
        (TWO, {"inject": ("slow-input:every=0",)}, "every=0 is not a period"),
        (TWO, {"inject": ("slow-input:since=5,until=5",)}, "no step lies between since=5 and until=5"),
        (TWO, {"inject": ("hang:layer=magic",)}, "no layer matches 'magic'"),
        (ALONE, {"inject": ("slow-comm",), "strategy": "single"}, "sends nothing"),
        (TWO, {"strategy": "single"}, "strategy single is one process; torchrun has started 2"),
        (TWO, {"strategy": "dataparallel"}, "strategy dataparallel is one process"),
        (TWO, {"strategy": "manual", "comm_hook": "fp16"}, "takes no comm hook"),
        (ALONE, {"comm_hook": "powersgd"}, "there is only one rank"),
        (TWO, {"comm_hook": "powersgd", "hook_options": HookOptions(powersgd_start=1)}, "cannot begin before step 2"),
        (TWO, {"comm_hook": "powersgd", "hook_options": HookOptions(powersgd_rank=0)}, "at least 1 is needed"),
        (TWO, {"comm_hook": "weighted", "hook_options": HookOptions(weights=(1, 2, 3))}, "3 weights for 2 ranks"),
        (TWO, {"comm_hook": "weighted", "hook_options": HookOptions(weights=(0, 0))}, "not all of them 0"),
        (TWO, {"comm_hook": "gathered", "hook_options": HookOptions(aggregate="trimmed-mean")}, "leaves none"),
        (TWO, {"model": "gpt"}, "model gpt takes text"),
        (TWO, {"data": "text"}, "model mlp takes images or vectors"),
        (TWO, {"model": "resnet", "data": "text"}, "model resnet takes images"),
        (TWO, {"model": "gpt:heads=5", "data": "text"}, "5 heads do not divide"),
        (TWO, {"data": "text", "text": Path("/nowhere")}, "cannot read text from /nowhere"),
        (TWO, {"batch_sizes": (1, 2, 3)}, "3 batch sizes for 2 ranks"),
        (TWO, {"steps": 0}, "--steps is 0"),
        (TWO, {"bucket_cap_mb": 0.0}, "--bucket-cap-mb is 0.0"),
        (TWO, {"accumulate_wrong": True}, "--accumulate-wrong shows nothing"),
        (TWO, {"resume": True}, "need --checkpoint DIR"),
    ],
)
def test_what_cannot_work_is_refused(world: World, changes: dict[str, object], message: str) -> None:
    with pytest.raises(TrainerError) as caught:
        build_task(replace(DIGITS, **changes), world)  # type: ignore[arg-type]
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--steps", "many"], "argument --steps: invalid int value: 'many'"),
        (["--magic"], "unrecognized arguments: --magic"),
        (["--comm-hook", "fp16", "--comm-hook", "bf16"], "DDP takes one comm hook"),
        (["--weights", "1,x"], "argument --weights: invalid weights value: '1,x'"),
    ],
)
def test_a_command_line_that_cannot_be_read(arguments: list[str], message: str) -> None:
    with pytest.raises(TrainerError, match=message):
        parse_config(arguments)


def test_command_line_reaches_the_config() -> None:
    config, args = parse_config(
        shlex.split(
            "--strategy ddp --comm-hook fp16+powersgd --powersgd-rank 4 --no-warm-start --module-hook clip "
            "--inject gc --inject stop --batch-size 4,8 --weights 1,3 --steps 7 --record out.mcap"
        )
    )
    options = HookOptions(powersgd_rank=4, powersgd_warm_start=False, weights=(1.0, 3.0))
    assert config == TrainConfig(
        comm_hook="fp16+powersgd", hook_options=options, module_hooks=("clip",), inject=("gc", "stop"),
        batch_sizes=(4, 8), steps=7,
    )  # fmt: skip
    assert args.record == Path("out.mcap")


def test_defaults_are_those_of_the_config() -> None:
    assert parse_config([])[0] == TrainConfig()
