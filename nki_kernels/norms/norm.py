"""The norm of a kernel's rows as its arguments give it, and the steps that every layout shares.

The layouts of rows in SBUF are the other files of this package: `row_tiles`, `blocks`, `hidden_spans` and `runs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.image_rows import check_image_rows
from nki_kernels.tiles import blocks

MOST_IMAGE_COLUMNS = 1024
"""Most elements per partition of a weight of several images whose rows lie in blocks: 4 KiB, and the bias as much."""


@dataclass
class Norm(nl.NKIObject):
    """A norm of rows of H elements: RMSNorm with a weight, LayerNorm with a weight and a bias.

    Without a weight rows are not normalised; a kernel passes such a Norm on if its rows arrive normalised.

    weight, bias: [1, H] @ HBM, or None; of a LayerNorm also [N, H] for rows of N images, see `image_rows`. offset:
    number that is added to the weight. eps: number that is added to the mean of the squares.
    """

    weight: nl.NkiTensor | None
    bias: nl.NkiTensor | None
    offset: float
    eps: float

    def count_images(self):
        """Return the number of rows of the weight: of images that have one each, or 1."""
        return 1 if self.weight is None else self.weight.shape[0]

    def check(self, hidden, tokens=None):
        """Raise AssertionError unless weight and bias are [1, hidden] or None; a bias needs a weight.

        With `tokens` they may also have several rows, one for each image.
        """
        assert self.bias is None or self.weight is not None, (
            "norm_bias is given without norm_weight: give both, or no bias"
        )
        for name, rows in (("norm_weight", self.weight), ("norm_bias", self.bias)):
            if rows is not None and tokens is not None:
                check_image_rows(name, rows, tokens, hidden)
            elif rows is not None:
                assert rows.shape == (1, hidden), f"{name} has to be [1, {hidden}], not {rows.shape}"
        if self.bias is not None:
            assert self.bias.shape == self.weight.shape, (
                f"norm_weight is {self.weight.shape} and norm_bias is {self.bias.shape}; both have a row for each image"
            )
        assert self.count_images() == 1 or self.bias is not None, (
            f"norm_weight is {self.weight.shape} without norm_bias; rows of several images take a LayerNorm, "
            "an RMSNorm has one row"
        )
        assert self.count_images() * blocks(hidden) <= MOST_IMAGE_COLUMNS, (
            f"norm_weight has {self.count_images()} rows; of {hidden} elements at most "
            f"{MOST_IMAGE_COLUMNS // blocks(hidden)} stay in SBUF"
        )


def create_rms_norm(weight, eps):
    """Return an RMSNorm with a weight [1, H] @ HBM as a `Norm` without bias and offset; None for a weight of None."""
    return None if weight is None else Norm(weight, None, 0.0, eps)


def compute_inverse_root(squares, scale, eps, roots=None):
    """Write 1 / sqrt(squares * scale + eps) to `roots` and return it; by default to a new float32 tile in SBUF.

    Args:
        squares: tile [P, …] of any float dtype.
        scale: a number, such as 1 / H for sums over H elements.
        eps: a column [P or more, 1] float32 in SBUF.
    """
    if roots is None:
        roots = nl.ndarray(squares.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.activation(dst=roots, op=nl.rsqrt, data=squares, scale=scale, bias=eps[0 : squares.shape[0], :])
    return roots


def check_one_image(norm, sequence_ranks, rounds_to_integers):
    """Raise AssertionError if a Norm of several images meets rows that are cut over ranks, or no rows of fp8.

    rounds_to_integers: whether rows become integers or MXFP8.
    """
    assert norm.count_images() == 1 or (sequence_ranks == 1 and not rounds_to_integers), (
        f"norm_weight has a row for each of {norm.count_images()} images; sequence_ranks, and rows that become "
        "integers or MXFP8, take one row"
    )
