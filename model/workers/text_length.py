"""An upper bound for the length of the text that a number of tokens can stand for, from a tokenizer.json.

A text of more bytes has more tokens, so the server can refuse it by its length before it is encoded. The bound has to
hold for every text. There is none if a part of the tokenizer may drop or merge text without limit: unknown tokens,
normalizers that delete, or pre-tokenizers that remove blanks.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

import tokenizers

_CASE_SHRINKS, _FORM_SHRINKS = 4, 8
"""Most bytes of text for a byte of text in lower case, or in a Unicode normal form.

Unicode 16 needs 3 (KELVIN SIGN to k) and 4.5 (three jamo of 12 bytes at most, or letters with several marks).
"""
_KEEPING_SPLITS = ("ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength")
_BYTE_NAMES = [f"<0x{byte:02X}>" for byte in range(256)]


def text_bound(tokenizer_json: str) -> tuple[int, bool] | None:
    """Return (most bytes of UTF-8 text that one token stands for, whether white space is left out of these bytes).

    Returns None if no bound holds for every text.

    Args:
        tokenizer_json: The content of tokenizer.json.
    """
    serialized = json.loads(tokenizer_json)
    model = serialized["model"]
    steps = [
        *_flatten_steps(serialized["normalizer"], "normalizers"),
        *_flatten_steps(serialized["pre_tokenizer"], "pretokenizers"),
    ]
    shrinks = _compute_shrinking(_flatten_steps(serialized["normalizer"], "normalizers"))
    keeps = all(map(_keeps_text, _flatten_steps(serialized["pre_tokenizer"], "pretokenizers")))
    if model.get("type") != "BPE" or shrinks is None or not keeps:
        return None
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        return None
    vocabulary, is_byte_level = model["vocab"], any(step["type"] == "ByteLevel" for step in steps)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet() if is_byte_level else _BYTE_NAMES
    if not (is_byte_level or model.get("byte_fallback")) or not all(unit in vocabulary for unit in alphabet):
        return None
    longest = max(len(text) if is_byte_level else len(text.encode(errors="replace")) for text in vocabulary)
    added = serialized["added_tokens"]
    texts = [token["content"] for token in added]
    normalized = [token["content"] for token in added if token["normalized"]]
    if serialized["normalizer"] is not None and normalized:
        normalizer = tokenizers.Tokenizer.from_str(tokenizer_json).normalizer
        texts += [normalizer.normalize_str(text) for text in normalized]
    longest = max([longest, *(len(text.encode(errors="replace")) for text in texts)])
    return longest * shrinks, any(token["lstrip"] or token["rstrip"] for token in added)


def count_bytes(text: str, without_blanks: bool) -> int:
    """Return the number of UTF-8 bytes of a text, or only of its characters that are not white space."""
    counted = "".join(text.split()) if without_blanks else text
    return len(counted.encode(errors="replace"))


def _flatten_steps(step: dict[str, Any] | None, name: str) -> Sequence[dict[str, Any]]:
    """Return the steps of a normalizer or pre-tokenizer in order, with nested sequences flattened; empty for None.

    Args:
        step: The normalizer or pre-tokenizer.
        name: The key of a sequence's steps: "normalizers" or "pretokenizers".
    """
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    return [inner for nested in step[name] for inner in _flatten_steps(nested, name)]


def _compute_shrinking(normalizers: Iterable[dict[str, Any]]) -> int | None:
    """Return the most bytes of text that become one byte of normalized text; None if a normalizer may delete text."""
    most = 1
    for step in normalizers:
        name = step["type"]
        if name in ("NFC", "NFD", "NFKC", "NFKD"):
            most *= _FORM_SHRINKS
        elif name == "Lowercase":
            most *= _CASE_SHRINKS
        elif name == "Replace":
            text, content = step["pattern"].get("String"), step["content"].encode()
            if text is None or not content:
                return None
            most *= -(-len(text.encode()) // len(content))
        elif name not in ("Prepend", "ByteLevel"):
            return None
    return most


def _keeps_text(step: dict[str, Any]) -> bool:
    """Return whether a pre-tokenizer certainly removes no text."""
    name = step["type"]
    return name in _KEEPING_SPLITS or (name in ("Split", "Punctuation") and step["behavior"] != "Removed")
