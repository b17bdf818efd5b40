"""`nki.language` on tiles: what each function computes, against numpy in float64, and what it refuses."""

from __future__ import annotations

import math
import warnings

import numpy as np
import pytest

import simulate
from nkw.errors import InvalidArgument, RuleViolation, Unsupported
from simulate.nki import collectives as ncc
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run.launcher import ToleratedRule

TARGETS = ("trn1", "trn2", "trn3")
UNIT = 2.0**-23  # one unit in the last place of float32, relative


def run(function, *arrays, target="trn2", rules="chip"):
    """Return the results of `function` on arrays loaded to SBUF, brought back to HBM."""

    def kernel(*hbm_arrays):
        results = function(*(nl.load(x) for x in hbm_arrays))
        outs = [out_of(r) for r in (results if isinstance(results, tuple) else (results,))]
        return outs[0] if len(outs) == 1 else outs

    return simulate.World(target, rules=rules).launch(kernel, [(arrays, {})]).outputs[0]


def out_of(tile):
    if tile.buffer is nl.psum:
        copied = nl.ndarray(tile.shape, dtype=tile.dtype)
        nisa.tensor_copy(dst=copied, src=tile)
        tile = copied
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def normal(shape, seed=0, dtype=np.float32):
    return (np.random.default_rng(seed).standard_normal(shape) * 4).astype(dtype)


# -- operators


@pytest.mark.parametrize(
    ("function", "reference"), [(nl.floor, np.floor), (nl.ceil, np.ceil), (nl.trunc, np.trunc)]
)
def test_rounding_to_whole_numbers(function, reference):
    edges = [0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.2, 3.7, -3.2, -3.7, 2**23 - 0.5, 2**24, -(2**30), 3e9, -1e30]
    x = np.array([[*edges, np.inf, -np.inf, np.nan, *normal(45)]], np.float32)
    assert np.array_equal(run(function, x), reference(x), equal_nan=True)


def test_whole_numbers_in_another_dtype():
    x = normal((3, 5))
    assert np.array_equal(run(lambda t: nl.floor(t, dtype=nl.int32), x), np.floor(x).astype(np.int32))
    narrow = x.astype(np.float16)
    result = run(nl.ceil, narrow)
    assert result.dtype == np.float16 and np.array_equal(result, np.ceil(narrow))


def test_negative_logical_not_invert_and_copy():
    x, bits, words = (
        normal((4, 6)),
        (normal((4, 6)) > 0).astype(np.uint8),
        np.arange(-12, 12, dtype=np.int32).reshape(4, 6),
    )
    assert np.array_equal(run(nl.negative, x), -x)
    assert np.array_equal(run(nl.logical_not, bits), 1 - bits)
    assert np.array_equal(run(nl.invert, words), ~words)
    large = words + 2**30
    assert np.array_equal(run(nl.copy, large), large)


@pytest.mark.parametrize("target", TARGETS)
def test_divide_is_within_two_units_of_the_quotient(target):
    x, y = normal((8, 40), 1), normal((8, 40), 2)
    for call, exact in (
        (lambda a, b: nl.divide(a, b), x.astype(float) / y),
        (lambda a, b: nl.divide(a, 7.0), x.astype(float) / 7),
        (lambda a, b: nl.divide(3.0, b), 3 / y.astype(float)),
    ):
        assert (np.abs(run(call, x, y, target=target) - exact) <= 2 * UNIT * np.abs(exact)).all()


