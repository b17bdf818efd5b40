"""Log-mel spectra: what an encoder of speech is given of a window of samples.

Every 160 samples the power of 400 around them, by frequency; bands of the mel scale take triangles of it; of that the
logarithm, at most eight decades below the largest of the window.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from model.speech.wav import SAMPLE_RATE

HOP = 160
"""Samples from one column to the next."""

_FRAME = 400
_AT_ONCE = 3000  # columns, a window of 30 s: frames overlap, and those of a long recording take gigabytes
_LEAST_POWER = 1e-10
_DECADES = 8.0
_LINEAR_UP_TO = 1000.0  # Hz; of the mel scale by Slaney
_MELS_PER_HZ = 3 / 200
_LOG_STEP = np.log(6.4) / 27


def windows_of(samples: np.ndarray, columns: int) -> list[np.ndarray]:
    """The samples in windows of so many columns; the last one is filled up with silence."""
    size = columns * HOP
    count = -(-len(samples) // size)
    padded = np.zeros(count * size, np.float32)
    padded[: len(samples)] = samples
    return list(padded.reshape(count, size))


def log_mel(samples: np.ndarray, bands: int) -> np.ndarray:
    """The log-mel spectrum of samples, [bands, columns] float32, about -1 to 1; a part of a column is left out."""
    padded = np.pad(samples.astype(np.float64), _FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[: len(samples) // HOP * HOP : HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)
    powers = (
        np.abs(np.fft.rfft(frames[begin : begin + _AT_ONCE] * hann)) ** 2 @ mel_bands(bands)
        for begin in range(0, len(frames), _AT_ONCE)
    )
    logs = np.log10(np.maximum(np.concatenate([*powers]), _LEAST_POWER)).T
    clamped = np.maximum(logs, logs.max() - _DECADES)
    return ((clamped + 4) / 4).astype(np.float32)


@lru_cache(maxsize=2)
def mel_bands(bands: int) -> np.ndarray:
    """[frequencies, bands]: triangles between neighbouring centres, each of equal area."""
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _FRAME // 2 + 1)
    centres = _hertz(np.linspace(0, _mels(SAMPLE_RATE / 2), bands + 2))
    low, middle, high = centres[:-2], centres[1:-1], centres[2:]
    at = frequencies[:, None]
    rising, falling = (at - low) / (middle - low), (high - at) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


def _mels(hertz: float) -> float:
    """On the mel scale, for a frequency beyond its linear part."""
    return float(_LINEAR_UP_TO * _MELS_PER_HZ + np.log(hertz / _LINEAR_UP_TO) / _LOG_STEP)


def _hertz(mels: np.ndarray) -> np.ndarray:
    """The frequencies of places on the mel scale: linear up to 1,000 Hz, logarithmic beyond."""
    border = _LINEAR_UP_TO * _MELS_PER_HZ
    beyond = _LINEAR_UP_TO * np.exp(_LOG_STEP * (mels - border))
    return np.where(mels < border, mels / _MELS_PER_HZ, beyond)
