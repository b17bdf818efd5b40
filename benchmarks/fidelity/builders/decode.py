"""Layers of a model for one token: attention with a cache, vocabulary heads, mixtures of experts."""

from __future__ import annotations

import re

import ml_dtypes
import numpy as np

from benchmarks.fidelity.case import Case, NotCovered, Run, Schedule, array, chip_of, dtype_of, quantity_of
from benchmarks.fidelity.entry import Entry
from benchmarks.fidelity.kernels import decode
from benchmarks.fidelity.kernels import experts as experts_kernels
from simulate.hardware import Hardware

# Steps of the attention block before its weights came in wide rows.
_BY_TILES = ("tile-wise", "direct column layout", "all-ones", "restructured", "barrier free")
_BF16 = np.dtype(ml_dtypes.bfloat16)


def layer(entry: Entry) -> Case:
    """The attention block of one token, and the vocabulary head.

    Work of two cores is halved, their exchange left out.
    """
    chip = chip_of(entry)
    if entry.says("vocabulary head"):
        found = re.search(r"\[(\d+) x (\d+)\]", entry.kernel)
        if found is None:
            raise NotCovered("the size of the head is not given")
        depth, columns = map(int, found.groups())
        own = (columns // entry.cores + 511) // 512 * 512
        arguments: tuple[object, ...] = (array((128, depth // 128), _BF16), array((depth, own), _BF16))
        return Case(chip, (Run(decode.head, (arguments,)),), quantity_of(entry), Schedule.compiler)
    if not entry.says("attention block", "one token"):
        raise NotCovered("a whole layer whose division into kernels is not described")
    sizes = entry.sizes()
    heads, positions = entry.integer(r"(\d+) query heads"), entry.integer(r"KV length (\d+)")
    if "H" not in sizes or heads is None or positions is None:
        raise NotCovered(f"shapes {entry.shapes!r} do not give H, the heads and the length of the cache")
    depth = sizes.get("d", 128)
    share = heads // entry.cores
    width = 128 if any(entry.says(words) for words in _BY_TILES) else 2048
    # Where nothing else is said these kernels leave descriptors to software; hardware DGE comes as a step of its own.
    mode = "hwdge" if entry.says("hardware DGE") else "swdge"
    hidden = sizes["H"]
    arguments = (
        array((128, hidden // 128), _BF16),
        array((hidden, (share + 2) * depth), _BF16),
        array((share * depth, hidden), _BF16),
        array((1, depth, positions), _BF16),
        array((1, positions, depth), _BF16),
        array((2, depth, 1), _BF16),
        share,
        width,
        mode,
        entry.says("cos/sin broadcast"),
    )
    return Case(chip, (Run(decode.attention_block, (arguments,)),), quantity_of(entry), Schedule.explicit)


def experts(entry: Entry) -> Case:
    """The chosen experts of one token, fetched by index in DMAs as wide as the description says."""
    chip = chip_of(entry)
    sizes = entry.sizes()
    if entry.says("expert block"):
        return _pairs(entry)
    if entry.says("loaded once per call"):
        return _pairs(entry)
    if not entry.says("decode") or not {"T", "H", "I", "E", "K"} <= set(sizes):
        raise NotCovered(f"shapes {entry.shapes!r} do not give T, H, I, E and K of a decode step")
    if sizes["T"] != 1:
        raise NotCovered(f"{sizes['T']} tokens; the builder knows one")
    weights = dtype_of(entry)
    hidden, inner, chosen = sizes["H"], sizes["I"], sizes["K"] // entry.cores
    gate_width = 128 if entry.says("tile-wise") else 2 * inner
    dmas = entry.integer(r"(\d+) DMAs")
    down_width = hidden
    if dmas is not None:
        # What is left for the down projections, in DMAs of 128 rows each.
        gate = sizes["K"] * (hidden // 128) * (2 * inner // gate_width)
        each = max((dmas - gate) / sizes["K"] / -(-inner // 128), 1.0)
        down_width = max(128, 1 << round(np.log2(hidden / each)))
    arguments = (
        array((128, hidden // 128), _BF16),
        array((128, 1), np.int32),
        array((sizes["E"], hidden, 2 * inner), weights),
        array((sizes["E"], inner, hidden), weights),
        chosen,
        gate_width,
        down_width,
        _stages(entry, chip, hidden, sizes["E"]),
    )
    return Case(chip, (Run(experts_kernels.experts, (arguments,)),), quantity_of(entry), Schedule.explicit)


def _stages(entry: Entry, chip: Hardware, hidden: int, count: int) -> experts_kernels.Stages:
    """What a description says of a fused kernel; later steps keep what earlier ones gained."""
    if not entry.says("fused"):
        return experts_kernels.Stages()
    mended = entry.says("memsets removed") or entry.says("one router load") or entry.says("two buffer sets")
    return experts_kernels.Stages(
        router=array((hidden, count), _BF16),
        one_router_load=entry.says("one router load"),
        buffers=1 if entry.says("library") else 2 if entry.says("two buffer sets") else 0,
        memsets=not mended and not entry.says("fp8 expert weights"),
        hardware_dge=chip.hardware_dge
        and (entry.says("hardware DGE") or entry.says("scalar_tensor_tensor fusion")),
        shuffles=5 if entry.says("shuffle reduction") else 0,
        widened_ahead=not entry.says("before each matmul") and not entry.says("fused silu"),
        scaled_apart=entry.says("before each matmul"),
        quantised=entry.says("quantisation"),
    )


def _pairs(entry: Entry) -> Case:
    """Experts as whole blocks, one load per pair of token and expert, or per distinct expert on average."""
    chip = chip_of(entry)
    tokens, top, count = (entry.integer(p) for p in (r"tokens=(\d+)", r"top-(\d+)", r"of (\d+)"))
    hidden, gate, down = (entry.integer(p) for p in (r"H=(\d+)", r"(\d+) gate/up", r"and (\d+) down"))
    if None in (tokens, top, count, hidden, gate, down) or tokens > 512:  # type: ignore[operator]
        raise NotCovered(f"shapes {entry.shapes!r} do not give the tokens and the experts")
    width = hidden * (gate + down) // 128 // 128 * 128  # type: ignore[operator]
    loads = tokens * top  # type: ignore[operator]
    together = 1
    if entry.says("loaded once"):
        loads = round(count * (1.0 - (1.0 - top / count) ** tokens))  # type: ignore[operator]
        together = tokens  # type: ignore[assignment]
    arguments = (
        array((128, together), _BF16),
        array((128, 1), np.int32),
        array((count * 128, width), dtype_of(entry)),  # type: ignore[operator]
        loads,
        width // 128,
        together,
    )
    return Case(
        chip, (Run(experts_kernels.paired_experts, (arguments,)),), quantity_of(entry), Schedule.explicit
    )
