"""What the parts of the GPU benchmark share: a table on stdout, a JSON file, and a plain line where there is no GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from ddpwatch.report.format import table

RESULTS = Path(__file__).parent / "results"
NO_GPU = "not run: no CUDA device"
Row = dict[str, "str | float | int | bool | None"]
Rows = list[Row]


def command_line(name: str, doc: str | None) -> argparse.ArgumentParser:
    """The options of a part."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json", help="for the results (%(default)s)")
    return parser


def run(
    name: str,
    doc: str | None,
    on_gpu: Callable[[], Rows],
    simulated: Callable[[], Rows] | str = "",
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a part, and returns the exit code.

    Args:
        name: Of the part, and of its file.
        doc: What ``--help`` says.
        on_gpu: Measures on a GPU; called only where there is one.
        simulated: What can be said without, or why nothing can.
        argv: The command line, if not this process's.
    """
    out = command_line(name, doc).parse_args(argv).out
    made_up = [] if isinstance(simulated, str) else simulated()
    if made_up:
        show("on the simulated GPU", made_up)
    elif simulated:
        print(f"not simulated: {simulated}")
    ran = torch.cuda.is_available()
    rows = on_gpu() if ran else []
    if ran:
        show(f"on {torch.cuda.get_device_name()}", rows)
    else:
        print(NO_GPU)
    write(out, name, ran, rows, made_up)
    return 0


def show(where: str, rows: Rows) -> None:
    """Prints a table."""
    print(f"{where}:")
    print("\n".join(table(list(rows[0]), [[cell(value) for value in row.values()] for row in rows])))


def cell(value: object) -> str:
    """A value as text; "–" if it was not measured."""
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def write(out: Path, name: str, ran: bool, rows: Rows, simulated: Rows) -> None:
    """Writes the results."""
    device = torch.cuda.get_device_name() if ran else None
    about = {"part": name, "ran": ran, "why": "" if ran else NO_GPU, "device": device, "torch": torch.__version__}
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({**about, "rows": rows, "simulated": simulated}, indent=1) + "\n")
