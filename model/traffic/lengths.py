"""Distributions of prompt and output lengths of `nkw traffic`: read from options, and drawn from."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from model.errors import ModelError

LONGEST = 2**20
"""Tokens of the longest prompt or output."""

_FORMS = "512, 128..1024 (uniform), exp:512 (exponential, by its mean) or lognormal:512,0.8 (median, sigma)"
_FAMILIES = {("", 1): "constant", ("", 2): "uniform", ("exp", 1): "exp", ("lognormal", 2): "lognormal"}
"""Families of distributions, by the prefix of the option and the number of parameters."""


@dataclass(frozen=True)
class Lengths:
    """Distribution of lengths in whole tokens, from 1 to 2^20.

    `family` is constant, uniform, exp or lognormal. `first` is the constant, the minimum, the mean or the median of
    that family. `second` is the maximum of a uniform distribution, or sigma of a lognormal one; 0 otherwise.
    """

    family: str
    first: float
    second: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read a distribution from the text of an option.

        512 is a constant, 128..1024 uniform, exp:512 exponential by its mean, lognormal:512,0.8 lognormal by its median
        and sigma.

        Raises:
            ModelError: If the text has another form, a length is not from 1 to 2^20, or sigma is not from 0 to 10.
        """
        prefix, _, numbers = text.rpartition(":")
        read, separator = (float, ",") if prefix else (int, "..")
        try:
            parameters = [read(number) for number in numbers.split(separator)]
        except ValueError:
            parameters = []
        family = _FAMILIES.get((prefix, len(parameters)), "")
        first, second = (*parameters, 0.0, 0.0)[:2]
        is_in_range = 1 <= first <= (second if family == "uniform" else first) <= LONGEST
        if not family or not is_in_range or (family == "lognormal" and not 0 <= second <= 10):
            raise ModelError(f"lengths {text!r:.60}; write {_FORMS}, of 1 to {LONGEST:,} tokens")
        return cls(family, first, second)

    def draw(self, count: int, generator: np.random.Generator) -> list[int]:
        """Return `count` lengths drawn with `generator`, in whole tokens and clipped to 1 to 2^20."""
        if self.family == "constant":
            return [int(self.first)] * count
        if self.family == "uniform":
            lengths = generator.integers(int(self.first), int(self.second) + 1, size=count).astype(float)
        elif self.family == "exp":
            lengths = generator.exponential(self.first, size=count)
        else:
            lengths = generator.lognormal(math.log(self.first), self.second, size=count)
        return np.clip(np.rint(lengths), 1, LONGEST).astype(int).tolist()
