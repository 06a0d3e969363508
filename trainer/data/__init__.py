"""What can be trained on, by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from trainer import spec
from trainer.data.digits import digits
from trainer.data.source import DataSource, Sample
from trainer.data.synthetic import synthetic
from trainer.data.text import text

__all__ = ["DATA", "DataSource", "Sample", "build_data"]

DATA: dict[str, Callable[..., DataSource]] = {"text": text, "digits": digits, "synthetic": synthetic}


def build_data(name: str, text_path: Path | None = None) -> DataSource:
    """Load data by name, with options.

    Raises:
        TrainerError: Unknown name or option, or unreadable text.
    """
    return spec.build("data", name, DATA | {"text": partial(text, text_path)})
