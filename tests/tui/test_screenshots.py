"""The screenshots of README and guide are of this version's dashboard, and they are all there."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from ddpwatch.tui.bottom_bar import SHORT
from ddpwatch.tui.views import VIEWS

ROOT = Path(__file__).parents[2]
PICTURES = sorted((ROOT / "docs/screenshots").glob("*.svg"))


def lowest_line(picture):
    """The texts of the lowest line of a screenshot."""
    texts = list(ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}text"))
    lowest = max(float(text.get("y")) for text in texts)
    return {(text.text or "").replace("\xa0", " ").strip() for text in texts if float(text.get("y")) == lowest}


@pytest.mark.parametrize("picture", PICTURES, ids=lambda picture: picture.name)
def test_each_has_the_tab_of_every_view(picture):
    shown = lowest_line(picture)
    for key, view in VIEWS.items():
        tab = f"{key} {view.NAME}"
        assert {tab, f"{key} {SHORT.get(view.NAME, view.NAME)}"} & shown, tab  # at 80 columns


def test_each_view_has_one_and_readers_see_it():
    shown = {name for page in ("README.md", "docs/guide.md") for name in pictures_in(page)}
    assert {f"synthetic-{view.ID}.svg" for view in VIEWS.values()} <= shown
    assert shown <= {picture.name for picture in PICTURES}


def pictures_in(page):
    return re.findall(r"!\[[^]]+\]\((?:docs/)?screenshots/([^)]+)\)", (ROOT / page).read_text(encoding="utf-8"))
