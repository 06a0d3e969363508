"""The command line. Each command imports what it needs, so that `ddpwatch ls` does not load the dashboard.

stdout is for data, stderr for messages. Exit codes: 0 success, 1 failure of what was asked for, 2 bad usage or input.
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpwatch import streams
from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.version import __version__

if TYPE_CHECKING:
    from ddpwatch.recording.reader import Recording
    from ddpwatch.recording.seek import Position
    from ddpwatch.run.rundir import RunInfo

USES_RUN_DIRECTORY = {None, "_stdio", "attach", "ls", "metrics", "record", "run", "whatif"}
app = typer.Typer(
    name="ddpwatch",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Theme = Annotated[
    str | None, typer.Option("--theme", metavar="NAME", help="Colours: auto, dark, light, contrast, ansi or none.")
]
Ascii = Annotated[bool | None, typer.Option("--ascii/--no-ascii", help="Draw with ASCII characters only.")]
Plain = Annotated[bool, typer.Option("--plain", help="Print plain lines (default without a terminal).")]
Baseline = Annotated[
    Path | None, typer.Option("--baseline", metavar="FILE", help="Compare with this recording (view 6).")
]
Budget = Annotated[
    str | None,
    typer.Option(
        "--budget", metavar="PERCENT", help="Let watching cost up to PERCENT of a step while you look (default: 1)."
    ),
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A recording (.mcap), or a directory of rank files.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Steps = Annotated[str | None, typer.Option("--steps", metavar="A:B", help="Only steps A to B-1, e.g. 100:200.")]
Ranks = Annotated[str | None, typer.Option("--ranks", metavar="LIST", help="Only these ranks, e.g. 0,4-7.")]
MaxSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Cap the recording, e.g. at 2GB, by removing its oldest parts.")
]
Every = Annotated[int, typer.Option(metavar="N", min=1, help="Keep the hook fires of every Nth step only.")]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id or its start, ssh://[USER@]NODE[:PORT][/RUN], or an ipc:// endpoint (default: newest run).",
    ),
]


def main() -> None:
    """Entry point. Turns a `DdpwatchError` into one line, a hint and an exit code."""
    streams.prepare()
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except DdpwatchError as error:
        _say(f"ddpwatch: error: {error.message}")
        if error.hint:
            _say(f"hint: {error.hint}")
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `ddpwatch report … | head`
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _say_fallback() -> None:
    from ddpwatch.run import rundir

    if note := rundir.fallback():
        _say(f"ddpwatch: {note}")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ddpwatch {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def watch_newest(
    context: typer.Context,
    plain: Plain = False,
    theme: Theme = None,
    ascii_only: Ascii = None,
    baseline: Baseline = None,
    budget: Budget = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Watch PyTorch data-parallel training live.

    Without a command, attach to your newest run on this machine, or wait for one.
    """
    if context.invoked_subcommand in USES_RUN_DIRECTORY:
        _say_fallback()
    if context.invoked_subcommand is None:
        _show(None, None, plain, theme, ascii_only, baseline, budget)


@app.command()
def attach(
    run: Run = None,
    plain: Plain = False,
    theme: Theme = None,
    ascii_only: Ascii = None,
    baseline: Baseline = None,
    budget: Budget = None,
) -> None:
    """Attach to a live run."""
    info, endpoint = _resolve(run)
    _show(info, endpoint, plain, theme, ascii_only, baseline, budget)


@app.command("_stdio", hidden=True)
def stdio(run: Run = None) -> None:
    """Pass on a live run's frames: the other end of `ddpwatch attach ssh://…`."""
    from ddpwatch.run import rundir
    from ddpwatch.viewer.live_source import SILENCE_S
    from ddpwatch.viewer.over_ssh.relay import Relay

    info = rundir.newest_run() if run is None else rundir.find(run)
    if info is None:
        raise UsageError(f"no live run in {rundir.directory()}", "DDPWATCH_DIR chooses another directory")
    relay = Relay(info)
    try:
        relay.run(SILENCE_S)
    finally:
        relay.close()


