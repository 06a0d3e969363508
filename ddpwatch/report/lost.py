"""Where a run's time went, for every kind of text: a sentence, a bar, a table of the accounts."""

from __future__ import annotations

from collections.abc import Sequence

from ddpwatch.analysis.compare import AccountChange
from ddpwatch.analysis.diagnosis.incident import LEAST_SHOWN, LOST
from ddpwatch.analysis.diagnosis.incident_json import AccountFigures
from ddpwatch.analysis.diagnosis.words.account_names import account_in_phase, rank_seconds
from ddpwatch.analysis.figures import Report
from ddpwatch.common.text import adding_up, number, percent, run_size
from ddpwatch.report.tables import Table

MOST_NAMED = 5  # accounts in the sentence
MOST_ROWS = 16
PARTS = {  # of the bar, by account
    "compute": "compute", "waiting": "waiting", "jitter": "waiting", "transfer": "transfer",
    "exposed": "transfer", "input": "input", "pause": "pauses", "startup": "other", "other": "other",
}  # fmt: skip
CELLS = {"compute": "█", "waiting": "▓", "transfer": "▒", "input": "░", "pauses": "▚", "other": "·"}


def lost_sentence(report: Report) -> str:
    """Returns what share of the run was lost, and to what; "" where no step shows it."""
    lost = report.lost
    if lost.lost_share is None:
        return ""
    ranks = sum(row.steps > 0 for row in report.ranks)
    run = run_size(ranks, lost.rank_seconds)
    found = [row for row in lost.accounts if row.account in LOST and (row.share or 0.0) >= LEAST_SHOWN]
    if not found:
        return f"nothing of {run} lost"
    named = {_named(row, report): 100 * (row.share or 0.0) for row in found[:MOST_NAMED]}
    if rest := 100 * lost.lost_share - sum(named.values()):
        named["more"] = rest
    texts = adding_up(100 * lost.lost_share, list(named.values()))
    parts = [f"{text} % {name}" for name, text in zip(named, texts, strict=True) if name != "more" or float(text)]
    return f"{percent(lost.lost_share, 1)} of {run} lost: {', '.join(parts)}"


def _named(row: AccountFigures, report: Report) -> str:
    """Returns an account with the layer from which on the rank was slow."""
    blamed = (
        incident.param
        for incident in report.incidents
        if incident.ranks == [row.rank] and incident.phase == row.phase and incident.param
    )
    layer = next(blamed, None) if row.rank is not None and row.phase else None
    return account_name(row) if layer is None else account_name(row).removesuffix(")") + f", from {layer} on)"


def _shares(accounts: Sequence[AccountFigures]) -> float:
    return sum(row.share or 0.0 for row in accounts)


def account_name(row: AccountFigures | AccountChange) -> str:
    """Returns the name of an account in a table: what the time went into, and in which phase."""
    return account_in_phase(row.account, row.rank, row.phase or "")


def account_table(report: Report) -> Table:
    """Returns the accounts, largest first, without those that are too small to show."""
    accounts = [row for row in report.lost.accounts if (row.share or 0.0) >= LEAST_SHOWN]
    rows = [[account_name(row), number(row.seconds), percent(row.share, 1)] for row in accounts[:MOST_ROWS]]
    if rest := accounts[MOST_ROWS:]:
        rows.append([f"{len(rest)} more", number(sum(row.seconds for row in rest)), percent(_shares(rest), 1)])
    return Table("Where the time went", ["account", rank_seconds(report.run.timing_source), "share"], rows)


def bar_parts(accounts: Sequence[AccountFigures]) -> dict[str, float]:
    """Returns the shares of the bar, in its order, without those that are too small to show."""
    shares = dict.fromkeys(CELLS, 0.0)
    for row in accounts:
        shares[PARTS.get(row.account, "other")] += row.share or 0.0
    return {part: share for part, share in shares.items() if share >= LEAST_SHOWN}


def bar(accounts: Sequence[AccountFigures], width: int) -> list[str]:
    """Returns the accounts as a bar of that many characters, and its legend."""
    shares = bar_parts(accounts)
    if not shares:
        return []
    cells, done, covered = "", 0.0, sum(shares.values())
    for part, share in shares.items():
        done += share
        cells += CELLS[part] * (round(width * done / covered) - len(cells))
    return [cells, "  ".join(f"{CELLS[part]} {part} {percent(share, 1)}" for part, share in shares.items())]
