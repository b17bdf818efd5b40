"""Replay: eager's bytes without planning, and never a stale program."""

from __future__ import annotations

import dataclasses
import gc
import sys

import ml_dtypes
import numpy as np
import pytest

import simulate
from simulate.check import gathered
from simulate.cli import main
from simulate.memory import Storage
from simulate.replay import Program, ReplayCache, ReplayMismatch, ReplayOptions, why_not_replayed
from simulate.world import process_replays, replaying

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

SCALE = 2.0
STEPS = [1.0, 2.0]


def replayed(kernel, *arguments, ranks: int = 1, target: str = "trn2"):
    """Launch once in replay mode; `arguments` are those of the one rank, or a list of them for several."""
    world = simulate.World(target, ranks=ranks, replays=process_replays())
    launches = [(tuple(arguments), {})] if ranks == 1 else [(tuple(argument), {}) for argument in arguments]
    done = world.launch(kernel, launches, mode=simulate.Mode.replay)
    return done.outputs[0] if ranks == 1 else done.outputs


def scaled(x, factor=1.0):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
    nisa.dma_copy(dst=out, src=tile)
    return out


def floats(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def test_a_second_launch_is_replayed_on_its_own_data(cache) -> None:
    first, second = floats(1, 128, 9), floats(2, 128, 9)
    a, b = replayed(scaled, first, 3.0), replayed(scaled, second, 3.0)
    assert (cache.report.recorded, cache.report.hits) == (1, 1)
    assert np.array_equal(a, 3 * first) and np.array_equal(b, 3 * second)


def attention_like(x, w, cache, position):
    """Run matmuls that accumulate, narrow weights, a reduction, a gather and a scatter by a run-time number."""
    rows, hidden = x.shape
    out = nl.ndarray((rows, hidden), dtype=nl.float32, buffer=nl.shared_hbm)
    loaded_position = nl.load(position)
    data, weights = nl.load(x), nl.load(w)
    wide = nl.ndarray(weights.shape, dtype=nl.float32)
    nisa.tensor_copy(dst=wide, src=weights)
    turned = nl.ndarray((hidden, rows), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_transpose(dst=turned, data=data)
    stationary = nl.ndarray((hidden, rows), dtype=nl.float32)
    nisa.tensor_copy(dst=stationary, src=turned)
    total = nl.ndarray((rows, hidden), dtype=nl.float32, buffer=nl.psum)
    for step in range(3):
        nisa.nc_matmul(dst=total, stationary=stationary, moving=wide, accumulate=step > 0)
    sums = nl.ndarray((rows, 1), dtype=nl.float32)
    result = nl.ndarray((rows, hidden), dtype=nl.float32)
    nisa.activation_reduce(dst=result, op=nl.exp, data=total, reduce_op=nl.add, reduce_res=sums, scale=0.01)
    nisa.tensor_scalar(dst=result, data=result, op0=nl.multiply, operand0=sums)
    row = nl.ndarray((1, hidden), dtype=nl.float32)
    nisa.dma_copy(dst=row, src=cache.ap([[hidden, 1], [1, hidden]], scalar_offset=loaded_position))
    nisa.tensor_tensor(dst=result[0:1], data1=result[0:1], data2=row, op=nl.add)
    nisa.dma_copy(dst=cache.ap([[hidden, 1], [1, hidden]], scalar_offset=loaded_position), src=result[0:1])
    nisa.dma_copy(dst=out, src=result)
    return out, cache


def attention_arguments(seed: int):
    weights = floats(seed + 1, 32, 32).astype(ml_dtypes.bfloat16)
    return floats(seed, 16, 32), weights, floats(seed + 2, 8, 32), np.array([[seed % 8]], np.int32)


def test_replay_gives_eagers_bytes(cache) -> None:
    for seed in range(12):
        eager, again = attention_arguments(seed), attention_arguments(seed)
        wanted = (
            simulate.World("trn2", replays=process_replays()).launch(attention_like, [(eager, {})]).outputs[0]
        )
        got = replayed(attention_like, *again)
        assert got[0].tobytes() == wanted[0].tobytes()
        assert got[1] is again[2] and got[1].tobytes() == wanted[1].tobytes()
    assert cache.report.hits == 11


def test_results_of_earlier_launches_stay_as_they_are() -> None:
    results = [replayed(scaled, floats(seed, 4, 4), 2.0) for seed in range(4)]
    for seed, result in enumerate(results):
        assert np.array_equal(result, 2 * floats(seed, 4, 4))


def test_the_same_array_with_new_content_is_read_anew() -> None:
    x = floats(0, 4, 4)
    replayed(scaled, x, 2.0)
    x += 1
    assert np.array_equal(replayed(scaled, x, 2.0), 2 * x)


def test_replayed_ranks_complete_rendezvous(cache) -> None:
    group = ncc.ReplicaGroup([[0, 1, 2]])

    def total(x, group):
        inside = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=inside, src=x)
        ncc.all_reduce(srcs=[inside], dsts=[out], replica_group=group, op=nl.add)
        ncc.all_reduce(srcs=[out], dsts=[inside], replica_group=group, op=nl.maximum)
        return out

    for seed in range(3):
        arrays = [floats(seed * 3 + rank, 4, 4).round() for rank in range(3)]
        for out in replayed(total, *[(array, group) for array in arrays], ranks=3):
            assert np.array_equal(out, sum(arrays))
    assert cache.report.hits == 2


def test_the_stream_of_a_replay_is_the_recorded_one() -> None:
    world = simulate.World("trn1", replays=process_replays())
    launches = [
        world.launch(scaled, [((floats(seed, 4, 4), 2.0), {})], mode=simulate.Mode.replay)
        for seed in range(2)
    ]
    assert [launch.mode for launch in launches] == [simulate.Mode.eager, simulate.Mode.replay]
    assert launches[0].streams[0].text() == launches[1].streams[0].text()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("shape", lambda x: (x[:3].copy(), 2.0)),
        ("dtype", lambda x: (x.astype(np.float16), 2.0)),
        ("static argument", lambda x: (x, 3.0)),
        ("type of a static argument", lambda x: (x, 2)),
    ],
)
def test_another_argument_is_another_program(cache, name, change) -> None:
    x = floats(0, 4, 4)
    replayed(scaled, x, 2.0)
    changed, factor = change(x)
    result = replayed(scaled, changed, factor)
    assert cache.report.hits == 0, name
    assert np.array_equal(result, changed * changed.dtype.type(factor))


