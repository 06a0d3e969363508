"""The dashboard's settings: from a file, from the terminal, from options."""

import pytest

from ddpwatch.errors import UsageError
from ddpwatch.tui.settings import Settings, load_settings
from tests.support.dashboards import app_on, body, watching
from tests.support.frames import run


class TestSettings:
    def test_defaults_where_there_is_no_file(self, tmp_path):
        assert load_settings(tmp_path / "none.toml") == Settings()

    def test_what_is_written_holds(self, tmp_path):
        path = tmp_path / "config.toml"
        path.write_text('theme = "light"\nascii = true\nview = "ranks"\nrepaint_hz = 4\n')
        assert load_settings(path) == Settings(theme="light", ascii=True, view="ranks", repaint_hz=4)

    @pytest.mark.parametrize("text", ['theme = "pink"', "repaint_hz = 1000", "colour = 1", "theme ="])
    def test_a_mistake_is_named(self, tmp_path, text):
        path = tmp_path / "config.toml"
        path.write_text(text)
        with pytest.raises(UsageError, match=r"config\.toml"):
            load_settings(path)

    def test_the_terminal_decides(self, monkeypatch):
        monkeypatch.delenv("COLORTERM", raising=False)
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.delenv("NO_COLOR", raising=False)
        assert Settings().resolved_theme() == "dark"
        monkeypatch.setenv("TERM", "linux")
        assert Settings().resolved_theme() == "ansi"
        monkeypatch.setenv("NO_COLOR", "1")
        assert Settings().resolved_theme() == "none"
        assert Settings().override("contrast", True) == Settings(theme="contrast", ascii=True)
        with pytest.raises(UsageError):
            Settings().override("pink", None)

    async def test_the_first_view(self):
        app = app_on(settings=Settings(theme="light", view="ranks"))
        async with app.run_test(size=(80, 24)) as pilot:
            await watching(pilot, run(12))
            assert "lateness by rank and step" in body(app)
