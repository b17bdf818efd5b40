"""Lengths of prompts and outputs: the distributions that an option names."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from model.errors import ModelError

LONGEST = 2**20
"""Tokens of a prompt or of an output."""

FORMS = "512, 128..1024 (uniform), exp:512 (exponential, by its mean) or lognormal:512,0.8 (median, sigma)"


@dataclass(frozen=True)
class Lengths:
    """A distribution of whole numbers from 1 to 2^20: `kind` is constant, uniform, exp or lognormal."""

    kind: str
    first: float
    second: float = 0.0

    @classmethod
    def parsed(cls, text: str) -> Lengths:
        """The distribution that a text names, in one of the FORMS; ModelError for another text."""
        wrong = ModelError(f"lengths {text!r:.60}; write {FORMS}, of 1 to {LONGEST:,} tokens")
        kind, _, rest = text.rpartition(":")
        try:
            if not kind and ".." in rest:
                low, high = (int(each) for each in rest.split(".."))
                lengths = cls("uniform", low, high)
            elif not kind:
                lengths = cls("constant", int(rest))
            elif kind == "exp":
                lengths = cls(kind, float(rest))
            elif kind == "lognormal":
                median, sigma = (float(each) for each in rest.split(","))
                lengths = cls(kind, median, sigma)
            else:
                raise wrong
        except ValueError:
            raise wrong from None
        last = lengths.second if kind == "" and ".." in rest else lengths.first
        sane = 1 <= lengths.first <= last <= LONGEST
        if not sane or (kind == "lognormal" and not 0 <= lengths.second <= 10):
            raise wrong
        return lengths

    def draw(self, count: int, draw: np.random.Generator) -> list[int]:
        """So many lengths."""
        if self.kind == "constant":
            return [int(self.first)] * count
        if self.kind == "uniform":
            return [int(each) for each in draw.integers(int(self.first), int(self.second) + 1, size=count)]
        if self.kind == "exp":
            values = draw.exponential(self.first, size=count)
        else:
            values = draw.lognormal(math.log(self.first), self.second, size=count)
        return [int(each) for each in np.clip(np.rint(values), 1, LONGEST)]