def test_another_target_precision_or_number_of_ranks_is_another_program(cache, monkeypatch) -> None:
    x = floats(0, 4, 4)
    replayed(scaled, x, 2.0)
    replayed(scaled, x, 2.0, target="trn1")
    replayed(scaled, (x, 2.0), (x, 2.0), ranks=2)
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    replayed(scaled, x, 2.0)
    assert cache.report.hits == 0


def test_one_array_twice_is_not_two_arrays(cache) -> None:
    def both(a, b):
        tile = nl.load(a)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
        nisa.dma_copy(dst=a, src=tile)
        return b

    x, y = np.zeros((2, 2), np.float32), np.zeros((2, 2), np.float32)
    assert replayed(both, x, y).max() == 0
    assert replayed(both, x, x).min() == 2
    assert cache.report.hits == 0


def global_scale(x):
    return scaled(x, SCALE)


def listed_scale(x):
    return scaled(x, STEPS[0])


def default_scale(x, factor=2.0):
    return scaled(x, factor)


def test_a_changed_global_is_never_served_by_a_stale_program(cache, monkeypatch) -> None:
    x = floats(0, 4, 4)
    assert np.array_equal(replayed(global_scale, x), 2 * x)
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert np.array_equal(replayed(global_scale, x), 5 * x)
    assert cache.report.dropped == 1


