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
    """A bundle whose result has a profile of its case in the given place; its folder."""
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
    """The profile in the document of the one case, and the text."""
    assert main(["compare", str(folder), "--json", "seen.json"]) == 0
    (case,) = json.loads(Path("seen.json").read_text())["cases"]
    return case["profile"], capsys.readouterr().out


def measured(case: Case, factor: int) -> Mapping[str, Sequence[Row]]:
    """Tables in which each engine and line takes `factor` times what is predicted; lines of files below the bundle."""
    rows: list[Row] = []
    for each in case.predicted.lines:
        place = f"/home/ubuntu/m/sources/{each.file}:{each.line}"
        rows.append(
            span(0, factor * round(each.busy_ns), engine="Vector", opcode="X", nki_source_location=place)
        )
    return {"Metadata": [METADATA], "Instruction": rows}


def test_lines_stand_beside_their_predictions(
    came_back: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Twice as long on the device, by files in another place."""
    folder = came_back(PROFILE)
    (case,) = load_bundle(folder).cases
    write_profile(folder / "result" / PROFILE, measured(case, 2))
    found, text = compared(folder, capsys)
    assert found["unread"] == ""
    own = {f"{Path(each.file).name}:{each.line}": each.busy_ns for each in case.predicted.lines}
    assert {each["name"]: each["predicted_ns"] for each in found["lines"]} == own
    assert [each["ratio"] for each in found["lines"]] == pytest.approx([2.0] * len(own), rel=1e-2)
    assert {"Tensor", "Vector"} <= {each["name"] for each in found["engines"]}
    assert "matmul, active us" in text and "matmul, line, us" in text and "2.00" in text


def test_a_summary_has_engines_and_no_lines(
    came_back: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = came_back(f"{PROFILE}/summary.json")
    (case,) = load_bundle(folder).cases
    own = case.predicted
    (folder / "result" / PROFILE).mkdir(parents=True)
    summary = {
        "total_time": 3 * (own.program_ns + own.overhead_ns) / 1e9,
        "tensor_engine_active_time": 3 * own.engines["Tensor"] / 1e9,
    }
    (folder / "result" / PROFILE / "summary.json").write_text(json.dumps(summary))
    found, _ = compared(folder, capsys)
    ratios = {each["name"]: each["ratio"] for each in (*found["total"], *found["engines"])}
    assert (ratios["total_time"], ratios["Tensor"]) == pytest.approx((3.0, 3.0))
    assert found["lines"] == []


@pytest.mark.parametrize(
    ("place", "content", "why"),
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
    place: str,
    content: bytes | None,
    why: str,
) -> None:
    folder = came_back(place)
    if content is not None:
        (folder / "result" / PROFILE).mkdir(parents=True)
        (folder / "result" / place).write_bytes(content)
    found, text = compared(folder, capsys)
    assert why in found["unread"] and found["engines"] == found["lines"] == []
    assert "all 1 cases are equal" in text and "the profile cannot be compared" in text
