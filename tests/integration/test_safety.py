"""The job is sacred: the same bits, the same exceptions and the same log with and without us. Proves docs/safety.md."""

from __future__ import annotations

import ast
import json
import re
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ddpwatch.analysis.step import figures
from ddpwatch.common.intervals import total, union
from ddpwatch.recording.reader import Recording
from ddpwatch.report.build import report_of
from ddpwatch.wire.messages import Step
from tests.support.fork_server import ADDRESS, TORCHRUN_IMPORTS, server_address
from tests.support.jobs import (
    COMPILERS,
    DDPWATCH,
    PATIENCE_S,
    ROOT,
    SCRIPTS,
    Job,
    ddpwatch,
    forked_command,
    live,
    messages,
    read_until,
    running,
    the_run,
    together,
    wait_for,
)

pytestmark = [pytest.mark.xdist_group("safety"), pytest.mark.seconds(140)]  # one job for all
TABLE = ROOT / "tests" / "integration" / "safety_cases.md"
# In a line of torch's log: the clock and the process; how many frames Dynamo has compiled before (our hooks are two).
# Python names the process as well.
VARYING = re.compile(r"[IWE]\d{4} [\d:.]+( \d+)?|\[\d+/\d+\]|\(pid=\d+\)")
OURS = ("said ", "WARNING:ddpwatch:")
# On Python < 3.12 a traceback has frames of ours, which a warning may name; and torch takes another path where a module
# has hooks.
FRAME = re.compile(rf'^  File "({ROOT}/ddpwatch/|\S*/torch/nn/modules/module\.py).*\n(    .*\n)+', re.MULTILINE)
WARNED = re.compile(r"^(warned .*|caught The `check_reduction`(.*\n)+?\n)", re.MULTILINE)
# Nor does Dynamo then trace DDP's forward, where it ignores a profiler's range, and says so once (torch 2.11).
IGNORED = re.compile(r"^.* Profiler record function .* will be ignored\n", re.MULTILINE)
# A comm hook is neither wrapped nor seen by its calls, but by its process group's hooks alone.
TORCH = tuple(map(int, version("torch").split(".")[:2]))
HAS_HOOKS = TORCH >= (2, 14) and sys.version_info < (3, 12)
Sections = dict[str, str]
SAME = "same"


@dataclass
class Case:
    """One training of a script: its line in the documentation, and what its decorator says."""

    doc: str
    slow: bool = False
    reduces: bool = True  # whether torch gets as far as a reduction here
    ranks: int = 2  # of the sharded ones


def cases(script: str) -> dict[str, Case]:
    """The cases of a script, read from its text: to import it is to import torch."""
    found = {}
    for function in ast.parse((SCRIPTS / script).read_text()).body:
        for call in function.decorator_list if isinstance(function, ast.FunctionDef) else ():
            if isinstance(call, ast.Call) and ast.unparse(call.func) == "case":
                properties = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in call.keywords}
                found[ast.literal_eval(call.args[0])] = Case(ast.get_docstring(function) or "", **properties)
    return found


SAFETY, SAFETY_API = cases("unmodified/safety.py"), cases("safety_api.py")
SHARDED = cases("safety_sharded.py")


def shows_buckets(case: str) -> bool:
    """Whether buckets must be seen: a process group's hooks see none where nothing is all-reduced."""
    return (SAFETY | SHARDED)[case].reduces and not (HAS_HOOKS and case == "comm hook: does nothing")


@dataclass
class Told:
    """What one rank said in one case."""

    stdout: str
    stderr: str

    @property
    def digests(self) -> list[str]:
        """Of the parameters, after every step."""
        return [line for line in self.stdout.splitlines() if line.startswith("parameters")]

    @property
    def said(self) -> list[str]:
        """What differs between watched and unwatched by intention: refusals and warnings of ``watch()``."""
        return [line for line in [*self.stdout.splitlines(), *self.stderr.splitlines()] if line.startswith(OURS)]

    @property
    def raised(self) -> bool:
        """Whether an exception ended the case."""
        return "raised " in self.stdout

    @property
    def all(self) -> list[str]:
        """Everything that must be the same."""
        stdout, stderr = self.stdout, self.stderr
        if sys.version_info < (3, 12):
            stdout, stderr = WARNED.sub("", FRAME.sub("", stdout)), IGNORED.sub("", stderr)
        lines = [*stdout.splitlines(), *VARYING.sub("", stderr).splitlines()]
        return [line for line in lines if line not in self.said]


