"""How large a recording may become, from options and environment variables."""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ddpwatch.errors import UsageError

SMALLEST_CAP_BYTES = 1 << 20
PARTS_WITHIN_CAP = 8
DEFAULT_PART_AGE_S = 86_400.0
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a recording. 0 means no limit.

    Attributes:
        max_bytes: Size of all parts together; the oldest are removed.
        part_bytes: Size of one part; 0 with a ``max_bytes`` means an eighth of that.
        part_age_s: Age at which a part is closed, in seconds.
        every: Steps whose number is a multiple of this keep the stamps of their hooks. The others keep spans and
            buckets, from which all figures are computed.
    """

    max_bytes: int = 0
    part_bytes: int = 0
    part_age_s: float = DEFAULT_PART_AGE_S
    every: int = 1

    @property
    def part_limit(self) -> int:
        """Size at which a part is closed, in bytes."""
        return self.part_bytes or self.max_bytes // PARTS_WITHIN_CAP


def parse_bytes(text: str) -> int:
    """Parses ``500MB``, ``2G`` or ``1.5 GiB`` into bytes; units are powers of 1024.

    Raises:
        UsageError: The text is no size, or one below 1 MiB.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text.lower())
    nbytes = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if nbytes < SMALLEST_CAP_BYTES:
        raise UsageError(f"{text!r} is not a size of at least 1 MiB", "give e.g. 500MB or 20GB")
    return nbytes


def limits_from_environment(environment: Mapping[str, str]) -> Limits:
    """Reads ``DDPWATCH_RECORD_MAX_SIZE``, ``_PART_SIZE``, ``_PART_AGE`` (s) and ``_EVERY``.

    Raises:
        UsageError: One of them is not valid.
    """

    def number(name: str, default: float) -> float:
        text = environment.get(f"DDPWATCH_RECORD_{name}", "")
        with contextlib.suppress(ValueError):
            value = float(text) if text else default
            if math.isfinite(value):
                return value
        raise UsageError(f"DDPWATCH_RECORD_{name}={text!r} is not a number", "unset it, or give a number")

    def size(name: str) -> int:
        text = environment.get(f"DDPWATCH_RECORD_{name}", "")
        return parse_bytes(text) if text else 0

    return Limits(
        size("MAX_SIZE"), size("PART_SIZE"), number("PART_AGE", DEFAULT_PART_AGE_S), max(1, int(number("EVERY", 1)))
    )


def environment_of(max_size: str | None, every: int) -> dict[str, str]:
    """Returns the options ``--max-size`` and ``--every`` as variables for `limits_from_environment`.

    Raises:
        UsageError: The size is not valid.
    """
    found = {} if every == 1 else {"DDPWATCH_RECORD_EVERY": str(every)}
    return found if max_size is None else {**found, "DDPWATCH_RECORD_MAX_SIZE": str(parse_bytes(max_size))}
