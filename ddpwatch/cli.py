"""The command line. Each verb imports what it needs inside, so that `ddpwatch ls` does not load a dashboard.

stdout is data, stderr is narration. Exit codes: 0 fine, 1 the thing asked about failed, 2 bad usage or bad input.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpwatch.errors import DdpwatchError, UsageError
from ddpwatch.version import __version__

if TYPE_CHECKING:
    from ddpwatch.rundir import RunInfo

app = typer.Typer(
    name="ddpwatch",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Plain = Annotated[bool, typer.Option("--plain", help="Print lines instead of a dashboard (default without a TTY).")]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A recording (.mcap).")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Run = Annotated[
    str | None, typer.Argument(metavar="[RUN|ENDPOINT]", help="A run's id or its beginning, or ipc://… endpoint.")
]


def main() -> None:
    """Entry point: turns our errors into one line, a hint and an exit code."""
    try:
        app()
    except DdpwatchError as error:
        typer.echo(f"ddpwatch: error: {error.message}", err=True)
        if error.hint:
            typer.echo(f"hint: {error.hint}", err=True)
        sys.exit(error.exit_code)
    except BrokenPipeError:  # `ddpwatch report … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ddpwatch {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def watch_newest(
    context: typer.Context,
    plain: Plain = False,
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True)] = False,
) -> None:
    """Watch PyTorch data-parallel training live.

    Without a command: attach to the newest run of yours on this machine, or wait for one.
    """
    if context.invoked_subcommand is None:
        _show(None, None, plain)


@app.command()
def attach(run: Run = None, plain: Plain = False) -> None:
    """Attach to one run."""
    info, endpoint = _resolve(run)
    _show(info, endpoint, plain)


@app.command()
def ls(as_json: Json = False) -> None:
    """List the runs on this machine."""
    from ddpwatch import rundir
    from ddpwatch.plain import run_table

    runs = rundir.live_runs()
    if as_json:
        import msgspec

        typer.echo(msgspec.json.encode(runs).decode())
    elif runs:
        typer.echo("\n".join(run_table(runs)))
    else:
        typer.echo(f"no run is being watched (looked in {rundir.directory()})", err=True)


@app.command(context_settings={"ignore_unknown_options": False})
def run(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND…", help="The job, e.g. torchrun … train.py")],
    record_to: Annotated[Path | None, typer.Option("--record", metavar="FILE", help="Record to FILE.")] = None,
    headless: Annotated[bool, typer.Option("--headless", help="No dashboard: a line every few seconds.")] = False,
) -> None:
    """Run a job and watch it, without a change to its script. The exit code is the job's."""
    from ddpwatch.launch import Launch, run_headless, run_with_dashboard

    launch = Launch(command, record_to)
    show = run_headless if _is_plain(headless) else run_with_dashboard
    raise typer.Exit(show(launch))


@app.command()
def record(
    output: Annotated[Path, typer.Option("-o", "--output", metavar="FILE", help="Where to write.")],
    run: Run = None,
    duration: Annotated[float | None, typer.Option(metavar="S", min=0, help="Stop after S seconds.")] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", min=1, help="Stop after N more steps.")] = None,
) -> None:
    """Record a running job as a viewer, until it ends (or Ctrl-C)."""
    from ddpwatch.capture import capture
    from ddpwatch.sources import LiveSource

    info, endpoint = _resolve(run)
    frames = capture(LiveSource(_endpoint(info, endpoint)), output, duration, steps)
    typer.echo(f"{output}: {frames} frames", err=True)


@app.command()
def replay(
    file: File,
    speed: Annotated[float, typer.Option(min=0.01, max=1000, help="1 is as fast as it was.")] = 1.0,
    plain: Plain = False,
) -> None:
    """Replay a recording in the dashboard."""
    from ddpwatch.recording.reader import Recording

    recording = Recording(file)
    if _is_plain(plain):
        from ddpwatch.plain import print_recording

        print_recording(recording)
        return
    from ddpwatch.tui.app import run_dashboard
    from ddpwatch.tui.feed import ReplayFeed

    run_dashboard(ReplayFeed(path=file, frames=iter(recording), speed=speed))


@app.command()
def report(file: File, as_json: Json = False) -> None:
    """Print the figures of a recording."""
    from ddpwatch.reporting import report_of

    result = report_of(file)
    if as_json:
        import json

        typer.echo(json.dumps(result, indent=2))
    else:
        from ddpwatch.analysis.render import render_report

        typer.echo(render_report(result))


def _show(info: RunInfo | None, endpoint: str | None, plain: bool) -> None:
    if _is_plain(plain):
        from ddpwatch.plain import follow

        follow(info, endpoint)
        return
    from ddpwatch.tui.app import run_dashboard
    from ddpwatch.tui.feed import AttachFeed

    run_dashboard(AttachFeed(run=info, endpoint=endpoint))


def _is_plain(plain: bool) -> bool:
    return plain or not (sys.stdin.isatty() and sys.stdout.isatty())


def _resolve(name: str | None) -> tuple[RunInfo | None, str | None]:
    """What a RUN or ENDPOINT argument means; both None for the newest run."""
    from ddpwatch import rundir, transport

    if name is None:
        return None, None
    if "://" in name:
        return None, transport.check_endpoint(name)
    return rundir.find(name), None


def _endpoint(info: RunInfo | None, endpoint: str | None) -> str:
    from ddpwatch.sources import newest_run

    info = info or (None if endpoint else newest_run())
    if endpoint is not None:
        return endpoint
    if info is None:
        raise UsageError("no run to record", "start one first: torchrun … train.py --watch; `ddpwatch ls` lists runs")
    return info.publish
