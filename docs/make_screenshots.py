"""Makes the README's screenshots: the dashboard at the end of a recording, as SVG, in three terminal sizes.

python docs/make_screenshots.py RECORDING [-o DIRECTORY] [--name NAME] [--back STEPS]
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from ddpwatch.errors import DdpwatchError
from ddpwatch.recording.reader import Recording
from ddpwatch.tui.app import DashboardApp
from ddpwatch.tui.feed import FileFeed, ReplayFeed

SIZES = ((80, 24), (120, 36), (200, 50))


def main(argv: list[str] | None = None) -> int:
    """Writes one SVG per size and prints their names."""
    args = _parser().parse_args(argv)
    args.output.mkdir(parents=True, exist_ok=True)
    try:
        for width, height in SIZES:
            path = args.output / f"{args.name}-{width}x{height}.svg"
            path.write_text(asyncio.run(screenshot(args.recording, (width, height), args.back)), encoding="utf-8")
            print(path)
    except DdpwatchError as error:
        print(f"make_screenshots: {error}", file=sys.stderr)
        return error.exit_code
    return 0


async def screenshot(recording: Path, size: tuple[int, int], back: int = 0) -> str:
    """The dashboard with the whole recording played, ``back`` steps before its last, as SVG.

    Raises:
        DdpwatchError: The recording cannot be read.
    """
    app = DashboardApp(ReplayFeed(recording, iter(Recording(recording))), ticking=False)
    async with app.run_test(size=size) as pilot:
        assert isinstance(app.feed, FileFeed)
        app.feed.jump_to_end()
        while not app.session.over and app.failure is None:
            await pilot.pause(0.02)
        if app.failure is not None:
            raise app.failure
        app.tick()
        await pilot.press(*["left"] * back)
        await pilot.pause()
        return app.export_screenshot(title="ddpwatch")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("recording", type=Path, help="a file written with --record")
    parser.add_argument("-o", "--output", type=Path, default=Path(__file__).parent / "screenshots", metavar="DIRECTORY")
    parser.add_argument("--name", default="overview", help="how the files' names begin")
    parser.add_argument("--back", type=int, default=0, metavar="STEPS", help="show this many steps before the last")
    return parser


if __name__ == "__main__":
    sys.exit(main())
