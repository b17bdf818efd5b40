"""Registers and device loops."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import simulate
from nkw.errors import InvalidArgument, OutOfBounds, RuleViolation

simulate.install("simulate")

import nki  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402


def run(kernel, *arrays):
    return nki.simulate(kernel)(*arrays)


def numbers(values, shape=(1, 1)):
    return np.array(values, np.int32).reshape(shape)


def test_a_register_carries_a_word_from_tile_to_tile() -> None:
    def kernel(x):
        out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
        first = nisa.register_alloc()
        second = nisa.register_alloc(7)
        nisa.register_load(first, nl.load(x))
        nisa.register_move(second, first)
        nisa.register_store(out, second)
        return out

    for word in (-(2**31), -1, 0, 2**31 - 1):
        assert run(kernel, numbers([word]))[0, 0] == word


WORDS = {  # dtype: an element as bits, and the word that a register gets from it
    "int8": (0x80, -128),
    "uint8": (0x80, 128),
    "int16": (0xFFFE, -2),
    "uint16": (0xFFFE, 65534),
    "int32": (0xFFFF_FFFF, -1),
    "uint32": (0xFFFF_FFFF, -1),
    "bool": (1, 1),
    "float32": (0xC000_0000, -(2**30)),
    "float16": (0xBC00, 0xBC00),
    "bfloat16": (0xBF80, 0xBF80),
    "float8_e5m2": (0xBC, 0xBC),
}


@pytest.mark.parametrize("precise", ["1", "0"])
@pytest.mark.parametrize("name", WORDS)
def test_a_register_takes_integers_by_value_and_floats_by_their_bits(monkeypatch, name, precise) -> None:
    """The reference of 0.7 lists every dtype but the packed ones."""
    monkeypatch.setenv("NKI_PRECISE_FP", precise)
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    bits, word = WORDS[name]

    def kernel(x):
        out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
        same = nl.ndarray((1, 1), dtype=x.dtype, buffer=nl.shared_hbm)
        register = nisa.register_alloc()
        nisa.register_load(register, x)
        nisa.register_store(out, register)
        nisa.register_store(same, register)
        return out, same

    element = np.array([[bits]], f"u{dtype.itemsize}").view(dtype)
    number, same = run(kernel, element)
    assert number[0, 0] == word
    assert same.view(f"u{dtype.itemsize}")[0, 0] == bits


@pytest.mark.parametrize(("dtype", "value"), [(np.uint8, 0x8F), (np.int8, -0x71), (np.uint16, 0x5A8F)])
def test_a_narrow_element_gets_the_low_bits_of_a_register(dtype, value) -> None:
    def kernel(x):
        nisa.register_store(x, nisa.register_alloc(0x12345A8F))
        return x

    assert run(kernel, np.zeros((1, 1), dtype))[0, 0] == value


@pytest.mark.parametrize("dtype", ["float8_e4m3fn_x4", "float4_e2m1fn_x4", "int64"])
@pytest.mark.parametrize("loads", [True, False])
def test_a_register_takes_no_packed_and_no_wide_elements(dtype, loads) -> None:
    def kernel(x):
        tile, register = (
            nl.ndarray((1, 1), dtype=getattr(nl, dtype), buffer=nl.private_hbm),
            nisa.register_alloc(1),
        )
        if loads:
            nisa.register_load(register, tile)
        else:
            nisa.register_store(tile, register)
        return x

    with pytest.raises(RuleViolation, match="NKW-REGISTER-TILE"):
        run(kernel, numbers([0]))


@pytest.mark.parametrize(("columns", "loads"), [(1, True), (2, False)])
def test_a_register_may_begin_with_the_element_of_a_tile(columns: int, loads: bool) -> None:
    def kernel(x):
        out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
        nisa.register_store(out, nisa.register_alloc(nl.load(x)))
        return out

    if loads:
        assert run(kernel, numbers([-5]))[0, 0] == -5
    else:
        with pytest.raises(RuleViolation, match="NKW-REGISTER-TILE"):
            run(kernel, numbers([1, 2], (1, 2)))


@pytest.mark.parametrize(
    ("value", "fits"), [(2**32 - 1, True), (2**32, False), (-(2**31), True), (-(2**31) - 1, False)]
)
def test_an_immediate_has_32_bits(value: int, fits: bool) -> None:
    def kernel(x):
        nisa.register_store(x, nisa.register_alloc(value))
        return x

    if fits:
        assert int(run(kernel, numbers([0]))[0, 0]) % 2**32 == value % 2**32
    else:
        with pytest.raises(RuleViolation, match="NKW-REGISTER-IMMEDIATE"):
            run(kernel, numbers([0]))


def test_a_register_is_set_before_it_is_read() -> None:
    def kernel(x):
        nisa.register_store(x, nisa.register_alloc())
        return x

    with pytest.raises(RuleViolation, match="NKW-UNWRITTEN"):
        run(kernel, numbers([0]))


@pytest.mark.parametrize("use", [lambda r: r + 1, lambda r: range(r), lambda r: int(r), lambda r: r * 128])
def test_refuses_python_on_registers(use) -> None:
    def kernel(x):
        use(nisa.register_alloc(1))
        return x

    with pytest.raises(RuleViolation, match="NKW-REGISTER-PYTHON"):
        run(kernel, numbers([0]))


def copy_row(x, rows):
    """Copy rows of x named by a device loop, through an address that is read at run time."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    count = nisa.register_alloc()
    nisa.register_load(count, nl.load(rows))
    tile = nl.ndarray(x.shape, dtype=x.dtype)
    nisa.dma_copy(dst=tile, src=x)
    nisa.dma_copy(dst=out, src=tile)

    def body(i):
        row = nl.ndarray((1, x.shape[1]), dtype=x.dtype)
        nisa.dma_copy(dst=row, src=x.ap([[x.shape[1], 1], [1, x.shape[1]]], scalar_offset=i))
        nisa.tensor_tensor(dst=row, data1=row, data2=row, op=nl.add)
        nisa.dma_copy(dst=out.ap([[x.shape[1], 1], [1, x.shape[1]]], scalar_offset=i), src=row)

    nl.fori_loop(0, count, body)
    return out