@app.command()
def ls(as_json: Json = False) -> None:
    """List the live runs on this machine."""
    from ddpwatch.run import rundir
    from ddpwatch.viewer.plain import run_table

    runs = rundir.live_runs()
    if as_json:
        import msgspec

        print(msgspec.json.encode(runs).decode())
    elif listed := [*runs, *rundir.runs_elsewhere()]:
        print("\n".join(run_table(listed)))
    else:
        _say(f"no live run in {rundir.directory()}")


@app.command()
def doctor(as_json: Json = False) -> None:
    """Show what works here, what is missing, and what to do.

    Exit with 1 if ddpwatch cannot watch here.
    """
    import signal

    from ddpwatch.doctor.report import print_report

    for number in (signal.SIGTERM, signal.SIGHUP):  # the self-test leaves nothing behind
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    raise typer.Exit(not print_report(as_json, partial(print, flush=True)))


@app.command(context_settings={"ignore_unknown_options": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The job, e.g. -- torchrun … train.py")],
    record_to: Annotated[Path | None, typer.Option("--record", metavar="FILE", help="Record to FILE.")] = None,
    max_size: MaxSize = None,
    every: Every = 1,
    headless: Annotated[bool, typer.Option("--headless", help="Print lines instead of the dashboard.")] = False,
    budget: Budget = None,
) -> None:
    """Run a job and watch it, without changing its script.

    The exit code is the job's.
    """
    from ddpwatch.launch import Launch, run_headless, run_unwatched, run_with_dashboard, why_unwatched
    from ddpwatch.recording.limits import environment_of
    from ddpwatch.sampling.lease import parse_budget

    plain = _is_plain(headless)
    budget_ppm = parse_budget(budget, looked_at=not plain or sys.stderr.isatty())
    if record_to is None and (max_size is not None or every != 1):
        raise UsageError("--max-size and --every need a recording", "add --record FILE")
    if why := why_unwatched():
        run_unwatched(command, why)
    launch = Launch(command, record_to, environment_of(max_size, every))
    show = run_headless if plain else run_with_dashboard
    raise typer.Exit(show(launch, budget_ppm))


@app.command()
def record(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The recording to write.")],
    run: Run = None,
    duration: Annotated[float | None, typer.Option(metavar="S", min=0, help="Stop after S seconds.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N more steps.")] = None,
    max_size: MaxSize = None,
    every: Every = 1,
    budget: Annotated[
        str | None,
        typer.Option("--budget", metavar="PERCENT", help="Let watching cost up to PERCENT of a step while you record."),
    ] = None,
) -> None:
    """Record a running job until it ends or you press Ctrl-C."""
    from ddpwatch.recording.limits import environment_of, limits_from_environment
    from ddpwatch.sampling.lease import parse_budget
    from ddpwatch.viewer.capture import capture
    from ddpwatch.viewer.live_source import LiveSource, may_go_on

    budget_ppm = parse_budget(budget, looked_at=False)
    limits = limits_from_environment({**os.environ, **environment_of(max_size, every)})
    info, endpoint = _resolve(run)
    publish = _endpoint(info, endpoint)
    source = LiveSource(publish, budget_ppm, as_sent=True)
    frames = capture(source, output, duration, steps, limits, partial(may_go_on, source, publish))
    if source.trouble:
        _say(f"ddpwatch: {source.trouble}")
    _say(f"{output}: {frames} frames")


@app.command()
def metrics(
    run: Run = None,
    listen: Annotated[
        str | None,
        typer.Option(
            "--listen", metavar="HOST:PORT", help="Serve Prometheus there (default without --otlp: 127.0.0.1:9464)."
        ),
    ] = None,
    otlp: Annotated[
        str | None, typer.Option("--otlp", metavar="URL", help="Push to this OpenTelemetry collector (OTLP over HTTP).")
    ] = None,
) -> None:
    """Export a live run's figures to Prometheus or OpenTelemetry.

    Without RUN, follow the newest run, and the next ones, until you press Ctrl-C.
    """
    import signal

    from ddpwatch.metrics.follow import export
    from ddpwatch.metrics.prometheus import DEFAULT_LISTEN

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # pushes what is left
    info, endpoint = _resolve(run)
    export(info, endpoint, listen or (DEFAULT_LISTEN if otlp is None else None), otlp)


@app.command()
def replay(
    file: File,
    speed: Annotated[
        float | None,
        typer.Option(
            metavar="X", min=0.01, max=1000, help="Replay X times as fast (default: 1; with --plain: all at once)."
        ),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="TARGET", help="Start at a step (120) or a time (1:30, 90s).")
    ] = None,
    loop: Annotated[bool, typer.Option("--loop", help="Start again at the end.")] = False,
    plain: Plain = False,
    theme: Theme = None,
    ascii_only: Ascii = None,
    follow: Annotated[bool, typer.Option("--follow", help="Show a file live while it is written.")] = False,
    baseline: Baseline = None,
) -> None:
    """Replay a recording, or follow one while it is written."""
    from ddpwatch.recording.seek import locate, parse_target

    if follow and (speed is not None or start is not None or loop):
        raise UsageError("--follow excludes --speed, --from and --loop", "a file that is being written is shown live")
    recording = _opened(file)
    target = parse_target(start) if start is not None else None
    position = locate(recording, target) if target is not None else None
    if _is_plain(plain):
        _no_baseline(baseline)
        _print_lines(file, follow, recording, position, speed, loop)
        return
    from ddpwatch.tui.app import run_dashboard
    from ddpwatch.tui.feed import AttachSpec, ReplaySpec

    if follow:
        from ddpwatch.recording.follow import FollowSource

        live = AttachSpec(endpoint=file.name, open_source=lambda _: FollowSource(file))
        run_dashboard(live, theme, ascii_only, baseline)
        return
    spec = ReplaySpec(file.name, recording, speed or 1.0, start=target, loop=loop)
    run_dashboard(spec, theme, ascii_only, baseline)


