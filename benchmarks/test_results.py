"""`python -m benchmarks`: what it runs exists, and a new table takes the old one's place."""

from __future__ import annotations

import shlex
import sys

from benchmarks.__main__ import JOB, PLAN, PYTHON, ROOT, run, with_table


def test_a_table_takes_the_place_of_the_one_before() -> None:
    page = "# Results\n\n<!-- begin a -->\nold\n<!-- end a -->\n\nProse.\n"
    assert with_table(page, "a", "new") == page.replace("old", "new")
    both = with_table(page, "b", "other")
    assert both == f"{page}\n<!-- begin b -->\nother\n<!-- end b -->\n"
    assert with_table(both, "b", "other") == both


def test_what_a_benchmark_prints_is_kept_and_its_exit_code_known() -> None:
    code, printed = run(f"{PYTHON} -c 'import sys; print(sys.executable); sys.exit(3)'")
    assert (code, printed) == (3, f"{sys.executable}\n")


def test_every_benchmark_exists_and_is_described() -> None:
    described = (ROOT / "benchmarks" / "README.md").read_text()
    for command in PLAN.values():
        start, script, *_ = shlex.split(command)
        assert start in (JOB, PYTHON)
        assert (ROOT / script).exists()
        assert f"{start} {script}" in described
