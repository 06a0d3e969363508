"""A host whose ranks are late together is one incident; a single late rank of it stays that rank's."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from ddpwatch.analysis.diagnosis.causes.slow_host import by_host
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.placement import Host
from ddpwatch.analysis.run import Run
from ddpwatch.wire.messages import ClockExchange, Message
from tests.support.frames import enveloped, hello, layout, synchronous

NAMES = {0: "a", 1: "a", 2: "a", 3: "b", 4: "b", 5: "b"}
HOSTS = {rank: Host(name, f"boot {name}") for rank, name in NAMES.items()}


def late(rank: int, since: int = 0, until: int = 9, cost: int = 10, **changes: object) -> Incident:
    about = {
        "kind": "straggler", "severity": "warning", "message": "", "ranks": (rank,), "phase": "backward",
        "since_step": since, "until_step": until, "steps": until - since + 1, "cost_ns": cost, "gain": 0.1,
        "evidence": Evidence(late_ms=5.0 + rank, step_ms=100.0), "open": True,
    }  # fmt: skip
    return Incident(**{**about, **changes})  # type: ignore[arg-type]


def test_most_ranks_of_a_host_are_the_host() -> None:
    [found] = by_host([late(3), late(5, 4, 12)], HOSTS)
    assert (found.kind, found.ranks, found.phase, found.cost_ns) == ("slow_host", (3, 4, 5), "backward", 20)
    assert (found.since_step, found.until_step, found.open, found.gain) == (0, 12, True, 0.2)
    assert (
        found.message
        == "host b is slow: 2 of its 3 ranks are late, by up to 10 ms in each step: their backward takes longer"
    )
    assert found.evidence.late_ranks == [3, 5]


@pytest.mark.parametrize(
    ("incidents", "hosts"),
    [
        ([late(3)], HOSTS),  # one of three
        ([late(2), late(3)], HOSTS),  # of different hosts
        ([late(3, 0, 9), late(4, 10, 19)], HOSTS),  # one after the other
        ([late(3), late(4)], dict.fromkeys(HOSTS, HOSTS[0])),  # there is no other host
        ([late(3), late(4, kind="intermittent")], HOSTS),
        ([late(3), late(4)], {}),
    ],
)
def test_other_late_ranks_stay_what_they_are(incidents: list[Incident], hosts: dict[int, Host]) -> None:
    assert sorted(by_host(incidents, hosts), key=lambda one: one.ranks) == incidents


def ping(node: Host, root: Host, at_ns: int) -> ClockExchange:
    """The two clocks agree, as far as 100 µs there and 100 µs back can show."""
    replied = at_ns + 100_000
    return ClockExchange(
        node=1, node_boot_id=node.boot_id, root_boot_id=root.boot_id, sent_ns=at_ns, received_ns=replied,
        replied_ns=replied, returned_ns=replied + 100_000,
    )  # fmt: skip


def job(late_ranks: tuple[int, ...], hosts: dict[int, Host] = HOSTS) -> Iterator[Message]:
    """40 steps of two hosts; the late ranks take turns to be last, by 30 to 32 ms."""
    for rank, (name, boot_id) in hosts.items():
        yield hello(rank, len(hosts), host=name, boot_id=boot_id)
        yield layout(rank)
    lateness = [[30 + (number + rank) % 3 if rank in late_ranks else 0 for rank in hosts] for number in range(40)]
    for ranks in synchronous(lateness, statuses={0: "warmup"}):
        yield from ranks
        yield ping(hosts[5], hosts[0], ranks[0].start_ns)


def test_a_slow_host_is_named_and_its_cost_is_its_ranks() -> None:
    run = Run()
    for _ in run.steps(enveloped(job((4, 5)))):
        pass
    [slow] = [row for row in run.incidents() if row.kind in ("slow_host", "straggler")]
    assert (slow.kind, slow.ranks, slow.phase) == ("slow_host", [3, 4, 5], "backward")
    waited = [account for account in run.lost().accounts if account.account == "waiting"]
    assert {account.rank for account in waited} <= {4, 5}
    assert sum(account.seconds for account in waited) == pytest.approx(slow.seconds, rel=0.01)


def test_ranks_that_are_late_together_cost_what_the_other_hosts_wait() -> None:
    """Not only what the last of them is later than the next, which is on the same slow host."""
    run = Run()
    for _ in run.steps(enveloped(job((3, 4, 5)))):
        pass
    [slow] = [row for row in run.incidents() if row.kind in ("slow_host", "straggler")]
    each_s = 3 * 0.022  # the other host's ranks compute 10 ms of the 32 that they are ahead
    assert 0.75 * 39 * each_s < slow.seconds <= 40 * each_s


def test_two_hosts_of_one_name_are_two() -> None:
    run = Run()
    for _ in run.steps(enveloped(job((4, 5), {rank: Host("node", boot_id) for rank, (_, boot_id) in HOSTS.items()}))):
        pass
    [slow] = [row for row in run.incidents() if row.kind in ("slow_host", "straggler")]
    assert (slow.kind, slow.ranks) == ("slow_host", [3, 4, 5])
    assert slow.message.startswith("host node (ranks 3–5) is slow: 2 of its 3 ranks are late")
