"""The commands for recordings."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ddpwatch.cli.options import Ascii, Baseline, File, Json, Plain, Ranks, Steps, Theme, app
from ddpwatch.cli.shared import (
    endpoint_of,
    is_plain,
    is_recording,
    no_baseline,
    opened,
    print_json,
    print_note,
    recording_of,
    resolve,
    say,
)
from ddpwatch.errors import UsageError

if TYPE_CHECKING:
    from ddpwatch.recording.reader import Recording
    from ddpwatch.recording.seek import Position


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
    recording = opened(file)
    target = parse_target(start) if start is not None else None
    position = locate(recording, target) if target is not None else None
    if is_plain(plain):
        no_baseline(baseline)
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
    price: Annotated[
        float | None, typer.Option(metavar="P", min=0, help="What a rank (a GPU) costs in an hour, e.g. 2.5.")
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
    result = report_of(file, selection_of(steps, ranks), drawn, price)
    if html is not None and drawn is not None:
        say(f"{html}: {write_page(result, drawn, html)} bytes")
    elif as_json:
        print_json(result)
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
    result = compare_recordings(files, selection_of(steps, ranks), note=print_note)
    if as_json:
        print_json(result)
    else:
        from ddpwatch.report.compare_text import render_compare

        print(render_compare(result))
    if limit is not None:
        slower_than(result, limit)


@app.command()
def history(
    script: Annotated[
        str | None, typer.Argument(metavar="SCRIPT", help="Only runs of this script, e.g. train.py.")
    ] = None,
    folders: Annotated[
        list[Path] | None,
        typer.Option(
            "--in", metavar="DIR", help="Where recordings are (default: here, and what ended runs have left)."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List a script's recorded runs: did one get slower?

    That is, beyond what runs differ by anyway.
    """
    import shutil

    from ddpwatch.analysis.history import histories
    from ddpwatch.recording.names import recordings_in
    from ddpwatch.report.summaries import summaries
    from ddpwatch.run import rundir

    found = {path for folder in folders or [Path()] for path in recordings_in(folder.absolute())}
    known = summaries(sorted(found | set([] if folders else rundir.last_views())), print_note)
    result = histories(one for one in known if script in (None, one.script))
    if not result:
        raise UsageError(f"no recording of {script or 'a run'}", "--in DIR says where recordings are")
    if as_json:
        print_json(result)
        return
    from ddpwatch.report.history_text import render_history

    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    print("\n\n".join(render_history(one, width) for one in result))


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
    world: Annotated[str | None, typer.Option("--ranks", metavar="N", help="With N ranks in all, e.g. 8,16.")] = None,
    accumulate: Annotated[
        str | None, typer.Option(metavar="K", help="Reduce gradients once in K batches, e.g. 2,4.")
    ] = None,
    bucket_view: Annotated[bool, typer.Option("--bucket-view", help="With gradient_as_bucket_view.")] = False,
    static_graph: Annotated[bool, typer.Option("--static-graph", help="With static_graph.")] = False,
    free: Annotated[
        bool,
        typer.Option("--free", help="With communication for free: the most that caps, hooks, links can save."),
    ] = False,
    wire: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Costs of collectives, measured by python -m ddpwatch.whatif.sweep."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict the step time under other settings.

    Without options, show the five changes that would gain most. Options are predicted alone and in pairs.
    """
    import shutil

    from ddpwatch.whatif.command import WhatIfOptions, answer, check_answered, read_wire, recorded_in, recorded_live
    from ddpwatch.whatif.text import render_whatif

    question = WhatIfOptions(
        cap, first_cap, hook, link, without_rank, world, accumulate, bucket_view, static_graph, no_input, free
    )
    changes, measured = question.changes(), None if wire is None else read_wire(wire)
    if is_recording(source):
        recorded, notes = recorded_in(Path(source))
        for note in notes:
            print_note(note)
    else:
        from ddpwatch.viewer.live_source import LiveSource

        recorded = recorded_live(LiveSource(endpoint_of(*resolve(source))))
    result = answer(recorded, changes, measured)
    if as_json:
        print_json(result)
    check_answered(result)
    if not as_json:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
        print(render_whatif(result, bool(changes), width))


@app.command()
def explain(
    target: Annotated[
        str | None, typer.Argument(metavar="RUN|FILE", help="A live run (default: the newest), or a recording.")
    ] = None,
    rank: Annotated[int | None, typer.Option(metavar="R", min=0, help="The rank (default: the late one).")] = None,
    peer: Annotated[
        int | None,
        typer.Option("--with", metavar="P", min=0, help="The rank to compare it with (default: an alike one)."),
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(metavar="N", min=5, help="Sample N steps (default: some 3 seconds of them), or profile up to 20."),
    ] = None,
    how: Annotated[
        str, typer.Option(metavar="HOW", help="By stacks, or by operators of torch's profiler: profiler.")
    ] = "stacks",
    trace: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write the profile there, too: a trace for Perfetto (FILE.gz: compressed)."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show why a rank is late: the lines of code that take it longer.

    Both ranks sample the stack of their training thread for some steps; with --how profiler, torch's profiler records
    these steps, and operators are compared. Of a recording, show what was sampled then.
    """
    from ddpwatch.export.profile_trace import write_profile
    from ddpwatch.recording.overwrite_guard import check_output
    from ddpwatch.report.explained import explained_in, profile_in, render_explanation

    if how not in ("stacks", "profiler"):
        raise UsageError(f"--how {how[:50]!r} is unknown", "give stacks or profiler")
    if trace is not None:
        check_output(trace)
    if (file := recording_of(target)) is not None:
        if peer is not None or steps is not None:
            raise UsageError("--with and --steps are for live runs", "a recording has what was sampled then")
        found = explained_in(opened(file), rank)
        profile = [] if trace is None else profile_in(opened(file))
    else:
        from ddpwatch.viewer.explain import explain_live
        from ddpwatch.viewer.live_source import LiveSource

        source = LiveSource(endpoint_of(*resolve(target)))
        one, profile = explain_live(source, rank, peer, steps, lambda text: say(f"ddpwatch: {text}"), how == "profiler")
        found = [one]
    if trace is not None:
        say(write_profile(profile, trace))
    if as_json:
        print_json(found)
    else:
        print("\n\n".join(map(render_explanation, found)))


@app.command()
def export(
    file: File,
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="OUT", help="The file to write; for csv and parquet, a directory.")
    ],
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            metavar="FORMAT",
            help="One of chrome, csv, parquet, ndjson (default: as OUT ends).",
        ),
    ] = None,
    anonymize: Annotated[
        bool, typer.Option("--anonymize", help="Replace hosts, paths, names and exception messages with hashes.")
    ] = False,
    steps: Steps = None,
    ranks: Ranks = None,
) -> None:
    """Export a recording as a Perfetto trace, tables or raw frames."""
    from ddpwatch.export.writers import export as write
    from ddpwatch.export.writers import format_for
    from ddpwatch.recording.selection import selection_of

    recording = opened(file)
    for line in write(recording, form or format_for(output), output, selection_of(steps, ranks), anonymize):
        say(line)
    for text in recording.left_out:
        print_note(text)


def _print_lines(
    file: Path, follow: bool, recording: Recording, position: Position | None, speed: float | None, loop: bool
) -> None:
    from ddpwatch.viewer.plain import print_lines, replay_lines

    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    if follow:
        from ddpwatch.recording.follow import follow_frames

        print_lines(follow_frames(file, note=print_note))
        return
    replay_lines(recording, position.at_ns if position is not None else 0, speed, loop)
