"""What must not grow faster than a run does: counted where that is possible, else compared at two sizes."""

from __future__ import annotations

import gc
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch import cli
from ddpwatch.analysis import across_ranks
from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.late.cause import REFERENCE_RANKS, _delays
from ddpwatch.analysis.run import Run
from ddpwatch.common import garbage
from ddpwatch.errors import UsageError
from ddpwatch.export import writers
from ddpwatch.export.chrome_trace import align
from ddpwatch.export.trace_size import TraceSize
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection, selection_of
from ddpwatch.report.build import report_of
from ddpwatch.wire import node_step
from ddpwatch.wire.messages import Device, Message, Step
from tests.support import frames
from tests.support.runs import BEGIN, MS, record, run_of


def test_a_command_looks_at_all_objects_next_to_never(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(cli, "app", lambda: seen.append(gc.get_threshold()))
    before = gc.get_threshold()
    cli.main()
    assert seen == [garbage.THRESHOLDS]
    assert gc.get_threshold() == before


def test_a_report_collects_nothing_as_steps_leave_no_cycles(tmp_path: Path) -> None:
    def cycles(steps: int) -> int:
        file = record(tmp_path / f"{steps}.mcap", run_of(steps=steps))
        gc.collect()
        with garbage.no_collections():
            assert not gc.isenabled()
            report_of(file)
            assert not gc.isenabled()
            found = gc.collect()
        assert gc.isenabled()
        return found

    cycles(12)  # imports make some
    assert cycles(600) - cycles(300) < 100  # a run is in one, with its newest steps


class TestLateRanks:
    def test_of_a_packed_step_few_frames_are_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Its own, and those of some peers, however many there are."""
        world = 200
        across = StepAcrossRanks(3)
        for rank in range(world):
            across.add_step(frames.step(rank, 3, late_ms=40 if rank == 7 else 0))
        across.pack()
        read = []
        decode = across_ranks.decode
        monkeypatch.setattr(across_ranks, "decode", lambda frame: read.append(frame) or decode(frame))
        delays = _delays(across, 7, range(world))
        assert {param: at // frames.MS for param, at in delays.items()} == {3: 0, 2: 0, 1: 40, 0: 40}
        assert len(read) == 1 + REFERENCE_RANKS


class TestSeeking:
    """To be at a position takes the steps that are kept there, and two minutes of all else."""

    @staticmethod
    def recorded(path: Path, seconds: int) -> Recording:
        """Two ranks with ten steps a second, and a device."""

        def run() -> Iterator[tuple[Message, int]]:
            yield from ((frames.hello(rank), BEGIN) for rank in (0, 1))
            for second in range(seconds):
                yield frames.device(second), BEGIN + second * 1000 * MS
                for tenth in range(10):
                    number = 10 * second + tenth
                    for rank in (0, 1):
                        yield frames.step(rank, number), BEGIN + (second * 1000 + tenth * 100 + 50) * MS + rank

        return Recording(record(path, run()))

    def test_older_steps_are_not_decoded(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        decoded = []
        decode = node_step.decode
        for seconds in (180, 360):
            recording = self.recorded(tmp_path / f"{seconds}.mcap", seconds)
            lead_in = recording.lead_in(recording.span_ns[1], 64, 120)
            read: list[Message] = []
            monkeypatch.setattr(node_step, "decode", lambda frame: read.append(decode(frame)) or read[-1])  # noqa: B023
            found = [message for message, _ in recording.select(lead_in)]
            monkeypatch.undo()
            assert 120 <= sum(isinstance(message, Device) for message in found) < 124
            steps = [message.step for message in found if isinstance(message, Step)]
            assert steps == [number for number in range(steps[0], 10 * seconds) for _ in (0, 1)]
            assert 64 <= 10 * seconds - steps[0] < 64 * 1.25 + 10
            assert len(read) < 2 * 64 * 1.25 + 180
            decoded.append(len(read))
        assert abs(decoded[0] - decoded[1]) < 30  # a chunk more or less


class TestEnds:
    def test_the_end_of_a_rank_costs_little_more_than_a_step(self) -> None:
        """Ranks end in order: each was the one that counted for the others."""
        world, run = 1600, Run()
        for message in (*(frames.hello(rank, world) for rank in range(world)), frames.beat(0)):
            run.apply_message(message, 1)

        def cost(messages: list[Message]) -> float:
            before = time.process_time()
            for at, message in enumerate(messages, 2):
                run.apply_message(message, at)
            return (time.process_time() - before) / len(messages)

        of = {"comm_first_seq": 0, "comm_seq": [0, 1]}
        step = cost([frames.step(rank, 0, **of) for rank in range(world)])
        assert cost([frames.bye(rank) for rank in range(world)]) < 5 * step


class TestTraces:
    MOST = 100_000

    @pytest.fixture
    def small(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Traces may have some bytes only."""
        monkeypatch.setattr(writers, "TraceSize", lambda: TraceSize(self.MOST))

    @pytest.mark.parametrize(("ranks", "steps"), [(1, 40), (6, 20)])
    def test_the_size_is_known_before_it_is_written(self, tmp_path: Path, ranks: int, steps: int) -> None:
        recording, out = Recording(record(tmp_path / "run.mcap", run_of(ranks, steps))), tmp_path / "trace.json"
        align(recording, size=(size := TraceSize()))
        writers.export(recording, "chrome", out, Selection())
        assert 0.75 < size.nbytes / out.stat().st_size < 1.25

    def test_one_that_is_too_large_is_refused_and_what_would_fit_is_named(self, tmp_path: Path, small: None) -> None:
        recording, out = Recording(record(tmp_path / "run.mcap", run_of(8, 30))), tmp_path / "trace.json"
        with pytest.raises(UsageError, match=r"the trace would take some \S+ GB: more than 0.0001 GB") as refused:
            writers.export(recording, "chrome", out, Selection())
        assert not out.exists()
        fits = re.findall(r"(--\w+) (\S+)", refused.value.hint)
        assert [option for option, _ in fits] == ["--steps", "--ranks"]
        for option, value in fits:
            chosen = selection_of(value, None) if option == "--steps" else selection_of(None, value)
            writers.export(recording, "chrome", out, chosen)
            assert 0.4 * self.MOST < out.stat().st_size < 1.25 * self.MOST

    def test_it_is_refused_once_that_is_clear(self, tmp_path: Path, small: None) -> None:
        """However long the run is."""
        read = []
        for steps in (40, 400):
            recording = Recording(record(tmp_path / f"{steps}.mcap", run_of(4, steps)))
            with pytest.raises(UsageError):
                writers.export(recording, "chrome", tmp_path / "trace.json", Selection())
            read.append(recording.frames)
        assert read[0] == read[1] < 400 * 4
