"""attention_block_decode: one launch does what three do, and takes less time."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from simulate.replay import ReplayCache, ReplayOptions
from simulate.timing import Reading, schedule
from tests.kernels.accuracy import TARGETS, check, compare_all, copied, normal, run

BF16 = ml_dtypes.bfloat16


def arguments(
    sequences: int, hidden: int, heads: int, positions: int, dtype: Any = np.float32
) -> tuple[Any, ...]:
    """x … w_o for heads of 32 on two key/value heads, then the number of those, tables and norms."""
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
        np.cos(angles).astype(np.float32),
        np.sin(angles).astype(np.float32),
        normal(7, 1, depth, dtype=dtype),
        normal(8, 1, depth, dtype=dtype),
    )


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [np.float32, BF16])
def test_a_block_is_as_exact_as_numpys(target: str, dtype: type) -> None:
    check(
        kernels.attention_block_decode,
        kernels.attention_block_decode_reference,
        arguments(3, 256, 4, 172, dtype),
        target,
    )


@pytest.mark.parametrize(("sequences", "hidden", "positions"), [(1, 127, 8), (5, 129, 128), (17, 300, 129)])
def test_a_block_of_ragged_sizes_is_as_exact_as_numpys(sequences: int, hidden: int, positions: int) -> None:
    check(
        kernels.attention_block_decode,
        kernels.attention_block_decode_reference,
        arguments(sequences, hidden, 4, positions),
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
    dtype: Any = np.float32,
    weights: Any = np.float32,
    options: tuple[Any, ...] = (None, None, None),
) -> tuple[Any, ...]:
    """All arguments, in order; caches in pages of `block` positions if that is not 0; tables turn 2 * half elements."""
    tokens, q_size, kv_size = sequences * new, heads * depth, kv * depth
    rng = np.random.default_rng(7)
    first = rng.integers(0, positions - new + 1, (sequences, 1))
    at = (first + np.arange(new)).reshape(-1)
    held = [(sequences, kv, depth, positions), (sequences, kv, positions, depth)]
    slots = tables = None
    if block:
        each = positions // block
        held = [(sequences * each + 1, block, kv, depth)] * 2
        tables = rng.permutation(sequences * each + 1)[:-1].reshape(sequences, each).astype(np.int32)
        slots = tables[np.arange(sequences).repeat(new), at // block] * block + at % block
        slots = slots[:, None].astype(np.int32)
    angles = np.arange(positions)[:, None] * 0.7 ** np.arange(max(half, 1))
    turned = [fn(angles).astype(np.float32) if half else None for fn in (np.cos, np.sin)]
    normed = [normal(seed, 1, depth, dtype=dtype) if norms else None for seed in (4, 5)]
    return (
        normal(1, tokens, hidden, dtype=dtype),
        normal(2, 1, hidden, dtype=dtype),
        (normal(3, hidden, q_size + 2 * kv_size) * hidden**-0.5).astype(weights),
        1e-5,
        q_size,
        kv_size,
        normal(8, *held[0], dtype=dtype),
        normal(9, *held[1], dtype=dtype),
        at[:, None].astype(np.int32),
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


FORMS = {
    "two heads lie beside each other on the partitions": {"depth": 64, "half": 32},
    "four do, of a number that four does not divide": {"depth": 32, "half": 16, "heads": 3, "kv": 1},
    "heads of one and a half parts": {"depth": 192, "half": 40},
    "heads of two parts, turned across them": {"depth": 256, "half": 128, "kv": 1, "norms": False},
    "neither norm nor rotation": {"half": 0, "norms": False, "dtype": BF16},
    "several new tokens, from pages": {"new": 3, "block": 16, "options": (20, 5.0, normal(3, 1, 4))},
    "heads that need several passes": {"sequences": 66, "heads": 30, "kv": 2, "positions": 8},
    "values that need several passes": {"sequences": 2, "heads": 18, "kv": 18, "depth": 128, "positions": 8},
    "weights that are cast, and wait for their turn": {"hidden": 4100, "dtype": BF16, "heads": 6},
    "keys that take several loads": {
        "sequences": 18,
        "depth": 128,
        "positions": 640,
        "dtype": BF16,
        "half": 64,
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS.values(), ids=list(FORMS))
def test_a_block_of_another_form_is_as_exact_as_numpys(form: dict[str, Any]) -> None:
    check(
        kernels.attention_block_decode,
        kernels.attention_block_decode_reference,
        formed(**form),
        "trn2",
    )


def test_two_batches_of_one_bucket_replay_one_program() -> None:
    """Other hidden states, caches, positions and tables of pages: the same instructions, each batch's own bytes."""
    batches = [list(formed(new=2, block=16)) for _ in range(2)]
    for place in (0, 6, 7):
        batches[1][place] = batches[1][place][::-1].copy()
    first, others = batches[1][8] // 2, batches[1][18][::-1].copy()
    first[1::2] = first[::2] + 1
    tokens = np.arange(6)[:, None] // 2
    slots = others[tokens, first // 16] * 16 + first % 16
    batches[1][8], batches[1][17], batches[1][18] = first, slots.astype(np.int32), others
    replays, modes = ReplayCache(), []
    for given in batches:
        world = simulate.World("trn2", replay=ReplayOptions(exact=True), replays=replays)
        done = world.launch(kernels.attention_block_decode, [(copied(given), {})], mode=simulate.Mode.replay)
        modes.append(done.mode.value)
        for one, other in zip(done.outputs[0], run(kernels.attention_block_decode, given, "trn2")):
            assert one.tobytes() == other.tobytes()
    assert modes == ["eager", "replay"]


@pytest.mark.parametrize("target", TARGETS[1:])
def test_what_is_no_number_stays_in_its_row(target: str) -> None:
    given = formed(sequences=4, hidden=129, depth=32, half=16)
    spoiled = copied(given)
    spoiled[0][1] = np.nan
    spoiled[6][1] = spoiled[7][1] = np.inf
    for one, other in zip(*(run(kernels.attention_block_decode, each, target) for each in (given, spoiled))):
        assert np.array_equal(np.delete(one, 1, axis=0), np.delete(other, 1, axis=0))


@pytest.mark.parametrize(("hidden", "dtype"), [(129, np.float32), (96, BF16)])
def test_two_ranks_add_their_heads(hidden: int, dtype: Any) -> None:
    whole = formed(hidden=hidden, dtype=dtype, weights=dtype, norms=False)
    x, norm, w_qkv, eps, q_size, kv_size, k_cache, v_cache, at, scale, w_o, kv, *tables = whole
    tables[4] = ReplicaGroup([[0, 1]])
    q, k, v = np.split(w_qkv, [q_size, q_size + kv_size], axis=1)
    shards = []
    for rank in range(2):
        columns = [np.split(each, 2, axis=1)[rank] for each in (q, k, v)]
        caches = [np.ascontiguousarray(each[:, rank : rank + 1]) for each in (k_cache, v_cache)]
        shards.append(
            (x, norm, np.concatenate(columns, axis=1), eps, q_size // 2, kv_size // 2, *caches, at, scale)
            + (np.split(w_o, 2)[rank].copy(), kv // 2, *tables)
        )
    done = simulate.World("trn2", ranks=2).launch(
        kernels.attention_block_decode, [(each, {}) for each in shards]
    )
    first, second = (each[0] for each in done.outputs)
    assert np.array_equal(first, second)
    compare_all([first], lambda *given: kernels.attention_block_decode_reference(*given)[:1], whole)


@pytest.mark.parametrize(
    ("place", "wrong", "message"),
    [
        (2, np.zeros((96, 100), np.float32), r"w_qkv is \(96, 128\) beside x \(3, 96\), not \(96, 100\)"),
        (10, np.zeros((64, 90), np.float32), r"w_o is \(64, 96\) beside x \(3, 96\), not \(64, 90\)"),
        (5, 16, "kv_size is 32 for 2 heads of 16, not 16"),
    ],
)
def test_weights_that_do_not_fit_are_refused(place: int, wrong: Any, message: str) -> None:
    given = list(formed())
    given[place] = wrong
    with pytest.raises(AssertionError, match=message):
        run(kernels.attention_block_decode, given)


@pytest.mark.parametrize("target", TARGETS)
def test_loads_of_a_later_part_run_under_an_earlier_one(target: str) -> None:
    """In program order a launch takes less than its three parts one after another."""
    x, norm, w_qkv, eps, q_size, kv_size, *caches, at, scale, w_o, kv, cos, sin, _, _ = arguments(
        4, 2048, 16, 1024, BF16
    )
    tokens = np.zeros((4, q_size), BF16), np.zeros((4, kv_size), BF16), np.zeros((4, kv_size), BF16)
    launched = (
        (kernels.qkv_projection, (x, norm, w_qkv, eps, q_size, kv_size)),
        (kernels.attention_decode, (*tokens, *caches, at, scale, kv, cos, sin)),
        (kernels.output_projection, (tokens[0], w_o, x)),
        (
            kernels.attention_block_decode,
            (x, norm, w_qkv, eps, q_size, kv_size, *caches, at, scale, w_o, kv, cos, sin),
        ),
    )
    times = []
    for kernel, given in launched:
        done = simulate.World(target).launch(kernel, [(given, {})], mode=simulate.Mode.dry)
        times.append(schedule(done.streams, done.hardware, Reading.program).length_ns)
    assert times[3] < 0.95 * sum(times[:3])
