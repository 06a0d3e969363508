"""The lease: granted in one process, read in another, whatever is in the page."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from ddpwatch.errors import UsageError
from ddpwatch.sampling import lease
from ddpwatch.sampling.lease import (
    LEASE_NS,
    LONGEST_NS,
    SIZE,
    Lease,
    LeasePage,
    detail_name,
    detail_of_job,
    parse_detail,
)

NOW = 5_000_000_000


@pytest.fixture
def page(tmp_path: Path) -> LeasePage:
    return LeasePage(tmp_path / "r.lease")


@pytest.fixture
def rank(page: LeasePage, tmp_path: Path) -> Lease:
    made = Lease()
    made.open(tmp_path / "r.lease")
    return made


def budgets(rank: Lease, steps: range, now: int = NOW) -> list[int]:
    return [rank.budget_ppm(step, now) for step in steps]


def test_nothing_is_granted_until_somebody_looks(page: LeasePage, rank: Lease) -> None:
    assert budgets(rank, range(100)) == [0] * 100
    assert page.granted_ppm(NOW) == 0


def test_it_starts_and_ends_at_a_step(page: LeasePage, rank: Lease) -> None:
    page.grant(10_000, 7, NOW)
    page.renew(NOW)
    assert budgets(rank, range(5, 9)) == [0, 0, 10_000, 10_000]
    page.grant(30_000, 12, NOW)
    assert budgets(rank, range(6, 14)) == [0, *[10_000] * 5, 30_000, 30_000]
    page.grant(0, 20, NOW)
    assert budgets(rank, range(18, 22)) == [30_000, 30_000, 0, 0]


def test_it_runs_out_and_does_not_come_back_too_early(page: LeasePage, rank: Lease) -> None:
    """A collector that was suspended for a while grants it again, from a later step on."""
    page.grant(10_000, 7, NOW)
    page.renew(NOW)
    assert rank.budget_ppm(8, NOW + LEASE_NS - 1) == 10_000
    later = NOW + LEASE_NS
    assert rank.budget_ppm(8, later) == 0
    assert page.granted_ppm(later) == 0
    page.grant(10_000, 50, later)
    page.renew(later)
    assert budgets(rank, range(48, 52), later) == [0, 0, 10_000, 10_000]


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 8, b"\xff" * SIZE, b"\0" * SIZE, struct.pack("<Q", 1) * (SIZE // 8)]
)
def test_a_page_that_is_something_else_grants_nothing(content: bytes, tmp_path: Path) -> None:
    path, rank = tmp_path / "r.lease", Lease()
    path.write_bytes(content)
    rank.open(path)
    rank.open(tmp_path / "missing")
    rank.open(tmp_path)
    rank.open(None)
    assert budgets(rank, range(3)) == [0, 0, 0]


def test_a_page_of_another_clock_grants_nothing(
    page: LeasePage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In another time namespace, its deadline means something else."""
    page.grant(10_000, 0, NOW)
    page.renew(NOW)
    monkeypatch.setattr(lease.clock, "time_namespace", lambda: "time:[1]")
    rank = Lease()
    rank.open(tmp_path / "r.lease")
    assert rank.budget_ppm(1, NOW) == 0


@pytest.mark.parametrize("word", [0, 1, 2**20 - 1, 2**63, 2**64 - 1])
@pytest.mark.parametrize("deadline", [0, NOW, NOW + 1, NOW + LONGEST_NS, NOW + LONGEST_NS + 1, 2**64 - 1])
def test_whatever_the_page_says_the_budget_is_a_share_of_the_step(
    word: int, deadline: int, page: LeasePage, rank: Lease
) -> None:
    page._words[1], page._words[2], page._words[3] = deadline, word, 2**64 - 1 - word
    for step in (0, 1, 2**43, 2**44):
        assert 0 <= rank.budget_ppm(step, NOW) <= 1_000_000
        assert rank.budget_ppm(step, NOW) == 0 or NOW < deadline <= NOW + LONGEST_NS


def test_a_page_is_new_and_a_rank_cannot_write_it(page: LeasePage, rank: Lease, tmp_path: Path) -> None:
    """The collector that was started again makes another: ranks go on reading the old one until they open the new."""
    page.grant(10_000, 0, NOW)
    page.renew(NOW)
    target = tmp_path / "target"
    target.write_bytes(b"precious")
    (tmp_path / "r.lease").unlink()
    (tmp_path / "r.lease").symlink_to(target)
    again = LeasePage(tmp_path / "r.lease")
    assert target.read_bytes() == b"precious"
    assert rank.budget_ppm(0, NOW) == 10_000
    rank.open(tmp_path / "r.lease")
    assert rank.budget_ppm(0, NOW) == 0
    again.grant(500, 0, NOW)
    again.renew(NOW)
    assert rank.budget_ppm(0, NOW) == 500
    with pytest.raises(TypeError):
        rank._words[1] = 0  # type: ignore[index]


@pytest.mark.parametrize(
    ("text", "ppm"),
    [
        ("low", 0),
        ("normal", 10_000),
        ("high", 1_000_000),
        ("1", 10_000),
        ("0.5%", 5_000),
        ("0", 0),
        (" 100 % ", 1_000_000),
        ("1e-4", 1),
    ],
)
def test_a_detail_is_a_word_or_a_percentage(text: str, ppm: int) -> None:
    assert parse_detail(text) == ppm
    assert parse_detail(detail_name(ppm)) == ppm


@pytest.mark.parametrize(
    ("environment", "records", "ppm"),
    [
        ({}, False, 0),
        ({}, True, 10_000),
        ({"DDPWATCH_DETAIL": "low"}, True, 0),
        ({"DDPWATCH_DETAIL": "2"}, False, 20_000),
    ],
)
def test_a_recording_asks_for_what_a_viewer_would(environment: dict[str, str], records: bool, ppm: int) -> None:
    assert detail_of_job(environment, records) == ppm


@pytest.mark.parametrize("text", ["", "-1", "101", "nan", "inf", "one", "1 0"])
def test_anything_else_is_refused_with_a_hint(text: str) -> None:
    with pytest.raises(UsageError, match="is no detail") as caught:
        parse_detail(text)
    assert "low, normal, high" in caught.value.hint
