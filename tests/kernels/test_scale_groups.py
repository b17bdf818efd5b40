"""mlp with weights of 4 bits and scales of groups of rows: groups, zero points, few and many rows, cores, ranks."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import nki_kernels as kernels
from tests.kernels.accuracy import find_faults, in_order, named, normal, run
from tests.kernels.case import BF16, F32, KernelCase, KernelTests, Ranks, refuse, vary
from tests.kernels.test_feed_forward import FP8, quantise_blocks
from tests.kernels.test_nibbles import PACKED_WEIGHTS, PACKED_ZEROS, packed_block

DOWN_ROWS = dict(w_down_scales=0)
"""Axes of scales of groups that ranks divide besides those of columns."""


grouped_block = partial(packed_block, hidden=64, inner=96, group=32)
PLAIN_DOWN = dict(w_down=normal(3, 512, 256, dtype=BF16), w_down_scales=None, w_down_zeros=None)
PLAIN_UP = dict(w_gate=False, w_up=normal(4, 256, 512, dtype=BF16), w_up_scales=None, w_up_zeros=None)
"""Settings of a weight that is plain."""


def list_block_scaled(name: str, weight: np.ndarray) -> dict[str, object]:
    """Return settings of a weight of fp8 with a scale for each 128 rows and columns, in the place of a packed one."""
    elements, scales = quantise_blocks(weight, FP8)
    return {name: elements, f"{name}_block_scales": scales, f"{name}_scales": None, f"{name}_zeros": None}


BLOCK_DOWN = list_block_scaled("w_down", normal(3, 512, 256))
BLOCK_UP = list_block_scaled("w_up", normal(4, 256, 512)) | dict(w_gate=False)


class TestGroupedMlp(KernelTests):
    """Rows around those for which slots remain, depths around whole stacks and runs, and both kinds of zero points."""

    case = KernelCase(
        kernels.mlp,
        grouped_block,
        values=[
            *vary(tokens=[1, 2, 3, 9, 31, 32, 33, 64, 65, 129], hidden=384, inner=512, group=128, zeros=True),
            *vary(tokens=[1, 15, 16, 17], hidden=[256, 288, 352], inner=512, group=32, zeros=[True, False]),
            *vary(tokens=[5, 32, 33], hidden=[448, 1344], inner=512, group=64, zeros=[True, False]),
            *vary(tokens=[3, 7], hidden=1792, inner=[512, 1792], group=128, zeros=False, scale_dtype=BF16),
            *vary(tokens=[4, 140], hidden=[32, 96, 160], inner=[32, 96, 160, 224], zeros=[True, False]),
            *vary(tokens=[3, 140], hidden=128, inner=[256, 512], group=[64, 128]),
            *vary(tokens=[3, 140], hidden=256, inner=128, group=128),
            dict(tokens=5, hidden=256, inner=512, dtype=F32),
            *vary(tokens=[5, 140], hidden=256, inner=512, norm_weight=[True, False], w_gate=[True, False]),
            *vary(tokens=[5, 140], hidden=256, inner=512, norm_bias=True, biases=True),
            *vary(tokens=[5, 140], hidden=256, inner=512, row_gate=True),
            *vary(tokens=[5, 40, 140], hidden=256, inner=512, group=[None, 32], **PLAIN_DOWN),
            *vary(tokens=[5, 40, 140], hidden=256, inner=512, group=[None, 32], **PLAIN_UP),
            *vary(tokens=[5, 16, 140], hidden=256, inner=512, group=[None, 32], **BLOCK_DOWN),
            *vary(tokens=[5, 16, 140], hidden=256, inner=512, group=[None, 32], **BLOCK_UP),
            *vary(tokens=[5, 140], hidden=256, inner=512, residual=False, scale_dtype=BF16),
            *vary(tokens=[3, 140], hidden=256, inner=512, zeros=[True, False], nibble_dtype="bfloat16"),
        ],
        fits=[
            *vary(tokens=[1, 300], hidden=16384, inner=256, group=[32, 128]),
            *vary(tokens=[8, 600], hidden=4096, inner=1792, group=[32, 128]),
        ],
        every_chip=[
            *vary(tokens=[5, 40, 130], hidden=256, inner=512, group=[32, 128]),
            *vary(tokens=[2, 9], hidden=1280, inner=512, zeros=[True, False]),
        ],
        refusals=[
            refuse(
                "w_up_scales of groups is float32 or bfloat16 [groups, 96] with groups of 32, 64 or 128 of 64 rows, "
                "not float32 (4, 96)",
                w_up_scales=lambda s: np.repeat(s, 2, axis=0),
                w_up_zeros=lambda z: np.repeat(z, 2, axis=0),
            ),
            refuse(
                "groups of 32, 64 or 128 of 96 rows, not float32 (2, 64)",
                w_down_scales=lambda s: s[:2],
                w_down_zeros=None,
            ),
            refuse("w_up_scales of groups is", w_up_scales=lambda s: s[:, 1:], w_up_zeros=None),
            refuse("w_up_scales of groups is", w_up_scales=lambda s: s.astype(np.float16)),
            refuse("zero points are uint8 [2, 96], one for each column", w_up_zeros=lambda z: z[:1]),
            refuse("zero points are uint8 [3, 64], one for each column", w_down_zeros=lambda z: z[:, 1:]),
            refuse(
                "w_up_scales is float32 [1, 96], one for each column",
                dict(group=None),
                w_up_scales=lambda s: s.astype(BF16),
            ),
        ],
        two_sums=[
            *vary(
                tokens=[1, 17, 129, 300], hidden=256, inner=[512, 1024], group=[32, 128], zeros=[True, False]
            ),
        ],
        ranks=[
            *(
                Ranks(
                    ranks,
                    PACKED_WEIGHTS | DOWN_ROWS | (PACKED_ZEROS | dict(w_down_zeros=0) if zeros else {}),
                    dict(tokens=tokens, hidden=256, inner=256 * ranks, zeros=zeros, group=group),
                )
                for ranks in (2, 4)
                for tokens, zeros, group in ((9, True, 32), (1, False, 128), (140, False, 64))
            ),
        ],
    )


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("tokens", [8, 130])
def test_every_nibble_is_multiplied_by_the_scale_of_its_group(tokens: int, group: int) -> None:
    """Rows of x have a single one, and scales are powers of two: y has single elements of w_up, all of them exact."""
    hidden, inner = 512, 512
    groups = hidden // group
    nibbles = (np.arange(hidden)[:, None] * 7 + np.arange(inner)) % 16
    zeros = ((np.arange(groups)[:, None] + 3 * np.arange(inner)) % 16).astype(np.uint8)
    exponents = (np.arange(groups)[:, None] * 3 + np.arange(inner)) % 5
    runs = nibbles.reshape(2, 2, 128, inner)
    up = (runs[:, 0] | runs[:, 1] << 4).astype(np.uint8).reshape(256, inner)
    identity = np.full((inner, hidden), 8) + np.eye(inner, hidden, dtype=int)
    runs = identity.reshape(2, 2, 128, hidden)
    down = (runs[:, 0] | runs[:, 1] << 4).astype(np.uint8).reshape(256, hidden)
    rows = np.arange(tokens) * 31 % hidden
    x = np.zeros((tokens, hidden), BF16)
    x[np.arange(tokens), rows] = 1
    y = run(
        kernels.mlp,
        in_order(
            kernels.mlp,
            x=x,
            w_up=up,
            w_down=down,
            w_up_scales=np.ldexp(np.float32(512), exponents).astype(F32),
            w_up_zeros=zeros,
            w_down_scales=np.full((inner // group, hidden), 512.0, F32),
            activation="relu",
            residual=False,
        ),
    )
    numbers = (nibbles - np.repeat(zeros, group, axis=0).astype(int)) * 2 ** np.repeat(
        exponents, group, axis=0
    )
    assert np.array_equal(y.astype(int), np.maximum(numbers[rows], 0))
    assert y.dtype == BF16 and (y > 0).any(axis=1).all()


@pytest.mark.slow
@pytest.mark.parametrize("target", ["trn1", "trn2", "trn3"])
def test_no_finding_in_scales_of_groups(target: str) -> None:
    def launches() -> None:
        for tokens, group in ((1, 128), (5, 32), (20, 64), (140, 32)):
            arguments = named(kernels.mlp, grouped_block(tokens, hidden=256, inner=512, group=group))
            run(kernels.mlp, in_order(kernels.mlp, **arguments), target)

    assert find_faults(launches) == []