@dataclass
class Outcome:
    """One job, unwatched and watched: what each rank told, by case; and how many of its reduced steps were seen."""

    plain: list[dict[str, Told]]
    watched: list[dict[str, Told]]
    steps: list[dict[str, int]]
    path: Path | None = None  # of the recording, and of when cases started and ended

    def verdict(self, case: str) -> str:
        """What was found of one case."""
        pairs = [(plain[case], watched[case]) for plain, watched in zip(self.plain, self.watched, strict=True)]
        if not all(plain.all == watched.all for plain, watched in pairs):
            return "DIFFERENT"
        if any(plain.raised for plain, _ in pairs):
            return "same error"
        seen = all(steps[case] for steps in self.steps) or not shows_buckets(case)
        return SAME if seen else "same, not watched"


def forked(ranks: int, logs: Path, script: str, *arguments: str, **options: Any) -> int:
    """A forked job that leaves each rank's output in ``logs/RANK``; the exit code.

    How an interpreter is taken apart matters in watched ranks only: torch alone may abort there.
    """
    logs.mkdir(exist_ok=True)
    options = {"streams": logs, "tears_down": options.get("DDPWATCH") == "1", **options}
    with Job(SCRIPTS / script, *arguments, ranks=ranks, log=logs / "log", **options) as job:
        return job.wait()


def told(logs: Path, ranks: int) -> list[dict[str, Told]]:
    """What each rank has written, by case; all have come to the end.

    That, and not the exit code, is what an unwatched job is held to: torch can abort when an interpreter ends while a
    comm hook's callback is being destroyed (a watched one waits for that).
    """
    found = []
    for rank in range(ranks):
        out, err = (sections(logs / str(rank) / f"{name}.log") for name in ("stdout", "stderr"))
        assert out.keys() == err.keys()
        assert list(out)[-1] == "the end", f"rank {rank} stopped in {list(out)[-1]}: {err}"
        found.append({case: Told(out[case], err[case]) for case in list(out)[:-1]})
    return found


def sections(log: Path) -> Sections:
    parts = re.split(r"^== (.*)\n", log.read_text(), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def seen(file: Path, times: Path, ranks: int) -> list[dict[str, int]]:
    """How many steps with a reduction the recording holds, by rank and case; those that are not full count as such.

    Where not every step is full, the load decides how many of a case's few are watched at all.
    """
    steps = [message for message, _ in Recording(file) if isinstance(message, Step)]
    steps = [step for step in steps if step.comm_label or step.status in ("shadow", "unwatched")]
    cases = [json.loads((times / f"times.{rank}.json").read_text()) for rank in range(ranks)]

    def count(rank: int, begin: int, end: int) -> int:
        return sum(step.rank == rank and begin < step.start_ns + step.duration_ns < end for step in steps)

    return [{case: count(rank, *cases[rank][case]) for case in cases[rank]} for rank in range(ranks)]


def is_closed(file: Path) -> bool:
    recording = Recording(file)
    return len(list(recording)) > 0 and not recording.cut_tail


def both(path: Path, ranks: int, *arguments: str, **environment: str) -> Outcome:
    """The job that knows nothing of ddpwatch, by itself and under `ddpwatch run`."""
    plain, watched = path / "plain", path / "watched"
    file = watched / "run.mcap"
    script = "unmodified/safety.py"
    for directory in (plain, watched):
        directory.mkdir()
    command = forked_command(
        ranks, watched, SCRIPTS / script, str(watched), *arguments, preload=COMPILERS, tears_down=True
    )
    environment[ADDRESS] = server_address()
    _, done = together(
        lambda: forked(ranks, plain, script, str(plain), *arguments, preload=COMPILERS),
        lambda: ddpwatch("run", "--headless", "--record", str(file), "--", *command, **environment),
    )
    assert done.returncode == 0, done.stderr
    return Outcome(told(plain, ranks), told(watched, ranks), seen(file, watched, ranks), watched)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, own_directory: None) -> Outcome:
    return both(tmp_path_factory.mktemp("two"), 2, DDPWATCH_DETAIL="full")  # every step in full


@pytest.fixture(scope="module")
def three_ranks(tmp_path_factory: pytest.TempPathFactory, own_directory: None) -> Outcome:
    return both(tmp_path_factory.mktemp("three"), 3, "--quick", DDPWATCH_DETAIL="60%")  # steps of all levels


