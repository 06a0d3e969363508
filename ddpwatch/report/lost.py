"""Where a run's time went, for every kind of text: a sentence, a bar, a table of the accounts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ddpwatch.analysis.diagnosis.incident import LOST
from ddpwatch.report.format import duration, number, percent
from ddpwatch.report.tables import Table

Account = dict[str, Any]

MOST_NAMED = 5  # accounts in the sentence
MOST_ROWS = 16
LEAST_SHARE = 0.0005  # below, a share is shown as 0.0 %
PARTS = {  # of the bar, by account
    "compute": "compute", "waiting": "waiting", "jitter": "waiting", "transfer": "communication",
    "exposed": "communication", "input": "input", "pause": "pauses", "startup": "other", "other": "other",
}  # fmt: skip
CELLS = {"compute": "█", "waiting": "▓", "communication": "▒", "input": "░", "pauses": "▚", "other": "·"}
_NAMES = {
    "jitter": "waiting for whichever rank was last", "transfer": "exposed transfer",
    "exposed": "exposed communication", "input": "input", "startup": "warm-up",
}  # fmt: skip
_PAUSES = {"gc": "garbage collection", "checkpoint": "checkpoints"}
_OTHER = {
    "between": "between optimizer and forward", "unwatched": "longer in unwatched steps", "unseen": "not seen",
    "aborted": "aborted steps",
}  # fmt: skip


def lost_sentence(report: dict[str, Any]) -> str:
    """What share of the run was lost, and to what; "" where no step shows it."""
    lost = report["lost"]
    if lost["lost_share"] is None:
        return ""
    ranks = sum(row["steps"] > 0 for row in report["ranks"])
    run = f"{ranks} rank{'s' if ranks > 1 else ''} × {duration(lost['rank_seconds'] / max(1, ranks))}"
    found = [row for row in lost["accounts"] if row["account"] in LOST and row["share"] >= LEAST_SHARE]
    if not found:
        return f"nothing of {run} lost"
    parts = [f"{percent(row['share'], 1)} {_name(row)}{_where(row, report)}" for row in found[:MOST_NAMED]]
    if rest := sum(row["share"] for row in found[MOST_NAMED:]):
        parts.append(f"{percent(rest, 1)} more")
    return f"{percent(lost['lost_share'], 1)} of {run} lost: {', '.join(parts)}"


def _where(row: Account, report: dict[str, Any]) -> str:
    """The phase in which a rank was slow, and from which layer on."""
    if row["rank"] is None or not row["phase"]:
        return ""
    blamed = (
        incident["param"]
        for incident in report["incidents"]
        if incident["ranks"] == [row["rank"]] and incident["phase"] == row["phase"] and incident["param"]
    )
    layer = next(blamed, None)
    return f" ({row['phase']})" if layer is None else f" ({row['phase']}, from {layer} on)"


def account_name(row: Account) -> str:
    """An account in a table: what the time went into, and in which phase."""
    return f"{_name(row)} ({row['phase']})" if row["rank"] is not None and row["phase"] else _name(row)


def _name(row: Account) -> str:
    account: str = row["account"]
    phase: str = row["phase"] or ""
    if account == "waiting":
        return f"waiting for rank {row['rank']}"
    if account == "pause":
        return _PAUSES.get(phase, phase)
    if account == "other":
        return _OTHER.get(phase, "the rest")
    return phase if account == "compute" else _NAMES.get(account, account)


def account_table(report: dict[str, Any]) -> Table:
    """The accounts, largest first."""
    accounts = report["lost"]["accounts"]
    rows = [[account_name(row), number(row["seconds"]), percent(row["share"], 1)] for row in accounts[:MOST_ROWS]]
    if rest := accounts[MOST_ROWS:]:
        seconds, share = (sum(row[key] for row in rest) for key in ("seconds", "share"))
        rows.append([f"{len(rest)} more", number(seconds), percent(share, 1)])
    return Table("Where the time went", ["account", "rank-s", "share"], rows)


def bar_parts(accounts: Sequence[Account]) -> dict[str, float]:
    """The shares of the bar, in its order, without those that are too small to show."""
    shares = dict.fromkeys(CELLS, 0.0)
    for row in accounts:
        shares[PARTS.get(row["account"], "other")] += row["share"] or 0.0
    return {part: share for part, share in shares.items() if share >= LEAST_SHARE}


def bar(accounts: Sequence[Account], width: int) -> list[str]:
    """The accounts as a bar of that many characters, and its legend."""
    shares = bar_parts(accounts)
    if not shares:
        return []
    cells, done, covered = "", 0.0, sum(shares.values())
    for part, share in shares.items():
        done += share
        cells += CELLS[part] * (round(width * done / covered) - len(cells))
    return [cells, "  ".join(f"{CELLS[part]} {part} {percent(share, 1)}" for part, share in shares.items())]
