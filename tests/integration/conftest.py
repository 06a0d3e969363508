"""Options of the integration tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make safety-table` and `make framework-table`."""
    parser.addoption("--write-table", action="store_true", help="write the docs' tables from what the tests have seen")