def test_a_changed_list_is_never_served_by_a_stale_program() -> None:
    x = floats(0, 4, 4)
    before = STEPS[0]
    try:
        assert np.array_equal(replayed(listed_scale, x), before * x)
        STEPS[0] = 7.0
        assert np.array_equal(replayed(listed_scale, x), 7 * x)
    finally:
        STEPS[0] = before


def test_a_changed_default_is_never_served_by_a_stale_program(monkeypatch) -> None:
    x = floats(0, 4, 4)
    assert np.array_equal(replayed(default_scale, x), 2 * x)
    monkeypatch.setattr(default_scale, "__defaults__", (9.0,))
    assert np.array_equal(replayed(default_scale, x), 9 * x)


def test_a_changed_closure_is_never_served_by_a_stale_program() -> None:
    factor = 2.0

    def kernel(x):
        return scaled(x, factor)

    x = floats(0, 4, 4)
    assert np.array_equal(replayed(kernel, x), 2 * x)
    factor = 4.0
    assert np.array_equal(replayed(kernel, x), 4 * x)


def test_a_changed_function_is_never_served_by_a_stale_program(monkeypatch) -> None:
    x = floats(0, 4, 4)
    assert np.array_equal(replayed(global_scale, x), 2 * x)
    monkeypatch.setitem(globals(), "scaled", lambda x, factor: x)
    assert replayed(global_scale, x) is x


def test_launches_that_depend_on_data_are_refused_with_a_reason(cache) -> None:
    def loops(x, rows):
        count = nisa.register_alloc()
        nisa.register_load(count, nl.load(rows))
        tile = nl.load(x)

        def body(i):
            nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.add)

        nl.fori_loop(0, count, body)
        nisa.dma_copy(dst=x, src=tile)
        return x

    for times in (1, 3):
        x = np.ones((2, 2), np.float32)
        assert replayed(loops, x, np.array([[times]], np.int32))[0, 0] == 2**times
    assert cache.report.refusals == {"the kernel's Python reads values": 2}


def test_a_kernel_that_prints_prints_every_time(cache, capsys) -> None:
    def prints(x):
        tile = nl.load(x)
        print(tile)
        nisa.dma_copy(dst=x, src=tile)
        return x

    for value in (1.0, 2.0):
        replayed(prints, np.full((1, 1), value, np.float32))
    assert "[[1.]]" in (shown := capsys.readouterr().out) and "[[2.]]" in shown
    assert cache.report.hits == 0


def test_writes_that_depend_on_data_are_not_replayed(cache) -> None:
    def gathers(table, rows):
        out = nl.ndarray((4, 3), dtype=table.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[0:2], src=nl.load(table[0:2]))
        nisa.dma_copy(
            dst=out[2:4],
            src=table.ap([[3, 2], [1, 3]], vector_offset=nl.load(rows)),
            oob_mode=nisa.oob_mode.skip,
        )
        return out

    table = floats(0, 8, 3)
    replayed(gathers, table, np.array([[1], [2]], np.int32))
    assert cache.report.recorded == 1
    skipped = np.array([[1], [99]], np.int32)
    cache.clear()
    replayed(gathers, table, skipped)
    assert "which bytes of a tensor are written depends on data" in cache.report.refusals


def test_a_kernel_over_an_unknown_object_is_launched_eagerly(cache) -> None:
    class Settings:
        factor = 2.0

    settings = Settings()

    def kernel(x):
        return scaled(x, settings.factor)

    x = floats(0, 4, 4)
    replayed(kernel, x)
    settings.factor = 3.0
    assert np.array_equal(replayed(kernel, x), 3 * x)
    assert list(cache.report.refusals) == ["the closure of kernel is a Settings, which may change unseen"]


