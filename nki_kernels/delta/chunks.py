"""One chunk of 128 tokens of some heads: what does not need the state; `delta/walk.py` takes the state through it.

    u = X (v - (exp(G) k) S),   o = exp(G) (q S) + P u,   S' = exp(G_end) S + (exp(G_end - G) beta k)^T u

where X is the inverse of the triangle, G the sum of g up to a token and P_ij = q_i . k_j beta_j exp(G_i - G_j) for
j <= i. A has the same decays, times k_i . k_j: beta is that of the token that writes, in place of that of the token
that reads, so what a token writes is beta u.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.blocks import HALF
from nki_kernels.delta.decay import at_once
from nki_kernels.delta.output import gate_factors
from nki_kernels.recurrent.ssd_between import HALF as ROWS
from nki_kernels.tiles import PARTITIONS

LENGTH_EPS = 1e-6
"""Added to the squared length of queries and keys."""


def load_part(case, unit, columns, first, end):
    """Columns first … end of the unit's rows of an array [T, .]; zeros behind the last row of a sequence."""
    tile = nl.ndarray((PARTITIONS, end - first), dtype=columns.dtype, buffer=nl.sbuf)
    start, stop = unit["rows"]
    if stop - start < PARTITIONS:
        nisa.memset(dst=tile, value=0.0)
    nisa.dma_copy(dst=tile[0 : stop - start, :], src=columns[start:stop, first:end])
    return tile


def load(case, unit):
    """Bring queries, keys, values and output gates of the unit's heads."""
    (first, end), (first_key, end_key) = unit["heads"], unit["keys"]
    depth, width = case["depth"], case["width"]
    key = case["key_width"]
    unit["q"] = load_part(case, unit, case["qkv"], first_key * depth, end_key * depth)
    unit["k"] = load_part(case, unit, case["qkv"], key + first_key * depth, key + end_key * depth)
    unit["v"] = load_part(case, unit, case["qkv"], 2 * key + first * width, 2 * key + end * width)
    unit["z"] = load_part(case, unit, case["gates"], first * width, end * width)


