"""Where a run's time went, for every kind of text: a sentence, a bar, a table of the accounts."""

from __future__ import annotations

from ddpwatch.analysis.diagnosis.accounts.accounts import PAUSED, STUCK
from ddpwatch.analysis.diagnosis.incident import Account, LostTime
from ddpwatch.analysis.diagnosis.incident_json import LostFigures
from ddpwatch.analysis.diagnosis.words.account_names import rank_seconds
from ddpwatch.analysis.diagnosis.words.lost_time import account_text, lost_text, shown_accounts
from ddpwatch.analysis.figures import Report
from ddpwatch.common.text import number, percent, run_size
from ddpwatch.common.units import NS_PER_S
from ddpwatch.report.tables import Table

MOST_NAMED = 5  # accounts in the sentence
MOST_ROWS = 16
PARTS: dict[tuple[str, str], str] = {  # of the bar, by account, and its phase where that matters
    ("compute", ""): "compute", ("waiting", ""): "waiting", ("jitter", ""): "waiting", ("transfer", ""): "transfer",
    ("exposed", ""): "transfer", ("input", ""): "input", ("pause", ""): "pauses", PAUSED: "pauses", STUCK: "hangs",
}  # fmt: skip
CELLS = {"compute": "█", "waiting": "▓", "transfer": "▒", "input": "░", "pauses": "▚", "hangs": "▞", "other": "·"}


def lost_time(lost: LostFigures) -> LostTime:
    """Returns the accounts that the figures are of."""
    total = round(lost.rank_seconds * NS_PER_S)
    rows = [(row.account, row.rank, row.phase or "", round((row.share or 0.0) * total)) for row in lost.accounts]
    return LostTime(total, tuple(Account(*row) for row in rows))


def lost_sentence(report: Report) -> str:
    """Returns what share of the run was lost, and to what; "" where no step shows it."""
    lost = report.lost
    ranks = sum(row.steps > 0 for row in report.ranks) or len(report.ranks)  # one may have died before its first step

    def named(account: Account) -> str:
        return _from_layer(account, report)

    return lost_text(lost_time(lost), MOST_NAMED, run_size(ranks, lost.rank_seconds), named)


def _from_layer(account: Account, report: Report) -> str:
    """Returns an account with the layer from which on the rank was slow."""
    blamed = (
        incident.param
        for incident in report.incidents
        if incident.ranks == [account.rank] and incident.phase == account.phase and incident.param
    )
    layer = next(blamed, None) if account.rank is not None and account.phase else None
    text = account_text(account)
    return text if layer is None else text.removesuffix(")") + f", from {layer} on)"


def account_table(report: Report) -> Table:
    """Returns the accounts, largest first, without those that are too small to show."""
    found = sorted(shown_accounts(lost_time(report.lost)), key=lambda one: -one[0].ns)
    rows = [[account_text(one), _seconds(one.ns), percent(share, 1)] for one, share in found[:MOST_ROWS]]
    if rest := found[MOST_ROWS:]:
        ns = sum(account.ns for account, _ in rest)
        rows.append([f"{len(rest)} more", _seconds(ns), percent(sum(share for _, share in rest), 1)])
    return Table("Where the time went", ["account", rank_seconds(report.run.timing_source), "share"], rows)


def _seconds(ns: float) -> str:
    """Returns what a row took; of little, one digit more."""
    return number(ns / NS_PER_S, 1 if ns >= NS_PER_S else 2)


def bar_parts(lost: LostFigures) -> dict[str, float]:
    """Returns the shares of the bar, in its order, without those that are too small to show."""
    shares = dict.fromkeys(CELLS, 0.0)
    for account, share in shown_accounts(lost_time(lost)):
        part = PARTS.get((account.name, account.phase)) or PARTS.get((account.name, ""), "other")
        shares[part] += share
    return {part: share for part, share in shares.items() if share}


def bar(lost: LostFigures, width: int) -> list[str]:
    """Returns the accounts as a bar of that many characters, and its legend."""
    shares = bar_parts(lost)
    if not shares:
        return []
    cells, done, covered = "", 0.0, sum(shares.values())
    for part, share in shares.items():
        done += share
        cells += CELLS[part] * (round(width * done / covered) - len(cells))
    return [cells, "  ".join(f"{CELLS[part]} {part} {percent(share, 1)}" for part, share in shares.items())]
