"""Options of the integration tests, and the end of their fork server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.fork_server import close_the_server


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make safety-table` and `make framework-table`."""
    parser.addoption("--write-table", action="store_true", help="write the docs' tables from what the tests have seen")


@pytest.fixture(scope="session", autouse=True)
def _no_server_is_left() -> Iterator[None]:
    yield
    close_the_server()
