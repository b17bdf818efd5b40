"""Tokenizers of text encoders against transformers, on texts that are hard to split, and refusals of their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from model.errors import ModelError
from model.loading.clip_tokenizer import open_clip_tokenizer
from model.loading.text_tokenizers import open_text_tokenizer
from tests.model.text_encoder_oracles import PROMPTS, STORED, TOKENIZERS, Words, record_words

RECORDED = dict(np.load(STORED))
VOCABULARY = 1000


@pytest.mark.parametrize("name", TOKENIZERS)
def test_ids_and_lengths_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    words = TOKENIZERS[name]
    tokenizer = open_clip_tokenizer(words.write(tmp_path), VOCABULARY, words.rows)
    ids, lengths = tokenizer.encode(PROMPTS)
    expected_ids, expected_mask = RECORDED[f"{name}: ids"]
    for text, row, expected in zip(PROMPTS, ids, expected_ids):
        assert row.tolist() == expected.tolist(), text
    assert np.array_equal(np.arange(words.rows) < lengths, expected_mask)
    assert ids.dtype == lengths.dtype == np.int32


def test_classes_are_those_of_model_index(tmp_path: Path) -> None:
    folder = TOKENIZERS["bytes"].write(tmp_path)
    for name in ("CLIPTokenizer", "CLIPTokenizerFast"):
        assert open_text_tokenizer(folder, name, VOCABULARY, 5).encode(["red"])[1].tolist() == [[3]]
    with pytest.raises(ModelError, match="tokenizer BertTokenizer is not known; known are CLIPTokenizer, "):
        open_text_tokenizer(folder, "BertTokenizer", VOCABULARY, 5)


def test_texts_are_cut_one_token_after_the_room_is_full(tmp_path: Path) -> None:
    words = TOKENIZERS["bytes"]
    tokenizer = open_clip_tokenizer(words.write(tmp_path), VOCABULARY, 6)
    rows, lengths = tokenizer.encode(["red " * count for count in (3, 4, 5)])
    start, red, end = rows[0, 0], rows[0, 1], rows[0, 4]
    assert rows.tolist() == [[start, red, red, red, end, end], *[[start, *[red] * 4, end]] * 2]
    assert lengths.tolist() == [[5], [6], [6]]


def test_a_tokenizer_json_comes_before_other_files(tmp_path: Path) -> None:
    """The ids of words are those of the file; the special tokens are named in tokenizer_config.json."""
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<s>": 0, "red": 1, "</s>": 2}, unk_token="</s>")
    )
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    folder = Words({"tokenizer_config.json": dict(bos_token="<s>", eos_token="</s>", pad_token="red")}).write(
        tmp_path
    )
    inner.save(str(folder / "tokenizer.json"))
    ids, lengths = open_clip_tokenizer(folder, 3, 6).encode(["red red", "blue"])
    assert ids.tolist() == [[0, 1, 1, 2, 1, 1], [0, 2, 2, 1, 1, 1]]
    assert lengths.tolist() == [[4], [3]]


def test_refuses_ids_outside_of_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    folder = TOKENIZERS["bytes"].write(tmp_path)
    size = max(json.loads((folder / "vocab.json").read_text()).values()) + 1
    open_clip_tokenizer(folder, size, 16)
    with pytest.raises(
        ModelError, match=f"has token id {size - 1}; config.json has a vocab_size of {size - 1}"
    ):
        open_clip_tokenizer(folder, size - 1, 16)


def test_refuses_rows_without_place_for_a_text(tmp_path: Path) -> None:
    folder = TOKENIZERS["bytes"].write(tmp_path)
    assert open_clip_tokenizer(folder, VOCABULARY, 3).encode(["red"])[0].shape == (1, 3)
    with pytest.raises(ModelError, match="2 ids of a padded text; it has 2 special tokens and a text"):
        open_clip_tokenizer(folder, VOCABULARY, 2)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"tokenizer_class": "BertTokenizer"}, "tokenizer_class: 'BertTokenizer'; read is CLIPTokenizer or"),
        ({"padding_side": "left"}, "padding_side: 'left'; only 'right' is computed"),
        ({"truncation_side": "left"}, "truncation_side: 'left'; only 'right' is computed"),
        ({"add_bos_token": False}, "add_bos_token: False; only True is computed"),
        ({"split_special_tokens": True}, "split_special_tokens: True; only False is computed"),
        ({"bos_token": 5}, "bos_token: 5 is not a token"),
        (
            {"eos_token": {"content": "</s>", "lstrip": "no"}},
            "eos_token: {'content': '</s>', 'lstrip': 'no'} is not a",
        ),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder: [1] is not an object"),
        ({"added_tokens_decoder": {"3": None}}, "added_tokens_decoder.3: None is not a token"),
        ({"additional_special_tokens": [""]}, "additional_special_tokens: '' is not a token"),
    ],
)
def test_refuses_configs_of_other_tokenizers(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    accepted = {"padding_side": "right", "add_bos_token": True, "bos_token": "<|startoftext|>"}
    open_clip_tokenizer(Words({"tokenizer_config.json": accepted}).write(tmp_path / "twin"), VOCABULARY, 8)
    with pytest.raises(ModelError) as error:
        open_clip_tokenizer(Words({"tokenizer_config.json": files}).write(tmp_path), VOCABULARY, 8)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("vocab.json", None, "vocab.json is missing"),
        ("merges.txt", None, "merges.txt is missing"),
        ("vocab.json", "[1]", "vocab.json holds a JSON list, not an object"),
        ("vocab.json", '{"a": "b"}', "vocab.json has tokens without a number from 0"),
        ("vocab.json", '{"a": -1}', "vocab.json has tokens without a number from 0"),
        ("vocab.json", '{"a": true}', "vocab.json has tokens without a number from 0"),
        ("merges.txt", "a b c", "merges.txt: 'a b c' is not a pair of tokens with a blank between them"),
        ("merges.txt", "a zz", "is not a tokenizer"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
    ],
)
def test_refuses_damaged_files(tmp_path: Path, file: str, content: str | None, message: str) -> None:
    folder = TOKENIZERS["bytes"].write(tmp_path)
    open_clip_tokenizer(folder, VOCABULARY, 8)
    if content is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(content)
    with pytest.raises(ModelError) as error:
        open_clip_tokenizer(folder, VOCABULARY, 8)
    assert message in str(error.value)


def test_refuses_files_that_are_links_out_of_the_folder(tmp_path: Path) -> None:
    folder = TOKENIZERS["bytes"].write(tmp_path / "folder")
    outside = tmp_path / "vocab.json"
    (folder / "vocab.json").rename(outside)
    (folder / "vocab.json").symlink_to(outside)
    with pytest.raises(ModelError, match="is a link out of the model's folder"):
        open_clip_tokenizer(folder, VOCABULARY, 8)
    (folder / "vocab.json").unlink()
    outside.rename(folder / "vocab.json")
    open_clip_tokenizer(folder, VOCABULARY, 8)


def test_refuses_texts_with_lone_surrogates(tmp_path: Path) -> None:
    tokenizer = open_clip_tokenizer(TOKENIZERS["bytes"].write(tmp_path), VOCABULARY, 8)
    with pytest.raises(ModelError, match="not Unicode text"):
        tokenizer.encode(["red \ud800"])


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TOKENIZERS)
def test_installed_transformers_gives_the_recorded_ids(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    assert np.array_equal(record_words(TOKENIZERS[name]), RECORDED[f"{name}: ids"])
