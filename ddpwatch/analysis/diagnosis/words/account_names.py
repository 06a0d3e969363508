"""What the accounts are called: the same in the dashboard, plain lines and reports."""

from __future__ import annotations

_NAMES = {
    "jitter": "waiting for whichever rank was last", "transfer": "exposed transfer",
    "exposed": "exposed communication", "startup": "warm-up",
}  # fmt: skip
_OTHER = {
    "between": "between optimizer and forward", "unwatched": "longer in unwatched steps", "unseen": "not seen",
    "aborted": "aborted steps",
}  # fmt: skip


def account_name(account: str, rank: int | None, phase: str) -> str:
    """Returns what the time of an account went into, without the phase in which a rank was slow."""
    match account:
        case "waiting":
            return f"waiting for rank {rank}"
        case "pause":
            return {"gc": "garbage collection", "checkpoint": "checkpoints"}.get(phase, phase)
        case "other":
            return _OTHER.get(phase, "the rest")
        case "compute":
            return phase or account
    return _NAMES.get(account, account)


def account_in_phase(account: str, rank: int | None, phase: str) -> str:
    """Returns the same, followed by that phase."""
    name = account_name(account, rank, phase)
    return f"{name} ({phase})" if rank is not None and phase else name
