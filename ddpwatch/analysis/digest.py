"""What one step contributes to the figures of a window."""

from __future__ import annotations

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.launch_skew import LaunchSkew, RankFacts
from ddpwatch.analysis.means import Sums, kind_of


class StepDigest:
    """One step's share, computed once. Times in ns.

    Attributes:
        kind: Decides whether it is one of the steps that the means are over.
        sums: Of all its ranks.
        cost: A column over the ranks, sorted, which makes the median over many steps cheap.
    """

    def __init__(self, across: StepAcrossRanks) -> None:
        self.across = across
        self.ranks: dict[int, RankFacts] = dict(across.all_facts())
        self.skew: LaunchSkew = across.skew
        figures = [fact.figures for fact in self.ranks.values()]
        self.kind = kind_of(across.step, figures)
        self.sums = Sums(figures)
        self.cost = sorted(fact.cost for fact in self.ranks.values() if fact.cost is not None)