@pytest.mark.parametrize("pair", ["tiles", "number right", "number left"])
def test_remainders_follow_dividend_and_divisor(pair):
    random = np.random.default_rng(3)
    x = random.integers(-1000, 1000, (6, 50)).astype(np.float32)
    y = (random.integers(1, 100, (6, 50)) * random.choice([-1, 1], (6, 50))).astype(np.float32)
    y[0, :20], x[0, :20] = 49, np.arange(20) * 49  # quotients that a reciprocal misses by a unit
    if pair == "number right":
        y[:] = -7
    elif pair == "number left":
        x[:] = 250
    left, right = {"number left": (250.0, None), "number right": (None, -7.0), "tiles": (None, None)}[pair]
    for ours, numpys in ((nl.fmod, np.fmod), (nl.mod, np.mod)):

        def remainder(a, b, ours=ours):
            return ours(a if left is None else left, b if right is None else right)

        assert np.array_equal(run(remainder, x, y), numpys(x, y))


def test_trigonometry_beyond_one_turn():
    x = np.concatenate([np.linspace(-4, 4, 50), np.linspace(-2000, 2000, 151)]).astype(np.float32)[None]
    exact = x.astype(np.float64)
    # The angle loses one rounding of x / 2 pi's remainder and of pi / 2; the sine passes on what the angle lost.
    bound = 8 * UNIT
    assert np.abs(run(nl.sin, x) - np.sin(exact)).max() <= bound
    assert np.abs(run(nl.cos, x) - np.cos(exact)).max() <= bound
    gentle = x[np.abs(np.cos(exact)) > 0.1][None]
    slope = 1 / np.cos(gentle.astype(np.float64)) ** 2
    error = np.abs(run(nl.tan, gentle) - np.tan(gentle.astype(np.float64)))
    assert (error <= 2 * bound * slope).all()


def test_sin_as_an_operator_is_the_engines_own():
    def kernel(x):
        result = nl.ndarray(x.shape, dtype=nl.float32)
        nisa.activation(dst=result, op=nl.sin, data=x)
        return nl.sin(x), result

    reduced, raw = run(kernel, np.full((1, 1), 9.0, np.float32))
    assert abs(reduced[0, 0] - math.sin(9)) <= 8 * UNIT
    assert abs(raw[0, 0]) > 1  # the fitted cubic beyond pi


def test_rsqrt_runs_on_gpsimd_and_refuses_psum():
    x = np.array([[4.0, 0.25]], np.float32)
    with simulate.recorded() as launches:
        assert run(nl.rsqrt, x).tolist() == [[0.5, 2.0]]
    assert [e.engine.name for e in launches[0].streams[0] if e.op == "tensor_scalar"] == ["gpsimd"]

    def in_psum(x):
        acc = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.psum)
        nisa.tensor_copy(dst=acc, src=x)
        return nl.rsqrt(acc)

    with pytest.raises(RuleViolation, match="NKW-GPSIMD-PSUM"):
        run(in_psum, x)


def test_operators_of_tiles_of_other_shapes_are_refused():
    with pytest.raises(RuleViolation, match="NKW-NL-SHAPES"):
        run(lambda a, b: nl.mod(a, b), normal((2, 3)), normal((2, 4)))


@pytest.mark.parametrize("name", ["bypass", "prelu", "average"])
def test_operators_that_are_no_functions_are_one_object_each(name):
    operator = getattr(nl, name)
    assert operator is getattr(nl, name) and repr(operator) == f"nl.{name}"


# -- reductions


@pytest.mark.parametrize("shape", [(1, 7), (128, 5), (4, 3, 8), (2, 3, 4, 5)])
@pytest.mark.parametrize("keepdims", [False, True])
def test_reductions_over_trailing_dims(shape, keepdims):
    x = np.random.default_rng(5).integers(-3, 4, shape).astype(np.float32)  # sums and products are exact
    for count in range(1, len(shape)):
        axes = tuple(range(len(shape) - count, len(shape)))
        for ours, numpys in ((nl.sum, np.sum), (nl.max, np.max), (nl.min, np.min), (nl.prod, np.prod)):
            wanted = numpys(x.astype(float), axis=axes, keepdims=keepdims)
            if wanted.ndim == 1:
                wanted = wanted[:, None]
            result = run(lambda t, ours=ours, axes=axes: ours(t, axis=axes, keepdims=keepdims), x)
            assert result.shape == wanted.shape and np.array_equal(result, wanted)


