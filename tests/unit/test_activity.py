"""What a rank does outside its steps."""

from __future__ import annotations

import importlib
import io
import pickle
import queue
import sys
import time
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import checkpoint
from torch.utils.data import DataLoader, Dataset

from ddpwatch.probe import activity
from ddpwatch.probe.activity import ActivityMonitor
from ddpwatch.wire.messages import Mark
from tests.support.guards import noting
from tests.support.jobs import wait_for
from tests.support.probe import NAP_S


class Slow(Dataset[torch.Tensor]):
    """Its second item takes a while."""

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 1:
            time.sleep(NAP_S)
        if index == 3:
            raise IndexError
        return torch.ones(1)


def test_what_happens_outside_the_steps_is_marked(tmp_path: Any) -> None:
    marks: list[Mark] = []
    saved: list[int] = []
    waits: list[tuple[object, int, int, bool]] = []
    untouched = torch.save
    monitor = ActivityMonitor(7, marks.append, lambda: saved.append(1), lambda *wait: waits.append(wait), noting([]))
    assert len(list(DataLoader(Slow()))) == 3
    torch.save({}, tmp_path / "checkpoint")
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(1))
    assert pickle.loads(pickle.dumps(torch.save)) is torch.save
    torch._dynamo.reset()  # forgets the callbacks
    monitor.close()
    torch.save({}, tmp_path / "checkpoint")
    torch.compile(lambda x: x + 2, backend="eager")(torch.ones(1))
    assert {mark.rank for mark in marks} == {7}
    assert {(mark.workers, mark.persistent) for mark in marks if mark.kind == "data"} == {(0, False)}
    assert [kind for kind, _ in groupby(mark.kind for mark in marks)] == ["data", "save", "compile"]
    marked = [mark.end_ns - mark.start_ns for mark in marks if mark.kind == "data" and mark.end_ns is not None]
    assert max(marked) >= NAP_S * 1e9  # on a busy machine, the others may be long as well
    assert len({id(loader) for loader, *_ in waits}) == 1
    assert max(marked) in (found := [end - start for _, start, end, _ in waits])
    assert len(found) == 4  # three batches, and the end
    assert saved == [1]
    assert torch.save is untouched


def test_the_start_and_the_end_of_workers_are_waits_for_data() -> None:
    marks: list[Mark] = []
    waits: list[tuple[object, int, int, bool]] = []
    monitor = ActivityMonitor(0, marks.append, lambda: None, lambda *wait: waits.append(wait), noting([]))
    batches = iter(DataLoader(Slow(), num_workers=1))
    started = len(waits)
    assert len(list(batches)) == 3
    monitor.close()
    assert (started, len(waits)) == (1, 5)
    assert [came for *_, came in waits] == [False, True, True, True, False]  # the start, three batches, and the end
    assert len({id(loader) for loader, *_ in waits}) == 1
    assert {(mark.workers, mark.persistent) for mark in marks} == {(1, False)}
    monitor = ActivityMonitor(0, marks.append, lambda: None, lambda *wait: waits.append(wait), noting([]))
    given_up = [iter(DataLoader(Slow(), num_workers=1)) for _ in range(2)]
    next(given_up[0])
    del given_up[0]
    assert [came for *_, came in waits[5:]] == [False, False, True, False]  # workers start, a batch, the first's end

    class Drops:
        def __reduce__(self) -> Any:
            given_up.clear()
            return int, ()

    torch.save(Drops(), io.BytesIO())
    monitor.close()
    assert not given_up
    assert len(waits) == 9  # the other's ended within what saves


