"""What `nkw generate` says: a full context, a run without comparison, and --quiet."""

from __future__ import annotations

import json

import pytest

from model.commands.generate.generation import StopReason
from nkw.commands import main
from nkw.verbs import MODEL_VERBS

PROMPT = "Once upon a time"


@pytest.fixture
def tiny(write_model) -> str:
    """Return a model with a context of 64 positions and no end token."""
    return str(write_model(eos_token_id=None, max_position_embeddings=64))


def generate(capsys, *words: str) -> tuple[str, str]:
    """Run `nkw generate` and return what it prints on stdout and stderr."""
    assert main(["generate", "--prompt", PROMPT, *words]) == 0
    captured = capsys.readouterr()
    return captured.out, captured.err


def test_a_full_context_is_said_in_text_and_json(tiny, tmp_path, capsys) -> None:
    results = tmp_path / "out.json"
    words = ("--model", tiny, "--backend", "numpy", "--json", str(results))
    out, _ = generate(capsys, *words, "--max-new-tokens", "300")
    (ended,) = json.loads(results.read_text(encoding="utf-8"))["generations"]
    new = len(ended["generated_ids"])
    assert len(ended["prompt_ids"]) + new == 64
    assert (ended["stopped_by"], ended["finish_reason"]) == ("context", "length")
    sentence = (
        f"the text ends after {new} new tokens, before --max-new-tokens: the context of the model is full"
    )
    assert sentence in " ".join(out.split())
    out, _ = generate(capsys, *words, "--max-new-tokens", str(new))
    (ended,) = json.loads(results.read_text(encoding="utf-8"))["generations"]
    assert (ended["stopped_by"], ended["finish_reason"]) == ("length", "length")
    assert "context" not in out


def test_the_texts_with_a_full_context_are_counted(tiny, capsys) -> None:
    words = ("--model", tiny, "--backend", "numpy", "--prompt", PROMPT + PROMPT, "--max-new-tokens")
    out, _ = generate(capsys, *words, "40")
    assert "1 of 2 texts end after " in out
    out, _ = generate(capsys, *words, "300")
    assert "2 of 2 texts end after " in out


def test_finish_reasons_are_those_of_vllm() -> None:
    assert [reason.name for reason in StopReason if reason.finish_reason == "length"] == ["length", "context"]
    assert {reason.finish_reason for reason in StopReason} == {"stop", "length"}


@pytest.mark.slow
def test_without_a_check_nothing_is_compared_and_times_are_predicted(tiny, capsys) -> None:
    words = ("--model", tiny, "--max-new-tokens", "2")
    out, _ = generate(capsys, *words, "--no-check")
    assert "2 tokens computed; nothing was compared with the numpy reference" in out
    assert "predicted on 1 core" in out
    out, _ = generate(capsys, *words, "--backend", "numpy")
    assert "2 tokens by the numpy reference; nothing was compared or predicted" in out


@pytest.mark.slow
def test_quiet_prints_the_text_alone(tiny, tmp_path, capsys) -> None:
    words = ("--model", tiny, "--backend", "numpy", "--max-new-tokens", "2")
    loud, _ = generate(capsys, *words)
    quiet, err = generate(capsys, *words, "--quiet")
    assert quiet == loud.split("\n\n")[0] + "\n"
    assert err == ""
    out, err = generate(capsys, "--model", tiny, "--backend", "numpy", "--max-new-tokens", "300", "--quiet")
    assert out.startswith(PROMPT)
    assert "context" not in out
    assert "nkw generate: the text ends after" in err
    assert "the context of the model is full" in err
    results = tmp_path / "out.json"
    generate(
        capsys, "--model", tiny, "--max-new-tokens", "1", "--no-check", "--quiet", "--json", str(results)
    )
    assert json.loads(results.read_text(encoding="utf-8"))["predictions"]


def test_help_names_no_single_family() -> None:
    assert "Llama" not in MODEL_VERBS["generate"].description
    assert "any family" in MODEL_VERBS["generate"].description
