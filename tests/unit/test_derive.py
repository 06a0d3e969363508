"""What the sender thread derives, from plain numbers: forward ends at 1,000, gradients 100 ns apart, two per bucket."""

from __future__ import annotations

import pytest

from ddpwatch.probe.derive import HOOKS_PERIOD, ModuleLayout, derive_launches, derive_ready
from ddpwatch.probe.record import BucketRecord, RecordedBucket, StepRecord
from ddpwatch.sampling.schedule import is_sampled
from ddpwatch.wire.messages import BucketLayout

FORWARD_END = 1000
STATS = [400, 300, 200, 100]  # by parameter: the last one's gradient comes first
BASE = 50  # id of the module's first parameter
WITH_HOOKS = next(step for step in range(100) if is_sampled(step, HOOKS_PERIOD))
WITHOUT_HOOKS = next(step for step in range(100) if not is_sampled(step, HOOKS_PERIOD))


def layout_of(*params: list[int]) -> ModuleLayout:
    buckets = [BucketLayout(index, 8 * len(ids), ids) for index, ids in enumerate(params)]
    return ModuleLayout(module=1, param_base=BASE, param_count=4, buckets=buckets)


def two_buckets() -> ModuleLayout:
    return layout_of([3, 2], [1, 0])


def step_of(*launches: int, step: int = 0) -> StepRecord:
    record = StepRecord(step, start=900)
    record.end = 2000
    record.buckets = [BucketRecord(1, index, 16, launch) for index, launch in enumerate(launches)]
    return record


def derived_ready(layout: ModuleLayout, record: StepRecord, stats: list[int] | None = STATS) -> list[int | None]:
    derive_ready(layout, stats, FORWARD_END, record.buckets, record)
    return [bucket.ready for bucket in record.buckets]


def derived_launches(layout: ModuleLayout, record: StepRecord, stats: list[int] | None = STATS) -> list[int]:
    """Offsets from the step's start."""
    derive_launches(layout, stats, FORWARD_END, (7, 9), record)
    return [launch for launch, *_ in record.derived]


def test_a_bucket_is_ready_with_its_last_gradient() -> None:
    record = step_of(1230, 1440)
    assert derived_ready(two_buckets(), record) == [1200, 1400]
    assert record.hooks == [(BASE, 1400), (BASE + 1, 1300), (BASE + 2, 1200), (BASE + 3, 1100)]
    assert record.last_hook == BASE


def test_no_bucket_is_ready_after_its_launch() -> None:
    """What seems to be shows how much earlier DDP's clock starts than the probe's stamp of the forward's end."""
    record = step_of(1190, 1440)
    assert derived_ready(two_buckets(), record) == [1190, 1390]
    assert dict(record.hooks)[BASE] == 1390


def test_the_lag_of_a_bucket_is_learnt_unless_it_waited_for_the_one_before() -> None:
    layout = two_buckets()
    derived_ready(layout, step_of(1230, 1440))
    assert layout.lag_ns == {0: 30, 1: 40}
    derived_ready(layout, step_of(1450, 1460))  # bucket 1 is ready at 1,400, before bucket 0 has been launched
    assert layout.lag_ns == {0: 250, 1: 40}


def test_ready_is_unknown_until_the_parameters_of_a_bucket_are_known() -> None:
    layout = layout_of([], [])
    assert derived_ready(layout, step_of(1230, 1440)) == [None, None]
    assert layout.lag_ns == {}


def test_a_bucket_that_no_layout_has_is_not_ready() -> None:
    assert derived_ready(layout_of([3, 2]), step_of(1230, 1440)) == [1200, None]


def test_an_unused_parameter_is_never_last() -> None:
    record = step_of(1230, 1340)
    assert derived_ready(two_buckets(), record, [0, 300, 200, 100]) == [1200, 1300]
    assert record.last_hook == BASE + 1
    assert BASE not in dict(record.hooks)


def test_hook_fires_serve_where_ddp_keeps_no_statistics() -> None:
    record = step_of(1230, 1440)
    fires = [(BASE + i, FORWARD_END + at) for i, at in enumerate(STATS)]
    record.hooks = list(fires)
    assert derived_ready(two_buckets(), record, None) == [1200, 1400]
    assert record.hooks == fires


def test_launches_follow_the_ready_times_in_index_order() -> None:
    record = step_of(step=WITHOUT_HOOKS)
    assert derived_launches(two_buckets(), record) == [300, 500]
    assert record.derived == [
        RecordedBucket(300, 1, 0, 16, 300, None, None, 0, 8),
        RecordedBucket(500, 1, 1, 16, 500, None, None, 0, 9),
    ]
    assert record.hooks == []
    assert record.last_hook is None


def test_a_bucket_that_is_ready_early_waits_for_the_one_before_it() -> None:
    assert derived_launches(layout_of([1, 0], [3, 2]), step_of()) == [500, 500]


def test_the_lag_last_seen_is_added() -> None:
    layout = two_buckets()
    derived_ready(layout, step_of(1230, 1440))
    assert derived_launches(layout, step_of()) == [330, 540]


def test_lags_belong_to_one_layout() -> None:
    """A new layout is a new object: what is still to be derived for the old one cannot reach it."""
    old, new = two_buckets(), two_buckets()
    derived_ready(old, step_of(1230, 1440))
    assert derived_launches(new, step_of()) == [300, 500]
    assert new.lag_ns == {}


def test_launches_before_the_parameters_are_known_lie_at_the_first_gradient() -> None:
    record = step_of()
    assert derived_launches(layout_of([], []), record) == [200, 200]
    assert [row.ready for row in record.derived] == [None, None]


@pytest.mark.parametrize(
    ("issued", "seqs"),
    [
        ((7, 9), [8, 9]),
        ((7, 10), [8, 9]),  # and which parameters were used
        ((7, 12), [8, None]),  # a comm hook with several collectives per bucket
        ((7, 8), [None, None]),
        ((None, None), [None, None]),
    ],
)
def test_buckets_have_the_next_sequence_numbers(issued: tuple[int | None, int | None], seqs: list[int | None]) -> None:
    record = step_of()
    derive_launches(two_buckets(), STATS, FORWARD_END, issued, record)
    assert [row.seq for row in record.derived] == seqs


def test_nothing_is_derived_from_nothing() -> None:
    assert derived_launches(two_buckets(), step_of(), None) == []
    assert derived_launches(two_buckets(), step_of(), [0, 0, 0, 0]) == []


def test_some_steps_whose_collectives_are_not_seen_have_hook_fires() -> None:
    record = step_of(step=WITH_HOOKS)
    derive_launches(two_buckets(), STATS, FORWARD_END, (7, 9), record)
    assert record.hooks == [(BASE, 1400), (BASE + 1, 1300), (BASE + 2, 1200), (BASE + 3, 1100)]
