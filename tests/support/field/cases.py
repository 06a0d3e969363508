"""All cases, which their modules add when they are imported."""

from __future__ import annotations

from tests.support.field import ends, healthy, late, pauses, structure
from tests.support.field.case import CASES

__all__ = ["CASES", "ends", "healthy", "late", "pauses", "structure"]
