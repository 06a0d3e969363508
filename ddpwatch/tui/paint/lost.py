"""Where the run's time went: a bar of accounts and its legend."""

from __future__ import annotations

from ddpwatch.analysis.diagnosis.incident import LOST, Account, AccountName, LostTime
from ddpwatch.analysis.diagnosis.words.account_names import account_names
from ddpwatch.analysis.diagnosis.words.lost_time import (
    account_text,
    lost_share,
    lost_text,
    seconds_text,
    share_text,
    shown_accounts,
)
from ddpwatch.common.text import percent, run_size
from ddpwatch.common.units import NS_PER_S
from ddpwatch.tui.models.overview import Overview
from ddpwatch.tui.paint.canvas import Canvas, Row
from ddpwatch.tui.paint.glyphs import COMM, PHASES
from ddpwatch.tui.text import first_fit, shorten

MOST_ROWS = 10  # with heading and bar
_STYLES: dict[tuple[AccountName, str], tuple[str, str]] = {  # in the order of the bar
    ("waiting", ""): ("waits-exposed", COMM["waits-exposed"]), ("jitter", ""): ("waits", COMM["waits"]),
    ("transfer", ""): ("exposed", COMM["exposed"]), ("exposed", ""): ("exposed", COMM["exposed"]),
    ("input", ""): ("data", PHASES["data"]), ("pause", ""): ("heat-3", "+"),
    **{("compute", phase): (phase, PHASES[phase]) for phase in ("forward", "backward", "optimizer")},
}  # fmt: skip
_OTHER = ("idle", "·")
_LEFT = 12  # columns of the swatch and the share


def lost_rows(model: Overview) -> int:
    """Returns the most rows that it can use; none before anything is known."""
    lost = model.diagnosed.lost
    return min(2 + len(shown_accounts(lost)), MOST_ROWS) if lost.rank_ns else 0


def paint_lost(model: Overview, width: int, height: int) -> list[Row]:
    """Returns a heading, the bar, and the largest accounts."""
    canvas = Canvas(width, height)
    lost, progress = model.diagnosed.lost, model.diagnosed.progress
    if progress is not None:
        _put_heading(canvas, f"where the time went: diagnosing … {percent(progress)}")
    else:
        share = lost_share(lost, run_size(lost.ranks, lost.rank_ns / NS_PER_S)) or "nothing known"
        until = "" if model.diagnosed.whole else " so far"
        _put_heading(canvas, first_fit([_of_which(model) + share + until, share], width - 2))
        _paint_bar(canvas, lost, 1)
        _paint_accounts(canvas, lost, model.diagnosed.unit, 2)
    return canvas.rows()


def _of_which(model: Overview) -> str:
    """Says of a replay that the figures are not those of the run up to its position, as the verdict is."""
    return "in the whole recording: " if model.diagnosed.whole and not model.ended else ""


def lost_line(model: Overview, width: int) -> str:
    """Returns the lost time as a sentence, with as many of the largest accounts as fit."""
    found = model.diagnosed
    if found.progress is not None:
        return f"where the time went: diagnosing … {percent(found.progress)}"
    texts = [_of_which(model) + text if (text := lost_text(found.lost, most)) else "" for most in (3, 2, 1)]
    return first_fit(texts, width)


def _put_heading(canvas: Canvas, text: str) -> None:
    canvas.fill(0, canvas.width, 0, " ", "heading")
    canvas.put(1, 0, shorten(text, canvas.width - 2), "heading")


def _paint_bar(canvas: Canvas, lost: LostTime, y: int) -> None:
    """Paints lost time first, in the order of `_STYLES`."""
    if not lost.rank_ns:
        return
    spent = dict.fromkeys([*_STYLES.values(), _OTHER], 0)
    for account in lost.accounts:
        spent[_style(account)] += account.ns
    room, done = canvas.width - 2, 0
    for (style, glyph), ns in spent.items():
        before, done = done, done + ns
        canvas.fill(1 + round(room * before / lost.rank_ns), 1 + round(room * done / lost.rank_ns), y, glyph, style)


def _style(account: Account) -> tuple[str, str]:
    return _STYLES.get((account.name, account.phase if account.name == "compute" else ""), _OTHER)


def _paint_accounts(canvas: Canvas, lost: LostTime, unit: str, y: int) -> None:
    shown = list(zip(shown_accounts(lost), range(y, canvas.height), strict=False))
    texts = [_LEFT + len(account_text(one)) + len(f" {seconds_text(one.ns)} {unit}") for (one, _), _ in shown]
    if max(texts, default=0) >= canvas.width:
        unit = "s"
    for (account, share), row in shown:
        style, glyph = _style(account)
        x = canvas.put(canvas.put(1, row, glyph * 2, style), row, f"{share_text(share):>7} ")
        names = account_names(account.name, account.rank, account.phase)
        cost = f"{seconds_text(account.ns)} {unit}"
        room = max(canvas.width - x - len(cost) - 2, 0)
        name = next((name for name in names if len(name) <= room), names[-1])
        text_style = "text" if account.name in LOST else "dim"
        canvas.put(x, row, shorten(name, room), text_style)
        canvas.put(canvas.width - len(cost) - 1, row, cost, "dim")
