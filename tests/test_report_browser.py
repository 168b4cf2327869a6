"""The HTML report in a real browser: at phone and desktop width, light and dark."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from browser import Browser, find_browser
from test_report import hostile, report

from edge_opt.report import Report, write_report

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_browser() is None, reason="no Chromium here: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as started:
        yield started


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("made", [report, hostile], ids=["demo", "hostile names"])
def test_the_page_fits_and_asks_for_nothing(
    made: type[Report], width: int, dark: bool, browser: Browser, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    write_report(made(), path)
    page = browser.look_at(path, width=width, dark=dark)
    assert page.width == width
    assert page.scroll_width <= width, "the page is wider than the window"
    assert page.requests == []
    assert page.complaints == []


def test_light_and_dark_differ(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    write_report(report(), path)
    light, dark = (browser.look_at(path, width=1280, dark=dark) for dark in (False, True))
    assert light.ground == "rgb(251, 251, 250)"
    assert dark.ground == "rgb(21, 24, 28)"
    assert light.screenshot != dark.screenshot


def test_the_harness_sees_overflow_requests_and_complaints(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "bad.html"
    path.write_text(
        "<!doctype html><div style='width:2000px'>wide</div><script>console.error('x')</script>"
        "<img src='http://127.0.0.1:9/i.png'>"
    )
    page = browser.look_at(path, width=390)
    assert page.scroll_width >= 2000
    assert page.requests == ["http://127.0.0.1:9/i.png"]
    assert page.complaints
