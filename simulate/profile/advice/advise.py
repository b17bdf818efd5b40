"""Advice on a launch: changes of the kernel, each timed as a changed stream, in descending order of gain.

The other modules of this package yield the changes as `Edit` objects for each stream; this module times them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from simulate.hardware import Hardware
from simulate.profile.advice.edits import Edit
from simulate.profile.advice.order import interleave_chains, order_loads_by_first_use
from simulate.profile.advice.overlap import deepen_rotation, move_copies, widen_tiles
from simulate.profile.advice.partitions import spread_over_partitions
from simulate.profile.advice.products import narrow_products, transpose_by_dma
from simulate.profile.advice.repeats import compute_once
from simulate.profile.advice.transfers import enlarge_dmas, load_once
from simulate.profile.moments import format_line
from simulate.run.stream import Stream, TensorRecord
from simulate.timing import Reading, schedule

LEAST_GAIN = 0.02
"""Least gain of a piece of advice, as a share of the length."""


class AdviceKind(Enum):
    """Subject of a piece of advice; the member's value is the sentence that a report prints."""

    float32 = "give the Tensor engine 16-bit operands: it takes float32 at a quarter of the rate"
    reloads = "keep in SBUF what is loaded again"
    small_dmas = "merge DMAs that are below the efficient size"
    transposes = "transpose by DMA, and not on the Tensor engine"
    small_tiles = "give one instruction the work of several: tiles are too small"
    rotation = "give each iteration a tile of its own: rotation is too shallow"
    engines = "move copies to another engine: one is full while another idles"
    load_order = "issue loads in the order in which their tiles are used: the first use waits for later loads"
    chains = "issue the steps of independent chains in turn: engines wait for one chain after another"
    partitions = "lay elementwise tiles over all partitions"
    repeats = "compute once, before the loop, what every iteration computes again"


@dataclass(frozen=True, slots=True)
class Advice:
    """A change of the kernel: its kind, the lines to change, and the length of the launch after it.

    `lines` are names such as `kernel.py:12`, most changed events first. `before_ns` is the length without the
    change. `tensors` names the tensors in HBM to which it applies, if it could be made separately for each of
    several. `detail` says what was counted, such as "4 of 128 are used"; it is empty if the sentence says
    everything.
    """

    advice_kind: AdviceKind
    tensors: tuple[str, ...]
    lines: tuple[str, ...]
    length_ns: float
    before_ns: float
    detail: str = ""

    @property
    def gain(self) -> float:
        """Saved share of the length, such as 0.1; negative if the launch gets longer."""
        return 1.0 - self.length_ns / self.before_ns

    @property
    def sentence(self) -> str:
        """Sentence that says what to change, with `detail` and `tensors`."""
        detail = f" ({self.detail})" if self.detail else ""
        return self.advice_kind.value + detail + (f": {', '.join(self.tensors)}" if self.tensors else "")


_CHANGES: dict[AdviceKind, Callable[[Stream, Hardware], Iterator[Edit]]] = {
    AdviceKind.float32: narrow_products,
    AdviceKind.reloads: load_once,
    AdviceKind.small_dmas: enlarge_dmas,
    AdviceKind.transposes: transpose_by_dma,
    AdviceKind.small_tiles: widen_tiles,
    AdviceKind.rotation: deepen_rotation,
    AdviceKind.engines: move_copies,
    AdviceKind.load_order: order_loads_by_first_use,
    AdviceKind.chains: interleave_chains,
    AdviceKind.partitions: spread_over_partitions,
    AdviceKind.repeats: compute_once,
}


def make_advice(
    streams: Sequence[Stream], hardware: Hardware, reading: Reading, before_ns: float
) -> tuple[Advice, ...]:
    """Time all changes of the kernel that apply to a launch.

    Args:
        streams: Streams of the launch, one for each core.
        before_ns: Length of the unchanged launch.

    Returns:
        Changes that gain at least LEAST_GAIN, in descending order of gain. A change for several tensors must
            gain LEAST_GAIN more than the best change for a single tensor.
    """
    pieces = []
    for advice_kind, changes in _CHANGES.items():
        best: dict[tuple[str, ...], Advice] = {}
        for edits in zip_longest(*(changes(stream, hardware) for stream in streams)):
            first = next(edit for edit in edits if edit is not None)
            about, length = first.about, _time_edits(edits, streams, hardware, reading)
            piece = Advice(advice_kind, about, _list_lines(edits), length, before_ns, first.detail)
            fastest = best.get(about)
            if fastest is None or piece.length_ns < fastest.length_ns:
                best[about] = piece
        single_gain = max(
            (candidate.gain for candidate in best.values() if len(candidate.tensors) < 2), default=0.0
        )
        pieces += [
            candidate
            for candidate in best.values()
            if candidate.gain >= LEAST_GAIN + single_gain * (len(candidate.tensors) > 1)
        ]
    return tuple(sorted(pieces, key=lambda piece: (piece.length_ns, piece.advice_kind.value, piece.tensors)))


def _time_edits(
    edits: Sequence[Edit | None], streams: Sequence[Stream], hardware: Hardware, reading: Reading
) -> float:
    """Return the length of the launch with the streams changed by these edits, in ns.

    Args:
        edits: An edit for each stream, None for a stream that stays as it is.
    """
    changed, tensors = [], list[TensorRecord]()
    for edit, stream in zip(edits, streams):
        changed.append(stream if edit is None else edit.apply(tensors))
        tensors += [] if edit is None else edit.tensors
    return schedule(changed, hardware, reading).length_ns


def _list_lines(edits: Sequence[Edit | None]) -> tuple[str, ...]:
    """Return the names of the lines that issue changed events, most events first."""
    counts: Counter[str] = Counter()
    for edit in edits:
        if edit is not None:
            counts.update(
                format_line(edit.stream.lines[edit.stream.line_ids[event]])
                for event in edit.moved or edit.events
            )
    return tuple(name for name, _ in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])))
