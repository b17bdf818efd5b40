"""Group norm and activation of a convolution's images, applied to the regions in SBUF that its windows read.

The norm comes as the moments of each channel, which the launch before has taken (convolution/moments.py). So normalised
images are neither written to HBM nor read from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.packing import find_inner_ranges
from nki_kernels.norms.groups import compute_factors, create_membership, load_affine
from nki_kernels.tiles import PARTITIONS, blocks, filled


@dataclass
class InputNorm(nl.NKIObject):
    """Group norm of images x before a convolution.

    moments: [N, C, 2] float32 @ HBM, mean and variance of each channel of each image. weight, bias: [1, C] @ HBM.
    groups: number of groups. eps: number that is added to variances. function: activation.
    """

    moments: nl.NkiTensor
    weight: nl.NkiTensor
    bias: nl.NkiTensor
    groups: int
    eps: float
    function: object

    def check(self, images, channels):
        """Raise AssertionError unless the arguments fit images of so many channels."""
        assert self.moments.shape == (images, channels, 2) and self.moments.dtype == nl.float32, (
            f"moments are [{images}, {channels}, 2] float32, not {self.moments.shape} {self.moments.dtype}"
        )
        for name, row in (("norm_weight", self.weight), ("norm_bias", self.bias)):
            assert row is not None and row.shape == (1, channels), (
                f"with moments {name} is [1, {channels}], not {'absent' if row is None else row.shape}"
            )
        assert self.groups >= 1 and channels % self.groups == 0, (
            f"{self.groups} groups do not divide {channels} channels: give a divisor of {channels}"
        )
        block, members = blocks(channels, blocks(channels)), channels // self.groups
        assert block % members == 0, (
            f"{block} of {channels} channels, which are on the partitions at a time, are no whole groups of "
            f"{members}: apply group_norm before"
        )

    def load_factors(self, pack):
        """Return for each block of channels of a `Pack` and each image the columns (scale, shift) of the channels.

        The columns, float32 in SBUF, are repeated for each group of partitions.
        """
        eps = filled((PARTITIONS, 1), self.eps)
        members = self.moments.shape[1] // self.groups
        factors = []
        for first, end in pack.blocks:
            affine = load_affine((self.weight, self.bias), (first, end))
            membership = create_membership(end - first, members)
            block_factors = []
            for image in range(self.moments.shape[0]):
                moments = nl.ndarray((end - first, 2), dtype=nl.float32, buffer=nl.sbuf)
                nisa.dma_copy(dst=moments, src=self.moments[image, first:end])
                scale, shift = compute_factors(moments, members, affine, eps, membership)
                block_factors.append((repeat_column(scale, pack), repeat_column(shift, pack)))
            factors.append(block_factors)
        return factors

    def apply(self, regions, factors, windows, stripes, pack):
        """Normalise and activate what stripes read, in place; the padding stays.

        Args:
            regions: what `load_packed` returned.
            factors: what `load_factors` returned.
            windows: `Windows` of the convolution.
            stripes: boxes of results in the groups of partitions.
            pack: a pack of single taps.
        """
        for block in range(len(regions)):
            height = pack.blocks[block][1] - pack.blocks[block][0]
            for group in range(len(stripes)):
                first = group * pack.side
                (upper, lower), (begin, stop) = find_inner_ranges(windows, stripes[group], pack, (0, 0))
                first_image, end_image = stripes[group][0]
                for image in range(first_image, end_image):
                    scale, shift = factors[block][image]
                    pixels = regions[block][
                        first : first + height, image - first_image, upper:lower, begin:stop
                    ]
                    nisa.activation(
                        dst=pixels,
                        op=self.function,
                        data=pixels,
                        scale=scale[first : first + height],
                        bias=shift[first : first + height],
                    )


def repeat_column(column, pack):
    """Return a column [channel, 1] float32 @ SBUF once for each group of partitions of a pack, `pack.side` apart."""
    if pack.groups == 1:
        return column
    height = column.shape[0]
    repeated = nl.ndarray(((pack.groups - 1) * pack.side + height, 1), dtype=nl.float32, buffer=nl.sbuf)
    for group in range(pack.groups):
        nisa.tensor_copy(dst=repeated[group * pack.side : group * pack.side + height], src=column)
    return repeated
