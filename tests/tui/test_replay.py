"""Replay: at any speed, from any position, and the figures are those of reading from the start."""

import itertools
import random
import re
from dataclasses import asdict, replace
from itertools import chain

import pytest

from ddpwatch.analysis.diagnosis.incident import Account, LostTime
from ddpwatch.analysis.diagnosis.incident_json import incident_row
from ddpwatch.analysis.diagnosis.words.incident_news import cost_text
from ddpwatch.analysis.kept_steps import KEPT
from ddpwatch.analysis.window import summarise
from ddpwatch.errors import UsageError
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.seek import Position, SeekTarget, duration_text, locate, parse_target
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.report.build import report_of
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import FrameList, ReplayFeed, ReplaySpec
from ddpwatch.tui.feed.events import Arrived, Attached, Failed, Frames, Missed, Over, Rewound
from ddpwatch.tui.feed.playback import PlaybackClock
from ddpwatch.tui.models.devices import HISTORY_S, DeviceLines
from ddpwatch.tui.models.host_names import host_names
from ddpwatch.tui.models.incidents import Diagnosed
from ddpwatch.tui.models.overview import Link, LinkState
from ddpwatch.tui.models.whole import WholeRecording
from ddpwatch.tui.paint.header import line_below
from ddpwatch.tui.session import ViewerSession
from ddpwatch.viewer.state import RunState
from ddpwatch.wire.messages import Bye, Mark, Step
from tests.support.dashboards import Clock, ended_recording, replay_app, screen_text, until
from tests.support.frames import (
    EPOCH_NS,
    MS,
    beat,
    bye,
    device,
    enveloped,
    hello,
    killed,
    layout,
    run,
    state_of,
    status,
    step,
    synchronous,
)
from tests.support.scenes import hang

SECOND_NS = 10**9


