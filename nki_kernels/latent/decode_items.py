"""The stages of latent attention in a decode step, and the order in which the pieces of all sequences pass them.

`latent_attention_decode` makes a `LatentDecode` and calls `attend`.

A *piece* of a sequence is up to some chunks of 128 positions. An *item* is a piece of one sequence with all of its
queries. The softmax is online: weights are relative to the largest score so far, and later pieces correct the sums.
Each engine works in program order, so the stages of several items alternate. While the rows of one item are
transposed, the one before is scored, the exponentials of a third are computed, and its products follow.
"""

from __future__ import annotations

from dataclasses import dataclass

import nki.isa as nisa
import nki.language as nl

from nki_kernels.decode.softmax import find_largest_of_queries, repeat_on_partitions
from nki_kernels.latent.loads import transpose_chunk
from nki_kernels.latent.output import place_divided
from nki_kernels.latent.sizes import list_tile_ranges
from nki_kernels.tiles import PARTITIONS, filled, identity


@dataclass
class Item(nl.NKIObject):
    """A piece of a sequence by its index, whether it is the sequence's first or last one, and its SBUF tiles.

    rows: [row, chunk, W] for products; stored: the same as the cache has them. mask_keys: keys and masks [row, chunk,
    R + new]. latents: transposed latents [latent in tile, chunk, tile, row]. keys: transposed mask_keys [R + new,
    chunk, row]. Items share these tiles in turn.
    """

    sequence: int
    piece: int
    first: bool
    last: bool
    rows: nl.NkiTensor
    stored: nl.NkiTensor
    mask_keys: nl.NkiTensor
    latents: nl.NkiTensor
    keys: nl.NkiTensor


class LatentDecode(nl.NKIObject):
    """Operands that all items of a launch share, and the `items`, sequence by sequence, which use SBUF tiles in turn.

    latent_queries [latent in tile, tile, token, head] and turned_queries [R + new, token, head]: see
    `absorb_queries`. token_positions [128, T] and key_positions [128, chunks of all pieces]: float32 in SBUF; piece i
    has chunks `first_chunks[i]` and those after it. `scale`: what exp multiplies scores by. `scales`: of the cache,
    `RowScales` or None.
    """

    def __init__(self, sizes, scale, latent_queries, turned_queries, token_positions, key_positions, scales):
        self.sizes, self.scale, self.scales = sizes, scale, scales
        self.identity = None
        if sizes.operand != sizes.dtype:
            self.identity = identity(PARTITIONS, sizes.dtype)
        self.latent_queries, self.turned_queries = latent_queries, turned_queries
        self.token_positions, self.key_positions = token_positions, key_positions
        self.first_chunks = [0]
        for _, chunks, _ in sizes.pieces:
            self.first_chunks.append(self.first_chunks[-1] + chunks)
        self.ones = filled((PARTITIONS, PARTITIONS), 1.0, sizes.dtype)
        # The Scalar engine loads the table of exp while rows arrive.
        nisa.activation(dst=self.ones[0:1, 0:1], op=nl.exp, data=self.ones[0:1, 0:1], scale=0.0)
        rows = allocate(sizes.buffers, (PARTITIONS, sizes.most, sizes.width), sizes.operand)
        stored = rows
        if sizes.stored != sizes.operand:
            stored = allocate(sizes.buffers, (PARTITIONS, sizes.most, sizes.width), sizes.stored)
        mask_keys = allocate(2, (PARTITIONS, sizes.most, sizes.score_rows), sizes.dtype)
        shape = (min(sizes.rank, PARTITIONS), sizes.most, sizes.latent_tiles, PARTITIONS)
        latents = allocate(2, shape, sizes.dtype)
        keys = allocate(2, (sizes.score_rows, sizes.most, PARTITIONS), sizes.dtype)
        self.items = []
        last = len(sizes.pieces) - 1
        for sequence in range(sizes.sequences):
            for piece in range(len(sizes.pieces)):
                _, chunks, height = sizes.pieces[piece]
                i = len(self.items)
                item_rows = rows[i % sizes.buffers][0:height, 0:chunks, :]
                item_stored = stored[i % sizes.buffers][0:height, 0:chunks, :]
                item_keys = mask_keys[i % 2][0:height, 0:chunks, :]
                tiles = latents[i % 2], keys[i % 2]
                self.items.append(
                    Item(
                        sequence,
                        piece,
                        piece == 0,
                        piece == last,
                        item_rows,
                        item_stored,
                        item_keys,
                        tiles[0],
                        tiles[1],
                    )
                )


