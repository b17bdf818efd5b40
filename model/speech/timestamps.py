"""Timestamps of Whisper: rules for the next token, and the segments of a window.

The vocabulary has one token for every 0.02 s of a window, in order from 0 on. The rules follow transformers'
`generate(..., return_timestamps=True)` (its page "Whisper", `WhisperTimeStampLogitsProcessor`) and Radford et al. 2022,
appendix C.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

STEP_SECONDS = 0.02
"""Distance of timestamps, which is one position of the encoder."""
COLUMNS_PER_STEP = 2
"""Columns of a spectrum from one timestamp to the next."""


@dataclass(frozen=True)
class Timestamps:
    """Timestamp tokens of a vocabulary.

    zero    id of the timestamp 0
    latest  largest timestamp, in steps, with which a window may begin; None without a limit
    end     id of the end token
    """

    zero: int
    latest: int | None
    end: int

    def allow(self, logits: np.ndarray, written: Sequence[int]) -> None:
        """Set `logits` of tokens that must not follow `written` to -inf, in place.

        A window begins with a timestamp. Timestamps come in pairs, the end of a segment and the beginning of the next
        one, except for the last before the end token. They never decrease, and a segment has a length. If the sum of
        all timestamps' probabilities exceeds the largest probability of a text token, a timestamp follows.

        Args:
            logits: Logits of the next token, [vocabulary].
            written: Ids of the window so far.
        """
        before = [id >= self.zero for id in written[-2:]]
        logits[self.zero - 1] = -np.inf  # the token for "no timestamps"
        if before[-1:] == [True]:
            if before == [False, True]:
                logits[: self.end] = -np.inf
            else:
                logits[self.zero :] = -np.inf
        times = [id for id in written if id >= self.zero]
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
    """Segment of a recording from `start` to `end`, in seconds; `ids` include timestamp tokens."""

    start: float
    end: float
    ids: tuple[int, ...]


def split_into_segments(
    ids: Sequence[int], zero: int, begins: int, columns: int
) -> tuple[list[Segment], int]:
    """Split the ids of a window into segments.

    Text after the last pair of timestamps belongs to a segment that continues. It is dropped, and the next window
    begins at that pair. For a window without timestamps after the first, transformers computes the end in float32,
    which makes some ends 0.02 s earlier; here it is exact.

    Args:
        ids: Ids of the window without an end token.
        zero: Id of the timestamp 0.
        begins: First column of the window in the recording.
        columns: Columns of the window without padding.

    Returns:
        The segments, with times in seconds of the recording, and the columns from the beginning of this window to the
        beginning of the next one.
    """
    offset = begins * STEP_SECONDS / COLUMNS_PER_STEP
    is_time = [id >= zero for id in ids]
    pairs = [index for index, both in enumerate(pairwise(is_time), 1) if all(both)]
    if not pairs:
        last = next((id for id in reversed(ids) if id >= zero), zero)
        steps = last - zero if last != zero else columns // COLUMNS_PER_STEP
        return [Segment(offset, offset + steps * STEP_SECONDS, tuple(ids))], columns
    is_closed = is_time[-2:] == [False, True]
    cuts = [0, *pairs, len(ids)] if is_closed else [0, *pairs]
    segments = []
    for begin, end in pairwise(cuts):
        has_pair = not is_closed and end == cuts[-1]  # transformers keeps the last pair together
        start, stop = (offset + (id - zero) * STEP_SECONDS for id in (ids[begin], ids[end - 1]))
        segments.append(Segment(start, stop, tuple(ids[begin : end + has_pair])))
    return segments, columns if is_closed else (ids[cuts[-1] - 1] - zero) * COLUMNS_PER_STEP


def _log_sum(logits: np.ndarray) -> float:
    """Return the logarithm of the sum of exponentials in float64; -inf if all logits are -inf."""
    largest = logits.max()
    if not np.isfinite(largest):
        return float(largest)
    return float(largest + np.log(np.exp((logits - largest).astype(np.float64)).sum()))
