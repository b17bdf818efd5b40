"""How the instructions of the random generators are drawn."""

from __future__ import annotations

import numpy as np

from tests.oracle.draw import ANY, FLOATS, INTEGERS, Draw
from tests.oracle.formats import FORMATS
from tests.oracle.streams.common import Arguments, draws


@draws
def rng(d: Draw) -> Arguments:
    p, f = d.size()
    engine = d.pick(("vector",) + (("gpsimd",) if d.generation >= 3 else ()))
    return {
        "dst": d.result(p, f, d.dtype(INTEGERS), "sbuf" if engine == "gpsimd" else d.buffer()),
        "engine": engine,
    }


@draws
def rand2(d: Draw) -> Arguments | None:
    if d.generation < 4:
        return None
    p, f = d.size()
    low = np.float32(d.random.standard_normal((p, 1)) * 5)
    high = low + np.float32(d.random.uniform(0.25, 9, (p, 1)))
    bounds = []
    for bound in (low, high):
        values = FORMATS["float32"].encode(bound)
        bounds.append(d.column(p, values=values, shape=(p, 1)))
    if d.chance(0.5):
        bounds = [float(low.min()), float(high.max())]
    dtype = d.dtype(tuple(name for name in ANY if name != "float8_e4m3fn"))
    return {
        "dst": d.result(p, f, dtype, d.buffer(), apart_from=tuple(bounds)),
        "min": bounds[0],
        "max": bounds[1],
    }


@draws
def dropout(d: Draw) -> Arguments:
    p, f = d.size()
    data = d.source(p, f, d.dtype(), d.buffer())
    prob = float(d.random.integers(2))
    if d.chance(0.6):
        dtype = (
            "float32" if data.dtype in INTEGERS else d.pick([name for name in FLOATS if name != "tfloat32"])
        )
        prob = d.column(p, dtype, values=FORMATS[dtype].encode(d.random.integers(0, 2, (p, 1))))
    return {
        "dst": d.result(p, f, data.dtype, d.buffer(), apart_from=(data, prob)),
        "data": data,
        "prob": prob,
    }


@draws
def set_rng_seed(d: Draw) -> Arguments:
    dtype = d.pick(("int32", "uint32", "float32"))
    return {"src_seeds": d.tile(1, 1, dtype, d.buffer(), shape=(1, 1))}


def _state(d: Draw, filled: bool) -> Arguments | None:
    if d.generation < 3:
        return None
    engine = d.pick(("gpsimd",) + (("vector",) if d.generation >= 4 else ()))
    p, words = d.pick(d.partitions), 24 if engine == "vector" else 6
    return {"tile": d.tile(p, words, "uint32", shape=(p, words), filled=filled), "engine": engine}


@draws
def rand_set_state(d: Draw) -> Arguments | None:
    drawn = _state(d, True)
    return drawn and {"src_seeds": drawn["tile"], "engine": drawn["engine"]}


@draws
def rand_get_state(d: Draw) -> Arguments | None:
    drawn = _state(d, False)
    return drawn and {"dst": drawn["tile"], "engine": drawn["engine"]}
