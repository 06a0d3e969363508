"""Following collectives of Gloo's until they are done: two ranks in one process."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from ddpwatch.probe import completion
from ddpwatch.probe.completion import TURN_S, WAITERS, Completions
from tests.support.jobs import wait_for

LONG = timedelta(seconds=60)


class Pair:
    """Two ranks of one group. A collective of the first is done when the second has launched it, too."""

    def __init__(self) -> None:
        store, self.ranks = dist.HashStore(), list[dist.ProcessGroupGloo]()
        makers = [threading.Thread(target=self._make, args=(store, rank)) for rank in range(2)]
        for maker in makers:
            maker.start()
        for maker in makers:
            maker.join()
        self.ranks.sort(key=lambda group: group.rank())

    def _make(self, store: dist.Store, rank: int) -> None:
        self.ranks.append(dist.ProcessGroupGloo(store, rank, 2, LONG))

    def launch(self, rank: int = 0, timeout: timedelta = LONG) -> dist.Work:
        options = dist.AllreduceOptions()
        options.timeout = timeout
        work: dist.Work = self.ranks[rank].allreduce([torch.ones(4)], options)  # type: ignore[attr-defined]
        return work


@pytest.fixture
def pair() -> Pair:
    return Pair()


@pytest.fixture
def completions() -> Iterator[Completions]:
    made = Completions()
    yield made
    made.stop()
    assert not made._threads


class Done:
    """Notes the calls, each with its thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def of(self, name: str) -> Callable[[], None]:
        return lambda: self.calls.append((name, threading.current_thread().name))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


def test_a_collective_is_done_when_the_other_rank_has_joined_in(pair: Pair, completions: Completions) -> None:
    done = Done()
    completions.follow(pair.launch(), done.of("first"))
    time.sleep(3 * TURN_S)
    assert done.calls == []
    pair.launch(1)
    wait_for(lambda: bool(done.calls), "it is done")
    assert done.calls == [("first", "ddpwatch-completions")]


def test_what_is_done_already_needs_no_thread(pair: Pair, completions: Completions) -> None:
    done, work = Done(), pair.launch()
    pair.launch(1)
    work.wait()
    completions.follow(work, done.of("work"))
    completions.follow(work.get_future(), done.of("future"))
    assert done.calls == [("work", "MainThread"), ("future", "MainThread")]
    assert not completions._threads


def test_collectives_that_hang_delay_no_other_for_long(pair: Pair, completions: Completions) -> None:
    other, done = Pair(), Done()
    for number in range(3 * WAITERS):
        completions.follow(pair.launch(), done.of(f"hangs {number}"))
    work = other.launch()
    completions.follow(work, done.of("other"))
    other.launch(1)
    wait_for(lambda: done.names == ["other"], "the one that does not hang is done")
    for _ in range(3 * WAITERS):
        pair.launch(1)
    wait_for(lambda: len(done.names) == 1 + 3 * WAITERS, "all are done")


def test_what_hangs_takes_no_processor_time(pair: Pair, completions: Completions) -> None:
    future: torch.futures.Future[None] = torch.futures.Future()
    completions.follow(pair.launch(), lambda: None)
    completions.follow(future, lambda: None)
    time.sleep(1)
    before = time.process_time()
    time.sleep(1)
    used = time.process_time() - before
    pair.launch(1)
    future.set_result(None)
    assert used < 0.1


def test_an_error_still_reaches_the_job(pair: Pair, completions: Completions) -> None:
    done, work = Done(), pair.launch(timeout=timedelta(seconds=3 * TURN_S))
    completions.follow(work, done.of("failed"))
    wait_for(lambda: done.names == ["failed"], "it has failed")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Timed out waiting 300ms"):
            work.wait()


@pytest.mark.parametrize("fails", [False, True])
def test_a_future_is_looked_at(completions: Completions, fails: bool) -> None:
    done, future = Done(), torch.futures.Future[None]()
    completions.follow(future, done.of("future"))
    time.sleep(2 * TURN_S)
    assert done.calls == []
    if fails:
        future.set_exception(ValueError("the job's"))  # type: ignore[arg-type]
    else:
        future.set_result(None)
    wait_for(lambda: done.calls == [("future", "ddpwatch-completions")], "it is done")


def test_the_end_of_a_turn_is_not_raised_where_torch_would_trace_it(
    pair: Pair, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(completion, "_TRACED", True)
    monkeypatch.setattr(dist.Work, "wait", lambda *_: pytest.fail("a turn that ends raises"))
    done = Done()
    completions.follow(pair.launch(), done.of("looked at"))
    pair.launch(1)
    wait_for(lambda: done.names == ["looked at"], "it is done")


def test_nobody_else_calls_the_wait_of_a_jobs_own_work(completions: Completions) -> None:
    class Own(dist._Work):
        def wait(self, timeout: timedelta | None = None) -> bool:
            waits.append(timeout)
            return True

        def get_future(self) -> torch.futures.Future[None]:
            return future

    waits: list[timedelta | None] = []
    done, future = Done(), torch.futures.Future[None]()
    completions.follow(Own(), done.of("own"))
    time.sleep(2 * TURN_S)
    assert (done.calls, waits) == ([], [])
    future.set_result(None)
    wait_for(lambda: done.names == ["own"], "it is done")
    assert waits == []


def test_what_is_done_when_the_threads_end_is_called_for(pair: Pair, completions: Completions) -> None:
    done = Done()
    works = [pair.launch() for _ in range(4 * WAITERS)]
    for number, work in enumerate(works):
        completions.follow(work, done.of(str(number)))
    for work in works[:-1]:
        pair.launch(1)
        work.wait()
    completions.stop()
    assert sorted(done.names) == [str(number) for number in range(len(works) - 1)]
    pair.launch(1)
    works[-1].wait()
    completions.follow(torch.futures.Future(), done.of("later"))
    assert len(completions._threads) == WAITERS  # they start again


def test_nothing_is_kept_of_what_is_done_or_forgotten(pair: Pair, completions: Completions) -> None:
    class Entry:
        def stamp(self) -> None:
            stamped.append(True)

    stamped: list[bool] = []
    entries = [Entry(), Entry()]
    left = [weakref.ref(entry) for entry in entries]
    completions.follow(pair.launch(), entries.pop(0).stamp)
    pair.launch(1)
    wait_for(lambda: left[0]() is None, "the first is let go")
    completions.follow(pair.launch(), entries.pop().stamp)
    completions.stop()
    assert (left[1](), stamped) == (None, [True])
    pair.launch(1)


def test_a_signal_leaves_no_thread_behind(
    pair: Pair, completions: Completions, monkeypatch: pytest.MonkeyPatch
) -> None:
    completions.follow(pair.launch(), lambda: None)
    threads = list(completions._threads)
    join, signals = threading.Thread.join, iter([KeyboardInterrupt])

    def interrupted(thread: threading.Thread, timeout: float | None = None) -> None:
        for signal in signals:
            raise signal
        join(thread, timeout)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        completions.stop()
    assert not any(thread.is_alive() for thread in threads)
    pair.launch(1)
