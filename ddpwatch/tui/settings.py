"""The dashboard's settings, from a TOML file. A missing file means the defaults."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import platformdirs
from msgspec import Meta

from ddpwatch.errors import UsageError
from ddpwatch.run.regular import read_regular

Theme = Literal["auto", "dark", "light", "contrast", "ansi", "none"]
_FEW_COLOURS = ("linux", "vt100", "vt220", "ansi", "xterm", "screen", "tmux", "rxvt")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Every setting with its default."""

    theme: Theme = "auto"
    """Colours. ``auto``: none with NO_COLOR, the sixteen ANSI colours on an old terminal, else dark."""
    ascii: bool = False
    """Draw with ASCII characters only."""
    view: Literal["overview", "timeline", "collectives", "ranks", "devices", "compare", "log", "whatif"] = "overview"
    """The first view shown."""
    repaint_hz: Annotated[float, Meta(ge=0.5, le=20)] = 10.0
    """The highest rate at which a live view is drawn. Lower it on a slow connection."""
    follow_slowest: bool = False
    """Keep the slowest rank in sight."""
    timeline_seconds: Annotated[float, Meta(gt=0, le=600)] = 3.0
    """Length of the Timeline's rolling window, in seconds."""

    def override(self, theme: str | None, ascii_only: bool | None) -> Settings:
        """Returns these settings with those given on the command line."""
        changes = {name: value for name, value in (("theme", theme), ("ascii", ascii_only)) if value is not None}
        try:
            return msgspec.convert({**msgspec.structs.asdict(self), **changes}, Settings)
        except msgspec.ValidationError as error:
            raise UsageError(str(error), "themes: auto, dark, light, contrast, ansi, none") from error

    def resolved_theme(self) -> str:
        """Returns the theme to use in this terminal."""
        if self.theme != "auto":
            return self.theme
        if os.environ.get("NO_COLOR"):
            return "none"
        few = os.environ.get("TERM", "") in _FEW_COLOURS and not os.environ.get("COLORTERM")
        return "ansi" if few else "dark"


def settings_path() -> Path:
    """Returns ``$DDPWATCH_CONFIG``, else ``ddpwatch/config.toml`` in ``$XDG_CONFIG_HOME`` (``~/.config``)."""
    if configured := os.environ.get("DDPWATCH_CONFIG"):
        return Path(configured)
    try:
        folder = platformdirs.user_config_path("ddpwatch")
    except RuntimeError:  # a user without a home: then there is no such file
        folder = Path("~/.config/ddpwatch")
    return folder / "config.toml"


def load_settings(path: Path | None = None) -> Settings:
    """Returns the settings in a file (see `settings_path`); the defaults where there is none.

    Raises:
        UsageError: The file cannot be read, is not TOML, or has a setting that does not exist.
    """
    path = path or settings_path()
    try:
        return msgspec.toml.decode(read_regular(path), type=Settings)
    except FileNotFoundError:
        return Settings()
    except (OSError, msgspec.DecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise UsageError(f"{path}: {why}", "docs/guide.md lists the settings") from error
