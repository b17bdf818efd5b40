"""Recordings: WAV files of 16,000 samples a second, one channel, PCM of 8, 16, 24 or 32 bits."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np

from model.errors import ModelError

SAMPLE_RATE = 16000
_CODE = "NKW-MODEL-AUDIO"
_MOST_SECONDS = 4 * 3600
_WIDTHS = (1, 2, 3, 4)


def read_wav(path: Path) -> np.ndarray:
    """The samples of a recording, float32 from -1 up to 1; ModelError for a file that is no such recording."""
    try:
        with wave.open(str(path), "rb") as file:
            return _samples(file, path)
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}", _CODE) from None
    except EOFError:
        raise ModelError(f"{path} is not a WAV file: it ends in its header", _CODE) from None
    except (wave.Error, ValueError) as error:
        raise ModelError(f"{path} is not a WAV file of PCM samples: {error}", _CODE) from None


def _samples(file: wave.Wave_read, path: Path) -> np.ndarray:
    channels, rate, width = file.getnchannels(), file.getframerate(), file.getsampwidth()
    if channels != 1:
        raise ModelError(f"{path} has {channels} channels; a recording has 1: mix them before", _CODE)
    if rate != SAMPLE_RATE:
        raise ModelError(
            f"{path} has {rate:,} samples a second; a recording has {SAMPLE_RATE:,}: resample it before",
            _CODE,
        )
    if width not in _WIDTHS:
        raise ModelError(f"{path} has samples of {8 * width} bits; they have 8, 16, 24 or 32", _CODE)
    if file.getnframes() > _MOST_SECONDS * SAMPLE_RATE:
        raise ModelError(f"{path} is longer than {_MOST_SECONDS // 3600} hours; cut it", _CODE)
    content = np.frombuffer(file.readframes(file.getnframes()), np.uint8)
    content = content[: len(content) // width * width]
    if not len(content):
        raise ModelError(f"{path} has no samples", _CODE)
    return _scaled(content, width)


def _scaled(content: np.ndarray, width: int) -> np.ndarray:
    """Little-endian numbers of so many bytes, of which those of one byte are unsigned, as parts of the largest."""
    if width == 1:
        return (content.astype(np.float32) - 128) / 128
    wide = np.zeros((len(content) // width, 4), np.uint8)
    wide[:, 4 - width :] = content.reshape(-1, width)
    return (wide.view("<i4")[:, 0] / 2.0**31).astype(np.float32)
