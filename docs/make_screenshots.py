"""Makes the screenshots of the README and the guide: the dashboard at the end of a recording, as SVG.

    python docs/make_screenshots.py RECORDING [-o DIRECTORY] [--name NAME] [--back STEPS] [--views]
    python docs/make_screenshots.py --synthetic RANKS [-o DIRECTORY] [--name NAME] --views
    python docs/make_screenshots.py --scenes [-o DIRECTORY]

Without ``--views`` it makes the overview in three terminal sizes; with it, every view at 160x44. For jobs of many ranks
``tests/support/synthetic.py`` makes up the frames, and the screen calls the run "synthetic". One of its ranks is late;
the Compare view compares it with the same job without that; What if shows a smaller job. ``--scenes`` shows runs of
``tests/support/scenes.py``: incidents and hosts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.recording.writer import RecordingWriter
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import FrameList, ReplayFeed, ReplaySpec
from ddpwatch.tui.views import VIEWS
from tests.support.scenes import SCENES
from tests.support.synthetic import Fleet, enveloped
from tests.support.whatif import MadeUpJob

SIZES = ((80, 24), (120, 36), (200, 50))
VIEW_SIZE = (160, 44)
VIEW_KEYS = {
    **{view.ID: (key,) for key, view in VIEWS.items()}, "bucket": ("3", "j", "enter"), "rank": ("4", "f", "enter"),
}  # fmt: skip
SCENE_SIZE = (100, 30)
SCENE_VIEWS = (  # the scene, the view, its key
    ("hang", "overview", "1"), ("hang", "log", "7"), ("ended", "log", "7"), ("many-hosts", "overview", "1"),
    ("many-hosts", "ranks", "4"), ("many-hosts", "devices", "5"),
)  # fmt: skip
SYNTHETIC_STEPS = 60
LATE_MS = 12.0


def main(argv: list[str] | None = None) -> int:
    """Writes the screenshots, prints their names, and returns the exit code."""
    args = _parser().parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        with tempfile.TemporaryDirectory() as folder:
            baseline = _baseline(args, Path(folder))
            for scene, view, key in SCENE_VIEWS if args.scenes else ():
                path = args.output / f"{scene}-{view}.svg"
                spec = ReplaySpec("made-up", FrameList(SCENES[scene]()))
                path.write_text(asyncio.run(screenshot(spec, SCENE_SIZE, key)), encoding="utf-8")
                print(path)
            for name, size, keys in _screens(args):
                if keys[-1:] == VIEW_KEYS["compare"] and baseline is None:
                    continue
                path = args.output / f"{name}.svg"
                path.write_text(asyncio.run(screenshot(_frames(args, keys), size, keys, baseline)), encoding="utf-8")
                print(path)
    except DdpwatchError as error:
        print(f"make_screenshots: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _screens(args: argparse.Namespace) -> Iterator[tuple[str, tuple[int, int], tuple[str, ...]]]:
    """The name, size and keys of each screenshot."""
    back = ("left",) * args.back
    if args.scenes:
        return
    if args.views:
        for name, keys in VIEW_KEYS.items():
            yield f"{args.name}-{name}", VIEW_SIZE, (*back, *keys)
    else:
        for width, height in SIZES:
            yield f"{args.name}-{width}x{height}", (width, height), back


def _frames(args: argparse.Namespace, keys: tuple[str, ...]) -> ReplaySpec:
    if args.synthetic is None:
        return ReplaySpec(args.recording.name, Recording(args.recording))
    if keys[-1:] == VIEW_KEYS["whatif"]:  # it needs buckets that follow from the sizes of parameters
        return ReplaySpec(
            "made-up", FrameList(enveloped(MadeUpJob(steps=SYNTHETIC_STEPS, late_ms=(0.0, 4.0)).messages()))
        )
    fleet = Fleet(args.synthetic, late={args.synthetic // 3: LATE_MS}, gpus=True)
    frames = enveloped(fleet.frames(SYNTHETIC_STEPS), every_ns=100_000_000 // args.synthetic)
    return ReplaySpec("synthetic", FrameList(frames))


def _baseline(args: argparse.Namespace, folder: Path) -> Path | None:
    """A recording for the Compare view, where the run is made up."""
    if args.synthetic is None:
        return None
    path = folder / "yesterday.mcap"
    writer = RecordingWriter(path)
    for message, envelope in enveloped(Fleet(args.synthetic, gpus=True, seed=1).frames(SYNTHETIC_STEPS)):
        writer.write_message(message, envelope)
    writer.close()
    return path


async def screenshot(
    feed: ReplaySpec, size: tuple[int, int], keys: Sequence[str] = (), baseline: Path | None = None
) -> str:
    """The dashboard at the end of the frames, after the keys, as SVG.

    Raises:
        DdpwatchError: The recording cannot be read.
    """
    app = DashboardApp(feed, ticking=False, baseline=baseline)
    async with app.run_test(size=size) as pilot:
        assert isinstance(app.feed, ReplayFeed)
        app.feed.play_to_end()
        while not app.session.over and app.failure is None:
            await pilot.pause(0.02)
        if app.failure is not None:
            raise app.failure
        while app.session.whole is not None and not app.session.whole.ready:
            await pilot.pause(0.02)
        app.tick()
        await pilot.press(*keys)
        while app.view.pending:
            await pilot.pause(0.02)
            app.tick()
        await pilot.pause()
        return app.export_screenshot(title="ddpwatch")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path, nargs="?", help="a file written with --record")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "screenshots", metavar="DIRECTORY")
    parser.add_argument("--name", default="overview", help="the prefix of the files' names")
    parser.add_argument("--back", type=int, default=0, metavar="STEPS", help="go back this many steps from the end")
    parser.add_argument("--views", action="store_true", help="every view instead of the overview")
    parser.add_argument("--synthetic", type=int, metavar="RANKS", help="make up a run of that many ranks")
    parser.add_argument("--scenes", action="store_true", help="incidents and hosts, made up")
    return parser


if __name__ == "__main__":
    sys.exit(main())
