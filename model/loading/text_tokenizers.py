"""Tokenizers of text encoders by the class that model_index.json names."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from model.errors import ModelError
from model.loading import clip_tokenizer, t5_tokenizer
from model.loading.text_tokenizer import TextTokenizer
from model.loading.tokenizer import CODE

_OPEN: dict[str, Callable[[Path, int, int], TextTokenizer]] = {
    **dict.fromkeys(clip_tokenizer.CLASSES, clip_tokenizer.open_clip_tokenizer),
    **dict.fromkeys(t5_tokenizer.CLASSES, t5_tokenizer.open_t5_tokenizer),
}


def open_text_tokenizer(folder: Path, class_name: str, vocab_size: int, rows: int) -> TextTokenizer:
    """Return the tokenizer of a folder, whose texts become `rows` ids below `vocab_size`.

    Args:
        folder: The folder of the tokenizer.
        class_name: Class of the tokenizer in transformers.
        vocab_size: Rows of the text encoder's embedding.
        rows: Ids of a padded text.

    Raises:
        ModelError: The class is unknown, a file is missing or damaged, or the ids do not fit.
    """
    if class_name not in _OPEN:
        raise ModelError(
            f"{folder}: tokenizer {class_name:.60} is not known; known are {', '.join(_OPEN)}", CODE
        )
    return _OPEN[class_name](folder, vocab_size, rows)
