"""A recording in the windows that an encoder takes, one after another."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from model.errors import ModelError
from model.speech.spectrum import HOP, log_mel, windows_of
from model.speech.wav import SAMPLE_RATE

SECONDS_OF_COLUMN = HOP / SAMPLE_RATE


@dataclass(frozen=True)
class Recording:
    """Samples [count] of 16 kHz, in windows whose spectra have so many bands and columns.

    With `timestamps` a window may begin at any column, and the spectrum is that of the whole recording, not of each
    window: its loudest place is that of all.
    """

    samples: np.ndarray
    spectrum_shape: tuple[int, int]
    timestamps: bool = False

    @property
    def columns(self) -> int:
        """Of a window's spectrum: the first two of them give the encoder's first position."""
        return self.spectrum_shape[1]

    @property
    def seconds(self) -> float:
        """How long it is."""
        return len(self.samples) / SAMPLE_RATE

    @property
    def windows(self) -> int:
        """How many windows follow one another where each begins at the end of the one before."""
        return -(-len(self.samples) // (self.columns * HOP))

    @cached_property
    def spectrum(self) -> np.ndarray:
        """The log-mel spectrum, [bands, columns]: of the windows, or, with timestamps, of the whole recording."""
        windows = windows_of(self.samples, self.columns)
        parts = [self.samples] if self.timestamps and len(windows) > 1 else windows
        return np.concatenate([log_mel(each, self.spectrum_shape[0]) for each in parts], axis=1)

    @property
    def end(self) -> int:
        """The column behind the last one."""
        return int(self.spectrum.shape[1])

    def window(self, begins: int) -> tuple[np.ndarray, int]:
        """The spectrum of the window from a column on, filled up with zeros, and how much of it is the recording's."""
        part = self.spectrum[:, begins : begins + self.columns]
        filled = np.zeros(self.spectrum_shape, np.float32)
        filled[:, : part.shape[1]] = part
        return filled, part.shape[1]

    def span(self, begins: int) -> tuple[float, float]:
        """Begin and end of the window from a column on, in seconds of the recording, without its padding."""
        end = min((begins + self.columns) * SECONDS_OF_COLUMN, self.seconds)
        return begins * SECONDS_OF_COLUMN, end


def window_of_samples(samples: Any, rate: Any, spectrum_shape: tuple[int, ...]) -> np.ndarray:
    """The spectrum of one window, [bands, columns], from samples [count] of at most its length, of -1 to 1.

    Raises ModelError where the rate or the shape is another one, where there are no samples or too many, and where a
    sample is not a finite number.
    """
    bands, columns = spectrum_shape
    if rate != SAMPLE_RATE:
        raise ModelError(
            f"audio has {rate!r:.20} samples a second; {SAMPLE_RATE:,} are taken: resample it first"
        )
    try:
        found = np.asarray(samples, np.float32)
    except (TypeError, ValueError):
        raise ModelError("audio has samples that are no numbers") from None
    if found.ndim != 1 or not 0 < len(found) <= columns * HOP:
        raise ModelError(
            f"audio has samples of the shape {list(found.shape)}; a prompt comes with 1 to {columns * HOP:,} in a row"
        )
    if not np.isfinite(found).all():
        raise ModelError("audio has samples that are not finite")
    (window,) = windows_of(found, columns)
    return log_mel(window, bands)
