"""What one step contributes to the figures of a window."""

from __future__ import annotations

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.estimate import StepShare
from ddpwatch.analysis.launch_skew import NO_SKEW, LaunchSkew, RankFacts
from ddpwatch.analysis.means import Sums, kind_of, summed


def share_of(across: StepAcrossRanks, waiting: int = 0, transfer: int = 0, unsplit: int = 0) -> StepShare:
    """Returns what a step adds to the estimates, as far as its own frames show it."""
    frames = across.ranks.values()
    if not across.counted:
        return StepShare(across.step, len(across), sum([step.duration_ns for step in frames]))
    taken, phases, comm, exposed, *_, waited = zip(
        *[facts.figures for facts in across.all_facts().values()], strict=True
    )
    full = None not in comm and None not in exposed
    return StepShare(
        across.step,
        len(across),
        sum(taken),
        sum([step.own_ns for step in frames]),
        waiting,
        transfer,
        unsplit,
        phases=summed(phases),
        data_unseen=False in ["data" in row for row in phases],
        waited=sum(waited),
        exposed=sum(exposed) if full else None,
        hidden=sum(comm) - sum(exposed) if full else None,
    )


class StepDigest:
    """One step's share, computed once. Times in ns.

    Attributes:
        durations: Of each rank's step.
        share: Of the estimates.
        ranks: Each rank's share; nothing of a step that does not count.
        kind: Decides whether it shows how ranks differ.
        sums: Of all its ranks.
    """

    def __init__(self, across: StepAcrossRanks) -> None:
        self.across = across
        self.share = across.share or share_of(across)
        self.ranks: dict[int, RankFacts] = dict(across.all_facts()) if across.counted else {}
        self.skew: LaunchSkew = across.skew if across.counted else NO_SKEW
        figures = [fact.figures for fact in self.ranks.values()]
        self.kind = kind_of(across.step, figures)
        self.sums = Sums(figures)
        if across.counted:  # frames need not be decoded again
            self.durations = {rank: fact.figures.step_ns for rank, fact in self.ranks.items()}
        else:
            self.durations = {rank: step.duration_ns for rank, step in across.ranks.items()}