@pytest.mark.parametrize("pins", [False, True])
def test_a_batch_that_was_there_already_is_no_wait_for_a_worker(pins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever it is: in the workers' queue, or in that of the thread that pins memory; or it came before others."""
    monkeypatch.setattr(activity, "MIN_WAIT_NS", 0)
    marks: list[Mark] = []
    monitor = ActivityMonitor(0, marks.append, lambda: None, lambda *_: None, noting([]))
    batches: Any = iter(DataLoader(Slow(), num_workers=1))
    next(batches)
    wait_for(lambda: batches._worker_result_queue.qsize() == batches._tasks_outstanding == 2, "two batches")
    if pins:
        batches._data_queue = queue.Queue()
        for _ in range(2):
            batches._data_queue.put(batches._worker_result_queue.get())
    next(batches)
    number, batch = batches._data_queue.get()
    batches._task_info[number] += (batch,)
    batches._tasks_outstanding -= 1
    next(batches)
    monitor.close()
    assert [mark.ready for mark in marks if mark.name == "waiting for data"] == [False, True, True]


class Nested(Dataset[torch.Tensor]):
    """Takes its items from another loader."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> torch.Tensor:
        return next(self.inner)


def test_what_another_loader_has_ready_says_nothing_of_the_one_that_asks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    inner = iter(DataLoader(Slow()))
    monkeypatch.setattr(activity, "MIN_WAIT_NS", 0)
    monkeypatch.setattr(activity, "_has_ready", lambda batches: batches is inner)
    marks: list[Mark] = []
    monitor = monitored(marks)
    assert len(list(DataLoader(Nested(inner)))) == 3
    monitor.close()
    assert {mark.ready for mark in marks} == {False}


def test_a_loader_whose_queue_is_closed_or_odd_has_nothing_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def closed() -> int:
        raise OSError("handle is closed")

    batches: Any = iter(DataLoader(Slow()))
    vars(batches).update(_task_info={}, _rcvd_idx=0, _worker_result_queue=SimpleNamespace(qsize=closed))
    assert not activity._has_ready(batches)
    batches._task_info = {0: None}
    errors: list[Exception] = []
    monitor = ActivityMonitor(0, lambda mark: None, lambda: None, lambda *wait: None, noting(errors))
    next(batches)
    monitor.close()
    assert errors == []


def monitored(marks: list[Mark]) -> ActivityMonitor:
    return ActivityMonitor(0, marks.append, lambda: None, lambda *wait: None, noting([]))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_libraries_save_is_marked_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever name it is called by, and whatever it calls itself."""
    safetensors = pytest.importorskip("safetensors")
    importlib.import_module("safetensors.torch")
    user: Any = ModuleType("user")  # as Transformers and Accelerate call it
    user.safe_save_file = safetensors.torch.save_file
    monkeypatch.setitem(sys.modules, "user", user)
    monkeypatch.setattr(activity, "SAVERS", (*activity.SAVERS[:2], ("user", "safe_save_file")))
    marks: list[Mark] = []
    before = checkpoint.save, safetensors.torch.save_file, user.safe_save_file
    monitor = monitored(marks)
    for saver in (checkpoint.save, safetensors.torch.save_file, user.safe_save_file):
        assert pickle.loads(pickle.dumps(saver)) is saver
    checkpoint.save({"weight": torch.ones(3)}, checkpoint_id=tmp_path / "folder", no_dist=True)
    user.safe_save_file({"weight": torch.ones(3)}, tmp_path / "weights")
    monitor.close()
    assert [(mark.kind, mark.name) for mark in marks] == [
        ("save", "torch.distributed.checkpoint.save"),
        ("save", "safetensors.torch.save_file"),
    ]
    assert (checkpoint.save, safetensors.torch.save_file, user.safe_save_file) == before
    assert checkpoint.state_dict_saver.save is checkpoint.save
    assert safetensors.torch.load_file(tmp_path / "weights")["weight"].tolist() == [1, 1, 1]


def test_a_library_that_cannot_be_timed_is_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "stubborn.py").write_text("def save(what):\n    return what\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(activity, "SAVERS", [("stubborn", "save")])
    monkeypatch.setattr(ActivityMonitor, "_time_saver", lambda monitor, module, name: 1 / 0)
    monitor = monitored([])
    assert importlib.import_module("stubborn").save(7) == 7
    monitor.close()
    assert monitor.guard.off == {"saves"}


def test_a_library_that_is_imported_later(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    library, named = tmp_path / "later.py", ("later", "save")
    library.write_text("def save(what):\n    return what\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(activity, "SAVERS", [named, ("never", "save")])
    marks: list[Mark] = []
    monitor = monitored(marks)
    later = importlib.import_module("later")
    assert later.save(7) == 7
    monitor.close()
    assert [mark.name for mark in marks] == ["later.save"]
    assert later.save.__module__ == "later"
    assert later.save(8) == 8
    assert len(marks) == 1
