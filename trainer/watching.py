"""Publishing a strategy's steps to ddpwatch."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import Tensor

from trainer.instrument import NullInstrument
from trainer.strategies import Strategy


@contextmanager
def watched(strategy: Strategy, record: Path | None = None) -> Iterator[None]:
    """Publish for as long as the block lasts, and write to ``record`` if given; call it on every rank."""
    from ddpwatch import watch
    from ddpwatch.probe.watch import watch_recorder

    if strategy.channel.world.rank == 0:
        print(f"watched: {_where_to_look()}", file=sys.stderr, flush=True)
    if strategy.ATTACHABLE:
        with watch(strategy.module, record=record):
            yield
    else:
        with watch_recorder(strategy.model, record=record) as handle:
            strategy.watch_with(handle.recorder, handle.layout)
            yield
            strategy.watch_with(NullInstrument(), lambda names, buckets: None)


def count_tokens(inputs: Tensor) -> None:
    """Count a batch of text."""
    from ddpwatch import count

    if not inputs.is_floating_point():
        count(tokens=inputs.numel())


def _where_to_look() -> str:
    directory = os.environ.get("DDPWATCH_RECORD_DIR")
    if directory:
        return f"every rank writes a file below {directory}; `ddpwatch replay {directory} --follow` shows them live"
    return "run `ddpwatch` in another terminal to attach"