@app.command()
def report(
    file: File,
    as_json: Json = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    html: Annotated[Path | None, typer.Option("--html", metavar="OUT", help="Write an HTML report to OUT.")] = None,
    fail_on: Annotated[
        str | None,
        typer.Option(
            metavar="KINDS", help="Exit with 1 if there is an incident of these kinds, e.g. straggler,hang, or any."
        ),
    ] = None,
    steps: Steps = None,
    ranks: Ranks = None,
) -> None:
    """Show where a recording's time went, and who is to blame."""
    from ddpwatch.recording.overwrite_guard import check_output
    from ddpwatch.recording.selection import selection_of
    from ddpwatch.report.build import Drawn, report_of
    from ddpwatch.report.files import text_report, write_page
    from ddpwatch.report.incidents import fail_if, parse_kinds

    if as_json + markdown + (html is not None) > 1:
        raise UsageError("--json, --markdown and --html exclude each other", "give one of them")
    kinds = frozenset[str]() if fail_on is None else parse_kinds(fail_on)
    if html is not None:
        check_output(html)
    charts = not (as_json or markdown) and sys.stdout.isatty()
    drawn = Drawn() if charts or html is not None else None
    result = report_of(file, selection_of(steps, ranks), drawn)
    if html is not None and drawn is not None:
        _say(f"{html}: {write_page(result, drawn, html)} bytes")
    elif as_json:
        _print_json(result)
    elif markdown:
        from ddpwatch.report.markdown import render_markdown

        print(render_markdown(result))
    else:
        print(text_report(result, drawn))
    fail_if(result, kinds)


