"""The doctor's checks, from facts made up for them: each can be ok, and each can be something else."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch.doctor import configuration, directory, loopback, report, runs, system, terminal, training
from ddpwatch.doctor.check import Check, Section, State
from ddpwatch.errors import DdpwatchError
from ddpwatch.launch import Launch
from ddpwatch.run import rundir
from ddpwatch.wire.messages import RANK_MESSAGES, encode
from tests.support.fork_server import ADDRESS, server_address
from tests.support.jobs import forked_command
from tests.support.runs import record, run_of

ROOT = Path(__file__).resolve().parents[2]
PATH = Path("/tmp/ddpwatch-0")


class Nvml:
    """`pynvml` on a machine with GPUs, or without."""

    def __init__(self, count: int = 2, error: str = "") -> None:
        self.count, self.error = count, error

    def nvmlInit(self) -> None:  # noqa: N802
        if self.error:
            raise OSError(self.error)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return self.count

    def nvmlSystemGetDriverVersion(self) -> bytes:  # noqa: N802
        return b"550.54"


CASES: list[tuple[Check, State, str]] = [
    (directory.refused(DdpwatchError("/x: Read-only file system"), "/dev/shm/d"), "fail", "Read-only"),
    (directory.chosen(PATH, {}, ""), "ok", "XDG_RUNTIME_DIR is not set"),
    (directory.chosen(PATH, {"XDG_RUNTIME_DIR": "/run"}, ""), "ok", "in XDG_RUNTIME_DIR"),
    (directory.chosen(PATH, {"DDPWATCH_DIR": "/tmp/ddpwatch-0"}, ""), "ok", "from DDPWATCH_DIR"),
    (directory.chosen(Path("here"), {"DDPWATCH_DIR": "here"}, ""), "warn", "relative"),
    (directory.chosen(PATH, {}, "XDG_RUNTIME_DIR=/run/x is missing"), "warn", "is missing"),
    (directory.writable(PATH, "", ""), "ok", "yes"),
    (directory.writable(PATH, "Read-only file system", "/dev/shm/d"), "fail", "Read-only"),
    (directory.path_length(PATH, "", ""), "ok", "15 characters"),
    (directory.path_length(PATH, "too long", ""), "warn", "long names"),
    (directory.path_length(PATH, "too long", "too long"), "fail", "too long"),
    (directory.free_space(1 << 30, 1000), "ok", "1.0 GiB"),
    (directory.free_space(1 << 30, None), "ok", "1.0 GiB"),
    (directory.free_space(1 << 20, 1000), "warn", "1.0 MiB"),
    (directory.free_space(1 << 30, 3), "warn", "3 files"),
    (directory.file_system("ext4"), "ok", "ext4"),
    (directory.file_system(""), "ok", "not known"),
    (directory.file_system("nfs4"), "warn", "network"),
    (directory.locks(""), "ok", "excludes"),
    (directory.locks("No locks available"), "warn", "No locks available"),
    (directory.sockets(""), "ok", "bound"),
    (directory.sockets("Operation not permitted"), "fail", "not permitted"),
    (directory.shared_memory("tmpfs", 1 << 26), "ok", "64.0 MiB"),
    (directory.shared_memory("ext4", 1 << 26), "none", "not in memory (ext4)"),
    (directory.shared_memory("", None), "none", "is missing"),
    (directory.black_boxes(PATH / "x.box0", "", True), "ok", "/tmp/ddpwatch-0"),
    (directory.black_boxes(PATH / "x.box0", "No space left on device", True), "warn", "No space"),
    (directory.black_boxes(None, "", False), "warn", "no directory is in memory"),
    (directory.black_boxes(None, "", True), "warn", "not private"),
    (runs.runs([], []), "ok", "0"),
    (runs.runs(["train-1"], []), "ok", "1 (train-1)"),
    (runs.runs(["a", "b", "c", "d"], ["e on node7"]), "none", "4 (a, b, c, ...); of other hosts or boots: 1 (e"),
    (runs.leftovers(0, []), "ok", "none"),
    (runs.leftovers(2, []), "ok", "2 dead runs"),
    (runs.leftovers(0, [PATH / "a.in"]), "warn", "a.in"),
    (configuration.variable("DDPWATCH_DETAIL", "2%"), "ok", "=2%"),
    (configuration.variable("DDPWATCH_EXPLAIN", "first-incident"), "ok", "=first-incident"),
    (configuration.variable("DDPWATCH_EXPLAIN", "1"), "warn", "nothing is explained by itself"),
    (configuration.variable("DDPWATCH_DETAIL", "some"), "warn", "no detail: it is ignored"),
    (configuration.variable("DDPWATCH", "1"), "ok", "=1"),
    (configuration.variable("DDPWATCH", "0"), "warn", "off"),
    (configuration.variable("DDPWATCH", "off"), "warn", "watched all the same"),
    (configuration.variable("DDPWATCH_RECORD_MAX_SIZE", "2GB"), "ok", "=2GB"),
    (configuration.variable("DDPWATCH_RECORD_MAX_SIZE", "2X"), "warn", "'2X' is not a size"),
    (configuration.variable("DDPWATCH_RECORD_EVERY", "inf"), "warn", "not a number"),
    (configuration.variable("DDPWATCH_RUN", "train-1"), "none", "ddpwatch run"),
    (configuration.variable("DDPWATCH_ANONYMIZE_KEY", "hunter2"), "ok", "DDPWATCH_ANONYMIZE_KEY is set"),
    (terminal.kind(True, "xterm-256color"), "ok", "xterm-256color"),
    (terminal.kind(True, "dumb"), "warn", "TERM=dumb"),
    (terminal.kind(False, "xterm"), "none", "plain lines"),
    (terminal.colours({}, "dark"), "ok", "24 bit"),
    (terminal.colours({"TERM": "xterm"}, "ansi"), "none", "COLORTERM is not set"),
    (terminal.colours({"NO_COLOR": "1"}, "none"), "ok", "NO_COLOR"),
    (terminal.characters("de_DE.utf8"), "ok", "de_DE"),
    (terminal.characters("C"), "warn", "not UTF-8"),
    (terminal.dimensions(80, 24), "ok", "80x24"),
    (terminal.dimensions(79, 24), "warn", "79x24"),
    (terminal.dimensions(80, 23), "warn", "80x23"),
    (system.processes(system.HOST_PID_NAMESPACE), "ok", "host"),
    (system.processes("pid:[1]"), "none", "container"),
    (system.processes(""), "warn", "/proc"),
    (system.deaths(""), "ok", "at once"),
    (system.deaths("Operation not permitted"), "none", "not permitted"),
    (system.clocks("0123456789", ""), "ok", "boot 01234567"),
    (system.clocks("0123456789", "time:[1]"), "ok", "own time namespace"),
    (system.clocks("", ""), "warn", "no boot id"),
    (system.gpus(Nvml()), "ok", "2, driver 550.54"),
    (system.gpus(Nvml(count=0)), "none", "550.54 has none"),
    (system.gpus(Nvml(error="Driver Not Loaded")), "none", "Driver Not Loaded"),
    (training.missing(), "none", "not installed"),
    (training.broken("OSError: libcudart.so"), "warn", "libcudart"),
    (training.version("2.11.0+cu130", 1.0), "ok", "2.11.0+cu130"),
    (training.version("2.15.1", 1.0), "ok", "2.15.1"),
    (training.version("2.9.1", 1.0), "warn", "2.9.1, older than 2.11, the oldest tested"),
    (training.version("2.16.0.dev1", 1.0), "warn", "newer than 2.15, the newest tested"),
    (training.version("3.0", 1.0), "warn", "newer than 2.15, the newest tested"),
    (training.backends(["gloo", "nccl"]), "ok", "Gloo, NCCL"),
    (training.backends([]), "warn", "torch.distributed"),
    (training.cuda("12.4", 8), "ok", "8 devices"),
    (training.cuda("12.4", 0), "none", "no device"),
    (training.cuda("", 0), "none", "on CPUs"),
    (training.part("DDP", ""), "ok", "are seen"),
    (training.part("FSDP2", "AttributeError: x"), "warn", "off, jobs with FSDP2 train unwatched: AttributeError: x"),
    (training.part("group hooks", None), "none", "this torch has none"),
    (loopback.passed(34, [1_000_000, 2_000_000, 9_000_000], 1.0), "ok", "2.0 ms"),
    (loopback.passed(34, [1_000_000], 3.5), "warn", "above 3 s"),
    (loopback.failed("start", OSError(2, "No such file"), "last words"), "fail", "No such file; the collector's log"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "state", "text"), CASES, ids=[f"{c.name}-{s}-{t[:12]}" for c, s, t in CASES])
def test_a_check_says_what_it_found(check: Check, state: State, text: str) -> None:
    assert check.state == state
    assert text in check.text
    assert bool(check.hint) == (state != "ok")
    assert check.text.isascii()
    assert check.hint.isascii()
    assert len(check.name) <= report.NAME_WIDTH


def test_a_secret_is_not_printed() -> None:
    check = configuration.variable("DDPWATCH_ANONYMIZE_KEY", "hunter2")
    assert "hunter2" not in check.text


def test_a_misspelt_variable_gets_its_name() -> None:
    assert configuration.variable("DDPWATCH_DETAILS", "low").hint == "did you mean DDPWATCH_DETAIL?"
    assert configuration.variable("DDPWATCH_RECORD_MAXSIZE", "1G").hint == "did you mean DDPWATCH_RECORD_MAX_SIZE?"
    assert "DDPWATCH_DIR" in configuration.variable("DDPWATCH_ZZZZZZZZZZ", "").hint


def test_the_variables_are_those_that_the_sources_read() -> None:
    sources = [path for path in (ROOT / "ddpwatch").rglob("*.py") if path.parent.name != "doctor"]
    names = set(re.findall(r'"(DDPWATCH(?:_[A-Z]+)*)"', "\n".join(path.read_text() for path in sources)))
    limits = (ROOT / "ddpwatch" / "recording" / "limits.py").read_text()
    names |= {f"DDPWATCH_RECORD_{name}" for name in re.findall(r'(?:size|number)\("([A-Z_]+)"', limits)}
    read = set(re.findall(r"environ\.get\(['\"](DDPWATCH[A-Z_]*)['\"]", "\n".join(p.read_text() for p in sources)))
    assert set(configuration.VARIABLES) == names | read


def test_settings_that_cannot_be_read(tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    assert configuration.settings(path).state == "ok"
    path.write_text("theme = 'dark'")
    assert configuration.settings(path).text == str(path)
    path.write_text("them = 'dark'")
    check = configuration.settings(path)
    assert (check.state, "them" in check.text) == ("warn", True)


def test_a_directory_for_rank_files(tmp_path: Path) -> None:
    assert configuration.record_directory(tmp_path / "new" / "one").state == "ok"
    (tmp_path / "file").touch()
    check = configuration.record_directory(tmp_path / "file" / "one")
    assert (check.state, "is not a directory" in check.text) == ("warn", True)


def test_the_locale_before_python_changed_it() -> None:
    assert terminal.locale_of({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, utf8_mode=True) == "C"
    assert terminal.locale_of({"LANG": "C", "LC_CTYPE": "C.UTF-8"}, utf8_mode=False) == "C.UTF-8"
    assert terminal.locale_of({"LANG": "en_GB.UTF-8", "LC_ALL": "C"}, utf8_mode=True) == "C"
    assert terminal.locale_of({"LANG": "en_GB.UTF-8"}, utf8_mode=False) == "en_GB.UTF-8"


# -- facts from the machine ----------------------------------------------------------------------------------


def states(checks: Iterator[Check]) -> dict[str, State]:
    return {check.name: check.state for check in checks}


def test_a_directory_in_which_everything_works(run_directory: Path) -> None:
    assert "fail" not in states(directory.checks()).values()
    assert list(run_directory.iterdir()) == []


def test_a_directory_that_is_open_to_others_ends_the_section(run_directory: Path) -> None:
    run_directory.chmod(0o777)
    (check,) = directory.checks()
    assert (check.name, check.state) == ("path", "fail")


def test_a_path_that_is_too_long_ends_the_section(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPWATCH_DIR", str(run_directory / ("x" * 90)))
    *_, last = directory.checks()
    assert (last.name, last.state) == ("path length", "fail")


def test_what_fails_in_a_directory_is_found(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for action in (
        directory._write,
        directory._lock,
        directory._connect,
        lambda path: directory._use_box(path / "box"),
    ):
        assert directory.trouble_of(action, missing) == "No such file or directory"
        tmp_path.joinpath("there").mkdir(exist_ok=True)
        assert directory.trouble_of(action, tmp_path / "there") == ""
    assert list((tmp_path / "there").iterdir()) == []


def test_the_longest_run_id_is_that_of_a_job_below_ddpwatch_run(run_directory: Path) -> None:
    launch = Launch(["x" * 99 + ".py"], None, {})
    assert len(directory.longest_run_id()) >= len(f"{launch.name}-0000.1.1")


def test_a_place_that_would_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert directory.usable_place((str(tmp_path / "missing"), str(tmp_path / "file" / "x"))) == ""
    assert directory.usable_place((str(tmp_path / "missing"), str(tmp_path))).startswith(str(tmp_path))


def test_sockets_of_no_run_are_found(run_directory: Path) -> None:
    (run_directory / "train-1.in").touch()
    found = {check.name: check for check in runs.checks()}
    assert (found["leftovers"].state, found["live"].text) == ("warn", "0")


def test_torch_that_is_missing_or_broken_is_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    assert states(training.checks()) == {"torch": "none"}
    monkeypatch.setattr("importlib.util.find_spec", lambda _: object())
    crash = "import os, sys; print('Traceback', 'OSError: libcudart.so', sep='\\n', file=sys.stderr); os._exit(1)"
    monkeypatch.setattr(training, "module_command", lambda _: [sys.executable, "-c", crash])
    (check,) = training.checks()
    assert (check.state, "OSError: libcudart.so" in check.text) == ("warn", True)
    monkeypatch.setattr(training, "module_command", lambda _: [sys.executable, "-c", "import os; os.abort()"])
    (check,) = training.checks()
    assert "exit code -6" in check.text


RUN_FACTS = "import runpy; runpy.run_module('ddpwatch.doctor.torch_facts', run_name='__main__')"
BROKEN: dict[str, tuple[str, str, str]] = {
    "an attribute is gone": (
        "import torch.distributed.fsdp._fully_shard._fsdp_state as s; del s._get_module_fsdp_state",
        "FSDP2", "jobs with FSDP2 train unwatched: ImportError: cannot import name '_get_module_fsdp_state'",
    ),
    "hooks see nothing": (
        "import ddpwatch.probe.ddp as h; h.DdpProbe.after_launch = lambda *_: None",
        "DDP", "jobs with DDP train unwatched: LookupError: no buckets seen",
    ),
    "it crashes": (
        "import os, torch.distributed.fsdp as fsdp; fsdp.fully_shard = lambda *_, **__: os.abort()",
        "FSDP2", "unwatched: exit code 134",
    ),
    "no network": (
        "import os; os.environ['GLOO_SOCKET_IFNAME'] = 'none'", "probe", "no Gloo group of one rank can be made",
    ),
}  # fmt: skip


@pytest.mark.seconds(20)
@pytest.mark.parametrize("fault", BROKEN)
def test_a_part_that_does_not_work_with_this_torch_is_named(
    fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What prints the facts is forked, after code that breaks torch."""
    code, name, text = BROKEN[fault]
    script = tmp_path / "facts.py"
    script.write_text(f"{code}\n{RUN_FACTS}")
    monkeypatch.setenv(ADDRESS, server_address())
    found = {check.name: check for check in training.parts(*training.torch_facts(forked_command(0, None, script)))}
    off = [check.name for check in found.values() if check.state == "warn"]
    assert name in off
    assert set(off) <= {name, "comm hooks", "group hooks"}
    assert text in found[name].text


