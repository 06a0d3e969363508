"""Where gradients leave the process: the one place in which the hook-based strategies call a collective."""

from __future__ import annotations

from functools import partial

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from trainer.distributed import World
from trainer.in_order import InOrder
from trainer.instrument import Announce, Instrument, NullInstrument


class Channel:
    """Sums tensors over all ranks and reports each bucket to the instrument."""

    def __init__(self, world: World) -> None:
        """Use the default process group, unwatched at first."""
        self.world = world
        self.instrument: Instrument = NullInstrument()
        self.announce: Announce = lambda names, buckets: None
        self.delayed: InOrder | None = None

    def all_reduce(self, tensor: Tensor, index: int, ready_ns: int | None = None) -> Future[Tensor]:
        """Issue the all-reduce of bucket ``index``, in place, and do not wait for it."""
        nbytes = tensor.numel() * tensor.element_size()
        record = self.instrument.bucket_launch(0, index, nbytes, ready_ns)
        future = self._send(tensor)
        # On CUDA the future completes when the collective is enqueued, not when it ends.
        if record is not None and self.world.device.type == "cpu":
            future.add_done_callback(partial(self._done, record))
        return future

    def _send(self, tensor: Tensor) -> Future[Tensor]:
        issue = partial(issue_all_reduce, tensor)
        return issue() if self.delayed is None else self.delayed.submit(issue)

    def _done(self, record: object, future: object) -> None:
        self.instrument.bucket_done(record)


def issue_all_reduce(tensor: Tensor) -> Future[Tensor]:
    """Sum over all ranks, in place, without waiting."""
    work = dist.all_reduce(tensor, async_op=True)
    assert work is not None, "an asynchronous collective returns its work"
    future: Future[Tensor] = work.get_future()
    return future
