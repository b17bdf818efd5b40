"""Profiles that came back with a bundle: engines, queues and lines beside the predictions."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from nkw.verbs import SIMULATOR_VERBS
from simulate.bundle.manifest import Case, load_bundle
from simulate.cli import main
from tests.bundle.returns import bring_back
from tests.profile.device_profiles import METADATA, Row, span, write_profile

PROFILE = "profiles/matmul"


@pytest.fixture
def came_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[[str], Path]:
    """Return a function that makes a bundle whose result names the given profile, and returns its folder."""
    monkeypatch.chdir(tmp_path)

    def bundle(profile: str) -> Path:
        words = shlex.split(SIMULATOR_VERBS["bundle"].example)
        folder = Path(words[words.index("--out") + 1])
        assert main(words) == 0
        bring_back(folder)
        record = folder / "result" / "result.json"
        told = json.loads(record.read_text())
        told["cases"][0]["profile"] = profile
        record.write_text(json.dumps(told))
        capsys.readouterr()
        return folder

    return bundle


def compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Any, str]:
    """Return the profile in the document of the one case, and the text."""
    assert main(["compare", str(folder), "--json", "seen.json"]) == 0
    (case,) = json.loads(Path("seen.json").read_text())["cases"]
    return case["profile"], capsys.readouterr().out


def measured(case: Case, factor: int) -> Mapping[str, Sequence[Row]]:
    """Return tables in which engines and lines take `factor` times the prediction; lines of files below the bundle."""
    rows: list[Row] = []
    for line in case.predicted.lines:
        location = f"/home/ubuntu/m/sources/{line.file}:{line.line}"
        rows.append(
            span(0, factor * round(line.busy_ns), engine="Vector", opcode="X", nki_source_location=location)
        )
    return {"Metadata": [METADATA], "Instruction": rows}


def test_lines_stand_beside_their_predictions(
    came_back: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice as long on the device, by files in another place."""
    folder = came_back(PROFILE)
    (case,) = load_bundle(folder).cases
    write_profile(folder / "result" / PROFILE, measured(case, 2))
    profile, text = compared(folder, capsys)
    assert profile["unread"] == ""
    busy_by_line = {f"{Path(line.file).name}:{line.line}": line.busy_ns for line in case.predicted.lines}
    assert {line["name"]: line["predicted_ns"] for line in profile["lines"]} == busy_by_line
    assert [line["ratio"] for line in profile["lines"]] == pytest.approx([2.0] * len(busy_by_line), rel=1e-2)
    assert {"Tensor", "Vector"} <= {engine["name"] for engine in profile["engines"]}
    assert "matmul, active us" in text and "matmul, line, us" in text and "2.00" in text


def test_a_summary_has_engines_and_no_lines(
    came_back: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = came_back(f"{PROFILE}/summary.json")
    (case,) = load_bundle(folder).cases
    predicted = case.predicted
    (folder / "result" / PROFILE).mkdir(parents=True)
    summary = {
        "total_time": 3 * (predicted.program_ns + predicted.overhead_ns) / 1e9,
        "tensor_engine_active_time": 3 * predicted.engines["Tensor"] / 1e9,
    }
    (folder / "result" / PROFILE / "summary.json").write_text(json.dumps(summary))
    profile, _ = compared(folder, capsys)
    ratios = {row["name"]: row["ratio"] for row in (*profile["total"], *profile["engines"])}
    assert (ratios["total_time"], ratios["Tensor"]) == pytest.approx((3.0, 3.0))
    assert profile["lines"] == []


@pytest.mark.parametrize(
    ("path", "content", "why"),
    [
        (f"{PROFILE}/profile.ntff", b"NTFF", "only the .ntff came back; neuron-explorer view makes tables"),
        (f"{PROFILE}/summary.json", b"{", "summary.json"),
        (f"{PROFILE}/none", None, "none"),
        ("../../seen.py", None, "leads out of"),
    ],
)
def test_a_profile_that_cannot_be_read_is_said_and_the_rest_is_compared(
    came_back: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    path: str,
    content: bytes | None,
    why: str,
) -> None:
    folder = came_back(path)
    if content is not None:
        (folder / "result" / PROFILE).mkdir(parents=True)
        (folder / "result" / path).write_bytes(content)
    profile, text = compared(folder, capsys)
    assert why in profile["unread"] and profile["engines"] == profile["lines"] == []
    assert "all 1 cases are equal" in text and "the profile cannot be compared" in text
