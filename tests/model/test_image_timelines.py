"""`nkw imagine --trace`, `--html` and `--profile`: each shows the times that are predicted for the components."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from nkw.commands import main
from simulate.hardware import hardware
from tests.model.pipeline_folders import write_pipelines
from tests.model.test_imagine import refuse

_HEAD = re.compile(r"^(.+): ([\d.,]+) us, of which starting and ending take ([\d.]+)$", re.MULTILINE)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write a folder of a tiny pipeline with random weights for each denoiser, and return their paths."""
    return write_pipelines(tmp_path_factory.mktemp("pipelines"))


def add_up_trace(path: Path) -> dict[str, list[float]]:
    """Return the lengths of a trace's launches in ns by the label before the kernel; each begins where one ended."""
    lengths: defaultdict[str, list[float]] = defaultdict(list)
    end = 0.0
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "kernel":
            assert event["ts"] == pytest.approx(end)
            end = event["ts"] + event["dur"]
            lengths[event["name"].split(": ")[0]].append(event["dur"] * 1000)
    return lengths


def add_up_page(path: Path) -> dict[str, list[float]]:
    """Return the lengths of a page's launches in ns by the label of their pass."""
    match = re.search(r'id="data">(.*?)</script>', path.read_text(), re.DOTALL)
    assert match
    page: dict[str, Any] = json.loads(match[1])
    lengths: defaultdict[str, list[float]] = defaultdict(list)
    for (label, _, kernel), index in page["steps"]:
        launch = page["parts"][index]
        assert launch["title"].endswith(f": {kernel}")
        assert launch["roofline"]["bound"] in ("compute", "memory")
        assert launch["traffic"] and all(shape for _, shape, *_ in launch["traffic"])
        lengths[label].append(launch["length"])
    return lengths


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("pixart", "--tp 2 --quantization fp8"),
        ("flux", "--size 8x8 --dtype bfloat16"),
        ("sd3", "--tp 2 --target inf2"),
    ],
)
def test_times_of_launches_add_up_to_the_predicted_times(
    name: str, words: str, folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page, document = (tmp_path / file for file in ("trace.json", "page.html", "images.json"))
    drawing = ["imagine", "a red circle", "--model", str(folders[name]), "--steps", "2", "--no-check"]
    files = ["--profile", "--trace", str(trace), "--html", str(page), "--json", str(document)]
    assert main([*drawing, *words.split(), *files]) == 0
    text, contents = capsys.readouterr().out, json.loads(document.read_text())
    assert f"trace: {trace}" in text.splitlines() and f"page: {page}" in text.splitlines()
    assert contents["trace"] == str(trace)
    target = "inf2" if "inf2" in words else "trn2"
    (predicted,) = [entry for entry in contents["predictions"] if entry["target"] == target]
    assert sum(entry["total_ns"] for entry in predicted["components"]) == pytest.approx(predicted["total_ns"])

    heads, traced, paged = (
        _HEAD.findall(re.sub(r"\n  (?=\S)", " ", text)),
        add_up_trace(trace),
        add_up_page(page),
    )
    assert list(traced) == [entry["name"].replace("_", " ") for entry in predicted["components"]]
    assert list(paged) == [label for label, _, _ in heads]
    for entry, (label, shown, overhead), ticks, lengths in zip(
        predicted["components"], heads, traced.values(), paged.values(), strict=True
    ):
        assert entry["total_ns"] == entry["passes"] * entry["pass_ns"]
        assert label.startswith(entry["name"].replace("_", " "))
        assert float(shown.replace(",", "")) == pytest.approx(entry["pass_ns"] / 1000, abs=0.00051)
        # Traces have whole ns, pages tenths of them.
        between = float(overhead) * 1000 + len(ticks) * hardware(target).kernel_handover_ns
        assert sum(ticks) + between == pytest.approx(entry["pass_ns"], abs=0.51 * len(ticks) + 0.5)
        assert sum(lengths) + between == pytest.approx(entry["pass_ns"], abs=0.051 * len(lengths) + 0.5)


def test_files_of_timelines_are_refused_before_the_first_pass(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--model", str(folders["pixart"]), "--steps", "1"]
    for option, noun in (("--trace", "trace"), ("--html", "page")):
        path = str(tmp_path / noun)
        message = f"{option} needs the simulate backend; numpy predicts no timeline"
        assert message in refuse(capsys, *words, "--backend", "numpy", option, path)
        assert "it is a folder" in refuse(capsys, *words, option, str(tmp_path))
        weights = folders["pixart"] / "vae" / "config.json"
        assert "this command reads that file" in refuse(capsys, *words, option, str(weights))
    assert "it is the file of the trace" in refuse(capsys, *words, "--trace", path, "--html", path)
