"""attention_block_decode: one launch does what three do, and takes less time."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import nki_kernels as kernels
import simulate
from simulate.replay import ReplayCache, ReplayOptions
from simulate.timing import Reading, schedule
from tests.kernels.accuracy import TARGETS, copied, in_order, named, normal, run
from tests.kernels.case import (
    BF16,
    DTYPES,
    F32,
    GEN3_ON,
    KernelCase,
    KernelTests,
    Undefined,
    refuse,
    slow,
    together,
    vary,
)
from tests.kernels.divided import OverHeads, OverPositions
from tests.kernels.test_feed_forward import FP8, INT8, quantise


def arguments(
    sequences: int = 3, hidden: int = 256, heads: int = 4, positions: int = 172, dtype: Any = F32
) -> tuple[Any, ...]:
    """Draw x … w_o for heads of 32 on two key/value heads, then the number of those, tables and norms."""
    depth, kv = 32, 2
    q_size, kv_size = heads * depth, kv * depth
    last = np.random.default_rng(5).integers(0, positions, (sequences, 1)).astype(np.int32)
    angles = np.arange(positions)[:, None] * 100.0 ** (-np.arange(depth // 2) / (depth // 2))
    return (
        normal(1, sequences, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=dtype),
        (normal(3, hidden, q_size + 2 * kv_size) * hidden**-0.5).astype(dtype),
        1e-5,
        q_size,
        kv_size,
        normal(4, sequences, kv, depth, positions, dtype=dtype),
        normal(5, sequences, kv, positions, depth, dtype=dtype),
        last,
        depth**-0.5,
        (normal(6, q_size, hidden) * q_size**-0.5).astype(dtype),
        kv,
        np.cos(angles).astype(F32),
        np.sin(angles).astype(F32),
        normal(7, 1, depth, dtype=dtype),
        normal(8, 1, depth, dtype=dtype),
    )


def formed(
    *,
    depth: int = 16,
    heads: int = 4,
    kv: int = 2,
    sequences: int = 3,
    new: int = 1,
    hidden: int = 96,
    positions: int = 128,
    block: int = 0,
    half: int = 8,
    norms: bool = True,
    dtype: Any = F32,
    weights: Any = F32,
    options: tuple[Any, ...] = (None, None, None),
) -> tuple[Any, ...]:
    """Draw all arguments in order; caches have pages of `block` positions unless it is 0; tables turn 2 * half."""
    tokens, q_size, kv_size = sequences * new, heads * depth, kv * depth
    rng = np.random.default_rng(7)
    first = rng.integers(0, positions - new + 1, (sequences, 1))
    positions_of_tokens = (first + np.arange(new)).reshape(-1)
    cache_shapes = [(sequences, kv, depth, positions), (sequences, kv, positions, depth)]
    slots = tables = None
    if block:
        pages_per_sequence = positions // block
        cache_shapes = [(sequences * pages_per_sequence + 1, block, kv, depth)] * 2
        tables = (
            rng.permutation(sequences * pages_per_sequence + 1)[:-1]
            .reshape(sequences, pages_per_sequence)
            .astype(np.int32)
        )
        slots = (
            tables[np.arange(sequences).repeat(new), positions_of_tokens // block] * block
            + positions_of_tokens % block
        )
        slots = slots[:, None].astype(np.int32)
    angles = np.arange(positions)[:, None] * 0.7 ** np.arange(max(half, 1))
    turned = [fn(angles).astype(F32) if half else None for fn in (np.cos, np.sin)]
    normed = [normal(seed, 1, depth, dtype=dtype) if norms else None for seed in (4, 5)]
    return (
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=dtype),
        (normal(3, hidden, q_size + 2 * kv_size) * hidden**-0.5).astype(weights),
        1e-5,
        q_size,
        kv_size,
        normal(8, *cache_shapes[0], dtype=dtype),
        normal(9, *cache_shapes[1], dtype=dtype),
        positions_of_tokens[:, None].astype(np.int32),
        depth**-0.5,
        (normal(6, q_size, hidden) * q_size**-0.5).astype(weights),
        kv,
        *turned,
        *normed,
        None,
        slots,
        tables,
        *options,
    )


class TestAttentionBlockDecode(KernelTests):
    """Heads beside each other on the partitions, of several parts, and such as need several passes.

    Weights may be cast and wait for their turn, and keys may take several loads.
    """

    case = KernelCase(
        kernels.attention_block_decode,
        formed,
        values=slow(
            dict(depth=64, half=32),
            dict(depth=32, half=16, heads=3, kv=1),
            dict(depth=192, half=40),
            dict(depth=256, half=128, kv=1, norms=False),
            dict(half=0, norms=False, dtype=BF16),
            dict(new=3, block=16, options=(20, 5.0, normal(3, 1, 4))),
            dict(sequences=66, heads=30, kv=2, positions=8),
            dict(sequences=2, heads=18, kv=18, depth=128, positions=8),
            dict(hidden=4100, dtype=BF16, heads=6),
            dict(sequences=18, depth=128, positions=640, dtype=BF16, half=64),
        ),
        every_chip=[{}],
        refusals=[
            refuse("w_qkv has to be (96, 128) for x (3, 96), not (96, 100)", w_qkv=normal(1, 96, 100)),
            refuse("w_o has to be (64, 96) for x (3, 96), not (64, 90)", w_o=normal(1, 64, 90)),
            refuse("kv_size is 16, but the caches have 2 key/value heads of 16: pass 32", kv_size=16),
        ],
        undefined=[
            Undefined(
                dict(x=1, k_cache=1, v_cache=1),
                dict(sequences=4, hidden=129, depth=32, half=16),
                value,
                rows=[1],
                chips=GEN3_ON,
            )
            for value in (np.nan, np.inf)
        ],
        ranks=[
            OverHeads(2, settings=settings | dict(norms=False))
            for settings in (dict(hidden=130), dict(dtype=BF16, weights=BF16))
        ],
    )


class TestAttentionBlockDecodeOfWideHeads(KernelTests):
    """Heads of 32 on two key/value heads."""

    case = KernelCase(
        kernels.attention_block_decode,
        arguments,
        every_chip=vary(dtype=[*DTYPES]),
        values=together("sequences hidden positions", (1, 127, 8), (5, 129, 128), (17, 300, 129)),
    )


def quantised(elements: Any = FP8, **settings: Any) -> tuple[Any, ...]:
    """Draw the arguments of `formed` with weights of 8 bits and their scales; `elements` is the weights' dtype."""
    inputs = named(kernels.attention_block_decode, formed(**dict(dtype=BF16) | settings))
    for name in ("w_qkv", "w_o"):
        inputs[name], inputs[f"{name}_scales"] = quantise(inputs[name], elements)
    return in_order(kernels.attention_block_decode, **inputs)


