"""What a feed posts to the dashboard."""

from __future__ import annotations

from dataclasses import dataclass

from ddpwatch.analysis.diagnosis.words.why_unwatched import NOT_KNOWN, Why
from ddpwatch.wire.transport import Frame

BATCH = 400  # frames: some 10 ms of work, so that no key waits longer


@dataclass(frozen=True, slots=True)
class Waiting:
    """There is no run yet. If ddpwatch launched a job that should start one, ``job`` is its command.

    ``why`` says how far that job has come.
    """

    directory: str
    job: str = ""
    why: Why = NOT_KNOWN


@dataclass(frozen=True, slots=True)
class Attached:
    """Frames of a run follow; everything known of another run is void.

    Attributes:
        several: There are several live runs to choose from.
        ended_s: When the run ended (seconds since the Unix epoch), if the frames come from its recording.
    """

    name: str
    several: bool = False
    ended_s: float | None = None


@dataclass(frozen=True, slots=True)
class Frames:
    """The next frames. The receiver calls `ThreadFeed.taken` once it has applied them."""

    frames: list[Frame]


@dataclass(frozen=True, slots=True)
class Output:
    """New lines of the job's output, and its unfinished last line (see `ddpwatch.tui.feed.output_tail`)."""

    lines: list[str]
    unfinished: str = ""


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why no frames come at present, or none will any more; empty when they come again."""

    text: str


@dataclass(frozen=True, slots=True)
class Note:
    """What the user has to know of the frames."""

    text: str


@dataclass(frozen=True, slots=True)
class Over:
    """No more frames will come. ``note`` is for the user."""

    note: str = ""


@dataclass(frozen=True, slots=True)
class Rewound:
    """The replay jumps: frames of the same recording follow, from an earlier or a much later position."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """The replay has reached the position asked for, and this step if one was asked for."""

    step: int | None = None


@dataclass(frozen=True, slots=True)
class Missed:
    """The replay cannot go to the position asked for, or the run cannot do what was asked."""

    why: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The feed broke."""

    error: Exception


FeedEvent = Waiting | Attached | Frames | Output | Trouble | Note | Over | Rewound | Arrived | Missed | Failed