def test_a_part_that_hangs_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "TIMEOUT_S", 0.5)
    code = """import time; print('{"DDP": ""}', flush=True); time.sleep(60)"""
    found, end = training.torch_facts([sys.executable, "-c", code])
    (works, hangs) = training.parts(found, end)
    assert (works.name, works.state, hangs.name, hangs.state) == ("DDP", "ok", "comm hooks", "warn")
    assert "not within" in hangs.text


# -- the self-test's failures --------------------------------------------------------------------------------


def test_a_collector_that_does_not_start_is_named_with_its_last_words(run_directory: Path) -> None:
    def start(recording: Path) -> loopback.subprocess.Popen[bytes]:
        code = "import sys; print('ModuleNotFoundError: No module named zmq'); sys.exit(3)"
        with open(rundir.log(loopback.RUN_ID), "xb") as log:
            return loopback.subprocess.Popen([sys.executable, "-c", code], stdout=log)

    check = loopback.check(run_directory, start)
    assert check.state == "fail"
    assert "send a hello through it: the collector ended with exit code 3" in check.text
    assert check.text.endswith("ModuleNotFoundError: No module named zmq")
    assert list(run_directory.iterdir()) == []


def test_a_collector_that_answers_nothing_is_killed(run_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loopback, "DEADLINE_S", 0.05)
    started = []

    def start(recording: Path) -> loopback.subprocess.Popen[bytes]:
        command = [sys.executable, "-c", "input()"]
        started.append(loopback.subprocess.Popen(command, stdin=loopback.subprocess.PIPE))
        return started[0]

    check = loopback.check(run_directory, start)
    assert (check.state, "nothing more came" in check.text) == ("fail", True)
    assert started[0].returncode == -9
    started[0].stdin.close()
    assert list(run_directory.iterdir()) == []