def test_one_axis_counted_from_either_end():
    x = normal((4, 3, 8))
    assert np.array_equal(run(lambda t: nl.max(t, axis=-1), x), x.max(-1))
    assert np.array_equal(run(lambda t: nl.max(t, axis=2), x), x.max(2))
    for axis in (0, 1, (1, 3), 3):
        with pytest.raises(RuleViolation):
            run(lambda t, axis=axis: nl.sum(t, axis=axis), x)


def test_all_mean_and_var():
    x = np.random.default_rng(6).integers(0, 4, (5, 2, 8)).astype(np.float32)
    assert np.array_equal(run(lambda t: nl.all(t, axis=2), x), (x != 0).all(2))
    assert np.array_equal(
        run(lambda t: nl.mean(t, axis=(1, 2), keepdims=True), x), x.mean((1, 2), keepdims=True)
    )
    for axis in (2, (1, 2)):
        for keepdims in (False, True):  # documented as ignored
            result = run(lambda t, axis=axis, k=keepdims: nl.var(t, axis=axis, keepdims=k), x)
            assert np.array_equal(result, x.astype(float).var(axis, keepdims=True))


def test_mean_of_a_narrow_tile_is_summed_in_float32():
    x = np.full((2, 4096), 1 + 2.0**-7, np.float32).astype(nl.bfloat16.storage)
    assert np.array_equal(run(lambda t: nl.mean(t, axis=1), x), x[:, :1])


@pytest.mark.parametrize(("shape", "axis"), [((3, 9), -1), ((3, 2, 5), 2), ((3, 2, 5), (1, 2))])
def test_softmax(shape, axis):
    x = normal(shape)
    powers = np.exp(x.astype(float) - x.max(axis, keepdims=True))
    exact = powers / powers.sum(axis, keepdims=True)
    # x - max and exp carry 8 roundings of a number up to 40, sum and product one per element and three.
    bound = (8 * np.ptp(x) + x.size) * UNIT
    assert (np.abs(run(lambda t: nl.softmax(t, axis=axis), x) - exact) <= bound * exact).all()


def test_rms_norm_puts_epsilon_under_the_root():
    x, w = normal((4, 16)), normal((4, 16), 1)
    exact = x / np.sqrt((x.astype(float) ** 2).sum(1, keepdims=True) / 16 + 0.5) * w
    result = run(lambda a, b: nl.rms_norm(a, b, axis=1, n=16, epsilon=0.5), x, w)
    assert (np.abs(result - exact) <= 32 * UNIT * np.abs(exact)).all()


# -- selection, movement, constants


def test_where_takes_tiles_and_numbers():
    condition, x, y = (normal((4, 6)) > 0).astype(np.float32), normal((4, 6), 1), normal((4, 6), 2)
    for call, expected in (
        (lambda c, a, b: nl.where(c, a, b), np.where(condition, x, y)),
        (lambda c, a, b: nl.where(c, a, -1.0), np.where(condition, x, -1)),
        (lambda c, a, b: nl.where(c, 2.0, b), np.where(condition, 2, y)),
        (lambda c, a, b: nl.where(c, 2.0, 3.0), np.where(condition, 2, 3)),
        (lambda c, a, b: nl.where(c, a, b, dtype=nl.int8), np.rint(np.where(condition, x, y))),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ToleratedRule)
            assert np.array_equal(run(call, condition, x, y, rules="simulator"), expected)


