"""One chunk of 128 tokens of some heads: what does not need the state, and then the state through the chunk.

    u = beta * (X (v - (exp(G) k) S)),   o = exp(G) (q S) + P u,   S' = exp(G_end) S + (exp(G_end - G) k)^T u

where X is the inverse of the triangle, G the sum of g up to a token and P_ij = q_i . k_j exp(G_i - G_j) for j <= i.
Rows of A are weighed by beta_j in place of beta_i, which needs no scaled keys: X beta of the one is beta X of the
other.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.delta.output import gate_factors
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


def normalised(tile, depth, scale):
    """Each head of rows [128, heads * depth] divided by its length, times a factor."""
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
    inverse_lengths(squares, scale)
    result = nl.ndarray((PARTITIONS, heads, depth), dtype=tile.dtype, buffer=nl.sbuf)
    scaled(result, tile.reshape(result.shape), squares)
    return result


def inverse_lengths(squares, scale):
    """scale / sqrt(squares + 1e-6), in place."""
    nisa.tensor_scalar(
        dst=squares, data=squares, op0=nl.add, operand0=LENGTH_EPS, op1=nl.power, operand1=-0.5
    )
    if scale != 1.0:
        nisa.tensor_scalar(dst=squares, data=squares, op0=nl.multiply, operand0=scale)


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


def spread(case, unit):
    """The terms of sums of g over ranges that begin behind a token: [t, head, j] float32."""
    heads = unit["heads"][1] - unit["heads"][0]
    unit["terms"] = nl.ndarray((PARTITIONS, heads, PARTITIONS), dtype=nl.float32, buffer=nl.sbuf)
    after = case["constants"]["after"].reshape((PARTITIONS, 1, PARTITIONS)).broadcast(1, heads)
    scaled(unit["terms"], after, columns(case, unit, "g"))


def decay(case, unit):
    """exp(G_i - G_j) for j <= i, else 0: [j, head, i] float32."""
    constants, terms = case["constants"], unit["terms"]
    heads = terms.shape[1]
    bank = nl.ndarray(terms.shape, dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=bank[:, head, :], stationary=terms[:, head, :], moving=constants["until"], accumulate=False
        )
    across = constants["seen"].reshape((PARTITIONS, 1, PARTITIONS)).broadcast(1, heads)
    nisa.nc_matmul(dst=bank, stationary=constants["identity"], moving=across, accumulate=True)
    unit["decay"] = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=unit["decay"], op=nl.exp, data=bank)


def columns(case, unit, name):
    """The unit's columns [128, heads] of one of `decays`."""
    first, end = unit["heads"]
    return case["decays"][name][:, unit["column"], first:end]


def normalise(case, unit):
    """Queries and keys divided by their lengths; queries by the root of their size as well."""
    depth = case["depth"]
    unit["queries"] = normalised(unit["q"], depth, depth**-0.5)
    unit["key_rows"] = normalised(unit["k"], depth, 1.0)


def turn(case, unit):
    """Queries and keys with their elements on the partitions, and the factors of the outputs."""
    unit["across"] = transposed(unit["queries"])
    unit["key_columns"] = transposed(unit["key_rows"])
    unit["factors"] = gate_factors(unit["z"], case["weight"])


def weigh(case, unit):
    """Keys with the decay before and after them."""
    keys = unit["key_rows"]
    shape = (PARTITIONS, unit["heads"][1] - unit["heads"][0], case["depth"])
    for name, part in (("before", "until"), ("after", "rest")):
        unit[name] = nl.ndarray(shape, dtype=keys.dtype, buffer=nl.sbuf)
        scaled(unit[name], for_heads(unit, keys), columns(case, unit, part))


