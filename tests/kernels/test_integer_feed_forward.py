"""mlp with rows and weights of 8-bit integers (W8A8): bit for bit where its definition allows, and over ranks."""

from __future__ import annotations

from functools import wraps
from typing import Any

import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from simulate.check import detect, gathered
from simulate.check.integer_products import list_lines
from tests.kernels.accuracy import TARGETS, in_order, last_place, named
from tests.kernels.case import DTYPES, F32, KernelCase, KernelTests, exactly, refuse, vary
from tests.kernels.test_feed_forward import FP8, INT8, quantised_block
from tests.kernels.test_quantised_rows import divide_columns, within_half_of_rounding


@wraps(quantised_block)
def integer_block(**settings: Any) -> tuple[Any, ...]:
    """Return the arguments of an int8 block whose rows are quantised; settings are those of `quantised_block`."""
    arguments = named(kernels.mlp, quantised_block(**(dict(elements=INT8) | settings)))
    return in_order(kernels.mlp, **(arguments | dict(quantises_rows=True)))


@wraps(quantised_block)
def defined_block(**settings: Any) -> tuple[Any, ...]:
    """Return the arguments of a block all of whose steps round as NumPy does: relu and no norm."""
    arguments = named(kernels.mlp, integer_block(**(dict(norm_weight=False) | settings)))
    return in_order(kernels.mlp, **(arguments | dict(activation="relu", b_down=None)))


class TestDefinedSteps(KernelTests):
    """Integers, sums, scales, biases of gate and up, and the residual: the bytes of the definition.

    K of both products is around 128 and around 1,024, the length of a group.
    """

    case = KernelCase(
        kernels.mlp,
        defined_block,
        values=[
            *vary(tokens=[1, 127, 128, 129], hidden=[136, 127], inner=172, dtype=[*DTYPES]),
            *vary(tokens=3, hidden=[128, 129], inner=[127, 128, 129], dtype=F32),
            *vary(tokens=2, hidden=[1024, 1025], inner=[1024, 1025], dtype=[*DTYPES]),
            *vary(tokens=3, hidden=2177, inner=2600, residual=False),
            *vary(tokens=[5, 140], hidden=72, inner=600, biases=True, w_gate=[True, False], residual=False),
        ],
        every_chip=[
            *vary(tokens=[5, 130], hidden=136, inner=172, dtype=[*DTYPES]),
            dict(tokens=3, hidden=1100, inner=1100),
        ],
        two_cores=[*vary(tokens=[1, 128, 129, 300], hidden=136, inner=172, dtype=[*DTYPES])],
        tolerance=exactly,
    )


class TestIntegerFeedForward(KernelTests):
    """Norms, activations, biases and gates of rows, whose roundings move an integer at times."""

    case = KernelCase(
        kernels.mlp,
        integer_block,
        values=[
            *vary(tokens=[1, 33, 127, 128, 129], hidden=[136, 256], inner=172),
            *vary(tokens=[2, 300], hidden=136, inner=[160, 320], biases=True),
            *vary(tokens=[5, 140], hidden=[127, 384], inner=200, dtype=F32),
            *vary(tokens=5, hidden=264, inner=140, norm_weight=[True, False], w_gate=[True, False]),
            *vary(tokens=140, hidden=136, inner=140, norm_bias=True),
            *vary(tokens=[5, 140], hidden=136, inner=140, row_gate=True, dtype=[*DTYPES]),
            *vary(tokens=5, hidden=136, inner=140, norm_offset=1.0),
        ],
        fits=[
            *vary(tokens=[1, 300], hidden=8192, inner=896, dtype=[*DTYPES]),
            dict(tokens=130, hidden=8192, inner=16384, dtype=F32, biases=True, norm_bias=True),
            dict(tokens=130, hidden=16384, inner=16384, row_gate=True),
            dict(tokens=130, hidden=16384, inner=200),
        ],
        every_chip=[*vary(tokens=[5, 130], hidden=136, inner=172)],
        refusals=[
            refuse(
                "takes float8_e4m3 weights or int8 weights, all with scales; w_down has no scales or is float8_e4m3 "
                "beside w_up of int8",
                w_down=lambda weight: weight.astype(FP8),
            ),
            refuse("w_gate has no scales or is int8 beside w_up of int8", w_gate_scales=None),
        ],
        two_cores=[*vary(tokens=[3, 300], hidden=136, inner=172, row_gate=[True, False])],
        tolerance=within_half_of_rounding,
    )


