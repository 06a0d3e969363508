"""A case of the field: a small job after a public report, and what is true of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tests.support.field.job import Job

Cost = Literal["", "struck", "lead", "jitter", "exposed", "repeated"]


@dataclass(frozen=True)
class Truth:
    """What is to be said of a job.

    Attributes:
        kinds: Of the incident, any of these, or of the verdict without one; none if nothing is to be said.
        ranks: To blame; none if that is nobody, or all.
        phases: Where the time goes, any of these; none if that does not matter.
        cost: Where the job's own notes say what it costs (`judge.true_cost_ns`); empty: not judged.
        since: The first step that it strikes.
        soon: In how many steps from there on it is to be named; None: not judged.
        cause: What the cause outside the job has to say (a regular expression).
        says: What message or next step have to say (a regular expression).
        period: Every how many steps it strikes.
        beside: Kinds of other incidents that are true as well.
        updates: How many optimizer steps there are; None: not judged.
    """

    kinds: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    phases: tuple[str, ...] = ()
    cost: Cost = ""
    since: int = 0
    soon: int | None = None
    cause: str = ""
    says: str = ""
    period: int | None = None
    beside: tuple[str, ...] = ()
    updates: int | None = None


HEALTHY = Truth()


@dataclass(frozen=True)
class Case:
    """One of them.

    Attributes:
        source: The public report, as ``owner/repository#number``, or where else it is described.
        run: What each rank does.
        ranks: How many there are.
        environment: Of the job.
        fails: Whether the job ends with an error.
    """

    name: str
    source: str
    truth: Truth
    run: Callable[[Job], None]
    ranks: int = 2
    environment: Mapping[str, str] = field(default_factory=dict)
    fails: bool = False


CASES: dict[str, Case] = {}


def case(
    source: str, truth: Truth, ranks: int = 2, fails: bool = False, **environment: str
) -> Callable[[Callable[[Job], None]], Callable[[Job], None]]:
    """Adds a case, named like its function."""

    def added(run: Callable[[Job], None]) -> Callable[[Job], None]:
        CASES[run.__name__] = Case(run.__name__, source, truth, run, ranks, environment, fails)
        return run

    return added
