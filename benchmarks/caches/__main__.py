"""Print the change of the loss of `stories` by caches of few bits.

    python -m benchmarks.caches --corpus FOLDER

The folder has valid.txt and train.txt, as for `python -m tools.train`; each text is followed by a line
`<|endoftext|>`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.caches.study import format_rows, list_rows
from model.llm.cache_scales import CALIBRATION_TOKENS
from model.llm.loaded import LoadedModel
from model.loading.shipped import PRETRAINED
from model.loading.tokenizer import Tokenizer

END = 0
"""Token <|endoftext|>, which precedes and follows a text."""
TEXTS = 40


def read_texts(path: Path, tokenizer: Tokenizer, most: int) -> list[list[int]]:
    """Return the token ids of the first `most` texts of a corpus file, each between two ends."""
    texts = path.read_text(encoding="utf-8").split("\n<|endoftext|>\n")[:most]
    return [[END, *tokenizer.encode(text, special_tokens=False), END] for text in texts]


def main() -> None:
    """Read the corpus, compute all rows, and print them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.caches", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--corpus", type=Path, required=True, help="folder with train.txt and valid.txt")
    options = parser.parse_args()
    model = LoadedModel.open(PRETRAINED)
    tokenizer = Tokenizer(PRETRAINED, model.config.vocab_size)
    texts = read_texts(options.corpus / "valid.txt", tokenizer, TEXTS)
    train = [token for text in read_texts(options.corpus / "train.txt", tokenizer, TEXTS) for token in text]
    rows = list_rows(model.config, model.checkpoint, texts, train[:CALIBRATION_TOKENS])
    print(
        f"{len(texts)} texts, {sum(min(len(text), model.config.context) - 1 for text in texts):,} predicted tokens"
    )
    print(format_rows(rows))


if __name__ == "__main__":
    main()
