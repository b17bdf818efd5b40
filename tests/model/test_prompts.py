"""What `nkw generate` continues: prompts of options, files and stdin, chats, and the folder's way to sample."""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from model.commands.generate.prompts import read_prompts
from model.families import load_config
from model.loading.weights import shard_weights
from model.runners.contiguous import KernelModel
from model.runners.reference import ReferenceModel
from nkw.commands import main
from tests.model.test_cli import refused
from tests.model.test_kernel_model import IDS, load, logits_of, noise

TEMPLATE = (
    "{{ bos_token }}{% for each in messages %}<{{ each.role }}>{{ each.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def folder(write_model) -> Path:
    model = write_model(eos_token_id=None)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE, "bos_token": "<s>"}))
    return model


def generated(folder: Path, tmp_path: Path, *arguments: str, backend: str = "numpy") -> list[dict[str, Any]]:
    path = tmp_path / "out.json"
    options = ["--model", str(folder), "--backend", backend, "--max-new-tokens", "3", *arguments]
    assert main(["generate", *options, "--json", str(path)]) == 0
    results: list[dict[str, Any]] = json.loads(path.read_text())["generations"]
    return results


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_batch_of_prompts_has_the_logits_of_each_alone(write_model, simulated, ranks) -> None:
    config, weights = load(write_model())
    prompts = [
        np.random.default_rng(seed).integers(3, 300, count).tolist() for seed, count in enumerate((9, 1, 13))
    ]
    following = np.random.default_rng(9).integers(3, 300, (2, 3)).tolist()
    shards = shard_weights(config, weights, ranks)
    batch = KernelModel(config, shards, simulated("trn1", ranks), 128, sequences=3)
    reference = ReferenceModel(config, weights)
    bound = 4 * noise(config, weights, logits_of(reference, IDS))  # as in test_kernel_model
    steps = [(batch.prefill(prompts), reference.prefill(prompts))]
    lengths = [len(prompt) for prompt in prompts]
    for number, tokens in enumerate(following):
        positions = [length + number for length in lengths]
        steps.append((batch.decode(tokens, positions), reference.decode(tokens, positions)))
    for outputs, wanted in steps:
        for one, other in zip(outputs, wanted):
            assert np.abs(one.logits - other.logits).max() <= bound


@pytest.mark.slow
def test_a_sequence_that_has_ended_changes_no_other(write_model, simulated) -> None:
    config, weights = load(write_model())
    shards = shard_weights(config, weights, 1)
    results = []
    for token in (7, None):
        model = KernelModel(config, shards, simulated("trn1", 1), 128, sequences=2)
        model.prefill([[5, 6], [7, 8, 9]])
        model.decode([token, 4], [2, 3])
        results.append(model.decode([token, 5], [3 if token else 2, 4])[1].logits)
    assert np.array_equal(*results)


@pytest.mark.slow
def test_prompts_of_options_and_lines_are_one_batch_in_their_order(folder, tmp_path, capsys) -> None:
    (tmp_path / "prompts.txt").write_text("one\n\ntwo \r\nthree", newline="")
    done = generated(
        folder, tmp_path, "--prompt", "a", "--prompt", "b", "--prompt-file", str(tmp_path / "prompts.txt")
    )
    assert [generation["prompt"] for generation in done] == ["a", "b", "one", "two ", "three"]
    printed = capsys.readouterr().out
    assert [line for line in printed.splitlines() if line.startswith("prompt ")] == [
        f"prompt {number} of 5" for number in range(1, 6)
    ]
    for generation in done:
        (alone,) = generated(folder, tmp_path, "--prompt", generation["prompt"])
        assert alone["generated_ids"] == generation["generated_ids"]


@pytest.mark.slow
def test_a_batch_is_checked_and_predicted(folder, tmp_path, capsys) -> None:
    done = generated(folder, tmp_path, "--prompt", "a", "--prompt", "a longer one", backend="simulate")
    printed = capsys.readouterr().out
    assert [generation["checks"]["tokens_equal"] for generation in done] == [3, 3]
    assert "6 of 6 tokens equal to the numpy reference" in printed
    assert "predicted on 1 core for 2 prompts, in ms" in printed