@pytest.mark.parametrize("rows", [0, 1, 5])
def test_a_loop_runs_as_often_as_its_register_says(rows: int) -> None:
    x = np.arange(15, dtype=np.float32).reshape(5, 3)
    expected = x.copy()
    expected[:rows] *= 2
    assert np.array_equal(run(copy_row, x, numbers([rows])), expected)


def test_a_loop_that_runs_over_the_end_is_refused() -> None:
    with pytest.raises(OutOfBounds, match="index 5 is out of bounds for axis 0 with size 5"):
        run(copy_row, np.ones((5, 3), np.float32), numbers([6]))


def test_fori_loop_counts_by_step() -> None:
    def kernel(x):
        def body(i):
            nisa.register_store(x.ap([[1, 1], [1, 1]], scalar_offset=i), i)

        nl.fori_loop(1, 9, body, 3)
        return x

    assert run(kernel, numbers([-1] * 9, (9, 1)))[:, 0].tolist() == [-1, 1, -1, -1, 4, -1, -1, 7, -1]


def test_while_loop_runs_until_its_register_is_zero() -> None:
    def kernel(x, steps):
        tile = nl.load(steps)
        total = nl.load(x)
        one = nl.ones((1, 1), dtype=nl.int32)
        condition = nisa.register_alloc()
        nisa.register_load(condition, tile)

        def body(register):
            nisa.tensor_tensor(dst=tile, data1=tile, data2=one, op=nl.subtract)
            nisa.tensor_tensor(dst=total, data1=total, data2=total, op=nl.add)
            nisa.register_load(register, tile)
            return register

        nl.while_loop(condition, body)
        nisa.dma_copy(dst=x, src=total)
        return x

    assert run(kernel, numbers([1]), numbers([10]))[0, 0] == 1024
    assert run(kernel, numbers([1]), numbers([0]))[0, 0] == 1


