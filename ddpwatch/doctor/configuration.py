"""What the user has configured: environment variables, the dashboard's settings, the directory for rank files."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path

from ddpwatch.common.peak_flops import PEAK, parse_peak
from ddpwatch.doctor.check import Check, Section
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.recording.limits import limits_from_environment
from ddpwatch.sampling.lease import parse_detail
from ddpwatch.sampling.stack_order import EXPLAIN, FIRST_INCIDENT
from ddpwatch.tui.settings import load_settings, settings_path

LIMITS = ("DDPWATCH_RECORD_MAX_SIZE", "DDPWATCH_RECORD_PART_SIZE", "DDPWATCH_RECORD_PART_AGE", "DDPWATCH_RECORD_EVERY")
SECRET = "DDPWATCH_ANONYMIZE_KEY"
INTERNAL = ("DDPWATCH_RUN", "DDPWATCH_RECORD", "DDPWATCH_STARTUP")  # `ddpwatch run` sets them for its job
VARIABLES = (
    "DDPWATCH", "DDPWATCH_CONFIG", "DDPWATCH_DETAIL", "DDPWATCH_DIR", EXPLAIN, "DDPWATCH_IFNAME",
    "DDPWATCH_ON_INCIDENT", PEAK, "DDPWATCH_PORTS", "DDPWATCH_RECORD_DIR", "DDPWATCH_SECRET_FILE", "DDPWATCH_SSH",
    SECRET, *LIMITS, *INTERNAL,
)  # fmt: skip
_section = Section("configuration")


def checks() -> Iterator[Check]:
    """Yields every ``DDPWATCH…`` variable that is set, the settings, and where rank files go."""
    found = [name for name in sorted(os.environ) if name.startswith("DDPWATCH")]
    for name in found:
        yield variable(name, os.environ[name])
    if not found:
        yield _section.ok("variable", "none of ddpwatch's is set")
    yield settings(settings_path())
    if folder := os.environ.get("DDPWATCH_RECORD_DIR"):
        yield record_directory(Path(folder))


def variable(name: str, value: str) -> Check:
    """Returns whether a variable is known, and its value valid."""
    setting = name if name == SECRET else f"{name}={value}"
    if name not in VARIABLES:
        near = difflib.get_close_matches(name, VARIABLES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(VARIABLES[: -len(INTERNAL)])}"
        return _section.warn("variable", f"{setting}: ddpwatch has no such variable, and ignores it", hint)
    if name in INTERNAL:
        text = f"{setting}, as `ddpwatch run` sets it for its job"
        return _section.none("variable", text, "unset it in a shell of your own: it is meant for one job")
    if trouble := _trouble(name, value):
        text, hint = trouble
        return _section.warn("variable", f"{setting}: {text}", hint)
    return _section.ok("variable", f"{setting}{' is set' if name == SECRET else ''}")


def _trouble(name: str, value: str) -> tuple[str, str] | None:
    """Returns what is wrong with the value, and what to do; None if it is valid."""
    if name == "DDPWATCH" and value == "0":
        return "ddpwatch is off, and jobs run unwatched", "unset it to watch jobs"
    if name == "DDPWATCH" and value.lower() in ("off", "no", "false", "disabled"):
        return "jobs are watched all the same", "only DDPWATCH=0 turns ddpwatch off"
    if name == EXPLAIN and value != FIRST_INCIDENT:
        return "nothing is explained by itself", f"the only value is {FIRST_INCIDENT}"
    if name == "DDPWATCH_DETAIL":
        return _trouble_of_detail(value)
    if name == PEAK and not parse_peak(value):
        return "no number of TFLOP/s above 0: it is ignored", "give what a device of the job does at best, e.g. 989"
    if name in LIMITS:
        return _trouble_of_limit(name, value)
    return None


def _trouble_of_detail(value: str) -> tuple[str, str] | None:
    try:
        parse_detail(value)
    except UsageError as error:
        return "no detail: it is ignored", error.hint
    return None


def _trouble_of_limit(name: str, value: str) -> tuple[str, str] | None:
    try:
        limits_from_environment({name: value})
    except DdpwatchError as error:
        return f"{error.message}, so nothing is recorded", error.hint
    return None


def settings(path: Path) -> Check:
    """Returns whether the dashboard's settings can be read."""
    try:
        load_settings(path)
    except UsageError as error:
        return _section.warn("settings", f"{error.message}: no dashboard opens", "correct it; docs/guide.md lists them")
    return _section.ok("settings", str(path) if path.exists() else f"the defaults: there is no {path}")


def record_directory(path: Path) -> Check:
    """Returns whether ranks can write their files into ``DDPWATCH_RECORD_DIR``. They create it if it is missing."""
    name = "rank files"
    place = next((above for above in (path, *path.parents) if above.exists()), path)
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK):
        what = f"{place} is not a directory that you can write to"
        return _section.warn(name, f"{what}: ranks would go on trying", "make it writable, or set DDPWATCH_RECORD_DIR")
    return _section.ok(name, f"each rank writes its own into {path}; there is no live view of such jobs")
