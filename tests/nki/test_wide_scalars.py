"""64-bit scalars (0.7): loaded, added, stored, an offset in HBM; everything else is refused."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import InvalidArgument, RuleViolation
from simulate import nki
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from simulate.world import World, launch


def _wrapped(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _word(value: int, dtype=np.int64) -> np.ndarray:
    return np.array([[value]], dtype)


def _computed(formula, *values: int) -> int:
    @nki.jit
    def kernel(*words):
        scalars = [nisa.scalar_load(nl.load(word)) for word in words]
        assert all(scalar.dtype == nl.int64 for scalar in scalars)
        result = nl.ndarray((1, 1), nl.int64)
        nisa.scalar_store(result, formula(*scalars))
        out = nl.ndarray((1, 1), nl.int64, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=result)
        return out

    made = kernel(*(_word(value) for value in values))
    assert made.dtype == np.int64
    return int(made[0, 0])


@pytest.mark.parametrize(
    "formula",
    [lambda a, b: a + b, lambda a, b: a - b, lambda a, b: a * b, lambda a, b: 2**40 - 3 * a + (b - 7) * 2],
)
@pytest.mark.parametrize(
    ("a", "b"), [(5, 3), (100000, 100000), (2**31, 1), (2**63 - 1, 1), (-(2**63), -1), (2**40, 2**40)]
)
def test_arithmetic_wraps_to_64_bits(formula, a: int, b: int) -> None:
    assert _computed(formula, a, b) == _wrapped(formula(a, b))


@pytest.mark.parametrize("mode", ["eager", "replay"])
def test_a_wide_scalar_is_an_offset_in_hbm(mode: str) -> None:
    from simulate.run import Mode

    def row_of(x, index):
        i = nisa.scalar_load(index) * 2 + 1
        out = nl.ndarray((1, 8), x.dtype, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x.ap([[8, 1], [1, 8]], scalar_offset=i, indirect_dim=0))
        return out

    x = np.arange(80, dtype=np.float32).reshape(10, 8)
    world = World("trn2")
    for index in (0, 3, 4):
        done = world.launch(row_of, [((x, _word(index)), {})], Mode(mode))
        np.testing.assert_array_equal(done.outputs[0][0], x[2 * index + 1])


def _use(use, level: str = "0.7", dtype=np.int64):
    def kernel(n):
        use(nisa.scalar_load(n))
        return n

    return launch(kernel, [((_word(3, dtype),), {})], level=level)


def _offset_on_chip(scalar):
    tile = nl.zeros((4, 8), nl.float32)
    nisa.tensor_copy(
        dst=nl.ndarray((4, 1), nl.float32),
        src=tile.ap([[8, 4], [1, 1]], scalar_offset=scalar, indirect_dim=1),
    )


REFUSED = [
    (lambda s: s < 3, "NKW-SCALAR-64"),
    (lambda s: s == s, "NKW-SCALAR-64"),
    (lambda s: nl.fori_loop(0, s, lambda i: None), "NKW-SCALAR-64"),
    (_offset_on_chip, "NKW-SCALAR-OFFSET"),
    (lambda s: s + 2**64, "NKW-REGISTER-IMMEDIATE"),
    (lambda s: s + nisa.scalar_load(nl.zeros((1, 1), nl.int32)), "NKW-SCALAR-WIDTH"),
    (lambda s: nisa.scalar_store(nl.ndarray((1, 1), nl.int32), s), "NKW-SCALAR-WIDTH"),
]


@pytest.mark.parametrize(("use", "code"), REFUSED)
def test_what_64_bits_do_not_do(use, code: str) -> None:
    with pytest.raises(RuleViolation) as caught:
        _use(use)
    assert caught.value.code == code
    if code in ("NKW-SCALAR-64", "NKW-SCALAR-OFFSET"):
        _use(use, dtype=np.int32)


@pytest.mark.parametrize(
    "use",
    [
        lambda tile: nisa.tensor_copy(dst=nl.ndarray((1, 1), nl.int64), src=tile),
        lambda tile: nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1),
        lambda tile: nisa.memset(dst=tile, value=0),
        lambda tile: nisa.dma_copy(dst=nl.ndarray((1, 1), nl.int32), src=tile),
    ],
)
def test_no_engine_computes_with_64_bits(use) -> None:
    def kernel(x):
        use(nl.load(x))
        return x

    with pytest.raises(RuleViolation, match=r"\[NKW-INT64\]"):
        launch(kernel, [((_word(3),), {})])


def test_int64_exists_from_0_7_on() -> None:
    def kernel(x):
        return nl.load(x).dtype

    assert launch(kernel, [((_word(3),), {})]).outputs[0] == "int64"
    with pytest.raises(RuleViolation, match=r"nl.int64 exists from level 0.7 on; NKI_LEVEL is 0.6"):
        launch(kernel, [((_word(3),), {})], level="0.6")

    def allocates(x):
        nl.ndarray((1, 1), nl.int64)
        return x

    with pytest.raises(RuleViolation, match=r"nl.int64 exists from level 0.7 on; NKI_LEVEL is 0.6"):
        launch(allocates, [((_word(3, np.int32),), {})], level="0.6")
    with pytest.raises(InvalidArgument, match="uint64"):
        launch(kernel, [((_word(3, np.uint64),), {})])