def test_a_body_keeps_to_what_loops_allow() -> None:
    def writes_counter(x):
        nl.fori_loop(0, 2, lambda i: nisa.register_move(i, 0))
        return x

    def returns_something(x):
        nl.fori_loop(0, 2, lambda i: i)
        return x

    def loses_register(x):
        nl.while_loop(nisa.register_alloc(1), lambda r: None)
        return x

    def zero_step(x):
        nl.fori_loop(0, 2, lambda i: None, 0)
        return x

    for kernel, code in (
        (writes_counter, "NKW-REGISTER-FROZEN"),
        (returns_something, "NKW-LOOP-BODY"),
        (loses_register, "NKW-LOOP-CONDITION"),
        (zero_step, "NKW-LOOP-STEP"),
    ):
        with pytest.raises(RuleViolation, match=code):
            run(kernel, numbers([0]))


def test_dynamic_range_warns_that_it_is_deprecated() -> None:
    def kernel(x):
        for i in nl.dynamic_range(3):
            nisa.register_store(x.ap([[1, 1], [1, 1]], scalar_offset=i), i)
        return x

    with pytest.warns(DeprecationWarning, match="fori_loop"):
        assert run(kernel, numbers([9] * 3, (3, 1)))[:, 0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(("last", "refused"), [(498, False), (499, False), (500, True)])
def test_a_while_loop_that_issues_too_much_is_refused_with_its_register(monkeypatch, last, refused) -> None:
    """Each iteration issues a step, a copy and a load; the first event of a loop is its own step."""
    monkeypatch.setenv("NKW_LOOP_EVENTS", str(3 * 499))

    def kernel(x):
        out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
        left, go = nl.load(x), nisa.register_alloc(1)

        def body(r):
            nisa.tensor_scalar(dst=left, data=left, op0=nl.subtract, operand0=1)
            nisa.register_load(go, left)
            return r

        nl.while_loop(go, body)
        nisa.dma_copy(dst=out, src=left)
        return out

    if not refused:
        assert run(kernel, numbers([last]))[0, 0] == 0
        return
    with pytest.raises(RuleViolation, match="NKW-LOOP-EVENTS") as caught:
        run(kernel, numbers([last]))
    first = kernel.__code__.co_firstlineno
    assert caught.value.where.line == first + 9
    assert f"test_registers.py:{first + 2} in kernel is 0 since" in caught.value.seen


def test_a_loop_whose_register_never_changes_ends(monkeypatch) -> None:
    monkeypatch.setenv("NKW_LOOP_EVENTS", "100")

    def kernel(x):
        nl.while_loop(nisa.register_alloc(7), lambda r: r)
        return x

    with pytest.raises(RuleViolation, match="is 7 since 101 iterations"):
        run(kernel, numbers([1]))


@pytest.mark.parametrize("loop", [nl.fori_loop, nl.dynamic_range])
@pytest.mark.parametrize(("turns", "refused"), [(99, False), (100, False), (101, True)])
def test_a_counted_loop_is_bounded_too(monkeypatch, loop, turns, refused) -> None:
    monkeypatch.setenv("NKW_LOOP_EVENTS", "100")

    def kernel(x):
        if loop is nl.fori_loop:
            nl.fori_loop(0, turns, lambda i: None)
        else:
            for _ in nl.dynamic_range(turns):
                pass
        out = nl.ndarray((1, 1), dtype=nl.int32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x)
        return out

    if refused:
        with pytest.raises(RuleViolation, match=r"its counter is 100\n"):
            run(kernel, numbers([1]))
    else:
        assert run(kernel, numbers([1]))[0, 0] == 1


@pytest.mark.parametrize("text", ["-1", "many", "1e6", "²"])
def test_a_limit_that_is_no_count_is_refused(monkeypatch, text) -> None:
    monkeypatch.setenv("NKW_LOOP_EVENTS", text)
    with pytest.raises(InvalidArgument, match="NKW_LOOP_EVENTS is"):
        run(lambda x: nl.fori_loop(0, 1, lambda i: None), numbers([1]))


def test_a_register_is_shown_with_its_value_once_it_has_one() -> None:
    shown = []

    def kernel(x):
        register = nisa.register_alloc()
        register.cell.storage.array[...] = 77  # what the memory of a register held before
        shown.append(repr(register))
        nisa.register_move(register, 5)
        shown.append(repr(register))

    run(kernel, numbers([1]))
    assert shown == ["<register>", "<register 5>"]
