"""What 0.7 adds: run-time scalars with arithmetic, loops over them, and collectives in two halves."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import NkwError, OutOfBounds, RuleViolation
from simulate import nki
from simulate.nki import collectives as ncc
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.run import Mode, recorded
from simulate.world import World


def _word(value: int) -> np.ndarray:
    return np.array([[value]], np.int32)


def _wrapped(value: int) -> int:
    return (value + 2**31) % 2**32 - 2**31


def _computed(formula, *values: int) -> int:
    @nki.jit
    def kernel(*words):
        scalars = [nisa.scalar_load(nl.load(word)) for word in words]
        result = nl.ndarray((1, 1), nl.int32)
        nisa.scalar_store(result, formula(*scalars))
        out = nl.ndarray((1, 1), nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=result)
        return out

    return int(kernel(*(_word(value) for value in values))[0, 0])


FORMULAS = {
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "numbers": lambda a, b: 7 - 3 * a + (b - 2) * 5 + 1,
    "negative": lambda a, b: -a + b,
}


@pytest.mark.parametrize("formula", FORMULAS.values(), ids=FORMULAS)
@pytest.mark.parametrize(
    ("a", "b"), [(5, 3), (-7, 100), (2**31 - 1, 1), (-(2**31), -1), (100000, 100000), (0, -(2**31))]
)
def test_arithmetic_wraps_to_32_bits(formula, a: int, b: int) -> None:
    assert _computed(formula, a, b) == _wrapped(formula(a, b))


def test_documented_overflows() -> None:
    assert _computed(lambda a: a * a, 100000) == 1410065408
    assert _computed(lambda a: a + 1, 2**31 - 1) == -(2**31)


@nki.jit
def row_of(x, index):
    i = nisa.scalar_load(nl.load(index)) * 2 + 1
    out = nl.ndarray((1, x.shape[1]), x.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=x.ap([[x.shape[1], 1], [1, x.shape[1]]], scalar_offset=i, indirect_dim=0))
    return out


def test_a_scalar_addresses_hbm_and_a_replay_reads_its_own() -> None:
    x = np.arange(80, dtype=np.float32).reshape(10, 8)
    world = World("trn2")
    for index in (0, 3, 4, 1):
        launches = [((x, _word(index)), {})]
        for mode in (Mode.eager, Mode.replay):
            np.testing.assert_array_equal(
                world.launch(row_of, launches, mode).outputs[0][0], x[2 * index + 1]
            )
    with pytest.raises(OutOfBounds):
        row_of(x, _word(5))


@nki.jit
def moved_rows(x, lower, upper, step):
    out = nl.ndarray(x.shape, x.dtype, buffer=nl.shared_hbm)
    zeros = nl.zeros(x.shape, x.dtype)
    nisa.dma_copy(dst=out, src=zeros)
    row = nl.ndarray((1, x.shape[1]), x.dtype)
    width = x.shape[1]

    def body(i):
        nisa.dma_copy(dst=row, src=x.ap([[width, 1], [1, width]], scalar_offset=i))
        nisa.dma_copy(dst=out.ap([[width, 1], [1, width]], scalar_offset=9 - i), src=row)

    first = lower if isinstance(lower, int) else nisa.scalar_load(nl.load(lower))
    nl.fori_loop(first, nisa.scalar_load(nl.load(upper)) + 1, body, step)
    return out


@pytest.mark.parametrize(("lower", "upper", "step"), [(0, 9, 1), (2, 7, 3), (5, 4, 1), (9, 9, 1)])
@pytest.mark.parametrize("scalar", [False, True])
def test_a_loop_between_scalars_counts_with_a_scalar(scalar: bool, lower: int, upper: int, step: int) -> None:
    x = np.arange(80, dtype=np.float32).reshape(10, 8)
    expected = np.zeros_like(x)
    for i in range(lower, upper + 1, step):
        expected[9 - i] = x[i]
    seen = moved_rows(x, _word(lower) if scalar else lower, _word(upper), step)
    np.testing.assert_array_equal(seen, expected)


def test_a_register_as_bound_gives_a_register_as_counter() -> None:
    counter_types = []

    @nki.jit
    def kernel(n):
        register = nisa.register_alloc()
        nisa.register_load(register, nl.load(n))
        nl.fori_loop(0, register, lambda i: counter_types.append(type(i)))
        nl.fori_loop(0, nisa.scalar_load(nl.load(n)), lambda i: counter_types.append(type(i)))
        return n

    kernel(_word(1))
    assert counter_types == [nisa.VirtualRegister, nisa.NkiScalar]


def test_while_loop_runs_until_its_scalar_is_zero() -> None:
    rounds = []

    @nki.jit
    def kernel(n):
        def body(left):
            rounds.append(left)
            return left - 2

        nl.while_loop(nisa.scalar_load(nl.load(n)), body)
        return n

    kernel(_word(6))
    assert len(rounds) == 3


@pytest.mark.parametrize(
    ("use", "code"),
    [
        (lambda s: nisa.scalar_store(nl.ndarray((1, 1), nl.int32), 3), "NKW-SCALAR"),
        (lambda s: nisa.scalar_store(nl.ndarray((1, 1), nl.int32), s < 3), "NKW-SCALAR-COMPARISON"),
        (lambda s: (s == 3) + 1, "NKW-SCALAR-COMPARISON"),
        (lambda s: nl.fori_loop(0, s != 3, lambda i: None), "NKW-SCALAR-COMPARISON"),
        (lambda s: s + 0.5, "NKW-SCALAR-OPERAND"),
        (lambda s: s + 2**32, "NKW-REGISTER-IMMEDIATE"),
        (lambda s: 1 if s else 0, "NKW-REGISTER-PYTHON"),
        (lambda s: range(s), "NKW-REGISTER-PYTHON"),
        (lambda s: int(s), "NKW-REGISTER-PYTHON"),
        (lambda s: s // 2, "NKW-REGISTER-PYTHON"),
        (lambda s: nisa.scalar_load(nl.zeros((1, 1), nl.uint32)), "NKW-SCALAR-TILE"),
        (lambda s: nisa.scalar_load(nl.zeros((1, 2), nl.int32)), "NKW-SCALAR-TILE"),
        (lambda s: nisa.scalar_load(3), "NKW-SCALAR-TILE"),
        (lambda s: nisa.scalar_store(nl.ndarray((1, 1), nl.int32, buffer=nl.psum), s), "NKW-SCALAR-TILE"),
    ],
)
def test_what_scalars_do_not_do(use, code: str) -> None:
    @nki.jit
    def kernel(n):
        use(nisa.scalar_load(nl.load(n)))
        return n

    with pytest.raises(RuleViolation) as caught:
        kernel(_word(3))
    assert caught.value.code == code


def test_what_scalars_do_beside_it() -> None:
    @nki.jit
    def kernel(n):
        scalar = nisa.scalar_load(n)  # from HBM
        assert str(scalar.dtype) == "int32" and (scalar < 3).is_comparison and scalar in {scalar: 1}
        result = nl.ndarray((1, 1), nl.int32)
        nisa.scalar_store(result, scalar + 2**31 - 1 - 2**30)
        nl.store(n, result)
        return n

    assert kernel(_word(4))[0, 0] == _wrapped(4 + 2**31 - 1 - 2**30)


# -- collectives in two halves ------------------------------------------------------------------------------


FOUR = ncc.ReplicaGroup([[0, 1, 2, 3]])


def _variable(collective: str, halves: bool, late: bool = False):
    def kernel(x, metadata):
        src = nl.ndarray(x.shape, x.dtype, buffer=nl.private_hbm)
        out = nl.ndarray((16,), x.dtype, buffer=nl.private_hbm)
        zeros = nl.zeros((1, 16), x.dtype)
        nisa.dma_copy(dst=out, src=zeros)
        table = nl.ndarray(metadata.shape, metadata.dtype, buffer=nl.private_hbm)
        nisa.dma_copy(dst=table, src=metadata)
        operands = {"srcs": [src], "dsts": [out], "replica_group": FOUR, "metadata_tensor": table}
        if not halves:
            nisa.dma_copy(dst=src, src=x)
            getattr(ncc, collective)(**operands)
        else:
            ready = getattr(ncc, f"{collective}_prepare")(**operands)
            nisa.dma_copy(dst=src, src=x)  # after the prepare
            getattr(ncc, f"{collective}_trigger")(ready, name="go")
        return out, table

    return kernel


def _launched(kernel) -> list:
    tables = np.zeros((4, 3, 4), np.uint32)
    tables[:, 0] = [[1, 2, 3, 4]] * 4
    tables[:, 1] = [[0, 1, 3, 6]] * 4
    arguments = [((np.arange(12, dtype=np.float32) + 100 * rank, tables[rank]), {}) for rank in range(4)]
    return World("trn2", ranks=4).launch(kernel, arguments).outputs


@pytest.mark.parametrize("collective", ["all_gather_v", "all_to_all_v"])
def test_two_halves_move_what_the_whole_moves(collective: str) -> None:
    for seen, wanted in zip(_launched(_variable(collective, True)), _launched(_variable(collective, False))):
        for one, other in zip(seen, wanted):
            np.testing.assert_array_equal(one, other)
            assert one.any()


def test_the_halves_stand_in_the_stream_under_their_names() -> None:
    with recorded() as launches:
        _launched(_variable("all_to_all_v", True))
    names = launches[0].streams[0].op_names
    assert "all_to_all_v_prepare" in names and "all_to_all_v" in names
    assert "go" in launches[0].streams[0].names.values()


def _misuse(use):
    def kernel(x, metadata):
        out = nl.ndarray((16,), x.dtype, buffer=nl.private_hbm)
        operands = {"srcs": [x], "dsts": [out], "replica_group": FOUR, "metadata_tensor": metadata}
        use(operands)
        return x

    return kernel


@pytest.mark.parametrize(
    ("use", "code"),
    [
        (lambda g: [ncc.all_to_all_v_prepare(**g), ncc.all_gather_v_prepare(**g)], "NKW-PREPARE-ONE"),
        (lambda g: ncc.all_to_all_v_trigger(None), "NKW-PREPARE-TRIGGER"),
        (lambda g: ncc.all_to_all_v_trigger(ncc.all_gather_v_prepare(**g)), "NKW-PREPARE-TRIGGER"),
        (
            lambda g: [ncc.all_gather_v_trigger(ready) for ready in [ncc.all_gather_v_prepare(**g)] * 2],
            "NKW-PREPARE-TRIGGER",
        ),
        (lambda g: ncc.all_gather_v_prepare(**{**g, "has_rdispls": True}), "NKW-GATHER-V-RANKS"),
        (
            lambda g: ncc.all_gather_v_prepare(
                **{**g, "metadata_tensor": nl.ndarray((3, 4), nl.uint32, buffer=nl.private_hbm)}
            ),
            "NKW-UNWRITTEN",
        ),
    ],
)
def test_halves_out_of_order_are_refused(use, code: str) -> None:
    with pytest.raises(NkwError) as caught:
        _launched(_misuse(use))
    assert caught.value.code == code


def test_halves_have_the_documented_parameters() -> None:
    import inspect

    for collective in ("all_gather_v", "all_to_all_v"):
        assert list(inspect.signature(getattr(ncc, f"{collective}_prepare")).parameters) == [
            *("srcs", "dsts", "replica_group", "metadata_tensor"),
            *("recv_counts_known", "has_rdispls", "priority", "name"),
        ]
        assert list(inspect.signature(getattr(ncc, f"{collective}_trigger")).parameters) == [
            "prepare_instr",
            "name",
        ]