def test_broadcast_to_repeats_dims_of_size_one():
    row, column = normal((1, 6)), normal((5, 1, 3))
    assert np.array_equal(run(lambda t: nl.broadcast_to(t, (100, 6)), row), np.broadcast_to(row, (100, 6)))
    assert np.array_equal(
        run(lambda t: nl.broadcast_to(t, (5, 4, 3)), column), np.broadcast_to(column, (5, 4, 3))
    )
    assert np.array_equal(run(lambda t: nl.broadcast_to(t, (1, 6), dtype=nl.int32), row), np.rint(row))
    single = normal((1, 1))
    assert np.array_equal(
        run(lambda t: nl.broadcast_to(t, (33, 4)), single), np.broadcast_to(single, (33, 4))
    )
    for shape in ((1, 7), (1, 6, 1), (6,)):
        with pytest.raises(RuleViolation, match="NKW-NL-BROADCAST"):
            run(lambda t, shape=shape: nl.broadcast_to(t, shape), row)


@pytest.mark.parametrize("target", TARGETS)
def test_transpose_and_matmul(target):
    x, y = (
        np.random.default_rng(s).integers(-8, 8, shape).astype(np.float32)
        for s, shape in ((1, (6, 9)), (2, (9, 20)))
    )
    assert np.array_equal(run(nl.transpose, x, target=target), x.T)
    assert np.array_equal(run(nl.matmul, x, y, target=target), x @ y)
    turned = np.ascontiguousarray(x.T)
    assert np.array_equal(
        run(lambda a, b: nl.matmul(a, b, transpose_x=True), turned, y, target=target), x @ y
    )


def test_load_transpose2d_and_gather_flattened():
    table = normal((7, 12))

    def turned(x):
        return out_of(nl.load_transpose2d(x))

    assert np.array_equal(simulate.launch(turned, [((table,), {})]).outputs[0], table.T)
    indices = np.random.default_rng(1).integers(0, 12, (7, 2, 3)).astype(np.uint32)
    expected = np.take_along_axis(table, indices.reshape(7, 6).astype(int), 1).reshape(7, 2, 3)
    for dtype in (np.uint32, np.int32):
        assert np.array_equal(run(nl.gather_flattened, table, indices.astype(dtype)), expected)
    with pytest.raises(Unsupported, match="only axis=0"):
        run(lambda a, b: nl.gather_flattened(a, b, axis=1), table, indices)


@pytest.mark.parametrize("target", TARGETS)
def test_rand_repeats_with_its_seed(target):
    def kernel(seed):
        tiles = []
        for _ in range(2):
            nl.random_seed(seed)
            tiles.append(nl.rand((128, 32), dtype=nl.float32))
        return *tiles, nl.rand((128, 32), dtype=nl.float32)

    first, again, other = run(kernel, np.full((1, 1), 42, np.int32), target=target)
    assert np.array_equal(first, again) and not np.array_equal(first, other)
    assert first.min() >= 0 and first.max() < 1
    assert abs(first.mean() - 0.5) < 6 / math.sqrt(12 * first.size)


def test_dropout_keeps_or_zeroes():
    x = normal((16, 64))
    result = run(lambda t: nl.dropout(t, 0.5), x)
    assert set(np.unique(result != 0)) == {False, True}
    assert np.array_equal(result[result != 0], x[result != 0])
    narrow = run(lambda t: nl.dropout(t, 0.0, dtype=nl.int32), x)
    assert narrow.dtype == np.int32 and np.array_equal(narrow, np.rint(x))


def test_shared_constant_holds_an_array_or_a_file(tmp_path):
    values = normal((3, 4))
    path = tmp_path / "values.npy"
    np.save(path, values)

    def kernel(x):
        return tuple(out_of(nl.load(nl.shared_constant(source))) for source in (values, str(path)))

    for result in simulate.launch(kernel, [((values,), {})]).outputs[0]:
        assert np.array_equal(result, values)
    for bad in ([1, 2], np.empty(0), str(tmp_path / "none.npy")):
        with pytest.raises(InvalidArgument, match="NKW-CONSTANT"):
            run(lambda x, bad=bad: nl.load(nl.shared_constant(bad)), values)


