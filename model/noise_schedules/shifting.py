"""Shift of a flow's noise levels by the number of image tokens, as in FLUX."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np

from model.errors import ModelError
from model.noise_schedules.fields import MOST_TIMESTEPS, ScheduleFields

BASE_SHIFT, MAX_SHIFT = 0.5, 1.15
BASE_TOKENS, MAX_TOKENS = 256, 4096


class ShiftType(Enum):
    """How mu shifts: EXPONENTIAL by the factor exp(mu), LINEAR by the factor mu."""

    EXPONENTIAL = "exponential"
    LINEAR = "linear"


@dataclass(frozen=True)
class DynamicShift:
    """Shift whose parameter mu is linear in the number of image tokens.

    base_shift, max_shift    mu at `base_tokens` and `max_tokens`
    base_tokens, max_tokens  numbers of image tokens: base_image_seq_len and max_image_seq_len
    """

    base_shift: float = BASE_SHIFT
    max_shift: float = MAX_SHIFT
    base_tokens: int = BASE_TOKENS
    max_tokens: int = MAX_TOKENS
    shift_type: ShiftType = ShiftType.EXPONENTIAL

    def find_factor(self, tokens: int | None) -> float:
        """Return the factor of the shift for a number of image tokens.

        Raises:
            ModelError: The number of tokens is unknown, or gives a linear shift that is not above 0.
        """
        if tokens is None:
            raise ModelError(
                "use_dynamic_shifting needs the number of image tokens; give it to plan as tokens"
            )
        slope = (self.max_shift - self.base_shift) / (self.max_tokens - self.base_tokens)
        mu = tokens * slope + (self.base_shift - slope * self.base_tokens)
        if self.shift_type is ShiftType.EXPONENTIAL:
            if mu > math.log(np.finfo(np.float32).max):
                raise ModelError(f"{tokens} image tokens give mu {mu:g}, beyond float32; use fewer tokens")
            return math.exp(mu)
        if mu <= 0:
            raise ModelError(
                f"{tokens} image tokens give mu {mu:g}; a linear shift must be above 0; use more tokens"
            )
        return mu

    def apply(self, sigmas: np.ndarray, tokens: int | None) -> np.ndarray:
        """Return the shifted noise levels for a number of image tokens.

        Raises:
            ModelError: As `find_factor`.
        """
        factor = self.find_factor(tokens)
        return factor / (factor + (1 / sigmas - 1))


def read_dynamic_shift(fields: ScheduleFields) -> DynamicShift | None:
    """Return the shift by image tokens; None unless use_dynamic_shifting is true.

    Raises:
        ModelError: A field has the wrong type or range.
    """
    shift = DynamicShift(
        fields.read_number("base_shift", BASE_SHIFT),
        fields.read_number("max_shift", MAX_SHIFT),
        fields.read_count("base_image_seq_len", BASE_TOKENS),
        fields.read_count("max_image_seq_len", MAX_TOKENS, most=100 * MOST_TIMESTEPS),
        fields.read_choice("time_shift_type", ShiftType.EXPONENTIAL),
    )
    if shift.base_tokens >= shift.max_tokens:
        raise fields.refuse("base_image_seq_len", f"{shift.base_tokens} is not below max_image_seq_len")
    return shift if fields.read_flag("use_dynamic_shifting") else None