@pytest.fixture(scope="module")
def by_hand(tmp_path_factory: pytest.TempPathFactory, own_directory: None) -> Outcome:
    path, ranks = tmp_path_factory.mktemp("api"), 2
    for name, switch in (("plain", "0"), ("watched", "1")):
        code = forked(ranks, path / name, "safety_api.py", DDPWATCH=switch)
    assert code == 0
    return Outcome(told(path / "plain", ranks), told(path / "watched", ranks), [])


def sharded_on(path: Path, ranks: int) -> Outcome:
    plain, watched = path / "plain", path / "watched"
    for logs, switch in ((plain, "0"), (watched, "1")):
        options = {"preload": COMPILERS, "DDPWATCH": switch, "DDPWATCH_DETAIL": "full"}
        code = forked(ranks, logs, "safety_sharded.py", str(logs), **options)
        assert code == 0, (logs / "log").read_text()
    wait_for(lambda: is_closed(watched / "run.mcap"), "the recording is closed")
    steps = seen(watched / "run.mcap", watched, ranks)
    return Outcome(told(plain, ranks), told(watched, ranks), steps, watched)


@pytest.fixture(scope="module")
def sharded_on_2(tmp_path_factory: pytest.TempPathFactory, own_directory: None) -> Outcome:
    return sharded_on(tmp_path_factory.mktemp("sharded"), 2)


@pytest.fixture(scope="module")
def sharded_on_4(tmp_path_factory: pytest.TempPathFactory, own_directory: None) -> Outcome:
    return sharded_on(tmp_path_factory.mktemp("sharded"), 4)


@pytest.fixture(scope="module")
def own_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DDPWATCH_DIR", str(tmp_path_factory.mktemp("d")))
        yield


QUICK = [case for case, one in SAFETY.items() if not one.slow]
UNMODIFIED = [*[("two_ranks", case) for case in SAFETY], *[("three_ranks", case) for case in QUICK]]
BY_HAND = [("by_hand", case) for case in SAFETY_API]
SHARDED_TOO = [(f"sharded_on_{one.ranks}", case) for case, one in SHARDED.items()]


@pytest.mark.parametrize(("job", "case"), UNMODIFIED + BY_HAND + SHARDED_TOO)
def test_it_computes_raises_and_says_the_same(job: str, case: str, request: pytest.FixtureRequest) -> None:
    outcome: Outcome = request.getfixturevalue(job)
    for plain, watched in zip(outcome.plain, outcome.watched, strict=True):
        assert watched[case].all == plain[case].all
        assert plain[case].raised or len(set(plain[case].digests)) > 3  # it did train


@pytest.mark.parametrize(("job", "case"), UNMODIFIED + SHARDED_TOO)
def test_it_is_watched(job: str, case: str, request: pytest.FixtureRequest) -> None:
    for steps in request.getfixturevalue(job).steps:
        assert steps[case] > 0 or not shows_buckets(case)


def test_a_jobs_own_all_gather_has_one_warning(sharded_on_2: Outcome) -> None:
    for rank in sharded_on_2.watched:
        said = {case: told.said for case, told in rank.items() if told.said}
        assert [(case, len(lines)) for case, lines in said.items()] == [("FSDP2: own all-gather", 1)]
        assert "OwnAllGather" in said["FSDP2: own all-gather"][0]


def steps_of(outcome: Outcome, case: str) -> Iterator[Step]:
    """A case's full steps, of all ranks."""
    assert outcome.path is not None
    times = [json.loads((outcome.path / f"times.{rank}.json").read_text()) for rank in range(len(outcome.watched))]
    for step, _ in Recording(outcome.path / "run.mcap"):
        if isinstance(step, Step) and step.status == "ok" and step.comm_label:
            begin, end = times[step.rank][case]
            if begin < step.start_ns and step.start_ns + step.duration_ns < end:
                yield step