def test_no_reorder_requests_program_order():
    def kernel(x):
        with nl.no_reorder():
            a, b = nl.negative(x), nl.negative(x)
            nl.add(a, b)
        return a

    with simulate.recorded() as launches:
        run(kernel, normal((2, 2)))
    stream = launches[0].streams[0]
    assert stream.requested == [(1, 2), (2, 3)]


def test_device_facts():
    def kernel(x):
        facts.append(nisa.get_nc_sub_version())
        return x

    facts: list[int] = []
    for target in TARGETS:
        run(kernel, normal((1, 1)), target=target)
    assert facts == [0, 0, 1]


def test_ranks_are_told_apart_by_registers():
    def kernel(x):
        group = ncc.ReplicaGroup([[2, 0, 1]])
        registers = [ncc.rank_id()]
        registers += [ncc.collective_permute_implicit_current_processing_rank_id(i, group) for i in range(4)]
        row = nl.ndarray((1, 5), dtype=nl.int32)
        for index, register in enumerate(registers):
            nisa.register_store(dst=row[0:1, index : index + 1], src=register)
        return out_of(row)

    world = simulate.World("trn2", ranks=3)
    results = world.launch(kernel, [((normal((1, 1)),), {})] * 3).outputs
    assert [r.tolist()[0] for r in results] == [[0, 0, 2, 1, 0], [1, 1, 0, 2, 1], [2, 2, 1, 0, 2]]


# -- arguments that no instruction checks


def counted(tile, numbers):
    return nl.add(tile, float(len(list(numbers))))


REFUSED = [
    ("NKW-NL-OPERANDS", lambda t: nl.add(1.0, 2.0), lambda t: nl.add(1.0, t)),
    ("NKW-NL-OPERANDS", lambda t: nl.divide(1.0, 2.0), lambda t: nl.divide(1.0, t)),
    ("NKW-NL-OPERANDS", lambda t: nl.mod(1.0, 2.0), lambda t: nl.mod(1.0, t)),
    ("NKW-NUMBER", lambda t: nl.divide(t, "2"), lambda t: nl.divide(t, 2.0)),
    ("NKW-OPERAND", lambda t: nl.exp(1.0), lambda t: nl.exp(t)),
    ("NKW-OPERAND", lambda t: nl.tan(1.0), lambda t: nl.tan(t)),
    ("NKW-OPERAND", lambda t: nl.sum(1.0, axis=1), lambda t: nl.sum(t, axis=1)),
    ("NKW-OPERAND", lambda t: nl.softmax(1.0), lambda t: nl.softmax(t)),
    ("NKW-OPERAND", lambda t: nl.transpose(1.0), lambda t: nl.transpose(t)),
    ("NKW-OPERAND", lambda t: nl.matmul(t, 1.0), lambda t: nl.matmul(t, t)),
    ("NKW-OPERAND", lambda t: nl.zeros_like(4), lambda t: nl.zeros_like(t)),
    ("NKW-OPERAND", lambda t: nl.load(np.ones((8, 8))), lambda t: nl.copy(t)),
    ("NKW-OPERAND", lambda t: nl.shared_identity_matrix(8, dst=8), lambda t: nl.shared_identity_matrix(8)),
    ("NKW-DTYPE", lambda t: nl.exp(t, dtype=0), lambda t: nl.exp(t, dtype=None)),
    ("NKW-DTYPE", lambda t: nl.floor(t, dtype=""), lambda t: nl.floor(t, dtype=nl.int32)),
    ("NKW-SHAPE", lambda t: nl.broadcast_to(t, 2.5), lambda t: nl.broadcast_to(t, [8, 8])),
    ("NKW-EXPAND-AXIS", lambda t: nl.expand_dims(t, 3), lambda t: nl.expand_dims(t, 2)),
    ("NKW-EXPAND-AXIS", lambda t: nl.expand_dims(t, -4), lambda t: nl.expand_dims(t, -2)),
    ("NKW-EXPAND-AXIS", lambda t: nl.expand_dims(t, 1.0), lambda t: nl.expand_dims(t, 1)),
    ("NKW-RMS-COUNT", lambda t: nl.rms_norm(t, t, 1, n=0), lambda t: nl.rms_norm(t, t, 1, n=1)),
    ("NKW-RMS-COUNT", lambda t: nl.rms_norm(t, t, 1, n="8"), lambda t: nl.rms_norm(t, t, 1, n=8)),
    ("NKW-DS", lambda t: t[:, nl.ds(2, 0)], lambda t: t[:, nl.ds(2, 1)]),
    ("NKW-DS", lambda t: t[:, nl.ds(0.0, 1)], lambda t: t[:, nl.ds(0, 8)]),
    (
        "NKW-RANGE",
        lambda t: counted(t, nl.affine_range(2.5)),
        lambda t: counted(t, nl.affine_range(2)),
    ),
    (
        "NKW-RANGE",
        lambda t: counted(t, nl.static_range(0, 2, 0)),
        lambda t: counted(t, nl.static_range(0, 2, 1)),
    ),
    (
        "NKW-RANGE",
        lambda t: counted(t, nl.sequential_range("2")),
        lambda t: counted(t, nl.sequential_range(2)),
    ),
    (
        "NKW-LOOP-BOUND",
        lambda t: nl.fori_loop(0, 2.5, print),
        lambda t: nl.fori_loop(0, 2, lambda i: None) or t,
    ),
    ("NKW-LOOP-BOUND", lambda t: list(nl.dynamic_range(t)), lambda t: counted(t, nl.dynamic_range(1))),
    (
        "NKW-LOOP-STEP",
        lambda t: nl.fori_loop(0, 2, print, 0.5),
        lambda t: nl.fori_loop(0, 2, lambda i: None, 1) or t,
    ),
    ("NKW-LOOP-FUNCTION", lambda t: nl.fori_loop(0, 2, None), lambda t: nl.fori_loop(0, 0, print) or t),
    (
        "NKW-LOOP-FUNCTION",
        lambda t: nl.while_loop(nisa.register_alloc(1), 3),
        lambda t: nl.while_loop(nisa.register_alloc(0), print) or t,
    ),
]


