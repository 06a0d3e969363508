"""What an incident's sentence says while it lasts, and once it is over."""

from dataclasses import replace

import pytest

from ddpwatch.analysis.diagnosis.causes.slow_host import by_host
from ddpwatch.analysis.diagnosis.incident import Evidence, Incident
from ddpwatch.analysis.diagnosis.rules.exposed_comm import exposed_sentence
from ddpwatch.analysis.diagnosis.rules.slow_input import input_sentence
from ddpwatch.analysis.diagnosis.rules.slow_link import link_sentence
from ddpwatch.analysis.diagnosis.words.evidence_sentences import evidence_sentences
from ddpwatch.analysis.diagnosis.words.sentences import late_rank_sentence
from ddpwatch.analysis.diagnosis.words.wording import longer_than
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.analysis.placement import Host
from ddpwatch.wire.messages import BucketLayout, Layout

EVIDENCE = Evidence(late_ms=30.0, excess_ms=29.0, group=[0, 1, 2, 3], step_ms=120.0)
TOGETHER = Evidence(late_ms=30.0, parts_ms={"backward": 14.0, "forward": 13.0})
LATE = Incident("drift", "warning", "", (2,), "backward", bucket=1, since_step=4, until_step=9, evidence=EVIDENCE)


@pytest.mark.parametrize(
    ("is_open", "text"),
    [
        (
            True,
            "rank 2 is late by 30 ms in each step, and gets later and later: its backward takes 29 ms longer, from ",
        ),
        (
            False,
            "rank 2 was late by 30 ms in each step, and got later and later: its backward took 29 ms longer, from ",
        ),
    ],
)
def test_a_late_rank(is_open: bool, text: str) -> None:
    assert late_rank_sentence(replace(LATE, open=is_open), None) == f"{text}bucket 1 on"


def test_phases_that_only_together_explain_it_are_all_named() -> None:
    late = replace(LATE, kind="straggler", phase="", evidence=TOGETHER, open=True)
    said = late_rank_sentence(late, None)
    assert said == "rank 2 is late by 30 ms in each step: its backward takes 14 ms longer; its forward 13 ms"


def test_a_bucket_is_one_of_its_module() -> None:
    """As of a generator and a discriminator: both have a bucket 0."""
    layouts = Layouts(Groups())
    for module, param in enumerate(("generator.0.weight", "discriminator.0.weight")):
        layouts.apply_layout(Layout(rank=0, epoch=1, module=module, params=[param], buckets=[BucketLayout(0, 4, [0])]))
    first, second = (late_rank_sentence(replace(LATE, module=module, bucket=0), layouts) for module in (0, 1))
    assert first.endswith("from bucket 0 (generator.0.weight) on")
    assert second.endswith("from bucket 1:0 (discriminator.0.weight) on")
    assert exposed_sentence(0.12, (1, 0), "last", layouts, True, True).endswith(
        "most of it the last bucket 1:0 (discriminator.0.weight)"
    )
    assert exposed_sentence(0.12, (0, 0), "only", None, True, True).endswith("all of it the only bucket 0")
    assert exposed_sentence(0.12, (0, 2), "middle", None, True, True).endswith("most of it bucket 2, one in the middle")


@pytest.mark.parametrize(
    ("is_open", "text"),
    [
        (True, "host b is slow: all of its ranks are late, by up to 30 ms in each step: their backward takes longer"),
        (False, "host b was slow: all of its ranks were late, by up to 30 ms in each step: their backward took longer"),
    ],
)
def test_a_slow_host(is_open: bool, text: str) -> None:
    late = [replace(LATE, kind="straggler", ranks=(rank,), open=is_open) for rank in (2, 3)]
    (joined,) = by_host(late, {rank: Host("ab"[rank // 2]) for rank in range(4)})
    assert (joined.message, joined.open) == (text, is_open)


@pytest.mark.parametrize(
    ("times", "text"),
    [(1.045, "4.5 % longer than before"), (1.27, "27 % longer than before"), (15.71, "15.7 times as long as before")],
)
def test_what_takes_longer_is_said_in_times_where_percent_mislead(times: float, text: str) -> None:
    """All ranks were slower by 1471 %."""
    assert longer_than(times, "before") == text
    assert evidence_sentences(Evidence(longer=times - 1), 9, 1)[1:] == [f"a step takes {text}"]


def test_what_slows_all_ranks() -> None:
    assert exposed_sentence(0.12, None, "", None, True, True).endswith("that no compute hides take 12 % of a step")
    assert exposed_sentence(0.12, None, "", None, True, False).endswith("that no compute hid took 12 % of a step")
    assert input_sentence(0.12, True) == "slow input: the loop waits for data during 12 % of a step"
    assert input_sentence(0.12, False) == "slow input: the loop waited for data during 12 % of a step"
    assert link_sentence(2.0, (), None, True) == "transfers take 2.0 times as long as before"
    assert link_sentence(1.6, (), None, True) == "transfers take 60 % longer than before"
    assert link_sentence(2.0, (2, 3), (1.5, 0.75), False) == (
        "transfers among ranks 2, 3 took 2.0 times as long as before (busbw 0.75 instead of 1.5 GB/s)"
    )
