"""Who is named slow from the figures of all ranks; whom ranks meet; and what `ddpwatch check` starts and says."""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner, Result

from ddpwatch.check.judge import RankMeasures, judge
from ddpwatch.check.measure import MOST_MEETINGS, meetings
from ddpwatch.check.text import render_check
from ddpwatch.cli import app
from ddpwatch.errors import UsageError
from ddpwatch.job.command import script_of, with_module

ROUNDS = 40
Speed = Callable[[int, int], float]


def figures(hosts: str, product: Callable[[int], float], link: Speed, seed: int = 0) -> list[RankMeasures]:
    """Ranks on hosts such as ``aabb``, with noise of 10 % and disturbances of all kinds in a tenth of the rounds."""
    dice = random.Random(seed)

    def noisy(value: float) -> list[float | None]:
        return [value * dice.gauss(1, 0.1) * (0.3 if dice.random() < 0.1 else 1) for _ in range(ROUNDS)]

    ranks = range(len(hosts))
    links = {(a, b): noisy(link(a, b)) for a in ranks for b in ranks if a < b}
    return [
        RankMeasures(
            rank=rank, host=host, device="cpu",
            figures={"matrix products": noisy(product(rank)), "clock": [None] * ROUNDS, "all-reduce": noisy(400)},
            links={peer: links[min(rank, peer), max(rank, peer)] for peer in ranks if peer != rank},
        )
        for rank, host in enumerate(hosts)
    ]  # fmt: skip


def within(a: int, b: int) -> float:
    return 1000 if a // 2 == b // 2 else 100


@pytest.mark.parametrize("seed", range(5))
def test_nobody_is_named_where_all_are_alike(seed: int) -> None:
    result = judge(figures("aabbcc", lambda _: 20, within, seed))
    assert result.slow == []
    assert (result.hosts, result.ranks, result.rounds) == (["a", "b", "c"], 6, ROUNDS)
    assert {figure.measure for figure in result.figures} == {"matrix products", "link", "all-reduce"}
    assert "no rank, host or link is slower" in render_check(result)


@pytest.mark.parametrize("seed", range(5))
def test_a_slow_rank_a_slow_host_and_a_slow_link_are_named(seed: int) -> None:
    """A host, by its links to the others: all pairs of its ranks are slow, and it alone is named."""
    slow_rank = judge(figures("aabbcc", lambda rank: 14 if rank == 3 else 20, within, seed))
    (text,) = slow_rank.slow
    assert text.startswith("rank 3 (b): matrix products 1")
    assert text.endswith(" % of the median")
    assert f"slow: {text}" in render_check(slow_rank)
    slow_host = judge(figures("aabbcc", lambda rank: 14 if rank > 3 else 20, within, seed))
    assert [one.partition(":")[0] for one in slow_host.slow] == ["c (ranks 4,5)"]
    slow_link = judge(figures("abc", lambda _: 20, lambda a, b: 30 if 1 in (a, b) else 100, seed))
    assert [one.partition(" link ")[0] for one in slow_link.slow] == ["b (rank 1):"]
    slow_pair = judge(figures("abcd", lambda _: 20, lambda a, b: 30 if (a, b) == (1, 3) else 100, seed))
    assert [one.partition(" link ")[0] for one in slow_pair.slow] == ["ranks 1 and 3 (b and d):"]


def test_of_two_ranks_the_slower_one_is_named_and_their_link_is_not() -> None:
    result = judge(figures("ab", lambda rank: 10 if rank else 20, lambda a, b: 10))
    assert [one.partition(":")[0] for one in result.slow] == ["b (rank 1)"]
    assert [figure.share for figure in result.figures if figure.measure == "link"] == [None]


def test_one_rank_has_nobody_to_be_compared_with() -> None:
    result = judge(figures("a", lambda _: 20, within))
    assert render_check(result).splitlines()[:2] == [
        "1 rank on 1 host, cpu: 40 rounds",
        "there is no other to compare it with",
    ]


@pytest.mark.parametrize("ranks", [2, 3, 8, 11, 200])
def test_ranks_meet_in_pairs(ranks: int) -> None:
    met = [meetings(rank, ranks) for rank in range(ranks)]
    assert len(met[0]) <= MOST_MEETINGS
    for turn in range(len(met[0])):
        for rank in range(ranks):
            peer = met[rank][turn]
            assert peer is None or met[peer][turn] == rank
    assert all(len(set(one)) == len(one) for one in met)
    assert ranks > MOST_MEETINGS or all({*one} - {None} == {*range(ranks)} - {at} for at, one in enumerate(met))


@pytest.mark.parametrize(
    ("command", "checked", "name"),
    [
        ("torchrun --nproc-per-node=2 train.py --lr 3 a.py", "torchrun --nproc-per-node=2 -m check", "train.py"),
        ("torchrun -m --nnodes=2 my.train -m x", "torchrun --nnodes=2 -m check", "my-train"),
        ("python -m torch.distributed.run --nnodes=2 train.py", "python -m torch.distributed.run --nnodes=2 -m check",
         "train.py"),
        ("srun -N2 torchrun", "srun -N2 torchrun -m check", "srun"),
    ],
)  # fmt: skip
def test_the_check_takes_the_script_s_place(command: str, checked: str, name: str) -> None:
    assert with_module(command.split(), "check", []) == checked.split()
    assert script_of(command.split()) == name


def test_it_is_started_by_torchrun(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from ddpwatch.check.__main__ import main

    monkeypatch.delenv("RANK", raising=False)
    assert main([]) == UsageError.exit_code
    assert "start it with torchrun" in capsys.readouterr().err
    assert "torch" in sys.modules


def test_the_command_starts_it_and_exits_with_what_it_found(tmp_path: Path) -> None:
    """The launcher here writes what ranks would."""
    launcher = tmp_path / "launcher"
    launcher.write_text(
        f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\nfor last; do :; done\ncp {tmp_path}/made "$last"\n'
    )
    launcher.chmod(0o700)

    def checked(*options: str) -> Result:
        return CliRunner().invoke(app, ["check", *options, "--", str(launcher), "train.py", "--lr", "3"])

    assert "did not come to an end" in str(checked().exception)
    for speed, code in ((20, 0), (10, 1)):
        made = judge(figures("ab", lambda rank, speed=speed: speed if rank else 20, lambda a, b: 10))  # type: ignore[misc]
        (tmp_path / "made").write_bytes(msgspec.json.encode(made))
        done = checked("--json", "--seconds", "5")
        assert done.exit_code == code
        assert json.loads(done.stdout) == json.loads(msgspec.json.encode(made))
    assert (tmp_path / "arguments").read_text().startswith("-m ddpwatch.check --seconds 5.0 --result /")
    assert "slow: b (rank 1): matrix products" in checked().stdout
