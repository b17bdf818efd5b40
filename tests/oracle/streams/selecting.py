"""How patterns, selections, searches, gathers and statistics are drawn."""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracle.draw import FLOATS, Draw, Tile
from tests.oracle.formats import FORMATS
from tests.oracle.streams.common import COMPARISONS, PLAIN, Arguments, destination, draws


def _pattern(d: Draw, f: int) -> list[list[int]]:
    return [[int(d.random.integers(-9, 10)), num] for num in d._factors(f, 4)]


def _offset(d: Draw) -> Any:
    value = int(d.random.integers(-50, 50)) if d.chance(0.9) else int(d.random.integers(-(2**31), 2**31))
    return value if d.chance(0.7) else d.lockstep.register(value)


@draws
def iota(d: Draw) -> Arguments:
    p, f = d.size()
    dst = d.result(p, f, d.dtype(PLAIN))
    offset, channel = _offset(d), int(d.random.integers(-40, 41))
    return {"dst": dst, "pattern": _pattern(d, f), "offset": offset, "channel_multiplier": channel}


@draws
def affine_select(d: Draw) -> Arguments:
    p, f = d.size()
    tile = d.source(p, f, d.dtype())
    dst = destination(d, p, f, (tile,), buffer="sbuf", buffers=("sbuf",))
    return {
        "dst": dst,
        "pattern": _pattern(d, f),
        "channel_multiplier": int(d.random.integers(-9, 10)),
        "on_true_tile": tile,
        "on_false_value": d.number(),
        "cmp_op": d.pick([*COMPARISONS, "not_equal"]),
        "offset": _offset(d),
    }


def _searched(d: Draw) -> tuple[int, int, Tile]:
    p, f = d.pick(d.partitions), 8 + d.upto(32)
    return p, f, d.source(p, f, d.dtype(), d.buffer(), dims=3)


def _wanted(d: Draw, p: int, data: Tile) -> Tile:
    """Draw eight values of which some occur: drawn small and whole, or taken from anywhere."""
    values = FORMATS["float32"].encode(d.random.integers(-4, 5, (p, 8)))
    return d.tile(p, 8, "float32", shape=(p, 8), apart_from=(data,), values=values if d.chance(0.6) else None)


@draws
def max8(d: Draw) -> Arguments:
    p, _, src = _searched(d)
    return {"dst": d.result(p, 8, d.dtype(), d.buffer(), shape=(p, 8), apart_from=(src,)), "src": src}


@draws
def nc_find_index8(d: Draw) -> Arguments:
    p, _, data = _searched(d)
    vals = _wanted(d, p, data)
    dst = d.result(p, 8, d.pick(("uint16", "uint32")), shape=(p, 8), apart_from=(data, vals))
    return {"dst": dst, "data": data, "vals": vals}


@draws
def nc_match_replace8(d: Draw) -> Arguments:
    p, f, data = _searched(d)
    vals = _wanted(d, p, data)
    dst = d.result(p, f, data.dtype, apart_from=(data, vals), shape=data.shape)
    index = d.result(p, 8, d.pick(("uint16", "uint32")), shape=(p, 8), apart_from=(data, vals, dst))
    return {
        "dst": dst,
        "data": data,
        "vals": vals,
        "imm": d.number(),
        "dst_idx": index if d.chance(0.8) else None,
    }


@draws
def nc_n_gather(d: Draw) -> Arguments:
    p, f = d.size()
    data, wanted = d.source(p, f, d.dtype()), d.upto(20)
    outside = d.chance(0.03)
    columns = d.random.integers(0, f + outside, (p, wanted))
    indices = d.tile(p, wanted, "uint32", values=columns, apart_from=(data,))
    return {
        "dst": d.result(p, wanted, data.dtype, apart_from=(data, indices)),
        "data": data,
        "indices": indices,
    }


@draws
def local_gather(d: Draw) -> Arguments:
    p, f = d.pick((16, 16, 32, 64, 128)), d.upto(40)
    src = d.tile(p, f, d.dtype(), start=0)
    run = d.pick([n for n in (1, 2, 4, 8, 16, 32) if n <= f])
    columns = d.upto(2)
    count = d.upto(max(1, min(16 * columns, 64 // run)))
    offsets = d.random.integers(0, f - run + 1, (p, columns))
    index = d.tile(p, columns, "uint16", values=offsets, start=0, apart_from=(src,))
    dst = d.result(p, count * run, src.dtype, start=0, apart_from=(src, index))
    return {
        "dst": dst,
        "src_buffer": src,
        "index": index,
        "num_elem_per_idx": run,
        "num_valid_indices": count,
    }


@draws
def nonzero_with_count(d: Draw) -> Arguments | None:
    if d.generation < 3:
        return None
    p, f = d.pick((16, 32, 48, 128)), d.upto(30)
    src = d.tile(p, f, d.pick(("float32", "int32")), start=0)
    dst = d.result(p, f + 1, "int32", start=0, apart_from=(src,))
    offset = int(d.random.integers(-100, 100))
    return {"dst": dst, "src": src, "index_offset": offset, "padding_val": int(d.random.integers(-3, 3))}


@draws
def topk(d: Draw) -> Arguments:
    p, n = d.pick((16, 16, 32, 128)), 7 + d.upto(60)
    columns, count = -(-n // 16) + int(d.random.integers(2)), d.upto(min(n, 20))
    src = d.tile(p, columns, "bfloat16", shape=(p, columns), start=0)
    values = d.result(p, count, "bfloat16", shape=(p, count), start=0, apart_from=(src,))
    indices = d.result(p, count, "uint32", shape=(p, count), start=0)
    return {"val_dst": values, "idx_dst": indices, "src": src, "n": n}


@draws
def sequence_bounds(d: Draw) -> Arguments:
    n = d.upto(30)
    dtype = d.pick(("float32", "int32"))
    ids = np.repeat(d.random.integers(0, 4, n), d.random.integers(1, 4, n))[:n]
    source = d.tile(1, n, dtype, shape=(1, n), values=FORMATS[dtype].encode(ids))
    dst = d.result(1, 2 * n, d.pick(("float32", "int32")), shape=(1, 2, n), apart_from=(source,))
    return {"dst": dst, "segment_ids": source}


@draws
def bn_stats(d: Draw) -> Arguments:
    p, f = d.size()
    data = d.source(p, f, d.dtype(), d.buffer())
    return {
        "dst": d.result(p, 6, d.dtype(FLOATS), d.buffer(), shape=(p, 6), apart_from=(data,)),
        "data": data,
    }


@draws
def bn_aggr(d: Draw) -> Arguments:
    p, segments = d.pick(d.partitions), d.upto(6)
    triples = d.random.standard_normal((p, segments, 3)) * 3
    triples[:, :, 0] = d.random.integers(0, 40, (p, segments))
    triples[:, :, 2] = np.abs(triples[:, :, 2]) * triples[:, :, 0]
    values = FORMATS["float32"].encode(triples.reshape(p, -1))
    data = d.tile(p, 3 * segments, "float32", d.buffer(), values=values)
    return {
        "dst": d.result(p, 2, d.dtype(FLOATS), d.buffer(), shape=(p, 2), apart_from=(data,)),
        "data": data,
    }