def allocate(count, shape, dtype):
    """Return a list of `count` uninitialised SBUF tiles of one shape and dtype."""
    result = []
    for _ in range(count):
        result.append(nl.ndarray(shape, dtype=dtype, buffer=nl.sbuf))
    return result


def attend(launch, cache, latents):
    """Issue all stages of all items, and write the weighted latents, divided by the sums of weights, to `latents`.

    The products of an item are added after the exponentials of the next item, because the products of that one wait
    for them. An item is one piece of a sequence.

    Args:
        launch: `LatentDecode`.
        cache: `ContiguousLatents` or `PagedLatents`, from which the items' rows are loaded.
        latents: [latent in tile, tile, token, head] in SBUF, see `create_output_tile` of `latent.output`.
    """
    sizes, items, count = launch.sizes, launch.items, len(launch.items)
    slots = max(sizes.most, WEIGH_STAGES)
    apart = slots // WEIGH_STAGES
    softmax = OnlineSoftmax(launch, latents)
    scores, products = [], []
    for i in range(min(sizes.ahead, count)):
        cache.load_item(items[i], sizes.pieces[items[i].piece])
    for chunk in range(sizes.most):
        convert_chunk(items[0], chunk)
    for step in range(count + sizes.behind):
        if step + sizes.ahead < count:
            item = items[step + sizes.ahead]
            cache.load_item(item, sizes.pieces[item.piece])
        if 1 <= step <= count:
            scores.append(create_score_tile(items[step - 1], sizes))
        for slot in range(slots):
            if step + 1 < count:
                convert_chunk(items[step + 1], slot)
            if step < count:
                transpose_chunk(launch, items[step], slot)
            if 1 <= step <= count:
                score_chunk(launch, items[step - 1], scores[step - 1], slot)
            if 2 <= step <= count + 1:
                softmax.weigh(items[step - 2], scores[step - 2], slot, apart)
            if step > sizes.behind and slot == 2 * apart + 1:
                i = step - sizes.behind - 1
                softmax.add(items[i], products[i], softmax.factors[i])
        if step >= sizes.behind:
            i = step - sizes.behind
            products.append(multiply(launch, items[i], softmax.weights[i]))
    softmax.add(items[count - 1], products[count - 1], softmax.factors[count - 1])


def convert_chunk(piece, chunk):
    """Convert the rows of one chunk to the dtype of products, on GpSimd, if they are stored in another one.

    Does nothing beyond the last chunk. A chunk is 128 positions.

    Args:
        piece: an `Item` whose rows are loaded.
        chunk: number of the chunk.
    """
    if piece.stored.dtype != piece.rows.dtype and chunk < piece.rows.shape[1]:
        rows = piece.stored[:, chunk, :]
        # The Vector and the Scalar engine empty PSUM meanwhile.
        nisa.tensor_copy(dst=piece.rows[:, chunk, :], src=rows, engine=nisa.engine.gpsimd)


def create_score_tile(item, sizes):
    """Return an uninitialised PSUM tile for the scores of an item: [row, chunk, query] float32.

    The queries of a chunk are padded to a power of two, so that no chunk straddles PSUM banks. A chunk is 128
    positions; an item is one piece of a sequence.
    """
    shape = (item.rows.shape[0], item.rows.shape[1], sizes.stride)
    return nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)[:, :, 0 : sizes.queries]


