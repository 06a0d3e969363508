"""Live runs, and what dead ones have left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpwatch.common.text import size
from ddpwatch.doctor.check import Check, Section
from ddpwatch.run import rundir

_section = Section("runs")


def checks() -> Iterator[Check]:
    """Asks the run directory; as with `ddpwatch ls`, files of dead runs are removed."""
    folder = rundir.directory()
    before = len(list(folder.glob("*.json")))
    live, elsewhere = rundir.live_runs(), rundir.runs_elsewhere()
    removed = before - len(list(folder.glob("*.json")))
    yield runs([info.run_id for info in live], [f"{info.run_id} on {info.host}" for info in elsewhere])
    yield leftovers(removed, orphans(folder))
    kept = [path for pattern in ("*.log", "*.mcap", "*.out") for path in folder.glob(pattern)]
    yield _section.ok("kept", f"{len(kept)} logs and recordings of ended runs, {size(sum(map(_size, kept)))}")


def runs(live: Sequence[str], elsewhere: Sequence[str]) -> Check:
    """Returns how many runs there are."""
    text = f"{len(live)}" + (f" ({_some(live)})" if live else "")
    if elsewhere:
        hint = "log in there to attach; files of other hosts and earlier boots are removed after 30 days"
        return _section.none("live", f"{text}; of other hosts or boots: {len(elsewhere)} ({_some(elsewhere)})", hint)
    return _section.ok("live", text)


def leftovers(removed: int, sockets: Sequence[Path]) -> Check:
    """Returns files of runs that are no longer live."""
    if sockets:
        return _section.warn("leftovers", f"sockets of no run: {_some([path.name for path in sockets])}", "remove them")
    return _section.ok("leftovers", f"removed the files of {removed} dead runs" if removed else "none")


def orphans(folder: Path) -> list[Path]:
    """Returns sockets without a run's file."""
    found = [path for pattern in ("*.in", "*.pub") for path in folder.glob(pattern)]
    return sorted(path for path in found if not path.with_suffix(".json").exists())


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0
