"""Writes a recording in another format, for ``ddpwatch export``."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import msgspec

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.export.anonymize import anonymized
from ddpwatch.export.chrome_trace import align, write_chrome
from ddpwatch.export.tables import TABLES, Frames, TableRow, columns, rows
from ddpwatch.export.trace_size import TraceSize
from ddpwatch.recording.overwrite_guard import check_output
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.selection import Selection
from ddpwatch.wire.messages import ClockExchange, type_name

FORMATS = ("chrome", "csv", "parquet", "ndjson")
OF_SUFFIX = {  # of the output's name
    "": "chrome", ".json": "chrome", ".ndjson": "ndjson", ".jsonl": "ndjson", ".csv": "csv", ".parquet": "parquet",
}  # fmt: skip


def format_for(out: Path) -> str:
    """Returns the format that the output's name asks for; `chrome` if it has no ending.

    Raises:
        UsageError: It asks for another one, or is the name of one table, and the format has several.
    """
    form = OF_SUFFIX.get(out.suffix.lower())
    if form is None:
        hint = "end it in .json (a Perfetto trace) or .ndjson (frames), or give --format chrome, ndjson, csv or parquet"
        raise UsageError(f"{out}: export does not write {out.suffix} files", hint)
    if form in ("csv", "parquet") and not out.is_dir():
        tables = f"{form} is a directory of tables, and {out} looks like one file"
        raise UsageError(tables, f"give --format {form} -o {out.with_suffix('')}")
    return form


def export(recording: Recording, form: str, out: Path, selection: Selection, anonymize: bool = False) -> list[str]:
    """Writes the selected part of a recording.

    Args:
        recording: The source.
        form: One of `FORMATS`. ``chrome`` and ``ndjson`` write one file, ``csv`` and ``parquet`` a directory with one
            file per table (see `ddpwatch.export.tables.TABLES`).
        out: The file or directory to write.
        selection: Which steps and ranks.
        anonymize: Whether to replace all names (see `ddpwatch.export.anonymize`).

    Returns:
        A line about each written file.

    Raises:
        UsageError: An unknown format, nothing to export, a figure that the format cannot hold, a trace that nothing
            would open, or the output cannot be written or is a recording itself.
        DdpwatchError: ``parquet`` without pyarrow.
    """

    def frames() -> Frames:
        selected = recording.select(selection)
        return anonymized(selected) if anonymize else selected

    if form not in FORMATS:
        raise UsageError(f"{form!r} is not a format", f"give one of {', '.join(FORMATS)}")
    for file in _files(form, out):
        check_output(file)
    recording.check(selection)
    ranks = None if selection.ranks is None else len(selection.ranks)
    try:
        if form == "chrome":
            return _chrome(recording, selection, frames, out)
        if form == "ndjson":
            return [f"{out}: {_ndjson(frames(), out)} frames"]
        return list(_tables(frames, form, out, ranks))
    except OSError as error:
        raise UsageError(f"{error.filename or out}: {error.strerror}", "give -o a path you can write to") from error


def _files(form: str, out: Path) -> list[Path]:
    """Returns the files that the format writes."""
    return [out] if form in ("chrome", "ndjson") else [out / f"{table}.{form}" for table in TABLES]


def _chrome(recording: Recording, selection: Selection, frames: Callable[[], Frames], out: Path) -> list[str]:
    size, ranks = TraceSize(), None if selection.ranks is None else len(selection.ranks)
    line = align(frames(), ranks, size)
    if size.is_too_large:
        raise size.refusal(recording.steps, selection)
    with out.open("wb") as file:
        count = write_chrome(frames(), line, file, ranks, around=selection.first == 0 and selection.stop is None)
    return [f"{out}: {count} events; open it in https://ui.perfetto.dev"]


def _ndjson(frames: Frames, out: Path) -> int:
    """Writes one JSON object per frame: ``seq``, ``received_ns`` and all fields of the message.

    A ping has a time of that name: ``root_received_ns``.
    """
    count = 0
    with out.open("wb") as file:
        for message, envelope in frames:
            sent = {"type": type_name(message)} | msgspec.structs.asdict(message)
            if isinstance(message, ClockExchange):
                sent["root_received_ns"] = sent.pop("received_ns")
            head = {"seq": envelope.seq, "received_ns": envelope.received_ns}
            file.write(msgspec.json.encode(head | sent) + b"\n")
            count += 1
    return count


def _tables(frames: Callable[[], Frames], form: str, out: Path, ranks: int | None) -> Iterator[str]:
    write = _csv if form == "csv" else _parquet_writer()
    out.mkdir(parents=True, exist_ok=True)
    for (name, kind), file in zip(TABLES.items(), _files(form, out), strict=True):
        count = write(rows(frames(), name, ranks), kind, file)
        yield f"{file}: {count} rows"


def _csv(found: Iterable[TableRow], kind: type[TableRow], path: Path) -> int:
    names = [field.name for field in fields(kind)]
    count = 0
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        for row in found:
            writer.writerow([_cell(getattr(row, name)) for name in names])
            count += 1
    return count


def _cell(value: object) -> object:
    """Keeps a spreadsheet from reading the cell as a formula: names come from other processes."""
    if not isinstance(value, str):
        return value
    text = value.replace("\0", "\N{REPLACEMENT CHARACTER}")  # which Python 3.10 does not write to CSV
    return f"'{text}" if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _parquet_writer() -> Callable[[Iterable[TableRow], type[TableRow], Path], int]:
    try:
        import pyarrow  # type: ignore[import-not-found, import-untyped, unused-ignore]
        import pyarrow.parquet  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError as error:
        raise DdpwatchError(
            "Parquet needs pyarrow, which is not installed", "pip install 'ddpwatch[parquet]'"
        ) from error

    def write(found: Iterable[TableRow], kind: type[TableRow], path: Path) -> int:
        schema = pyarrow.schema([(name, _arrow_type(hint, pyarrow)) for name, hint in get_type_hints(kind).items()])
        count, source = 0, iter(found)
        with pyarrow.parquet.ParquetWriter(str(path), schema, compression="zstd") as writer:
            while batch := list(itertools.islice(source, 20_000)):
                try:
                    table = pyarrow.table(columns(batch, kind), schema=schema)
                except OverflowError as error:
                    raise UsageError(f"{path}: a figure needs more than 64 bits", "export to csv instead") from error
                writer.write_table(table)
                count += len(batch)
        return count

    return write


def _arrow_type(hint: object, pyarrow: Any) -> object:
    """Returns the column's type, from the type hint of the row's field; every column is nullable."""
    text = str(hint)
    if "float" in text:
        return pyarrow.float64()
    if "bool" in text:
        return pyarrow.bool_()
    return pyarrow.int64() if "int" in text else pyarrow.string()