@app.command()
def compare(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE", help="Two or more recordings; the first is the reference.")
    ],
    as_json: Json = False,
    fail_if_slower: Annotated[
        str | None,
        typer.Option(
            metavar="PERCENT",
            help="Exit with 1 if a run is slower by more than PERCENT, e.g. 5%, or cannot be compared.",
        ),
    ] = None,
    steps: Steps = None,
    ranks: Ranks = None,
) -> None:
    """Compare recordings: is one slower, by how much, and why?"""
    from ddpwatch.recording.selection import selection_of
    from ddpwatch.report.build import compare_recordings, parse_percent, slower_than

    limit = None if fail_if_slower is None else parse_percent(fail_if_slower)
    result = compare_recordings(files, selection_of(steps, ranks))
    if as_json:
        _print_json(result)
    else:
        from ddpwatch.report.compare_text import render_compare

        print(render_compare(result))
    if limit is not None:
        slower_than(result, limit)


@app.command()
def whatif(
    source: Annotated[
        str, typer.Argument(metavar="FILE|DIR|RUN", help="A recording, a directory of rank files, or a live run.")
    ],
    cap: Annotated[str | None, typer.Option(metavar="MIB", help="Other bucket caps, e.g. 1,5,10,25,50.")] = None,
    first_cap: Annotated[
        str | None, typer.Option(metavar="MIB", help="Other caps of the first bucket, e.g. 1,2.")
    ] = None,
    hook: Annotated[str | None, typer.Option(metavar="NAME", help="Comm hooks: fp16, bf16, powersgd-RANK.")] = None,
    link: Annotated[str | None, typer.Option(metavar="X", help="Networks X times as fast, e.g. 2,10.")] = None,
    without_rank: Annotated[int | None, typer.Option(metavar="R", help="With rank R as fast as the others.")] = None,
    no_input: Annotated[bool, typer.Option("--no-input", help="Without waits for data.")] = False,
    world: Annotated[str | None, typer.Option(metavar="N", help="With N ranks, e.g. 8,16.")] = None,
    accumulate: Annotated[
        str | None, typer.Option(metavar="K", help="Reduce gradients once in K batches, e.g. 2,4.")
    ] = None,
    bucket_view: Annotated[bool, typer.Option("--bucket-view", help="With gradient_as_bucket_view.")] = False,
    static_graph: Annotated[bool, typer.Option("--static-graph", help="With static_graph.")] = False,
    free: Annotated[bool, typer.Option("--free", help="With communication that takes no time: the bound.")] = False,
    wire: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Costs of collectives, measured by python -m ddpwatch.whatif.sweep."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the step time under other settings.

    Without options, show the five changes that would gain most. Options are predicted alone and in pairs.
    """
    from ddpwatch.whatif.command import WhatIfOptions, answer, check_answered, read_wire, recorded_in, recorded_live
    from ddpwatch.whatif.text import render_whatif

    question = WhatIfOptions(
        cap, first_cap, hook, link, without_rank, world, accumulate, bucket_view, static_graph, no_input, free
    )
    changes, measured = question.changes(), None if wire is None else read_wire(wire)
    if "://" not in source and (Path(source).exists() or os.sep in source or source.endswith(".mcap")):
        recorded, notes = recorded_in(Path(source))
        for note in notes:
            _print_note(note)
    else:
        from ddpwatch.viewer.live_source import LiveSource

        recorded = recorded_live(LiveSource(_endpoint(*_resolve(source))))
    result = answer(recorded, changes, measured)
    if as_json:
        _print_json(result)
    check_answered(result)
    if not as_json:
        print(render_whatif(result, bool(changes)))


@app.command()
def export(
    file: File,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The file to write; for csv and parquet, a directory.")
    ],
    form: Annotated[
        str, typer.Option("--format", metavar="FORMAT", help="One of chrome, csv, parquet, ndjson.")
    ] = "chrome",
    anonymize: Annotated[
        bool, typer.Option("--anonymize", help="Replace hosts, paths, names and exception messages with hashes.")
    ] = False,
    steps: Steps = None,
    ranks: Ranks = None,
) -> None:
    """Export a recording as a Perfetto trace, tables or raw frames."""
    from ddpwatch.export.writers import export as write
    from ddpwatch.recording.selection import selection_of

    for line in write(_opened(file), form, output, selection_of(steps, ranks), anonymize):
        _say(line)


def _print_json(document: object) -> None:
    import json

    import msgspec

    print(json.dumps(msgspec.to_builtins(document), indent=2))


def _opened(file: Path) -> Recording:
    """Opens a recording and prints its notes."""
    from ddpwatch.recording.reader import Recording

    recording = Recording(file)
    for note in recording.notes:
        _print_note(note)
    return recording


def _print_note(note: str) -> None:
    _say(f"note: {note}")


def _print_lines(
    file: Path, follow: bool, recording: Recording, position: Position | None, speed: float | None, loop: bool
) -> None:
    from ddpwatch.viewer.plain import print_lines, replay_lines

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if follow:
        from ddpwatch.recording.follow import follow_frames

        print_lines(follow_frames(file, note=_print_note))
        return
    replay_lines(recording, position.at_ns if position is not None else 0, speed, loop)


def _show(
    info: RunInfo | None,
    endpoint: str | None,
    plain: bool,
    theme: str | None,
    ascii_only: bool | None,
    baseline: Path | None,
    budget: str | None,
) -> None:
    from ddpwatch.sampling.lease import parse_budget

    plain = _is_plain(plain)
    budget_ppm = parse_budget(budget, looked_at=not plain or sys.stdout.isatty())
    if plain:
        _no_baseline(baseline)
        from ddpwatch.viewer.plain import follow

        follow(info, endpoint, budget_ppm)
        return
    from ddpwatch.run import rundir
    from ddpwatch.tui.app import run_dashboard
    from ddpwatch.tui.feed import AttachSpec
    from ddpwatch.viewer.live_source import LiveSource
    from ddpwatch.viewer.over_ssh.address import SCHEME

    sources = {}
    if endpoint is not None and endpoint.startswith(SCHEME):  # ssh may ask for a password before the dashboard opens
        sources[endpoint] = LiveSource(endpoint, budget_ppm)
    live = AttachSpec(
        run=info,
        endpoint=endpoint,
        list_ended=rundir.last_views,
        open_source=lambda name: sources.pop(name, None) or LiveSource(name, budget_ppm),
    )
    try:
        run_dashboard(live, theme, ascii_only, baseline)
    finally:
        for source in sources.values():
            source.close()


def _no_baseline(baseline: Path | None) -> None:
    if baseline is not None:
        raise UsageError("--baseline needs the dashboard", "ddpwatch compare A B compares two recordings")


def _is_plain(plain: bool) -> bool:
    """Returns whether lines are printed. Keys come from stdin, and textual draws on stderr, wherever that leads."""
    if plain or not (sys.stdin.isatty() and sys.stdout.isatty()):
        return True
    if is_redirected := not sys.stderr.isatty():
        _say("ddpwatch: no dashboard, since stderr is not the terminal: lines instead")
    return is_redirected


def _resolve(name: str | None) -> tuple[RunInfo | None, str | None]:
    """Returns the run or the endpoint that a RUN argument names; both None for the newest run."""
    from ddpwatch.run import rundir
    from ddpwatch.viewer.over_ssh.address import SCHEME
    from ddpwatch.wire import transport

    if name is None:
        return None, None
    if "://" in name:
        return None, name if name.startswith(SCHEME) else transport.check_endpoint(name)
    return rundir.find(name), None


def _endpoint(info: RunInfo | None, endpoint: str | None) -> str:
    from ddpwatch.run import rundir

    if endpoint is not None:
        return endpoint
    info = info or rundir.newest_run()
    if info is None:
        raise UsageError("no run to record", "start one first; `ddpwatch ls` lists the live runs")
    return info.publish