def score_chunk(launch, item, scores, chunk):
    """Write the scores of one chunk of an item, masks included, to `scores` in PSUM; do nothing beyond its last chunk.

    A chunk is 128 positions; an item is one piece of a sequence.

    Args:
        launch: `LatentDecode`.
        scores: [row, chunk, query], all chunks of the item.
        chunk: number of the chunk.
    """
    height, chunks, _ = item.rows.shape
    if chunk >= chunks:
        return
    sizes = launch.sizes
    first = item.sequence * sizes.new
    last = first + sizes.new
    for start, end, tile_height in list_tile_ranges(sizes.rank):
        for tile in range(start, end):
            # Rows are the stationary operand, so scores have them on the partitions, where `multiply` contracts.
            nisa.nc_matmul(
                dst=scores[:, chunk, :],
                stationary=item.latents[0:tile_height, chunk, tile, 0:height],
                moving=launch.latent_queries[0:tile_height, tile, first:last, :],
                accumulate=tile > 0,
            )
    nisa.nc_matmul(
        dst=scores[:, chunk, :],
        stationary=item.keys[:, chunk, 0:height],
        moving=launch.turned_queries[:, first:last, :],
        accumulate=True,
    )


WEIGH_STAGES = 4
"""Steps from scores to exponentials; products of other items are issued between them."""


