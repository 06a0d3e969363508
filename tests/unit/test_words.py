"""Names of modules, classes, functions and methods use the field's words, as docs/glossary.md has them."""

import ast
import re
import tokenize
from functools import cache
from pathlib import Path

import pytest

import ddpwatch

pytestmark = pytest.mark.same_everywhere

PACKAGE = Path(ddpwatch.__file__).parent
ROOT = PACKAGE.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text()
INSTEAD = {
    "guest": "agent", "desk": "rendezvous server", "mailbox": "store requests", "inbox": "request queue",
    "outbox": "send queue", "heir": "successor", "calm": "undisturbed", "memory": "correlation time",
    "shadow": "light",
}  # fmt: skip
OLD = {  # on screens, in reports and on pages
    r"\brank-s\b|\brank-seconds\b": "GPU-seconds", r"\bown cost\b": "overhead", r"\bwatching cost \{": "overhead",
    r"\bshadow steps?\b": "light step", r"\bunwatched (?:step|one)s?\b": "bare step",
    r"\bwhichever rank\b": "varying last rank",
    r"\bwaits, hidden\b": "waits behind compute", r"\bslow devices?\b": "all ranks slower", r"\bbtw\b": "gap",
    r"\bbetween optimizer and forward\b": "the gap before the forward",
    r"\both\b": "rest", r"\bdrops? [{\d]": "lost messages", r"\d full · budget": "steps timed in full",
    r"\blasts (?:since|to the end)\b": "ongoing",
}  # fmt: skip
VAGUE = {"add", "apply", "take"}  # a method says what
AS_TORCH_HAS_IT = {"StoreConnection.add"}  # a c10d store's


@cache
def names() -> list[tuple[str, str]]:
    """What has a name in the package, and where."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        file = str(path.relative_to(PACKAGE))
        found.append((file, path.stem))
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found.append((f"{file}:{node.lineno}", node.name))
                found += [
                    (f"{file}:{method.lineno}", f"{node.name}.{method.name}")
                    for method in node.body
                    if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                found.append((f"{file}:{node.lineno}", node.name))
    return found


def words(name: str) -> set[str]:
    parts = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {part.lower().removesuffix("s") for part in parts} | {part.lower() for part in parts}


@pytest.mark.parametrize("name", ["Guest", "ask_desk", "_heirs", "CalmRows", "estimate_memory"])
def test_a_word_of_our_own_is_found(name: str) -> None:
    assert words(name) & INSTEAD.keys()


def test_names_have_no_words_of_our_own() -> None:
    assert not [
        f"{place} {name}: say {INSTEAD[word]}"
        for place, name in names()
        for word in words(name) & INSTEAD.keys()
        if word != "memory" or "late/" in place  # machines have memory, noise has none
    ]


def test_methods_say_what_they_add_apply_or_take() -> None:
    assert not [
        f"{place} {name}"
        for place, name in names()
        if "." in name and name.split(".")[-1].lstrip("_") in VAGUE and name not in AS_TORCH_HAS_IT
    ]


def test_the_glossary_has_none_of_them() -> None:
    assert not {word for term in re.findall(r"\*+([^*]+)\*+", GLOSSARY) for word in words(term)} & INSTEAD.keys()


@cache
def texts() -> list[tuple[str, str]]:
    """What people read: the package's strings, its page, and the docs, each with its place."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        with path.open("rb") as file:
            strings = [token for token in tokenize.tokenize(file.readline) if "STRING" in tokenize.tok_name[token.type]]
        found += [(f"{path.relative_to(PACKAGE)}:{token.start[0]}", token.string) for token in strings]
    pages = (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md"), *PACKAGE.rglob("*.html"))
    return found + [(page.name, page.read_text()) for page in pages]


@pytest.mark.parametrize(("old", "say"), OLD.items())
def test_nobody_reads_the_old_words(old: str, say: str) -> None:
    assert not [
        f"{place}: {found[0]}: say {say}" for place, text in texts() for found in [re.search(old, text)] if found
    ]


def test_the_glossary_says_each_word_once() -> None:
    """What is in bold there is defined there."""
    terms = re.findall(r"\*\*([^*]+)\*\*", GLOSSARY)
    assert len(terms) == len(set(terms))
    assert {"light", "bare", "GPU-seconds", "process-seconds", "gap", "rest", "overhead", "lost messages"} <= {
        *terms, *re.findall(r"(?<!\*)\*([^*\n]+)\*(?!\*)", GLOSSARY),
    }  # fmt: skip
