"""The report and the dump's page in a real browser: no console error, zoom, causes, differences."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxpipe.views.report_page import write_report

pytest.importorskip("jinja2")
playwright = pytest.importorskip(
    "playwright.sync_api", reason="needs the extra browser: pip install -e '.[browser]'"
)

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), ""
)
if not CHROMIUM:
    pytest.skip("needs Chromium on the path: apt-get install chromium", allow_module_level=True)

VIEWS = [(1440, "light"), (1440, "dark"), (390, "light"), (390, "dark")]
# A name that would be a tag if it were not escaped.
HOSTILE = "<script>alert(1)</script>"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(16, 64), nn.Linear(64, 64)
        self.add_module(HOSTILE, nn.Linear(64, 4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        return nn.functional.mse_loss(self._modules[HOSTILE](x), y)  # type: ignore[misc]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A trace and a dump of three steps, with their report."""
    place = tmp_path_factory.mktemp("run")
    options = {"stages": 3, "ranks": 3, "microbatches": 4, "schedule": "zb-h1"}
    options |= {"lowering": "eager", "trace": str(place), "dump": str(place)}
    step = torch.compile(Net(), backend="fxpipe", options=options)
    for _ in range(3):
        step(torch.randn(8, 16), torch.randn(8, 4)).backward()
    write_report(place, place / "report.html")
    return place


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        # Chromium's own sandbox refuses to start under root, as CI runs.
        arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
        running = driver.chromium.launch(executable_path=CHROMIUM, args=arguments)
        yield running
        running.close()


class Opened:
    """A page in the browser, and what it complained of."""

    def __init__(self, browser: Any, path: Path, width: int, scheme: str) -> None:
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(path.as_uri())

    def close(self) -> None:
        """No complaint, no request but for the page, nothing wider than the window."""
        wide = self.page.evaluate("document.documentElement.scrollWidth > innerWidth")
        self.page.close()
        assert self.complaints == []
        assert len(self.requests) == 1
        assert not wide


@pytest.fixture(params=VIEWS[::3], ids=lambda view: f"{view[0]}-{view[1]}")
def report(request: pytest.FixtureRequest, browser: Any, folder: Path) -> Iterator[Any]:
    opened = Opened(browser, folder / "report.html", *request.param)
    yield opened.page
    opened.close()


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def test_report_is_drawn_without_a_complaint(
    view: tuple[int, str], browser: Any, folder: Path
) -> None:
    opened = Opened(browser, folder / "report.html", *view)
    opened.page.locator("#chart .bubble").first.wait_for()
    text, back = opened.page.evaluate(
        "['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])"
    )
    dark = sum(map(int, re.findall(r"\d+", back)[:3])) < sum(map(int, re.findall(r"\d+", text)[:3]))
    assert dark == (view[1] == "dark")
    opened.close()


def view_of(page: Any) -> tuple[float, float]:
    data = page.evaluate("({...document.getElementById('chart').dataset})")
    return float(data["start"]), float(data["end"])


def test_report_has_five_numbers_and_escapes_names(report: Any) -> None:
    assert report.locator(".numbers dt").all_inner_texts() == [
        "Step time", "Bubble", "Peak memory", "Sent a step", "Speed",
    ]  # fmt: skip
    assert HOSTILE in report.locator("#plan").inner_text()
    assert report.evaluate("document.querySelectorAll('#plan script').length") == 0


def test_timeline_zooms_by_wheel_keys_and_buttons(report: Any) -> None:
    start, end = view_of(report)
    assert start == 0
    chart = report.locator("#chart > svg")
    chart.scroll_into_view_if_needed()
    chart.hover()
    report.mouse.wheel(0, -400)
    report.wait_for_timeout(100)
    near = view_of(report)
    assert 0 < near[1] - near[0] < 0.8 * (end - start)
    report.locator("#chart").focus()
    report.keyboard.press("ArrowRight")
    report.wait_for_timeout(100)
    moved = view_of(report)
    assert moved[0] > near[0] or moved[1] == end
    report.keyboard.press("+")
    report.wait_for_timeout(100)
    assert view_of(report)[1] - view_of(report)[0] < moved[1] - moved[0]
    report.get_by_role("button", name="Whole step").click()
    report.wait_for_timeout(100)
    assert view_of(report) == (start, end)


