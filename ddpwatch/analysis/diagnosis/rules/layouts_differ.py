"""Ranks of one group whose buckets differ: their gradients are added up wrongly, or their collectives do not match."""

from __future__ import annotations

from ddpwatch.analysis.diagnosis.incident import Incident
from ddpwatch.analysis.diagnosis.words.wording import ranks_named
from ddpwatch.wire.messages import Layout

KEEP_LAYOUTS = 256

_Buckets = tuple[tuple[str, ...], tuple[tuple[int, ...], ...]]


class LayoutsDiffer:
    """Compares the layouts of a group's ranks: all reduce the same parameters in the same buckets."""

    def __init__(self) -> None:
        self._layouts: dict[tuple[int, int, int], dict[_Buckets, set[int]]] = {}  # the ranks that have which

    def add_layout(self, layout: Layout) -> None:
        """Takes a rank's layout. Ranks may issue their own collectives in different places."""
        if layout.kind == "call":
            return
        key = layout.module, layout.group, layout.epoch
        buckets = tuple(layout.params), tuple(tuple(bucket.params) for bucket in layout.buckets)
        if key not in self._layouts and len(self._layouts) >= KEEP_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts.setdefault(key, {}).setdefault(buckets, set()).add(layout.rank)

    def incidents(self) -> list[Incident]:
        """Returns one for each layout that differs; it lasts until all ranks agree on a later one."""
        found = []
        for (module, group, epoch), ranks_of in self._layouts.items():
            if len(ranks_of) == 1:
                continue
            most = max(ranks_of.values(), key=lambda ranks: (len(ranks), -min(ranks)))
            ranks = {rank for some in ranks_of.values() for rank in some if some is not most}
            who, lasts = ranks_named(sorted(ranks)), not self._agreed_after(module, group, epoch)
            differ = "differ" if lasts else "differed"
            text = f"the buckets of {who} {differ} from those of other ranks (module {module}, assignment {epoch})"
            found.append(Incident("layouts_differ", "error", text, ranks=tuple(sorted(ranks)), open=lasts))
        return found

    def _agreed_after(self, module: int, group: int, epoch: int) -> bool:
        """Returns whether all ranks agree on a later layout."""
        later = [key for key in self._layouts if key[:2] == (module, group) and key[2] > epoch]
        return any(len(self._layouts[key]) == 1 for key in later)
