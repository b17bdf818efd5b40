"""The page: complete in itself, the same bytes every time, and its data those of the profile."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import simulate
from nki_kernels.examples import EXAMPLES
from nkw.errors import InvalidArgument
from simulate.cli import main
from simulate.kernel_by_name import launch_by_name
from simulate.profile import Profile, profile
from simulate.profile.page import PageLaunch, PageStep, make_page, write_page
from tests.profile.test_profile_text import SCRIPT
from tests.timing import kernels
from tests.timing.streams import EXACT, Builder, random_streams

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


def done(rows: int = 256) -> Profile:
    launch = kernels.dry(kernels.matmul_exp, kernels.zeros(256, rows), kernels.zeros(256, 1024))
    return profile(launch.streams, launch.hardware, "matmul_exp on trn2")


def data(text: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert match
    return json.loads(match[1])


def test_a_page_needs_nothing_from_outside() -> None:
    text = make_page("a title", [PageLaunch(done())])
    assert not re.search(r"(?:src|href)=[\"'](?!data:,)", text)
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|WebSocket", text)
    assert [url for url in re.findall(r"https?://[^\"'\s<)]+", text) if "www.w3.org" not in url] == []


@pytest.mark.slow
def test_equal_profiles_give_equal_bytes() -> None:
    assert make_page("title", [PageLaunch(done()), PageLaunch(done(128))]) == make_page(
        "title", [PageLaunch(done()), PageLaunch(done(128))]
    )


def test_every_slice_is_on_the_page_at_its_time() -> None:
    prediction = done()
    (launch,) = data(make_page("title", [PageLaunch(prediction)]))["parts"]
    shown = sorted(
        (track["name"], event, slice_kind, start, round(start + length, 1))
        for track in launch["tracks"]
        for event, slice_kind, start, length in zip(
            track["event"], track["kind"], track["start"], track["length"]
        )
    )
    assert shown == sorted(
        (piece.track, piece.event, piece.slice_kind, round(piece.start_ns, 1), round(piece.end_ns, 1))
        for piece in prediction.timeline.slices()
    )
    for track in launch["tracks"]:
        assert track["start"] == sorted(track["start"])


def test_a_page_says_what_the_host_adds_to_the_time_of_the_device() -> None:
    prediction = done()
    (launch,) = data(make_page("title", [PageLaunch(prediction)]))["parts"]
    assert launch["length"] == round(prediction.timeline.length_ns, 1)
    assert launch["host_overhead_ns"] == prediction.hardware.host_overhead_ns > 0


def test_operands_lines_and_causes_of_an_event_can_be_looked_up() -> None:
    prediction = done()
    launch = data(make_page("title", [PageLaunch(prediction)]))["parts"][0]
    events, stream = launch["events"], prediction.streams[0]
    for index in range(len(stream)):
        event = stream.event(index)
        assert launch["ops"][events["op"][index]] == event.op
        assert launch["lines"][events["line"][index]][0] == f"{event.where.file}:{event.where.line}"
        first = events["ends"][index - 1] if index else 0
        boxes = [launch["boxes"][box] for box in events["boxes"][first : events["ends"][index]]]
        assert [(launch["tensors"][box[0]][1], box[1:]) for box in boxes] == [
            (
                list(stream.tensors[a.tensor].shape),
                [a.mode, a.first_row, a.end_row, a.first_byte, a.end_byte],
            )
            for a in event.accesses
        ]
    assert len(events["cause"]) == len(events["reason"]) == len(events["ready"]) == len(stream)


def test_sources_show_the_lines_that_issue_instructions() -> None:
    launch = data(make_page("title", [PageLaunch(done())]))["parts"][0]
    (source,) = launch["sources"]
    assert source["file"] == "tests/timing/kernels.py"
    used = [row for row in source["rows"] if row and row[2] >= 0]
    assert len(used) == len(launch["lines"])
    assert any("nisa.nc_matmul" in row[1] for row in used)


def test_cores_of_several_ranks_are_told_apart() -> None:
    streams = random_streams(5, 60, 3)
    prediction = profile(streams, EXACT)
    launch = data(make_page("title", [PageLaunch(prediction)]))["parts"][0]
    assert launch["cores"] == 3
    assert len(launch["events"]["op"]) == sum(map(len, streams))
    assert {track["name"].split()[1] for track in launch["tracks"]} == {"0", "1", "2"}


def test_text_of_a_user_cannot_end_the_script_or_the_title() -> None:
    build = Builder()
    build.event(next(iter(random_streams(1)[0])).engine, (), (build.tensor("</script><b>"),))
    text = make_page("<script>alert(1)</script>", [PageLaunch(profile(build.stream, EXACT, "</script>"))])
    assert text.count("</script>") == 2  # of the data and of the script
    assert "<script>alert" not in text
    assert data(text)["parts"][0]["tensors"][0][0] == "</script><b>"


def test_a_memory_map_is_taken_as_it_is() -> None:
    text = make_page("title", [PageLaunch(done(), '<svg id="map"></svg>'), PageLaunch(done(128))])
    assert text.count('<div class="memory" hidden>') == 2
    assert '<div class="memory" hidden><svg id="map"></svg></div>' in text


def test_steps_repeat_a_part() -> None:
    steps = [PageStep(("token", "layer 0", "mlp"), 0), PageStep(("token", "layer 1", "mlp"), 0)]
    page = data(make_page("title", [PageLaunch(done())], steps))
    assert page["steps"] == [[["token", "layer 0", "mlp"], 0], [["token", "layer 1", "mlp"], 0]]
    assert len(page["parts"]) == 1


def test_the_page_has_the_advice_of_the_profile() -> None:
    launch = launch_by_name("nki_kernels:mlp", EXAMPLES["mlp"])
    prediction = profile(launch.streams, launch.hardware, launch.title)
    page_launch = data(make_page("title", [PageLaunch(prediction)]))["parts"][0]
    assert prediction.advice
    assert page_launch["advice"] == [
        [round(advice.length_ns, 1), advice.sentence, list(advice.lines[:8])] for advice in prediction.advice
    ]


def test_an_empty_launch_and_no_launch_have_a_page() -> None:
    assert data(make_page("title", [PageLaunch(profile(Builder().stream, EXACT))]))["parts"][0]["length"] == 0
    assert data(make_page("title", []))["parts"] == []


def test_refuses_a_path_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument) as refused:
        write_page(tmp_path / "nowhere" / "page.html", "title", [PageLaunch(done())])
    assert refused.value.code == "NKW-PAGE-PATH"
    write_page(tmp_path / "page.html", "title", [PageLaunch(done())])
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


def test_time_writes_a_page_and_prints_the_text_only_if_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, html = tmp_path / "script.py", tmp_path / "page.html"
    script.write_text(
        SCRIPT + "doubled(np.zeros((128, 64), np.float32))\ndoubled(np.zeros((128, 8), np.float32))\n"
    )
    arguments = ["time", "--target", "trn2", "--html", str(html)]
    assert main([*arguments, str(script)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in out] == [
        "doubled #0 and 1 equal to it on trn2",
        "doubled #2 on trn2",
        "page",
    ]
    page = data(html.read_text())
    assert page["title"] == "script.py"
    assert [launch for _, launch in page["steps"]] == [0, 0, 1]
    assert html.read_text().count('<svg xmlns="http://www.w3.org/2000/svg" class="nkw-memory map"') == 2
    before = html.read_bytes()
    assert main([*arguments, "--text", str(script)]) == 0
    assert "critical path, by line" in capsys.readouterr().out
    assert html.read_bytes() == before


def test_a_page_that_cannot_be_written_is_refused_before_the_script_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    for path, why in (
        (tmp_path / "no" / "page.html", "No such file or directory"),
        (tmp_path, "it is a folder"),
    ):
        assert main(["time", "--html", str(path), str(script)]) == 2
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err == f"error: [NKW-PAGE-PATH] the page cannot be written to {path}: {why}\n"


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_browser_shows_every_section_without_an_error(tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_page(file, "two launches", [PageLaunch(done()), PageLaunch(done(128))])
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--enable-logging=stderr",
        "--dump-dom", f"{file.as_uri()}#l=1&a=100&b=2000&e=2",
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "CONSOLE" not in ran.stderr, ran.stderr
    matches = re.findall(r'<section id="([\w-]+)"(?: hidden="")?>(.*?)</section>', ran.stdout, re.DOTALL)
    sections = dict(matches)
    assert set(sections) == {
        "run", "summary", "time", "advice", "what-if", "path", "idle", "roof", "traffic", "source", "memory",
    }  # fmt: skip
    for name in ("what-if", "path", "idle", "traffic"):
        assert sections[name].count("<tr") > 2, name
    assert "<circle" in sections["roof"]
    assert "nisa.nc_matmul" in sections["source"]
    assert re.search(r'id="window">0\.100 µs … 2\.00 µs', sections["time"])
    assert "nc_matmul #" in sections["time"], "the chosen event is described"


DRIVE = """
<script>
{
  const box = byId("tracks").getBoundingClientRect(), row = timeline.part.rows[0];
  const fire = (type, name, x, more) => byId("tracks").dispatchEvent(new type(name, {
    bubbles: true, cancelable: true, clientX: box.left + x, clientY: box.top + row.y + 5, ...more }));
  const out = {};
  fire(WheelEvent, "wheel", (LEFT + box.width) / 2, { deltaY: -300 * Math.log(4), ctrlKey: true });
  out.zoomed = [timeline.from, timeline.to];
  const [slice] = [row.start[1] + row.stop[1]].map((sum) => sum / 2);
  timeline.look(slice - 10, slice + 10);
  fire(PointerEvent, "pointermove", timeline.x(slice), {});
  out.slice = byId("tip").innerText;
  const gap = timeline.part.gaps.find((each) => each[0] === row.track.number && each[5] >= 0);
  timeline.look(gap[1], gap[2]);
  fire(PointerEvent, "pointermove", timeline.x((gap[1] + gap[2]) / 2), {});
  out.gap = byId("tip").innerText;
  document.body.append(make("pre", { id: "driven" }, JSON.stringify(out)));
}
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_timeline_zooms_about_the_pointer_and_explains_what_is_under_it(tmp_path: Path) -> None:
    prediction = done()
    file = tmp_path / "page.html"
    file.write_text(make_page("title", [PageLaunch(prediction)]).replace("</body>", DRIVE), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r'<pre id="driven">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert match, ran.stderr
    driven = json.loads(unescape(match[1]))
    length = prediction.length_ns
    assert driven["zoomed"] == pytest.approx([length * 3 / 8, length * 5 / 8], rel=0.02)
    matmuls = [event for event in prediction.streams[0] if event.op == "nc_matmul"]
    assert driven["slice"].splitlines()[0].startswith(f"nc_matmul #{matmuls[1].index} ")
    first = driven["gap"].splitlines()
    assert first[0].startswith("idle for ")
    assert first[1].startswith("until nc_matmul #")
    assert re.match(r"operand of dma_copy #\d+", first[3])


SIZES = """<script>
const out = { overflow: document.documentElement.scrollWidth - innerWidth, width: innerWidth };
const rows = [...byId("path").querySelectorAll("table")].pop().querySelectorAll("tbody tr");
out.stretches = [...rows].map((row) => [...row.cells].map((cell) => cell.innerText));
out.advice = byId("advice").querySelectorAll("tbody tr").length;
document.body.append(make("pre", { id: "driven" }, JSON.stringify(out)));
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_a_narrow_page_does_not_overflow_and_lists_no_stretch_twice(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    file = tmp_path / "page.html"
    assert main(["time", "--html", str(file), str(script)]) == 0
    file.write_text(file.read_text(encoding="utf-8").replace("</body>", SIZES), encoding="utf-8")
    command = [
        str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--window-size=600,900",
        f"--user-data-dir={tmp_path / 'profile'}", "--virtual-time-budget=3000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    match = re.search(r'<pre id="driven">(.*?)</pre>', ran.stdout, re.DOTALL)
    assert match, ran.stderr
    driven = json.loads(unescape(match[1]))
    assert driven["width"] <= 600
    assert driven["overflow"] <= 0
    named = [(row[3], row[4]) for row in driven["stretches"]]
    assert named and len(set(named)) == len(named)
    (launch,) = data(file.read_text(encoding="utf-8"))["parts"]
    assert sum(int(row[1].replace(",", "")) for row in driven["stretches"]) == len(launch["path"])
    assert driven["advice"] == len(launch["advice"])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="no node on this machine")
def test_the_heading_of_a_run_says_what_it_counts() -> None:
    folder = Path(simulate.__file__).parent / "profile" / "page"
    code = "".join((folder / name).read_text(encoding="utf-8") for name in ("tools.js", "charts.js"))
    data = "const document = { getElementById: () => ({ textContent: '{}' }) };"
    calls = "[runTitle('prompt of 5 tokens', 38, 431000), runTitle('', 1, 2000)]"
    ran = subprocess.run(
        ["node", "-e", f"{data}\n{code}\nconsole.log(JSON.stringify({calls}))"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(ran.stdout) == [
        "prompt of 5 tokens: 38 launches, 431.0 µs",
        "all: 1 launch, 2.00 µs",
    ]