def test_the_cache_is_bounded() -> None:
    cache = ReplayCache(capacity=2)
    with replaying(cache):
        for columns in (1, 2, 3, 1):
            replayed(scaled, floats(0, 4, columns), 2.0)
    assert (cache.report.recorded, cache.report.dropped, cache.report.hits) == (4, 2, 0)


def test_random_numbers_start_over_with_every_launch(cache) -> None:
    def noise(x):
        tile = nl.ndarray((4, 4), dtype=nl.uint32)
        nisa.rng(dst=tile)
        out = nl.ndarray((4, 4), dtype=nl.uint32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    x = floats(0, 1, 1)
    first, second = replayed(noise, x), replayed(noise, x)
    assert cache.report.hits == 1
    assert np.array_equal(first, second)


def test_every_world_owns_its_programs(cache) -> None:
    x = floats(0, 4, 4)
    one, other = simulate.World("trn2"), simulate.World("trn2", replays=process_replays())
    for world in (one, one, other):
        world.launch(scaled, [((x, 2.0), {})], mode=simulate.Mode.replay)
    assert (one.replays.report.hits, other.replays.report.hits, cache.report.hits) == (1, 0, 0)


def test_plain_calls_share_the_programs_of_the_process(cache, monkeypatch) -> None:
    monkeypatch.setenv("NKW_REPLAY", "1")
    for _ in range(2):
        simulate.launch(scaled, [((floats(0, 4, 4), 2.0), {})], mode=simulate.Mode.replay)
    assert process_replays() is cache and cache.report.hits == 1


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, ml_dtypes.float8_e5m2])
def test_a_one_dimensional_result_of_bytes_keeps_its_dtype(cache, dtype) -> None:
    def kernel(x):
        out = nl.ndarray((16,), dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x)
        return out

    x = np.arange(16).astype(dtype)
    for _ in range(2):
        assert replayed(kernel, x).dtype == dtype
    assert cache.report.hits == 1


@dataclasses.dataclass
class Mutable(nl.NKIObject):
    factor: float = 2.0


class Plain(nl.NKIObject):
    factor = 2.0


def test_parameter_objects_that_may_change_are_launched_eagerly(cache) -> None:
    x, plain = floats(0, 4, 4), Plain()

    def takes(x, settings):
        return scaled(x, settings.factor)

    def closes_over(x):
        return scaled(x, plain.factor)

    for factor in (2.0, 3.0):
        plain.factor = factor
        assert np.array_equal(replayed(takes, x, Mutable(factor)), factor * x)
        assert np.array_equal(replayed(closes_over, x), factor * x)
    assert cache.report.hits == 0


def attention_launch(seed: int, **options):
    world = simulate.World("trn2", replay=ReplayOptions(**options), replays=process_replays())
    return world.launch(attention_like, [(attention_arguments(seed), {})], mode=simulate.Mode.replay)


@pytest.mark.parametrize("exact", [False, True])
def test_a_replay_is_verified_against_an_eager_launch(cache, exact) -> None:
    with simulate.recorded() as launches:
        for seed in range(3):
            attention_launch(seed, exact=exact, verify=True)
    assert cache.report.verified == 2
    assert len(launches) == 3


def test_a_replay_that_differs_is_refused_with_kernel_and_output(cache, monkeypatch) -> None:
    def wrong(program, arrays, exact, peers):
        outputs = program.run(arrays, exact)
        outputs[0][0][3, 4] += 1.0
        return outputs

    attention_launch(0, verify=True)
    attention_launch(1, verify=True)
    monkeypatch.setattr(cache, "run", wrong)
    with pytest.raises(ReplayMismatch) as error:
        attention_launch(1, verify=True)
    assert str(error.value).startswith(
        "[NKW-REPLAY-MISMATCH] attention_like: output 0 differs from the eager launch in 1 of 512 elements by more"
    )
    assert "at (3, 4)" in str(error.value)
    with pytest.raises(ReplayMismatch) as error:
        attention_launch(1, exact=True, verify=True)
    assert str(error.value) == (
        "[NKW-REPLAY-MISMATCH] attention_like: output 0 of an exact replay differs from the eager launch in 1 of 512 "
        "elements; their bytes must be equal; report the kernel, which shows a fault of the simulator"
    )


