"""Summaries of recordings, each made once: SQLite keeps them, by the file's path, size and time."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from ddpwatch.analysis.block_means import FEWEST_STEPS
from ddpwatch.analysis.compare import RunSeries, figures_of
from ddpwatch.analysis.history import PastRun
from ddpwatch.analysis.run import Run
from ddpwatch.common.garbage import no_collections
from ddpwatch.common.text import clean
from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.names import parts_of, recordings_in
from ddpwatch.recording.reader import Recording
from ddpwatch.run.state_folder import state_folder
from ddpwatch.version import __version__
from ddpwatch.wire.messages import Hello, run_before
from ddpwatch.wire.transport import Frame

FILE = "history.sqlite"
_TABLE = "CREATE TABLE IF NOT EXISTS summaries (path TEXT PRIMARY KEY, stamp TEXT NOT NULL, summary BLOB NOT NULL)"


def summaries(paths: Iterable[Path], note: Callable[[str], object] = lambda _: None) -> Iterator[PastRun]:
    """Yields summaries of recordings, but for those without a rank. Calls ``note`` with what cannot be read."""
    with contextlib.closing(SummaryCache.open(note)) as cache:
        for path in paths:
            try:
                found = cache.summary(path)
            except (DdpwatchError, OSError) as error:
                note(f"{path}: {error}")
                continue
            if found is not None:
                yield found


def runs_before(path: Path, previous: str) -> tuple[list[PastRun], str]:
    """Returns the runs that a run's job was before, oldest first, and which run before these has no recording.

    Args:
        path: The run's recording. Those of others are beside it.
        previous: The run before it; empty if there is none.
    """
    found: list[PastRun] = []
    if not previous:
        return found, ""
    beside = _by_run(recordings_in(path.absolute().parent))
    with contextlib.closing(SummaryCache.open(lambda _: None)) as cache:
        while (recorded := beside.pop(previous, None)) is not None:
            summary = cache.summary(recorded)
            if summary is None:
                break
            found.insert(0, summary)
            previous = summary.previous
    return found, previous


def _by_run(paths: Iterable[Path]) -> dict[str, Path]:
    """Returns the largest recording of each run."""
    found: list[tuple[int, str, Path]] = []
    for path in paths:
        with contextlib.suppress(DdpwatchError, OSError):
            recording = Recording(path)
            found.append((recording.nbytes, recording.metadata.get("run_id", ""), path))
    return {run: path for _, run, path in sorted(found)}


class SummaryCache:
    """Keeps summaries, of this version of ddpwatch.

    Args:
        database: Where they are.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._database.execute(_TABLE)

    @classmethod
    def open(cls, note: Callable[[str], object]) -> SummaryCache:
        """Opens the user's, or one in memory that is empty, if there is no place for it, or it is damaged."""
        try:
            folder = state_folder("")
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with contextlib.ExitStack() as opened:
                database = opened.enter_context(
                    contextlib.closing(sqlite3.connect(folder / FILE, isolation_level=None))
                )
                found = cls(database)
                opened.pop_all()  # it stays open
                return found
        except (DdpwatchError, OSError, sqlite3.Error) as error:
            note(f"summaries are not kept: {error}")
            return cls(sqlite3.connect(":memory:", isolation_level=None))

    def summary(self, path: Path) -> PastRun | None:
        """Returns what is known of a recording; None of one without a rank.

        Raises:
            DdpwatchError: It cannot be read.
        """
        path, stamp = path.absolute(), stamp_of(path)
        with contextlib.suppress(sqlite3.Error, msgspec.DecodeError):
            query = "SELECT summary FROM summaries WHERE path = ? AND stamp = ?"
            for (content,) in self._database.execute(query, (str(path), stamp)):
                return msgspec.json.decode(content, type=PastRun | None)
        found = summary_of(path)
        with contextlib.suppress(sqlite3.Error):  # another one writes: it is made again the next time
            row = (str(path), stamp, msgspec.json.encode(found))
            self._database.execute("REPLACE INTO summaries VALUES (?, ?, ?)", row)
        return found

    def close(self) -> None:
        """Closes the file."""
        self._database.close()


def stamp_of(path: Path) -> str:
    """Returns what changes with a recording's files, or with ddpwatch."""
    files = sorted(path.rglob("*.mcap")) if path.is_dir() else [path, *parts_of(path)]
    status = [file.stat() for file in files]
    newest_ns = max((one.st_mtime_ns for one in status), default=0)
    return f"{__version__} {sum(one.st_size for one in status)} {newest_ns}"


@no_collections()
def summary_of(path: Path) -> PastRun | None:
    """Reads a recording, and sums it up; None without a rank.

    Raises:
        DdpwatchError: It cannot be read.
    """
    recording, run, series = Recording(path), Run(source=str(path)), RunSeries(path.stem)
    hellos: dict[int, Hello] = {}
    for across in run.steps(_noting(recording, hellos)):
        series.add_step(across)
    if not hellos:
        return None
    hello, figures, incidents = hellos[min(hellos)], figures_of(series), run.incidents()
    return PastRun(
        path=str(path),
        run=clean(hello.run_id),
        started=recording.span_ns[0] / 1e9,
        script=clean(hello.script),
        ranks=hello.world_size,
        device=clean(hello.device_name or hello.device_kind),
        parameters=hello.parameters,
        commit=clean(recording.metadata.get("commit", "")),
        previous=run_before({rank: each.previous for rank, each in hellos.items()}),
        steps=figures.steps,
        step_ms=(figures.step_ms_p50 or None) if figures.steps >= FEWEST_STEPS else None,
        phases_ms=figures.phases_ms_p50,
        lost=run.lost().lost_share,
        time=run.time(),
        throughput=run.throughput.figures(run.estimate().step_ns),
        worst=clean(incidents[0].message) if incidents else "",
    )


def _noting(recording: Recording, hellos: dict[int, Hello]) -> Iterator[Frame]:
    """Yields the frames; notes who the ranks are."""
    for message, envelope in recording:
        if isinstance(message, Hello):
            hellos[message.rank] = message
        yield message, envelope
