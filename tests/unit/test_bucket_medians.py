"""The medians of buckets over ranks are the same, whether ranks are sorted together or one bucket after the other."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ddpwatch.analysis.buckets import _medians
from ddpwatch.common.statistics import p50

STAMPS = st.integers(-(1 << 50), 1 << 50)


@given(st.integers(1, 9), st.integers(0, 4), st.data())
def test_medians_over_ranks_are_those_of_each_bucket(ranks: int, buckets: int, data: st.DataObject) -> None:
    unknown = data.draw(st.booleans())
    row = st.lists(STAMPS | st.none() if unknown else STAMPS, min_size=buckets, max_size=buckets)
    columns = data.draw(st.lists(row, min_size=ranks, max_size=ranks))
    origins = data.draw(st.lists(STAMPS, min_size=ranks, max_size=ranks))
    since = [[None if at is None else at - start for at in own] for own, start in zip(columns, origins, strict=True)]
    assert _medians(columns, origins) == [p50(values) for values in zip(*since, strict=True)]
    assert _medians(columns) == [p50(values) for values in zip(*columns, strict=True)]
