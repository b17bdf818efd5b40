"""CLIP's tokenizer, made of vocab.json and merges.txt, or of a tokenizer.json.

Its ids are those of transformers' CLIPTokenizer (version 5, or CLIPTokenizerFast before): a text in NFC and lower case,
with runs of whitespace as one blank, is split into words, numerals and other signs, each of which is merged by itself.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from model.config.fields import read_json
from model.errors import ModelError, read_text_file
from model.loading.text_tokenizer import (
    SpecialTokens,
    TextTokenizer,
    create_text_tokenizer,
    read_special_tokens,
)
from model.loading.tokenizer import CODE, Tokenizer

CLASSES = ("CLIPTokenizer", "CLIPTokenizerFast")
_END = "<|endoftext|>"
_DEFAULTS = {"bos_token": "<|startoftext|>", "eos_token": _END, "unk_token": _END, "pad_token": _END}
_WORDS = r"<\|startoftext\|>|<\|endoftext\|>|'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"
_NORMALIZER = {
    "type": "Sequence",
    "normalizers": [
        {"type": "NFC"},
        {"type": "Replace", "pattern": {"Regex": r"\s+"}, "content": " "},
        {"type": "Lowercase"},
    ],
}
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": _WORDS}, "behavior": "Removed", "invert": True},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    ],
}


def open_clip_tokenizer(folder: Path, vocab_size: int, rows: int) -> TextTokenizer:
    """Return the CLIP tokenizer of a folder, whose texts become `rows` ids below `vocab_size`.

    The folder has a tokenizer.json, or vocab.json and merges.txt; tokenizer_config.json and special_tokens_map.json
    name the special tokens.

    Raises:
        ModelError: A file is missing or damaged, the tokenizer is of another class, or its ids do not fit.
    """
    special = read_special_tokens(folder, CLASSES, _DEFAULTS, {"add_bos_token": True})
    if os.path.lexists(folder / "tokenizer.json"):
        tokenizer = Tokenizer(folder, vocab_size)
    else:
        tokenizer = Tokenizer.from_text(_describe(folder, special), folder / "vocab.json", vocab_size)
    return create_text_tokenizer(tokenizer, folder, rows, special.names, ("bos_token",), ("eos_token",))


def _describe(folder: Path, special: SpecialTokens) -> str:
    """Return the text of a tokenizer.json made of vocab.json, merges.txt and the special tokens.

    Raises:
        ModelError: A file is missing or damaged, or a line of merges.txt is not a pair.
    """
    vocabulary = read_json(folder / "vocab.json")
    numbers = {token: number for token, number in vocabulary.items() if type(number) is int and number >= 0}
    if len(numbers) < len(vocabulary):
        raise ModelError(f"{folder / 'vocab.json'} has tokens without a number from 0", CODE)
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": special.number(numbers),
            "normalizer": _NORMALIZER,
            "pre_tokenizer": _PRE_TOKENIZER,
            "model": {
                "type": "BPE",
                "unk_token": special.names["unk_token"],
                "continuing_subword_prefix": "",
                "end_of_word_suffix": "</w>",
                "fuse_unk": False,
                "vocab": numbers,
                "merges": _read_merges(folder / "merges.txt"),
            },
        }
    )


def _read_merges(path: Path) -> list[str]:
    """Return the merges of a merges.txt in order, "<first> <second>" each.

    Raises:
        ModelError: The file is missing or damaged, or a line is not a pair.
    """
    lines = [line.removesuffix("\r") for line in read_text_file(path, CODE).split("\n")]
    merges = [line for line in lines if line and not line.startswith("#version")]
    for merge in merges:
        if len(merge.split(" ")) != 2:
            raise ModelError(f"{path}: {merge!r:.60} is not a pair of tokens with a blank between them", CODE)
    return merges
