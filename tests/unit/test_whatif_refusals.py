"""What a recording does not carry is refused in one line, and nonsense in it does no harm."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterable, Iterator

import msgspec
import pytest

from ddpwatch.errors import UsageError
from ddpwatch.whatif.answer import WhatIf
from ddpwatch.whatif.scenarios import Change
from ddpwatch.wire.messages import BucketLayout, FrameError, Hello, Layout, Message, Step, decode
from tests.support.whatif import MadeUpJob, built, edited, refused

pytestmark = [pytest.mark.same_everywhere, pytest.mark.xdist_group("test_whatif"), pytest.mark.seconds(15)]  # not last
JOB = MadeUpJob()


def reduced_again(job: MadeUpJob) -> Iterator[Message]:
    """The job's messages, with each collective twice."""
    for message in edited(job, comm_seq=[]):
        if isinstance(message, Step):
            for name in ("comm_module", "comm_label", "comm_bytes", "comm_ready", "comm_launch", "comm_done"):
                setattr(message, name, 2 * getattr(message, name))
        yield message


def test_one_bucket_size() -> None:
    asked = WhatIf(JOB.but(cap_mib=100).recorded())
    for change in (Change(cap_mib=5), Change(link=2), Change(hook="fp16"), Change(world=4)):
        assert refused(asked, change).startswith("only one bucket size was seen")
    assert len(asked.ask([Change(perfect=True), Change(without_lateness_of=1), Change(no_input=True)])) == 3


def test_an_older_recording_still_answers_what_needs_no_sizes() -> None:
    asked = built(edited(JOB, param_bytes=[], param_rows=[], param_kind=[]))
    assert "sizes of the parameters" in refused(asked, Change(cap_mib=5))
    assert "sizes of the parameters" in refused(asked, Change(hook="powersgd-2"))
    whole = WhatIf(JOB.recorded())
    for change in (Change(link=2), Change(perfect=True), Change(hook="fp16")):
        (mine,), (theirs,) = asked.ask([change]), whole.ask([change])
        assert mine.step_ms == pytest.approx(theirs.step_ms, rel=0.01)


def test_with_a_comm_hook() -> None:
    """Neither what it sends is known, nor can DDP have a second one."""
    asked = built(edited(JOB, comm_hook="fp16_compress_hook"))
    for change in (Change(cap_mib=5), Change(link=2), Change(hook="bf16"), Change(world=4)):
        assert "comm hook (fp16_compress_hook)" in refused(asked, change)
    assert len(asked.ask([Change(perfect=True), Change(without_lateness_of=1), Change(no_input=True)])) == 3
    assert not [change for change in asked.default_changes() if change.moves_buckets or change.hook]


def test_torch_before_2_13_has_no_list_of_caps() -> None:
    firsts = {}
    for version in ("2.12.1+cu130", "2.13.0", ""):
        asked = built(edited(JOB, torch=version))
        firsts[version] = sum(change.first_mib is not None for change in asked.default_changes())
    assert firsts["2.12.1+cu130"] == 0
    assert firsts["2.13.0"] == firsts[""] > 0


def test_ranks_that_never_said_hello_do_not_count() -> None:
    job = JOB.but(ranks=3)
    with pytest.raises(UsageError, match="2 of 3 ranks"):
        built(m for m in job.messages() if not (isinstance(m, Hello) and m.rank == 2))


def test_without_hook_fires() -> None:
    asked = built(edited(JOB, hook_param=[], hook_ns=[]))
    assert "single gradients are missing" in refused(asked, Change(cap_mib=5))


def vary(step: Step, **changes: int) -> Step:
    for name, value in changes.items():
        setattr(step, name, value)
    return step