def test_a_recording_that_lacks_frames_is_found(run_directory: Path) -> None:
    loop = loopback.Loopback(run_directory)
    loop.close()
    frames = list(run_of())
    record(run_directory / "recording.mcap", iter(frames))
    loop.sent = [encode(message) for message, _ in frames if isinstance(message, RANK_MESSAGES)]
    loop._compare_recording()
    loop.sent.append(b"a frame that was not recorded")
    with pytest.raises(loopback.SelfTestError, match=f"of {len(loop.sent)} frames it has {len(loop.sent) - 1}"):
        loop._compare_recording()


# -- the report ----------------------------------------------------------------------------------------------

OK, WARN, FAIL = (
    Section("first").ok("a", "fine"),
    Section("first").warn("b", "half", "mend é"),
    Section("s").fail("c", "x", "y"),
)
PLAIN = report.Look(coloured=False, unicode=False)


def test_the_text_has_a_mark_and_a_hint_on_each_line() -> None:
    assert list(report.lines(OK, PLAIN, is_new_section=True)) == ["first", "  ok    a              fine"]
    line, hint = report.lines(WARN, PLAIN, is_new_section=False)
    assert line.startswith("  warn  b ")
    assert hint.strip() == "-> mend \\xe9"
    assert hint.index("->") == line.index("half")
    assert "\x1b[33mwarn" in next(report.lines(WARN, report.Look(True, True), is_new_section=False))