def test_a_changed_argument_that_differs_is_refused_too(cache, monkeypatch) -> None:
    def forgets(program, arrays, exact, peers):
        before = arrays[0][2].copy()
        outputs = program.run(arrays, exact)
        arrays[0][2][...] = before
        return outputs

    attention_launch(0)
    monkeypatch.setattr(cache, "run", forgets)
    with pytest.raises(ReplayMismatch, match=r"attention_like: output 1 differs"):
        attention_launch(1, verify=True)


def test_integer_results_have_to_be_the_same(cache, monkeypatch) -> None:
    def counts(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=nl.load(x))
        return out

    def wrong(program, arrays, exact, peers):
        outputs = program.run(arrays, exact)
        outputs[0][0, 0] += 1
        return outputs

    x, world = (
        np.ones((4, 4), np.int32),
        simulate.World("trn2", replay=ReplayOptions(verify=True), replays=process_replays()),
    )
    for _ in range(2):
        world.launch(counts, [((x,), {})], mode=simulate.Mode.replay)
    monkeypatch.setattr(cache, "run", wrong)
    with pytest.raises(ReplayMismatch, match="output 0 differs from the eager launch in 1 of 16 elements"):
        world.launch(counts, [((x,), {})], mode=simulate.Mode.replay)


def test_the_environment_chooses_where_the_world_does_not(cache, monkeypatch) -> None:
    monkeypatch.setenv("NKW_EXACT_REPLAY", "1")
    monkeypatch.setenv("NKW_VERIFY_REPLAY", "1")
    x = floats(0, 4, 4)
    for _ in range(2):
        replayed(scaled, x, 2.0)
    assert (cache.report.verified, cache.report.rewritten) == (1, 0)
    monkeypatch.setenv("NKW_EXACT_REPLAY", "0")
    replayed(scaled, x, 2.0)
    assert (cache.report.verified, cache.report.rewritten) == (2, 1)
    monkeypatch.setenv("NKW_VERIFY_REPLAY", "yes")
    with pytest.raises(simulate.NkwError, match="NKW_VERIFY_REPLAY is 'yes'; set it to 0 or 1"):
        replayed(scaled, x, 2.0)


def test_the_report_counts_every_launch(cache) -> None:
    for seed in range(3):
        attention_launch(seed)
    replayed(scaled, floats(0, 4, 4)[:, ::2], 2.0)
    lines = cache.report.text().splitlines()
    assert lines[0] == "replay: 2 launches replayed, 1 recorded, 1 refused, 0 dropped, 0 verified"
    assert lines[1].startswith("  1 programs rewritten: 15 instructions into ")
    assert lines[1].endswith(", 0 matmuls fused into others, 0 executed as recorded")
    assert lines[2] == "  refused: an array is not contiguous (1)"
    assert set(cache.report.seconds) == {"eager", "rewriting", "replay"}


def test_an_argument_held_in_another_dtype_is_launched_eagerly(cache, monkeypatch) -> None:
    monkeypatch.setenv("NKI_PRECISE_FP", "0")
    for seed in range(3):
        x = floats(seed, 4, 4).astype(ml_dtypes.bfloat16)
        assert np.array_equal(replayed(scaled, x, 2.0), 2 * x)
    assert cache.report.refusals == {"an argument is stored in another dtype": 3}


def test_findings_do_not_depend_on_earlier_launches() -> None:
    def sparse(x):
        out = nl.ndarray((4, 8), dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[:, 0:4], src=nl.load(x))
        return out

    world, seen = simulate.World("trn2"), []
    for _ in range(3):
        done = world.launch(sparse, [((floats(0, 4, 4),), {})], mode=simulate.Mode.replay)
        seen.append((done.warnings, done.streams[0].text()))
    assert seen[0] == seen[1] == seen[2]
    assert len(seen[0][0]) == 1


