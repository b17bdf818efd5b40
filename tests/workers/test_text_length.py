"""The bound of a text's length: no text that fits is refused, whatever a tokenizer drops, merges or normalizes."""

from __future__ import annotations

import json
import unicodedata
from functools import cache
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from model.loading.shipped import PRETRAINED
from model.workers.text_length import count_bytes, text_bound

SHIPPED = (PRETRAINED / "tokenizer.json").read_text(encoding="utf-8")


def changed(**fields: Any) -> str:
    """Return the shipped tokenizer with other parts."""
    return json.dumps(json.loads(SHIPPED) | fields)


def with_model(**fields: Any) -> str:
    """Return the shipped tokenizer with other fields of its model."""
    return changed(model=json.loads(SHIPPED)["model"] | fields)


def added(**fields: Any) -> str:
    """Return the shipped tokenizer with another added token."""
    token = json.loads(SHIPPED)["added_tokens"][0] | {"id": 5000, "content": "<|x|>"} | fields
    return changed(added_tokens=[*json.loads(SHIPPED)["added_tokens"], token])


def fallback(**fields: Any) -> str:
    """Return a tokenizer like sentencepiece's: blanks become ▁, unknown characters become bytes."""
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = {text: number for number, text in enumerate([*names, "▁", "a", "b", "ab", "▁ab"])}
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE(
            vocabulary, [("a", "b"), ("▁", "ab")], byte_fallback=True, fuse_unk=True, unk_token="<0x00>"
        )
    )
    normalizers = tokenizers.normalizers
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return json.dumps(json.loads(tokenizer.to_str()) | fields)


def test_the_bound_of_the_shipped_tokenizer_is_its_longest_token() -> None:
    vocabulary = json.loads(SHIPPED)["model"]["vocab"]
    assert text_bound(SHIPPED) == (max(map(len, vocabulary)), False)


@pytest.mark.parametrize(
    ("text", "bound"),
    [
        (added(content="x" * 99), (99, False)),
        (added(lstrip=True), (14, True)),
        (added(rstrip=True), (14, True)),
        (changed(normalizer={"type": "NFC"}), (14 * 8, False)),
        (changed(normalizer={"type": "Lowercase"}), (14 * 4, False)),
        (
            changed(normalizer={"type": "Replace", "pattern": {"String": "abc"}, "content": "d"}),
            (14 * 3, False),
        ),
        (fallback(), (6, False)),
    ],
)
def test_bounds_follow_from_added_tokens_and_normalizers(text: str, bound: tuple[int, bool]) -> None:
    assert text_bound(text) == bound


@pytest.mark.parametrize(
    "text",
    [
        changed(normalizer={"type": "Strip", "strip_left": True, "strip_right": True}),
        changed(normalizer={"type": "Replace", "pattern": {"String": "a"}, "content": ""}),
        changed(normalizer={"type": "Replace", "pattern": {"Regex": " +"}, "content": " "}),
        changed(pre_tokenizer={"type": "WhitespaceSplit"}),
        with_model(end_of_word_suffix="</w>"),
        changed(pre_tokenizer=None),
        fallback(model=json.loads(fallback())["model"] | {"byte_fallback": False}),
        changed(model={"type": "WordLevel", "vocab": {"a": 0, "?": 1}, "unk_token": "?"}),
    ],
)
def test_there_is_no_bound_where_text_may_vanish(text: str) -> None:
    assert text_bound(text) is None


TEXTS = st.text(max_size=60) | st.lists(st.sampled_from(["ab", " ab", "the ", "\u212b", "<|x|>", "  "])).map(
    "".join
)
TOKENIZERS = {
    "shipped": SHIPPED,
    "NFKC": changed(normalizer={"type": "NFKC"}),
    "lower case": changed(
        normalizer={"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}
    ),
    "added token": added(lstrip=True, rstrip=True, normalized=False),
    "byte fallback": fallback(),
}


@cache
def loaded(name: str) -> tuple[tuple[int, bool] | None, tokenizers.Tokenizer]:
    """Return the bound of a tokenizer, and the tokenizer."""
    return text_bound(TOKENIZERS[name]), tokenizers.Tokenizer.from_str(TOKENIZERS[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", TOKENIZERS)
@given(TEXTS)
@settings(deadline=None, derandomize=True, database=None, max_examples=200)
def test_a_text_has_no_more_bytes_than_its_tokens_may_stand_for(name: str, text: str) -> None:
    bound, tokenizer = loaded(name)
    assert bound is not None
    text = text.encode(errors="replace").decode()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert count_bytes(text, bound[1]) <= bound[0] * len(ids)


@pytest.mark.slow
def test_normal_forms_and_lower_case_shrink_no_more_than_said() -> None:
    """Of every character, the longest equivalent text: one code point for each of its decomposition, the longest."""
    longest: dict[str, int] = {}
    for code in [*range(0xD800), *range(0xE000, 0x110000)]:
        character = chr(code)
        assert len(character.encode()) <= 4 * len(character.lower().encode())
        if not unicodedata.decomposition(character) and not 0xAC00 <= code < 0xD7A4:
            continue
        for form in ("NFC", "NFKC", "NFD", "NFKD"):
            normal = unicodedata.normalize(form, character)
            longest[normal] = max(longest.get(normal, 0), len(character.encode()))
    for normal in longest:
        characters = unicodedata.normalize("NFD", normal)
        equivalent = sum(max(longest.get(character, 0), len(character.encode())) for character in characters)
        assert max(longest[normal], equivalent) <= 8 * len(normal.encode())