def test_timeline_is_dragged(report: Any) -> None:
    report.get_by_role("button", name="Zoom in").click()
    report.wait_for_timeout(100)
    before = view_of(report)
    report.locator("#chart > svg").scroll_into_view_if_needed()
    box = report.locator("#chart > svg").bounding_box()
    middle = box["x"] + box["width"] / 2, box["y"] + box["height"] - 8
    report.mouse.move(*middle)
    report.mouse.down()
    report.mouse.move(middle[0] - 60, middle[1], steps=4)
    report.mouse.up()
    report.wait_for_timeout(100)
    assert view_of(report)[0] > before[0]


def test_bubble_says_its_cause_by_click_and_by_key(report: Any) -> None:
    cause = report.locator("#cause")
    report.locator("#chart .bubble", has_text="waits for").first.dispatch_event("click")
    assert "waits for" in cause.inner_text() and "of rank" in cause.inner_text()
    before = cause.inner_text()
    report.locator("#chart .bubble[tabindex='0']").focus()
    report.keyboard.press("ArrowDown")
    report.keyboard.press("Enter")
    assert "is idle for" in cause.inner_text() and cause.inner_text() != before


def test_bubble_of_the_table_is_found_in_the_timeline(report: Any) -> None:
    button = report.locator("button.link[data-start]").first
    text = button.inner_text()
    button.click()
    report.wait_for_timeout(100)
    assert report.locator("#chart .bubble.chosen").count() == 1
    expected = text if text.startswith("waits") else "has nothing left to do"
    assert expected in report.locator("#cause").inner_text()


def test_opened_pass_shows_what_it_changed(report: Any) -> None:
    summary = report.locator("details.pass summary", has_text="split_tasks")
    summary.focus()
    report.keyboard.press("Enter")
    opened = report.locator("details.pass[open]")
    opened.locator(".cell.come").first.wait_for()
    assert "graph 1I(" in opened.inner_text()
    assert opened.locator(".diff.unified").count() == int(report.viewport_size["width"] < 700)
    opened.locator(".node").first.click()
    assert "test_report_page.py" in report.locator(".source-panel").inner_text()
    report.keyboard.press("Escape")
    assert not report.locator(".source-panel").is_visible()


def test_numbers_of_the_passes_stand_in_columns(browser: Any, folder: Path) -> None:
    opened = Opened(browser, folder / "report.html", 1440, "light")
    ends = opened.page.evaluate(
        "[...document.querySelectorAll('details.pass summary .count')]"
        ".map((count) => count.getBoundingClientRect().right)"
    )
    assert len(ends) > 10 and ends == pytest.approx([ends[0]] * len(ends), abs=0.5)
    opened.close()


# Where the grid of a schedule has its heading `rank 1`, and where the actions below it begin.
COLUMN_OF_RANK_1 = """() => {
  const grid = document.querySelector("main pre");
  const text = grid.firstChild, range = document.createRange();
  const at = text.data.indexOf("rank 1");
  range.setStart(text, at); range.setEnd(text, at + 6);
  const chips = [...grid.querySelectorAll(".chip")].filter((c) => c.textContent.startsWith("1"));
  const left = (what) => what.getBoundingClientRect().left;
  return [left(range), chips.map(left)];
}"""


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: f"{view[0]}-{view[1]}")
def test_index_of_a_dump_shows_passes_schedule_and_ranks(
    view: tuple[int, str], browser: Any, folder: Path
) -> None:
    opened = Opened(browser, folder / "microbatch-of-2" / "index.html", *view)
    page = opened.page
    page.get_by_role("link", name="assign_stages").click()
    main = page.locator("main")
    assert "assign_stages" in page.locator("main h1").inner_text()
    assert "# stage 2" in main.inner_text()
    page.get_by_role("link", name="schedule", exact=True).click()
    assert "rank 2" in main.inner_text()
    head, cells = page.evaluate(COLUMN_OF_RANK_1)
    assert cells and cells == pytest.approx([head] * len(cells), abs=0.5)
    page.get_by_role("link", name="rank 1", exact=True).click()
    assert "def forward" in main.inner_text()
    opened.close()