class TestQuantisedAttentionBlockDecode(KernelTests):
    """Weights of 8 bits with a scale for each column, of heads side by side and of several tiles, in several groups."""

    case = KernelCase(
        kernels.attention_block_decode,
        quantised,
        values=[
            dict(elements=INT8),
            dict(dtype=F32),
            dict(dtype=F32, elements=INT8),
            dict(depth=64, half=32, heads=6),
            dict(depth=32, half=16, heads=3, kv=1),
            dict(depth=192, half=40, elements=INT8),
            dict(hidden=129, half=0, norms=False),
            dict(sequences=70, positions=8, hidden=127),
            dict(new=3, block=16, hidden=128),
            *slow(
                dict(sequences=66, heads=30, kv=2, positions=8),
                dict(sequences=2, heads=18, kv=18, depth=128, positions=8),
                dict(hidden=4100, heads=6),
            ),
        ],
        every_chip=[dict(depth=32, half=16, elements=elements) for elements in (FP8, INT8)],
        refusals=[
            refuse(
                "w_qkv_scales is float32 [1, 128], one for each column of w_qkv, not float32 (1, 96)",
                w_qkv_scales=normal(1, 1, 96),
            ),
            refuse(
                "w_o_scales is float32 [1, 96], one for each column of w_o, not bfloat16 (1, 96)",
                w_o_scales=lambda scales: scales.astype(BF16),
            ),
        ],
        two_sums=vary(depth=32, half=16, hidden=172, sequences=[3, 130], positions=8, elements=[FP8, INT8]),
        ranks=[
            OverPositions(2, settings=dict(heads=8, norms=False, sequences=2, hidden=130), summed=True),
            *(
                OverHeads(
                    2, dict(k_cache=1, v_cache=1, w_o=0), dict(hidden=130, norms=False, elements=elements)
                )
                for elements in (FP8, INT8)
            ),
        ],
    )


def test_two_batches_of_one_bucket_replay_one_program() -> None:
    """Other hidden states, caches, positions and tables of pages: the same instructions, each batch's own bytes."""
    batches = [list(formed(new=2, block=16)) for _ in range(2)]
    for index in (0, 6, 7):
        batches[1][index] = batches[1][index][::-1].copy()
    first, tables = batches[1][8] // 2, batches[1][18][::-1].copy()
    first[1::2] = first[::2] + 1
    tokens = np.arange(6)[:, None] // 2
    slots = tables[tokens, first // 16] * 16 + first % 16
    batches[1][8], batches[1][17], batches[1][18] = first, slots.astype(np.int32), tables
    replays, modes = ReplayCache(), []
    for batch in batches:
        world = simulate.World("trn2", replay=ReplayOptions(exact=True), replays=replays)
        done = world.launch(kernels.attention_block_decode, [(copied(batch), {})], mode=simulate.Mode.replay)
        modes.append(done.mode.value)
        for one, other in zip(done.outputs[0], run(kernels.attention_block_decode, batch, "trn2")):
            assert one.tobytes() == other.tobytes()
    assert modes == ["eager", "replay"]


@pytest.mark.parametrize("target", TARGETS)
def test_loads_of_a_later_part_run_under_an_earlier_one(target: str) -> None:
    """In program order a launch takes less than its three parts one after another."""
    x, norm, w_qkv, eps, q_size, kv_size, *caches, positions, scale, w_o, kv, cos, sin, _, _ = arguments(
        4, 2048, 16, 1024, BF16
    )
    tokens = np.zeros((4, q_size), BF16), np.zeros((4, kv_size), BF16), np.zeros((4, kv_size), BF16)
    launched = (
        (
            kernels.qkv_projection,
            in_order(
                kernels.qkv_projection,
                x=x,
                norm_weight=norm,
                w_qkv=w_qkv,
                eps=eps,
                q_size=q_size,
                kv_size=kv_size,
            ),
        ),
        (kernels.attention_decode, (tokens[0], *caches, positions, scale, *tokens[1:], kv, cos, sin)),
        (kernels.output_projection, (tokens[0], w_o, x)),
        (
            kernels.attention_block_decode,
            (x, norm, w_qkv, eps, q_size, kv_size, *caches, positions, scale, w_o, kv, cos, sin),
        ),
    )
    times = []
    for kernel, inputs in launched:
        done = simulate.World(target).launch(kernel, [(inputs, {})], mode=simulate.Mode.dry)
        times.append(schedule(done.streams, done.hardware, Reading.program).length_ns)
    assert times[3] < 0.95 * sum(times[:3])
