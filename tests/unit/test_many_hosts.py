"""A run of three hosts, recorded by its root: what reads it cannot tell packed steps from those that ranks sent."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
import pytest

from ddpwatch.analysis.attachments import AttachmentBuilder
from ddpwatch.analysis.diagnosis.words.verdict import Verdict
from ddpwatch.analysis.kept_steps import StepLimit
from ddpwatch.analysis.window import summarise
from ddpwatch.collector.node_steps import NodeStepPacker
from ddpwatch.recording.follow import FollowSource, follow_frames
from ddpwatch.recording.limits import Limits
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.rotation import RotatingWriter
from ddpwatch.recording.selection import Selection
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.report.build import report_of
from ddpwatch.sampling.stillness import SILENT_NS, STILL_NS
from ddpwatch.viewer.capture import capture
from ddpwatch.viewer.live_source import Source
from ddpwatch.viewer.state import RankStatus, RunState
from ddpwatch.wire.messages import ClockExchange, Message, Node, NodeStep, RankSample, Step, encode
from ddpwatch.wire.node_step import pack
from ddpwatch.wire.transport import Envelope, Frame
from tests.support.frames import EPOCH_NS, MS, START_NS, STEP_MS, beat, bye, hello, layout, status, step, synchronous

pytestmark = pytest.mark.same_everywhere

HOSTS, PER_HOST = 3, 2
WORLD = HOSTS * PER_HOST
AHEAD = {0: 0, 1: 5_000 * 10**9, 2: -300 * 10**9}  # ns, of each host's clock
STEPS = 40
LATE = 3  # the rank, by 20 ms
Run = list[tuple[Message, int]]


def introduction() -> Iterator[Message]:
    for rank in range(WORLD):
        host = rank // PER_HOST
        yield hello(rank, WORLD, local_rank=rank % PER_HOST, host=f"host{host}", boot_id=f"boot {host}")
        yield layout(rank)


def ranks_steps(steps: int = STEPS) -> Iterator[list[Step]]:
    late = [20 if rank == LATE else 0 for rank in range(WORLD)]
    for number, ranks in enumerate(synchronous([late] * steps, statuses={0: "warmup"})):
        yield [
            msgspec.structs.replace(
                one, start_ns=one.start_ns + AHEAD[one.rank // PER_HOST], comm_first_seq=2 * number, comm_seq=[0, 1]
            )
            for one in ranks
        ]


def exchange(host: int, at_ns: int) -> ClockExchange:
    """A ping that took 100 µs there and 100 µs back."""
    sent, there = at_ns + AHEAD[host], 100_000
    return ClockExchange(
        node=host, node_boot_id=f"boot {host}", root_boot_id="boot 0", sent_ns=sent, received_ns=at_ns + there,
        replied_ns=at_ns + there, returned_ns=sent + 2 * there,
    )  # fmt: skip


def run(packed: bool, steps: int = STEPS) -> Run:
    """The run's messages and when the root received them; hosts 1 and 2 send packed steps, if any do."""
    found: Run = [(message, EPOCH_NS) for message in introduction()]
    packers = {host: NodeStepPacker(host) for host in range(1, HOSTS)}
    for number, ranks in enumerate(ranks_steps(steps)):
        received = EPOCH_NS + (number + 1) * STEP_MS * MS
        found += [(exchange(host, START_NS + number * STEP_MS * MS), received) for host in (1, 2)]
        for one in ranks:
            host = one.rank // PER_HOST
            sent = packers[host].take_step(one) if packed and host else [one]
            found += [(message, received) for message in sent]
    return found + [(bye(rank), EPOCH_NS + steps * STEP_MS * MS) for rank in (*range(WORLD), None)]


def write(path: Path, messages: Run) -> Path:
    writer = RecordingWriter(path, {"run_id": "r"})
    for number, (message, received_ns) in enumerate(messages):
        writer.write_message(message, Envelope(number + 1, received_ns, encode(message)))
        if number % 20 == 19:
            writer.flush()
    writer.close()
    return path


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Recording, Recording]:
    """The same run as ranks sent it, and with hosts 1 and 2 packed."""
    folder = tmp_path_factory.mktemp("hosts")
    return Recording(write(folder / "raw.mcap", run(False))), Recording(write(folder / "packed.mcap", run(True)))


