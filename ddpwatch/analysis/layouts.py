"""The bucket layouts of a run: the names of its parameters and buckets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from msgspec.structs import replace

from ddpwatch.analysis.groups import Groups
from ddpwatch.wire.messages import Layout, LayoutKind

KEEP_LAYOUTS = 64  # of all modules
KEEP_LAYOUT_BYTES = 32 * 1024 * 1024  # of all, though the newest is always kept

LayoutKey = tuple[int, int, int]  # module, group, epoch


class Layouts(Mapping[LayoutKey, Layout]):
    """The newest layouts, by module, group and epoch, oldest first. Its memory is bounded.

    Args:
        groups: The process groups, kept up to date by the caller.
    """

    def __init__(self, groups: Groups) -> None:
        self._groups = groups
        self._known: dict[LayoutKey, Layout] = {}
        self._bytes = 0

    def __getitem__(self, key: LayoutKey) -> Layout:
        return self._known[key]

    def __iter__(self) -> Iterator[LayoutKey]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def apply_layout(self, layout: Layout) -> None:
        """Takes a layout. Ranks mostly have the same, and then the first one's stays.

        Places that issue collectives are those of all ranks: not every rank comes by all of them.
        """
        key = (layout.module, layout.group, layout.epoch)
        known = self._known.get(key)
        if known is not None and layout.kind == known.kind == "call":
            places = {bucket.index: bucket for bucket in (*known.buckets, *layout.buckets)}
            layout = replace(layout, buckets=[*places.values()])
        if known is not None and _grouping(known) == _grouping(layout):
            return
        self._bytes += _size(layout) - (0 if known is None else _size(self._known.pop(key)))
        self._known[key] = layout
        while len(self._known) > KEEP_LAYOUTS or (self._bytes > KEEP_LAYOUT_BYTES and len(self._known) > 1):
            self._bytes -= _size(self._known.pop(next(iter(self._known))))

    def layer(self, param: int, rank: int | None = None) -> str:
        """Returns the name of a parameter, from the newest layout that has it; "" if none has.

        Args:
            param: Its id.
            rank: Only layouts of its groups count; None for those of any.
        """
        for layout in self._newest(rank):
            if 0 <= param - layout.param_base < len(layout.params):
                return layout.params[param - layout.param_base]
        return ""

    def bucket_layer(self, index: int, rank: int | None = None, module: int | None = None) -> str:
        """Returns the largest parameter of a bucket, from the newest layout that has it; "" if none is known.

        Of a parameter group, its module; in a loop without a wrapper, the place that issues the collective.
        """
        layout = next((layout for layout in self._newest(rank, module) if layout.kind != "bucket"), None)
        named = (bucket.name for bucket in layout.buckets if bucket.index == index) if layout is not None else ()
        return next(iter(named), "") or self._largest(index, rank, module)

    def _largest(self, index: int, rank: int | None, module: int | None) -> str:
        for layout in self._newest(rank, module):
            for bucket in layout.buckets:
                known = [param for param in bucket.params if param < len(layout.params)]
                if bucket.index == index and known:
                    sizes = layout.param_bytes or [0] * len(layout.params)
                    return layout.params[max(known, key=sizes.__getitem__)]
        return ""

    def unit(self, rank: int | None = None, module: int | None = None) -> str:
        """Returns what is communicated: a bucket, with FSDP2 a parameter group, without a wrapper a collective."""
        kinds = {layout.kind for layout in self._newest(rank, module)}
        return "parameter group" if "group" in kinds else "collective" if kinds == {"call"} else "bucket"

    def kind(self, module: int, use: str = "") -> LayoutKind:
        """Returns what a module's collectives carry; where its layout is not known, what their use suggests."""
        known = next((layout.kind for layout in self._newest(None, module)), None)
        return known or ("group" if use else "bucket")

    def bucket_params(self, index: int, rank: int | None = None, module: int | None = None) -> list[str]:
        """Returns the parameters of a bucket, from the newest layout that has it; empty if none is known.

        Args:
            index: The bucket's.
            rank: Only layouts of its groups count; None for those of any.
            module: Only its layouts count; None for those of all.
        """
        for layout in self._newest(rank, module):
            for bucket in layout.buckets:
                if bucket.index == index:
                    return [layout.params[param] for param in bucket.params if param < len(layout.params)]
        return []

    def _newest(self, rank: int | None, module: int | None = None) -> list[Layout]:
        """Returns the layouts, newest first: those of a rank's groups, and of a module, where these are given."""
        groups = None if rank is None else self._groups.of_rank(rank)
        layouts = [
            layout
            for layout in self._known.values()
            if (groups is None or layout.group in groups) and module in (None, layout.module)
        ]
        return sorted(layouts, key=lambda layout: (-layout.epoch, layout.group))


def _grouping(layout: Layout) -> tuple[object, ...]:
    return layout.param_base, layout.params, layout.buckets


def _size(layout: Layout) -> int:
    """Returns about how much memory a layout takes, in bytes."""
    names = sum(64 + len(name) for name in layout.params)
    return names + sum(128 + 16 * len(bucket.params) for bucket in layout.buckets)
