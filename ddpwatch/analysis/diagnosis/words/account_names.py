"""What accounts and phases are called: the same in the dashboard, plain lines and reports."""

from __future__ import annotations

_NAMES = {
    "jitter": "waiting for a varying last rank", "transfer": "exposed transfer",
    "exposed": "exposed: waiting or transfer", "startup": "warm-up",
}  # fmt: skip
_OTHER = {
    "between": "gap", "unwatched": "longer in steps not watched", "unseen": "not seen",
    "aborted": "aborted steps", "profiled": "steps under torch's profiler", "pause": "pauses",
}  # fmt: skip

_PAUSES = {"gc": "garbage collection", "checkpoint": "checkpoints", "hang": "hangs"}
_PHASES = {"between": "gap", "exposed_comm": "exposed", "other": "rest"}


def phase_name(phase: str) -> str:
    """Returns a phase of a step, as the heading of a column or a row."""
    return _PHASES.get(phase, phase)


def timed_by(timing_source: str) -> str:
    """Returns what the ranks' stamps come from."""
    return timing_source.replace("host", "CPU clock").replace("cuda", "CUDA")


def rank_seconds(timing_source: str | None) -> str:
    """Returns what rank-time is counted in, by what the ranks' stamps come from."""
    return "GPU-seconds" if (timing_source or "host").startswith("cuda") else "process-seconds"


def account_name(account: str, rank: int | None, phase: str) -> str:
    """Returns what the time of an account went into, without the phase in which a rank was slow."""
    match account:
        case "waiting":
            return f"waiting for rank {rank}"
        case "pause":
            return _PAUSES.get(phase, phase)
        case "other":
            return _OTHER.get(phase, "rest")
        case "compute":
            return phase or account
    return _NAMES.get(account, account)


def account_names(account: str, rank: int | None, phase: str) -> list[str]:
    """Returns the same, in full and ever shorter."""
    full = account_in_phase(account, rank, phase)
    brief = {"jitter": "varying last rank", "exposed": "exposed", "unwatched": "steps not watched"}
    short = brief.get(phase if account == "other" else account, full)
    return [full, account_name(account, rank, phase), short.removeprefix("waiting for ").partition(" (")[0]]


def account_in_phase(account: str, rank: int | None, phase: str) -> str:
    """Returns the same, followed by that phase."""
    name = account_name(account, rank, phase)
    return f"{name} ({phase_name(phase)})" if rank is not None and phase else name
