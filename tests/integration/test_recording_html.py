"""The HTML report in a real browser: it is drawn, it answers to a click, it runs nothing of what names say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ddpwatch.recording.selection import Selection
from ddpwatch.report.files import write_html
from tests.support import chromium
from tests.support.dashboards import ended_recording
from tests.support.runs import HOSTILE, record, run_of
from tests.support.sharded import hsdp_run

pytestmark = [
    pytest.mark.same_everywhere,
    pytest.mark.skipif(chromium.find() is None, reason="needs Chromium (apt install chromium)"),
    pytest.mark.xdist_group("html"),
]
INK = """(() => {
  const c = document.getElementById("%s"), d = c.getContext("2d").getImageData(0, 0, c.width, c.height).data;
  const colours = new Set();
  for (let i = 0; i < d.length; i += 4) if (d[i + 3] === 255) colours.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
  return colours.size;
})()"""
SHADES = """(() => {
  const c = document.getElementById("lanes"), d = c.getContext("2d").getImageData(60, 0, c.width - 80, c.height).data;
  return new Set(d.filter((_, i) => i % 4 === 3)).size;
})()"""
PLACE = '(r => [r.left, r.top, r.width])(document.getElementById("%s").getBoundingClientRect())'
DETAIL = 'document.getElementById("detail").textContent'


@pytest.fixture(scope="module")
def page_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("html")
    write_html(record(folder / "run.mcap", run_of(ranks=3, steps=60)), folder / "report.html", Selection())
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[chromium.Browser]:
    with chromium.Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


def test_it_is_drawn_and_answers(page_file: Path, browser: chromium.Browser) -> None:
    with chromium.Page(browser, page_file.as_uri()) as page:
        page.evaluate('document.getElementById("timeline").scrollIntoView({block: "center"})')
        assert page.evaluate(INK % "timeline") > 5
        assert page.evaluate(INK % "run") >= 3
        left, top, width = page.evaluate(PLACE % "timeline")
        before = page.evaluate(DETAIL)
        page.click(left + 56 + (width - 66) * 0.5, top + 4 + 54 + 7)  # rank 1, halfway through its step
        after = page.evaluate(DETAIL)
        assert after != before
        assert after.startswith("rank 1, step ")
        assert ": backward, 50.000 ms" in after
        legend = page.evaluate('document.getElementById("legend").textContent')
        assert "bucket waiting for the last rank" in legend  # of rank 0: bucket 1, from 65 to 69 ms
        assert "exposed: in transfer" in legend
        assert "exposed: waiting" not in legend  # all is exposed from 75 ms on
        page.click(left + 56 + (width - 66) * 0.67, top + 4 + 21 + 11 + 3)  # rank 0's bucket 1
        assert page.evaluate(DETAIL).endswith("took 20.000 ms, 4.000 ms of it waiting for rank 2")
        step = page.evaluate("DATA.steps[chosen].step")
        page.evaluate('document.getElementById("run").scrollIntoView({block: "center"})')
        left, top, width = page.evaluate(PLACE % "run")
        page.click(left + width - 12, top + 60)
        assert page.evaluate("DATA.steps[chosen].step") > step
        assert page.evaluate('document.querySelectorAll("#ranks tr").length') == 4
        assert page.requests == [page_file.as_uri()]
        assert page.problems == []


def test_bars_carry_their_buckets_and_colours_their_names(page_file: Path, browser: chromium.Browser) -> None:
    """The names are those of the report's table."""
    with chromium.Page(browser, page_file.as_uri()) as page:
        drawn = page.evaluate("""(() => {
          const context = $("timeline").getContext("2d"), drawn = [], draw = context.fillText;
          context.fillText = (...what) => { drawn.push(what[0]); draw.apply(context, what); };
          drawTimeline();
          return drawn;
        })()""")
        assert drawn.count("0") == drawn.count("1") == 3  # both buckets of three ranks
        names = 'Array.from(document.querySelectorAll("#collectives td:first-child"), cell => cell.textContent)'
        assert page.evaluate(names) == ["0", "1"]
        assert (
            page.evaluate('$("runlegend").textContent')
            == "stepexposed communicationstrip on top: errorstrip on top: warningstrip on top: info"
        )
        assert page.evaluate('getComputedStyle($("fit")).borderRadius') == "4px"
        assert page.problems == []


