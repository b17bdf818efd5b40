"""Decode attention divided over two physical cores, and over ranks that divide the positions of a cache."""

from __future__ import annotations

from typing import Any

import numpy as np
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from simulate.replay import ReplayCache, ReplayOptions
from tests.kernels.accuracy import compare, copied, find_faults, in_float64, normal, summed_in_order
from tests.kernels.case import BF16, DTYPES, KernelCase, KernelTests, Ranks, refuse, slow, together
from tests.kernels.divided import OverPositions
from tests.kernels.test_attention_block_decode import arguments as block
from tests.kernels.test_attention_decode import DECODE, batch, step
from tests.kernels.test_attention_prefill import attended

SINKS = normal(12, 1, 8) * 3
ALONE = dict(position_group=ReplicaGroup([[0]]), position_rank=np.int32([[0]]))


class TestDecodeOnTwoCores(KernelTests):
    """Cores divide key/value heads, sequences or slots; caches get the bytes that one core writes."""

    case = KernelCase(
        kernels.attention_decode,
        step,
        two_sums=[
            *together(
                "firsts heads kv_heads depth half positions new",
                ((0, 130, 171), 8, 2, 32, 16, 172, 1),
                ((129, 2, 128), 3, 1, 32, 16, 172, 3),
                *(((first,), 6, 3, 8, 4, 4000, 1) for first in (0, 127, 2047, 2048, 2049, 3999)),
                ((90,), 3, 3, 8, 4, 128, 1),
                ((4094,), 2, 1, 8, 4, 8192, 4),
            ),
            *together(
                "firsts heads kv_heads depth half positions new",
                ((4000,), 4, 1, 8, 4, 8448, 2),
                ((5, 300), 4, 2, 16, 8, 768, 1),
                ((3, 80, 700), 1, 1, 8, 4, 768, 1),
                block=[16, 384],
            ),
            *together(
                "firsts positions",
                ((0, 70, 297), 300),
                ((2100,), 4000),
                heads=6,
                kv_heads=3,
                new=3,
                window=100,
                softcap=2.0,
                sinks=SINKS[:, :6],
            ),
        ],
        undivided=(1, 2),
    )


class TestSchedulesOfDecodeOnTwoCores(KernelTests):
    """No core reads or writes what the other one writes without a barrier between; pages may be shared."""

    case = KernelCase(
        kernels.attention_decode,
        step,
        two_sums=slow(
            dict(firsts=(4100,), heads=2, kv_heads=1, depth=2, positions=8192),
            dict(firsts=(40, 70, 3), heads=2, kv_heads=1, positions=128, block=16, shared=2),
        ),
        seeds=64,
    )


class TestBlockDivided(KernelTests):
    """Each rank projects its own heads, and the same keys and values; the sum over ranks is the whole block's."""

    case = KernelCase(
        kernels.attention_block_decode,
        block,
        two_sums=together(
            "sequences hidden heads positions",
            *((3, 256, 4, 172), (1, 130, 4, 300), (5, 1030, 8, 300)),
            dtype=[*DTYPES],
        ),
        ranks=[
            *slow(Ranks(1, {}, dict(sequences=2, hidden=130), seeds=64)),
            *(OverPositions(2, settings=dict(hidden=130), seeds=seeds, summed=True) for seeds in (0, 2)),
        ],
    )


def over(count: int, firsts: tuple[int, ...], positions: int, **settings: Any) -> OverPositions:
    """Return ranks that divide the positions of a step."""
    options = {name: settings.pop(name) for name in ("seeds", "chips", "kv_heads") if name in settings}
    return OverPositions(
        count,
        settings=dict(firsts=firsts, positions=positions, kv_heads=options.get("kv_heads", 2), **settings),
        paged="block" in settings,
        **options,
    )


