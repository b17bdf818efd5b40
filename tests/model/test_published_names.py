"""Names of published models in place of a path: which names are taken, what they are called, and what others get."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from model.config.published import PUBLISHED, describe_config, find_published, list_published
from model.errors import ModelError
from model.families import read_record
from model.loading.shipped import PRETRAINED, find_config_path
from nkw.commands import main

ROOT = Path(__file__).resolve().parents[2]
NAMES = sorted(path.stem for path in PUBLISHED.glob("*.json"))


def test_every_config_has_a_row_with_its_source_and_day() -> None:
    published = list_published()
    assert list(published) == NAMES
    for model in published.values():
        assert re.fullmatch(r"20\d\d-\d\d-\d\d", model.date)
        assert model.source
        assert model.path.is_file()
    ids = [known.lower() for model in published.values() for known in model.ids]
    assert len(ids) == len(set(ids))


@pytest.mark.parametrize("name", NAMES)
def test_its_name_and_its_ids_are_taken(name) -> None:
    for known in (name, name.upper(), *list_published()[name].ids):
        published = find_published(known)
        assert published is not None
        assert published.name == name


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("llama-3.1-70b-instruct", "llama-3.1-70b"),
        ("Llama-3.3-70B", "llama-3.1-70b"),
        ("llama-2-7b-chat", "llama-2-7b"),
        ("gemma-3-27b-it", "gemma-3-27b"),
        ("DeepSeek-R1", "deepseek-v3"),
        ("someone/llama-3.1-70b", None),
        ("meta-llama/llama-3.1", None),
        ("llama", None),
        ("", None),
    ],
)
def test_endings_and_owners_may_be_left_out_and_no_other_owner_is_taken(name, model) -> None:
    published = find_published(name)
    assert (None if published is None else published.name) == model


def test_a_path_that_exists_wins(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert find_config_path("llama-3.1-70b") == PUBLISHED / "llama-3.1-70b.json"
    assert find_config_path("stories") == PRETRAINED
    assert find_config_path("none-such") == Path("none-such")
    (tmp_path / "llama-3.1-70b").mkdir()
    assert find_config_path("llama-3.1-70b") == Path("llama-3.1-70b")


def test_a_plan_calls_a_model_by_its_name(capsys, tmp_path) -> None:
    written = tmp_path / "plan.json"
    assert main(["plan", "meta-llama/Llama-3.2-1B", "--accelerator", "h100", "--json", str(written)]) == 0
    assert capsys.readouterr().out.startswith("llama-3.2-1b:\n")
    assert json.loads(written.read_text())["config"] == "llama-3.2-1b"
    other = tmp_path / "llama-3.2-1b.json"
    assert describe_config(other) == str(other)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("lama-3.1-70b", "did you mean llama-3.1-70b? llama names are llama-2-13b, "),
        ("qwn3-8b", "did you mean qwen3-8b? qwen names are qwen3-0.6b, "),
        ("meta-llama/Llama-3.1-70", "did you mean meta-llama/Llama-3.1-70B? llama names are "),
        ("mixtral", "did you mean mixtral-8x7b? mixtral names are mixtral-8x22b, mixtral-8x7b; docs"),
        ("somewhere/config.json", "; names begin with deepseek, gemma, gpt, kimi, llama, "),
    ],
)
def test_an_unknown_name_gets_the_closest_and_those_that_begin_alike(path, message) -> None:
    with pytest.raises(ModelError) as refused:
        read_record(Path(path))
    start = f"{path} is neither a config.json, nor a folder of one, nor a published model"
    assert str(refused.value).startswith(start)
    assert message in str(refused.value)
    assert str(refused.value).endswith("; docs/model/planning.md lists all")


def test_messages_show_all_names_that_begin_alike(capsys) -> None:
    for name in ("lama-3.1-70b", "qwn3-8b"):
        assert main(["plan", name]) == 2
        assert "…" not in capsys.readouterr().err


def test_the_page_lists_all_names() -> None:
    page = (ROOT / "docs" / "model" / "planning.md").read_text(encoding="utf-8")
    section = page.partition("## Published models")[2].partition("\n## ")[0]
    assert [name for name in re.findall(r"`([^`]+)`", section) if name in NAMES] == NAMES


@pytest.mark.slow
def test_traffic_calls_both_models_by_their_names(capsys, tmp_path) -> None:
    written = tmp_path / "traffic.json"
    words = ["traffic", "smollm2-135m", "--draft-model", "HuggingFaceTB/SmolLM2-135M", "--acceptance", "0.5"]
    words += [
        "--speculative-tokens",
        "1",
        "--tp",
        "1",
        "--users",
        "1",
        "--requests",
        "1",
        "--instance",
        "inf2.xlarge",
    ]
    words += ["--prompt-lengths", "16", "--output-lengths", "2"]
    assert main([*words, "--json", str(written)]) == 0
    assert capsys.readouterr().out.startswith("smollm2-135m:\n")
    document = json.loads(written.read_text())
    assert (document["config"], document["draft_model"]) == ("smollm2-135m", "smollm2-135m")
