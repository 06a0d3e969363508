"""The table and the chart of `demo/compare.py`, from made-up results: no job starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import torch

from demo.compare import CHART_WIDTH, MIB, Row, chart, row, state_mib, table
from tests.support.dashboards import ended_recording
from tests.support.frames import bye
from tests.support.sharded import BLOCKS, NBYTES, hsdp_run

DDP = Row("ddp", 500.0, 0.66, 100.0, 41.5, 165.8, 0.83, 3.2435)
FSDP2 = Row("fsdp2", 1000.0, 0.0, 250.0, 123.5, 41.5, None, 3.2435)


def test_memory_is_beside_time() -> None:
    header, rule, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table([DDP, FSDP2])]
    assert header == ["strategy", "step", "overlap", "exposed", "on the wire", "state", "hook order", "loss"]
    assert set("".join(rule)) == {"-"}
    assert rows == [
        ["ddp", "500 ms", "66%", "100 ms", "41.5 MiB", "165.8 MiB", "83% reverse", "3.2435"],
        ["fsdp2", "1000 ms", "0%", "250 ms", "123.5 MiB", "41.5 MiB", "–", "3.2435"],
    ]


def test_bars_are_as_long_as_the_steps() -> None:
    _, ddp, fsdp2 = chart([DDP, FSDP2])
    assert (ddp.count("█"), ddp.count("░")) == (CHART_WIDTH * 2 // 5, CHART_WIDTH // 10)
    assert (fsdp2.count("█"), fsdp2.count("░")) == (CHART_WIDTH * 3 // 4, CHART_WIDTH // 4)


def test_state_is_parameters_gradients_and_what_the_optimizer_keeps() -> None:
    model = torch.nn.Linear(MIB // 4, 1, bias=False)  # 1 MiB
    optimizer = torch.optim.AdamW(model.parameters())
    model.weight.grad = torch.zeros_like(model.weight)
    optimizer.step()
    trainer = SimpleNamespace(model=model, optimizer=optimizer)
    assert round(state_mib(trainer), 3) == 4  # type: ignore[arg-type]


def test_a_recording_of_hsdp_becomes_a_line(tmp_path: Path) -> None:
    file = ended_recording(tmp_path / "hsdp.mcap", [*hsdp_run(6), *(bye(rank) for rank in range(4)), bye()])
    found = row("hsdp", file, loss=1.0, wire_ratio=1.0, state_mib=2.0)
    blocks, root = (
        BLOCKS * NBYTES * 3.5,
        NBYTES / 4 * 2.5,
    )  # two gathers but for the root, a scatter, half for the reduce
    assert (found.step_ms, found.overlap, found.wire_mib, found.reverse) == (100.0, 0.0, (blocks + root) / MIB, None)
    assert found.cells()[4] == "44.5 MiB"
