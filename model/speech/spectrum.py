"""Log-mel spectra, the inputs of an encoder of speech.

A column is computed every 160 samples from the 400 samples around them. Their power spectrum is summed over triangular
bands of the mel scale. Logarithms of the sums are limited to eight decades below the largest value of the samples.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from model.speech.wav import SAMPLE_RATE

HOP = 160
"""Distance of columns in samples."""

_FRAME = 400
_CHUNK = 3000  # columns, a window of 30 s: frames overlap, so all frames of a long recording take gigabytes
_MIN_POWER = 1e-10
_DECADES = 8.0
_LINEAR_UP_TO = 1000.0  # Hz; Slaney's mel scale
_MELS_PER_HZ = 3 / 200
_LOG_STEP = np.log(6.4) / 27


def split_into_windows(samples: np.ndarray, columns: int) -> list[np.ndarray]:
    """Return the samples [count] in windows of `columns` spectrum columns, float32 [columns * HOP] each.

    The last window is padded with silence; without samples there is no window.
    """
    size = columns * HOP
    padded = np.pad(samples.astype(np.float32), (0, -len(samples) % size))
    return list(padded.reshape(-1, size))


def log_mel(samples: np.ndarray, bands: int) -> np.ndarray:
    """Return the log-mel spectrum of samples [count] with `bands` bands of frequencies.

    Returns:
        [bands, count // HOP] float32, about -1 to 1; samples after the last full column are ignored.
    """
    padded = np.pad(samples.astype(np.float64), _FRAME // 2, mode="reflect")
    frames = np.lib.stride_tricks.sliding_window_view(padded, _FRAME)[: len(samples) // HOP * HOP : HOP]
    hann = 0.5 - 0.5 * np.cos(2 * np.pi * np.arange(_FRAME) / _FRAME)
    powers = (
        np.abs(np.fft.rfft(frames[begin : begin + _CHUNK] * hann)) ** 2 @ compute_mel_bands(bands)
        for begin in range(0, len(frames), _CHUNK)
    )
    logs = np.log10(np.maximum(np.concatenate([*powers]), _MIN_POWER)).T
    clamped = np.maximum(logs, logs.max() - _DECADES)
    return ((clamped + 4) / 4).astype(np.float32)


@lru_cache(maxsize=2)
def compute_mel_bands(bands: int) -> np.ndarray:
    """Return the weights [201 frequencies, bands] float64 that sum a power spectrum to mel bands.

    A band is a triangle between the centres of its neighbours; all triangles have the same area.
    """
    frequencies = np.linspace(0, SAMPLE_RATE / 2, _FRAME // 2 + 1)
    centres = _to_hertz(np.linspace(0, _to_mels(SAMPLE_RATE / 2), bands + 2))
    low, middle, high = centres[:-2], centres[1:-1], centres[2:]
    column = frequencies[:, None]
    rising, falling = (column - low) / (middle - low), (high - column) / (high - middle)
    return np.maximum(0, np.minimum(rising, falling)) * 2 / (high - low)


def _to_mels(hertz: float) -> float:
    """Convert a frequency of at least 1,000 Hz, above the linear part of Slaney's mel scale, to mels."""
    return float(_LINEAR_UP_TO * _MELS_PER_HZ + np.log(hertz / _LINEAR_UP_TO) / _LOG_STEP)


def _to_hertz(mels: np.ndarray) -> np.ndarray:
    """Convert mels of Slaney's scale to frequencies in Hz: linear up to 1,000 Hz, exponential above."""
    border = _LINEAR_UP_TO * _MELS_PER_HZ
    beyond = _LINEAR_UP_TO * np.exp(_LOG_STEP * (mels - border))
    return np.where(mels < border, mels / _MELS_PER_HZ, beyond)
