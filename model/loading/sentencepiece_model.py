"""Files of SentencePiece, such as spiece.model, without its library: the pieces of a unigram model with their scores.

A file is a protobuf message. A message is a sequence of fields, each of which begins with its number and its wire type.
Numbers of fields and of types are those of sentencepiece_model.proto.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from model.errors import ModelError
from model.loading.tokenizer import CODE
from nkw.files import opened

_MOST_BYTES = 2**25
"""Most bytes of a file; those of published T5 and mT5 models have 0.8 and 4.3 MB."""
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNKNOWN_ID = 3, 35, 40
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_WHITESPACES = 2, 3, 4
_UNIGRAM = 1
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""Types of pieces: of texts, of control tokens, and of tokens at which texts are split."""

Scalar = int | bytes


@dataclass(frozen=True)
class Piece:
    """Piece of a vocabulary: its text, the logarithm of its probability, and its type."""

    text: str
    score: float
    type: int


@dataclass(frozen=True)
class UnigramModel:
    """Unigram model: its pieces by id, the id of unknown text, and the rules of a normalisation, compiled or empty."""

    pieces: tuple[Piece, ...]
    unknown_id: int
    charsmap: bytes


def read_unigram_model(path: Path) -> UnigramModel:
    """Return the unigram model in a file of SentencePiece.

    Raises:
        ModelError: The file is missing, too long or damaged, is of another kind of model, or handles blanks or unknown
            bytes in another way than T5 does.
    """
    try:
        with opened(path) as file:
            if os.fstat(file.fileno()).st_size > _MOST_BYTES:
                raise ModelError(f"{path} has more than {_MOST_BYTES:,} bytes", CODE)
            content = file.read()
    except FileNotFoundError:
        raise ModelError(f"{path} is missing", CODE) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", CODE) from None
    try:
        return _parse_model(path, content)
    except (IndexError, ValueError, struct.error):
        raise ModelError(f"{path} is not a model of SentencePiece", CODE) from None


def _parse_model(path: Path, content: bytes) -> UnigramModel:
    """Return the model in the bytes of a file.

    Raises:
        ModelError: The model is of another kind.
        ValueError: The bytes are no message with such fields; IndexError or struct.error if they end too early.
    """
    fields = list(_parse_fields(content))
    trainer = _merge_messages(fields, _TRAINER)
    normalizer = _merge_messages(fields, _NORMALIZER)
    for name, number, expected, message in (
        ("model_type", _MODEL_TYPE, _UNIGRAM, trainer),
        ("byte_fallback", _BYTE_FALLBACK, 0, trainer),
        ("add_dummy_prefix", _DUMMY_PREFIX, 1, normalizer),
        ("remove_extra_whitespaces", _EXTRA_WHITESPACES, 1, normalizer),
    ):
        if message.get(number, expected) != expected:
            raise ModelError(f"{path}: {name} is {message[number]!r:.60}; only {expected} is computed", CODE)
    pieces = tuple(_parse_piece(message) for number, message in fields if number == _PIECES)
    unknown = trainer.get(_UNKNOWN_ID, 0)
    charsmap = normalizer.get(_CHARSMAP, b"")
    if (
        not pieces
        or not isinstance(unknown, int)
        or unknown >= len(pieces)
        or not isinstance(charsmap, bytes)
    ):
        raise ValueError("no pieces, or no piece for unknown text")
    return UnigramModel(pieces, unknown, charsmap)


def _parse_piece(message: Scalar) -> Piece:
    """Return the piece in a message; ValueError if it is none."""
    fields = dict(_parse_fields(message))
    text, score, type_number = fields.get(_TEXT, b""), fields.get(_SCORE, bytes(4)), fields.get(_TYPE, NORMAL)
    if not isinstance(text, bytes) or not isinstance(score, bytes) or not isinstance(type_number, int):
        raise ValueError("fields of other types")
    (number,) = struct.unpack("<f", score)
    return Piece(text.decode(), number, type_number)


def _merge_messages(fields: list[tuple[int, Scalar]], number: int) -> dict[int, Scalar]:
    """Return the last value of each field of the messages with a number."""
    return {
        name: content
        for field, message in fields
        if field == number
        for name, content in _parse_fields(message)
    }


def _parse_fields(message: Scalar) -> Iterator[tuple[int, Scalar]]:
    """Yield (number, value) of each field of a message: an integer for a varint, else the bytes.

    Raises:
        ValueError: The message is no bytes, or a wire type is unknown; IndexError if the message ends in a varint.
    """
    if not isinstance(message, bytes):
        raise ValueError("a number in place of a message")
    offset = 0
    while offset < len(message):
        tag, offset = _parse_varint(message, offset)
        wire_type = tag & 7
        if wire_type == _VARINT:
            number, offset = _parse_varint(message, offset)
            yield tag >> 3, number
            continue
        if wire_type == _BYTES:
            size, offset = _parse_varint(message, offset)
        elif wire_type in (_FIXED32, _FIXED64):
            size = 4 if wire_type == _FIXED32 else 8
        else:
            raise ValueError("unknown wire type")
        if offset + size > len(message):
            raise ValueError("a field ends behind its message")
        yield tag >> 3, message[offset : offset + size]
        offset += size


def _parse_varint(message: bytes, offset: int) -> tuple[int, int]:
    """Return the number in the varint at an offset, and the offset behind it.

    Raises:
        ValueError: The varint has more than 10 bytes; IndexError if the message ends before it.
    """
    number = 0
    for index in range(10):
        byte = message[offset + index]
        number |= (byte & 0x7F) << 7 * index
        if byte < 0x80:
            return number, offset + index + 1
    raise ValueError("a varint of more than 10 bytes")