class TestTargets:
    @pytest.mark.parametrize(
        ("text", "meant"),
        [
            ("120", SeekTarget(step=120)), (" 7 ", SeekTarget(step=7)),
            ("1:30", SeekTarget(seconds=90)), ("90s", SeekTarget(seconds=90)),
            ("1:02:03", SeekTarget(seconds=3723)), ("1.5s", SeekTarget(seconds=1.5)), ("0:00", SeekTarget(seconds=0)),
        ],
    )  # fmt: skip
    def test_what_is_typed(self, text, meant):
        assert parse_target(text) == meant

    @pytest.mark.parametrize("text", ["", "x", "-3", "1:", "1.5", ":", "s", "1:2:3:4", "9" * 40])
    def test_what_makes_no_sense(self, text):
        with pytest.raises(UsageError, match="neither a step nor a time"):
            parse_target(text)

    def test_where_they_are(self):
        recording = FrameList(enveloped([step(0, 3), step(1, 3), step(0, 5)], every_ms=1000))
        first_ns = recording.span_ns[0]
        assert locate(recording, SeekTarget(step=3)) == Position(first_ns + SECOND_NS, 3)  # once rank 1 has sent it
        assert locate(recording, SeekTarget(step=4)) == Position(first_ns + 2 * SECOND_NS, 5)
        assert locate(recording, SeekTarget(seconds=1.5)) == Position(first_ns + 3 * SECOND_NS // 2)
        with pytest.raises(UsageError, match="ends before step 6"):
            locate(recording, SeekTarget(step=6))
        with pytest.raises(UsageError, match="only 0:02 long"):
            locate(recording, SeekTarget(seconds=3))

    def test_duration_text(self):
        assert [duration_text(s) for s in (0, 65.9, 3600, 3725)] == ["0:00", "1:05", "1:00:00", "1:02:05"]


class TestPacer:
    def playback(self, speed=1.0):
        return PlaybackClock(iter(enveloped([step(0, n) for n in range(5)], every_ms=100)), speed)

    def test_frames_come_at_the_pace_they_were_received(self):
        playback = self.playback()
        assert len(playback.due(0.0)) == 1
        assert len(playback.due(0.25)) == 2
        assert not playback.over
        assert len(playback.due(0.25)) == 2
        assert playback.over
        assert playback.now_ns == EPOCH_NS + 500 * MS

    def test_speed(self):
        assert len(self.playback(2.0).due(0.1)) == 3
        assert len(self.playback(0.5).due(0.1)) == 1

    def test_a_moment_comes_at_once_but_in_batches(self):
        playback = self.playback()
        assert [len(playback.until(EPOCH_NS + 450 * MS, limit=3)) for _ in range(3)] == [3, 1, 0]
        assert playback.now_ns == EPOCH_NS + 450 * MS
        assert not playback.over
        assert len(playback.until(EPOCH_NS + SECOND_NS)) == 1
        assert playback.over

    def test_a_batch_is_bounded_and_the_rest_stays_due(self):
        playback = self.playback()
        assert len(playback.due(10, limit=3)) == 3
        assert len(playback.due(0, limit=3)) == 2

    def test_nothing_to_play(self):
        assert PlaybackClock(iter([]), 1.0).over


class TestReplay:
    def test_plays_to_the_end(self, feed_of):
        clock = Clock()
        feed, events = feed_of(ReplaySpec("x.mcap", FrameList(enveloped(run(5))), 1.0, clock))
        assert events.get(timeout=60) == Attached("x.mcap")
        frames = events.get(timeout=60).frames
        feed.play_to_end()
        while isinstance(event := events.get(timeout=60), Frames):
            frames += event.frames
            feed.taken()
        assert event == Arrived()
        assert events.get(timeout=60) == Over()
        assert [envelope.seq for _, envelope in frames] == list(range(1, len(enveloped(run(5))) + 1))

    def test_holds_while_paused(self, feed_of):
        clock = Clock()
        feed, events = feed_of(ReplaySpec("x", FrameList(enveloped(run(5))), 1.0, clock))
        events.get(timeout=60)
        events.get(timeout=60)
        feed.pause(True)
        acted = clock.advance(60)
        while not acted():
            feed.pause(True)  # wakes the feed
        assert events.empty()

    def test_speed_goes_up_and_down_in_steps(self):
        feed = ReplayFeed(ReplaySpec("x", FrameList([])), print)
        speeds = []
        for by in (1, 1, 1, 1, 1, -1, -1, -1, -1, -1, -1, -1):
            feed.change_speed(by)
            speeds.append(feed.speed)
        assert speeds == [2, 4, 8, 16, 16, 8, 4, 2, 1, 0.5, 0.25, 0.25]

    def test_a_recording_that_breaks_says_so(self, feed_of):
        class Broken(FrameList):
            def select(self, selection):
                yield from super().select(selection)
                raise UsageError("cut")

        _, events = feed_of(ReplaySpec("x", Broken(enveloped([step(0)]))))
        events.get(timeout=60)
        assert isinstance(events.get(timeout=60), Failed)


def shown(state):
    """All that views show of a state; ``frames``, ``version`` and first heartbeats depend on the path."""
    newest = state.newest_step()
    return {
        "run": (
            state.run_id,
            state.world_size,
            state.now_ns,
            state.first_ns,
            state.end,
            state.status,
            state.clocks.several,
        ),
        "ranks": {rank: (asdict(s) | {"first_beat": None}, state.status_of(rank)) for rank, s in state.ranks.items()},
        "steps": [(view.step, dict(view.figures), view.skew) for view in state.steps.values()],
        "newest": newest and newest.step,
        "layouts": {key: state.layouts[key] for key in state.layouts},
        "devices": DeviceLines().build(state, host_names(state)),
        "summary": asdict(summarise(state.recent())),
    }


def long_run(steps=900):
    """One step every 300 ms, with noise, beats and samples, and a rank that dies before the end."""
    dice = random.Random(5)
    messages = [hello(0), layout(0), hello(1), layout(1)]
    for number, ranks in enumerate(synchronous((dice.randrange(30), 0) for _ in range(steps))):
        messages += ranks
        if number % 3 == 0:
            messages += [device(number // 3, float(dice.randrange(100))), beat(number % 2, number), status()]
        if number % 50 == 0:
            messages.append(Mark(rank=0, name=f"at {number}", start_ns=number * 100 * MS))
    messages += [killed(1, steps - 1), bye(reason="lost")]
    return messages


@pytest.fixture(scope="module")
def long_recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("replay") / "long.mcap"
    writer = RecordingWriter(path)
    for message, envelope in enveloped(long_run(), every_ms=100):
        writer.write_message(message, envelope)
        if envelope.seq % 20 == 0:
            writer.flush()
    writer.close()
    return path


def shown_at(frames, times_ns):
    """What is shown at each of these times, read from the start."""
    state, read, left = RunState(), {}, sorted(times_ns)
    for message, envelope in frames:
        while left and envelope.received_ns > left[0]:
            read[left.pop(0)] = shown(state)
        state.apply_message(message, envelope.received_ns)
    return read | dict.fromkeys(left, shown(state))


class Player:
    """Applies what a feed posts, as the dashboard does."""

    def __init__(self, feed_of, recording, **about):
        self.clock = Clock()
        self.feed, self.events = feed_of(ReplaySpec("x", recording, clock=self.clock, **about))
        self.feed.pause(True)
        self.state = RunState()
        self.rewound = 0

    def arrive(self, kind=Arrived):
        """Takes events up to one of that kind, and gives that one."""
        while not isinstance(event := self.events.get(timeout=60), kind):
            if isinstance(event, Frames):
                for message, envelope in event.frames:
                    self.state.apply_message(message, envelope.received_ns)
                self.feed.taken()
            elif isinstance(event, Rewound):
                self.state, self.rewound = RunState(), self.rewound + 1
        return event


class TestSeeking:
    def test_anywhere_the_figures_are_those_of_reading_from_the_start(self, long_recording, feed_of):
        recording = Recording(long_recording)
        begin_ns, end_ns = recording.span_ns
        player = Player(feed_of, recording)
        places_s = [share * (end_ns - begin_ns) / 1e9 for share in (0.5, 0.98, 0.1, 0.97, 0.0, 1.0, 0.75, 0.7, 0.71)]
        read = shown_at(Recording(long_recording), [begin_ns + int(seconds * 1e9) for seconds in places_s])
        for seconds in places_s:
            player.feed.go_to(SeekTarget(seconds=seconds))
            player.arrive()
            assert shown(player.state) == read[begin_ns + int(seconds * 1e9)]
        assert player.rewound == 6  # four times backwards, twice so far forwards that not all in between is needed

    def test_far_away_not_everything_is_read(self, long_recording):
        recording = Recording(long_recording)
        _, end_ns = recording.span_ns
        needed, everything = list(recording.select(recording.lead_in(end_ns, KEPT.steps, HISTORY_S))), list(recording)
        assert KEPT.steps * 2 < len(needed) < 0.85 * len(everything)
        assert [m for m, _ in needed[:4]] == [m for m, _ in everything[:4]]  # who the ranks are
        assert recording.lead_in(end_ns, KEPT.steps, 10_000).start_ns == 0

    def test_a_step_is_shown_once_its_last_rank_has_sent_it(self, long_recording, feed_of):
        player = Player(feed_of, Recording(long_recording))
        for number in (400, 3, 399):
            player.feed.go_to(SeekTarget(step=number))
            assert player.arrive() == Arrived(number)
            assert player.state.newest_step().step == number
        player.feed.go_to_neighbour(399, 1)
        assert player.arrive() == Arrived(400)
        player.feed.go_to_neighbour(0, -1)
        assert player.arrive() == Arrived(0)

    def test_what_is_asked_for_at_once_adds_up(self, long_recording, feed_of):
        player = Player(feed_of, Recording(long_recording))
        player.arrive(Attached)
        feed = player.feed
        for seconds in (30, 30, -10):
            feed.go_by(seconds)
        while round(feed.position_s) != 50:
            player.arrive()
        feed.go_by(-1000)
        while feed.position_s:
            player.arrive()
        feed.go_by(10_000)
        player.arrive(Over)
        assert feed.position_s == feed.length_s > 100

    def test_a_target_beyond_the_end_is_reported_and_nothing_moves(self, long_recording, feed_of):
        player = Player(feed_of, Recording(long_recording))
        player.feed.go_to(SeekTarget(step=5000))
        assert "ends before step 5000" in player.arrive(Missed).why
        assert player.feed.position_s == 0

    def test_it_starts_at_the_position_asked_for(self, long_recording, feed_of):
        player = Player(feed_of, Recording(long_recording), start=SeekTarget(step=250))
        assert player.arrive() == Arrived(250)
        assert player.state.newest_step().step == 250

    def test_to_the_end_where_it_is_at_its_end_nothing_is_forgotten(self, long_recording, feed_of):
        player = Player(feed_of, Recording(long_recording))
        player.feed.go_to(SeekTarget(seconds=0))
        player.arrive()
        player.feed.pause(False)
        player.clock.now += 1000
        player.arrive(Over)
        player.feed.play_to_end()
        player.arrive()
        assert player.rewound == 0

    def test_over_and_over(self, feed_of):
        player = Player(feed_of, FrameList(enveloped(run(5), every_ms=1000)), loop=True)
        player.feed.pause(False)
        for _ in range(3):
            player.clock.now += 1000
            player.arrive(Rewound)
        player.feed.toggle_loop()
        player.clock.now += 1000
        assert player.arrive(Over) == Over()

    def test_a_cut_recording_says_so_at_its_end(self, long_recording, tmp_path, feed_of):
        data = long_recording.read_bytes()
        (tmp_path / "cut.mcap").write_bytes(data[: len(data) // 2])
        player = Player(feed_of, Recording(tmp_path / "cut.mcap"))
        player.feed.play_to_end()
        assert player.arrive(Over) == Over("the recording was cut off here")


def eventful():
    """Rank 1 late from step 60 to 119, an aborted step 150, a slow one 180, and a death at the end."""
    messages = [hello(0), layout(0), hello(1), layout(1)]
    lateness = [(0, 40) if 60 <= number < 120 else (0, 0) for number in range(200)]
    lateness[180] = (120, 120)
    steps = chain.from_iterable(synchronous(lateness, statuses={150: "aborted"}))
    return [*messages, *steps, killed(1, 199), bye(reason="lost")]


class TestWholeRun:
    """The diagnosis of the recording, in the background."""

    def whole(self, frames):
        whole = WholeRecording(lambda: iter(frames), lambda: (frames[0][1].received_ns, frames[-1][1].received_ns))
        whole._read()
        return whole

    def session_after_a_jump(self, whole):
        """One that knows the frames from step 80 to 100 only."""
        frames = enveloped(eventful(), every_ms=50)
        known = [f for f in frames if (80 <= f[0].step <= 100 if isinstance(f[0], Step) else not isinstance(f[0], Bye))]
        session = ViewerSession(replay=True, whole=whole)
        session.apply_frames(known)
        return session

    def line_below(self, session):
        session.refresh(LinkState(Link.REPLAY, replay=True))
        return "".join(text for text, _ in line_below(session.overview, 200))

    def test_below_the_verdict_is_the_incident_of_the_whole_recording(self):
        whole = self.whole(enveloped(eventful(), every_ms=50))
        session = self.session_after_a_jump(whole)
        line = self.line_below(session)
        found = next(one for one in whole.result.incidents if one.kind == "straggler")
        assert session.overview.facts.incident == found
        assert line.startswith(
            f"since step 60   cost in all {cost_text(found, session.state.unit)}"
        )  # it started before the first step kept

    def test_without_the_whole_recording_a_part_is_not_taken_for_the_incident(self):
        frames = enveloped(eventful(), every_ms=50)
        whole = WholeRecording(lambda: iter(frames), lambda: (0, 1))
        line = self.line_below(self.session_after_a_jump(whole))
        assert "pid 4001" in line
        assert "since" not in line
        assert "cost" not in line
        whole._read()
        whole.result = replace(whole.result, incidents=[])
        assert "cost" not in self.line_below(self.session_after_a_jump(whole))

    def test_the_table_starts_with_who_costs_most_in_the_whole_recording(self):
        """As Ranks and Devices do, also during a pause in which the diagnosis becomes complete."""
        frames = enveloped(run(40, world=4, late_rank=2), every_ms=50)
        whole = WholeRecording(lambda: iter(frames), lambda: (0, 1))
        session = ViewerSession(replay=True, whole=whole)
        session.apply_frames(frames)
        session.refresh(LinkState(Link.REPLAY, replay=True))
        session.pause(True)
        assert [line.rank for line in session.overview.worst] == [2]
        waiting = Account("waiting", 1, "backward", SECOND_NS)
        whole.result = Diagnosed(lost=LostTime(SECOND_NS, (waiting,)), whole=True)
        session.refresh(LinkState(Link.REPLAY, replay=True))
        assert [line.rank for line in session.overview.worst] == [2, 1]  # the verdict's first

    def test_it_is_that_of_the_report(self, tmp_path):
        frames = enveloped(eventful(), every_ms=50)
        whole = self.whole(frames)
        report = report_of(ended_recording(tmp_path / "a.mcap", eventful())).as_json()
        assert [incident_row(found).as_json()["kind"] for found in whole.result.incidents] == [
            "death",
            "exposed_comm",
            "straggler",
        ]
        rows = [incident_row(found, state_of(eventful()).layouts).as_json() for found in whole.result.incidents]
        same = ("kind", "ranks", "phase", "param", "since_step", "until_step", "steps", "message")
        assert [[row[key] for key in same] for row in rows] == [[r[key] for key in same] for r in report["incidents"]]
        assert whole.result.lost.rank_ns / 1e9 == report["lost"]["rank_seconds"]

    def test_the_places_worth_a_look(self):
        places = self.whole(enveloped(eventful(), every_ms=50)).places()
        steps = [place.step for place in places]
        assert {60, 150, 180, 199} <= set(steps)  # the late rank, the aborted step, the slow one, the death
        assert steps == sorted(steps)
        assert len(places) < 8

    def test_it_ends_when_it_is_asked_to(self):
        read = []

        def endless():
            for number in itertools.count():
                read.append(number)
                yield from enveloped([step(0, number)])

        whole = WholeRecording(endless, lambda: (0, 1))
        whole.start()
        while not read:
            pass
        whole.stop()
        whole._thread.join(60)
        assert not whole._thread.is_alive()
        assert not whole.ready

    def test_what_cannot_be_read_stops_nothing(self):
        def broken():
            yield from enveloped([step(0)])
            raise UsageError("cut")

        whole = WholeRecording(broken, lambda: (0, 1))
        whole._guarded()
        assert whole.result == Diagnosed()


class TestKeys:
    def app(self, path, clock=None):
        clock = clock or Clock()
        return DashboardApp(ReplaySpec("x.mcap", Recording(path), 1.0, clock), clock=clock, ticking=False)

    async def test_back_and_forth_in_time(self, long_recording):
        app = self.app(long_recording)
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda: app.session.state.frames)
            await pilot.press("greater_than_sign", "ctrl+right", "greater_than_sign")
            await until(pilot, lambda: app.feed.position_s == 15 and not app.session.seeking)
            assert "0:15/4:" in screen_text(app)
            newest = app.session.state.newest_step().step
            await pilot.press("less_than_sign", "ctrl+left")
            await until(pilot, lambda: app.feed.position_s == 5 and app.session.state.newest_step().step < newest)
            assert "0:05/4:" in screen_text(app)

    async def test_while_it_jumps_it_says_so_beside_what_was_there(self, long_recording):
        app = self.app(long_recording)
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda: app.session.state.frames)
            await pilot.press("greater_than_sign")
            await until(pilot, lambda: app.feed.position_s == 5 and not app.session.seeking)
            for view in "124":
                await pilot.press(view)
                app.tick()
                before = screen_text(app).splitlines()
                app.take_event(Rewound())
                app.tick()
                during = screen_text(app).splitlines()
                assert during[0].startswith(" REPLAY SEEKING ")
                assert during[1:] == before[1:]
                assert app.view.stale
                app.take_event(Arrived(None))
                app.tick()
                assert screen_text(app).startswith(" REPLAY 1× ")
                assert not app.view.stale

    async def test_go_to_a_step_and_a_time(self, long_recording):
        """Also to steps beyond those kept."""
        app = self.app(long_recording)
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda: app.session.state.frames)
            await pilot.press("g", *"700", "enter")
            await until(pilot, lambda: app.session.step_shown is not None and app.session.step_shown.step == 700)
            assert "step 700 of 700 (paused)" in screen_text(app)
            await pilot.press("right_square_bracket")
            await until(pilot, lambda: app.session.step_shown.step == 701)
            await pilot.press("left_square_bracket", "left_square_bracket")
            assert app.session.step_shown.step == 699
            app.session.select_oldest()
            oldest = app.session.step_shown.step
            assert oldest == 702 - KEPT.steps
            await pilot.press("left_square_bracket")
            await until(pilot, lambda: app.session.step_shown is not None and app.session.step_shown.step == oldest - 1)
            assert f"step {oldest - 1} of {oldest - 1} (paused)" in screen_text(app)
            await pilot.press("g", *"1:30", "enter")
            await until(pilot, lambda: round(app.feed.position_s) == 90 and not app.session.seeking)
            assert "1:30/4:" in screen_text(app)
            await pilot.press("g", *"later", "enter")
            await until(pilot, lambda: app._notifications)
            assert round(app.feed.position_s) == 90

    async def test_home_loop_and_speed(self, long_recording):
        app = self.app(long_recording)
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda: app.session.state.frames)
            await pilot.press("full_stop")
            await until(pilot, lambda: app.session.over)
            assert "REPLAY ENDED" in screen_text(app)
            await pilot.press("space", "home")
            await until(pilot, lambda: app.feed.position_s == 0 and not app.session.over)
            assert "REPLAY 1× PAUSED" in screen_text(app)
            await pilot.press("O", "minus", "minus")
            app.tick()
            assert app.feed.loop
            assert "REPLAY 0.25× PAUSED" in screen_text(app)
            assert "0:00/4:32 loop" in screen_text(app)

    async def test_places_worth_a_look(self, tmp_path):
        app = self.app(ended_recording(tmp_path / "a.mcap", eventful()))
        async with app.run_test(size=(120, 36)) as pilot:
            await until(pilot, lambda: app.session.state.frames)
            await pilot.press("g", *"148", "enter")
            await until(pilot, lambda: app.session.step_shown is not None and app.session.step_shown.step == 148)
            await until(pilot, lambda: app.session.whole.ready)
            await pilot.press("n")
            await until(pilot, lambda: app.session.step_shown.step == 150)
            await pilot.press("n")
            await until(pilot, lambda: app.session.step_shown.step == 180)
            await pilot.press("N")
            await until(pilot, lambda: app.session.step_shown is not None and app.session.step_shown.step == 150)
            await pilot.press("N")
            await until(pilot, lambda: app.session.step_shown is not None and app.session.step_shown.step == 60)
            await pilot.press("7")
            text = screen_text(app)
            assert re.search(r"· death +1 +backward +199", text)  # later than the position
            assert re.search(r"● straggler +1 +backward b +60–119", text)  # at the position it lasts
            await pilot.press("g", *"130", "enter")
            await until(pilot, lambda: re.search(r"✓ straggler", screen_text(app)))

    async def test_a_step_that_never_ended_is_gone_to_by_its_time(self):
        """Also by Enter in the Log, and from within."""
        clock = Clock()
        spec = ReplaySpec("x", FrameList(hang(lasts_s=20, world=2)), 1.0, clock)
        app = DashboardApp(spec, clock=clock, ticking=False)
        async with app.run_test(size=(80, 24)) as pilot:
            await until(pilot, lambda: app.session.whole.ready and app.session.state.frames)
            found = next(one for one in app.session.whole.result.incidents if one.kind == "hang")
            assert "in the whole recording: " in screen_text(app)
            assert found.since_step == 120
            for keys in (["n"], ["home", "7", "enter"], ["greater_than_sign", "N"]):
                await pilot.press(*keys)
                await until(pilot, lambda: "hang: rank" in screen_text(app) and app.session.paused)
                at_s = app.feed.position_s
                assert app.view is app.views.overview
            await pilot.press("n")  # nothing comes after it
            await until(pilot, lambda: app._notifications)
            assert [str(note.message) for note in app._notifications] == ["none found"]
            assert app.feed.position_s == at_s
            assert "step 115 of 120 (paused)" in screen_text(
                app
            )  # that in which ranks stand, and not the newest to end
            assert " step 115, before the hang " in screen_text(app)
            for keys in (["2"], ["r"]):
                await pilot.press(*keys)
                app.tick()
                assert ", before the hang " in screen_text(app)
            await pilot.press("4")
            app.tick()
            assert re.search(r"^ incidents .*H *$", screen_text(app), re.MULTILINE)
            assert "H hang" in screen_text(app)
            app.action_view("7")
            assert app.focused is app.view  # the next key is for this view
            await pilot.pause()
            app.tick()
            assert "▶ ● hang" in screen_text(app)
            assert "next: read the stacks of the ranks that hold up the others" in screen_text(app)
            assert "press 7" not in screen_text(app)

    async def test_the_log_is_the_same_at_any_speed(self):
        """Findings are judged by recorded time: how often the screen is drawn changes nothing."""
        findings = []
        for ticks in (1, 7):
            app = replay_app(eventful())
            async with app.run_test(size=(120, 36)) as pilot:
                await until(pilot, lambda app=app: app.session.state.frames)
                for _ in range(ticks):
                    await pilot.press("greater_than_sign")
                    await pilot.pause()
                    app.tick()
                await pilot.press("full_stop")
                await until(pilot, lambda app=app: app.session.over)
                findings.append([line for line in app.session.log.lines if line.kind == "incident"])
        assert findings[0] == findings[1]
        assert len(findings[0]) >= 3
