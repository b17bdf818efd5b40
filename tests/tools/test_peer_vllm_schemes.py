"""tools/peer_vllm_schemes.py with a stand-in for vLLM's Python, which answers or refuses."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from model.quantize.step_times import StepTimes
from tools import peer_vllm_schemes
from tools.peer_vllm_schemes import PROMPTS, TOKENS, compare, main

ANSWER = """
job = json.load(open(asked))
assert os.path.exists(os.path.join(job["arguments"]["model"], "config.json"))
json.dump({"cases": [{"tokens": [[7] * 24] * 3, "cached": [0] * 3}], "load": None, "versions": {}}, open(answered, "w"))
"""
REFUSAL = "print('ValueError: no kernel for this', file=sys.stderr); sys.exit(1)"


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the predicted steps and the numpy model out; it would generate only tokens 7, and one 8."""
    steps = StepTimes(64, 1, "bfloat16", (), "left out")
    monkeypatch.setattr("model.commands.quantize.command.predict_steps", lambda *arguments: steps)
    expected = [[7] * TOKENS, [7] * 5 + [8] + [7] * (TOKENS - 6), [7] * TOKENS]
    monkeypatch.setattr(peer_vllm_schemes, "generate", lambda folder, prompts: expected)


def stand_in(folder: Path, body: str) -> str:
    path = folder / "python"
    path.write_text(f"#!{sys.executable}\nimport json, os, sys\nasked, answered = sys.argv[3:]\n{body}\n")
    path.chmod(0o755)
    return str(path)


def test_equal_tokens_count_up_to_the_first_difference(tmp_path: Path) -> None:
    outcome = compare("fp8-dynamic", stand_in(tmp_path, ANSWER), 60.0, tmp_path)
    assert outcome.tokens == [[7] * TOKENS] * len(PROMPTS) and outcome.equal == 2 * TOKENS + 5


def test_refusals_are_shown_and_fail_only_for_schemes_that_were_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    python = stand_in(tmp_path, REFUSAL)
    assert main(["--python", python, "--scheme", "fp8"]) == 0
    assert "ValueError: no kernel for this" in capsys.readouterr().out
    assert main(["--python", python, "--scheme", "w8a8"]) == 1
    assert "vLLM refuses w8a8" in capsys.readouterr().err


def test_what_is_generated_without_a_container_that_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    (tmp_path / "config.json").write_text("{}")
    assert peer_vllm_schemes.generate(tmp_path, [[1]]) is None