def test_lines_of_stdin_are_prompts(folder, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert [generation["prompt"] for generation in generated(folder, tmp_path, "--prompt-file", "-")] == [
        "one",
        "two",
    ]


def test_an_empty_stdin_and_a_shared_one_are_refused_by_name(folder, tmp_path, monkeypatch, capsys) -> None:
    prompt_options = [
        "--model",
        str(folder),
        "--backend",
        "simulate",
        "--max-new-tokens",
        "1",
        "--prompt-file",
    ]
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert refused(capsys, *prompt_options, "-") == (
        "nkw: error: stdin has no prompt; each line that is not empty is one"
    )
    for name, value in dict(RANK="0", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="29431").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert refused(capsys, *prompt_options, "-") == (
        "nkw: error: --prompt-file - reads stdin, which the processes of torchrun share: give the prompts as a file"
    )
    lines = tmp_path / "prompts.txt"
    lines.write_text("one\n")
    options = argparse.Namespace(system=None, chat=False, prompt=[], prompt_file=str(lines))
    assert read_prompts(options, shared=True) == ["one"]


@pytest.mark.slow
def test_more_prompts_than_a_batch_takes_are_refused(folder, tmp_path, capsys) -> None:
    lines = tmp_path / "prompts.txt"
    arguments = [
        "--model",
        str(folder),
        "--backend",
        "numpy",
        "--max-new-tokens",
        "1",
        "--prompt-file",
        str(lines),
    ]
    options = argparse.Namespace(system=None, chat=False, prompt=[], prompt_file=str(lines))
    for count in (127, 128):
        lines.write_text("x\n" * count)
        assert read_prompts(options) == ["x"] * count
    lines.write_text("x\n" * 129)
    assert refused(capsys, *arguments) == "nkw: error: more than 128 prompts; one batch takes 128: give fewer"
    lines.write_text("\n\n")
    assert "has no prompt; each line that is not empty is one" in refused(capsys, *arguments)
    lines.write_bytes(b"\xff\n")
    assert "is not text" in refused(capsys, *arguments)
    assert "cannot be read: No such file" in refused(capsys, *arguments[:-1], str(tmp_path / "missing.txt"))


def test_no_output_replaces_the_prompts(folder, tmp_path, capsys) -> None:
    lines = tmp_path / "prompts.txt"
    lines.write_text("x\n")
    options = ["--model", str(folder), "--backend", "numpy", "--prompt-file", str(lines)]
    assert str(lines) in refused(capsys, *options, "--json", str(lines))
    assert lines.read_text() == "x\n"


@pytest.mark.slow
def test_a_chat_is_the_models_template_and_prints_the_answer_alone(folder, tmp_path, capsys) -> None:
    (done,) = generated(folder, tmp_path, "--chat", "--system", "Be brief.", "--prompt", "Hi")
    text = "<system>Be brief.<user>Hi<assistant>"
    (plain,) = generated(folder, tmp_path, "--prompt", text)
    assert done["prompt_ids"] == plain["prompt_ids"]  # one bos, from the template or from the tokenizer
    assert done["prompt"] == "Hi"
    assert capsys.readouterr().out.startswith(done["text"] + "\n")


def test_a_system_message_without_a_chat_is_refused(folder, capsys) -> None:
    message = refused(capsys, "--model", str(folder), "--system", "Be brief.")
    assert message == "nkw: error: --system is the first message of a chat: give --chat as well"


def test_a_stop_string_ends_the_text(folder, tmp_path, capsys) -> None:
    (generation,) = generated(folder, tmp_path)
    text = generation["text"]
    (done,) = generated(folder, tmp_path, "--stop", text[1:2], "--stop", "never there")
    assert (done["text"], done["stopped_by"]) == (text[: text.index(text[1])], "stop string")
    capsys.readouterr()
    options = ["--model", str(folder), "--backend", "numpy"]
    assert "a stop string is empty" in refused(capsys, *options, "--stop", "")


@pytest.mark.parametrize(
    ("config", "arguments", "sampling"),
    [
        ({}, [], (0.0, 0, 1.0)),
        ({"do_sample": False, "temperature": 0.5, "top_k": 4}, [], (0.0, 0, 1.0)),
        ({"do_sample": True, "temperature": 0.5, "top_k": 4, "top_p": 0.9}, [], (0.5, 4, 0.9)),
        ({"do_sample": True, "top_k": 0}, [], (1.0, 0, 1.0)),
        ({"do_sample": True, "temperature": 0.5, "top_k": 4}, ["--temperature", "0"], (0.0, 0, 1.0)),
        ({"do_sample": True, "temperature": 0.5, "top_k": 4}, ["--top-k", "3"], (0.5, 3, 1.0)),
        ({"do_sample": True, "top_p": 0.9}, ["--top-p", "1"], (1.0, 0, 1.0)),
    ],
)
def test_the_folder_says_how_to_sample_where_no_option_does(
    folder, tmp_path, config, arguments, sampling, capsys
):
    (folder / "generation_config.json").write_text(json.dumps(config))
    path = tmp_path / "out.json"
    options = ["--model", str(folder), "--backend", "numpy", "--max-new-tokens", "1", "--json", str(path)]
    assert main(["generate", *options, *arguments]) == 0
    reported = json.loads(path.read_text())["sampling"]
    assert (reported["temperature"], reported["top_k"], reported["top_p"]) == sampling


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"do_sample": "yes"}, "do_sample: 'yes' is neither true nor false"),
        ({"do_sample": True, "temperature": -1}, "temperature: -1.0 is negative"),
        ({"do_sample": True, "top_p": 1.5}, "top_p: 1.5 is above 1"),
        ({"do_sample": True, "top_k": -3}, "top_k: -3 is not a positive whole number"),
    ],
)
def test_a_wrong_generation_config_is_refused(folder, capsys, config, message) -> None:
    (folder / "generation_config.json").write_text(json.dumps(config))
    assert message in refused(capsys, "--model", str(folder), "--backend", "numpy")
    assert load_config(folder).vocab_size == 300
