"""Waits for collectives that a job has issued asynchronously."""

import sys
import weakref
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddpwatch.probe.record import BucketRecord
from ddpwatch.probe.work_waits import WorkWaits, _waiting_methods
from ddpwatch.wire.messages import OWN_COLLECTIVES
from tests.support.probe import gloo_group

__all__ = ["gloo_group"]


class Bucket:
    """Issues in one method, and waits in another that nobody calls from there."""

    def start(self) -> tuple[Any, FrameType]:
        self.work: Any = dist.all_reduce(torch.ones(2), async_op=True)
        return self.work, sys._getframe()

    def finish(self) -> None:
        self.work.wait()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls cannot be seen")
def test_an_object_waits_in_another_of_its_methods() -> None:
    def fail(error: Exception) -> None:
        raise error

    waits, entry, bucket = WorkWaits(lambda ns: None, fail), BucketRecord(OWN_COLLECTIVES, 1, 8, 1), Bucket()
    work, place = bucket.start()
    waits.follow(work, entry, place)
    bucket.finish()
    waits.close()
    assert entry.wait_begin is not None
    assert entry.done == entry.wait_end


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls cannot be seen")
def test_looking_at_an_object_changes_nothing_for_the_job() -> None:
    """A script's `main` may issue, too: what it deletes goes, though its frame lasts; `locals()` stays what it was.

    Of Python 3.12: newer ones return a copy.
    """

    def issue(self: Bucket) -> tuple[list[str], bool, list[str]]:
        settings = locals()
        batch = Bucket()
        found = [code.co_name for code in _waiting_methods(sys._getframe())]
        ended = weakref.ref(batch)
        del batch
        return found, ended() is None, list(settings)

    assert issue(Bucket()) == (["finish"], True, ["self"])


@pytest.mark.skipif(sys.version_info < (3, 12), reason="calls cannot be seen")
def test_an_object_that_is_gone_is_not_looked_at() -> None:
    def issue(self: Bucket) -> list[Any]:
        del self
        return list(_waiting_methods(sys._getframe()))

    assert issue(Bucket()) == []
