"""Prints what each part of the GPU benchmark finds: a table, a JSON file, or a plain line where there is no GPU."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from ddpwatch.common.text import table

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
    on_gpu: Callable[[], Iterable[Row]],
    simulated: Callable[[], Iterable[Row]] | str = "",
    argv: Sequence[str] | None = None,
) -> int:
    """Runs a part, writes its results row by row, and returns the exit code.

    Args:
        name: Of the part, and of its file.
        doc: What ``--help`` says.
        on_gpu: Measures on a GPU; called only where there is one.
        simulated: Where there is none, finds what can be said without, or says why nothing can.
        argv: The command line, if not this process's.
    """
    out = command_line(name, doc).parse_args(argv).out
    ran = torch.cuda.is_available()
    measure = on_gpu if ran else simulated if callable(simulated) else list
    rows: Rows = []
    write(out, name, ran, rows, complete=False)
    for row in measure():
        rows.append(row)
        write(out, name, ran, rows, complete=False)
    write(out, name, ran, rows)
    if not ran:
        print(NO_GPU)
    if isinstance(simulated, str) and not ran:
        print(f"not simulated: {simulated}")
    elif rows:
        show(f"on {torch.cuda.get_device_name()}" if ran else "without a GPU", rows)
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


def write(out: Path, name: str, ran: bool, rows: Rows, complete: bool = True) -> None:
    """Writes the results.

    Args:
        out: The file.
        name: Of the part.
        ran: Whether that was on a GPU.
        rows: What was found.
        complete: Whether nothing more will come.
    """
    device = torch.cuda.get_device_name() if ran else None
    about = {"part": name, "ran": ran, "why": "" if ran else NO_GPU, "device": device, "torch": torch.__version__}
    found = {"rows": rows, "simulated": []} if ran else {"rows": [], "simulated": rows}
    save(out, {**about, "complete": complete, **found})


def save(out: Path, found: dict[str, Any]) -> None:
    """Replaces a JSON file as a whole: who is cut leaves the one from before."""
    out.parent.mkdir(parents=True, exist_ok=True)
    new = out.with_suffix(".new")
    new.write_text(json.dumps(found, indent=1) + "\n")
    new.replace(out)
