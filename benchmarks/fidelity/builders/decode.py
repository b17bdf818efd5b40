"""Layers of a model for one token: attention with a cache, vocabulary heads, mixtures of experts."""

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
    """Build the case of one token's attention block, or of the vocabulary head, its columns divided over the cores."""
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

    heads: query heads. columns: of the output projection. repeats: further projections of keys and values. alone: the
    other core has nothing to do.
    """

    heads: int
    columns: int
    repeats: int = 0
    alone: bool = False


def _divided(entry: Entry, hidden: int, heads: int, depth: int, positions: int) -> _Work:
    """How the work is divided, from the bytes that were read.

    Every core needs the key and value projections and the cache. Read once in all: one core does everything. Else what
    is left of a core's bytes beside those and its half of the output projection are its query heads. If those are not
    all heads, the cores exchange them, which is left out here, and a core projects its own heads' outputs in full.
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
    """How the scores are handled: the versions for one core alone go head by head, later ones in two passes."""
    if entry.cores == 1:
        return "heads"
    if work.alone:
        return "rows"
    return "again" if entry.says("scores recomputed") else "tiles"


def _descriptors(entry: Entry, work: _Work) -> str:
    """Who writes the descriptors: software in the versions whose loop bounds are not constants, as their logs count.

    The versions on one core of two have constant bounds, hence prepared rings until hardware descriptors come as a step
    of their own; the step after it keeps them.
    """
    if entry.says("hardware DGE") or entry.says("cos/sin broadcast"):
        return "hwdge"
    return "none" if work.alone else "swdge"


def experts(entry: Entry) -> Case:
    """Build the case of one token's chosen experts, fetched by index in DMAs as wide as the description says."""
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
    """Experts in DMAs as wide as the description and the number of DMAs say.

    Of these, one loads every 128 elements of the token, one every weight and one the indices; the result is stored in
    blocks as wide as those of the down projection.
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
    """Return the kernel of a fused expert block and its arguments on a core; later steps keep what earlier ones gained.

    Token and gains, and the router since it comes in one load, are asked for in the mode 3, `nki.isa.dge_mode.none`:
    rings that are prepared, which the source's log says need an offset known beforehand.
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
    """Experts as whole blocks, one slot per pair of token and expert, or slots of several pairs of one expert.

    Below 16 tokens both forms are the first. From there on the kernel lays out as many slots as any choice of experts
    could need, and loads as many blocks as a choice without preferences has distinct experts on average.
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
