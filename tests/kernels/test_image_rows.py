"""Modulated norms and gates of residuals, with a row for each image of a batch.

Rows of an image may be few, so that a tile of 128 rows has several images, or end inside a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from nki.collectives import ReplicaGroup

import nki_kernels as kernels
import simulate
from tests.kernels.accuracy import in_float64, in_order, named, normal, undrawn
from tests.kernels.case import (
    BF16,
    DTYPES,
    GEN3_ON,
    SMALLEST,
    KernelCase,
    KernelTests,
    Ranks,
    Undefined,
    limit,
    refuse,
    slow,
    together,
    vary,
)
from tests.kernels.test_feed_forward import FP8, INT8, block, quantised_block
from tests.kernels.test_projections import heads, scaled_heads
from tests.kernels.test_qkv_projection import arguments, scaled

IMAGES = [(1, 130), (2, 1), (3, 16), (3, 127), (2, 128), (2, 129), (3, 300), (5, 40)]
"""Images, and rows of each."""


ONE_ROW = "norm_weight has a row for each of 3 images; sequence_ranks, and rows that become integers"


def modulate(inputs: dict[str, Any], names: tuple[str, ...], images: int, hidden: int) -> dict[str, Any]:
    """Replace arguments by rows of images, which differ from image to image."""
    for seed, name in enumerate(names):
        inputs[name] = normal(70 + seed, images, hidden, dtype=next(iter(inputs.values())).dtype)
    return inputs


WIDE = dict(hidden=136, heads=26, kv_heads=3, head=80)
"""Columns of two groups, which meet the same rows."""
FULL = dict(images=1, hidden=1536, heads=24, kv_heads=24, head=64, rotated=64, q_norm=True, k_norm=True)
"""Normalised rows just fit in SBUF."""


def modulated_heads(
    images: int = 3, rows: int = 7, hidden: int = 40, elements: Any = None, **settings: Any
) -> tuple[Any, ...]:
    """Return arguments of qkv_projection with adaLN; `elements` is the dtype of a weight with scales."""
    settings = dict(norm_bias=True, norm_offset=1.0, bias=True) | settings
    if elements is None:
        launch = arguments(images * rows, hidden, **settings)
    else:
        launch = scaled(images * rows, hidden, elements, **settings)
    inputs = named(kernels.qkv_projection, launch)
    return in_order(kernels.qkv_projection, **modulate(inputs, ("norm_weight", "norm_bias"), images, hidden))


class TestModulatedQkvProjection(KernelTests):
    case = KernelCase(
        kernels.qkv_projection,
        modulated_heads,
        values=[
            *together("images rows", *IMAGES, hidden=[128, 1152]),
            *together("images rows", (2, 300), (4, 32), hidden=[127, 129, 1536], dtype=BF16),
            *vary(images=2, rows=[5, 200], hidden=136, elements=[FP8, INT8], dtype=[*DTYPES]),
            *vary(images=2, rows=[5, 200], hidden=136, rotated=16, q_norm=True, k_norm=True),
            *vary(images=2, rows=[150, 200], **WIDE, dtype=[*DTYPES]),
            *slow(dict(images=2, rows=650, **WIDE | dict(hidden=2200))),
        ],
        every_chip=[*together("images rows", *IMAGES, hidden=172, dtype=[*DTYPES])],
        refusals=[
            refuse(
                "norm_weight has 2 rows, one for each image, which do not divide 21 rows",
                norm_weight=normal(1, 2, 40),
            ),
            refuse("norm_weight is (3, 40) and norm_bias is (1, 40)", norm_bias=normal(1, 1, 40)),
            refuse("norm_weight is (3, 40) without norm_bias", norm_bias=lambda _: None),
            refuse(ONE_ROW, dict(elements=INT8, images=3), quantises_rows=True),
        ],
        limits=[limit("images", 1024, "norm_weight has 1025 rows; of 40 elements at most 1024", rows=1)],
        fits=[
            dict(images=16, rows=40, hidden=8192),
            dict(images=8, rows=200, hidden=16384, dtype=BF16),
            *slow(
                dict(rows=2048, **FULL),
                dict(rows=4096, **FULL, dtype=BF16),
            ),
        ],
        undefined=[
            Undefined(
                dict(norm_weight=1), dict(images=3, rows=rows, hidden=136), bad, rows=[*range(rows, 2 * rows)]
            )
            for rows in (5, 43, 129)
            for bad in (np.nan, np.inf)
        ],
        two_sums=[*together("images rows", *IMAGES, hidden=172, dtype=[*DTYPES])],
    )


STATIC = ("quantises_rows",)
"""Compile-time arguments that functions of other tests, which draw the arrays, do not take."""
GATED = ("norm_weight", "norm_bias", "residual_gate")
PLAIN_WEIGHTS = dict(w_up=1, b_up=1, w_down=0)
DENOISER = dict(w_gate=False, norm_bias=True, biases=True)


def modulated_block(
    images: int = 3,
    rows: int = 7,
    hidden: int = 24,
    inner: int = 40,
    elements: Any = None,
    names: tuple[str, ...] = GATED,
    **settings: Any,
) -> tuple[Any, ...]:
    """Return arguments of a plain block with adaLN-zero; `elements` is the dtype of weights with scales."""
    settings = DENOISER | settings
    options = {name: settings.pop(name) for name in ("activation", "residual", *STATIC) if name in settings}
    if elements is None:
        launch = block(images * rows, hidden, inner, **settings)
    else:
        launch = quantised_block(images * rows, hidden, inner, elements=elements, **settings)
    inputs = named(kernels.mlp, launch) | dict(activation="gelu_tanh") | options
    if "norm_weight" in names:
        inputs["norm_offset"] = 1.0
    return in_order(kernels.mlp, **modulate(inputs, names, images, hidden))


class TestModulatedMlp(KernelTests):
    """Norm and gate together, and each alone; a gated activation, rows without a norm, and an RMSNorm beside a gate."""

    case = KernelCase(
        kernels.mlp,
        modulated_block,
        values=[
            *together("images rows", *IMAGES, hidden=[128, 1152], inner=130),
            *together("images rows", (2, 300), (4, 32), hidden=[127, 129, 1536], inner=172, dtype=BF16),
            *vary(images=2, rows=[5, 300], hidden=136, activation=["gelu", "silu"], dtype=[*DTYPES]),
            *vary(images=2, rows=[5, 300], hidden=136, w_gate=True, dtype=[*DTYPES]),
            *vary(images=2, rows=[5, 300], hidden=136, names=[GATED[:2], GATED[2:]]),
            *vary(images=2, rows=[5, 300], names=GATED[2:], norm_bias=False, norm_weight=[False, True]),
            *vary(images=2, rows=[5, 300], names=GATED[2:], row_gate=True, biases=False),
            *vary(images=2, rows=[5, 40], names=GATED[2:], norm_bias=False, elements=FP8, hidden=128),
            dict(images=3, rows=200, hidden=40, inner=1100, dtype=BF16),
            # The last group of rows is smaller, so it has chunks of more columns.
            *vary(images=1, rows=640, hidden=600, dtype=[*DTYPES]),
        ],
        every_chip=[
            *together("images rows", *IMAGES, hidden=172, dtype=[*DTYPES]),
            *vary(images=2, rows=[5, 200], hidden=136, elements=[FP8, INT8], dtype=[*DTYPES]),
        ],
        refusals=[
            refuse("residual_gate has 2 rows, one for each image", residual_gate=normal(1, 2, 24)),
            refuse("residual_gate has to be [1, 24], not (3, 23)", residual_gate=normal(1, 3, 23)),
            refuse("residual_gate is given without a residual", residual=False),
            refuse(ONE_ROW, dict(elements=INT8, images=3), quantises_rows=True),
            refuse(
                "residual_gate is given with rows that become integers or MXFP8",
                dict(elements=INT8, images=1, names=(), quantises_rows=True),
                names=GATED[2:],
            ),
        ],
        fits=[
            dict(images=16, rows=40, hidden=8192, inner=512),
            *vary(images=3, rows=300, hidden=8192, inner=2048, dtype=[*DTYPES]),
        ],
        undefined=[
            Undefined(
                {name: 1},
                dict(images=3, rows=rows, hidden=136),
                bad,
                rows=[*range(rows, 2 * rows)],
                chips=GEN3_ON,
            )
            for rows in (5, 43, 129)
            for name, bad in (("norm_weight", np.nan), ("residual_gate", np.inf))
        ],
        two_sums=[
            *together("images rows", *IMAGES, hidden=172, inner=172, dtype=[*DTYPES]),
            dict(images=2, rows=40, hidden=136, inner=130, elements=FP8),
        ],
        ranks=[
            *(
                Ranks(ranks, PLAIN_WEIGHTS, dict(rows=rows, inner=36 * ranks, dtype=dtype))
                for ranks in (2, 4)
                for rows in (3, 200)
                for dtype in DTYPES
            ),
            # Of rows that are cut all are those of one image.
            *(
                Ranks(
                    2,
                    PLAIN_WEIGHTS | dict(x=0),
                    dict(images=1, rows=rows, inner=72, hidden=72, dtype=dtype),
                    dict(sequence_ranks=2),
                    joined=True,
                    alike=False,
                )
                for rows in (6, 258, 1100)
                for dtype in DTYPES
            ),
        ],
    )


@pytest.mark.parametrize(
    ("target", "images", "rows", "hidden", "inner"),
    [
        ("trn2", 1, 2560, 3072, 1536),  # FLUX at 1024 px on 8 ranks has 4,096 rows
        (SMALLEST, 2, 640, 4096, 1792),
        (SMALLEST, 1, 1024, 8192, 2048),
        (SMALLEST, 2, 150, 8192, 16384),
    ],
)
def test_float32_gates_fit_beside_sums_over_ranks(
    target: str, images: int, rows: int, hidden: int, inner: int
) -> None:
    with undrawn():
        inputs = named(kernels.mlp, modulated_block(images, rows, hidden, inner))
    inputs["replica_group"] = ReplicaGroup([[0, 1]])
    launches = [(in_order(kernels.mlp, **inputs), {})] * 2
    simulate.World(target, 2).launch(kernels.mlp, launches, mode=simulate.Mode.dry)


def gated_heads(
    images: int = 3, rows: int = 7, depth: int = 24, hidden: int = 40, elements: Any = None, **settings: Any
) -> tuple[Any, ...]:
    """Return arguments of output_projection with the gate of adaLN-zero."""
    settings = dict(bias=True) | settings
    options = {name: settings.pop(name) for name in STATIC if name in settings}
    if elements is None:
        launch = heads(images * rows, depth, hidden, **settings)
    else:
        launch = scaled_heads(elements, tokens=images * rows, depth=depth, hidden=hidden, **settings)
    inputs = named(kernels.output_projection, launch) | options
    return in_order(kernels.output_projection, **modulate(inputs, GATED[2:], images, hidden))


class TestGatedOutputProjection(KernelTests):
    """Gates of wide rows do not stay in SBUF; nor do weights.

    One gate for many rows multiplies the columns of a weight that stays.
    """

    case = KernelCase(
        kernels.output_projection,
        gated_heads,
        values=[
            *together("images rows", *IMAGES, hidden=[128, 1152], depth=136),
            *together("images rows", (2, 300), (4, 32), hidden=[127, 129, 1536], depth=172, dtype=BF16),
            *vary(images=2, rows=[5, 200], bias=False, gate=[False, True], dtype=[*DTYPES]),
            *vary(images=2, rows=[300], depth=1300, hidden=2000, dtype=BF16),
            *vary(images=2, rows=[3, 130], hidden=4200, dtype=BF16),
            *vary(images=1, rows=[3, 130], hidden=136, elements=FP8, quantises_rows=True),
            *vary(
                images=1, rows=700, depth=[136, 512], hidden=[40, 2100], bias=[False, True], dtype=[*DTYPES]
            ),
        ],
        every_chip=[
            *together("images rows", *IMAGES, hidden=172, dtype=[*DTYPES]),
            *vary(images=2, rows=[5, 200], hidden=600, elements=[FP8, INT8], dtype=[*DTYPES]),
        ],
        refusals=[
            refuse("residual_gate has 2 rows, one for each image", residual_gate=normal(1, 2, 40)),
            refuse("residual_gate is given without a residual", residual=lambda _: None),
            refuse(
                "residual_gate is given with rows that become integers",
                dict(elements=INT8),
                quantises_rows=True,
            ),
        ],
        fits=[*vary(images=[2, 40], rows=40, depth=2048, hidden=8192, dtype=[*DTYPES])],
        two_sums=[*together("images rows", *IMAGES, hidden=1100, dtype=[*DTYPES])],
        ranks=[
            *(
                Ranks(ranks, dict(o=1, w_o=0), dict(rows=rows, depth=24 * ranks, dtype=dtype))
                for ranks in (2, 4)
                for rows in (3, 200)
                for dtype in DTYPES
            ),
            *(
                Ranks(
                    2,
                    dict(o=1, w_o=0, residual=0),
                    dict(images=1, rows=rows, depth=48, hidden=172),
                    dict(sequence_ranks=2),
                    joined=True,
                    alike=False,
                )
                for rows in (6, 258)
            ),
        ],
    )


def test_references_repeat_rows_of_images() -> None:
    """Each image alone, with its own row, gives its rows."""
    for kernel, reference, launch, cut in (
        (kernels.mlp, kernels.mlp_reference, modulated_block(3, 5), ("x", *GATED)),
        (
            kernels.output_projection,
            kernels.output_projection_reference,
            gated_heads(3, 5),
            ("o", "residual", "residual_gate"),
        ),
    ):
        inputs = named(kernel, [*map(in_float64, launch)])
        together_output = reference(**inputs)
        alone = [
            reference(**inputs | {name: np.split(inputs[name], 3)[image] for name in cut})
            for image in range(3)
        ]
        assert np.allclose(together_output, np.concatenate(alone), rtol=1e-12, atol=1e-12)


def test_the_gated_reference_agrees_with_its_formula() -> None:
    inputs = named(kernels.output_projection, [*map(in_float64, gated_heads(2, 3))])
    output = kernels.output_projection_reference(**inputs)
    for row in range(6):
        added = inputs["o"][row] @ inputs["w_o"] + inputs["bias"][0]
        truth = inputs["residual"][row] + inputs["residual_gate"][row // 3] * added
        assert np.allclose(output[row], truth, rtol=1e-12, atol=1e-12)