@pytest.mark.parametrize(("code", "wrong", "right"), REFUSED)
def test_an_argument_of_another_type_or_range_is_refused(code, wrong, right):
    x = np.abs(normal((8, 8))) + 1
    assert run(right, x).size
    with pytest.raises((RuleViolation, InvalidArgument), match=rf"^\[{code}\]"):
        run(wrong, x)


def test_a_slice_counted_from_the_end_reaches_the_last_element():
    x = normal((4, 8))
    for start, size in ((-2, 2), (-2, 1), (-8, 8), (6, 2)):
        last = x[:, start:][:, :size]
        assert np.array_equal(run(lambda t, s=start, n=size: nl.copy(t[:, nl.ds(s, n)]), x), last)


def test_broadcast_to_reads_tiles_on_chip():
    def kernel(x):
        return nl.broadcast_to(x, x.shape)

    with pytest.raises(RuleViolation, match="NKW-BUFFER"):
        simulate.launch(kernel, [((normal((4, 8)),), {})])


def test_zeros_like_makes_an_sbuf_tile_and_empty_like_keeps_the_memory():
    def kernel(x):
        sums = nl.zeros((4, 8), nl.float32, nl.psum)
        buffers.extend(nl.zeros_like(t).buffer for t in (x, sums))
        buffers.append(nl.zeros_like(x, buffer=nl.psum).buffer)
        buffers.extend(nl.empty_like(t).buffer for t in (x, sums))
        return out_of(nl.zeros_like(x))

    buffers = []
    result = simulate.launch(kernel, [((normal((4, 8)),), {})]).outputs[0]
    assert buffers == [nl.sbuf, nl.sbuf, nl.psum, nl.private_hbm, nl.psum]
    assert not result.any()
