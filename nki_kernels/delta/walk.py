"""The state of some heads through a chunk of 128 tokens, and the outputs of the chunk; see `delta/chunks.py`.

Two heads at a time: while one engine works on a pair, another one does on the next pair. `part` is a unit and one of
its pairs. What tokens write, u, lacks the factor beta, which the decays have.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.blocks import HALF
from nki_kernels.delta.chunks import columns, for_heads
from nki_kernels.delta.output import gated_norm, sums_of_squares
from nki_kernels.delta.states import load_state, store_heads
from nki_kernels.dma import COMPILER, transfer
from nki_kernels.tiles import PARTITIONS, ranges

PAIR = 2
"""Heads whose products share a tile of PSUM."""


def pairs_of(unit):
    """The pairs of a unit's heads, counted from its first one."""
    first, end = unit["heads"]
    return ranges(0, end - first, PAIR)


def begin_state(case, state):
    """Load the state of a sequence's heads, pair by pair in float32 and in the dtype of products."""
    tile = load_state(case, state)
    state["wide"], state["narrow"] = [], []
    for first, end in ranges(0, tile.shape[1], PAIR):
        wide = tile[:, first:end, :]
        state["wide"].append(wide)
        state["narrow"].append(narrowed(wide, case["qkv"].dtype))


def narrowed(wide, dtype):
    """A state in the dtype of products."""
    if dtype == nl.float32:
        return wide
    result = nl.ndarray(wide.shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=result, op=nl.copy, data=wide)
    return result


def inverted(unit, head, moving, bank):
    """The inverse times a head's rows [128, width]: the halves, and what the second one has of the first one's rows."""
    y, corner = unit["y"], unit["corner"]
    for row, column, stationary in (
        (0, 0, y[0:HALF, head, :]),
        (0, HALF, corner[:, head, :]),
        (HALF, HALF, y[HALF:PARTITIONS, head, :]),
    ):
        nisa.nc_matmul(
            dst=bank[column : column + HALF, :],
            stationary=stationary,
            moving=moving[row : row + HALF, :],
            accumulate=row > 0,
            tile_position=(row, column),
            tile_size=(HALF, HALF),
        )


def values(case, part):
    """X v of a pair, in PSUM."""
    unit, pair = part
    first, end = pairs_of(unit)[pair]
    width = case["width"]
    bank = nl.ndarray((PARTITIONS, end - first, width), dtype=nl.float32, buffer=nl.psum)
    for head in range(first, end):
        inverted(unit, head, unit["v"][:, head * width : (head + 1) * width], bank[:, head - first, :])
    if pair == 0:
        unit["banks"], unit["written"] = [], []
    unit["banks"].append(bank)


def write(case, part):
    """u of a pair: less what the state says of the tokens' keys."""
    unit, pair = part
    first, end = pairs_of(unit)[pair]
    bank, narrow = unit["banks"][pair], unit["state"]["narrow"][pair]
    for head in range(first, end):
        nisa.nc_matmul(
            dst=bank[:, head - first, :],
            stationary=unit["reading"][:, head, :],
            moving=narrow[:, head - first, :],
            accumulate=True,
        )
    written = nl.ndarray(bank.shape, dtype=narrow.dtype, buffer=nl.sbuf)
    nisa.activation(dst=written, op=nl.copy, data=bank)
    unit["written"].append(written)


def query_state(case, unit):
    """q S before the state changes, [i, head, width] in PSUM."""
    first, end = unit["heads"]
    bank = nl.ndarray((PARTITIONS, end - first, case["width"]), dtype=nl.float32, buffer=nl.psum)
    for head in range(end - first):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=unit["across"][:, head // unit["group"], :],
            moving=unit["state"]["narrow"][head // PAIR][:, head % PAIR, :],
            accumulate=False,
        )
    unit["queried"] = bank


def decayed(case, unit):
    """exp(G) (q S), [i, head, width]."""
    bank = unit["queried"]
    unit["seen"] = nl.ndarray(bank.shape, dtype=case["qkv"].dtype, buffer=nl.sbuf)
    for head in range(bank.shape[1]):
        nisa.activation(
            dst=unit["seen"][:, head, :],
            op=nl.copy,
            data=bank[:, head, :],
            scale=columns(case, unit, "until")[:, head : head + 1],
        )


def advance(case, part):
    """The state of a pair behind the chunk, in float32 and in the dtype of products."""
    unit, pair = part
    first, end = pairs_of(unit)[pair]
    state, written, depth = unit["state"], unit["written"][pair], case["depth"]
    bank = nl.ndarray((depth, end - first, case["width"]), dtype=nl.float32, buffer=nl.psum)
    for head in range(first, end):
        nisa.nc_matmul(
            dst=bank[:, head - first, :],
            stationary=unit["after"][:, head, :],
            moving=written[:, head - first, :],
            accumulate=False,
        )
    wide = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    for head in range(first, end):
        nisa.scalar_tensor_tensor(
            dst=wide[:, head - first, :],
            data=state["wide"][pair][:, head - first, :],
            op0=nl.multiply,
            operand0=columns(case, unit, "whole")[0:depth, head : head + 1],
            op1=nl.add,
            operand1=bank[:, head - first, :],
        )
    state["wide"][pair], state["narrow"][pair] = wide, narrowed(wide, written.dtype)


def attend(case, unit):
    """o [i, head, width] in PSUM."""
    seen = unit["seen"]
    bank = nl.ndarray(seen.shape, dtype=nl.float32, buffer=nl.psum)
    for head in range(seen.shape[1]):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=unit["attended"][:, head, :],
            moving=unit["written"][head // PAIR][:, head % PAIR, :],
            accumulate=False,
        )
    nisa.nc_matmul(dst=bank, stationary=case["constants"]["identity"], moving=seen, accumulate=True)
    unit["o"] = bank


def measure(case, unit):
    """The means of the squares of a unit's outputs, and what is added to them: [row, head]."""
    squares = sums_of_squares(unit["o"])
    nisa.scalar_tensor_tensor(
        dst=squares,
        data=squares,
        op0=nl.multiply,
        operand0=1.0 / case["width"],
        op1=nl.add,
        operand1=for_heads(unit, unit["least"].expand_dim(2)),
    )
    unit["roots"] = squares


def finish(case, unit):
    """Normalise and gate a unit's outputs."""
    nisa.activation(dst=unit["roots"], op=nl.rsqrt, data=unit["roots"])
    unit["y"] = gated_norm(unit["o"], unit["roots"], unit["factors"], case["y"].dtype)


def store(case, unit):
    """Store a unit's outputs; behind the last chunk the state as well."""
    start, stop = unit["rows"]
    first, end = unit["heads"]
    width = case["width"]
    target = case["y"][start:stop, first * width : end * width]
    y = unit["y"].reshape((PARTITIONS, (end - first) * width))[0 : stop - start, :]
    transfer(target, y, COMPILER)
    if unit["last"]:
        state = unit["state"]
        for pair in range(len(pairs_of(unit))):
            low, high = pairs_of(unit)[pair]
            store_heads(case, state, (first + low, first + high), state["wide"][pair])