def garbage(value: float) -> dict[str, Any]:
    """Return caches that hold a value from the first new position of each sequence on."""
    behind = np.arange(304) >= np.array(FIRSTS)[:, None]
    return dict(
        k_cache=lambda keys: np.where(behind[:, None, None], value, keys).astype(keys.dtype),
        v_cache=lambda values: np.where(behind[:, None, :, None], value, values).astype(values.dtype),
    )


FIRSTS = (0, 3, 140, 299)
WITH_ALL = dict(heads=8, new=3, window=40, softcap=2.0, sinks=SINKS)


class TestDecodeOverPositions(KernelTests):
    """Sequences shorter than a slot of each rank, and around what one chunk and one slot hold."""

    case = KernelCase(
        kernels.attention_decode,
        step,
        ranks=[
            *(
                over(
                    count, (0, 1, 6, 127, 128, 129, 1023), 1024, heads=16, dtype=BF16, chips=["trn1", "trn2"]
                )
                for count in (2, 8)
            ),
            over(4, (0, 70, 297), 304, **WITH_ALL),
            over(2, (0, 70, 297), 304, seeds=2, **WITH_ALL),
            over(4, (0, 500, 130), 512, kv_heads=1, block=64),
            over(2, (77,), 512, kv_heads=1, block=128, seeds=2),
            *(over(4, FIRSTS, 304, kv_heads=1, dtype=BF16, **garbage(value)) for value in (np.nan, np.inf)),
        ],
        refusals=[
            refuse(
                "2 position_ranks, but no position_group", position_ranks=2, position_rank=np.int32([[0]])
            ),
            refuse("position_ranks is 3; a power of two divides positions", ALONE, position_ranks=3),
            refuse("position_rank is [1, 1], not (1,)", ALONE, position_rank=np.int32([0])),
        ],
        tolerance=attended,
    )


def test_schedules_of_ranks_agree_and_one_program_serves_all_positions() -> None:
    world = simulate.World("trn2", 2, replay=ReplayOptions(exact=True), replays=ReplayCache())

    def launched(firsts: tuple[int, ...], mode: simulate.Mode = simulate.Mode.eager) -> Any:
        ranks = over(2, firsts, 304, kv_heads=1)
        shards = ranks.shards(TestDecodeOverPositions.case.arguments(ranks.settings))
        return world.launch(kernels.attention_decode, [(shard, {}) for shard in shards], mode=mode)

    assert find_faults(lambda: launched((5, 200)), seeds=8) == []
    assert len({stream.text() for firsts in ((5, 200), (0, 303)) for stream in launched(firsts).streams}) == 1
    launched((5, 200), simulate.Mode.replay)
    replayed, eager = launched((0, 303), simulate.Mode.replay), launched((0, 303))
    assert replayed.mode is simulate.Mode.replay
    for one, other in zip(replayed.outputs, eager.outputs):
        assert [output.tobytes() for output in one] == [output.tobytes() for output in other]


def test_partial_outputs_merge_to_the_softmax_of_all_keys() -> None:
    """The law that the ranks rely on, in float64 and without the kernels: o from shares by log-sum-exp."""
    q, k_cache, v_cache, positions, scale, k, v = map(in_float64, batch([200], 1, 1, 8, 256))
    arrays = [q, k_cache, v_cache, k, v]
    shares = []
    for rank in range(4):
        keys, values = k_cache[0, 0, :, rank:200:4], v_cache[0, 0, rank:200:4]
        scores = scale * (q @ keys)
        shares.append((np.exp(scores).sum(), np.exp(scores) @ values))
    new = np.exp(scale * (q @ k.T))
    total = sum(share[1] for share in shares) + new * v
    o = total / (sum(share[0] for share in shares) + new.sum())
    longer = [array.astype(np.longdouble) for array in arrays]
    exact, plain, in_order = (
        np.asarray(DECODE[1](*copied(inputs[:3]), positions, scale, *inputs[3:])[0])
        for inputs in (longer, arrays, [*map(summed_in_order, arrays)])
    )
    compare(o, exact, plain, in_order)
