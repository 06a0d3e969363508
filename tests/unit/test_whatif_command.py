"""``ddpwatch whatif``: what it takes, prints and refuses."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from typer.testing import CliRunner

from ddpwatch.cli import app
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.whatif.command import WhatIfOptions, recorded_live
from ddpwatch.whatif.sweep import LARGEST_BYTES, SMALLEST_BYTES, main, sizes_up_to
from ddpwatch.whatif.text import APART, OUTSIDE
from ddpwatch.whatif.wire import write_wire
from ddpwatch.wire.messages import Message, Step, encode
from ddpwatch.wire.transport import Envelope, Frame
from tests.support.frames import status
from tests.support.whatif import MadeUpJob
from tests.unit.test_whatif_cost import wire

KEYS = {
    "change",
    "kind",
    "cap_mib",
    "step_ms",
    "low",
    "high",
    "p90_ms",
    "exposed_ms",
    "gain_ms",
    "gain",
    "gain_low_ms",
    "gain_high_ms",
    "more_steps",
    "why",
    "assumes",
    "code",
}


def write(path: Path, messages: Iterable[Message]) -> Path:
    writer = RecordingWriter(path, {"run_id": "r"})
    for number, message in enumerate(messages):
        writer.write_message(message, Envelope(number + 1, 1_700_000_000 * 10**9 + number, encode(message)))
    writer.close()
    return path


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whatif") / "run.mcap", MadeUpJob(backend="gloo").messages())


@pytest.fixture(scope="module")
def one_size(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("whatif") / "one.mcap", MadeUpJob(cap_mib=100, backend="gloo").messages())


def whatif(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["whatif", *arguments], catch_exceptions=True)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.stdout


def whatif_json(*arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(whatif(*arguments, "--json"))
    return found


def test_json(file: Path) -> None:
    found = whatif_json(str(file), "--cap", "1,8", "--hook", "fp16")
    assert set(found["replayed"]) == {"step_ms", "measured_ms", "measured_p90_ms", "error", "exposed_ms"}
    assert abs(found["replayed"]["error"]) < 0.005
    assert all(set(scenario) == KEYS for scenario in found["scenarios"])
    assert {scenario["change"] for scenario in found["scenarios"]} == {
        "bucket cap 1 MiB", "bucket cap 8 MiB", "fp16 hook", "bucket cap 1 MiB + fp16 hook",
        "bucket cap 8 MiB + fp16 hook",
    }  # fmt: skip
    assert {scenario["cap_mib"] for scenario in found["scenarios"]} == {1, 8, None}


def test_without_options_the_best_five(file: Path) -> None:
    lines = whatif(str(file)).splitlines()
    apart = lines.index(APART)  # two changes of 5.6 ms each did not gain 11.2
    assert lines[apart - 2 : apart] == [OUTSIDE, ""]
    assert " would gain " in lines[1]
    table = lines[apart + 2 : lines.index("", apart)]
    least = [float(line.split(" to ")[0].split()[-1]) for line in table[:-1]]
    assert 1 <= len(least) <= 5
    assert least == sorted(least, reverse=True)
    assert least[-1] > 0
    assert table[-1].endswith("(at most)")
    assert sum("DistributedDataParallel(model, bucket_cap_mb" in line for line in lines) == 1


def test_a_directory_of_rank_files(file: Path, tmp_path: Path) -> None:
    messages = list(MadeUpJob(backend="gloo").messages())
    for rank in (0, 1):
        write(tmp_path / f"rank{rank}.mcap", [m for m in messages if getattr(m, "rank", None) == rank])
    assert whatif_json(str(tmp_path), "--cap", "1") == whatif_json(str(file), "--cap", "1")


def test_a_cut_file(file: Path, tmp_path: Path) -> None:
    cut = tmp_path / "cut.mcap"
    cut.write_bytes(file.read_bytes()[:-200])
    done = CliRunner().invoke(app, ["whatif", str(cut)])
    assert "note: " in done.stderr
    assert "is cut off or damaged" in done.stderr
    with pytest.raises(DdpwatchError, match="is cut off or damaged, and before that: "):
        whatif(str(write_and_cut(tmp_path / "short.mcap")))


def test_what_is_refused_is_no_change_that_was_tried(one_size: Path) -> None:
    done = CliRunner().invoke(app, ["whatif", str(one_size), "--cap", "5", "--free"])
    assert done.exit_code == 0
    assert [line.partition(": latency ")[0] for line in done.stdout.splitlines() if "not predicted" in line] == [
        "not predicted: bucket cap 5 MiB, bucket cap 5 MiB + any cap, hook or link (at most): "
        "only one bucket size was seen"
    ]
    assert sum(line.startswith("≥ ") and "(at most)" in line for line in done.stdout.splitlines()) == 1


def test_where_all_is_refused_the_command_fails_with_one_line(one_size: Path) -> None:
    with pytest.raises(DdpwatchError) as error:
        whatif(str(one_size), "--cap", "5,10")
    assert error.value.exit_code == 2
    assert error.value.message.startswith("not predicted: bucket cap 5 MiB, bucket cap 10 MiB: only one bucket size")


def test_json_says_what_was_refused_and_the_command_fails(one_size: Path) -> None:
    done = CliRunner().invoke(app, ["whatif", str(one_size), "--cap", "5", "--json"])
    assert isinstance(done.exception, DdpwatchError)
    assert [refused["change"] for refused in json.loads(done.stdout)["refused"]] == ["bucket cap 5 MiB"]


def sharded() -> Iterator[Message]:
    for message in MadeUpJob().messages():
        yield (
            replace(message, comm_op=["all_gather"] * len(message.comm_label)) if isinstance(message, Step) else message
        )


def light() -> Iterator[Message]:
    for message in MadeUpJob().messages():
        if isinstance(message, Step):
            message = replace(message, status="shadow", comm_done=[None] * len(message.comm_label))
        yield message


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (sharded, "what-if supports DDP only, and this job uses FSDP2"),
        (light, "0 steps timed in full on all ranks, and 5 are needed"),
    ],
)
def test_a_refusal_is_one_line(tmp_path: Path, messages: Callable[[], Iterator[Message]], line: str) -> None:
    with pytest.raises(DdpwatchError) as error:
        whatif(str(write(tmp_path / "run.mcap", messages())))
    assert error.value.message == line


def write_and_cut(path: Path) -> Path:
    write(path, MadeUpJob(steps=3).messages())
    path.write_bytes(path.read_bytes()[:-200])
    return path


def test_a_sweep_on_the_command_line(file: Path, one_size: Path, tmp_path: Path) -> None:
    path = tmp_path / "wire.json"
    path.write_bytes(write_wire(wire(compute_beside=None)))
    found = whatif_json(str(file), "--cap", "1", "--wire", str(path))
    assert "wire.json" in found["scenarios"][0]["assumes"]
    with pytest.raises(DdpwatchError, match="only one bucket size"):
        whatif(str(one_size), "--cap", "1")
    assert whatif_json(str(one_size), "--cap", "1", "--wire", str(path))["scenarios"]
    with pytest.raises(DdpwatchError, match="No such file"):
        whatif(str(file), "--wire", str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    "options",
    [
        ("--cap", "0"),
        ("--cap", "1,x"),
        ("--hook", "fp8"),
        ("--link", "-1"),
        ("--ranks", "1"),
        ("--cap", "nan"),
        ("--link", "1"),
        ("--ranks", "2.5"),
        ("--accumulate", "2.5"),
    ],
)
def test_values_that_make_no_sense(file: Path, options: tuple[str, str]) -> None:
    with pytest.raises(DdpwatchError) as error:
        whatif(str(file), *options)
    assert error.value.hint


@pytest.mark.parametrize(
    ("source", "reason"), [("none.mcap", "No such file"), ("no/such", "No such file"), ("nobody", "no live run")]
)
def test_a_source_that_is_not_there(source: str, reason: str, run_directory: Path) -> None:
    with pytest.raises(DdpwatchError, match=reason):
        whatif(source)


def test_two_options_also_count_together() -> None:
    changes = WhatIfOptions(caps="1,5", links="2", bucket_view=True).changes()
    assert len(changes) == 2 + 1 + 1 + 2 + 2 + 1


def test_each_first_cap_counts_with_each_cap() -> None:
    changes = WhatIfOptions(caps="5,10", first_cap="1,2").changes()
    assert [(change.first_mib, change.cap_mib) for change in changes] == [(1, 5), (1, 10), (2, 5), (2, 10)]
    assert [change.first_mib for change in WhatIfOptions(first_cap="1,2").changes()] == [1, 2]


def test_a_value_that_is_given_twice_counts_once() -> None:
    assert len(WhatIfOptions(caps="5,5.0,1", hooks="fp16,FP16", links="2,2,1").changes()) == 4 + 2 + 2 + 1


class _Snapshot:
    """A source that gives all at once, then a status, as a collector does."""

    over, unreadable, missed, closed, synced, retained = False, 0, 0, False, True, -1

    def __init__(self, messages: Iterator[Message]) -> None:
        self._frames: list[Frame] = [(message, Envelope(0, 0, b"")) for message in (*messages, status())]

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        frames, self._frames = self._frames[:limit], self._frames[limit:]
        return frames

    def close(self) -> None:
        self.closed = True


def test_a_live_run() -> None:
    source = _Snapshot(MadeUpJob(backend="gloo").messages())
    assert recorded_live(source).measured_ns == MadeUpJob().recorded().measured_ns
    assert source.closed


def test_the_sizes_of_a_sweep() -> None:
    sizes = sizes_up_to(LARGEST_BYTES)
    assert (sizes[0], sizes[-1]) == (SMALLEST_BYTES, LARGEST_BYTES)
    assert all(size % 4 == 0 for size in sizes)
    assert all(1.3 < b / a < 3 for a, b in pairwise(sizes))


def test_a_sweep_needs_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("RANK", raising=False)
    assert main(["-o", "wire.json"]) == 2
    assert "start it with torchrun" in capsys.readouterr().err
