"""The rank filter that the user types after ``/``."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from ddpwatch.common.text import spans
from ddpwatch.errors import UsageError
from ddpwatch.viewer.state import RankState, RankStatus

MOST_HOSTS = 4  # named
Predicate = Callable[[RankState, RankStatus], bool]
_RANGE = re.compile(r"(\d+)(?:-(\d+))?$")
_HOST = re.compile(r"[\w.-]+$")
HELP = "ranks (0-7,12), a state (running, waiting, silent, unseen, ended) or part of a host name; empty shows all"


def parse_filter(text: str) -> Predicate | None:
    """Returns a predicate on a rank, or None for an empty filter, which selects all.

    The words between commas are alternatives: rank numbers and ranges, states, parts of a host name.

    Raises:
        UsageError: A word is none of these.
    """
    words = [word.strip().lower() for word in re.split(r"[,\s]+", text) if word.strip()]
    tests = [_word(word) for word in words]
    return (lambda rank, status: any(test(rank, status) for test in tests)) if tests else None


def selecting(text: str, ranks: Mapping[int, RankState], status_of: Callable[[int], RankStatus]) -> Predicate | None:
    """Returns the same as `parse_filter`.

    Raises:
        UsageError: It selects none of the ranks, if there are any.
    """
    chosen = parse_filter(text)
    if chosen is not None and ranks and not any(chosen(state, status_of(rank)) for rank, state in ranks.items()):
        hosts = sorted({state.hello.host for state in ranks.values() if state.hello is not None})
        states = dict.fromkeys(status_of(rank).value for rank in ranks)
        named = [*hosts[:MOST_HOSTS], *(["…"] if hosts[MOST_HOSTS:] else [])]
        there = f"ranks {spans(list(ranks))}, states {', '.join(states)}, hosts {', '.join(named)}"
        raise UsageError(f"{text.strip()} selects no rank", f"there are {there}")
    return chosen


def _word(word: str) -> Predicate:
    found = _RANGE.match(word)
    if found:
        low, high = int(found[1]), int(found[2] or found[1])
        return lambda rank, _: low <= rank.rank <= high
    if word in {status.value for status in RankStatus}:
        return lambda _, status: status.value == word
    if not _HOST.match(word):
        raise UsageError(f"{word} is not understood", HELP)
    return lambda rank, _: rank.hello is not None and word in rank.hello.host.lower()