@pytest.mark.parametrize("cut", [False, True])
@pytest.mark.parametrize(("tokens", "cores"), [(4, 1), (4, 2), (300, 1), (300, 2)])
def test_ranks_take_scales_from_their_own_columns(tokens: int, cores: int, cut: bool) -> None:
    """Two ranks give x and the sum of what each gives alone for its columns, also where they divide the rows."""
    arguments = named(kernels.mlp, integer_block(tokens=tokens, hidden=40, inner=72))
    shards = divide_columns(arguments)
    alone = [np.asarray(kernels.mlp(**(shard | dict(residual=False)))).astype(np.float64) for shard in shards]
    settings = dict(replica_group=ReplicaGroup([[0, 1]]), sequence_ranks=2 if cut else 1)
    rows = np.split(arguments["x"], 2) if cut else 2 * [arguments["x"]]
    world = simulate.World("trn2", 2, cores)
    launches = [((), shard | settings | dict(x=x.copy())) for shard, x in zip(shards, rows)]
    outputs = [np.asarray(output) for output in world.launch(kernels.mlp, launches).outputs]
    expected = arguments["x"].astype(np.float64) + sum(alone)
    # Partial sums, their sum and y are rounded to bfloat16: three halves of a last place of the largest number.
    bound = 3 / 2 * 2.0**-7 * np.abs([*alone, expected]).max()
    for output in [np.concatenate(outputs)] if cut else outputs:
        assert np.abs(output.astype(np.float64) - expected).max() <= bound


def test_rows_of_zeros_stay_zero() -> None:
    arguments = named(kernels.mlp, integer_block(tokens=3, hidden=24, inner=40, norm_weight=False))
    arguments["x"] = np.zeros_like(arguments["x"])
    assert not np.asarray(kernels.mlp(**arguments)).astype(F32).any()


def test_the_definition_follows_the_formula_of_one_number() -> None:
    """One row of two numbers: 3 and 4 become 95 and 127 of 4 / 127; 95 * 10 + 127 * 20 = 3490."""
    step = np.float32(4) * np.float32(1 / 127)
    columns = np.array([[10], [20]], np.int8)
    inner = np.float32(3490) * step * np.float32(0.5)
    arguments = dict(
        x=np.array([[3, 4]], F32),
        w_up=columns,
        w_up_scales=np.full((1, 1), 0.5, F32),
        w_down=np.array([[100, -7]], np.int8),
        w_down_scales=np.array([[0.25, 2]], F32),
        activation="relu",
        residual=False,
        quantises_rows=True,
    )
    expected = np.array([[127 * 100 * 0.25, 127 * -7 * 2]]) * float(inner) / 127
    for output in (kernels.mlp_reference(**arguments), np.asarray(kernels.mlp(**arguments))):
        # Four products and scales are rounded to float32 one after the other.
        assert np.abs(output - expected).max() <= 8 * last_place(np.dtype(F32), float(np.abs(expected).max()))


@pytest.mark.parametrize("target", TARGETS)
def test_check_proves_all_sums_of_integers(target: str) -> None:
    """Gate, up and down have K of 1,100, so each of their panels has a group of 1,024 products and one of 76."""
    arguments = integer_block(tokens=3, hidden=1100, inner=1100)
    with gathered() as seen:
        simulate.World(target).launch(kernels.mlp, [(arguments, {})])
    ((launch, evidence),) = seen.launches
    assert detect(launch, evidence) == []
    (line,) = [line for line in list_lines(seen.launches) if line["groups"]]
    assert line["where"]["file"].endswith("integer_product.py")
    panels = -(-1100 // 512)
    assert line["groups"] == line["exact"] == 3 * panels * 2 and line["unproven"] == 0