class OnlineSoftmax(nl.NKIObject):
    """The running maximum, sums and products of the current sequence, and the weights and factors of all items so far.

    For the current item: by_partition, the largest score of each query on each partition [row, query]; largest, over
    all rows so far [query, 1]; shift, the same on all partitions [128, query]. previous_shift: shift of the item
    before. total: sums of weights so far [128, query]. mixed: weighted latents so far [latent in tile, tile, query].
    weights, factors: lists with an entry for each item. All tiles are in SBUF.
    """

    def __init__(self, launch, latents):
        self.launch, self.latents = launch, latents
        self.by_partition, self.largest, self.shift, self.previous_shift = None, None, None, None
        self.total, self.mixed = None, None
        self.weights, self.factors = [], []

    def weigh(self, item, scores, slot, apart):
        """Do one of four steps from an item's scores to its weights, if `slot` is 0, 1, 2 or 3 times `apart`.

        The steps: maximum over chunks, maximum over partitions, exponentials, correction factor. The last two append
        to `weights` and to `factors`. The steps are apart because each waits for another engine. A chunk is 128
        positions; an item is one piece of a sequence.

        Args:
            scores: [row, chunk, query] in PSUM.
            slot: number of the turn within a step of the pipeline.
            apart: turns from one step to the next.
        """
        if slot == 0:
            height, _, queries = scores.shape
            self.by_partition = nl.ndarray((height, queries), dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_reduce(dst=self.by_partition, op=nl.maximum, data=scores.permute((0, 2, 1)), axis=2)
        elif slot == apart:
            self.find_largest(item)
        elif slot == 2 * apart:
            self.compute_weights(scores)
        elif slot == 3 * apart:
            self.correct(item)

    def find_largest(self, item):
        """Set `largest` to each query's largest score over the sequence so far, a column [query, 1] float32 in SBUF."""
        largest = find_largest_of_queries(self.by_partition)
        if not item.first:
            both = nl.ndarray(largest.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=both, data1=largest, data2=self.largest, op=nl.maximum)
            largest = both
        self.largest = largest

    def compute_weights(self, scores):
        """Append exp(scale * (score - largest so far)) to `weights`: [row, chunk, query] in `sizes.dtype`, in SBUF.

        Also sets `shift` to the largest scores on all partitions, and `previous_shift` to the value before. A chunk
        is 128 positions.

        Args:
            scores: [row, chunk, query] in PSUM.
        """
        height, chunks, _ = scores.shape
        bank = repeat_on_partitions(self.largest)
        self.previous_shift = self.shift
        self.shift = nl.ndarray(bank.shape, dtype=nl.float32, buffer=nl.sbuf)
        # The scores are in PSUM, where only one operand of tensor_tensor may lie, so the shift goes to SBUF.
        nisa.tensor_copy(dst=self.shift, src=bank)
        largest = self.shift[0:height, :].expand_dim(1).broadcast(1, chunks)
        shifted = nl.ndarray(scores.shape, dtype=nl.float32, buffer=nl.sbuf)
        # The maximum differs along the free dimension, where a bias of exp cannot, so the Vector engine subtracts it.
        nisa.tensor_tensor(dst=shifted, data1=scores, data2=largest, op=nl.subtract)
        weights = nl.ndarray(scores.shape, dtype=self.launch.sizes.dtype, buffer=nl.sbuf)
        nisa.activation(dst=weights, op=nl.exp, data=shifted, scale=self.launch.scale)
        self.weights.append(weights)

    def correct(self, item):
        """Append to `factors` what the sums so far must be multiplied by, exp(scale * (previous_shift - shift)).

        A factor is [128, query] float32 in SBUF. For the first item of a sequence it is None. An item is one piece of
        a sequence.
        """
        factor = None
        if not item.first:
            lower = nl.ndarray(self.shift.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.tensor_tensor(dst=lower, data1=self.previous_shift, data2=self.shift, op=nl.subtract)
            factor = nl.ndarray(self.shift.shape, dtype=nl.float32, buffer=nl.sbuf)
            nisa.activation(dst=factor, op=nl.exp, data=lower, scale=self.launch.scale)
        self.factors.append(factor)

    def add(self, item, products, factor):
        """Add an item's products to `total` and `mixed` of its sequence, after multiplying these by the item's factor.

        After the last item of a sequence it writes the divided latents to `latents`. An item is one piece of a
        sequence.

        Args:
            products: the pair of tiles that `multiply` returned.
            factor: the item's entry of `factors`.
        """
        sizes = self.launch.sizes
        product, sums = products
        total = nl.ndarray((PARTITIONS, sizes.queries), dtype=nl.float32, buffer=nl.sbuf)
        nisa.tensor_reduce(dst=total, op=nl.add, data=sums.permute((0, 2, 1)), axis=2)
        if item.first:
            self.total = total
            self.mixed = nl.ndarray(product.shape, dtype=nl.float32, buffer=nl.sbuf)
        else:
            add_to(self.total, total, factor)
        for start, end, height in list_tile_ranges(sizes.rank):
            mixed = self.mixed[0:height, start:end, :]
            if item.first:
                nisa.tensor_copy(dst=mixed, src=product[0:height, start:end, :])
            else:
                factors = factor[0:height, :].expand_dim(1).broadcast(1, end - start)
                add_to(mixed, product[0:height, start:end, :], factors)
        if item.last:
            place_divided(self.latents, self.mixed, self.total, item.sequence, sizes, self.launch.scales)


def multiply(launch, item, weights):
    """Return an item's weighted latents and its sums of weights for each chunk, two float32 tiles in PSUM.

    The latents are [latent in tile, tile, query]. The sums are [128, chunk, query], the same on all partitions. Rows
    are the stationary operand: four products of a few queries take less time than one of 512 latents. Their result is
    what the value projection contracts. A chunk is 128 positions; an item is one piece of a sequence.

    Args:
        launch: `LatentDecode`.
        weights: [row, chunk, query] in SBUF.
    """
    sizes = launch.sizes
    height, chunks, queries = weights.shape
    shape = (min(sizes.rank, PARTITIONS), sizes.latent_tiles, queries)
    product = nl.ndarray(shape, dtype=nl.float32, buffer=nl.psum)
    for start, end, tile_height in list_tile_ranges(sizes.rank):
        for tile in range(start, end):
            column = tile * PARTITIONS
            for chunk in range(chunks):
                nisa.nc_matmul(
                    dst=product[0:tile_height, tile, :],
                    stationary=item.rows[:, chunk, column : column + tile_height],
                    moving=weights[:, chunk, :],
                    accumulate=chunk > 0,
                )
    sums = nl.ndarray((PARTITIONS, chunks, queries), dtype=nl.float32, buffer=nl.psum)
    nisa.nc_matmul(dst=sums, stationary=launch.ones[0:height, :], moving=weights, accumulate=False)
    return product, sums


def add_to(total, more, factor):
    """Write total * factor + more to `total`, in place."""
    nisa.tensor_tensor(dst=total, data1=total, data2=factor, op=nl.multiply)
    nisa.tensor_tensor(dst=total, data1=total, data2=more, op=nl.add)
