"""Mean and variance of each channel of a convolution's results, taken by the Vector engine while they are in SBUF.

A group norm of the results then needs no pass over them (convolution/normalised.py).
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.convolution.windows import split_box
from nki_kernels.tiles import PARTITIONS, blocks, ranges

RUN = 64
"""Statistics of so many tiles are combined at a time, so that their memory does not grow with images."""

STATISTICS = 6
"""Numbers of `bn_stats`: count, mean and count * variance of even and of odd elements."""


class ChannelStatistics(nl.NKIObject):
    """Statistics of at most 128 channels of some images, of which `add` has seen parts.

    Args:
        channels: number of channels.
        images: number of images.
        most: largest number of calls of `add` for one image.
    """

    def __init__(self, channels, images, most):
        shape = (channels, images, min(most, RUN) * STATISTICS)
        self.tiles = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.runs = None
        if most > RUN:
            shape = (channels, images, blocks(most, RUN) * STATISTICS)
            self.runs = nl.ndarray(shape, dtype=nl.float32, buffer=nl.sbuf)
        self.tile_counts, self.run_counts, self.elements = [], [], []
        for _ in range(images):
            self.tile_counts.append(0)
            self.run_counts.append(0)
            self.elements.append(0)

    def add(self, image, tile):
        """Take the statistics of `tile` [channel, ...] @ SBUF, at most 512 pixels of an image."""
        if self.tile_counts[image] == RUN:
            self.end_run(image)
        start = self.tile_counts[image] * STATISTICS
        nisa.bn_stats(dst=self.tiles[:, image, start : start + STATISTICS], data=tile)
        self.tile_counts[image] += 1
        count = 1
        for size in tile.shape[1:]:
            count *= size
        self.elements[image] += count

    def end_run(self, image):
        """Combine the statistics of the last tiles of an image to those of one run."""
        moments = self.combine(self.tiles[:, image, 0 : self.tile_counts[image] * STATISTICS])
        start, half = self.run_counts[image] * STATISTICS, self.elements[image] / 2
        for first in (start, start + STATISTICS // 2):
            nisa.memset(dst=self.runs[:, image, first : first + 1], value=half)
            nisa.tensor_copy(dst=self.runs[:, image, first + 1 : first + 2], src=moments[:, 0:1])
            nisa.tensor_scalar(
                dst=self.runs[:, image, first + 2 : first + 3],
                data=moments[:, 1:2],
                op0=nl.multiply,
                operand0=half,
            )
        self.run_counts[image] += 1
        self.tile_counts[image], self.elements[image] = 0, 0

    def combine(self, statistics):
        """Return mean and variance of the elements of some statistics, [channel, 2] float32 in SBUF."""
        moments = nl.ndarray((statistics.shape[0], 2), dtype=nl.float32, buffer=nl.sbuf)
        nisa.bn_aggr(dst=moments, data=statistics)
        return moments

    def compute_moments(self, image):
        """Return mean and variance of each channel of an image, [channel, 2] float32 in SBUF."""
        if self.run_counts[image] == 0:
            return self.combine(self.tiles[:, image, 0 : self.tile_counts[image] * STATISTICS])
        self.end_run(image)
        return self.combine(self.runs[:, image, 0 : self.run_counts[image] * STATISTICS])


class ResultMoments(nl.NKIObject):
    """Moments of a convolution's results, for the outputs whose weights are in SBUF.

    Args:
        target: [N, O, 2] float32 @ HBM, which takes mean and variance of each output of each image.
        outputs: (first, end) of these outputs.
        most: largest number of tiles that an image is computed in.
    """

    def __init__(self, target, outputs, most):
        self.target, self.outputs = target, outputs
        self.statistics = []
        for first, end in ranges(outputs[0], outputs[1]):
            self.statistics.append(ChannelStatistics(end - first, target.shape[0], most))

    def add(self, output_box, tile):
        """Take the statistics of results of an `OutputBox`, or of some of their pixels: [output, image, ...] @ SBUF."""
        statistics = self.statistics[output_box.outputs[0] // PARTITIONS]
        for image in range(tile.shape[1]):
            statistics.add(output_box.box[0][0] + image, tile[:, image])

    def store(self):
        """Store the moments of all results."""
        for index in range(len(self.statistics)):
            first = self.outputs[0] + index * PARTITIONS
            end = min(self.outputs[1], first + PARTITIONS)
            for image in range(self.target.shape[0]):
                moments = self.statistics[index].compute_moments(image)
                nisa.dma_copy(dst=self.target[image, first:end], src=moments)


def count_image_tiles(stripes, tile, images):
    """Return the largest number of PSUM tiles in which stripes compute an image; `tile` has their sizes."""
    counts = []
    for _ in range(images):
        counts.append(0)
    for stripe in stripes:
        for box in split_box(stripe, tile):
            for image in range(box[0][0], box[0][1]):
                counts[image] += 1
    most = 0
    for count in counts:
        most = max(most, count)
    return most