def test_a_launch_that_is_interrupted_leaves_no_broken_program(cache, monkeypatch) -> None:
    program_run = sys.modules["simulate.replay.fusion.execute"].Fused.run
    attention_launch(0)
    attention_launch(0)

    def interrupted(self, peers):
        self._ranks[0].segments[0][0][0](*self._ranks[0].segments[0][0][1])
        raise KeyboardInterrupt

    monkeypatch.setattr("simulate.replay.fusion.execute.Fused.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        attention_launch(1)
    monkeypatch.setattr("simulate.replay.fusion.execute.Fused.run", program_run)
    for _ in range(2):
        attention_launch(1, verify=True)
    assert (cache.report.dropped, cache.report.recorded, cache.report.verified) == (1, 2, 1)


def test_an_interrupted_first_launch_is_not_kept(cache) -> None:
    def stops(x):
        tile = nl.load(x)
        if x.shape[0] == 4 and STEPS[-1] == 2.0:
            raise KeyboardInterrupt
        nisa.dma_copy(dst=x, src=tile)
        return x

    with pytest.raises(KeyboardInterrupt):
        replayed(stops, floats(0, 4, 4))
    assert cache.report.recorded == 0


def test_a_chain_of_rendezvous_completes(cache) -> None:
    """Rank 1 has a rendezvous with rank 0, then with rank 2, which waits."""
    first, second = ncc.ReplicaGroup([[0, 1]]), ncc.ReplicaGroup([[1, 2]])

    def chained(x, groups):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        total = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm)
        nisa.dma_copy(dst=total, src=x)
        for group in groups:
            summed = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.hbm)
            ncc.all_reduce(srcs=[total], dsts=[summed], replica_group=group, op=nl.add)
            total = summed
        nisa.dma_copy(dst=out, src=total)
        return out

    groups = [(first,), (first, second), (second,)]
    for exact in (False, False, True):
        world = simulate.World("trn2", ranks=3, replay=ReplayOptions(exact=exact), replays=process_replays())
        launches = [((np.full((4, 4), 10.0**rank, np.float32), groups[rank]), {}) for rank in range(3)]
        outputs = world.launch(chained, launches, mode=simulate.Mode.replay).outputs
        assert [int(output[0, 0]) for output in outputs] == [11, 111, 111]
    assert cache.report.hits == 2


def test_an_eager_launch_that_nobody_announced_can_be_replayed() -> None:
    first, second = floats(1, 128, 9), floats(2, 128, 9)
    done = simulate.launch(scaled, [((first, 3.0), {})])
    assert why_not_replayed(done) is None
    program = Program(done)
    (exact,) = program.run([[second]], exact=True)
    program.rewrite()
    (fused,) = program.run([[second]])
    assert np.array_equal(exact, 3 * second) and np.array_equal(fused, 3 * second)
    assert np.array_equal(done.outputs[0], 3 * first)


def test_a_dry_launch_has_no_values_to_repeat() -> None:
    done = simulate.launch(scaled, [((floats(1, 4, 4), 3.0), {})], mode=simulate.Mode.dry)
    assert why_not_replayed(done) == "a launch in mode dry has no values"
    with pytest.raises(simulate.errors.InvalidArgument) as error:
        Program(done)
    assert str(error.value) == (
        "[NKW-REPLAY-LAUNCH] a launch of scaled cannot be replayed: a launch in mode dry has no values; launch the "
        "kernel eagerly each time"
    )