def steps_of(frames: Iterator[Frame]) -> list[tuple[int, int]]:
    return sorted((message.step, message.rank) for message, _ in frames if isinstance(message, Step))


def test_a_report_says_the_same(recorded: tuple[Recording, Recording]) -> None:
    """All but the names and sizes of the files."""
    raw, packed = (
        json.loads(json.dumps(report_of(recording.path).as_json()).replace(str(recording.path), "FILE"))
        for recording in recorded
    )
    for report in (raw, packed):
        report["recording"].pop("bytes", None)
    assert packed == raw
    [late] = [incident for incident in packed["incidents"] if incident["kind"] == "straggler"]
    assert late["ranks"] == [LATE]
    assert packed["run"]["hosts"] == ["host0", "host1", "host2"]
    assert all(row["clock_error_ms"] < 1 for row in packed["ranks"] if row["rank"] >= PER_HOST)


def starved(number: int) -> Iterator[RankSample]:
    """How long each rank waited for a core, said by its own host on its own clock."""
    for rank in range(WORLD):
        at_ns, wait_ns = START_NS + number * STEP_MS * MS + AHEAD[rank // PER_HOST], 60 * MS if rank == LATE else 0
        yield RankSample(rank=rank, at_ns=at_ns, span_ns=STEP_MS * MS, run_ns=20 * MS, wait_ns=wait_ns)


def test_what_a_machine_did_is_found_whatever_its_clock_says() -> None:
    state = RunState()
    for message, received_ns in run(False):
        state.apply_message(message, received_ns)
        if isinstance(message, Step) and message.rank == 0:
            for sample in starved(message.step):
                state.apply_message(sample, received_ns)
    [late] = [incident for incident in state.diagnosis.incidents() if incident.kind == "straggler"]
    assert (late.ranks, late.device[:11]) == ((LATE,), "CPU starved")


def test_steps_and_ranks_are_found_in_packed_steps(recorded: tuple[Recording, Recording]) -> None:
    for recording in recorded:
        assert recording.steps == (0, STEPS - 1)
        assert steps_of(recording.select(Selection(17, 19, frozenset({1, 4})))) == [(17, 1), (17, 4), (18, 1), (18, 4)]
    raw, packed = recorded
    assert packed.find_step(30) == raw.find_step(30)


def test_replay_and_follow_read_packed_steps(recorded: tuple[Recording, Recording]) -> None:
    raw, packed = recorded
    assert steps_of(follow_frames(packed.path)) == steps_of(iter(raw))


def test_hook_fires_of_few_steps_are_kept_in_packed_steps(tmp_path: Path) -> None:
    writer = RotatingWriter(tmp_path / "a.mcap", {"run_id": "r"}, Limits(every=10))
    for number, (message, received_ns) in enumerate(run(True)):
        writer.write_message(message, Envelope(number + 1, received_ns, encode(message)))
    writer.close()
    steps = [message for message, _ in Recording(tmp_path / "a.mcap") if isinstance(message, Step)]
    assert len(steps) == STEPS * WORLD
    assert {step.step for step in steps if step.hook_ns} == {0, 10, 20, 30}


def test_attachments_are_those_of_the_ranks_steps() -> None:
    documents = []
    for packed in (False, True):
        builder = AttachmentBuilder()
        for message, _ in run(packed):
            builder.apply_message(message)
        documents.append(builder.documents())
    assert documents[0] == documents[1]
    assert b'"steps":[0,39]' in documents[1]["findings.json"]


class AsSent:
    """A source of frames, as `ddpwatch record` opens it."""

    over, unreadable, missed = False, 0, 0

    def __init__(self, messages: Run) -> None:
        self._messages = messages

    def read(self, timeout_s: float, limit: int = 5000) -> list[Frame]:
        frames = [(m, Envelope(n + 1, at, encode(m))) for n, (m, at) in enumerate(self._messages)]
        self._messages = []
        return frames

    def close(self) -> None:
        pass


def test_a_viewer_records_packed_steps_as_they_came(tmp_path: Path) -> None:
    live: Run = [(status(), START_NS), *run(True)]
    source: Source = AsSent(live)
    assert capture(source, tmp_path / "a.mcap", None, 5) < len(live)
    assert max(steps_of(iter(Recording(tmp_path / "a.mcap"))))[0] == 5


def test_a_broken_packed_step_is_skipped_and_counted(tmp_path: Path) -> None:
    broken = NodeStep(node=1, step=3, ranks=[2], packed=b"?")
    recording = Recording(write(tmp_path / "a.mcap", [(broken, 1), *run(True, 2)]))
    assert len(steps_of(iter(recording))) == 2 * WORLD
    assert recording.skipped == 1


# -- nodes that are not seen -----------------------------------------------------------------------------------------


def node(host: int, at_ns: int, connected: bool = True, silent_ns: int = 0) -> Node:
    ranks = list(range(host * PER_HOST, (host + 1) * PER_HOST))
    return Node(node=host, host=f"host{host}", ranks=ranks, at_ns=at_ns, seen_ns=at_ns - silent_ns, connected=connected)


def states_of(state: RunState) -> list[str]:
    return [state.status_of(rank).value for rank in range(WORLD)]


def test_ranks_of_a_node_without_connection_are_unseen_until_it_is_back() -> None:
    state = RunState()
    for message, received_ns in run(False)[: -WORLD - 1]:
        state.apply_message(message, received_ns)
    state.apply_message(node(1, 0), state.now_ns)
    assert states_of(state) == ["running"] * WORLD
    state.apply_message(node(1, 1, connected=False), state.now_ns + 7 * 10**9)
    assert states_of(state) == ["silent", "silent", "unseen", "unseen", "silent", "silent"]
    state.apply_message(node(1, 2), state.now_ns)
    state.apply_message(beat(2), state.now_ns)
    assert states_of(state)[2:4] == ["running", "silent"]
    assert state.status_of(2) is RankStatus.RUNNING


def test_an_unseen_rank_is_not_said_to_be_late_and_nothing_is_said_to_be_well() -> None:
    state = RunState()
    for message, received_ns in run(False)[: -WORLD - 1]:
        state.apply_message(message, received_ns)

    def found() -> Verdict:
        late = [incident for incident in state.diagnosis.incidents() if incident.kind == "straggler"]
        return state.verdict(summarise(state.recent()), late)

    assert (found().kind, found().ranks) == ("straggler", (LATE,))
    state.apply_message(node(2, 0, connected=False), state.now_ns)
    assert (found().kind, found().ranks) == ("straggler", (LATE,))
    state.apply_message(node(1, 0, connected=False), state.now_ns)
    assert (found().kind, found().severity, found().ranks, found().rank) == ("unseen", "warn", (2, 3, 4, 5), None)
    assert found().text.startswith("ranks 2–5 are unseen: nothing comes from their host's agent; before that: rank 3")
    state.apply_message(node(1, 0), state.now_ns)
    assert found().kind == "straggler"
    healthy = state.verdict(summarise(state.recent()), [])
    assert (healthy.kind, healthy.severity) == ("unseen", "warn")
    assert healthy.text.startswith("ranks 4, 5 are unseen: ")


def test_what_agents_have_dropped_is_counted() -> None:
    state = RunState()
    for host, dropped in ((1, 7), (2, 0), (1, 9)):
        state.apply_message(msgspec.structs.replace(node(host, 0), dropped=dropped), EPOCH_NS)
    state.apply_message(beat(0, dropped=2), EPOCH_NS)
    assert state.dropped == 11


def still(state: RunState, seconds: int, nodes: dict[int, Node], beating: Iterable[int]) -> None:
    """For so long, these ranks say that they wait (all of them once), and the root what it knows of nodes."""
    for half in range(2 * seconds):
        received_ns = state.now_ns + 500 * MS
        for rank in beating if half else range(WORLD):
            at_ns = START_NS + received_ns - EPOCH_NS
            state.apply_message(
                beat(rank, STEPS, "sync", at_ns=at_ns, since_ns=START_NS + STEPS * STEP_MS * MS), received_ns
            )
        for message in nodes.values():
            state.apply_message(message, received_ns)
        state.apply_message(status(), received_ns)


@pytest.mark.parametrize(("silent_ns", "blamed"), [(0, True), (SILENT_NS + 1, False)])
def test_nobody_is_blamed_for_a_hang_while_a_node_is_unseen(silent_ns: int, blamed: bool) -> None:
    """The same silence of ranks 2 and 3 is a hang if their agent says so, and nothing known if it is silent, too."""
    state = RunState()
    for message, received_ns in run(False)[: -WORLD - 1]:
        state.apply_message(message, received_ns)
    still(state, 3 * STILL_NS // 10**9, {1: node(1, 10**12, silent_ns=silent_ns)}, (0, 1, 4, 5))
    assert [incident.kind for incident in state.diagnosis.incidents()].count("hang") == blamed


def test_packed_steps_are_a_fraction_of_those_that_ranks_sent() -> None:
    messages, raw = run(True), run(False)
    nbytes = sum(len(encode(message)) for message, _ in messages if isinstance(message, NodeStep))
    remote = [message for message, _ in raw if isinstance(message, Step) and message.rank >= PER_HOST]
    assert 5 * nbytes < 3 * sum(len(encode(message)) for message in remote)
    assert all(isinstance(pack(0, [one]), NodeStep) for one in remote[:1])


# -- one recording per node ------------------------------------------------------------------------------------------


def per_node(folder: Path) -> Path:
    """Each node's own recording of its ranks, with the end that its own collector saw."""
    for host in range(HOSTS):
        mine = [
            (message, received_ns)
            for message, received_ns in run(False)
            if getattr(message, "rank", None) in (*range(host * PER_HOST, (host + 1) * PER_HOST), None)
            and not isinstance(message, ClockExchange)
        ]
        write(folder / f"host{host}.mcap", mine)
    return folder


def test_a_directory_of_nodes_recordings_is_one_run(tmp_path: Path, recorded: tuple[Recording, Recording]) -> None:
    """The same figures as from the root's recording, with the clocks that collectives alone bound."""
    together, whole = report_of(per_node(tmp_path)).as_json(), report_of(recorded[0].path).as_json()
    assert together["run"] == whole["run"]
    assert together["steps"] == whole["steps"]
    assert [row["rank"] for row in together["ranks"]] == list(range(WORLD))
    assert together["phases_ms"] == whole["phases_ms"]
    errors = [row["clock_error_ms"] for row in together["ranks"]]
    assert all(error is not None for error in errors)
    assert max(errors) > max(row["clock_error_ms"] for row in whole["ranks"])


def apart(host: int, apart_s: int) -> Run:
    """What a node records of its own ranks, its wall clock being that much ahead of the one before."""
    return [
        (message, received_ns + host * apart_s * 10**9)
        for message, received_ns in run(False)
        if getattr(message, "rank", None) in range(host * PER_HOST, (host + 1) * PER_HOST)
    ]


def with_wall_clocks_apart(folder: Path, apart_s: int) -> Path:
    """As `per_node`, with each node's wall clock that much ahead of the one before."""
    for host in range(HOSTS):
        write(folder / f"host{host}.mcap", apart(host, apart_s))
    return folder


def test_nodes_whose_wall_clocks_differ_are_compared_all_the_same(
    tmp_path: Path, recorded: tuple[Recording, Recording], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By more time than steps wait for their last ranks."""
    monkeypatch.setattr("ddpwatch.analysis.run.OPEN", StepLimit(16, 1 << 20, 1))
    together, whole = report_of(with_wall_clocks_apart(tmp_path, 120)).as_json(), report_of(recorded[0].path).as_json()
    rows = {row["rank"]: row for row in together["ranks"]}
    assert all(row["late_ms_p50"] is not None for row in rows.values())
    assert abs(rows[LATE]["late_ms_p50"] - 20) <= rows[LATE]["clock_error_ms"]
    assert together["phases_ms"] == whole["phases_ms"]
    assert together["recording"]["seconds"] == pytest.approx(whole["recording"]["seconds"], abs=0.2)
    [note] = together["recording"]["notes"]
    assert note == (
        "the wall clocks of these recordings differ by 240 s, as their steps show: receive times are those of "
        f"{tmp_path / 'host0.mcap'}"
    )


def test_a_position_is_one_in_recordings_whose_wall_clocks_differ(tmp_path: Path) -> None:
    """Times are those of the first."""
    recording = Recording(with_wall_clocks_apart(tmp_path, 120))
    assert recording.span_ns == (EPOCH_NS, EPOCH_NS + STEPS * STEP_MS * MS)
    found = recording.find_step(30)
    assert found is not None
    assert found.at_ns == EPOCH_NS + 31 * STEP_MS * MS
    assert steps_of(recording.seek(found.at_ns))[:WORLD] == [(30, rank) for rank in range(WORLD)]
    assert 0 < recording.lead_in(recording.span_ns[1], 2, 0.0).steps_from_ns <= recording.span_ns[1]


def test_nodes_whose_wall_clocks_differ_are_followed_step_by_step(tmp_path: Path) -> None:
    steps = [m.step for m, _ in follow_frames(with_wall_clocks_apart(tmp_path, 120)) if isinstance(m, Step)]
    assert steps == sorted(steps)
    assert len(steps) == STEPS * WORLD


class Nodes:
    """Nodes that record while they are followed."""

    def __init__(self, folder: Path, apart_s: int) -> None:
        self._folder = folder
        self._left = {host: deque(apart(host, apart_s)) for host in range(HOSTS)}
        self._writers: dict[int, RecordingWriter] = {}

    def write(self, host: int, frames: int) -> None:
        if host not in self._writers:
            self._writers[host] = RecordingWriter(self._folder / f"host{host}.mcap", {"run_id": "r"})
        for _ in range(min(frames, len(self._left[host]))):
            message, received_ns = self._left[host].popleft()
            self._writers[host].write_message(message, Envelope(1, received_ns, encode(message)))
        self._writers[host].flush()

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


@pytest.mark.parametrize("apart_s", [120, -120])
@pytest.mark.parametrize("early", [HOSTS, 1], ids=["all files are there", "others come later"])
def test_nodes_whose_wall_clocks_differ_are_followed_from_before_their_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: int, apart_s: int
) -> None:
    """Step by step: nobody seems silent, and no rank's steps wait for minutes."""
    monkeypatch.setattr("ddpwatch.recording.follow.SEARCH_S", 0.0)
    nodes, state, introductions = Nodes(tmp_path, apart_s), RunState(), 2 * PER_HOST
    for host in range(early):
        nodes.write(host, introductions)
    source = FollowSource(tmp_path, sleep=lambda _: None)
    for host in range(early, HOSTS):
        nodes.write(host, introductions)
    for number in range(STEPS):
        for host in range(HOSTS):
            nodes.write(host, PER_HOST)
        while frames := source.read(0.0):
            for message, envelope in frames:
                state.apply_message(message, envelope.received_ns)
        assert state.now_ns <= EPOCH_NS + (number + 1) * STEP_MS * MS
    complete = [across for across in state.steps.values() if len(across) == WORLD]
    assert len(complete) >= STEPS - 3
    assert summarise(complete).ranks[LATE].late_ns is not None
    assert {state.status_of(rank) for rank in range(WORLD)} == {RankStatus.RUNNING}
    assert source.notes == [
        "the wall clocks of these recordings differ by 240 s, as their steps show: receive times are those of "
        f"{tmp_path / 'host0.mcap'}"
    ]
    nodes.close()
    source.close()


def test_a_node_that_records_later_has_no_other_wall_clock(tmp_path: Path) -> None:
    recorders = {0: 0, 1: 3}
    for rank, first in recorders.items():
        frames: Run = [(hello(rank, 2), EPOCH_NS + first * 10**10)]
        frames += [(step(rank, number), EPOCH_NS + number * 10**10) for number in range(first, 6)]
        write(tmp_path / f"rank{rank}.mcap", frames)
    recording = Recording(tmp_path)
    assert recording.span_ns == (EPOCH_NS, EPOCH_NS + 5 * 10**10)
    assert not recording.notes


def test_the_roots_recording_beside_those_of_nodes_counts_once(
    tmp_path: Path, recorded: tuple[Recording, Recording]
) -> None:
    write(per_node(tmp_path) / "root.mcap", run(True))
    together, whole = report_of(tmp_path).as_json(), report_of(recorded[0].path).as_json()
    assert together["steps"] == whole["steps"]
    assert together["lost"]["rank_seconds"] == pytest.approx(whole["lost"]["rank_seconds"])
