"""The probe's session in a process."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddpwatch.errors import DdpwatchError
from ddpwatch.probe import session as session_module
from ddpwatch.probe.sender import Sender
from ddpwatch.probe.session import ProbeSession
from ddpwatch.probe.watch import watch
from ddpwatch.wire.messages import NO_LONGER_WATCHED, Bye, Mark, decode, encode


def test_one_gpu_is_watched_in_a_process() -> None:
    def module(*devices: int) -> Any:
        gpus = [torch.device("cuda", index) for index in devices]
        params = [SimpleNamespace(device=gpu) for gpu in gpus]
        return SimpleNamespace(device=gpus[0], module=nn.Linear(1, 1), parameters=lambda: params)

    session: Any = SimpleNamespace(_gpu=None)
    ProbeSession._check_gpu(session, module(1, 1))
    with pytest.raises(DdpwatchError, match="computes on cuda:0, while cuda:1 is watched"):
        ProbeSession._check_gpu(session, module(0))
    with pytest.raises(DdpwatchError, match="computes on cuda:2, while cuda:1 is watched"):
        ProbeSession._check_gpu(session, module(1, 2))


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[ProbeSession]:
    """Without a collector."""
    monkeypatch.setenv("DDPWATCH_RECORD_DIR", "/dev/null")
    made = ProbeSession()
    yield made
    made.close()
    made.sender._context.term()


def test_what_a_script_says_neither_raises_nor_ends_the_watching(session: ProbeSession) -> None:
    """An epoch's number as a mark, and the name of a file that is no Unicode."""
    session.mark(7)  # type: ignore[arg-type]
    session.mark(os.fsdecode(b"\xff.pt"))
    session.end(FileNotFoundError(os.fsdecode(b"\xff.pt")))
    names = [decode(encode(mark)).name for mark in session.queue.messages if isinstance(mark, Mark)]
    assert names == ["7", "?.pt"]
    assert decode(encode(session._goodbye())).detail == "FileNotFoundError: ?.pt"
    session._ended_by = KeyboardInterrupt()
    assert session._goodbye().detail == "KeyboardInterrupt"


def test_the_goodbye_is_sent_though_the_gpu_answers_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an illegal access every CUDA call raises: closing must neither raise nor leave the rank without an end."""

    def broken() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    monkeypatch.setenv("DDPWATCH_RECORD_DIR", "/dev/null")  # no collector
    sent: list[Bye] = []
    closed: list[str] = []
    session = ProbeSession()
    monkeypatch.setattr(session.recorder, "finish", broken)
    monkeypatch.setattr(session.sender, "stop", lambda goodbye, _: sent.append(goodbye))
    monkeypatch.setattr(session._rendezvous, "leave", lambda: closed.append("rendezvous"))
    session._started = True
    session.close()
    session.sender._context.term()
    (goodbye,) = sent
    assert goodbye.reason == "finished"
    assert goodbye.detail == (
        "the last steps have no times: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert closed == ["rendezvous"]


def test_after_an_error_the_rank_is_no_longer_watched_and_says_so(
    session: ProbeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its heartbeats stood still in the phase of the error, which looked like a hang, and no goodbye came."""
    sent: list[Bye] = []
    monkeypatch.setattr(session.sender, "stop", lambda goodbye, _: sent.append(goodbye))
    heartbeat = session.sender._heartbeat
    session.recorder.forward_begin()
    assert heartbeat.beat(5, 0).phase == "forward"
    session.guard.failed(KeyError("bucket"))
    beat = heartbeat.beat(6, 0)
    assert (beat.activity, beat.phase, beat.in_flight) == (NO_LONGER_WATCHED, "", [])
    assert [mark.name for mark in session.queue.messages if isinstance(mark, Mark)] == [
        "ddpwatch stops watching: KeyError (bucket)"
    ]
    session._started = True
    session.close()
    assert [goodbye.reason for goodbye in sent] == ["finished"]
    session._started = False


@pytest.mark.parametrize("step", ["a probe", "an introduction", "a thread"])
def test_what_cannot_be_watched_leaves_nothing(
    step: str, run_directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No hook, no collector, no run; the job trains bare, with one line, and a later module may be watched."""

    def refused(*_: object) -> None:
        raise DdpwatchError(f"no {step}")

    owner = {"a probe": ProbeSession, "an introduction": session_module, "a thread": Sender}[step]
    name = {"a probe": "_add_ddp", "an introduction": "hello_of", "a thread": "start"}[step]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        ddp, end = DistributedDataParallel(nn.Linear(4, 4)), os._exit
        hooks = len(ddp._forward_pre_hooks), len(ddp._forward_hooks)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(owner, name, refused)
            assert watch(ddp)._probe is None
        assert [record.getMessage() for record in caplog.records] == [
            f"ddpwatch does not watch, training goes on: no {step}"
        ]
        assert session_module.current is None
        assert (len(ddp._forward_pre_hooks), len(ddp._forward_hooks), os._exit) == (*hooks, end)
        ddp(torch.ones(2, 4)).sum().backward()
        assert list(run_directory.iterdir()) == []
        monkeypatch.setenv("DDPWATCH_RECORD_DIR", "/dev/null")  # no collector
        with watch(ddp) as handle:
            assert handle._probe is not None
    finally:
        dist.destroy_process_group()
