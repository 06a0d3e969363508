"""A reducer in Python: what DistributedDataParallel does, open to read."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future

from trainer.channel import Channel
from trainer.instrument import BucketContent
from trainer.strategies.base import Strategy

MIB = 1 << 20
FIRST_CAP = 1 * MIB
CAP = 25 * MIB


class Bucket:
    """Gradients that travel together, in one flat buffer.

    One flag per parameter follows the gradients. The same all-reduce sums it, and so shows whether any rank has used
    the parameter. If none has, its gradient stays None, as in a single process.
    """

    def __init__(self, members: Sequence[int], parameters: Sequence[nn.Parameter], world_size: int) -> None:
        """Lay out the parameters ``members`` (all of one type and device) in this order."""
        self.members = members
        self.parameters = [parameters[index] for index in members]
        self.share = 1.0 / world_size
        sizes = [p.numel() for p in self.parameters]
        self.flat = self.parameters[0].new_zeros(sum(sizes) + len(sizes))
        *pieces, self.flags = torch.split(self.flat, [*sizes, len(sizes)])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, self.parameters, strict=True)]
        self.slots = {index: slot for slot, index in enumerate(members)}
        self.reset()

    def reset(self) -> None:
        """Empty it for another backward."""
        self.filled = [False] * len(self.members)
        self.missing = len(self.members)
        self.ready_ns: int | None = None
        self.future: Future[Tensor] | None = None

    def fill(self, index: int) -> None:
        """Copy this rank's share of a gradient, and let ``.grad`` point at the copy."""
        self._take(self.slots[index])
        self.missing -= 1
        if not self.missing:
            self.ready_ns = time.monotonic_ns()

    def _take(self, slot: int) -> None:
        parameter, view = self.parameters[slot], self.views[slot]
        assert parameter.grad is not None, "called when the gradient has been accumulated"
        torch.mul(parameter.grad, self.share, out=view)
        parameter.grad = view
        self.filled[slot] = True

    def close(self) -> None:
        """Prepare it for launch: parameters without a gradient here contribute zeros.

        A gradient of earlier micro-batches counts, though this backward has not used the parameter.
        """
        self.flags.fill_(1)
        for slot in self._unfilled():
            if self.parameters[slot].grad is not None:
                self._take(slot)
            else:
                self.views[slot].zero_()
                self.flags[slot] = 0

    def settle(self) -> None:
        """Wait for the result, and set the gradients of parameters that only other ranks have used."""
        assert self.future is not None, "every bucket was launched"
        self.future.wait()
        for slot in self._unfilled():
            self.parameters[slot].grad = self.views[slot] if self.flags[slot] > 0 else None

    def _unfilled(self) -> list[int]:
        return [slot for slot, filled in enumerate(self.filled) if not filled] if self.missing else []


class BucketedHooks(Strategy):
    """All-reduce buckets of gradients from within backward, each as soon as its last gradient is accumulated.

    Every rank launches its buckets in index order, no matter in which order they fill up: a collective is paired with
    the one that the other ranks issued at the same place in the sequence.
    """

    def __init__(self, model: nn.Module, channel: Channel, *, bucket_cap_mb: float | None = None) -> None:
        """Group parameters in reverse order, a guess at the order of their gradients.

        Args:
            model: What to train.
            channel: How to reach the other ranks.
            bucket_cap_mb: Largest bucket in MiB; None for 25, the first only 1 so that it can leave early.
        """
        super().__init__(model, channel)
        cap = CAP if bucket_cap_mb is None else int(bucket_cap_mb * MIB)
        self.first_cap, self.cap = min(FIRST_CAP, cap) if bucket_cap_mb is None else cap, cap
        self.observed: list[int] | None = []
        self.form_buckets(reversed(range(len(self.parameters))))

    def prepare(self) -> None:
        """Empty the buckets."""
        self.launched = 0
        for bucket in self.buckets:
            bucket.reset()

    def gradient_ready(self, index: int) -> None:
        """Put the gradient into its bucket, and launch every bucket that is next and complete."""
        if self.observed is not None:
            self.observed.append(index)
        bucket = self.bucket_of[index]
        bucket.fill(index)
        if not bucket.missing:
            self._launch_ready()

    def finish(self) -> None:
        """Launch the buckets with unused parameters, then wait for all."""
        while self.launched < len(self.buckets):
            self._launch()
        for bucket in self.buckets:
            bucket.settle()
        if self.observed is not None:
            self._rebuild(self.observed)

    def bucket_contents(self) -> list[BucketContent]:
        """List the buckets in launch order."""
        return [BucketContent(b.flat.numel() * b.flat.element_size(), b.members) for b in self.buckets]

    def form_buckets(self, order: Iterable[int]) -> None:
        """Fill buckets up to their caps in the given order of parameters."""
        self.buckets: list[Bucket] = []
        for _, alike in groupby(order, key=lambda i: (self.parameters[i].dtype, self.parameters[i].device)):
            self.buckets += [Bucket(members, self.parameters, self.world_size) for members in self._cut(alike)]
        self.bucket_of = {index: bucket for bucket in self.buckets for index in bucket.members}
        self.channel.announce(self.names, self.bucket_contents())

    def _cut(self, order: Iterable[int]) -> list[list[int]]:
        """Close a group when it reaches its cap, as DDP does."""
        groups: list[list[int]] = [[]]
        size, cap = 0, self.first_cap
        for index in order:
            if size >= cap:
                groups.append([])
                size, cap = 0, self.cap
            groups[-1].append(index)
            size += self.parameters[index].numel() * self.parameters[index].element_size()
        return groups

    def _launch_ready(self) -> None:
        while self.launched < len(self.buckets) and not self.buckets[self.launched].missing:
            self._launch()

    def _launch(self) -> None:
        bucket = self.buckets[self.launched]
        bucket.close()
        bucket.future = self.channel.all_reduce(bucket.flat, self.launched, bucket.ready_ns)
        self.launched += 1

    def _rebuild(self, observed: list[int]) -> None:
        """Group again in the order of rank 0's gradients; parameters that had none come last."""
        unseen = set(range(len(self.parameters))) - set(observed)
        order = torch.tensor([*observed, *sorted(unseen)], device=self.channel.world.device)
        if self.world_size > 1:
            dist.broadcast(order, src=0)
        self.observed = None
        self.instrument.warm_up()
        self.form_buckets(order.tolist())