def load_sums(case, unit):
    """Rows whose product has the logarithms of the decays between a unit's tokens."""
    first, end = unit["heads"]
    heads = case["states"].shape[1]
    together = at_once(heads)
    at = unit["column"] * heads
    place = at % together
    rows = case["decays"]["rows"][at // together]
    return case["differences"].bring(rows, (place + first, place + end))


def begin_wave(case, wave):
    """A tile of all triangles of a wave."""
    shape = (PARTITIONS, wave["heads"], PARTITIONS)
    wave["negated"] = nl.ndarray(shape, dtype=case["qkv"].dtype, buffer=nl.sbuf)
    for unit in wave["units"]:
        unit["negated"] = wave["negated"][:, unit["at"][0] : unit["at"][1], :]


def split(case, wave):
    """The inverses of a wave's blocks, unit by unit."""
    y, x = wave["squares"]
    for unit in wave["units"]:
        first, end = unit["at"]
        unit["y"], unit["x"] = y[:, first:end, :], x[:, first:end, :]
        unit["joined"] = []


def squared_lengths(tile, depth):
    """The squared length of each head of rows [128, heads * depth]: [128, heads] float32."""
    heads = tile.shape[1] // depth
    squares = nl.ndarray((PARTITIONS, heads), dtype=nl.float32, buffer=nl.sbuf)
    scratch = nl.ndarray((PARTITIONS, depth), dtype=tile.dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.activation(
            dst=scratch,
            op=nl.square,
            data=tile[:, head * depth : (head + 1) * depth],
            reduce_op=nl.add,
            reduce_res=squares[:, head : head + 1],
            reduce_cmd=nisa.reduce_cmd.reset_reduce,
        )
    return squares


def inverse_lengths(squares):
    """1 / sqrt(squares + 1e-6), in place."""
    nisa.tensor_scalar(
        dst=squares, data=squares, op0=nl.add, operand0=LENGTH_EPS, op1=nl.power, operand1=-0.5
    )


def scaled(dst, data, columns):
    """Elements [rows, heads, n] times a number of their row and head, [rows, heads], on GpSimd."""
    across = columns.reshape((columns.shape[0], columns.shape[1], 1)).broadcast(2, dst.shape[2])
    nisa.tensor_tensor(dst=dst, data1=data, data2=across, op=nl.multiply, engine=nisa.engine.gpsimd)


def transposed(tile):
    """Rows [128, heads, depth] as [depth, heads, 128]."""
    heads, depth = tile.shape[1], tile.shape[2]
    bank = nl.ndarray((depth, heads, PARTITIONS), dtype=tile.dtype, buffer=nl.psum)
    result = nl.ndarray(bank.shape, dtype=tile.dtype, buffer=nl.sbuf)
    for head in range(heads):
        nisa.nc_transpose(dst=bank[:, head, :], data=tile[:, head, :])
    nisa.activation(dst=result, op=nl.copy, data=bank)
    return result


def decay(case, unit):
    """beta_j exp(G_i - G_j) for j <= i, else 0: [j, head, i]; in float32 of sums that are taken directly."""
    constants, dtype = case["constants"], case["qkv"].dtype
    heads = unit["heads"][1] - unit["heads"][0]
    shape = (PARTITIONS, heads, PARTITIONS)
    bank = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    if unit["sums"] is None:
        terms = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        after = constants["after"].reshape((PARTITIONS, 1, PARTITIONS)).broadcast(1, heads)
        scaled(terms, after, columns(case, unit, "g"))
        for head in range(heads):
            nisa.nc_matmul(
                dst=bank[:, head, :],
                stationary=terms[:, head, :],
                moving=constants["until"],
                accumulate=False,
            )
    else:
        keys, queries, row = unit["sums"]
        nisa.nc_matmul(
            dst=bank,
            stationary=keys,
            moving=queries,
            accumulate=False,
            tile_position=(row, 0),
            tile_size=(ROWS, PARTITIONS),
        )
    across = constants["seen"].reshape((PARTITIONS, 1, PARTITIONS)).broadcast(1, heads)
    nisa.nc_matmul(dst=bank, stationary=constants["identity"], moving=across, accumulate=True)
    unit["decay"] = nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf)
    nisa.activation(dst=unit["decay"], op=nl.exp, data=bank)
    if unit["sums"] is None:
        scaled(unit["decay"], unit["decay"], columns(case, unit, "beta"))


def columns(case, unit, name):
    """The unit's columns [128, heads] of one of `decays`."""
    first, end = unit["heads"]
    return case["decays"][name][:, unit["column"], first:end]


def normalise(case, unit):
    """Keys divided by their lengths, and what the norm of o adds to the mean of squares.

    Queries are taken as they are: o is then larger by sqrt(dk) times their lengths, and so is what the norm adds.
    """
    depth, tile = case["depth"], unit["k"]
    lengths = squared_lengths(tile, depth)
    inverse_lengths(lengths)
    keys = nl.ndarray((PARTITIONS, lengths.shape[1], depth), dtype=tile.dtype, buffer=nl.sbuf)
    scaled(keys, tile.reshape(keys.shape), lengths)
    unit["key_rows"] = keys
    least = squared_lengths(unit["q"], depth)
    nisa.tensor_scalar(
        dst=least, data=least, op0=nl.add, operand0=LENGTH_EPS, op1=nl.multiply, operand1=case["eps"] * depth
    )
    unit["least"] = least


def turn(case, unit):
    """Queries and keys with their elements on the partitions."""
    queries = unit["q"].reshape(unit["key_rows"].shape)
    unit["across"] = transposed(queries)
    unit["key_columns"] = transposed(unit["key_rows"])


def gate(case, unit):
    """The factors of a unit's outputs."""
    unit["factors"] = gate_factors(unit["z"], case["weight"])


def weigh(case, unit):
    """Keys with the decay before them, and with that after them and beta."""
    keys = unit["key_rows"]
    shape = (PARTITIONS, unit["heads"][1] - unit["heads"][0], case["depth"])
    for name, part in (("before", "until"), ("after", "rest")):
        unit[name] = nl.ndarray(shape, dtype=keys.dtype, buffer=nl.sbuf)
        scaled(unit[name], for_heads(unit, keys), columns(case, unit, part))


def score(case, unit):
    """-A and P transposed."""
    keys, between = unit["key_columns"], unit["decay"]
    dtype = keys.dtype
    negated = unit["negated"]
    attended = nl.ndarray(between.shape, dtype=dtype, buffer=nl.sbuf)
    among_keys, of_queries = key_products(keys, keys), key_products(keys, unit["across"])
    nisa.scalar_tensor_tensor(
        dst=negated,
        data=for_heads(unit, among_keys),
        op0=nl.multiply,
        operand0=-1.0,
        op1=nl.multiply,
        operand1=between,
    )
    nisa.tensor_tensor(dst=attended, data1=for_heads(unit, of_queries), data2=between, op=nl.multiply)
    unit["attended"] = attended


def key_products(keys, moving):
    """Products of a chunk's keys with its keys or queries, [j, key head, i] in PSUM."""
    count = keys.shape[1]
    bank = nl.ndarray((PARTITIONS, count, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    for own in range(count):
        nisa.nc_matmul(
            dst=bank[:, own, :], stationary=keys[:, own, :], moving=moving[:, own, :], accumulate=False
        )
    return bank


def for_heads(unit, tile):
    """A tile [rows, key head, n] as its value heads see it, [rows, head, n]."""
    rows, count, size = tile.shape
    group = unit["group"]
    return tile.reshape((rows, count, 1, size)).broadcast(2, group)


def read_keys(case, unit):
    """-(X exp(G) k) transposed, [depth, head, i]: what reads the state, once the inverse is there."""
    before = unit["before"]
    y, corner = unit["y"], unit["corner"]
    heads, depth = y.shape[1], case["depth"]
    bank = nl.ndarray((depth, heads, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        for row, column, moving in (
            (0, 0, y[0:HALF, head, :]),
            (0, HALF, corner[:, head, :]),
            (HALF, HALF, y[HALF:PARTITIONS, head, :]),
        ):
            nisa.nc_matmul(
                dst=bank[:, head, column : column + HALF],
                stationary=before[row : row + HALF, head, :],
                moving=moving,
                accumulate=row > 0,
                tile_position=(row, 0),
                tile_size=(HALF, PARTITIONS),
            )
    reading = nl.ndarray(bank.shape, dtype=y.dtype, buffer=nl.sbuf)
    nisa.activation(dst=reading, op=nl.copy, data=bank, scale=-1.0)
    unit["reading"] = reading
