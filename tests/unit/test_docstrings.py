"""Docstrings of functions and methods say what these do: they start with a verb. What only overrides needs none."""

import ast
import builtins
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import ddpwatch

pytestmark = pytest.mark.same_everywhere

PACKAGE = Path(ddpwatch.__file__).parent
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
VERB = re.compile(r"[A-Z][a-z-]*s\b")
# They have the form of a verb and are none.
NOUNS = {
    "Always",
    "Bytes",
    "Frames",
    "Its",
    "Lines",
    "Means",
    "Perhaps",
    "Ranks",
    "Rows",
    "Seconds",
    "Steps",
    "This",
    "Whose",
}
PLAIN = {"ABC", "Generic", "NamedTuple", "Protocol", "Struct", *dir(builtins)}  # bases whose methods nobody overrides
HELP_TEXTS = "cli/"  # the command line's: what to do, in the imperative


def trees() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(PACKAGE.rglob("*.py")):
        yield str(path.relative_to(PACKAGE)), ast.parse(path.read_text())


def starts_with_verb(docstring: str) -> bool:
    found = VERB.match(docstring)
    return found is not None and found[0] not in NOUNS


def is_attribute(function: Function) -> bool:
    """Is a property, which is described as an attribute is."""
    return any("property" in ast.unparse(decorator) for decorator in function.decorator_list)


@pytest.mark.parametrize("docstring", ["Whether that is so.", "The sum.", "Of each rank.", "Its rows.", "all", ""])
def test_what_does_not_start_with_a_verb_is_found(docstring: str) -> None:
    assert not starts_with_verb(docstring)
    assert starts_with_verb(f"Returns {docstring}")


def test_docstrings_start_with_a_verb() -> None:
    assert not [
        f"{file}:{function.lineno} {function.name}: {docstring.splitlines()[0]}"
        for file, tree in trees()
        if not file.startswith(HELP_TEXTS)
        for function in ast.walk(tree)
        if isinstance(function, FUNCTIONS) and not is_attribute(function)
        if (docstring := ast.get_docstring(function)) and not starts_with_verb(docstring)
    ]


def test_only_what_overrides_has_no_docstring() -> None:
    classes = {node.name: node for _, tree in trees() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    protocols = [node for node in classes.values() if "Protocol" in map(base_name, node.bases)]
    promised = {method.name for node in protocols for method in node.body if isinstance(method, FUNCTIONS)}
    assert not [
        f"{file}:{method.lineno} {node.name}.{method.name}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
        for method in node.body
        if isinstance(method, FUNCTIONS) and not method.name.startswith("_")
        if ast.get_docstring(method) is None and not overrides(classes, node, method.name) and not is_setter(method)
        if method.name not in promised
    ]


def overrides(classes: dict[str, ast.ClassDef], node: ast.ClassDef, name: str) -> bool:
    """A base class has such a method, or may have it: one from elsewhere."""
    for base in map(base_name, node.bases):
        found = classes.get(base)
        if found is None and base not in (
            "object",
            "ABC",
            "Generic",
            "NamedTuple",
            "Protocol",
            "Struct",
            *dir(builtins),
        ):
            return True
        if found is not None:
            named = any(isinstance(one, FUNCTIONS) and one.name == name for one in found.body)
            if named or overrides(classes, found, name):
                return True
    return False


def base_name(base: ast.expr) -> str:
    return ast.unparse(base).split("[")[0].split(".")[-1]


def is_setter(method: Function) -> bool:
    return any(ast.unparse(decorator).endswith(".setter") for decorator in method.decorator_list)
