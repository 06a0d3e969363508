"""Ranks on several clocks: put onto one time line by their collectives, and compared as far as the error allows."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ddpwatch.analysis.across_ranks import StepAcrossRanks
from ddpwatch.analysis.buckets import BucketTable, bucket_steps, bus_bandwidths
from ddpwatch.analysis.clock_offset import at_least, at_most
from ddpwatch.analysis.clocks import ClockDomains, clock_of
from ddpwatch.analysis.launch_skew import NO_SKEW
from ddpwatch.analysis.report_builder import ReportBuilder
from ddpwatch.analysis.run import steps_across_ranks
from ddpwatch.analysis.window import summarise
from ddpwatch.report.tables import tables
from ddpwatch.tui.paint.canvas import plain
from ddpwatch.tui.paint.collectives import paint_bucket, paint_collectives
from ddpwatch.wire.messages import ClockExchange, Group, Hello, Message, Step
from tests.support.frames import MS, START_NS, STEP_MS, hello, light, state_of, step

# What a host's clock shows more than that of host a (ns).
AHEAD = {"a": 0, "b": 7 * 10**15, "c": -(10**12), "d": 5, "e": 10**14, "f": 10**9}
TRANSFER_MS = 1.0
NO_DRIFT: Mapping[str, float] = {}


def host_hello(rank: int, host: str, world: int) -> Hello:
    return hello(rank, world, host=host, boot_id=f"boot {host}")


def launched(rank: int, number: int, at_ms: float, done_ms: float, host: str = "a", drift_ppm: float = 0) -> Step:
    """A step with two buckets, launched at that time (ms) and 20 ms later; times are those of host a."""
    start = START_NS + number * STEP_MS * MS
    start += AHEAD[host] + round(start * drift_ppm * 1e-6)
    launch = [int(at_ms * MS), int((at_ms + 20) * MS)]
    done = [int(done_ms * MS), int((done_ms + 20) * MS)]
    return step(rank, number, start_ns=start, comm_ready=launch, comm_launch=launch, comm_done=done)


def together(
    number: int, launches: Sequence[float], hosts: Sequence[str], drifts: Mapping[str, float] = NO_DRIFT
) -> list[Step]:
    """One step with the given launches; all ranks are done a millisecond after the last."""
    done = max(launches) + TRANSFER_MS
    return [
        launched(rank, number, at, done, hosts[rank], drifts.get(hosts[rank], 0)) for rank, at in enumerate(launches)
    ]


def job(
    hosts: Sequence[str], steps: Sequence[Sequence[float]], drifts: Mapping[str, float] = NO_DRIFT
) -> Iterator[Message]:
    """A job with each rank on the given host; ``steps`` has the launches of each step."""
    for rank, host in enumerate(hosts):
        yield host_hello(rank, host, len(hosts))
    for number, launches in enumerate(steps):
        yield from together(number, launches, hosts, drifts)


IN_TURN: list[list[float]] = [
    [40.0, 41.0, 40.0, 40.0],
    [40.0, 40.0, 42.0, 40.0],
    [43.0, 40.0, 40.0, 40.0],
    [40.0, 40.0, 40.0, 45.0],
]  # each rank is last in one step
HOSTS = ("a", "a", "b", "b")


def test_ranks_of_two_hosts_are_compared_with_an_error() -> None:
    """Each host is last in some step: there, its launch precedes the done by 1 ms. So the error is 1 ms."""
    across = list(steps_across_ranks(job(HOSTS, IN_TURN)))[-1]
    assert across.comparable
    skew = across.skew
    assert skew.error == pytest.approx(TRANSFER_MS * MS, abs=0.1 * MS)
    assert {rank: round(error / MS, 1) for rank, error in skew.errors.items()} == {0: 0, 1: 0, 2: 1, 3: 1}
    for rank, truth in enumerate([0, 0, 0, 5]):
        assert abs(skew.late[rank] - truth * MS) <= skew.error
        assert abs(skew.wait[rank] - (5 - truth) * MS) <= skew.error
    assert [bucket.last_ranks for bucket in skew.buckets.values()] == [(3,), (3,)]
    assert [bucket.last_rank for bucket in skew.buckets.values()] == [3, 3]


def test_the_example_in_the_docs() -> None:
    messages: list[Message] = [host_hello(0, "a", 2), host_hello(1, "b", 2)]
    for number, (a, b) in enumerate([((40, 45), (1041, 1045)), ((147, 149), (1142, 1149))]):
        for rank, (launch, done) in enumerate((a, b)):
            changes: dict[str, object] = {"comm_launch": [launch * MS], "comm_done": [done * MS], "comm_ready": [None]}
            changes |= {"comm_module": [0], "comm_label": [0], "comm_bytes": [1]}
            one = msgspec.structs.replace(step(rank, number), **changes)
            messages.append(msgspec.structs.replace(one, start_ns=0, duration_ns=1200 * MS))
    first, second = steps_across_ranks(messages)
    shifts = [(across.shifts[1].offset / MS, across.shifts[1].error / MS) for across in (first, second)]
    assert shifts == [pytest.approx((-1000.5, 4.5), abs=0.3), pytest.approx((-999, 3), abs=0.3)]
    assert second.skew.late[0] == pytest.approx(4 * MS, abs=0.3 * MS)
    assert [bucket.last_rank for bucket in second.skew.buckets.values()] == [0]
    assert [bucket.last_ranks for bucket in first.skew.buckets.values()] == [(0, 1)]


def test_live_and_recorded_steps_are_compared_alike() -> None:
    live = state_of(list(job(HOSTS, IN_TURN))).steps
    assert [across.skew for across in live.values()] == [
        across.skew for across in steps_across_ranks(job(HOSTS, IN_TURN))
    ]
    assert all(across.comparable for across in live.values())


def test_a_lead_within_the_error_names_all_that_may_have_been_last() -> None:
    """Rank 2 leads by 0.5 ms over rank 1, on another clock; over rank 3, on the same one, 10 µs are certain."""
    across = list(steps_across_ranks(job(HOSTS, [*IN_TURN, [40.0, 49.5, 50, 49.99]])))[-1]
    assert [bucket.last_ranks for bucket in across.skew.buckets.values()] == [(1, 2), (1, 2)]
    assert [bucket.last_rank for bucket in across.skew.buckets.values()] == [None, None]


def test_a_transfer_as_short_as_the_error_is_not_known() -> None:
    short = list(steps_across_ranks(job(HOSTS, IN_TURN)))[-1]
    assert {bucket.transfer for bucket in short.skew.buckets.values()} == {None}
    assert set(bus_bandwidths(short).values()) == {None}
    messages = list(job(HOSTS, [*IN_TURN, IN_TURN[0]]))
    for one in messages[-4:]:
        assert isinstance(one, Step)
        one.comm_done = [None if done is None else done + 30 * MS for done in one.comm_done]
    across = list(steps_across_ranks(messages))[-1]
    for bucket in across.skew.buckets.values():
        assert bucket.transfer is not None
        assert abs(bucket.transfer - 31 * MS) <= across.skew.error


def test_without_completions_ranks_of_two_hosts_are_not_compared() -> None:
    messages: list[Message] = [host_hello(0, "a", 2), host_hello(1, "b", 2), light(0), light(1)]
    for across in (*steps_across_ranks(messages), *state_of(messages).steps.values()):
        assert not across.comparable
        assert across.skew == NO_SKEW


def test_what_was_handed_back_at_once_proves_nothing() -> None:
    """A comm hook without communication is done before other ranks launch."""
    ranks = [msgspec.structs.replace(one, reduced=False) for one in together(0, [40, 60], "ab")]
    messages: list[Message] = [host_hello(0, "a", 2), host_hello(1, "b", 2), *ranks]
    assert [across.comparable for across in steps_across_ranks(messages)] == [False]


def test_a_gpus_own_error_counts() -> None:
    """On one host's clock; rank 1 is 2 ms ahead of rank 0, and each may be off by 1.5 ms."""
    across = StepAcrossRanks(0)
    for one in together(0, [40, 42, 30], "aaa"):
        across.add_step(msgspec.structs.replace(one, clock_error_ns=None if one.rank == 2 else 3 * MS // 2))
    assert across.skew.error == 3 * MS
    assert across.skew.errors == {0: 3 * MS // 2, 1: 3 * MS // 2, 2: 0}
    assert {bucket.last_ranks for bucket in across.skew.buckets.values()} == {(0, 1)}
    domains, (first, second) = ClockDomains(), together(0, [40, 40], "ab")
    for rank, host in enumerate("ab"):
        domains.meet(host_hello(rank, host, 2))
    domains.observe({0: first, 1: msgspec.structs.replace(second, clock_error_ns=4 * MS)})
    assert domains.shifts({0: first, 1: second})[1].error == pytest.approx(5 * MS, abs=0.2 * MS)


def test_one_clock_costs_no_error() -> None:
    across = list(steps_across_ranks(job("aaaa", IN_TURN)))[-1]
    assert (across.shifts, across.skew.errors, across.skew.error) == ({}, {}, 0)
    assert {bucket.last_ranks for bucket in across.skew.buckets.values()} == {(3,)}
    assert {bucket.transfer for bucket in across.skew.buckets.values()} == {TRANSFER_MS * MS}


HOST = st.sampled_from("abc")
LAUNCHES = st.lists(st.integers(0, 80).map(lambda tenth: 40 + tenth / 10), min_size=4, max_size=4)


@given(
    st.tuples(HOST, HOST, HOST, HOST),
    st.lists(LAUNCHES, min_size=1, max_size=12),
    st.dictionaries(HOST, st.floats(-50, 50)),
)
@settings(max_examples=40)
def test_the_truth_is_inside(hosts: tuple[str, ...], steps: list[list[float]], drifts: dict[str, float]) -> None:
    """Of every step, however few there are: late, wait, transfer, and who was last."""
    drifts.pop(hosts[0], None)
    for number, across in enumerate(steps_across_ranks(job(hosts, steps, drifts))):
        launches, skew = steps[number], across.skew
        assert across.comparable
        rounding = 2
        for rank, at in enumerate(launches):
            assert abs(skew.late[rank] - (at - min(launches)) * MS) <= skew.error + rounding
            assert abs(skew.wait[rank] - (max(launches) - at) * MS) <= skew.error + rounding
        last = {rank for rank, at in enumerate(launches) if at == max(launches)}
        for bucket in skew.buckets.values():
            assert last <= set(bucket.last_ranks) or (skew.error == 0 and bucket.last_rank in last)
            assert bucket.transfer is None or abs(bucket.transfer - TRANSFER_MS * MS) <= skew.error + rounding


def grouped(one: Step, group: int) -> Step:
    return msgspec.structs.replace(one, comm_group=[group] * len(one.comm_label))


def in_groups(groups: Mapping[int, tuple[int, ...]], hosts: str, steps: Sequence[Sequence[float]]) -> list[Message]:
    """A job whose ranks reduce within the given groups only."""
    messages: list[Message] = [host_hello(rank, host, len(hosts)) for rank, host in enumerate(hosts)]
    of_rank = {rank: group for group, ranks in groups.items() for rank in ranks}
    messages += [Group(rank=rank, id=group, ranks=list(groups[group])) for rank, group in of_rank.items()]
    for number, launches in enumerate(steps):
        for group, ranks in groups.items():
            done = max(launches[rank] for rank in ranks) + TRANSFER_MS
            messages += [grouped(launched(rank, number, launches[rank], done, hosts[rank]), group) for rank in ranks]
    return messages


def test_hosts_that_share_no_collective_are_compared_by_way_of_a_third() -> None:
    """Groups on hosts a and c, b and c, and a and b do not meet. c's clock counts from a's, and b's from c's."""
    groups = {100: (0, 2), 101: (1, 3)}
    lateness: list[list[float]] = [[40, 40, 41, 40], [41, 40, 40, 41], [40, 43, 40, 40], [42, 40, 40, 40]]
    across = list(steps_across_ranks(in_groups(groups, "abcc", lateness)))[-1]
    assert across.comparable
    assert abs(across.start_of(1) - across.start_of(0)) <= across.shifts[1].error
    assert across.shifts[1].error > across.shifts[2].error


def test_groups_on_hosts_that_nothing_connects_are_compared_within_themselves() -> None:
    """As with pipeline stages, each on two hosts: there is no common time line, but late and wait of each are known."""
    groups = {100: (0, 1), 102: (2, 3)}
    hosts = {0: "a", 1: "b", 2: "c", 3: "d"}
    messages = in_groups(groups, "abca", [[40, 41, 40, 43], [41, 40, 43, 40]])
    messages = [
        msgspec.structs.replace(m, host="d", boot_id="boot d") if isinstance(m, Hello) and m.rank == 3 else m
        for m in messages
    ]
    assert len(hosts) == 4
    across = list(steps_across_ranks(messages))[-1]
    assert not across.comparable
    assert set(across.skew.late) == {0, 1, 2, 3}
    assert abs(across.skew.wait[3] - 3 * MS) <= across.skew.error


def test_a_clock_that_jumps_is_followed() -> None:
    messages = list(job("ab", [[40.0, 41], [41, 40]] * 20))
    jumped = [
        msgspec.structs.replace(one, start_ns=one.start_ns + 10**12)
        if isinstance(one, Step) and one.rank == 1 and one.step >= 20
        else one
        for one in messages
    ]
    steps = list(steps_across_ranks(jumped))
    assert all(across.comparable and abs(across.start_of(1) - across.start_of(0)) <= 1.2 * MS for across in steps[1:])


def test_further_bounds_narrow_an_offset() -> None:
    """As of ping exchanges."""
    domains, steps = ClockDomains(), dict(enumerate(together(0, [40, 70], "ab")))
    hellos = [host_hello(rank, host, 2) for rank, host in enumerate("ab")]
    for one in hellos:
        domains.meet(one)
    domains.observe(steps)
    assert domains.shifts(steps)[1].error > 15 * MS
    at = steps[1].start_ns
    offset = domains.offset(clock_of(hellos[1]), clock_of(hellos[0]))
    offset.add_bounds(at_least(at, -AHEAD["b"] - 1000), at_most(at, -AHEAD["b"] + 1000))
    assert domains.shifts(steps)[1].error < 0.03 * MS


def test_a_rank_that_moves_to_another_host_leaves_nothing_behind() -> None:
    domains = ClockDomains()
    for boot in range(50):
        domains.meet(host_hello(0, "a", 2))
        domains.meet(hello(1, 2, boot_id=f"boot {boot}"))
        domains.observe(dict(enumerate(together(0, [40, 41], "ab"))))
    assert domains.several
    assert len(domains._offsets) == 1
    domains.meet(host_hello(1, "a", 2))
    assert not domains.several


def test_the_clock_is_named_by_boot_and_time_namespace() -> None:
    def several(*clocks: tuple[str, str]) -> bool:
        domains = ClockDomains()
        for rank, (boot, namespace) in enumerate(clocks):
            domains.meet(hello(rank, 2, boot_id=boot, time_ns=namespace))
        return domains.several

    assert not several(("a", "n"), ("a", "n"))
    assert several(("a", "n"), ("b", "n"))
    assert several(("a", "n"), ("a", "m"))


def test_views_and_reports_name_the_candidates() -> None:
    """In most steps rank 2 leads by 0.5 ms over rank 1, which is within the error."""
    messages = list(job(HOSTS, [*IN_TURN, *[[40.0, 49.5, 50, 45]] * 20]))
    state = state_of(messages)
    table = BucketTable()
    table.update(state.recent())
    assert {(row.last_ranks, row.last_share) for row in table.rows(state.layouts)} == {((1, 2), 20 / 24)}
    assert all(found.last_ranks == (1, 2) for found in bucket_steps(state.steps[23]).values())
    rows = table.rows(state.layouts)
    assert "1 or 2 83%" in plain(paint_collectives(rows, (150, 8), 0, 0, "bucket"))[1]
    detail = paint_bucket(rows[0], table.history(rows[0].bucket), [], [], (150, 30))
    assert "last on one of 1, 2 in 83 %" in plain(detail)[0]
    errors_ns = [summary.clock_error_ns for summary in summarise(state.recent()).ranks.values()]
    assert errors_ns[:2] == [0, 0]
    assert errors_ns[3] is not None
    assert errors_ns[3] > 1 * MS
    builder = ReportBuilder()
    for message in messages:
        builder.apply_message(message)
    made = builder.report()
    report = made.as_json()
    assert {(row["last_rank"], tuple(row["last_ranks"])) for row in report["collectives"]} == {(None, (1, 2))}
    errors = [row["clock_error_ms"] for row in report["ranks"]]
    assert errors[:2] == [0, 0]
    assert errors[2] == errors[3] > 1
    shown = {table.title.split()[0]: table for table in tables(made)}
    assert [row[-1] for row in shown["Collectives"].rows] == ["one of 1, 2: 83 %"] * 2
    assert "clock ±ms" in shown["Ranks"].header


def test_too_many_candidates_are_not_named() -> None:
    """Five of six hosts launch within the error of each other; only how long they were late is known, within it."""
    ranks = [[44.0 if rank == last else 40.0 for rank in range(6)] for last in range(6)]
    builder = ReportBuilder()
    for message in job("abcdef", [*ranks, *[[44.0, 44.1, 44.2, 44.1, 44.0, 40.0]] * 20]):
        builder.apply_message(message)
    report = builder.report().as_json()
    assert None not in [row["late_ms_p50"] for row in report["ranks"]]
    for row in report["collectives"]:
        assert (row["last_rank"], row["last_ranks"], row["last_share"]) == (None, [], None)


def test_one_clock_shows_no_error() -> None:
    builder = ReportBuilder()
    for message in job("aaaa", IN_TURN):
        builder.apply_message(message)
    made = builder.report()
    report = made.as_json()
    assert {row["clock_error_ms"] for row in report["ranks"]} == {None}
    assert all("clock" not in " ".join(table.header) for table in tables(made))


# -- pings -----------------------------------------------------------------------------------------------------------

SECOND_NS = 1000 * MS
US = 1000


def ping(at_ns: int, ahead: Callable[[int], int], there_ns: int, back_ns: int, host: str = "b") -> ClockExchange:
    """An exchange at a time of the root's clock, on host a; a host's clock shows ``ahead`` more."""
    received = at_ns + there_ns
    replied = received + 5 * US
    returned = replied + back_ns
    return ClockExchange(
        node=1, node_boot_id=f"boot {host}", root_boot_id="boot a", sent_ns=at_ns + ahead(at_ns),
        received_ns=received, replied_ns=replied, returned_ns=returned + ahead(returned),
    )  # fmt: skip


def pinged(hosts: Sequence[str], steps: Sequence[Sequence[float]], half_ns: int) -> list[Message]:
    """A job whose agents have pinged the root for 20 s before its first step."""
    messages = list(job(hosts, steps))
    pings = [
        ping(START_NS - second * SECOND_NS, lambda _, host=host: AHEAD[host], half_ns, half_ns, host)  # type: ignore[misc]
        for second in range(20, 0, -2)
        for host in dict.fromkeys(hosts)
        if host != "a"
    ]
    return [*messages[: len(hosts)], *pings, *messages[len(hosts) :]]


LATE_EVERY_TIME = [[40.0, 40.0, 45.0, 40.0]] * 12  # rank 2, on host b, by 5 ms


def test_a_host_that_is_late_in_every_step_is_told_from_its_clock_by_pings() -> None:
    """Without pings, 5 ms late and a clock that is 5 ms ahead look alike."""
    without = list(steps_across_ranks(job(("a", "a", "b", "c"), LATE_EVERY_TIME)))[-1]
    assert [bucket.last_rank for bucket in without.skew.buckets.values()] == [None, None]
    assert {2} < set(next(iter(without.skew.buckets.values())).last_ranks)
    across = list(steps_across_ranks(pinged(("a", "a", "b", "c"), LATE_EVERY_TIME, 200 * US)))[-1]
    assert [bucket.last_ranks for bucket in across.skew.buckets.values()] == [(2,), (2,)]
    assert across.skew.error <= 600 * US
    assert abs(across.skew.late[2] - 5 * MS) <= across.skew.error


def test_live_views_use_pings_too() -> None:
    live = state_of(pinged(("a", "a", "b", "c"), LATE_EVERY_TIME, 200 * US)).steps
    recorded = list(steps_across_ranks(pinged(("a", "a", "b", "c"), LATE_EVERY_TIME, 200 * US)))
    assert [across.skew for across in live.values()] == [across.skew for across in recorded]


def truth_is_inside(domains: ClockDomains, ahead: Callable[[int], int], at_ns: int) -> bool:
    low, high = domains.offset(("boot b", ""), ("boot a", "")).between(at_ns + ahead(at_ns), at_ns + ahead(at_ns))
    return low <= -ahead(at_ns) <= high


@pytest.mark.parametrize("ppm", [-50.0, 50.0])
def test_pings_hold_the_truth_for_an_hour(ppm: float) -> None:
    """The ways there and back differ, and take from 40 µs to some ms. Of eight pings, the shortest counts."""
    domains, dice = ClockDomains(), random.Random(7)
    ahead = lambda at: 10**12 + round(at * ppm * 1e-6)  # noqa: E731
    for at in range(0, 3600 * SECOND_NS, 2 * SECOND_NS):
        ways = [[40 * US + int(dice.expovariate(1 / mean)) for mean in (MS / 3, MS)] for _ in range(8)]
        domains.exchange(ping(at, ahead, *min(ways, key=sum)))
        assert truth_is_inside(domains, ahead, at)
        assert truth_is_inside(domains, ahead, at + 2 * SECOND_NS)
    offset = domains.offset(("boot b", ""), ("boot a", ""))
    low, high = offset.newest
    assert high - low < 250 * US
    assert offset.epoch == 0


@given(
    st.floats(-50, 50),
    st.lists(
        st.tuples(st.integers(1, 30_000), st.integers(US, 20 * MS), st.integers(US, 20 * MS)), min_size=1, max_size=20
    ),
)
@settings(max_examples=50)
def test_pings_hold_the_truth_whatever_the_ways_take(ppm: float, pings: list[tuple[int, int, int]]) -> None:
    domains, at = ClockDomains(), 0
    ahead = lambda at: -(10**15) + round(at * ppm * 1e-6)  # noqa: E731
    for pause_ms, there, back in pings:
        at += pause_ms * MS
        domains.exchange(ping(at, ahead, there, back))
        assert truth_is_inside(domains, ahead, at)
        assert truth_is_inside(domains, ahead, at + 30 * SECOND_NS)


def test_a_clock_that_jumps_is_found_by_pings() -> None:
    domains = ClockDomains()
    for second in range(100):
        jump = 3 * SECOND_NS if second >= 60 else 0
        ahead = lambda _, jump=jump: 10**12 + jump  # noqa: E731
        domains.exchange(ping(second * SECOND_NS, ahead, 50 * US, 90 * US))
        assert truth_is_inside(domains, ahead, second * SECOND_NS)
    assert domains.offset(("boot b", ""), ("boot a", "")).epoch == 1


def test_impossible_pings_and_those_of_the_roots_own_host_count_for_nothing() -> None:
    domains = ClockDomains()
    backwards = msgspec.structs.replace(ping(0, lambda _: 0, 10, 10), replied_ns=SECOND_NS)
    domains.exchange(backwards)
    domains.exchange(ping(0, lambda _: 0, 10, 10, "a"))
    assert not domains.offset(("boot b", ""), ("boot a", "")).bounded
    assert not domains.offset(("boot a", ""), ("boot a", "")).bounded
