"""Gradients that nobody reduces: a comm hook that hands buckets back communicates nothing."""

from __future__ import annotations

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident


class NotReduced:
    """Watches that every step communicates: else each rank trains its own model.

    Unless the job averages the parameters by hand, now and then. So whatever else is issued on the ranks' group ends
    that.
    """

    def __init__(self) -> None:
        self._unreduced = 0
        self._since = self._until = 0
        self._lasts = self._averages = False

    def add_step(self, across: StepAcrossRanks) -> None:
        """Takes the next step."""
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

    def incidents(self) -> list[Incident]:
        """Returns one, if there were such steps."""
        if not self._unreduced:
            return []
        are = "are" if self._lasts else "were"
        text = f"gradients {are} not reduced: in {self._unreduced} steps the comm hook communicated nothing"
        return [
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
        ]
