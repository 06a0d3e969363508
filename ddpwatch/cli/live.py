"""The commands for live runs, and the doctor."""

from __future__ import annotations

import contextlib
import os
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpwatch.cli.options import (
    Ascii,
    Baseline,
    Detail,
    Every,
    Json,
    MaxSize,
    Notify,
    OnIncident,
    Plain,
    Run,
    Theme,
    app,
)
from ddpwatch.cli.shared import (
    alert_calls,
    endpoint_of,
    interrupt_once,
    is_plain,
    is_recording,
    no_baseline,
    print_json,
    resolve,
    say,
    say_recording,
    watching,
)
from ddpwatch.errors import UsageError
from ddpwatch.version import __version__

if TYPE_CHECKING:
    from ddpwatch.launch import Launch
    from ddpwatch.run.rundir import RunInfo
    from ddpwatch.tui.runs import Look
    from ddpwatch.viewer.follow import ListRuns, Looker

ENDED_HUNG = 124  # exit code of `run`, as of timeout(1)
COMMAND_LAST = {"allow_interspersed_args": False}  # options after the job's command are the job's
USES_RUN_DIRECTORY = {
    None,
    "_stdio",
    "attach",
    "explain",
    "history",
    "ls",
    "mcp",
    "metrics",
    "record",
    "run",
    "serve",
    "whatif",
}


def _say_fallback() -> None:
    from ddpwatch.run import rundir

    if note := rundir.fallback():
        say(f"ddpwatch: {note}")


def _version(wanted: bool) -> None:
    if wanted:
        print(f"ddpwatch {__version__}")
        raise typer.Exit


def _refuse_options_before(context: typer.Context, command: str) -> None:
    """Refuses options that stand before a command, which would not see them."""
    given = [option.opts[0] for option in context.command.params if context.params.get(option.name or "")]
    if given:
        raise UsageError(
            f"{given[0]} comes before {command}, which ignores it there", f"ddpwatch {command} {given[0]} …"
        )


