"""The stages of latent attention in a decode step, and the order in which the pieces of all sequences pass them.

An item is a piece of a sequence. Its softmax is online: relative to the largest score so far, by which later pieces
correct the sums. Each engine works in program order, so the stages of several items alternate: while the rows of one
are transposed, the one before is scored, the exponentials of a third are taken, and its products follow.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.softmax import largest_of_queries, on_all_partitions
from nki_kernels.latent.loads import bring, set_beside, transpose_chunk
from nki_kernels.latent.output import divided, transpose_divided
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
        self.tokens_at, self.keys_at, self.runs = places
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
        self.ones = nl.ndarray((PARTITIONS, 1), dtype=sizes.dtype, buffer=nl.sbuf)
        nisa.memset(dst=self.ones, value=1.0)
        self.largest = None
        self.total = None
        self.mixed = None
        self.finished = None


def allocate(work):
    """Tiles for the rows of some items, and for the transposed rows of two."""
    sizes = work.sizes
    for _ in range(sizes.buffers):
        shape = (PARTITIONS, sizes.most, sizes.width)
        work.row_tiles.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
    for _ in range(2):
        shape = (PARTITIONS, sizes.most, sizes.beside)
        work.beside_tiles.append(nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf))
        shape = (min(sizes.rank, PARTITIONS), sizes.parts, sizes.most, PARTITIONS)
        latent = nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)
        shape = (sizes.beside, sizes.most, PARTITIONS)
        work.transposed_tiles.append((latent, nl.ndarray(shape, dtype=sizes.dtype, buffer=nl.sbuf)))


def attend(work, latents):
    """All items through all stages; what they weigh goes to `latents`, as `output_tile` has them."""
    sizes, count = work.sizes, len(work.items)
    for number in range(min(sizes.ahead, count)):
        bring(work, number)
    set_beside(work, 0)
    for step in range(count + sizes.behind):
        if step + sizes.ahead < count:
            bring(work, step + sizes.ahead)
        for slot in range(max(sizes.most, WEIGH_STAGES)):
            if step < count:
                transpose_chunk(work, work.items[step], slot)
            if 1 <= step <= count:
                score_chunk(work, work.items[step - 1], slot)
            if 2 <= step <= count + 1:
                weigh(work, work.items[step - 2], slot)
            if step > sizes.behind and slot == ADDED_IN:
                add_item(work, work.items[step - sizes.behind - 1])
            if slot == PLACED_IN:
                place_finished(work, latents)
        if step + 1 < count:
            set_beside(work, step + 1)
        if step >= sizes.behind:
            mix(work, work.items[step - sizes.behind])
    add_item(work, work.items[count - 1])
    place_finished(work, latents)


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
                stationary=latent[0:part_height, part, chunk, 0:height],
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

ADDED_IN = 0
"""The slot of the next step in which products are added."""

PLACED_IN = 3
"""The slot in which the latents of a finished sequence are transposed."""


def weigh(work, item, stage):
    """One of the steps from scores to exponentials."""
    if stage == 0:
        find_by_partition(work, item)
    elif stage == 1:
        find_largest(work, item)
    elif stage == 2:
        exponentials(work, item)
    elif stage == 3:
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
    largest = kept(on_all_partitions(item.largest))[0:height, :].expand_dim(1).broadcast(1, chunks)
    shifted = nl.ndarray(item.scores.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_tensor(dst=shifted, data1=item.scores, data2=largest, op=nl.subtract)
    item.weights = nl.ndarray(item.scores.shape, dtype=work.sizes.dtype, buffer=nl.sbuf)
    nisa.activation(dst=item.weights, op=nl.exp, data=shifted, scale=work.scale)


def correct(work, item):
    """The factor that brings the sums so far to the new largest score."""
    if not item.first:
        lower = nl.ndarray(item.largest.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_tensor(dst=lower, data1=work.largest, data2=item.largest, op=nl.subtract)
        item.factor = nl.ndarray(item.largest.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=item.factor, op=nl.exp, data=lower, scale=work.scale)
    work.largest = item.largest


def mix(work, item):
    """The latents of an item, weighted, and the sums of the weights."""
    sizes = work.sizes
    height, chunks, queries = item.weights.shape
    item.product = nl.ndarray((queries, sizes.rank), dtype=nl.float32, buffer=nl.psum)
    item.sums = nl.ndarray((queries, 1), dtype=nl.float32, buffer=nl.psum)
    for chunk in range(chunks):
        weights = item.weights[:, chunk, :]
        rows = item.rows[:, chunk, 0 : sizes.rank]
        nisa.nc_matmul(dst=item.product, stationary=weights, moving=rows, accumulate=chunk > 0)
        nisa.nc_matmul(dst=item.sums, stationary=weights, moving=work.ones[0:height, :], accumulate=chunk > 0)


def add_item(work, item):
    """Add the products of an item to those of its sequence, which the last one finishes."""
    if item.first:
        work.mixed, work.total = kept(item.product), kept(item.sums)
    else:
        add_to(work.mixed, item.product, item.factor)
        add_to(work.total, item.sums, item.factor)
    if item.last:
        work.finished = (item.sequence, divided(work))


def place_finished(work, latents):
    """Transpose the latents of a sequence that is finished."""
    if work.finished is not None:
        transpose_divided(latents, work.finished[1], work.finished[0], work.sizes)
        work.finished = None


def kept(bank):
    """A copy of a PSUM tile in SBUF."""
    result = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
    nisa.tensor_copy(dst=result, src=bank)
    return result


def add_to(total, more, factor):
    """total = total * factor + more, row by row."""
    nisa.scalar_tensor_tensor(
        dst=total, data=total, op0=nl.multiply, operand0=factor, op1=nl.add, operand1=more
    )