BUCKET_BYTES = [17680, *3 * [16640]]  # of gradients: the last two layers', then each one's
HALVED = [nbytes // 2 for nbytes in BUCKET_BYTES]


@pytest.mark.parametrize("hook", ["Python", "bf16", "own", "built in", "built-in all-reduce", "PowerSGD"])
def test_a_comm_hooks_buckets_are_seen(hook: str, two_ranks: Outcome) -> None:
    """Each is launched and done. PowerSGD's has one, and more collectives where torch shows all that a hook issues."""
    steps = list(steps_of(two_ranks, f"comm hook: {hook}"))
    assert {step.rank for step in steps} == {0, 1}
    for step in steps:
        stamps = zip(step.comm_launch, step.comm_done, strict=True)
        assert all(done is not None and done > launch for launch, done in stamps)
        if hook == "PowerSGD":
            assert step.comm_bytes == [sum(BUCKET_BYTES)] or (HAS_HOOKS and len(step.comm_bytes) > 1)
        else:
            # The built-in one has the probe's group. In others' first steps, DDP has not logged its new buckets yet.
            compressed = hook == "built in" or (HAS_HOOKS and step is not steps[-1] and hook in ("Python", "bf16"))
            assert step.comm_bytes in ([BUCKET_BYTES, HALVED] if compressed else [BUCKET_BYTES])


GROUP_BYTES = [4 * 165, *3 * [4 * 2112]]  # of the parameter groups, the root's first
SHARDED_BYTES = [4 * 198, *GROUP_BYTES[1:]]  # on two ranks, the root's is padded


def reductions(step: Step, op: str) -> dict[int, int]:
    """Where a step's collectives of one kind are, by parameter group. Without a column, all are all-reduces."""
    ops = step.comm_op or ["all_reduce"] * len(step.comm_label)
    return {label: i for i, (label, one) in enumerate(zip(step.comm_label, ops, strict=True)) if one == op}


@pytest.mark.parametrize("case", ["HSDP", "HSDP: gradient accumulation"])
def test_hsdp_reduces_its_shards_across_the_replicas(case: str, sharded_on_4: Outcome) -> None:
    """Each parameter group's, after its reduce-scatter, in a group of other ranks; once for all micro-batches."""
    steps = list(steps_of(sharded_on_4, case))
    assert {step.rank for step in steps} == {0, 1, 2, 3}
    for step in steps:
        assert step.comm_op.count("all_reduce") == 4
        scattered, reduced = reductions(step, "reduce_scatter"), reductions(step, "all_reduce")
        assert list(reduced) == list(scattered)
        for label, i in reduced.items():
            before, done = scattered[label], step.comm_done[scattered[label]]
            assert (step.comm_bytes[before], step.comm_bytes[i]) == (SHARDED_BYTES[label], SHARDED_BYTES[label] // 2)
            assert step.comm_group[i] != step.comm_group[before]
            assert done is not None
            assert done <= step.comm_launch[i]
        assert_exposed_are_the_waits(step)


def test_replicate_reduces_whole_parameter_groups(sharded_on_2: Outcome) -> None:
    steps = list(steps_of(sharded_on_2, "replicate"))
    assert {step.rank for step in steps} == {0, 1}
    for step in steps:
        reduced = reductions(step, "all_reduce")
        assert len(reduced) == len(step.comm_label) == 4  # nothing is gathered or scattered
        assert step.comm_op == ["all_reduce"] * 4  # of parameter groups: a bucket's has no name
        assert all(step.comm_ready[i] is not None for i in reduced.values())
        assert {label: step.comm_bytes[i] for label, i in reduced.items()} == dict(enumerate(GROUP_BYTES))
        assert_exposed_are_the_waits(step)


def assert_exposed_are_the_waits(step: Step) -> None:
    """Also those for the all-reduces: on the host, a rank waits for each from its launch to its end."""
    figure = figures(step)
    waits = union((a, b) for a, b in zip(step.comm_wait_begin, step.comm_wait_end, strict=True) if a is not None)
    assert figure.exposed_ns == total(waits) == figure.comm_ns == figure.phases_ns["exposed_comm"]
    assert sum(figure.phases_ns.values()) == figure.step_ns
    for i in reductions(step, "all_reduce").values():
        assert (step.comm_wait_begin[i], step.comm_wait_end[i]) == (step.comm_launch[i], step.comm_done[i])


def test_only_watch_itself_says_something(two_ranks: Outcome, three_ranks: Outcome, by_hand: Outcome) -> None:
    """And only where it is called with what it cannot watch, or cannot see all of. `ddpwatch run` adds no line."""
    for rank in [*two_ranks.watched, *three_ranks.watched]:
        assert not any(told.said for told in rank.values())
    for rank in by_hand.watched:
        said = {case: " ".join(told.said) for case, told in rank.items() if told.said}
        assert "wrap the model first" in said.pop("watch() before init")
        assert said.pop("watch() twice") == "said the same handle"
        assert all(case.startswith("comm hook before watch()") for case in said)
        assert all("before model.register_comm_hook(" in text for text in said.values())


def test_the_lists_in_the_docs(
    two_ranks: Outcome,
    three_ranks: Outcome,
    by_hand: Outcome,
    sharded_on_2: Outcome,
    sharded_on_4: Outcome,
    request: pytest.FixtureRequest,
) -> None:
    if shutil.which("c++") is None:
        pytest.skip("without a C++ compiler inductor's lines are different")
    if TORCH < (2, 13):
        pytest.skip("the lists are of newer torch: in 2.11 FSDP2 does not train on after an exception, watched or not")
    text = TABLE.read_text()
    run = [
        (case, one.doc, on_both(two_ranks.verdict(case), "" if one.slow else three_ranks.verdict(case)))
        for case, one in SAFETY.items()
    ]
    api = [(case, one.doc, on_ranks(2, by_hand.verdict(case))) for case, one in SAFETY_API.items()]
    by_ranks = {2: sharded_on_2, 4: sharded_on_4}
    sharded = [(case, one.doc, on_ranks(one.ranks, by_ranks[one.ranks].verdict(case))) for case, one in SHARDED.items()]
    written = text
    for name, rows in {"run": run, "sharded": sharded, "api": api}.items():
        written = filled(written, name, listed(rows))
    if request.config.getoption("--write-table", default=False):
        TABLE.write_text(written)
    assert written == text or TABLE.read_text() == written, "the lists no longer fit: make safety-table"


def on_both(two: str, three: str) -> str:
    """What a line adds: nothing if all was the same on 2 and on 3 ranks; without a verdict, it was not run."""
    if not three:
        return "2 ranks only" if two == SAME else f"{two}, 2 ranks only"
    if two != three:
        return f"2 ranks: {two}, 3 ranks: {three}"
    return "" if two == SAME else two


def on_ranks(ranks: int, verdict: str) -> str:
    """The same for a case that ran on so many ranks, which are usually 2."""
    return ", ".join([f"{ranks} ranks"] * (ranks != 2) + [verdict] * (verdict != SAME))


def listed(rows: list[tuple[str, str, str]]) -> str:
    """A line per case: its name, what the job does, and what is special."""
    return "\n".join(f"- **{case}**: {doc}{f' ({note})' if note else ''}" for case, doc, note in rows)


def filled(text: str, name: str, content: str) -> str:
    """The text with new content between two markers."""
    begin, end = f"<!-- begin {name} -->\n", f"\n<!-- end {name} -->"
    before, rest = text.split(begin)
    return before + begin + content + end + rest.split(end.lstrip("\n"))[1]


@pytest.mark.xdist_group("restart")
@pytest.mark.seconds(20)
@pytest.mark.usefixtures("run_directory")
def test_an_elastic_restart(tmp_path: Path) -> None:
    """torchrun starts the ranks once more: a recording of its own for each attempt, and the same parameters."""
    script, plain, name = SCRIPTS / "unmodified" / "restarted.py", tmp_path / "plain", tmp_path / "watched"
    Path(f"{plain}.1.end").touch()
    with Job(script, str(plain), log=tmp_path / "log", TORCHELASTIC_RESTART_COUNT="1") as job:
        assert job.wait() == 0, job.output()
        unwatched = job.output().splitlines()  # what the second attempt computes
    headless = ["run", "--headless", "--record", str(tmp_path / "run.mcap"), "--"]
    options = ("--standalone", "--nproc-per-node=2", "--max-restarts=1", "--no-python")
    rank = forked_command(0, None, script, str(name), tears_down=True)
    torchrun = forked_command(0, None, "torch.distributed.run", *options, *rank, preload=TORCHRUN_IMPORTS)
    with running(*DDPWATCH, *headless, *torchrun, OMP_NUM_THREADS="1", **{ADDRESS: server_address()}) as watched:
        for attempt, steps in ((0, 4), (1, 7)):  # each ends when its steps are with the collector
            with live(the_run(suffix=f".{attempt}" if attempt else "")) as source:
                read_until(source, lambda frames, n=2 * steps: len(messages(frames, Step)) == n, f"{steps} steps")
            Path(f"{name}.{attempt}.end").touch()
        said, _ = watched.communicate(timeout=PATIENCE_S)
    # Not the exit code, as above: `told`.
    assert sorted(said.splitlines()) == sorted(unwatched)
    assert [line[:9] for line in unwatched] == ["attempt 1"] * 2
    first, second = report_of(tmp_path / "run.mcap").as_json(), report_of(tmp_path / "run.1.mcap").as_json()
    assert [row["steps"] for row in first["ranks"]] == [4, 4]
    assert [row["steps"] for row in second["ranks"]] == [8, 8]
    assert [row["end"]["reason"] for row in second["ranks"]] == ["finished", "finished"]
    assert 0 < second["goodput"]["ratio"] < 1
