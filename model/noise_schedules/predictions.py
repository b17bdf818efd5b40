"""Clean images from the outputs of a model: prediction types, learned variances, clipping and thresholding."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from model.errors import ModelError
from model.noise_schedules.fields import ScheduleFields


class Prediction(Enum):
    """Quantity that the model predicts, by its diffusers name."""

    EPSILON = "epsilon"
    SAMPLE = "sample"
    VELOCITY = "v_prediction"
    FLOW = "flow_prediction"


DIFFUSION_PREDICTIONS = (Prediction.EPSILON, Prediction.SAMPLE, Prediction.VELOCITY)
"""Prediction types of schedules that are no flows."""


@dataclass(frozen=True)
class Limits:
    """Bounds that a schedule puts on predicted clean images; at most one of the two is applied.

    clip      largest magnitude of an element; None for no clipping
    quantile  quantile of an image's magnitudes that dynamic thresholding divides by; None for no thresholding
    highest   largest number that thresholding divides by
    """

    clip: float | None = None
    quantile: float | None = None
    highest: float = 1.0

    def apply(self, clean: np.ndarray) -> np.ndarray:
        """Return clean images [images, ...] within the bounds."""
        if self.quantile is not None:
            return threshold(clean, self.quantile, self.highest)
        if self.clip is not None:
            bound = clean.dtype.type(self.clip)
            return clean.clip(-bound, bound)
        return clean


def read_limits(
    fields: ScheduleFields, clips: bool = False, default_clip: bool = False, thresholds: bool = True
) -> Limits:
    """Return the bounds on clean images that a configuration asks for. Thresholding takes precedence.

    Args:
        fields: the fields of the configuration.
        clips: whether the class reads clip_sample.
        default_clip: the class's default of clip_sample.
        thresholds: whether the class reads thresholding.

    Raises:
        ModelError: A field has the wrong type or range.
    """
    clip = quantile = None
    highest = 1.0
    if clips:
        bound = fields.read_number("clip_sample_range", 1.0, above=0)
        clip = bound if fields.read_flag("clip_sample", default_clip) else None
    if thresholds:
        ratio = fields.read_number("dynamic_thresholding_ratio", 0.995, above=0)
        if ratio > 1:
            raise fields.refuse("dynamic_thresholding_ratio", f"{ratio:g} is no quantile; use at most 1")
        highest = fields.read_number("sample_max_value", 1.0, above=0)
        quantile = ratio if fields.read_flag("thresholding") else None
    return Limits(clip, quantile, highest)


def threshold(clean: np.ndarray, quantile: float, highest: float) -> np.ndarray:
    """Return clean images [images, ...] after dynamic thresholding (arXiv 2205.11487).

    Each image is clipped to a quantile of its magnitudes, at least 1 and at most `highest`, and divided by it.
    """
    dtype = clean.dtype.type
    magnitudes = np.sort(np.abs(clean.reshape(len(clean), -1)), axis=1)
    last = magnitudes.shape[1] - 1
    rank = dtype(quantile) * dtype(last)
    low = min(int(rank), last)
    below, above = magnitudes[:, low], magnitudes[:, min(low + 1, last)]
    # torch interpolates from the nearer of the two magnitudes, and rounds product and sum once.
    weight = np.float64(rank - dtype(low))
    nearest, distance = (below, weight) if weight < 0.5 else (above, weight - 1)
    bounds = (nearest + distance * (above - below).astype(np.float64)).astype(dtype)
    bounds = np.minimum(np.maximum(bounds, dtype(1)), dtype(highest))
    bounds = bounds.reshape(-1, *(1,) * (clean.ndim - 1))
    return np.clip(clean, -bounds, bounds) / bounds


def predict_clean(
    prediction: Prediction, output: np.ndarray, noisy: np.ndarray, signal: Any, noise: Any
) -> np.ndarray:
    """Return the clean images of a variance-preserving process.

    Args:
        prediction: quantity that the model predicts.
        output: the model's prediction.
        noisy: the images given to the model: signal x clean + noise x Gaussian.
        signal: scale of the clean image, a scalar of the images' dtype.
        noise: standard deviation of the noise, a scalar of the images' dtype.
    """
    if prediction is Prediction.EPSILON:
        return (noisy - noise * output) / signal
    if prediction is Prediction.VELOCITY:
        return signal * noisy - noise * output
    if prediction is Prediction.FLOW:
        return noisy - noise * output
    return output


def predict_noise(
    prediction: Prediction, output: np.ndarray, noisy: np.ndarray, signal: Any, noise: Any
) -> np.ndarray:
    """Return the noise of a variance-preserving process; the arguments are those of `predict_clean`."""
    if prediction is Prediction.EPSILON:
        return output
    if prediction is Prediction.VELOCITY:
        return signal * output + noise * noisy
    return (noisy - signal * output) / noise


def predict_clean_at_sigma(
    prediction: Prediction, output: np.ndarray, noisy: np.ndarray, sigma: Any
) -> np.ndarray:
    """Return the clean images of a variance-exploding process.

    Args:
        prediction: EPSILON, SAMPLE or VELOCITY.
        output: the model's prediction for the scaled images.
        noisy: the images before scaling: clean + sigma x Gaussian.
        sigma: standard deviation of the noise, a scalar of the images' dtype.
    """
    if prediction is Prediction.EPSILON:
        return noisy - sigma * output
    if prediction is Prediction.VELOCITY:
        variance = sigma * sigma + noisy.dtype.type(1)
        return output * (-sigma / np.sqrt(variance)) + noisy / variance
    return output


def split_variance(output: np.ndarray, images: np.ndarray) -> tuple[np.ndarray, np.ndarray | None]:
    """Return the prediction and the learned variance of a model's output; the variance is None if there is none.

    A model with a learned variance, such as DiT, returns twice as many channels (axis 1) as the images have.

    Raises:
        ModelError: The output has another shape.
    """
    if output.shape == images.shape:
        return output, None
    channels = images.shape[1] if images.ndim > 1 else 0
    if output.shape == (*images.shape[:1], 2 * channels, *images.shape[2:]):
        return output[:, :channels], output[:, channels:]
    raise ModelError(
        f"the model's output has the shape {list(output.shape)} for images of {list(images.shape)}; it must have the "
        "same shape, or twice the channels (axis 1)"
    )