def test_the_last_line_sums_up() -> None:
    assert report.last_line([OK], PLAIN) == "ok    ddpwatch works here"
    assert report.last_line([OK, WARN], PLAIN) == "warn  ddpwatch works here, but for 1 warning"
    assert report.last_line([OK, WARN, FAIL], PLAIN) == "FAIL  ddpwatch cannot watch here (s: c)"
    assert report.last_line([Section("s").none("d", "x", "y")], PLAIN).startswith("ok ")


def test_names_of_files_cannot_move_the_cursor_or_break_the_output() -> None:
    check = Section("s").ok("path", "/tmp/\x1b[2J\udcc3é")
    (line,) = report.lines(check, PLAIN, is_new_section=False)
    assert line.endswith("/tmp/[2J\\ufffd\\xe9")


def test_colours_and_characters_of_the_output() -> None:
    look = report.Look.of
    assert look({"TERM": "xterm", "LANG": "C.UTF-8"}, True, "utf-8", False) == report.Look(True, True)
    assert not look({"TERM": "xterm", "NO_COLOR": "1"}, True, "utf-8", False).coloured
    assert not look({"TERM": "dumb"}, True, "utf-8", False).coloured
    assert not look({"TERM": "xterm"}, False, "utf-8", False).coloured
    assert not look({"LANG": "C"}, True, "utf-8", True).unicode
    assert not look({"LANG": "C.UTF-8"}, True, "ascii", False).unicode


def test_a_check_that_raises_is_a_line() -> None:
    def checks() -> Iterator[Check]:
        yield OK
        raise KeyError("surprise")

    first, second = report.guarded("first", checks)
    assert first == OK
    assert (second.state, "KeyError: 'surprise'" in second.text) == ("warn", True)