def test_an_incident_in_the_strip_leads_to_its_step(page_file: Path, browser: chromium.Browser) -> None:
    """The second rank's exception is at the last step; the strip is the top of the run's chart."""
    with chromium.Page(browser, page_file.as_uri()) as page:
        assert page.evaluate('document.getElementById("sentence").textContent') == page.evaluate("DATA.lost.sentence")
        assert page.evaluate('document.querySelectorAll("#bar i").length') == page.evaluate(
            "Object.keys(DATA.lost.bar).length"
        )
        assert "death: rank 1" in page.evaluate('document.getElementById("incidents").textContent')
        page.evaluate('document.getElementById("run").scrollIntoView({block: "center"})')
        left, top, _ = page.evaluate(PLACE % "run")
        at = page.evaluate('(([a, b]) => (a + b) / 2)(drawRun.strip.find(([, , found]) => found.kind === "death"))')
        page.click(left + at, top + 4)
        assert "rank 1" in page.evaluate('document.getElementById("runnote").textContent')
        assert page.problems == []


def test_ranks_over_the_run_are_drawn_and_zoom(page_file: Path, browser: chromium.Browser) -> None:
    """Rank 2 is late by 4 of 100 ms."""
    with chromium.Page(browser, page_file.as_uri()) as page:
        page.evaluate('$("lanes").scrollIntoView({block: "center"})')
        assert page.evaluate(SHADES) > 3
        left, top, width = page.evaluate(PLACE % "lanes")
        page.click(left + 56 + (width - 66) * 0.5, top + 2 * 14 + 7)
        about = page.evaluate('$("lane").textContent')
        assert about.startswith("rank 2, step 30: 100.0 ms, late for 4 % of its time · rank 2 is late by ")
        page.click(left + width - 12, top + 14 + 7)
        assert "died of an exception" in page.evaluate('$("lane").textContent')
        place = {"x": left + 56 + (width - 66) * 0.5, "y": top + 20}
        page.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=-100, **place)
        first, after = page.evaluate("shown")
        assert 0 < first < 30 < after < 60
        page.evaluate('$("colour").value = "steps"; $("colour").dispatchEvent(new Event("change"))')
        assert "100.0 ms" in page.evaluate('$("lanelegend").textContent')
        page.evaluate('$("whole").click()')
        assert page.evaluate("shown") == [0, 60]
        assert page.problems == []


def test_parameter_groups_have_their_collectives(browser: chromium.Browser, tmp_path: Path) -> None:
    write_html(ended_recording(tmp_path / "hsdp.mcap", hsdp_run(4)), tmp_path / "report.html", Selection())
    with chromium.Page(browser, (tmp_path / "report.html").as_uri()) as page:
        table = page.evaluate('document.getElementById("collectives").textContent')
        assert ")groupcollectivesize" in table
        assert "0all-gather1.0 MiB" in table
        assert "parameter groups" in page.evaluate('document.querySelector("#collectives h2").textContent')
        assert "collective in transfer" in page.evaluate('document.getElementById("legend").textContent')
        assert page.problems == []


def test_names_are_never_markup(page_file: Path, browser: chromium.Browser) -> None:
    assert HOSTILE.encode() not in page_file.read_bytes()
    with chromium.Page(browser, page_file.as_uri()) as page:
        assert page.evaluate("DATA.params[0].names[1]") == HOSTILE
        assert page.evaluate("document.images.length") == 0


def test_what_is_not_drawn_is_said(page_file: Path, browser: chromium.Browser, tmp_path: Path) -> None:
    write_html(record(tmp_path / "run.mcap", run_of(ranks=65, steps=2)), tmp_path / "report.html", Selection())
    note = 'document.getElementById("cut").textContent'
    with chromium.Page(browser, (tmp_path / "report.html").as_uri()) as page:
        assert page.evaluate(note) == "This shows only the 64 latest of 65 ranks."
    with chromium.Page(browser, page_file.as_uri()) as page:
        assert page.evaluate(note) == ""


def test_a_screenshot_can_be_taken(page_file: Path, browser: chromium.Browser) -> None:
    with chromium.Page(browser, page_file.as_uri()) as page:
        assert page.screenshot().startswith(b"\x89PNG")