def score(case, unit):
    """-A and P transposed."""
    keys, between = unit["key_columns"], unit["decay"]
    dtype = keys.dtype
    negated = nl.ndarray(between.shape, dtype=dtype, buffer=nl.sbuf)
    attended = nl.ndarray(between.shape, dtype=dtype, buffer=nl.sbuf)
    among_keys, of_queries = key_products(keys, keys), key_products(keys, unit["across"])
    minus_beta = columns(case, unit, "minus_beta")
    for head in range(between.shape[1]):
        nisa.scalar_tensor_tensor(
            dst=negated[:, head, :],
            data=among_keys[:, head // unit["group"], :],
            op0=nl.multiply,
            operand0=minus_beta[:, head : head + 1],
            op1=nl.multiply,
            operand1=between[:, head, :],
        )
    nisa.tensor_tensor(dst=attended, data1=for_heads(unit, of_queries), data2=between, op=nl.multiply)
    unit["negated"], unit["attended"] = negated, attended


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
    inverse = unit["inverse"]
    heads, depth = inverse.shape[1], case["depth"]
    bank = nl.ndarray((depth, heads, PARTITIONS), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=unit["before"][:, head, :],
            moving=inverse[:, head, :],
            accumulate=False,
        )
    reading = nl.ndarray(bank.shape, dtype=inverse.dtype, buffer=nl.sbuf)
    nisa.activation(dst=reading, op=nl.copy, data=bank, scale=-1.0)
    unit["reading"] = reading


def write(case, unit):
    """u, what the tokens write: beta times the values less what the state says of their keys."""
    state, width = unit["state"], case["width"]
    inverse, reading = unit["inverse"], unit["reading"]
    heads = inverse.shape[1]
    bank = nl.ndarray((PARTITIONS, heads, width), dtype=nl.float32, buffer=nl.psum)
    written = nl.ndarray(bank.shape, dtype=inverse.dtype, buffer=nl.sbuf)
    for head in range(heads):
        values = unit["v"][:, head * width : (head + 1) * width]
        nisa.nc_matmul(dst=bank[:, head, :], stationary=inverse[:, head, :], moving=values, accumulate=False)
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=reading[:, head, :],
            moving=state["narrow"][:, head, :],
            accumulate=True,
        )
    for head in range(heads):
        nisa.activation(
            dst=written[:, head, :],
            op=nl.copy,
            data=bank[:, head, :],
            scale=columns(case, unit, "beta")[:, head : head + 1],
        )
    unit["written"] = written


def attend_state(case, unit):
    """exp(G) (q S), before the state changes: [i, head, width] float32."""
    state, width = unit["state"], case["width"]
    heads = unit["written"].shape[1]
    bank = nl.ndarray((PARTITIONS, heads, width), dtype=nl.float32, buffer=nl.psum)
    seen = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    for head in range(heads):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=unit["across"][:, head // unit["group"], :],
            moving=state["narrow"][:, head, :],
            accumulate=False,
        )
    for head in range(heads):
        nisa.activation(
            dst=seen[:, head, :],
            op=nl.copy,
            data=bank[:, head, :],
            scale=columns(case, unit, "until")[:, head : head + 1],
        )
    unit["seen"] = seen


def advance(case, unit):
    """The state behind the chunk, in float32 and in the dtype of products."""
    state, written = unit["state"], unit["written"]
    heads, depth = written.shape[1], case["depth"]
    bank = nl.ndarray((depth, heads, case["width"]), dtype=nl.float32, buffer=nl.psum)
    for head in range(heads):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=unit["after"][:, head, :],
            moving=written[:, head, :],
            accumulate=False,
        )
    wide = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    for head in range(heads):
        nisa.scalar_tensor_tensor(
            dst=wide[:, head, :],
            data=state["wide"][:, head, :],
            op0=nl.multiply,
            operand0=columns(case, unit, "whole")[0:depth, head : head + 1],
            op1=nl.add,
            operand1=bank[:, head, :],
        )
    keep(state, wide, written.dtype)


def keep(state, wide, dtype):
    """Make a float32 tile the state, with its copy in the dtype of products."""
    state["wide"] = state["narrow"] = wide
    if dtype != nl.float32:
        state["narrow"] = nl.ndarray(wide.shape, dtype=dtype, buffer=nl.sbuf)
        nisa.activation(dst=state["narrow"], op=nl.copy, data=wide)


def attend(case, unit):
    """o [i, head, width] float32."""
    written = unit["written"]
    bank = nl.ndarray(written.shape, dtype=nl.float32, buffer=nl.psum)
    for head in range(written.shape[1]):
        nisa.nc_matmul(
            dst=bank[:, head, :],
            stationary=unit["attended"][:, head, :],
            moving=written[:, head, :],
            accumulate=False,
        )
    o = nl.ndarray(written.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=o, data1=bank, data2=unit["seen"], op=nl.add)
    unit["o"] = o
