"""Gains from computing once: tiles that an iteration computes again from the same contents.

An `Edit` holds the changes of a stream, whose events are the instructions of a launch.
"""

from __future__ import annotations

from collections.abc import Iterator

from simulate.hardware import Hardware
from simulate.isa.template import READ
from simulate.memory import MemoryRegion
from simulate.profile.advice.edits import Edit, Uses, collect_uses
from simulate.profile.advice.transfers import find_load, fits_sbuf
from simulate.run.stream import Stream


def compute_once(stream: Stream, hardware: Hardware) -> Iterator[Edit]:
    """Yield an edit without events that compute a tile again; readers take the first tile with equal contents.

    Two tiles have equal contents if the same instructions write them from unwritten inputs in HBM, or from
    tiles with equal contents. Only tiles that are fully written before their first read qualify. A load is
    left out only together with the instructions that it feeds; `load_once` covers repeated loads. Nothing is
    yielded without such tiles, or if the kept tiles do not fit into SBUF.
    """
    used = collect_uses(stream)
    contents = _Contents(stream, used)
    first: dict[object, int] = {}
    first_equal: dict[int, int] = {}
    for tile in sorted(contents.keys, key=lambda tile: used[tile][0][0]):
        kept = first.setdefault(contents.keys[tile], tile)
        if kept != tile:
            first_equal[tile] = kept
    edit = Edit(stream)
    computes = 0
    for tile, kept in first_equal.items():
        writers = {event for event, writes in used[tile] if writes}
        readers = {event for event, writes in used[tile] if not writes}
        only_loaded = all(find_load(stream, event) is not None for event in writers)
        if only_loaded and not all(_writes_repeated_tile(stream, event, first_equal) for event in readers):
            continue
        computes += not only_loaded
        for event in writers:
            edit.leave_out(event)
        for event in readers - writers - edit.events.keys():
            edit.rename(event, tile, kept)
    if computes and fits_sbuf(edit, hardware):
        edit.detail = f"{computes} tiles equal earlier ones"
        yield edit


def _writes_repeated_tile(stream: Stream, event: int, first_equal: dict[int, int]) -> bool:
    """Return whether all tiles that an event writes have the contents of earlier tiles.

    Args:
        first_equal: For each repeated tile, the first tile with equal contents.
    """
    template, tensors = stream.template(event), stream.tensors_of(event)
    return all(tensors[write] in first_equal for write in template.writes)


class _Contents:
    """Numbers of the contents of tiles, equal for equal contents, in `keys` by tile.

    Tiles with unknown contents have no number: only tiles that are written first and then only read have one.
    """

    def __init__(self, stream: Stream, used: Uses) -> None:
        self.keys: dict[int, int] = {}
        self._numbers: dict[object, int] = {}
        for tile in sorted(used, key=lambda tile: used[tile][0][0]):
            key = self._key(stream, used, tile) if stream.tensors[tile].buffer.on_chip else None
            if key is not None:
                shape = stream.tensors[tile].shape, stream.tensors[tile].dtype, stream.tensors[tile].buffer
                self.keys[tile] = self._numbers.setdefault((shape, key), len(self._numbers))

    def _key(self, stream: Stream, used: Uses, tile: int) -> object | None:
        """Return a hashable description of what is written to a tile, equal for equal contents.

        Returns:
            None if the contents are unknown, or depend on more than the operands of the events that write the
                tile.
        """
        events = used[tile]
        writers = list(dict.fromkeys(event for event, writes in events if writes))
        readers = {event for event, writes in events if not writes} - set(writers)
        if not writers or (readers and min(readers) < writers[-1]):
            return None
        steps = []
        for event in writers:
            template, plan = stream.template(event), stream.template(event).plan
            if not template.direct or plan.state is not None or plan.effects.random is not None:
                return None
            if event in stream.rendezvous or len(template.writes) != 1:
                return None
            inputs = []
            for box, tensor in zip(template.boxes, stream.tensors_of(event)):
                if box[0] != READ:
                    continue
                source = "itself" if tensor == tile else self._source(stream, used, tensor)
                if source is None:
                    return None
                inputs.append(source)
            steps.append((stream.template_ids[event], event in stream.accumulated, tuple(inputs)))
        return tuple(steps)

    def _source(self, stream: Stream, used: Uses, tensor: int) -> object | None:
        """Return a hashable description of an input, equal for equal contents.

        Returns:
            None for HBM that the launch writes, for registers and for tiles of unknown contents.
        """
        buffer = stream.tensors[tensor].buffer
        if buffer.on_chip:
            return self.keys.get(tensor)
        is_constant = buffer is not MemoryRegion.register and not any(writes for _, writes in used[tensor])
        return ("hbm", tensor) if is_constant else None