@app.callback(invoke_without_command=True)
def watch_newest(
    context: typer.Context,
    plain: Plain = False,
    theme: Theme = None,
    ascii_only: Ascii = None,
    baseline: Baseline = None,
    detail: Detail = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Watch PyTorch data-parallel training live.

    Without a command, attach to your newest run on this machine, or wait for one.
    """
    if context.invoked_subcommand is not None:
        _refuse_options_before(context, context.invoked_subcommand)
    if context.invoked_subcommand in USES_RUN_DIRECTORY:
        _say_fallback()
    if context.invoked_subcommand is None:
        _show(None, None, is_plain(plain), theme, ascii_only, baseline, detail)


@app.command()
def attach(
    run: Run = None,
    plain: Plain = False,
    theme: Theme = None,
    ascii_only: Ascii = None,
    baseline: Baseline = None,
    detail: Detail = None,
    on_incident: OnIncident = None,
    notify: Notify = None,
) -> None:
    """Attach to a live run."""
    info, endpoint = resolve(run)
    plain = is_plain(plain)
    with watching(alert_calls(on_incident, notify), _runs(info), endpoint, at_once=plain):
        _show(info, endpoint, plain, theme, ascii_only, baseline, detail)


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
def ls(
    nodes: Annotated[
        list[str] | None,
        typer.Argument(metavar="ssh://NODE", help="Other machines, through ssh, in place of this one."),
    ] = None,
    as_json: Json = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Show them live; Enter opens a run.")] = False,
) -> None:
    """List live runs, with the verdict on each.

    Exit with 1 if another machine could not be asked.
    """
    from ddpwatch.common.text import clean
    from ddpwatch.run import rundir
    from ddpwatch.viewer.listing import rows_here, rows_on, run_table

    look = partial(rows_on, nodes) if nodes else rows_here
    if watch:
        _watch_runs(look, bool(nodes), as_json)
        return
    wrong: list[str] = []
    rows = look(wrong.append)
    for text in wrong:
        say(f"ddpwatch: {text}")
    if as_json:
        import msgspec

        print(msgspec.json.encode(rows).decode())
    elif listed := [*rows, *([] if nodes else rundir.runs_elsewhere())]:
        print("\n".join(run_table(listed)), flush=True)
        for row in rows:
            print(f"{clean(row.run_id)}: {clean(row.verdict.text)}")
    elif not wrong:
        say(f"no live run {'there' if nodes else f'in {rundir.directory()}'}")
    raise typer.Exit(bool(wrong))


def _watch_runs(look: Look, elsewhere: bool, as_json: bool) -> None:
    """Shows the live runs, and each that is chosen until its dashboard is left."""
    from ddpwatch.tui.runs import choose_run
    from ddpwatch.viewer.listing import address_of

    if as_json or is_plain(False):
        raise UsageError("--watch needs a terminal, and no --json", "ddpwatch ls lists the runs once")
    while (chosen := choose_run(look, elsewhere)) is not None:
        endpoint = address_of(chosen)
        _show(None if endpoint else chosen, endpoint or None, False, None, None, None, None)


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


@app.command(context_settings=COMMAND_LAST)
def run(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The job, e.g. torchrun … train.py")],
    record_to: Annotated[Path | None, typer.Option("--record", metavar="FILE", help="Record to FILE.")] = None,
    max_size: MaxSize = None,
    every: Every = 1,
    headless: Annotated[bool, typer.Option("--headless", help="Print lines instead of the dashboard.")] = False,
    detail: Detail = None,
    on_incident: OnIncident = None,
    notify: Notify = None,
    kill_after_hang: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="End the job after a hang of, e.g., 10m; the exit code is then 124."),
    ] = None,
) -> None:
    """Run a job and watch it, without changing its script.

    The exit code is the job's.
    """
    from ddpwatch.launch import Launch, run_headless, run_unwatched, run_with_dashboard, why_unwatched
    from ddpwatch.recording.limits import environment_of
    from ddpwatch.sampling.lease import detail_of_job, parse_detail

    plain = is_plain(headless)
    budget_ppm = parse_detail(detail or ("low" if plain and not sys.stderr.isatty() else "normal"))
    settings = environment_of(max_size, every) | ({} if detail is None else {"DDPWATCH_DETAIL": detail})
    if record_to is None and (max_size is not None or every != 1):
        raise UsageError("--max-size and --every need a recording", "add --record FILE")
    calls, limit_s = alert_calls(on_incident, notify), None
    if kill_after_hang is not None:
        from ddpwatch.viewer.hang_limit import parse_duration

        limit_s = parse_duration(kill_after_hang)
    if why := why_unwatched():
        run_unwatched(command, why + (", so no hang ends it" if kill_after_hang else ""))
    launch = Launch(command, record_to, settings)
    if record_to is not None:
        with contextlib.suppress(UsageError):  # the variable's: the job goes on, and each rank warns
            say_recording(record_to, detail_of_job({**os.environ, **settings}, records=True))
    looker = None if limit_s is None else _hang_limit(limit_s, launch)
    show = run_headless if plain else run_with_dashboard
    code = show(launch, budget_ppm, watching(calls, launch.runs, at_once=plain, looker=looker))
    if launch.hang:
        say(f"ddpwatch: ended the job, which hung for {kill_after_hang}: {launch.hang}; its own exit code: {code}")
        code = ENDED_HUNG
    raise typer.Exit(code)


@app.command()
def record(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="The recording to write.")],
    run: Run = None,
    duration: Annotated[float | None, typer.Option(metavar="S", min=0, help="Stop after S seconds.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N more steps.")] = None,
    max_size: MaxSize = None,
    every: Every = 1,
    detail: Detail = "normal",
    on_incident: OnIncident = None,
    notify: Notify = None,
) -> None:
    """Record a running job, or the next one, until its end or Ctrl-C."""
    from ddpwatch.common.text import counted
    from ddpwatch.recording.limits import environment_of, limits_from_environment
    from ddpwatch.recording.names import report_command
    from ddpwatch.run import rundir
    from ddpwatch.sampling.lease import parse_detail
    from ddpwatch.viewer.capture import capture
    from ddpwatch.viewer.live_source import LiveSource, may_go_on
    from ddpwatch.viewer.plain import wait_for_run

    interrupt_once()
    budget_ppm = parse_detail(detail or "normal")
    limits = limits_from_environment({**os.environ, **environment_of(max_size, every)})
    info, endpoint = resolve(run)
    if endpoint is None:
        info = info or wait_for_run()
    publish = endpoint_of(info, endpoint)
    source = LiveSource(publish, budget_ppm, as_sent=True)
    say_recording(output, budget_ppm)
    with watching(alert_calls(on_incident, notify), _runs(info), publish, at_once=True, recording=output.absolute()):
        commit = next((run.commit for run in rundir.live_runs() if run.publish == publish), "")
        frames = capture(source, output, duration, steps, limits, partial(may_go_on, source, publish), commit)
    if source.trouble:
        say(f"ddpwatch: {source.trouble}")
    say(f"ddpwatch: recorded {counted(frames, 'frame')}: {report_command(output)}")


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
    detail: Detail = "low",
    on_incident: OnIncident = None,
    notify: Notify = None,
) -> None:
    """Export a live run's figures to Prometheus or OpenTelemetry.

    Without RUN, follow the newest run, and the next ones, until you press Ctrl-C.
    """
    import signal

    from ddpwatch.metrics.follow import export
    from ddpwatch.metrics.prometheus import DEFAULT_LISTEN
    from ddpwatch.sampling.lease import parse_detail

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # pushes what is left
    info, endpoint = resolve(run)
    budget_ppm = parse_detail(detail or "low")
    with watching(alert_calls(on_incident, notify), _runs(info), endpoint, at_once=True):
        export(info, endpoint, listen or (DEFAULT_LISTEN if otlp is None else None), otlp, budget_ppm)


@app.command(context_settings=COMMAND_LAST)
def check(
    command: Annotated[list[str], typer.Argument(metavar="COMMAND", help="The job, e.g. torchrun … train.py")],
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.1, max=3600, help="How long.")] = 60.0,
    as_json: Json = False,
) -> None:
    """Check a job's machines first: does a rank, host or link lag?

    Starts COMMAND with `-m ddpwatch.check` in place of its script. Exit with 1 if something is slow.
    """
    from ddpwatch.check.command import check_job
    from ddpwatch.check.text import render_check

    result = check_job(command, seconds)
    if as_json:
        print_json(result)
    else:
        print(render_check(result))
    raise typer.Exit(bool(result.slow))


@app.command()
def serve(
    target: Annotated[
        str | None,
        typer.Argument(metavar="RUN|FILE|DIR", help="A live run (default: the newest), or a recording."),
    ] = None,
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="Listen there, on loopback.")] = 8000,
) -> None:
    """Serve the dashboard to browsers, at a secret local address."""
    from ddpwatch.tui.browser import serve as serve_dashboards

    if target is not None and is_recording(target):
        from ddpwatch.recording.reader import Recording

        path = Path(target).absolute()
        Recording(path)  # a bad file fails here
        serve_dashboards(["replay", str(path)], port)
    else:
        resolve(target)
        serve_dashboards([] if target is None else ["attach", target], port)


@app.command()
def mcp(
    folders: Annotated[
        list[Path] | None, typer.Argument(metavar="DIR", help="Also list the recordings in these directories.")
    ] = None,
    http: Annotated[
        bool, typer.Option("--http", help="Over HTTP on loopback, at the address printed, which holds a token.")
    ] = False,
    port: Annotated[int, typer.Option(metavar="PORT", min=0, max=65535, help="For --http (default: any).")] = 0,
) -> None:
    """Answer an agent's questions about runs.

    It speaks the Model Context Protocol, on stdin and stdout.
    """
    from ddpwatch.mcp.server import serve, serve_http

    if http:
        serve_http(folders or [], port)
    else:
        serve(folders or [])


def _hang_limit(limit_s: float, launch: Launch) -> Looker:
    from ddpwatch.viewer.hang_limit import hang_limit

    return hang_limit(limit_s, launch.end_hung_job)


def _runs(info: RunInfo | None) -> ListRuns:
    """Returns what lists the run that is meant, or this machine's."""
    from ddpwatch.run import rundir

    return rundir.live_runs if info is None else lambda: [info]


def _show(
    info: RunInfo | None,
    endpoint: str | None,
    plain: bool,
    theme: str | None,
    ascii_only: bool | None,
    baseline: Path | None,
    detail: str | None,
) -> None:
    from ddpwatch.sampling.lease import parse_detail

    budget_ppm = parse_detail(detail or ("low" if plain and not sys.stdout.isatty() else "normal"))
    if plain:
        no_baseline(baseline)
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
        if left := run_dashboard(live, theme, ascii_only, baseline):
            say(f"ddpwatch: {left} trains on; ddpwatch attach {endpoint or left} shows it again")
    finally:
        for source in sources.values():
            source.close()
