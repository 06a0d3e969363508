"""Training that does not do what it should: gradients that nobody reduces, ranks with different buckets."""

from __future__ import annotations

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.words.wording import ranks_named
from ddpwatch.wire.messages import Layout

KEEP_LAYOUTS = 256

_Buckets = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]


class Unsound:
    """Watches what should hold of every step and layout."""

    def __init__(self) -> None:
        self._unreduced = 0
        self._since = self._until = 0
        self._lasts = self._averages = False
        self._layouts: dict[tuple[int, int, int], dict[_Buckets, set[int]]] = {}  # the ranks that have which

    def step(self, across: StepAcrossRanks) -> None:
        """Takes a step. A comm hook that hands buckets back communicates nothing: every rank trains its own model.

        Unless it averages the parameters by hand, now and then. So whatever else is issued on their group ends that.
        """
        if self._averages or len(across) < 2:
            return
        issued = any(step.comm_first_seq is not None for step in across.ranks.values())
        if issued and self._unreduced and not (across.reduced and across.timed):
            self._averages, self._unreduced, self._lasts = True, 0, False
            return
        if across.reduced:
            if self._lasts and across.full and across.skew.buckets:
                self._lasts = False
            return
        if issued:
            return
        self._lasts = True
        self._since = self._since if self._unreduced else across.step
        self._until = across.step
        self._unreduced += 1

    def layout(self, layout: Layout) -> None:
        """Takes a layout: all members of a group reduce the same parameters in the same buckets."""
        key = layout.module, layout.group, layout.epoch
        buckets = tuple(layout.params), tuple(tuple(bucket.params) for bucket in layout.buckets)
        if key not in self._layouts and len(self._layouts) >= KEEP_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts.setdefault(key, {}).setdefault(buckets, set()).add(layout.rank)

    def incidents(self) -> list[Incident]:
        """Returns all that does not hold."""
        found = []
        if self._unreduced:
            are = "are" if self._lasts else "were"
            text = f"gradients {are} not reduced: in {self._unreduced} steps the comm hook communicated nothing"
            found.append(
                Incident(
                    kind="not_reduced",
                    severity="error",
                    message=f"{text}, so the ranks {'drift' if self._lasts else 'drifted'} apart",
                    phase="backward",
                    since_step=self._since,
                    until_step=self._until,
                    steps=self._unreduced,
                    open=self._lasts,
                    evidence=Evidence(steps=self._unreduced),
                )
            )
        for (module, group, epoch), ranks_of in self._layouts.items():
            if len(ranks_of) == 1:
                continue
            most = max(ranks_of.values(), key=lambda ranks: (len(ranks), -min(ranks)))
            ranks = {rank for some in ranks_of.values() for rank in some if some is not most}
            who, lasts = ranks_named(sorted(ranks)), not self._agreed_after(module, group, epoch)
            differ = "differ" if lasts else "differed"
            text = f"the buckets of {who} {differ} from those of other ranks (module {module}, layout {epoch})"
            found.append(Incident("layouts_differ", "error", text, ranks=tuple(sorted(ranks)), open=lasts))
        return found

    def _agreed_after(self, module: int, group: int, epoch: int) -> bool:
        """Returns whether all ranks agree on a later layout."""
        later = [key for key in self._layouts if key[:2] == (module, group) and key[2] > epoch]
        return any(len(self._layouts[key]) == 1 for key in later)
