"""WAV files of recordings: 16,000 samples a second, one channel, PCM of 8, 16, 24 or 32 bits.

`nkw transcribe` reads files, and the HTTP routes of audio decode uploads.
"""

from __future__ import annotations

import wave
from io import BytesIO
from pathlib import Path
from typing import IO, Any, cast

import numpy as np

from model.errors import ModelError

SAMPLE_RATE = 16000
_CODE = "NKW-MODEL-AUDIO"
_MOST_SECONDS = 4 * 3600
_WIDTHS = (1, 2, 3, 4)
_READS_PER_CHUNK = 2
_MOST_READS = 1000 * _READS_PER_CHUNK


def read_wav(path: Path) -> np.ndarray:
    """Return the samples of a WAV file, float32 [count] from -1 to 1, at 16,000 per second.

    Raises:
        ModelError: The file cannot be read or is no WAV file, has another rate, several channels, other than 8, 16, 24
            or 32 bits a sample, no samples, or more than 4 hours of them.
    """
    try:
        with path.open("rb") as file:
            return _read(file, str(path))
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", _CODE) from None


def decode_wav(content: bytes, name: str) -> np.ndarray:
    """Return the samples in the bytes of a WAV file, float32 [count] from -1 to 1; errors call the file `name`.

    Raises:
        ModelError: `content` is no WAV file, has another rate than 16,000, several channels, other than 8, 16, 24 or 32
            bits a sample, no samples, or more than 4 hours of them.
    """
    return _read(BytesIO(content), name)


class _BoundedReads:
    """File that raises wave.Error after a number of reads that only a file with useless chunks needs.

    `wave` skips chunks one by one, so a file of empty chunks would take seconds.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._remaining = _MOST_READS

    def read(self, size: int = -1) -> bytes:
        """Return at most `size` bytes, all with -1. Raises wave.Error at each call after the 2,000th."""
        if not self._remaining:
            raise wave.Error(
                f"it has more than {_MOST_READS // _READS_PER_CHUNK:,} chunks before its samples"
            )
        self._remaining -= 1
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _read(content: IO[bytes], name: str) -> np.ndarray:
    try:
        with wave.open(cast(IO[bytes], _BoundedReads(content)), "rb") as file:
            return _read_samples(file, name)
    except EOFError:
        raise ModelError(f"{name} is not a WAV file: it ends in its header", _CODE) from None
    except RuntimeError:  # `wave` raises it for a seek past the end of a chunk
        raise ModelError(f"{name} is not a WAV file: a chunk is longer than the file says", _CODE) from None
    except (wave.Error, ValueError, OverflowError) as error:
        raise ModelError(f"{name} is not a WAV file of PCM samples: {error}", _CODE) from None


def _read_samples(file: wave.Wave_read, path: str) -> np.ndarray:
    channels, rate, width = file.getnchannels(), file.getframerate(), file.getsampwidth()
    if channels != 1:
        raise ModelError(f"{path} has {channels} channels; a recording has 1: mix them first", _CODE)
    if rate != SAMPLE_RATE:
        raise ModelError(
            f"{path} has {rate:,} samples a second; a recording has {SAMPLE_RATE:,}: resample it first",
            _CODE,
        )
    if width not in _WIDTHS:
        raise ModelError(
            f"{path} has samples of {8 * width} bits; a recording has 8, 16, 24 or 32: convert it first",
            _CODE,
        )
    if file.getnframes() > _MOST_SECONDS * SAMPLE_RATE:
        raise ModelError(
            f"{path} is longer than {_MOST_SECONDS // 3600} hours, the most that is read; cut it first", _CODE
        )
    content = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    content = content[: len(content) // width * width]
    if not len(content):
        raise ModelError(f"{path} has no samples", _CODE)
    return _scale(content, width)


def _scale(content: np.ndarray, width: int) -> np.ndarray:
    """Return little-endian integers of `width` bytes, given as bytes [count * width], as float32 [count] from -1 to 1.

    Integers of one byte are unsigned, all others signed.
    """
    if width == 1:
        return (content.astype(np.float32) - 128) / 128
    wide = np.zeros((len(content) // width, 4), np.uint8)
    wide[:, 4 - width :] = content.reshape(-1, width)
    return (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
