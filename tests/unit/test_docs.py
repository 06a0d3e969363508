"""README and docs are short, and agree with the code: links, paths, commands, messages, settings, layers, JSON keys."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from typer.main import get_command

from ddpwatch.analysis.diagnosis.kinds import KINDS, Kind
from ddpwatch.cli import app
from ddpwatch.doctor.check import Section
from ddpwatch.doctor.report import document
from ddpwatch.export import tables
from ddpwatch.report.build import compare_recordings, report_of
from ddpwatch.sampling.lease import DETAILS
from ddpwatch.sampling.schedule import schedule_of
from ddpwatch.tui.settings import Settings
from ddpwatch.tui.views import VIEWS
from ddpwatch.version import NEWEST_TORCH, OLDEST_TORCH, __version__
from ddpwatch.wire.messages import MESSAGE_TYPES
from tests.support.runs import record, run_of
from tests.support.sampled import a_pair

pytestmark = pytest.mark.same_everywhere

ROOT = Path(__file__).resolve().parents[2]
PAGES = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md",
    ROOT / "trainer" / "README.md",
    ROOT / "trainer" / "data" / "README.md", *sorted((ROOT / "benchmarks").glob("*.md")),
    ROOT / "tests" / "integration" / "safety_cases.md",
    *sorted((ROOT / "docs").glob("*.md")),
]  # fmt: skip
LINK = re.compile(r"\]\(([^)\s]+)\)")
CODE = re.compile(r"`([^`\n]+)`")
PATH = re.compile(r"[\w.-]+(?:/[\w.-]+)*(?:\.(?:py|sh|md|toml|html|gz)|/)")
BANNED = re.compile(
    r"\b(?:told|tells|anew|of ours|in words|stands for|likewise)\b|\b(?:the|its|a) begin\b", re.IGNORECASE
)
GENERATED = re.compile(r"<!-- begin (\w+) -->.*?<!-- end \1 -->", re.DOTALL)  # tables that tests/integration writes
FENCED = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)
FOR_USERS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MOST_WORDS_OF_ALL, MOST_WORDS, MOST_WORDS_OF_CHANGES = (
    15_000,
    2_500,
    700,
)  # everything counts: tables, code, what tests write
MOST_LINES, MOST_COLUMNS = 5, 120  # of a paragraph or list item, as it is written
ITEM = re.compile(r" *(?:[-*]|\d+\.) ")
NOT_PROSE = ("|", "#", "<!--", "![")
PRIVATE_WORDS = {"guest", "desk", "inbox", "mailbox", "heir", "calm"}  # others say agent, rendezvous, request, …
NAME_PARTS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")

each_page = pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])


def text_of(name: str) -> str:
    return (ROOT / name).read_text()


def section(name: str, heading: str) -> str:
    """What is below a heading, up to the next of its level."""
    level = heading.split()[0]
    return text_of(name).split(f"\n{heading}\n")[1].split(f"\n{level} ")[0]


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def names(cell: str) -> list[str]:
    return CODE.findall(cell)


def rows(text: str) -> dict[str, list[str]]:
    """The cells of tables by the first code of their first cell."""
    found = {}
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and names(cells[0]):
            found[names(cells[0])[0]] = cells
    return found


def keys_by_row(value: dict[str, Any], prefix: str = "") -> dict[str, set[str]]:
    """Names of JSON objects as the docs write them (``ranks[].end``), and their keys."""
    found: dict[str, set[str]] = {}
    for key, item in value.items():
        several = isinstance(item, list)
        name = f"{prefix}{key}{'[]' if several else ''}"
        for one in item if several else [item]:
            if isinstance(one, dict) and key != "evidence":
                found.setdefault(name, set()).update(one)
                found.update(keys_by_row(one, f"{name}."))
    return found


def words(text: str) -> int:
    return sum(any(map(str.isalnum, word)) for word in text.split())


def paragraphs(page: Path) -> list[list[str]]:
    """Lines of paragraphs and list items, without tables, headings, code and what tests write."""
    found: list[list[str]] = [[]]
    for line in GENERATED.sub("", FENCED.sub("", page.read_text())).splitlines():
        prose = bool(line.strip()) and not line.startswith(NOT_PROSE)
        if not prose or ITEM.match(line):
            found.append([])
        if prose:
            found[-1].append(line)
    return [lines for lines in found if lines]


def defined_names(path: Path) -> set[str]:
    """Of a module, its classes, functions and methods."""
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    return {path.stem, *(node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds))}


def assert_documented(result: dict[str, Any]) -> None:
    documented = {key: set(names(cells[1])) for key, cells in rows(section("docs/metrics.md", "## JSON")).items()}
    for key, found in keys_by_row(result).items():
        parts = key.split(".")
        ways = (".".join(parts[first:]) for first in range(len(parts)))  # the longest that has a row
        assert documented[next(way for way in ways if way in documented)] == found, key


@each_page
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(page.read_text()):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


@each_page
def test_files_named_exist(page: Path) -> None:
    """Relative to the repository, the page, or the package."""
    for code in CODE.findall(FENCED.sub("", page.read_text())):
        if "/" in code and PATH.fullmatch(code):
            assert any((base / code).exists() for base in (ROOT, page.parent, ROOT / "ddpwatch")), code


@each_page
def test_plain_english(page: Path) -> None:
    prose = GENERATED.sub("", FENCED.sub("", page.read_text()))
    assert not BANNED.findall(" ".join(prose.split()))


@each_page
def test_paragraphs_are_short(page: Path) -> None:
    for lines in paragraphs(page):
        assert len(lines) <= MOST_LINES, lines[0]
        assert max(map(len, lines)) <= MOST_COLUMNS, lines[0]


def test_pages_are_short() -> None:
    counted = {page.name: words(page.read_text()) for page in [*FOR_USERS, ROOT / "CONTRIBUTING.md"]}
    assert {name: count for name, count in counted.items() if count > MOST_WORDS} == {}
    assert sum(counted[page.name] for page in FOR_USERS) <= MOST_WORDS_OF_ALL
    assert words(text_of("CHANGELOG.md")) <= MOST_WORDS_OF_CHANGES


def test_the_glossary_says_each_word_once() -> None:
    defined = re.findall(r"\*\*([^*]+)\*\*", text_of("docs/glossary.md"))
    assert len(defined) == len(set(defined))


def test_words_of_the_glossary_are_on_the_pages_that_define_them() -> None:
    for paragraph in text_of("docs/glossary.md").split("\n\n"):
        for sentence in re.split(r"(?<=\.) (?=\[)", " ".join(paragraph.split())):
            if pages := re.match(r"\[\w+\.md\]", sentence) and LINK.findall(sentence):
                text = " ".join(text_of(f"docs/{page}") for page in pages).lower()
                assert [term for term in re.findall(r"(?<!\*)\*([\w -]+)\*", sentence) if term not in text] == []


def test_names_in_code_are_not_of_a_private_language() -> None:
    names_of = {path: defined_names(path) for path in (ROOT / "ddpwatch").rglob("*.py")}
    parts = {name: {part.lower() for part in NAME_PARTS.findall(name)} for found in names_of.values() for name in found}
    assert {name for name, found in parts.items() if found & PRIVATE_WORDS} == set()


def test_every_page_is_linked_from_the_readme() -> None:
    linked = {(ROOT / link.partition("#")[0]).resolve() for link in LINK.findall(text_of("README.md"))}
    assert set((ROOT / "docs").glob("*.md")) <= linked


def test_the_readme_lists_every_command_with_its_options() -> None:
    every = get_command(app).commands  # type: ignore[attr-defined]
    commands = {name: command for name, command in every.items() if not command.hidden}
    table = section("README.md", "## Commands")
    listed = {code.split()[1]: cells for code, cells in rows(table).items() if " " in code}
    assert listed.keys() == commands.keys()
    for name, cells in listed.items():
        options = set(chain.from_iterable(option.opts for option in commands[name].params))
        assert set(re.findall(r"(?<!\S)`?(--?[a-z][a-z-]*)", " ".join(cells))) <= options, name


def test_every_argument_and_option_has_help() -> None:
    every = get_command(app).commands  # type: ignore[attr-defined]
    params = [(name, param) for name, command in every.items() if not command.hidden for param in command.params]
    assert [(name, param.name) for name, param in params if not param.help] == []


def test_the_citation_is_of_this_version() -> None:
    assert f"\nversion: {__version__}\n" in text_of("CITATION.cff")


def test_every_message_is_in_the_architecture() -> None:
    documented = rows(section("docs/architecture.md", "## Messages"))
    assert documented.keys() == {kind.__name__ for kind in MESSAGE_TYPES.values()}


def test_every_kind_of_incident_is_in_the_diagnosis() -> None:
    table = section("docs/diagnosis.md", "## Incidents")
    documented = {name for line in table.splitlines() if line.startswith("| `") for name in names(line.split("|")[1])}
    assert documented == KINDS.keys() == set(get_args(Kind))


def test_the_layers_are_those_that_are_checked() -> None:
    block = section("docs/architecture.md", "## Modules").split("```\n")[1]
    drawn = [re.split(r"\s{2,}", line)[0] for line in block.splitlines()]
    layers = text_of("pyproject.toml").split("layers = [\n")[1].split("]\n")[0]
    assert drawn == [layer.replace("ddpwatch.", "") for layer in re.findall(r'"(.+)"', layers)]


def test_the_layers_are_the_whole_package() -> None:
    block = section("docs/architecture.md", "## Modules").split("```\n")[1]
    drawn = set(chain.from_iterable(re.split(r"\s{2,}", line)[0].split(" | ") for line in block.splitlines()))
    found = {
        path.stem for path in (ROOT / "ddpwatch").iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert drawn == found - {"__init__", "__main__"}


def test_every_view_has_its_files() -> None:
    """One of its name in each folder; the architecture names those that need no model of their own."""
    folders, without_model = section("docs/architecture.md", "## Modules").split("\nEach view ")[1].split("but for ")
    assert names(folders) == ["tui/views", "tui/paint", "tui/models"]
    for view in VIEWS.values():
        file = view.__module__.rpartition(".")[2] + ".py"
        missing = [folder for folder in names(folders) if not (ROOT / "ddpwatch" / folder / file).exists()]
        assert missing == (["tui/models"] if without_model.startswith(view.NAME) else []), file


def test_the_report_has_the_documented_keys(tmp_path: Path) -> None:
    report = report_of(record(tmp_path / "run.mcap")).as_json()
    assert report["findings"]
    assert_documented(report)


def test_explanations_have_the_documented_keys(tmp_path: Path) -> None:
    received_ns = 1_800_000_000 * 10**9
    report = report_of(record(tmp_path / "run.mcap", iter([*run_of(), *((each, received_ns) for each in a_pair())])))
    assert report.explained
    assert_documented(report.as_json())


def test_the_comparison_has_the_documented_keys(tmp_path: Path) -> None:
    paths = [record(tmp_path / f"{name}.mcap", run_of(steps=25)) for name in "ab"]
    assert_documented(compare_recordings(paths).as_json())


def test_the_doctor_has_the_documented_keys() -> None:
    assert_documented(document([Section("terminal").ok("size", "80x24")]))


def test_the_library_s_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record(tmp_path / "run.mcap", run_of(steps=200))
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", text_of("docs/recordings.md"), re.DOTALL)
    done: dict[str, object] = {}
    exec(code, done)
    assert done["columns"]


def test_the_tables_are_those_of_an_export() -> None:
    documented = rows(section("docs/recordings.md", "## Tables and library"))
    defined = {name for name, value in vars(tables).items() if name.endswith("Row") and isinstance(value, type)}
    assert {names(cells[2])[0] for cells in documented.values()} == defined


def test_the_settings_are_the_defaults() -> None:
    block = section("docs/guide.md", "## Settings").split("```toml\n")[1].split("```")[0]
    written = msgspec.toml.decode(block)
    assert written == msgspec.structs.asdict(Settings())


def test_the_ways_to_sample_exist(caplog: pytest.LogCaptureFixture) -> None:
    described = rows(section("docs/sampling.md", "## Detail"))
    assert [*described] == [*DETAILS, "2%"]
    for name in described:
        schedule_of({"DDPWATCH_DETAIL": name})
    assert not caplog.records


def test_every_variable_of_the_environment_is_described() -> None:
    """But for those that ddpwatch sets for its own processes."""
    internal = {"DDPWATCH_RUN", "DDPWATCH_RECORD", "DDPWATCH_STARTUP"}
    sources = "\n".join(path.read_text() for path in (ROOT / "ddpwatch").rglob("*.py"))
    read = set(re.findall(r'"(DDPWATCH(?:_[A-Z]+)*)"', sources)) - internal
    documented: Iterable[str] = chain.from_iterable(
        re.findall(r"DDPWATCH(?:_[A-Z]+)*", text_of(str(page))) for page in PAGES
    )
    assert read <= set(documented)


def test_every_row_on_deployment_is_a_test_or_says_that_it_was_not_tried() -> None:
    sources = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    tests = set(re.findall(r"^(?:async )?def (test_\w+)", sources, re.MULTILINE))
    table = [line for line in text_of("docs/deploy.md").splitlines() if line.startswith("|")]
    for line in table[2:]:
        checked_by = line.strip("|").split("|")[3]
        named = [name for name in names(checked_by) if name.startswith("test_")]
        assert named or "not tried" in checked_by, line
        assert set(named) <= tests, line


def test_the_versions_of_torch_that_are_tested_are_the_same_everywhere() -> None:
    """Those of `ddpwatch.version`."""
    oldest, newest = (".".join(map(str, version)) for version in (OLDEST_TORCH, NEWEST_TORCH))
    assert f'"torch>={oldest}"' in text_of("pyproject.toml")
    assert f"torch {oldest} to {newest}" in text_of("README.md")
    assert f"oldest that is tested is {oldest}, the newest {newest}" in section(
        "docs/safety.md", "## Versions of torch"
    )
    ci = re.search(r"newest=\(TORCH=([\d.]+) .*oldest=\(TORCH=([\d.]+) ", text_of(".ci/run"))
    assert ci is not None
    assert (ci[1].rpartition(".")[0], ci[2]) == (newest, f"{oldest}.0")
    assert f"TORCH ?= {ci[1]}\n" in text_of("Makefile")
