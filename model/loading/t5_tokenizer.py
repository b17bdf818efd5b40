"""T5's tokenizer, made of spiece.model, or of a tokenizer.json.

Its ids are those of transformers' T5Tokenizer (version 5, or T5TokenizerFast before): a text is normalised by the rules
of the file, split at blanks, and each word becomes the likeliest sequence of pieces.
"""

from __future__ import annotations

import base64
import json
import math
import os
from pathlib import Path

from model.config.fields import Fields
from model.errors import ModelError
from model.loading.sentencepiece_model import CONTROL, USER_DEFINED, read_unigram_model
from model.loading.text_tokenizer import (
    SpecialTokens,
    TextTokenizer,
    create_text_tokenizer,
    read_special_tokens,
)
from model.loading.tokenizer import CODE, Tokenizer

CLASSES = ("T5Tokenizer", "T5TokenizerFast")
_DEFAULTS = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
_EXPECTED = {"add_prefix_space": True, "sp_model_kwargs": {}}
_MOST_SENTINELS = 10_000
_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "WhitespaceSplit"},
        {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True},
    ],
}


def open_t5_tokenizer(folder: Path, vocab_size: int, rows: int) -> TextTokenizer:
    """Return the T5 tokenizer of a folder, whose texts become `rows` ids below `vocab_size`.

    The folder has a tokenizer.json or a spiece.model. tokenizer_config.json and special_tokens_map.json name the
    special tokens.

    Raises:
        ModelError: A file is missing or damaged, the tokenizer is of another class, or its ids do not fit.
    """
    special = read_special_tokens(folder, CLASSES, _DEFAULTS, _EXPECTED)
    if os.path.lexists(folder / "tokenizer.json"):
        tokenizer = Tokenizer(folder, vocab_size)
    else:
        tokenizer = Tokenizer.from_text(_describe(folder, special), folder / "spiece.model", vocab_size)
    return create_text_tokenizer(tokenizer, folder, rows, special.names, (), ("eos_token",))


def _describe(folder: Path, special: SpecialTokens) -> str:
    """Return the text of a tokenizer.json made of spiece.model, the sentinel tokens and the special tokens.

    Sentinel tokens, <extra_id_99> to <extra_id_0>, follow the pieces; tokenizer_config.json may give their number.

    Raises:
        ModelError: The file is missing or damaged.
    """
    model = read_unigram_model(folder / "spiece.model")
    config = Fields(folder / "tokenizer_config.json", optional=True)
    count = config.get("extra_ids", 100)
    if type(count) is not int or not 0 <= count <= _MOST_SENTINELS:
        raise config.error("extra_ids", f"{count!r:.60} is not a number from 0 to {_MOST_SENTINELS}")
    sentinels = [f"<extra_id_{number}>" for number in reversed(range(count))]
    if not all(math.isfinite(piece.score) for piece in model.pieces):
        raise ModelError(f"{folder / 'spiece.model'} has pieces whose scores are not finite", CODE)
    vocabulary = [(piece.text, piece.score) for piece in model.pieces]
    vocabulary += [(sentinel, 0.0) for sentinel in sentinels]
    for piece in model.pieces:
        if piece.type in (CONTROL, USER_DEFINED):
            special.add(piece.text)
    for sentinel in sentinels:
        special.add(sentinel)
    charsmap = base64.b64encode(model.charsmap).decode()
    return json.dumps(
        {
            "version": "1.0",
            "added_tokens": special.number({text: index for index, (text, _) in enumerate(vocabulary)}),
            "normalizer": {"type": "Precompiled", "precompiled_charsmap": charsmap} if charsmap else None,
            "pre_tokenizer": _PRE_TOKENIZER,
            "model": {"type": "Unigram", "unk_id": model.unknown_id, "vocab": vocabulary},
        }
    )
