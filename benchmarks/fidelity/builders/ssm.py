"""Builder of the selective scan of Mamba."""

from __future__ import annotations

from benchmarks.fidelity.builders.variants import is_late_step, refuse_bare_speed_up
from benchmarks.fidelity.case import Case, NotCovered, Run, Schedule, array, chip_of, dtype_of, quantity_of
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import mamba


def build(entry: Entry) -> Case:
    """Return the case of a scan with the loop over states or the loop over channels outermost.

    With channels outermost the sequence may be in chunks. Raises NotCovered if the sequence, the channels or the
    states are not given.
    """
    refuse_bare_speed_up(entry)
    chip = chip_of(entry)
    sizes = entry.sizes()
    tokens = sizes.get("seqlen", sizes.get("M"))
    channels = sizes.get("channels", sizes.get("C"))
    states = sizes.get("states", sizes.get("S"))
    if tokens is None or channels is None or states is None:
        raise NotCovered(f"shapes {entry.shapes!r} do not give the sequence, the channels and the states")
    dtype = dtype_of(entry)
    wide, narrow = array((channels, tokens), dtype), array((states, tokens), dtype)
    arguments: tuple[object, ...] = (wide, wide, array((channels, states), dtype), narrow, narrow)
    tile_length = entry.integer(r"tiled by (\d+)")
    if is_late_step(entry):
        tile_length = 512
    if tile_length is not None:
        arguments += (tile_length,)
    if entry.says("channel-tile loop outermost") or is_late_step(entry):
        kernel = mamba.channels_outermost
    else:
        kernel = mamba.states_outermost
    return Case(chip, (Run(kernel, (arguments,)),), quantity_of(entry), Schedule.compiler)
