"""T5's tokenizer against transformers, its file of pieces against damage, and refusals of other models of pieces."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from model.errors import ModelError
from model.loading.sentencepiece_model import Piece, read_unigram_model
from model.loading.t5_tokenizer import open_t5_tokenizer
from model.loading.text_tokenizers import open_text_tokenizer
from tests.model.text_encoder_oracles import STORED, T5_PROMPTS, T5_TOKENIZERS, Pieces, record_pieces

RECORDED = dict(np.load(STORED))
VOCABULARY = 1000


def load_model(pieces: Pieces) -> bytes:
    return bytes(RECORDED[pieces.key])


def varint(number: int) -> bytes:
    """Return the varint of a number."""
    *first, last = [number >> 7 * index & 0x7F for index in range(max(1, -(-number.bit_length() // 7)))]
    return bytes([*(byte | 0x80 for byte in first), last])


def message(*fields: tuple[int, int | float | str | bytes]) -> bytes:
    """Return a protobuf message of (number, value): a varint, a float, or bytes."""
    encoded = b""
    for number, content in fields:
        if isinstance(content, int):
            encoded += varint(number << 3) + varint(content)
        elif isinstance(content, float):
            encoded += varint(number << 3 | 5) + struct.pack("<f", content)
        else:
            text = content.encode() if isinstance(content, str) else content
            encoded += varint(number << 3 | 2) + varint(len(text)) + text
    return encoded


PIECES = [
    *(
        message((1, message((1, text), (2, 0.0), (3, number))))
        for text, number in (("<pad>", 3), ("</s>", 3))
    ),
    message((1, message((1, "<unk>"), (3, 2)))),
    *(
        message((1, message((1, text), (2, score))))
        for text, score in (("▁", -3.0), ("▁red", -1.5), ("d", -2.5))
    ),
]


def create_model(*trainer: tuple[int, int], **normalizer: int) -> bytes:
    """Return a model of six pieces, whose id of unknown text is 2, with fields of its trainer and normaliser."""
    rules = [(3 if name == "add_dummy_prefix" else 4, number) for name, number in normalizer.items()]
    return b"".join([*PIECES, message((2, message((40, 2), *trainer))), message((3, message(*rules)))])


def open_model(folder: Path, model: bytes, **config: Any) -> Any:
    files = {"tokenizer_config.json": {"extra_ids": 2} | config}
    return open_t5_tokenizer(Pieces(files, 8, False).write(folder, model), VOCABULARY, 8)


@pytest.mark.parametrize("name", T5_TOKENIZERS)
def test_ids_and_lengths_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    pieces = T5_TOKENIZERS[name]
    tokenizer = open_t5_tokenizer(pieces.write(tmp_path, load_model(pieces)), VOCABULARY, pieces.rows)
    ids, lengths = tokenizer.encode(T5_PROMPTS)
    expected_ids, expected_mask = RECORDED[f"{name}: ids"]
    for text, row, expected in zip(T5_PROMPTS, ids, expected_ids):
        assert row.tolist() == expected.tolist(), text
    assert np.array_equal(np.arange(pieces.rows) < lengths, expected_mask)


def test_a_word_becomes_its_likeliest_pieces(tmp_path: Path) -> None:
    """Its scores add up: "▁red" is -1.5, and "▁", unknown "re" and "d" are less."""
    tokenizer = open_model(tmp_path, create_model())
    ids, lengths = tokenizer.encode(["red  red", "d", "<extra_id_0><extra_id_1>", "x" * 3, ""])
    assert ids[:, :4].tolist() == [[4, 4, 1, 0], [3, 5, 1, 0], [7, 6, 1, 0], [3, 2, 1, 0], [1, 0, 0, 0]]
    assert lengths.ravel().tolist() == [3, 3, 3, 3, 1]


def test_reads_pieces_scores_and_types(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(create_model())
    model = read_unigram_model(tmp_path / "spiece.model")
    assert model.pieces[:3] == (Piece("<pad>", 0.0, 3), Piece("</s>", 0.0, 3), Piece("<unk>", 0.0, 2))
    assert model.pieces[3:] == (Piece("▁", -3.0, 1), Piece("▁red", -1.5, 1), Piece("d", -2.5, 1))
    assert (model.unknown_id, model.charsmap) == (2, b"")


@pytest.mark.parametrize("name", T5_TOKENIZERS)
def test_sentencepiece_reads_the_same_pieces(tmp_path: Path, name: str) -> None:
    sentencepiece = pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    path = T5_TOKENIZERS[name].write(tmp_path, load_model(T5_TOKENIZERS[name])) / "spiece.model"
    processor = sentencepiece.SentencePieceProcessor(str(path))
    pieces = read_unigram_model(path).pieces
    assert [piece.text for piece in pieces] == [processor.id_to_piece(id) for id in range(len(processor))]
    assert [piece.score for piece in pieces] == [processor.get_score(id) for id in range(len(processor))]


def test_a_tokenizer_json_comes_before_the_pieces(tmp_path: Path) -> None:
    pieces = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("blue", -1.0)]
    inner = tokenizers.Tokenizer(tokenizers.models.Unigram(pieces, 2))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    inner.save(str(tmp_path / "tokenizer.json"))
    tokenizer = open_text_tokenizer(tmp_path, "T5TokenizerFast", 4, 4)
    assert tokenizer.encode(["blue blue"])[0].tolist() == [[3, 3, 1, 0]]


def test_refuses_ids_outside_of_the_vocabulary_of_the_model(tmp_path: Path) -> None:
    """Six pieces and two sentinels are eight ids."""
    folder = Pieces({"tokenizer_config.json": {"extra_ids": 2}}, 8, False).write(tmp_path, create_model())
    open_t5_tokenizer(folder, 8, 4)
    with pytest.raises(ModelError, match=r"has token id 7; config\.json has a vocab_size of 7"):
        open_t5_tokenizer(folder, 7, 4)


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        (create_model((3, 2)), "model_type is 2; only 1 is computed"),
        (create_model((35, 1)), "byte_fallback is 1; only 0 is computed"),
        (create_model(add_dummy_prefix=0), "add_dummy_prefix is 0; only 1 is computed"),
        (create_model(remove_extra_whitespaces=0), "remove_extra_whitespaces is 0; only 1 is computed"),
    ],
)
def test_refuses_other_models_of_pieces(tmp_path: Path, model: bytes, problem: str) -> None:
    open_model(tmp_path, create_model((3, 1), (35, 0), add_dummy_prefix=1, remove_extra_whitespaces=1))
    with pytest.raises(ModelError) as error:
        open_model(tmp_path, model)
    assert str(error.value) == f"{tmp_path / 'spiece.model'}: {problem}"


@pytest.mark.parametrize(
    "model",
    [
        b"",
        b"version https://git-lfs.github.com/spec/v1",
        b'{"pieces": []}',
        create_model()[:-1],
        b"\xff" * 40,
        create_model((40, 6)),
        message((1, 5), (2, message((40, 0)))),
        message((1, message((1, b"\xff"))), (2, message((40, 0)))),
        message((1, message((1, "a"), (2, 3))), (2, message((40, 0)))),
        message((1, message((1, "a"))), (2, 7)),
        message((1, message((1, "a"))), (3, message((2, 1)))),
        message((1, message((1, "a")))) + b"\x0b",
    ],
)
def test_refuses_damaged_models(tmp_path: Path, model: bytes) -> None:
    with pytest.raises(ModelError) as error:
        open_model(tmp_path, model)
    assert str(error.value) == f"{tmp_path / 'spiece.model'} is not a model of SentencePiece"


def test_every_prefix_of_a_file_is_read_or_refused(tmp_path: Path) -> None:
    path, model = tmp_path / "spiece.model", create_model()
    refused = 0
    for end in range(len(model)):
        path.write_bytes(model[:end])
        try:
            assert len(read_unigram_model(path).pieces) <= len(PIECES)
        except ModelError:
            refused += 1
    assert refused > len(model) - 2 * len(PIECES)


def test_refuses_missing_files_and_long_files(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"spiece\.model is missing"):
        open_t5_tokenizer(tmp_path, VOCABULARY, 8)
    with (tmp_path / "spiece.model").open("wb") as file:
        file.truncate(2**25 + 1)
    with pytest.raises(ModelError, match=r"spiece\.model has more than 33,554,432 bytes"):
        open_t5_tokenizer(tmp_path, VOCABULARY, 8)


@pytest.mark.parametrize("score", [float("inf"), float("-inf"), float("nan")])
def test_refuses_scores_that_are_not_finite(tmp_path: Path, score: float) -> None:
    with pytest.raises(ModelError, match="has pieces whose scores are not finite"):
        open_model(tmp_path, message((1, message((1, "a"), (2, score)))) + create_model())


def test_refuses_rules_of_normalisation_that_are_damaged(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"spiece\.model"):
        open_model(tmp_path, create_model() + message((3, message((2, b"\x00\x01\x02")))))


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (dict(extra_ids=-1), "extra_ids: -1 is not a number from 0 to 10000"),
        (dict(extra_ids=10001), "extra_ids: 10001 is not a number from 0 to 10000"),
        (dict(extra_ids="100"), "extra_ids: '100' is not a number from 0 to 10000"),
        (dict(add_prefix_space=False), "add_prefix_space: False; only True is computed"),
        (dict(sp_model_kwargs={"alpha": 0.1}), "sp_model_kwargs: {'alpha': 0.1}; only {} is computed"),
        (dict(tokenizer_class="CLIPTokenizer"), "tokenizer_class: 'CLIPTokenizer'; read is T5Tokenizer or"),
        (dict(padding_side="left"), "padding_side: 'left'; only 'right' is computed"),
    ],
)
def test_refuses_configs_of_other_tokenizers(tmp_path: Path, config: dict[str, Any], problem: str) -> None:
    open_model(
        tmp_path, create_model(), extra_ids=0, add_prefix_space=None, sp_model_kwargs={}, padding_side="right"
    )
    with pytest.raises(ModelError) as error:
        open_model(tmp_path, create_model(), **config)
    assert problem in str(error.value)


def test_refuses_an_end_token_that_is_not_in_the_vocabulary(tmp_path: Path) -> None:
    folder = Pieces({}, 8, False).write(tmp_path, create_model())
    inner = {
        "version": "1.0",
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["<pad>", 0.0]]},
    }
    (folder / "tokenizer.json").write_text(json.dumps(inner))
    with pytest.raises(ModelError, match="eos_token, '</s>', is not in the vocabulary"):
        open_t5_tokenizer(folder, VOCABULARY, 8)


@pytest.mark.deep
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", T5_TOKENIZERS)
def test_installed_transformers_gives_the_recorded_ids(name: str) -> None:
    pytest.importorskip("transformers", reason="transformers is an extra of development (dev)")
    pytest.importorskip("sentencepiece", reason="sentencepiece is not installed")
    pytest.importorskip("google.protobuf", reason="protobuf is not installed")
    pieces = T5_TOKENIZERS[name]
    assert np.array_equal(record_pieces(pieces, load_model(pieces)), RECORDED[f"{name}: ids"])
