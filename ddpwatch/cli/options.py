"""The command line's app, and the arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    name="ddpwatch",
    add_completion=True,
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
Detail = Annotated[
    str | None,
    typer.Option(
        metavar="DETAIL",
        help="How many steps are timed in full: low, normal (as 1% of a step for hooks allows), high (nearly all: "
        "in steps of 20 ms, 8% more CPU time), or that percentage (default: normal, low where lines go to a file).",
    ),
]
File = Annotated[Path, typer.Argument(metavar="FILE", help="A recording (.mcap), or a directory of rank files.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Steps = Annotated[str | None, typer.Option("--steps", metavar="A:B", help="Only steps A to B-1, e.g. 100:200.")]
Ranks = Annotated[str | None, typer.Option("--ranks", metavar="LIST", help="Only these ranks, e.g. 0,4-7.")]
MaxSize = Annotated[
    str | None, typer.Option(metavar="SIZE", help="Cap the recording, e.g. at 2GB, by removing its oldest parts.")
]
Every = Annotated[int, typer.Option(metavar="N", min=1, help="Keep when gradients were ready of every Nth step only.")]
Run = Annotated[
    str | None,
    typer.Argument(
        metavar="RUN",
        help="Run id or its start, ssh://[USER@]NODE[:PORT][/RUN], or an ipc:// endpoint (default: newest run).",
    ),
]
OnIncident = Annotated[
    str | None,
    typer.Option(
        "--on-incident",
        metavar="CMD",
        envvar="DDPWATCH_ON_INCIDENT",
        show_envvar=False,
        help="Run this shell command, with JSON on its stdin, when an incident starts, grows worse or ends "
        "(default: $DDPWATCH_ON_INCIDENT).",
    ),
]
Notify = Annotated[
    str | None,
    typer.Option("--notify", metavar="URL", help="Post that to a webhook, as Slack's or Mattermost's."),
]
