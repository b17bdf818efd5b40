"""Advice on a launch: changes of the kernel, each timed as a changed stream, the largest gain first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import zip_longest

from simulate.hardware import Hardware
from simulate.profile.advice.edits import Edit
from simulate.profile.advice.order import chains_in_turn, loads_by_first_use
from simulate.profile.advice.overlap import deeper_rotation, other_engines, wider_tiles
from simulate.profile.advice.partitions import all_partitions
from simulate.profile.advice.products import narrow_products, transposes_by_dma
from simulate.profile.advice.repeats import computed_once
from simulate.profile.advice.transfers import larger_dmas, loads_once
from simulate.profile.moments import named
from simulate.run.stream import Stream, TensorRecord
from simulate.timing import Reading, schedule

LEAST_GAIN = 0.02
"""Advice that would shorten the launch by a smaller part of its length is not given."""


class Kind(Enum):
    """What a piece of advice is about; the value is the sentence that a report prints."""

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
    """One change of the kernel: what it is, the lines it is about, and the length that the launch has with it.

    tensors: which tensors in HBM it is about, where it could be made for each of several. detail: what was counted,
    such as "4 of 128 are used"; empty where the sentence says everything.
    """

    kind: Kind
    tensors: tuple[str, ...]
    lines: tuple[str, ...]
    length_ns: float
    before_ns: float
    detail: str = ""

    @property
    def gain(self) -> float:
        """The part of the length that is saved."""
        return 1.0 - self.length_ns / self.before_ns

    @property
    def sentence(self) -> str:
        """What to change."""
        detail = f" ({self.detail})" if self.detail else ""
        return self.kind.value + detail + (f": {', '.join(self.tensors)}" if self.tensors else "")


_CHANGES: dict[Kind, Callable[[Stream, Hardware], Iterator[Edit]]] = {
    Kind.float32: narrow_products,
    Kind.reloads: loads_once,
    Kind.small_dmas: larger_dmas,
    Kind.transposes: transposes_by_dma,
    Kind.small_tiles: wider_tiles,
    Kind.rotation: deeper_rotation,
    Kind.engines: other_engines,
    Kind.load_order: loads_by_first_use,
    Kind.chains: chains_in_turn,
    Kind.partitions: all_partitions,
    Kind.repeats: computed_once,
}


def advice(
    streams: Sequence[Stream], hardware: Hardware, reading: Reading, before_ns: float
) -> tuple[Advice, ...]:
    """Everything that gains at least LEAST_GAIN of the length, the largest gain first.

    A change for several tensors has to gain LEAST_GAIN more than that for one of them.
    """
    found = []
    for kind, changes in _CHANGES.items():
        best: dict[tuple[str, ...], Advice] = {}
        for edits in zip_longest(*(changes(stream, hardware) for stream in streams)):
            first = next(edit for edit in edits if edit is not None)
            about, length = first.about, _length(edits, streams, hardware, reading)
            piece = Advice(kind, about, _lines(edits), length, before_ns, first.detail)
            known = best.get(about)
            if known is None or piece.length_ns < known.length_ns:
                best[about] = piece
        alone = max((each.gain for each in best.values() if len(each.tensors) < 2), default=0.0)
        found += [each for each in best.values() if each.gain >= LEAST_GAIN + alone * (len(each.tensors) > 1)]
    return tuple(sorted(found, key=lambda each: (each.length_ns, each.kind.value, each.tensors)))


def _length(
    edits: Sequence[Edit | None], streams: Sequence[Stream], hardware: Hardware, reading: Reading
) -> float:
    """The length of the launch with these changes of its streams."""
    changed, tensors = [], list[TensorRecord]()
    for edit, stream in zip(edits, streams):
        changed.append(stream if edit is None else edit.done(tensors))
        tensors += [] if edit is None else edit.tensors
    return schedule(changed, hardware, reading).length_ns


def _lines(edits: Sequence[Edit | None]) -> tuple[str, ...]:
    """The lines of the kernel that the changes are about, those with most events first."""
    counts: Counter[str] = Counter()
    for edit in edits:
        if edit is not None:
            counts.update(
                named(edit.stream.lines[edit.stream.line_ids[event]]) for event in edit.moved or edit.events
            )
    return tuple(name for name, _ in sorted(counts.items(), key=lambda each: (-each[1], each[0])))
