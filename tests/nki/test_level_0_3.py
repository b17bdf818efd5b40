"""Level 0.3: operators of nki.language broadcast, and numbers and repeated tiles are assigned to parts of tiles."""

from __future__ import annotations

import numpy as np
import pytest

from nkw.errors import RuleViolation
from simulate.nki import language as nl
from simulate.world import launch

RANDOM = np.random.default_rng(3)


def _floats(*shape: int) -> np.ndarray:
    return RANDOM.integers(1, 9, shape).astype(np.float32)


def _launched(kernel, *arrays: np.ndarray, level: str = "0.3"):
    return launch(kernel, [(arrays, {})], level=level).outputs[0]


def _stored(tile):
    out = nl.ndarray(tile.shape, tile.dtype, buffer=nl.shared_hbm)
    nl.store(out, tile)
    return out


OPERATORS = {
    "add": np.add,
    "subtract": np.subtract,
    "multiply": np.multiply,
    "maximum": np.maximum,
    "divide": np.divide,
    "greater": np.greater,
    "mod": np.mod,
}
SHAPES = [
    ((128, 16), (128, 1)),
    ((128, 1), (128, 16)),
    ((1, 16), (127, 16)),
    ((1, 1), (33, 5)),
    ((64, 1), (1, 7)),
    ((128, 4, 6), (128, 1, 6)),
    ((32, 4, 1), (1, 1, 6)),
]


@pytest.mark.parametrize("name", OPERATORS)
@pytest.mark.parametrize(("first", "second"), SHAPES)
def test_operators_broadcast_by_numpys_rule(name: str, first, second) -> None:
    def kernel(x, y):
        return _stored(getattr(nl, name)(nl.load(x), nl.load(y)))

    x, y = _floats(*first), _floats(*second)
    # A quotient is a product with a rounded reciprocal: one rounding each, of numbers up to 9.
    tolerance = 2 * 9 * 2.0**-23 if name == "divide" else 0
    np.testing.assert_allclose(_launched(kernel, x, y), OPERATORS[name](x, y), rtol=0, atol=tolerance)


@pytest.mark.parametrize("level", ["0.4", "0.6", "0.7"])
@pytest.mark.parametrize("name", ["add", "divide"])
def test_later_levels_refuse_to_broadcast_and_say_so(level: str, name: str) -> None:
    def kernel(x, y):
        return _stored(getattr(nl, name)(nl.load(x), nl.load(y)))

    x, y = _floats(4, 4), _floats(4, 1)
    with pytest.raises(RuleViolation, match="NKW-NL-SHAPES") as caught:
        _launched(kernel, x, y, level=level)
    assert caught.value.seen == (
        f"(4, 4) and (4, 1); broadcasting by operators of nki.language exists until level 0.3; NKI_LEVEL is {level}"
    )
    assert _launched(kernel, x, x, level=level).shape == (4, 4)


@pytest.mark.parametrize("level", ["0.3", "0.7"])
def test_shapes_that_do_not_broadcast_are_refused_at_every_level(level: str) -> None:
    def kernel(x, y):
        return _stored(nl.add(nl.load(x), nl.load(y)))

    with pytest.raises(RuleViolation, match="NKW-NL-SHAPES") as caught:
        _launched(kernel, _floats(4, 4), _floats(4, 2), level=level)
    assert caught.value.seen == "(4, 4) and (4, 2)"


def _assigned(x):
    tile = nl.ndarray((4, 8), nl.float32)
    tile[...] = 0
    tile[:, 0:2] = nl.load(x)[:, 0:1]
    tile[:, 3:4] = 2.5
    tile[:, 4:8] = nl.load(x)
    return _stored(tile)


def test_numbers_and_repeated_tiles_are_assigned_to_views() -> None:
    x = _floats(4, 4)
    expected = np.hstack([np.repeat(x[:, :1], 2, 1), np.zeros((4, 2), np.float32), x])
    expected[:, 3] = 2.5
    np.testing.assert_array_equal(_launched(_assigned, x, level="0.3"), expected)


def test_later_levels_assign_tiles_of_one_shape_alone() -> None:
    def number(x):
        tile = nl.load(x)
        tile[:, 0:1] = 1.0
        return _stored(tile)

    def repeated(x):
        tile = nl.load(x)
        tile[...] = tile[:, 0:1]
        return _stored(tile)

    def same(x):
        tile = nl.load(x)
        tile[:, 0:1] = tile[:, 1:2]
        return _stored(tile)

    x = _floats(4, 4)
    for kernel, code in ((number, "NKW-MUTATION"), (repeated, "NKW-ELEMENTS-AGREE")):
        _launched(kernel, x, level="0.3")
        with pytest.raises(RuleViolation) as caught:
            _launched(kernel, x, level="0.4")
        assert caught.value.code == code
        if kernel is number:
            assert caught.value.seen.endswith("exists until level 0.3; NKI_LEVEL is 0.4")
    for level in ("0.3", "0.4"):
        np.testing.assert_array_equal(_launched(same, x, level=level)[:, 0], x[:, 1])