def test_a_launch_on_a_logical_core_of_two_physical_cores_has_no_program() -> None:
    launches = [((floats(1, 4, 4), 3.0), {})]
    assert why_not_replayed(simulate.launch(scaled, launches, logical_core_size=1)) is None
    done = simulate.launch(scaled, launches, logical_core_size=2)
    assert why_not_replayed(done) == "a logical core of several physical cores"
    with pytest.raises(
        simulate.errors.InvalidArgument, match="several physical cores; launch the kernel eagerly"
    ):
        Program(done)


ADVICE = "pass arrays of the recorded shapes and dtypes, or launch the kernel eagerly"


@pytest.mark.parametrize("dtype", [np.float32, bool, np.int8])
def test_a_program_takes_arrays_of_the_recorded_shape_and_dtype_only(dtype) -> None:
    def copied(x):
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x)
        return out

    program = Program(simulate.launch(copied, [((np.ones((4, 6), dtype),), {})]))
    right = np.eye(4, 6).astype(dtype)
    wrong = {
        f"a {right.dtype} (6, 4)": np.ascontiguousarray(right.T),
        f"a {right.dtype} (4, 7)": np.ones((4, 7), dtype),
        f"a {right.dtype} (24,)": right.reshape(-1),
        "a int16 (4, 6)": right.astype(np.int16),
        f"a non-contiguous {right.dtype} (4, 6)": np.ones((4, 12), dtype)[:, ::2],
        "a list for an array": right.tolist(),
    }
    for exact in (True, False):
        (copy,) = program.run([[right]], exact)
        assert np.array_equal(copy, right)
        for seen, array in wrong.items():
            with pytest.raises(simulate.errors.InvalidArgument) as error:
                program.run([[array]], exact)
            assert str(error.value) == (
                f"[NKW-REPLAY-ARRAYS] a program got {seen}; its launch was recorded with "
                f"a contiguous {right.dtype} (4, 6); {ADVICE}"
            )
        for arrays, seen in (
            ([], "0 lists of arrays; its launch was recorded with 1, one per rank"),
            ([[right], [right]], "2 lists of arrays; its launch was recorded with 1, one per rank"),
            ([[]], "0 arrays for a rank; its launch was recorded with 1"),
            ([[right, right]], "2 arrays for a rank; its launch was recorded with 1"),
        ):
            with pytest.raises(simulate.errors.InvalidArgument) as error:
                program.run(arrays, exact)
            assert str(error.value) == f"[NKW-REPLAY-ARRAYS] a program got {seen}; {ADVICE}"
        assert not program.was_interrupted
        program.rewrite()


def test_a_program_takes_an_array_without_dims_as_it_was_recorded() -> None:
    def doubled(x):
        tile = nl.load(x.reshape((1, 1)))
        out = nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)
        nl.store(out, nl.add(tile, tile))
        return out

    program = Program(simulate.launch(doubled, [((np.array(1.0, np.float32),), {})]))
    for number in (np.array(3.0, np.float32), np.array([3.0], np.float32)):
        (out,) = program.run([[number]])
        assert out.item() == 6


@pytest.mark.slow
def test_a_launch_that_is_kept_holds_no_tensor_of_the_kernel() -> None:
    gc.collect()
    before = sum(type(candidate) is Storage and candidate.array.nbytes > 1 for candidate in gc.get_objects())
    done = simulate.launch(attention_like, [(attention_arguments(0), {})])
    gc.collect()
    after = sum(type(candidate) is Storage and candidate.array.nbytes > 1 for candidate in gc.get_objects())
    assert len(done.streams[0]) > 10 and after == before


