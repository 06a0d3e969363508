"""Sentences on where a run's time went, and the shares in them.

Every sentence, table and bar shows the same shares, and these add up.
"""

from __future__ import annotations

from collections.abc import Callable

from ddpwatch.analysis.diagnosis.incident import LOST, Account, LostTime
from ddpwatch.analysis.diagnosis.words.account_names import account_in_phase
from ddpwatch.common.text import adding_up, percent
from ddpwatch.common.units import NS_PER_S

MOST_NAMED = 3  # accounts in a sentence
LEAST_SHARE = 0.0005  # less is shown as 0


def seconds_text(ns: float) -> str:
    """Returns rank-time in seconds, with three digits."""
    value = ns / NS_PER_S
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.1f}" if value >= 9.95 else f"{value:.2f}"


def share_text(share: float | None) -> str:
    """Returns a share in percent, with one decimal."""
    return percent(share, 1)


def account_text(account: Account) -> str:
    """Returns what the time of an account went into."""
    return account_in_phase(account.name, account.rank, account.phase)


def shown_accounts(lost: LostTime) -> list[tuple[Account, float]]:
    """Returns the lost accounts, then the others, each largest first, with the shares of the run that texts show.

    These are rounded so that the lost ones add up to what is lost, and all to 100 %. What rounds to 0 is left out.
    """
    if lost.share is None:
        return []
    others = [account for account in lost.accounts if account.name not in LOST]
    found: list[tuple[Account, float]] = []
    share = round(100 * lost.share, 1)
    for total, accounts in ((share, lost_accounts(lost)), (100 - share, others)):
        texts = adding_up(total, [100 * account.ns / lost.rank_ns for account in accounts])
        found += [(account, float(text) / 100) for account, text in zip(accounts, texts, strict=True) if float(text)]
    return found


def lost_accounts(lost: LostTime) -> list[Account]:
    """Returns the accounts of lost time, largest first."""
    return [account for account in lost.accounts if account.name in LOST]


def lost_share(lost: LostTime, of: str = "") -> str:
    """Returns ``14.2 % of 8 ranks × 32 min lost``; empty before anything is known. ``of``: of what that is a share.

    What was not looked for may be lost all the same: that nothing is lost is never said.
    """
    if lost.share is None:
        return ""
    share = sum(share for account, share in shown_accounts(lost) if account.name in LOST)
    if not share:
        return f"no loss seen{f' in {of}' if of else ''}"
    return f"{share_text(share)}{f' of {of}' if of else ''} lost"


def lost_text(
    lost: LostTime, most: int = MOST_NAMED, of: str = "", named: Callable[[Account], str] = account_text
) -> str:
    """Returns ``14.2 % lost: 7.9 % waiting for rank 5 (backward), 6.3 % more``; empty before anything is known.

    Args:
        lost: Where the time went.
        most: How many accounts it names.
        of: As for `lost_share`.
        named: Names an account.
    """
    wasted = [(named(account), share) for account, share in shown_accounts(lost) if account.name in LOST]
    parts = [*wasted[:most], *([("more", sum(share for _, share in wasted[most:]))] if wasted[most:] else [])]
    names = ", ".join(f"{share_text(share)} {name}" for name, share in parts)
    return lost_share(lost, of) + (f": {names}" if names else "")


def waited_for(lost: LostTime) -> dict[int, int]:
    """Returns the rank-time (ns) that all others waited for a rank, by rank."""
    cost: dict[int, int] = {}
    for account in lost.accounts:
        if account.name == "waiting" and account.rank is not None:
            cost[account.rank] = cost.get(account.rank, 0) + account.ns
    return cost
