"""Builders of a model's layers for one token: attention with a cache, vocabulary heads, mixtures of experts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import ml_dtypes
import numpy as np

from benchmarks.fidelity.case import Case, NotCovered, Run, Schedule, array, chip_of, dtype_of, quantity_of
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import decode, fused_experts, slotted_experts
from benchmarks.fidelity.kernels import experts as experts_kernels

# Steps of the attention block before its weights came in wide rows.
_BY_TILES = ("tile-wise", "direct column layout", "all-ones", "restructured", "barrier free")
_PAIRS_BELOW = 16  # tokens; a constant of the kernel
_BF16 = np.dtype(ml_dtypes.bfloat16)


def layer(entry: Entry) -> Case:
    """Return the case of one core's part of an attention block, or of a vocabulary head, for one token.

    The columns of a vocabulary head are divided over the cores. Raises NotCovered for whole layers and for missing
    sizes.
    """
    chip = chip_of(entry)
    if entry.says("vocabulary head"):
        match = re.search(r"\[(\d+) x (\d+)\]", entry.kernel)
        if match is None:
            raise NotCovered("the size of the head is not given")
        depth, columns = map(int, match.groups())
        local_columns = (columns // entry.cores + 511) // 512 * 512
        arguments: tuple[object, ...] = (
            array((128, depth // 128), _BF16),
            array((depth, local_columns), _BF16),
        )
        return Case(chip, (Run(decode.head, (arguments,)),), quantity_of(entry), Schedule.compiler)
    if not entry.says("attention block", "one token"):
        raise NotCovered("a whole layer whose division into kernels is not described")
    sizes = entry.sizes()
    heads, positions = entry.integer(r"(\d+) query heads"), entry.integer(r"KV length (\d+)")
    if "H" not in sizes or heads is None or positions is None:
        raise NotCovered(f"shapes {entry.shapes!r} do not give H, the heads and the length of the cache")
    work = _divided(entry, sizes["H"], heads, sizes.get("d", 128), positions)
    width = 128 if any(entry.says(words) for words in _BY_TILES) else 2048
    hidden, depth, share = sizes["H"], sizes.get("d", 128), work.heads
    arguments = (
        array((128, hidden // 128), _BF16),
        array((hidden, (share + 2) * depth), _BF16),
        array((share * depth, work.columns), _BF16),
        array((1, depth, positions), _BF16),
        array((1, positions, depth), _BF16),
        array((2, depth, 1), _BF16),
        share,
        decode.Form(
            width,
            _descriptors(entry, work),
            entry.says("cos/sin broadcast"),
            work.repeats,
            _softmax(entry, work),
            entry.says("all-ones"),
        ),
    )
    return Case(chip, (Run(decode.attention_block, (arguments,)),), quantity_of(entry), Schedule.explicit)


@dataclass(frozen=True)
class _Work:
    """One core's part of an attention block.

    heads: query heads of the core. columns: columns of the output projection. repeats: how many more times keys and
    values are projected. alone: the other core has no work.
    """

    heads: int
    columns: int
    repeats: int = 0
    alone: bool = False


def _divided(entry: Entry, hidden: int, heads: int, depth: int, positions: int) -> _Work:
    """Return one core's work in an attention block, inferred from the bytes that the entry says were read from HBM.

    Every core reads the key and value projections and the cache. If all bytes were read once, one core does
    everything. Otherwise the rest of a core's bytes, after these and its half of the output projection, are the
    weights of its query heads. If these are not all heads, the cores exchange outputs, which is left out, and each
    projects its heads in full.
    """
    one, cache = 2 * depth * hidden, 4 * depth * positions
    once = (2 * heads + 2) * one + cache
    match = re.search(r"HBM read (\d+) KiB", entry.notes)
    read = 1024.0 * int(match.group(1)) if match else 1.0e6 * float(entry.metrics.get("hbm_read_MB", 0.0))
    if entry.cores == 1:
        return _Work(heads, hidden, repeats=max(round((read - once) / (2 * one)), 0))
    if read and read < 1.05 * once:
        return _Work(heads, hidden, alone=True)
    share = heads  # both cores compute all of them since a step for which the bytes are known
    if read:
        share = round((read / entry.cores - 2 * one - cache - heads * one / entry.cores) / one)
    if share < heads:
        return _Work(heads // entry.cores, hidden)
    return _Work(heads, hidden // entry.cores)


def _softmax(entry: Entry, work: _Work) -> str:
    """Return the form of the softmax, a value of `decode.Form.softmax`, from the version that the entry describes.

    An entry on one core goes head by head. If one of two cores does all the work, rows of scores are kept whole. Else
    there are two passes over tiles, and the second computes the scores again if the description says so.
    """
    if entry.cores == 1:
        return "heads"
    if work.alone:
        return "rows"
    return "again" if entry.says("scores recomputed") else "tiles"


def _descriptors(entry: Entry, work: _Work) -> str:
    """Return the dge_mode of the attention block's DMAs, inferred from the version that the entry describes.

    Software writes descriptors in the versions whose loop bounds are not constants, as their logs count. Versions on
    one of two cores have constant bounds, hence prepared rings ("none"). Hardware descriptors come as a step and stay
    afterwards.
    """
    if entry.says("hardware DGE") or entry.says("cos/sin broadcast"):
        return "hwdge"
    return "none" if work.alone else "swdge"


def experts(entry: Entry) -> Case:
    """Return the case of a mixture of experts, whose chosen experts are fetched by index.

    One token is computed, or several if the entry describes experts as blocks. Raises NotCovered if sizes are missing.
    """
    chip = chip_of(entry)
    sizes = entry.sizes()
    if entry.says("expert block") or entry.says("loaded once per call"):
        return _slots(entry)
    if not entry.says("decode") or not {"T", "H", "I", "E", "K"} <= set(sizes):
        raise NotCovered(f"shapes {entry.shapes!r} do not give T, H, I, E and K of a decode step")
    if sizes["T"] != 1:
        raise NotCovered(f"{sizes['T']} tokens; the builder knows one")
    build = _fused if entry.says("fused") else _by_tiles
    return Case(chip, (Run(*build(entry, sizes)),), quantity_of(entry), Schedule.explicit)


def _by_tiles(entry: Entry, sizes: dict[str, int]) -> tuple[Callable[..., object], tuple[tuple[object, ...]]]:
    """Return the kernel of experts fetched in tiles, and its arguments.

    The description and its number of DMAs give the width of the tiles. One DMA loads each 128 elements of the token,
    one each weight, one the indices, and one stores each block of the result; the remaining ones load the gate, up
    and down weights.
    """
    hidden, inner, chosen = sizes["H"], sizes["I"], sizes["K"]
    weights = dtype_of(entry)
    gate_width = 128 if entry.says("tile-wise") else 2 * inner
    wide_down = entry.says("wide down")
    dmas = entry.integer(r"(\d+) DMAs")
    down_width = 128
    if dmas is not None:
        stores = hidden // (512 if wide_down else 128)
        gate = chosen * (hidden // 128) * -(-2 * inner // gate_width)
        left = dmas - gate - hidden // 128 - chosen - 1 - stores
        down_width = max(128, hidden * chosen * -(-inner // 128) // max(left, 1) // 128 * 128)
    arguments = (
        array((1, hidden), _BF16),
        array((1, chosen), np.int32),
        array((1, chosen)),
        array((sizes["E"], hidden, 2 * inner), weights),
        array((sizes["E"], inner, hidden), weights),
        gate_width,
        down_width,
        wide_down,
        entry.says("token as stationary"),
    )
    return experts_kernels.experts, (arguments,)


def _fused(entry: Entry, sizes: dict[str, int]) -> tuple[Callable[..., object], tuple[tuple[object, ...]]]:
    """Return the kernel of a fused expert block and its arguments on one core.

    Later versions keep the improvements of earlier ones. The source asks for dge_mode 3, `nki.isa.dge_mode.none`, for
    the token and the gains, and for the router once it comes in one load. These are prepared rings, which need an
    offset known beforehand according to the source's log.
    """
    hidden, inner, count = sizes["H"], sizes["I"], sizes["E"]
    weights = dtype_of(entry)
    narrow = weights.itemsize == 1
    quantised = entry.says("quantisation") or entry.says("shuffle reduction")
    packed = entry.says("packed") or entry.says("scalar_tensor_tensor fusion")
    mended = narrow or entry.says("memsets removed") or entry.says("one router load")
    wave = 2 if entry.says("waves of two") else 1 if entry.says("library") else 4
    late = narrow and not entry.says("before each matmul") and not entry.says("fused silu")
    stages = fused_experts.Stages(
        router_loads=1 if narrow or entry.says("one router load") else 4,
        router_prepared=narrow or entry.says("one router load"),
        by_hardware=packed,
        wave=wave,
        buffers=2 * wave if late else wave,
        memsets=not mended,
        widened=entry.says("before each matmul"),
        silu_apart=entry.says("before each matmul"),
        packed=packed,
        scaled=narrow,
        one_number=narrow and not late,
        quantised=quantised,
        by_shuffles=entry.says("shuffle reduction"),
    )
    arguments = (
        array((1, hidden), _BF16),
        array((1, hidden), _BF16),
        array((hidden, count), _BF16),
        array((count, hidden, 2 * inner), weights),
        array((count, inner, hidden), weights),
        array((count, 2 * inner)) if narrow else None,
        array((count, hidden)) if narrow else None,
        entry.cores,
        stages,
    )
    return fused_experts.fused_experts, (arguments,)


def _slots(entry: Entry) -> Case:
    """Return the case of experts stored as one block each, with one or several (token, expert) pairs per slot.

    A slot is one expert's computation for its pairs. Below 16 tokens each pair has its own slot. From 16
    tokens on there are as many slots as any choice of experts could need, and as many loads of blocks as a uniform
    random choice has distinct experts on average.
    """
    chip = chip_of(entry)
    tokens, top, count = (entry.integer(p) for p in (r"tokens=(\d+)", r"top-(\d+)", r"of (\d+)"))
    hidden, gate, down = (entry.integer(p) for p in (r"H=(\d+)", r"(\d+) gate/up", r"and (\d+) down"))
    if None in (tokens, top, count, hidden, gate, down) or tokens > 512:  # type: ignore[operator]
        raise NotCovered(f"shapes {entry.shapes!r} do not give the tokens and the experts")
    assert tokens and top and count and hidden and gate and down
    pairs = tokens * top
    slots = loads = pairs
    lanes, group = 1, 4
    if entry.says("loaded once") and tokens >= _PAIRS_BELOW:
        lanes = 2 if tokens <= 16 else 4 if tokens <= 64 else 8
        group = min(4, 16 // lanes)
        slots_per_block = 128 // lanes
        slots = -(-(pairs + min(count, pairs) * (lanes - 1)) // lanes // slots_per_block) * slots_per_block
        loads = round(count * (1.0 - (1.0 - top / count) ** tokens))
    rows = hidden // 128
    shape = (tokens, hidden) if lanes > 1 else (128, tokens, rows)
    arguments = (
        array(shape, _BF16),
        array((1, slots), np.int32),
        array((1, slots)),
        array((count, 128, hidden + hidden // 2 + 4 * rows), dtype_of(entry)),
        loads,
        lanes,
        group,
    )
    runs = (Run(slotted_experts.slotted_experts, (arguments,)),)
    return Case(chip, runs, quantity_of(entry), Schedule.explicit)