def test_a_replay_refuses_an_index_that_does_not_exist(cache) -> None:
    def looks_up(table, rows):
        out = nl.ndarray((2, 3), dtype=table.dtype, buffer=nl.shared_hbm)
        tile = nl.ndarray((2, 3), dtype=table.dtype)
        nisa.dma_copy(dst=tile, src=table.ap([[3, 2], [1, 3]], vector_offset=nl.load(rows)))
        nisa.dma_copy(dst=out, src=tile)
        return out

    table = floats(0, 8, 3)
    for rows in ([1, 2], [0, 7]):
        output = replayed(looks_up, table, np.array(rows, np.int32)[:, None])
        assert np.array_equal(output, table[rows])
    for rows in ([8, 0], [0, -1]):
        messages = []
        for mode in (simulate.Mode.replay, simulate.Mode.eager):
            with pytest.raises(simulate.NkwError) as error:
                simulate.World("trn2", replays=process_replays()).launch(
                    looks_up, [((table, np.array(rows, np.int32)[:, None]), {})], mode=mode
                )
            messages.append((error.value.code, error.value.seen))
        assert messages[0] == messages[1]
    assert cache.report.hits == 3
    assert cache.report.unlowered == 0


SCRIPT = """
import numpy as np
import nki
import nki.isa as nisa
import nki.language as nl

@nki.jit
def doubled(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    nisa.dma_copy(dst=out, src=tile)
    return out

for seed in range(3):
    assert (doubled(np.full((4, 4), float(seed), np.float32)) == 2 * seed).all()
"""


@pytest.mark.parametrize(
    ("options", "summary"),
    [
        ([], "0 launches replayed, 0 recorded"),
        (["--replay"], "2 launches replayed, 1 recorded, 0 refused, 0 dropped, 0 verified"),
        (["--exact"], "2 launches replayed, 1 recorded, 0 refused, 0 dropped, 0 verified"),
        (["--verify-replay"], "2 launches replayed, 1 recorded, 0 refused, 0 dropped, 2 verified"),
    ],
)
def test_a_script_is_replayed_on_request(cache, monkeypatch, capsys, tmp_path, options, summary) -> None:
    for variable in ("NKW_REPLAY", "NKW_EXACT_REPLAY", "NKW_VERIFY_REPLAY"):
        monkeypatch.setenv(variable, "0")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    assert main(["run", *options, "--replay-report", str(script)]) == 0
    assert f"replay: {summary}" in capsys.readouterr().err
    assert bool(cache.report.rewritten) == (options in (["--replay"], ["--verify-replay"]))


@pytest.mark.parametrize(
    "read",
    [
        lambda tile: tile.array[0, 0],
        lambda tile: tile[0:1, 0:1].array.item(),
        lambda tile: tile.float32().sum(),
        lambda tile: tile.storage.array.view(np.float32)[0],
        lambda tile: tile.storage.host is None,
        lambda tile: float(tile.base_tensor.array[0, 0]),
        lambda tile: bytes(memoryview(tile.array)),
        lambda tile: len(repr(tile)),
        lambda tile: len(tile._repr_html_()),
    ],
)
def test_a_kernel_that_reads_values_is_computed_every_time(cache, read) -> None:
    def doubled_where_positive(x):
        tile = nl.load(x)
        seen = read(tile)
        factor = 2.0 if tile.array[0, 0] > 0 and seen is not None else 1.0
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=factor)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tile)
        return out

    ones = np.ones((4, 4), np.float32)
    assert np.array_equal(replayed(doubled_where_positive, ones), 2 * ones)
    assert np.array_equal(replayed(doubled_where_positive, -ones), -ones)
    assert cache.report.refusals == {"the kernel's Python reads values": 2}

    def only_reads(x):
        read(nl.load(x))
        return x

    assert simulate.launch(only_reads, [((ones,), {})]).reads_values


def test_a_kernel_that_reads_no_values_says_so() -> None:
    def scaled_copy(x):
        tile = nl.load(x)
        nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
        nisa.tensor_copy(dst=tile[:, 0:2], src=tile[:, 2:4])
        nisa.dma_copy(dst=x, src=tile)
        return x

    launches = [((np.ones((4, 4), np.float32),), {})]
    assert not simulate.launch(scaled_copy, launches).reads_values
    with gathered():  # detectors read values, and the kernel does not
        assert not simulate.launch(scaled_copy, launches).reads_values
