"""Group norm of channels on the partitions as one scale and one shift for each channel."""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.norms.norm import compute_inverse_root
from nki_kernels.tiles import filled


def load_affine(affine, rows):
    """Load weight and bias of channels first … end - 1 of all images into columns [channel, 1] float32 in SBUF.

    Channel c of each image has element c of the rows [1, C]; the channels may be of several images.
    """
    first, end = rows
    columns = []
    for row in affine:
        channels = row.shape[1]
        raw = nl.ndarray((end - first, 1), dtype=row.dtype, buffer=nl.sbuf)
        elements = row.reshape((channels, 1))
        start = first
        while start < end:
            last = min(end, (start // channels + 1) * channels)
            image = start // channels * channels
            nisa.dma_copy(
                dst=raw[start - first : last - first, :], src=elements[start - image : last - image, :]
            )
            start = last
        column = raw
        if row.dtype != nl.float32:
            column = nl.ndarray(raw.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_copy(dst=column, src=raw)
        columns.append(column)
    return columns


def compute_factors(moments, members, affine, eps, membership):
    """Return the scale and the shift of each channel, columns [channel, 1] float32: y is x * scale + shift.

    Args:
        moments: mean and variance of each channel, [channel, 2] float32 in SBUF.
        members: channels of a group.
        affine: columns of weight and bias.
        eps: a column of at least as many partitions.
        membership: what `create_membership` returns.
    """
    channels = moments.shape[0]
    weight, bias = affine
    means = average_groups(moments[:, 0:1], membership, members)
    # A group's variance is the mean of var + (mean - group's mean)^2 of its channels.
    spread = nl.ndarray((channels, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=spread, data1=moments[:, 0:1], data2=means, op=nl.subtract)
    nisa.tensor_tensor(dst=spread, data1=spread, data2=spread, op=nl.multiply)
    nisa.tensor_tensor(dst=spread, data1=spread, data2=moments[:, 1:2], op=nl.add)
    variances = average_groups(spread, membership, members)
    scale = compute_inverse_root(variances, 1.0, eps)
    nisa.tensor_tensor(dst=scale, data1=scale, data2=weight, op=nl.multiply)
    shift = nl.ndarray((channels, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=shift, data1=means, data2=scale, op=nl.multiply)
    nisa.tensor_tensor(dst=shift, data1=bias, data2=shift, op=nl.subtract)
    return scale, shift


def create_membership(channels, members):
    """Return which channels are in which groups: ones and zeros, [channel, group] and [group, channel] float32."""
    count = channels // members
    by_channel = filled((channels, count), 1.0)
    by_group = filled((count, channels), 1.0)
    # Channel p is in group g if 0 <= p - members * g <= members - 1.
    for tile, pattern, multiplier in (
        (by_channel, [[-members, count]], 1),
        (by_group, [[1, channels]], -members),
    ):
        for offset, comparison in ((0, nl.greater_equal), (1 - members, nl.less_equal)):
            nisa.affine_select(
                dst=tile,
                pattern=pattern,
                channel_multiplier=multiplier,
                offset=offset,
                on_true_tile=tile,
                on_false_value=0.0,
                cmp_op=comparison,
            )
    return by_channel, by_group


def average_groups(column, membership, members):
    """Return for each channel the mean of a column [channel, 1] over its group, [channel, 1] float32 in SBUF."""
    by_channel, by_group = membership
    channels, count = by_channel.shape
    sums = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=by_channel, moving=column)
    averages = nl.ndarray((count, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_scalar(dst=averages, data=sums, op0=nl.multiply, operand0=1.0 / members)
    spread = nl.ndarray((channels, 1), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=spread, stationary=by_group, moving=averages)
    channel_averages = nl.ndarray((channels, 1), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=channel_averages, src=spread)
    return channel_averages
