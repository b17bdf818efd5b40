"""`nkw generate` and `nkw plan` on a masked-diffusion text model: texts, checks, times, and refused options."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from model.families import load_config
from model.families.tasks import MASKED_TEXT
from model.layers.launch import WeightDtypes
from model.loading.checkpoint import open_checkpoint
from model.plan.dry import Time
from model.plan.masked_text import TextPredictor, TextTimes
from model.runners.masked_text import ReferenceMaskPredictor
from model.runners.unmasking import PassRecord, Remasking, UnmaskingOptions, unmask
from nkw.commands import main
from tests.commands import run_command
from tests.model.folders import write_folder
from tests.model.llada_folders import FIELDS, write_llada

PAGE = Path(__file__).resolve().parents[2] / "docs" / "masked-text.md"
MASK = FIELDS["mask_token_id"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("models") / "llada"
    return write_llada(folder)


def run_json(capfd: Any, words: Sequence[object]) -> Any:
    """Run a command with --json, and return the document and the printed text."""
    arguments = [*map(str, words), "--json", "-"]
    out, err = run_command(main, arguments, capfd)
    return json.loads(out), err


def test_generate_fills_masks_and_checks_every_token(folder: Path, capfd: Any) -> None:
    words = ["generate", "--model", folder, "--prompt", "ab", "--max-new-tokens", 12, "--passes", 4]
    document, text = run_json(capfd, [*words, "--block-length", 6, "--reuse-blocks"])
    config = load_config(folder, MASKED_TEXT)
    predictor = ReferenceMaskPredictor(config, open_checkpoint(folder, config), caches=True)
    (filled,) = document["texts"]
    options = UnmaskingOptions(12, 4, 6, reuses=True)
    expected = unmask(predictor, [filled["prompt_ids"]], MASK, options, [0])
    assert filled["generated_ids"] == expected.ids[0, -12:].tolist()
    assert document["checks"] == {"reference": "numpy", "tokens_compared": 12, "tokens_equal": 12}
    prompt = len(filled["prompt_ids"])
    starts = [record["start"] for record in document["passes"]]
    assert starts == [0, prompt, 0, prompt + 6]
    assert "12 of 12 tokens equal to the numpy reference" in text
    assert "4 passes of 12 masks; a pass keeps 3 tokens" in text
    assert "2 of them reuse keys and values before their block" in text
    prediction = document["prediction"]
    assert prediction["text_ns"] == pytest.approx(sum(prediction["pass_ns"]))
    assert prediction["pass_ns"][0] == prediction["pass_ns"][2]


def test_generate_gives_prompts_of_several_lengths_what_they_get_alone(folder: Path, capfd: Any) -> None:
    """The seed of a prompt is --seed plus its index."""
    common = ["generate", "--model", folder, "--backend", "numpy", "--max-new-tokens", 6, "--temperature", 1]
    common += ["--remasking", "random"]
    both, _ = run_json(capfd, [*common, "--prompt", "ab", "--prompt", "abcd", "--seed", 5])
    for index, prompt in enumerate(("ab", "abcd")):
        alone, _ = run_json(capfd, [*common, "--prompt", prompt, "--seed", 5 + index])
        assert alone["texts"][0] == both["texts"][index]
    assert both["unmasking"]["strategy"] == Remasking.random.name
    assert both["prediction"] is None


def test_quiet_prints_the_text_alone(folder: Path, capfd: Any) -> None:
    words = ["generate", "--model", str(folder), "--prompt", "ab", "--max-new-tokens", "4", "--passes", "1"]
    out, err = run_command(main, [*words, "--quiet"], capfd)
    assert out.startswith("ab")
    assert "predicted" not in out
    assert err == ""


GENERATE = ["generate", "--backend", "numpy", "--max-new-tokens", "6", "--prompt", "ab"]


@pytest.mark.parametrize(
    ("refused", "accepted", "message"),
    [
        (["--top-k", "3"], ["--temperature", "0.5"], "--top-k: a llada fills masks in passes over a text"),
        (["--dp", "2"], ["--tp", "2"], "--dp: a llada fills masks"),
        (["-n", "2"], ["--seed", "2"], "--n: a llada fills masks"),
        (["--stop", "a"], ["--prompt", "a"], "--stop: a llada fills masks"),
        (["--explain"], ["--no-check"], "--explain: a llada fills masks"),
        (["--passes", "7"], ["--passes", "6"], "7 passes for 6 new tokens"),
        (["--block-length", "4"], ["--block-length", "3"], "blocks of 4 masks do not divide 6 new tokens"),
        (["--max-new-tokens", "62"], ["--max-new-tokens", "61"], "3 tokens of the prompt and 62 masks"),
    ],
)
def test_generate_refuses_options(
    folder: Path, capfd: Any, refused: list[str], accepted: list[str], message: str
) -> None:
    _, err = run_command(main, [*GENERATE, "--model", str(folder), *refused], capfd, status=2)
    assert message in err
    run_command(main, [*GENERATE, "--model", str(folder), *accepted], capfd)


def test_generate_refuses_an_unknown_strategy(folder: Path, capfd: Any) -> None:
    _, err = run_command(main, [*GENERATE, "--model", str(folder), "--remasking", "entropy"], capfd, status=2)
    assert "low_confidence" in err


@pytest.mark.parametrize(
    "words", [["--passes", "2"], ["--block-length", "3"], ["--reuse-blocks"], ["--guidance", "1"]]
)
def test_a_model_that_continues_texts_refuses_options_of_masks(
    tmp_path: Path, capfd: Any, words: list[str]
) -> None:
    llama = str(write_folder(tmp_path / "llama"))
    _, err = run_command(main, [*GENERATE, "--model", llama, *words], capfd, status=2)
    assert f"{words[0]}: a llama continues texts token by token; models that fill masks take it" in err
    run_command(main, [*GENERATE, "--model", llama], capfd)


def test_plan_compares_passes_with_decoding(folder: Path, capfd: Any) -> None:
    document, text = run_json(capfd, ["plan", folder, "--tp", 2, "--prompt", 8, "--generate", 24])
    plain, reusing = document["texts"]
    assert (document["prompt"], document["new_tokens"]) == (8, 24)
    assert [len(times["pass_ns"]) for times in (plain, reusing)] == [4, 4]
    assert len(set(plain["pass_ns"])) == 1
    assert plain["decoded_text_ns"] == reusing["decoded_text_ns"] > 23 * plain["decoded_token_ns"]
    assert "it fills masks, and decodes no tokens" in text
    assert "Masked text is faster only where passes are far fewer than tokens" in " ".join(text.split())


@pytest.mark.parametrize(
    ("refused", "accepted", "message"),
    [
        (["--pp", "2"], ["--tp", "2"], "--pp: passes of a llada are planned on tensor ranks of one instance"),
        (["--schemes"], ["--batch", "2"], "--schemes: passes of a llada are planned"),
        (["--prompt", "41", "--generate", "24"], ["--prompt", "40", "--generate", "24"], "and 24 masks"),
    ],
)
def test_plan_refuses_options(
    folder: Path, capfd: Any, refused: list[str], accepted: list[str], message: str
) -> None:
    _, err = run_command(main, ["plan", str(folder), *refused], capfd, status=2)
    assert message in err
    run_command(main, ["plan", str(folder), *accepted], capfd)


def list_keys(node: Any) -> set[str]:
    """Return all keys of a document, without those of `versions`."""
    if isinstance(node, list):
        return set().union(*map(list_keys, node))
    if not isinstance(node, dict):
        return set()
    return {*node, *(key for name, child in node.items() if name != "versions" for key in list_keys(child))}


@pytest.mark.parametrize(
    "words", [["generate", "--model", "FOLDER", "--max-new-tokens", 4], ["plan", "FOLDER", "--generate", 8]]
)
def test_the_page_names_every_key_of_the_documents(folder: Path, capfd: Any, words: list[object]) -> None:
    document, _ = run_json(capfd, [folder if word == "FOLDER" else word for word in words])
    assert list_keys(document) - set(re.findall(r"`(\w+)`", PAGE.read_text(encoding="utf-8"))) == set()


def test_the_most_passes_that_are_faster_than_decoding() -> None:
    """Decoding takes 10 + 9 * 5 = 55 ns; passes of 11 ns are faster up to 4 of them, as 5 take as long."""

    def count(pass_ns: float) -> int:
        passes = ((PassRecord(0, 5), Time.exact(pass_ns)),) * 2
        return TextTimes("trn2", 1, 1, 1, passes, Time.exact(10), Time.exact(5), 10).most_faster_passes

    assert [count(pass_ns) for pass_ns in (10.9, 11, 11.1, 54, 55, 56)] == [5, 4, 4, 1, 0, 0]


def test_guidance_doubles_the_texts_of_a_pass_and_not_the_compared_decoding(folder: Path) -> None:
    bfloat16 = np.dtype(ml_dtypes.bfloat16)
    predictor = TextPredictor(load_config(folder, MASKED_TEXT), WeightDtypes(bfloat16), bfloat16, "trn2")
    plain, guided, two = (
        predictor.predict(8, texts, UnmaskingOptions(24, 4, 24, guidance=guidance))
        for texts, guidance in ((1, 0.0), (1, 1.0), (2, 0.0))
    )
    assert guided.text == two.text
    assert guided.text.program_ns > plain.text.program_ns
    assert guided.decoded_text == plain.decoded_text
