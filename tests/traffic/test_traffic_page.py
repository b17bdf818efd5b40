"""The page of `nkw traffic`: complete in itself, nothing unescaped, and readable in a browser of any width."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from model.traffic.chart import Line, Scale, render_chart
from model.traffic.page import _compute_rate
from model.traffic.report import Slice
from model.traffic.workload import SECOND_NS
from nkw.commands import main
from tests.model.folders import TINY

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.slow
NAME = "<script>alert(1)<b>&"
WORDS = (
    "--prompt-lengths 8..24 --output-lengths 8 --requests 60 --tp 2 --replicas 2 --compare --price 20".split()
)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a page about a model whose folder has a hostile name."""
    folder = tmp_path_factory.mktemp("page")
    (folder / NAME).mkdir()
    (folder / NAME / "config.json").write_text(json.dumps({**TINY, "max_position_embeddings": 128}))
    html = folder / "page.html"
    assert main(["traffic", str(folder / NAME), *WORDS, "--html", str(html)]) == 0
    return html


class Tags(HTMLParser):
    """The tags of a page, and the words outside of its style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.append(tag)

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] != "style":
            self.words.append(data)


def test_a_page_needs_nothing_from_outside_and_has_no_scripts(written: Path) -> None:
    text = written.read_text()
    assert not re.search(r"(?:src|href)=[\"'](?!data:,)", text)
    assert not re.search(r"@import|url\(|https?://", text)
    assert not re.search(r"\son\w+=", text)


def test_the_name_of_a_model_stays_a_name(written: Path) -> None:
    tags = Tags(written.read_text())
    assert "script" not in tags.tags
    assert tags.tags.count("b") == 6  # the facts
    assert sum(f"{NAME} on trn2.48xlarge: traffic" in word for word in tags.words) == 2  # title and heading


def test_a_page_shows_the_run_and_what_it_is_compared_with(written: Path) -> None:
    text = written.read_text()
    headings = re.findall(r"<h[23]>(.*?)</h", text)
    assert headings == [
        "how many take at most so long",
        "requests completed, over time",
        "requests on their way, over time",
        "pages in use, over time",
        "latency over rate",
        "requests that keep to the service level",
        "The same requests in other ways",
        "What the times rest on",
    ]
    for words in (
        "TTFT, p99",
        "requests/s at which it breaks",
        "static batching",
        "1 of 2 prefill",
        "half the buckets",
    ):
        assert words in text
    assert text.count("<svg") == 6


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
@pytest.mark.parametrize("width", [1280, 400])
def test_a_browser_shows_every_chart_without_scrolling_sideways(
    written: Path, tmp_path: Path, width: int
) -> None:
    # A window is not narrower than 500 pixels; a frame is as wide as it is told.
    file = tmp_path / "frame.html"
    size, inside = f"border:0;width:{width}px;height:900px", escape(written.read_text())
    file.write_text(
        f'<iframe id="page" style="{size}" srcdoc="{inside}"></iframe>'
        "<script>onload = () => { const own = document.getElementById('page').contentDocument;"
        "const boxes = [...own.querySelectorAll('svg')].map((each) => each.getBoundingClientRect());"
        "document.body.append(JSON.stringify({ page: own.documentElement.scrollWidth,"
        "charts: boxes.map((box) => [box.left, box.right, box.height]) }) + '.end') }</script>"
    )
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        "--window-size=1300,1000", f"--user-data-dir={tmp_path / 'profile'}", "--enable-logging=stderr",
        "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "CONSOLE" not in ran.stderr, ran.stderr
    match = re.search(r"(\{\"page\".*?\})\.end", ran.stdout)
    assert match, ran.stderr
    shown = json.loads(match[1])
    assert shown["page"] <= width
    assert len(shown["charts"]) == 6
    for left, right, height in shown["charts"]:
        assert 0 <= left < right <= width
        assert height > 100


@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("high", [0.013, 1.0, 7.0, 99.0, 100.0, 86_400.0, 3e9])
def test_an_axis_has_a_handful_of_round_values(high: float, logarithmic: bool) -> None:
    scale = Scale.around("s", [high / 5000, high, 0.0], logarithmic)
    ticks = scale.list_ticks()
    assert 2 <= len(ticks) <= 8
    assert all(scale.low <= tick <= scale.high for tick in ticks)
    assert {f"{tick:e}"[0] for tick in ticks if tick} <= set("123456789")
    fractions = [scale.locate(tick) for tick in (scale.low, *ticks, scale.high)]
    assert fractions == sorted(fractions)
    assert (fractions[0], fractions[-1]) == (0.0, 1.0)


@pytest.mark.parametrize("values", [[], [0.0], [0.0, 0.0], [5.0], [5.0, 5.0]])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_an_axis_of_one_value_or_none_has_a_length(values: list[float], logarithmic: bool) -> None:
    scale = Scale.around("s", values, logarithmic)
    assert scale.high > scale.low
    assert scale.list_ticks()
    assert 0 <= scale.locate(0.0) <= 1


def test_lines_lie_where_their_values_are() -> None:
    drawn = render_chart(
        "<t>", Scale("s", 0, 10), Scale("%", 0, 100), [Line("a&b", [(0, 0), (5, 50), (10, 100)], True)]
    )
    (points,) = re.findall(r'<polyline points="([^"]*)"', drawn)
    (left, bottom), middle, (right, top) = (tuple(map(float, point.split(","))) for point in points.split())
    assert middle == ((left + right) / 2, (bottom + top) / 2)
    assert "<t>" not in drawn
    assert "a&amp;b: 50 at 5" in drawn


@pytest.mark.parametrize(
    ("length_ns", "rate"), [(SECOND_NS // 2, 6.0), (SECOND_NS, 3.0), (60 * SECOND_NS, 0.05)]
)
def test_a_count_of_a_slice_is_a_rate_over_its_length(length_ns: int, rate: float) -> None:
    quiet = Slice(7, 7 + length_ns, *(0.0,) * 4, preemptions=0, completed=3, met=2)
    assert _compute_rate(quiet, quiet.completed) == rate
