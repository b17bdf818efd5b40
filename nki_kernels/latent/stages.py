"""The stages of latent attention in a decode step, and the order in which the pieces of all sequences pass them.

An item is a piece of a sequence. Its softmax is online: relative to the largest score so far, by which later pieces
correct the sums. Each engine works in program order, so the stages of several items alternate: while the rows of one
are transposed, the one before is scored, the exponentials of a third are taken, and its products follow.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.softmax import largest_of_queries, on_all_partitions
from nki_kernels.latent.loads import bring, transpose_chunk
from nki_kernels.latent.output import place_divided
from nki_kernels.latent.sizes import heights
from nki_kernels.tiles import PARTITIONS


class Item(nl.NKIObject):
    """A piece of a sequence, and its tiles on the way through the stages."""

    def __init__(self, sequence, piece, first, last):
        self.sequence = sequence
        self.piece = piece
        self.first = first
        self.last = last
        self.rows = None
        self.beside = None
        self.transposed = None
        self.scores = None
        self.found = None
        self.largest = None
        self.shift = None
        self.factor = None
        self.weights = None
        self.bank = None
        self.product = None
        self.sums = None


class Work(nl.NKIObject):
    """Tiles and tensors of one launch; the running maximum, sums and products are those of the sequence at hand."""

    def __init__(self, sizes, scale, cache, queries, places):
        self.sizes = sizes
        self.scale = scale
        self.cache = cache
        self.latent_queries, self.turned_queries = queries
        self.tokens_at, self.keys_at = places
        self.items = []
        self.first_chunks = []
        at = 0
        for _, chunks, _ in sizes.pieces:
            self.first_chunks.append(at)
            at += chunks
        last = len(sizes.pieces) - 1
        for sequence in range(sizes.sequences):
            for piece in range(len(sizes.pieces)):
                self.items.append(Item(sequence, piece, piece == 0, piece == last))
        self.row_tiles = []
        self.beside_tiles = []
        self.transposed_tiles = []
        self.ones = nl.ndarray((PARTITIONS, PARTITIONS), dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.memset(dst=self.ones, value=1.0)
        # The Scalar engine loads the table of exp while rows arrive.
        nisa.activation(dst=self.ones[0:1, 0:1], op=nl.exp, data=self.ones[0:1, 0:1], scale=0.0)
        self.largest = None
        self.shift = None
        self.total = None
        self.mixed = None


def allocate(work):
    """Tiles for the rows of some items, and for the transposed rows of two."""
    sizes = work.sizes
    for _ in range(sizes.buffers):
        shape = (PARTITIONS, sizes.most, sizes.width)
        work.row_tiles.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
    for _ in range(2):
        shape = (PARTITIONS, sizes.most, sizes.beside)
        work.beside_tiles.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
        shape = (min(sizes.rank, PARTITIONS), sizes.most, sizes.parts, PARTITIONS)
        latent = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        shape = (sizes.beside, sizes.most, PARTITIONS)
        work.transposed_tiles.append((latent, nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)))


def attend(work, latents):
    """All items through all stages; what they weigh goes to `latents`, as `output_tile` has them.

    Products are added behind the exponentials of the next item, which its products wait for.
    """
    sizes, count = work.sizes, len(work.items)
    slots = max(sizes.most, WEIGH_STAGES)
    apart = slots // WEIGH_STAGES
    for number in range(min(sizes.ahead, count)):
        bring(work, number)
    for step in range(count + sizes.behind):
        if step + sizes.ahead < count:
            bring(work, step + sizes.ahead)
        for slot in range(slots):
            if step < count:
                transpose_chunk(work, work.items[step], slot)
            if 1 <= step <= count:
                score_chunk(work, work.items[step - 1], slot)
            if 2 <= step <= count + 1:
                weigh(work, work.items[step - 2], slot, apart)
            if step > sizes.behind and slot == 2 * apart + 1:
                add_item(work, work.items[step - sizes.behind - 1], latents)
        if step >= sizes.behind:
            mix(work, work.items[step - sizes.behind])
    add_item(work, work.items[count - 1], latents)


def score_chunk(work, item, chunk):
    """Scores of a chunk, [row, query] @ PSUM, masks included; nothing behind the last chunk."""
    if chunk >= item.rows.shape[1]:
        return
    sizes, height = work.sizes, item.rows.shape[0]
    if chunk == 0:
        shape = (height, item.rows.shape[1], sizes.stride)
        item.scores = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)[:, :, 0 : sizes.queries]
    latent, turned = item.transposed
    first = item.sequence * sizes.new
    last = first + sizes.new
    target = item.scores[:, chunk, :]
    for start, end, part_height in heights(sizes.rank):
        for part in range(start, end):
            nisa.nc_matmul(
                dst=target,
                stationary=latent[0:part_height, chunk, part, 0:height],
                moving=work.latent_queries[0:part_height, part, first:last, :],
                accumulate=part > 0,
            )
    nisa.nc_matmul(
        dst=target,
        stationary=turned[:, chunk, 0:height],
        moving=work.turned_queries[:, first:last, :],
        accumulate=True,
    )


WEIGH_STAGES = 4
"""Steps from scores to exponentials, which other products separate."""


def weigh(work, item, slot, apart):
    """One of the steps from scores to exponentials, so many slots apart: each waits for what other engines do first."""
    if slot == 0:
        find_by_partition(work, item)
    elif slot == apart:
        find_largest(work, item)
    elif slot == 2 * apart:
        exponentials(work, item)
    elif slot == 3 * apart:
        correct(work, item)


def find_by_partition(work, item):
    """The largest score of each query on each partition."""
    height, _, queries = item.scores.shape
    item.found = nl.ndarray((height, queries), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=item.found, op=nl.maximum, data=item.scores.permute((0, 2, 1)), axis=2)


def find_largest(work, item):
    """The largest score of each query so far, as a column."""
    own = largest_of_queries(item.found)
    item.largest = own
    if not item.first:
        item.largest = nl.ndarray(own.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=item.largest, data1=own, data2=work.largest, op=nl.maximum)


def exponentials(work, item):
    """exp(scale * (score - largest so far)) of the scores of an item, in the dtype of the products."""
    height, chunks, _ = item.scores.shape
    item.shift = kept(on_all_partitions(item.largest))
    largest = item.shift[0:height, :].expand_dim(1).broadcast(1, chunks)
    shifted = nl.ndarray(item.scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=shifted, data1=item.scores, data2=largest, op=nl.subtract)
    item.weights = nl.ndarray(item.scores.shape, dtype=work.sizes.dtype, buffer=nl.sbuf)
    nisa.activation(dst=item.weights, op=nl.exp, data=shifted, scale=work.scale)


def correct(work, item):
    """The factor on all partitions that brings the sums so far to the new largest score."""
    if not item.first:
        lower = nl.ndarray(item.shift.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=lower, data1=work.shift, data2=item.shift, op=nl.subtract)
        item.factor = nl.ndarray(item.shift.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=item.factor, op=nl.exp, data=lower, scale=work.scale)
    work.largest, work.shift = item.largest, item.shift


def mix(work, item):
    """The latents of an item, weighted, [latent in part, part, query]; sums of weights of each chunk on all partitions.

    Rows are the stationary operand: four products of a few queries take less time than one of 512 latents, and give
    what the value projection contracts.
    """
    sizes = work.sizes
    height, chunks, queries = item.weights.shape
    shape = (min(sizes.rank, PARTITIONS), sizes.parts, queries)
    item.product = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    for start, end, part_height in heights(sizes.rank):
        for part in range(start, end):
            column = part * PARTITIONS
            for chunk in range(chunks):
                nisa.nc_matmul(
                    dst=item.product[0:part_height, part, :],
                    stationary=item.rows[:, chunk, column : column + part_height],
                    moving=item.weights[:, chunk, :],
                    accumulate=chunk > 0,
                )
    item.sums = nl.ndarray((PARTITIONS, chunks, queries), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=item.sums, stationary=work.ones[0:height, :], moving=item.weights, accumulate=False)


def add_item(work, item, latents):
    """Add the products of an item to those of its sequence, which the last one finishes."""
    total = nl.ndarray((PARTITIONS, work.sizes.queries), dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_reduce(dst=total, op=nl.add, data=item.sums.permute((0, 2, 1)), axis=2)
    if item.first:
        work.total = total
        work.mixed = nl.ndarray(item.product.shape, dtype=nl.float32, buffer=nl.sbuf)
    else:
        add_to(work.total, total, item.factor)
    for start, end, height in heights(work.sizes.rank):
        mixed = work.mixed[0:height, start:end, :]
        product = item.product[0:height, start:end, :]
        if item.first:
            nisa.tensor_copy(dst=mixed, src=product)
        else:
            factor = item.factor[0:height, :].expand_dim(1).broadcast(1, end - start)
            add_to(mixed, product, factor)
    if item.last:
        place_divided(latents, work, item.sequence)


def kept(bank):
    """A copy of a PSUM tile in SBUF."""
    result = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=bank)
    return result


def add_to(total, more, factor):
    """total = total * factor + more."""
    nisa.tensor_tensor(dst=total, data1=total, data2=factor, op=nl.multiply)
    nisa.tensor_tensor(dst=total, data1=total, data2=more, op=nl.add)
