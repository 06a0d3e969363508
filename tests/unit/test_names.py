"""The words of the code: one class a name, and plain English wherever a person reads."""

from __future__ import annotations

import ast
import tokenize
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.unit.test_docs import BANNED, ROOT

pytestmark = pytest.mark.same_everywhere

PACKAGES = ("ddpwatch", "trainer")
READ = (*PACKAGES, "demo", "benchmarks")


def sources(folders: tuple[str, ...]) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@cache
def nodes(path: Path) -> list[ast.AST]:
    return [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.ClassDef, ast.Constant))]


def classes(path: Path) -> Iterator[str]:
    return (node.name for node in nodes(path) if isinstance(node, ast.ClassDef))


def strings(path: Path) -> Iterator[str]:
    """Docstrings and messages, joined as Python joins them."""
    found = (node.value for node in nodes(path) if isinstance(node, ast.Constant))
    return (value for value in found if isinstance(value, str))


def comments(path: Path) -> str:
    """All comments as one text: a sentence may go on in the next line."""
    with tokenize.open(path) as file:
        tokens = tokenize.generate_tokens(file.readline)
        return " ".join(token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT)


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in sources(PACKAGES):
        for name in classes(path):
            found[name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}


@pytest.mark.parametrize("folder", READ)
def test_plain_english(folder: str) -> None:
    texts = ((path, text) for path in sources((folder,)) for text in (*strings(path), comments(path)))
    found = [(str(path.relative_to(ROOT)), BANNED.findall(" ".join(text.split()))) for path, text in texts]
    assert [(path, words) for path, words in found if words] == []
