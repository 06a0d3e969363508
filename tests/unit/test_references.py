"""Names and files of the project that docstrings, comments and docs mention exist."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from pkgutil import resolve_name

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = re.compile(r"`((?:ddpwatch|trainer)(?:\.\w+)+)`")
FILE = re.compile(r"(?<![\w/])((?:ddpwatch|trainer|tests|benchmarks|demo)/[\w/]+\.py)\b")
SOURCES = [
    path for folder in ("ddpwatch", "trainer", "tests", "benchmarks", "demo") for path in ROOT.glob(f"{folder}/**/*.py")
]
DOCS = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]


def mentions(pattern: re.Pattern[str], paths: Iterable[Path]) -> dict[str, list[str]]:
    """What the pattern finds, with the files it is in."""
    found: dict[str, list[str]] = {}
    for path in paths:
        for mention in pattern.findall(path.read_text()):
            found.setdefault(mention, []).append(str(path.relative_to(ROOT)))
    return found


def resolves(name: str) -> bool:
    try:
        resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.filterwarnings("ignore")
def test_names_exist() -> None:
    assert {name: where for name, where in mentions(NAME, SOURCES).items() if not resolves(name)} == {}


def test_files_exist() -> None:
    assert {
        file: where for file, where in mentions(FILE, [*SOURCES, *DOCS]).items() if not (ROOT / file).exists()
    } == {}
