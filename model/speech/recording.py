"""Recordings and their windows, whose spectra are the inputs of an encoder.

A window is the longest piece of a recording that the encoder takes at once, 30 s for Whisper. A column of a spectrum
covers 160 samples, 10 ms. `nkw transcribe` and the HTTP routes of audio cut recordings into windows here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from model.errors import ModelError
from model.speech.spectrum import HOP, log_mel, split_into_windows
from model.speech.wav import SAMPLE_RATE

SECONDS_OF_COLUMN = HOP / SAMPLE_RATE


@dataclass(frozen=True)
class Recording:
    """Recording that is transcribed window by window.

    samples         [count] float32, 16,000 per second
    spectrum_shape  bands and columns of the spectrum of a window
    timestamps      whether a window may begin at any column. The spectrum is then computed of the whole recording, so
                    that its maximum limits all windows; otherwise of each window by itself
    """

    samples: np.ndarray
    spectrum_shape: tuple[int, int]
    timestamps: bool = False

    @property
    def columns(self) -> int:
        """Columns of the spectrum of a window; two columns make one position of the encoder."""
        return self.spectrum_shape[1]

    @property
    def seconds(self) -> float:
        """Length of the recording in seconds."""
        return len(self.samples) / SAMPLE_RATE

    @property
    def windows(self) -> int:
        """Number of windows if every window begins at the end of the window before it."""
        return -(-len(self.samples) // (self.columns * HOP))

    @cached_property
    def spectrum(self) -> np.ndarray:
        """Log-mel spectrum [bands, columns of all windows] float32, computed at the first use.

        It is computed of each padded window by itself, or with `timestamps` of a longer recording as a whole.
        """
        windows = split_into_windows(self.samples, self.columns)
        if self.timestamps and len(windows) > 1:
            windows = [self.samples]
        return np.concatenate([log_mel(window, self.spectrum_shape[0]) for window in windows], axis=1)

    @property
    def end(self) -> int:
        """Number of columns of `spectrum`.

        Padding of the last window counts, except with `timestamps` and several windows.
        """
        return int(self.spectrum.shape[1])

    def cut_window(self, begins: int) -> tuple[np.ndarray, int]:
        """Return the spectrum [bands, columns] of the window that begins at column `begins`, and its real columns.

        After the end of the recording the spectrum is padded with zeros; the second number counts the others.
        """
        columns = self.spectrum[:, begins : begins + self.columns]
        padding = self.columns - columns.shape[1]
        return np.pad(columns, ((0, 0), (0, padding))), columns.shape[1]

    def find_times(self, begins: int) -> tuple[float, float]:
        """Return (begin, end) in seconds of the window that begins at column `begins`, cut at the recording's end."""
        end = min((begins + self.columns) * SECONDS_OF_COLUMN, self.seconds)
        return begins * SECONDS_OF_COLUMN, end


def compute_window_spectrum(samples: Any, rate: Any, spectrum_shape: tuple[int, ...]) -> np.ndarray:
    """Return the log-mel spectrum [bands, columns] float32 of one window, padded with silence after the samples.

    Args:
        samples: Samples [count] from -1 to 1, at most one window of them.
        rate: Samples per second; has to be 16,000.
        spectrum_shape: (bands, columns) of a window.

    Raises:
        ModelError: The rate is another one, the samples have several axes, there are none or too many, or a sample is
            not a finite number.
    """
    bands, columns = spectrum_shape
    if rate != SAMPLE_RATE:
        raise ModelError(
            f"audio has {rate!r:.20} samples a second; {SAMPLE_RATE:,} are taken: resample it first"
        )
    try:
        array = np.asarray(samples, np.float32)
    except (TypeError, ValueError):
        raise ModelError("audio has samples that are no numbers; give floats from -1 to 1") from None
    if array.ndim != 1 or not 0 < len(array) <= columns * HOP:
        raise ModelError(
            f"audio has samples of the shape {list(array.shape)}; a prompt comes with 1 to {columns * HOP:,} in a row"
        )
    if not np.isfinite(array).all():
        raise ModelError("audio has samples that are not finite; give floats from -1 to 1")
    (window,) = split_into_windows(array, columns)
    return log_mel(window, bands)
