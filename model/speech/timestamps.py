"""Timestamps: the tokens of times that a Whisper may say next, and the segments that they cut a window into.

Beside the tokens of texts the vocabulary has one for every 0.02 s of a window, in order from 0 on. Rules and cuts are
those of transformers' `generate(..., return_timestamps=True)` (its page "Whisper", `WhisperTimeStampLogitsProcessor`),
and of the paper that it follows, Radford et al. 2022, appendix C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

STEP_SECONDS = 0.02
"""From one timestamp to the next, which is one position of the encoder."""
COLUMNS_PER_STEP = 2
"""Columns of a spectrum in that time."""


@dataclass(frozen=True)
class Timestamps:
    """`zero` is the id of the time 0, `latest` the last step with which a window may begin, `end` the end token."""

    zero: int
    latest: int | None
    end: int

    def allow(self, logits: np.ndarray, written: Sequence[int]) -> None:
        """Take the logits of what must not follow what was `written` in a window to -inf, in place.

        A window begins with a time. Times come in pairs, the end of a segment and the beginning of the next, but for
        the last one before the end token. They never decrease, and a segment does not end where it begins. Where all
        times together are likelier than the likeliest text, a time follows.
        """
        before = [each >= self.zero for each in written[-2:]]
        logits[self.zero - 1] = -np.inf  # no timestamps at all
        if before[-1:] == [True]:
            if before == [False, True]:
                logits[: self.end] = -np.inf
            else:
                logits[self.zero :] = -np.inf
        times = [each for each in written if each >= self.zero]
        if times:
            logits[self.zero : times[-1] + (before != [False, True])] = -np.inf
        if not written:
            logits[: self.zero] = -np.inf
            if self.latest is not None:
                logits[self.zero + self.latest + 1 :] = -np.inf
        if _log_sum(logits[self.zero :]) > logits[: self.zero].max():
            logits[: self.zero] = -np.inf


@dataclass(frozen=True)
class Segment:
    """What is said from `start` to `end`, seconds of the recording; `ids` have the tokens of times, too."""

    start: float
    end: float
    ids: tuple[int, ...]


def segments_of(ids: Sequence[int], zero: int, begins: int, columns: int) -> tuple[list[Segment], int]:
    """The segments of a window from its ids without an end token, and by how many columns the next window is later.

    The window begins at the column `begins` of the recording and holds `columns` of it. The words behind the last pair
    of times belong to a segment that goes on: they are left to the next window, which begins there. Where a window has
    no time but the first, transformers computes its end in float32, which makes some 0.02 s shorter; here it is exact.
    """
    offset = begins * STEP_SECONDS / COLUMNS_PER_STEP
    times = [each >= zero for each in ids]
    pairs = [place for place, both in enumerate(pairwise(times), 1) if all(both)]
    if not pairs:
        said = [each for each in ids if each >= zero]
        steps = said[-1] - zero if said and said[-1] != zero else columns // COLUMNS_PER_STEP
        return [Segment(offset, offset + steps * STEP_SECONDS, tuple(ids))], columns
    closed = times[-2:] == [False, True]
    cuts = [0, *pairs, len(ids)] if closed else [0, *pairs]
    found = []
    for begin, end in pairwise(cuts):
        opened = not closed and end == cuts[-1]  # transformers keeps the last pair together
        start, stop = (offset + (ids[at] - zero) * STEP_SECONDS for at in (begin, end - 1))
        found.append(Segment(start, stop, tuple(ids[begin : end + opened])))
    return found, columns if closed else (ids[cuts[-1] - 1] - zero) * COLUMNS_PER_STEP


def _log_sum(logits: np.ndarray) -> float:
    """The logarithm of the sum of the exponentials."""
    most = logits.max()
    if not np.isfinite(most):
        return float(most)
    return float(most + np.log(np.exp((logits - most).astype(np.float64)).sum()))
