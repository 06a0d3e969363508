"""The file ``wire.json``: what collectives cost, measured apart from any training by `ddpwatch.whatif.sweep`."""

from __future__ import annotations

from statistics import median
from typing import Annotated, Final

import msgspec
from msgspec import Meta

from ddpwatch.errors import UsageError

WIRE_VERSION: Final = 1
LARGE_BYTES = 1 << 20  # from here on a collective's time is its bytes'

Ms = Annotated[float, Meta(gt=0, lt=1e9)]


class WireSize(msgspec.Struct, kw_only=True):
    """What an all-reduce of one size takes, in ms: alone, beside compute, and two of them at once until both are done.

    ``low`` and ``high`` are the quartiles of those alone. The last two are None where they were not measured.
    """

    nbytes: Annotated[int, Meta(gt=0, lt=1 << 53)]
    alone_ms: Ms
    low_ms: Ms
    high_ms: Ms
    beside_ms: Ms | None = None
    pair_ms: Ms | None = None


class Wire(msgspec.Struct, kw_only=True):
    """All of ``wire.json``.

    ``compute_beside`` is how many times longer compute takes beside an all-reduce, ``encode_ns_per_byte`` what a comm
    hook spends on a byte of gradient, there and back (``fp16``, ``bf16``, ``powersgd-1``, ``powersgd-2``), and
    ``launch_share`` what share of that comes before its first all-reduce (``powersgd-1``, ``powersgd-2``).
    """

    version: int = WIRE_VERSION
    backend: Annotated[str, Meta(min_length=1)]
    world_size: Annotated[int, Meta(ge=2, le=1 << 20)]
    hosts: list[str] = []
    torch: str = ""
    device: str = "cpu"
    sizes: Annotated[list[WireSize], Meta(min_length=2, max_length=1000)]
    compute_beside: Annotated[float, Meta(ge=1, le=100)] | None = None
    encode_ns_per_byte: dict[str, Annotated[float, Meta(ge=0, le=1e6)]] = {}
    launch_share: dict[str, Annotated[float, Meta(ge=0, le=1)]] = {}

    def cost_ratio(self, hook: str, other: str) -> float | None:
        """Returns how many times longer a hook takes for a byte than another; None if either was not measured."""
        taken, compared = (self.encode_ns_per_byte.get(name) for name in (hook, other))
        return taken / compared if taken and compared else None

    @property
    def slowdown(self) -> float | None:
        """How much longer large collectives take beside compute, less 1; None if it was not measured."""
        found = [s.beside_ms / s.alone_ms for s in self.sizes if s.beside_ms is not None and s.nbytes >= LARGE_BYTES]
        return max(0.0, median(found) - 1) if found else None

    @property
    def sharing(self) -> float | None:
        """How fast each of two large collectives is beside the other, as a share of its speed alone."""
        found = [s.alone_ms / s.pair_ms for s in self.sizes if s.pair_ms is not None and s.nbytes >= LARGE_BYTES]
        return min(1.0, max(0.5, median(found))) if found else None


def parse_wire(content: bytes) -> Wire:
    """Reads ``wire.json``.

    Raises:
        UsageError: It is something else, or of a newer version.
    """
    try:
        wire = msgspec.json.decode(content, type=Wire)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"this is not a wire.json: {error}", "make one with python -m ddpwatch.whatif.sweep") from None
    if wire.version > WIRE_VERSION:
        raise UsageError(f"wire.json has version {wire.version}, and this ddpwatch reads up to {WIRE_VERSION}")
    by_size = {size.nbytes: size for size in wire.sizes}
    if len(by_size) < len(wire.sizes):
        raise UsageError(
            "this is not a wire.json: a size is in it twice", "make one with python -m ddpwatch.whatif.sweep"
        )
    wire.sizes = [by_size[nbytes] for nbytes in sorted(by_size)]
    return wire


def write_wire(wire: Wire) -> bytes:
    """Returns the content of ``wire.json``."""
    return msgspec.json.format(msgspec.json.encode(wire), indent=2) + b"\n"
