"""What to do next: something for each kind, with the pid and the host where it takes one. And evidence in sentences."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from typing import Any, get_args

import pytest

from ddpwatch.analysis.diagnosis.causes.device_signals import GPU_FIELDS, HOST_FIELDS, RANK_FIELDS
from ddpwatch.analysis.diagnosis.engine import Diagnosis
from ddpwatch.analysis.diagnosis.hangs.blame import Why
from ddpwatch.analysis.diagnosis.incident import (
    LOST,
    Account,
    DeniedTime,
    DeviceFigures,
    End,
    Evidence,
    Incident,
    LostTime,
    MemoryFigures,
    StackGroup,
)
from ddpwatch.analysis.diagnosis.kinds import KINDS, Kind
from ddpwatch.analysis.diagnosis.words.evidence_sentences import ELSEWHERE, SENTENCES, evidence_sentences
from ddpwatch.analysis.diagnosis.words.next_steps import NEXT_STEPS, JobPlaces, next_step, next_step_for, on_screen
from ddpwatch.analysis.groups import Groups
from ddpwatch.analysis.layouts import Layouts
from ddpwatch.wire.messages import (
    BATCH_WAIT,
    INTERRUPTED_LAUNCHER,
    OWN_COLLECTIVES,
    WORKERS_START,
    BucketLayout,
    BusyProcess,
    Layout,
    LayoutKind,
    Mark,
    Status,
)
from tests.support.frames import bye, hello

KINDS_OF: tuple[Kind, ...] = get_args(Kind)

ENDS = {
    0: End("exception", "ValueError: boom", None, 3, "", [], 0),
    1: End("lost", "exited with code 143", None, 3, "", [], 0),
}
FAILED = End("exception", "RuntimeError: Timed out waiting 14000ms for recv operation", None, 3, "", [], 0)
KILLED = End("killed", f"SIGKILL{INTERRUPTED_LAUNCHER}", 9, 3, "", [], 0)
STUCK = StackGroup([1], "f", "", ["f"])


def places(source: str = "", **about: Any) -> JobPlaces:
    found = JobPlaces()
    found.source = source
    for rank in range(2):
        found.add_hello(hello(rank, pid=4711 + rank, host="node-a", **about))
    return found


RANK_1 = BusyProcess(4712, "python", 80.0)


def starved(cause: str = "wait", busy: list[BusyProcess] | None = None) -> Evidence:
    figures = {"wait": 0.3}
    device = DeviceFigures(cause=cause, host="node-a", value=0.3, before=0.01, peers=0.02, figures=figures, busy=busy)
    return Evidence(device=device)


def test_each_kind_has_a_next_step() -> None:
    assert set(NEXT_STEPS) == set(KINDS) == set(KINDS_OF)


@pytest.mark.parametrize("kind", KINDS_OF)
def test_it_says_something_whatever_is_known(kind: Kind) -> None:
    evidences = (Evidence(), starved(), starved("steal"), Evidence(device=DeniedTime(12.0)))
    whose: tuple[tuple[int, ...], ...] = ((1,), ())
    for where, ranks, phase, evidence in product(
        (places(), JobPlaces()), whose, ("", "data", "backward", "gc"), evidences
    ):
        if (kind == "slow_host" and not ranks) or (kind == "slow_device" and evidence.device is None):
            continue  # a slow host has ranks, and a slow device a cause
        found = next_step(Incident(kind, "warning", "", ranks, phase, evidence=evidence), where)
        assert len(found) > 10, (where, ranks, phase, evidence)
        assert found.count("`") % 2 == 0, found


def test_a_late_rank_is_explained_while_it_lasts() -> None:
    late = Incident("straggler", "warning", "", (1,), "backward", open=True)
    where = places()
    names = "`ddpwatch explain --rank 1` names the lines in which rank 1 spends more"
    assert next_step(late, where) == names
    stage = replace(late, evidence=Evidence(own_stage=True))
    assert next_step(stage, where).startswith("give the pipeline more micro-batches")
    assert next_step(stage, where).endswith(f"; if they have as much to do, {names}")
    assert next_step(replace(stage, phase="data"), where) == next_step(replace(late, phase="data"), where)
    assert on_screen(names) == "key x names the lines in which rank 1 spends more"
    where.explained = {1: (40, "look at what f() (train.py:3) does")}
    assert next_step(replace(late, since_step=40), where) == "look at what f() (train.py:3) does"
    assert next_step(replace(late, since_step=41), where) == names  # what it did before says nothing of that
    where.explained = {}
    recorded = places()
    recorded.read_from("")
    assert "`" not in next_step(late, recorded)  # its ranks cannot be asked
    over = Incident("straggler", "warning", "", (1,), "backward")
    assert next_step(over, where).endswith(f"if it comes again, {names}")
    where.add_bye(bye(1))
    assert "`" not in next_step(late, where)  # there is no such process any more


@pytest.mark.parametrize(
    ("incident", "words"),
    [
        (Incident("exposed_comm", "warning", ""), "`ddpwatch whatif 'my run.mcap'`"),
        (Incident("exposed_comm", "warning", "", evidence=starved()), "workers; else `ddpwatch whatif 'my run.mcap'`"),
        (Incident("exposed_comm", "warning", "", evidence=starved() | Evidence(share_of_step=0.5)),
         "comm hooks, links; also, on node-a, `ps"),
        (Incident("straggler", "warning", "", (1,), "gc", evidence=starved()), "workers; else call gc.freeze()"),
        (Incident("straggler", "warning", "", (1,), "backward", evidence=starved()),
         "on node-a, `ps -eo pid,pcpu,comm --sort=-pcpu` shows who has the cores"),
        (Incident("slow_device", "info", "", evidence=starved("cpu_pressure")), "`ps -eo pid,pcpu,comm --sort=-pcpu`"),
        (Incident("slow_device", "info", "", evidence=starved(busy=[BusyProcess(9, "make", 97.4), RANK_1])),
         "on node-a, stop what is not the job's, or start fewer threads and workers: besides the ranks, most CPU time "
         "goes to make (pid 9) 97 % of a core"),
        (Incident("slow_device", "info", "", since_step=7, evidence=starved()),
         "threads and workers; else see what the job does otherwise from step 7 on"),
        (Incident("slow_device", "info", "", device="CPU starved", evidence=starved()), "ps -eo pid,pcpu,comm"),
        (Incident("pause", "warning", "", (1,), period=50, evidence=starved()), "shows who has the cores"),
        (Incident("pause", "warning", "", (1,), period=50), "do it less often"),
        (Incident("straggler", "warning", "", (1,), evidence=starved(busy=[BusyProcess(1, "init", 2.0)])), "`ps -eo"),
        (Incident("straggler", "warning", "", (1,), evidence=starved(busy=[RANK_1, BusyProcess(9, "sshd", 2.0)])),
         "workers: most CPU time goes to the job: rank 1 (pid 4712) 80 % of a core, sshd (pid 9) 2 % of a core"),
        (Incident("imbalance", "info", "", evidence=starved() | Evidence(share_of_step=0.2)),
         "workers; else group samples"),
        (Incident("imbalance", "info", "", evidence=starved() | Evidence(share_of_step=0.5)),
         "sizes; also, on node-a, `ps"),
        (Incident("slow_input", "warning", "", phase="data"), "num_workers"),
        (Incident("slow_input", "warning", "", phase="data", evidence=starved("workers_read")), "on a faster disk"),
        (Incident("slow_input", "warning", "", phase="data", evidence=starved("workers_ready")), "fewer tensors"),
        (Incident("straggler", "warning", "", (1,), "data", evidence=starved("workers_run")), "let a sample cost less"),
        (Incident("slow_input", "warning", "", (1,), "data"), "in which rank 1 spends more; or give the Data"),
        (Incident("intermittent", "warning", "", (1,), "data", period=8), "persistent_workers=True"),
        (Incident("intermittent", "warning", "", (1,), "forward"), "group samples of similar length"),
        (Incident("hang", "error", "", (1,)), "`py-spy dump --pid 4712`"),
        (Incident("hang", "error", "", (1,), evidence=Evidence(stacks=[STUCK]), open=True),
         "`ddpwatch explain` shows the stacks of the ranks that hold up the others"),
        (Incident("hang", "error", "", (1,), evidence=Evidence(stacks=[STUCK])), "read the stacks"),
        (Incident("hang", "error", "", open=True), "`ddpwatch explain` shows the stacks of all ranks"),
        (Incident("hang", "error", "", (1,), evidence=Evidence(stacks=[STUCK], why="mismatch")),
         "one has fewer batches"),
        (Incident("intermittent", "warning", "", (1,), "gc", period=8), "gc.freeze()"),
        (Incident("pause", "warning", "", (1,), evidence=Evidence(call_sites={1: "job.py:134 in load"})),
         "look at what rank 1 does, or waits for, at job.py:134 in load"),
        (Incident("pause", "info", "", phase="compilation", steps=1), "TORCHINDUCTOR_CACHE_DIR"),
        (Incident("pause", "info", "", phase="compilation", steps=3), "TORCH_LOGS=recompiles"),
        (Incident("memory", "warning", "", (1,), evidence=Evidence(memory=MemoryFigures("host", 9, 1.0, 2, 2))),
         "for one in gc.get_objects()) in rank 1 now and then: if it grows, tensors are kept"),
        (Incident("memory", "warning", "", (1,), evidence=Evidence(memory=MemoryFigures("gpu", 9, 1.0, 2, 2))),
         "_record_memory_history(), some steps later _dump_snapshot("),
        (Incident("death", "error", "", (1,), evidence=Evidence(ends={1: End("lost", "", None, 3, "", [], 0)})),
         "read the exit code of rank 1 in the launcher's output; after -9, on node-a, `dmesg -T`"),
        (Incident("death", "error", "", (1,), evidence=Evidence(ends=ENDS)), "read what rank 1 printed"),
        (Incident("death", "error", "", (0,), evidence=Evidence(ends=ENDS)), "read the traceback of rank 0"),
        (Incident("death", "error", "", (1,), evidence=Evidence(ends={1: End("killed", "SIGTERM", 15, 3, "", [], 0)})),
         "find out who sent SIGTERM: a scheduler at its time limit, or whoever ended the launcher"),
        (Incident("death", "error", "", (1,),
                  evidence=Evidence(ends={1: End("killed", "SIGTERM", 15, 3, "", [], 0)}, hung=[1])),
         "read the stacks of the ranks that held up the others"),
        (Incident("death", "error", "", (1,), evidence=Evidence(ends={0: FAILED, 1: KILLED}, hung=[1])),
         "read the stacks of the ranks that held up the others"),
        (Incident("death", "error", "", (1,), evidence=Evidence(ends={0: FAILED, 1: FAILED}, hung=[1])),
         "read the stacks of the ranks that held up the others"),
        (Incident("death", "error", "", (1,), evidence=Evidence(ends={0: FAILED, 1: ENDS[0]}, hung=[1])),
         "read the traceback of rank 1"),
        (Incident("death", "error", "", (1,), evidence=Evidence(ends={1: End("killed", "SIGKILL", 9, 3, "", [], 0)})),
         "on node-a, `dmesg -T`"),
    ],
)  # fmt: skip
def test_what_to_do_follows_from_the_evidence(incident: Incident, words: str) -> None:
    assert words in next_step(incident, places("my run.mcap"))


@pytest.mark.parametrize(
    ("threads", "workers", "fewer"), [(1, None, False), (1, 0, False), (1, 2, True), (4, None, True), (0, None, True)]
)
def test_only_who_has_threads_or_workers_can_start_fewer(threads: int, workers: int | None, fewer: bool) -> None:
    """0 threads: nothing is known of them."""
    job = places(threads=threads)
    if workers is not None:
        about: dict[str, Any] = {"kind": "data", "start_ns": 0, "end_ns": 9, "workers": workers}
        job.add_mark(Mark(rank=0, name=BATCH_WAIT, **about))
    for busy in (None, [RANK_1], [BusyProcess(9, "make", 97.4)]):
        text = next_step(Incident("slow_device", "info", "", evidence=starved(busy=busy)), job)
        assert ("start fewer threads and workers" in text, "a core of its own" in text) == (fewer, not fewer)


@pytest.mark.parametrize(
    ("workers", "persistent", "words"),
    [
        (0, False, "give the DataLoader workers: it has none (num_workers=0)"),
        (1, False, "give the DataLoader more than 1 worker (num_workers), with persistent_workers=True"),
        (4, True, "give the DataLoader more than 4 workers (num_workers)"),
    ],
)
def test_what_a_loader_lacks_is_known_from_its_waits(workers: int, persistent: bool, words: str) -> None:
    where = places()
    wait = Mark(rank=0, kind="data", name="", start_ns=0, end_ns=1, workers=workers, persistent=persistent)
    where.add_mark(wait)
    where.add_mark(Mark(rank=0, kind="data", name="", start_ns=9, end_ns=9, workers=7))  # a validation's, later
    assert next_step(Incident("slow_input", "warning", "", phase="data"), where) == words
    again = next_step(Incident("intermittent", "warning", "", (1,), "data", period=8), where)
    assert (again == words) is (workers == 0 or persistent)  # else, its workers may start again


def test_workers_that_start_in_each_epoch_are_to_stay() -> None:
    job, slow = places(), Incident("slow_input", "warning", "", (), "data")
    about = {"kind": "data", "start_ns": 0, "workers": 4}
    for start in range(1, 5):
        for rank in range(2):
            job.add_mark(Mark(rank=rank, name=WORKERS_START, end_ns=1, **about))
            job.add_mark(Mark(rank=rank, name=BATCH_WAIT, end_ns=1, **about))
        stay = f"give the DataLoader persistent_workers=True: its workers have started {start} times"
        assert (next_step(slow, job) == stay) is (start > 3)
    job.add_mark(Mark(rank=0, name=BATCH_WAIT, end_ns=999, **{**about, "workers": 2}))  # another loader is the slow one
    assert next_step(slow, job).startswith("give the DataLoader more than 2 workers")


@pytest.mark.parametrize(("share", "too_small"), [(0.3, False), (0.6, True)])
def test_a_model_may_be_too_small_for_its_network(share: float, too_small: bool) -> None:
    """Then, transfers take longer than all that could hide them."""
    exposed = Incident("exposed_comm", "warning", "", evidence=Evidence(share_of_step=share))
    text = next_step(exposed, places("a.mcap"))
    assert text.startswith("`ddpwatch whatif a.mcap` predicts what would help")
    assert ("larger batches per rank" in text) is too_small


def test_memory_is_pinned_for_a_gpu_only() -> None:
    slow = Incident("slow_input", "warning", "", phase="data")
    assert "pin_memory=True" in next_step(slow, places(device_kind="cuda"))
    assert "pin_memory" not in next_step(slow, places())


def test_of_a_run_that_is_recorded_the_recording_is_read_which_outlives_it() -> None:
    found = Diagnosis(Layouts(Groups()), Groups())
    found.apply_message(Status(at_ns=1, frames=1, bytes=1, recording="my run.mcap"), 1)
    assert found.places.what_if == "`ddpwatch whatif 'my run.mcap'`"


@pytest.mark.parametrize(
    ("kinds", "does"),
    [
        (("bucket", "call"), "whatif"),  # as of metrics that are reduced
        (("group", "call"), "set_modules_to_forward_prefetch"),  # as for the norm of gradients
        (("call",), "async_op=True"),
    ],
)
def test_what_hides_transfers_depends_on_the_wrapper_whatever_else_is_called(
    kinds: tuple[LayoutKind, ...], does: str
) -> None:
    job = places("a.mcap")
    for kind in kinds:
        job.add_layout(Layout(rank=0, epoch=0, params=[], buckets=[], kind=kind))
    assert does in next_step(Incident("exposed_comm", "warning", ""), job)
    own = Incident("exposed_comm", "warning", "", module=OWN_COLLECTIVES, bucket=7)
    assert "async_op=True" in next_step(own, job)  # unless these are exposed most


@pytest.mark.parametrize(
    ("name", "does"),
    [
        ("train.py:31", "async_op=True"),
        ("deepspeed DeepSpeedEngine.allreduce_bucket", "options of deepspeed that"),
        ("tensor.placement_types Partial._reduce_value", "among fewer ranks"),
        ("fsdp._flat_param FlatParamHandle._all_gather_flat_param", "forward_prefetch=True"),
        ("pipelining.schedules _batch_p2p", "more micro-batches per step"),
        ("optim.zero_redundancy_optimizer ZeroRedundancyOptimizer._sync_params", "parameters_as_bucket_view=True"),
        ("nn.modules._functions SyncBatchNorm.forward", "fewer ranks"),
        ("algorithms.model_averaging.utils average_parameters", "less often"),
        ("checkpoint.utils _DistWrapper.gather_object", "options of torch's checkpoint.utils that"),
        ("backward", "async_op=True"),
    ],
)
def test_only_who_issues_a_collective_can_start_it_earlier(name: str, does: str) -> None:
    job = places("a.mcap")
    buckets = [BucketLayout(7, 0, [], name), BucketLayout(8, 0, [], "other places")]
    job.add_layout(Layout(rank=0, epoch=0, params=[], buckets=buckets, kind="call", module=OWN_COLLECTIVES))
    assert does in next_step(Incident("exposed_comm", "warning", "", module=OWN_COLLECTIVES, bucket=7), job)
    job.add_layout(Layout(rank=0, epoch=0, params=[], buckets=[], kind="group"))
    wrapped = next_step(Incident("exposed_comm", "warning", ""), job)
    assert ("micro-batches" if "pipelining" in name else "set_modules_to_forward_prefetch") in wrapped


def test_the_dashboard_has_a_view_for_what_if() -> None:
    text = next_step(Incident("exposed_comm", "warning", ""), places("a.mcap"))
    assert on_screen(text).startswith("key 8 (what-if) predicts what would help")
    assert on_screen("read the stacks of rank 1") == "press 7 (log): read the stacks of rank 1"
    asks = "`ddpwatch explain` shows the stacks of rank 1"
    assert {on_screen(text, in_log=True) for text in (asks, "read the stacks of rank 1")} == {
        "read the stacks of rank 1"
    }


@pytest.mark.parametrize("account", LOST)
def test_each_lost_account_has_a_next_step(account: Any) -> None:
    assert next_step_for(LostTime(10, (Account(account, None, "", 5),)), places())
    assert next_step_for(LostTime(10, (Account("compute", None, "", 5),)), places()) == ""


# -- evidence ------------------------------------------------------------------------------------------------

ALL = Evidence(
    host="node-a", late_ranks=[0, 1], late_ms=12.5, excess_ms=11.0, watched_steps=434, step_ms=230.0, group=[0, 1, 2],
    own_stage=True, rest_after="forward",
    parts_ms={"backward": 7.0, "data": 4.0}, throughout=True,
    why="behind", issued={0: 10, 1: 12}, call_sites={1: "train.py:7"}, stacks=[STUCK], no_stack={0: "silent"},
    longest_ms=2000.0, ranks=8, unwatched=True, beyond_tail=False, denied=True,
    ends={1: End("killed", "SIGKILL", 9, 199, "backward", [1], 0)}, hung=[2], steps=20, share_of_step=0.234,
    bucket_place="last", reductions=4, growth=0.15, longer=0.44, stayed=True, slower=1.7, busbw_gbps=[5.0, 3.0],
    memory=MemoryFigures("host", 9 << 30, 1e6, 2 << 30, 2147),
    device=DeviceFigures(
        cause="wait", host="node-a", value=0.8369, before=0.02, peers=0.01, rank=1,
        figures=dict.fromkeys((*RANK_FIELDS, *GPU_FIELDS, *HOST_FIELDS), 0.5), also=["12 % of CPU time stolen"],
    ),
)  # fmt: skip


def test_each_figure_has_a_sentence() -> None:
    assert {*SENTENCES, *ELSEWHERE} == set(Evidence.__struct_fields__)
    assert set(ALL.known()) == set(Evidence.__struct_fields__)


def test_no_sentence_has_a_raw_key_or_a_figure_without_a_unit() -> None:
    said = evidence_sentences(ALL, steps=176, occurrences=2)
    raw = {name for name in (*Evidence.__struct_fields__, *DeviceFigures.__struct_fields__) if "_" in name}
    raw |= {name for name in (*RANK_FIELDS, *GPU_FIELDS, *HOST_FIELDS) if "_" in name}
    for text in said:
        assert not any(name in text for name in raw), text
        assert not re.search(r"\d\.\d+$", text), text
        assert len(text.split()) > 2, text
    assert "it struck 176 of the 434 steps that were timed" in said
    assert "it came 2 times" in said
    assert "late by 12 ms in such a step" in said
    assert "a step takes 44 % longer than before" in said
    assert "a thread that wanted a core waited for one 84 % of the time" not in said  # the rank's own figure wins
    assert "bus bandwidth: 5.00 GB/s before, 3.00 GB/s since" in said


@pytest.mark.parametrize("cause", ["workers_ready", "workers_wait", "workers_run", "workers_read"])
def test_the_loader_s_workers_limit_no_clock(cause: str) -> None:
    """Of a slow disk, the log said "workers_read limits the clock"."""
    said = evidence_sentences(starved(cause), steps=176)
    assert any("30 % of" in text for text in said)
    assert not any("clock" in text or cause in text for text in said)


def test_a_share_that_would_be_shown_as_0_is_not_shown() -> None:
    figures = {"io_pressure": 0.0004, "steal": 0.001}
    device = DeviceFigures(cause="cpu_pressure", host="", value=0.89, before=None, peers=None, figures=figures)
    core, stolen = evidence_sentences(Evidence(device=device))
    assert core == "some thread waited for a core for 89 % of the time"
    assert stolen.startswith("0.1 % of the CPU time")


@pytest.mark.parametrize("why", [*get_args(Why), "mismatch"])
def test_each_reason_for_a_blame_has_a_sentence(why: str) -> None:
    assert all(evidence_sentences(Evidence(why=why)))
    assert evidence_sentences(Evidence(why=why))