@pytest.mark.parametrize(
    ("messages", "line"),
    [
        (
            lambda: edited(JOB, status="shadow", comm_done=[None] * len(JOB.buckets)),
            "0 steps timed in full on all ranks",
        ),
        (lambda: edited(JOB, comm_op=["all_gather"] * len(JOB.buckets)), "uses FSDP2"),
        (lambda: [m for m in JOB.messages() if not isinstance(m, Layout)], "the bucket layout is missing"),
        (lambda: [m for m in JOB.messages() if not isinstance(m, Step)], "no step is readable"),
        (lambda: JOB.but(ranks=1).messages(), "one rank alone"),
        (lambda: [m for m in JOB.messages() if m.rank == 0], "1 of 2 ranks are in it, and what-if needs all"),
        (
            lambda: edited(JOB, comm_bytes=[1] * len(JOB.buckets)),
            "0 steps timed in full on all ranks, and 5 are needed; in 39 others, buckets had other sizes",
        ),
        (
            lambda: [m for m in edited(JOB, comm_bytes=[1, 2]) if not isinstance(m, Step) or vary(m, epoch=9)],
            "in 39 others, buckets were others than now: DDP has rebuilt them since",
        ),
        (
            lambda: reduced_again(JOB),
            "in 39 others, a bucket was reduced more than once",
        ),
        (lambda: JOB.but(steps=4).messages(), "3 steps timed in full on all ranks, and 5 are needed"),
    ],
)
def test_refusals(messages: object, line: str) -> None:
    with pytest.raises(UsageError, match=line.replace("(", r"\(").replace(")", r"\)")):
        built(messages())  # type: ignore[operator]


def test_what_is_set_already() -> None:
    asked = built(edited(JOB, ddp={"bucket_cap_mb": 2.0, "gradient_as_bucket_view": True}, micro_steps=2))
    assert "set already" in refused(asked, Change(bucket_view=True))
    assert "accumulates over 2" in refused(asked, Change(accumulate=2))
    assert "find_unused_parameters" in refused(asked, Change(static_graph=True))
    assert refused(asked, Change(without_lateness_of=7)) == "there is no rank 7"


def corrupted(job: MadeUpJob, dice: random.Random) -> Iterable[Message]:
    """The job's messages, some of them with nonsense that a frame may hold."""
    for message in job.messages():
        raw = msgspec.to_builtins(message)
        if dice.random() < 0.05:
            name = dice.choice([key for key in raw if key not in ("type", "rank")])
            old = raw[name]
            raw[name] = dice.choice([0, -5, [], None, "x", {}, old, [dice.choice([0, -1, 7, 1 << 50])] * 9])
            if isinstance(old, list) and old and dice.random() < 0.7:
                raw[name] = [
                    dice.choice([item, 0, -(1 << 50), 1 << 50]) if dice.random() < 0.3 else item for item in old
                ]
        with contextlib.suppress(FrameError):
            yield decode(msgspec.msgpack.encode(raw))


@pytest.mark.parametrize("seed", range(30))
def test_nonsense_is_refused_or_answered(seed: int) -> None:
    dice = random.Random(seed)
    try:
        asked = built(corrupted(MadeUpJob(steps=30), dice))
    except UsageError:
        return
    for found in asked.ask([*asked.default_changes(), Change(hook="powersgd-2"), Change(world=3)]):
        assert found.step_ms >= 0


def edited_layout(**changes: object) -> Iterable[Message]:
    for message in JOB.messages():
        yield msgspec.structs.replace(message, **changes) if isinstance(message, Layout) else message


def test_a_layout_that_names_what_is_not_there() -> None:
    buckets = JOB.layout(0).buckets
    wrong = [BucketLayout(b.index, b.nbytes, [p + 1 for p in b.params]) for b in buckets]
    assert "which parameters" in refused(built(edited_layout(buckets=wrong)), Change(cap_mib=5))
    with pytest.raises(UsageError, match="layout is missing"):
        built(edited_layout(buckets=[]))


@pytest.mark.parametrize("cap", ["25", float("nan"), -1.0, None, True])
def test_a_bucket_cap_that_is_none(cap: object) -> None:
    assert built(edited(JOB, ddp={"bucket_cap_mb": cap})).ask([Change(cap_mib=5)])
