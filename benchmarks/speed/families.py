"""Instructions per second by family of instructions, on tiles so small that the simulator's time exceeds numpy's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

import simulate
from benchmarks.speed.measure import Row, medians

simulate.install("simulate")

import nki.collectives as ncc  # noqa: E402
import nki.isa as nisa  # noqa: E402
import nki.language as nl  # noqa: E402

_TIMES = 400
_SHAPE = (128, 8)
_RANKS = 4


def rows() -> Iterator[Row]:
    """Yield a row for each family: recorded instructions per second of an eager launch with all checks."""
    families: dict[str, Callable[[Any], Any]] = {
        "matmul": _matmul,
        "element-wise": _elementwise,
        "activation": _activation,
        "reduction": _reduction,
        "DMA": _dma,
        "transpose": _transpose,
        "gather": _gather,
        "register and loop": _loop,
        f"collective, {_RANKS} ranks": _collective,
    }
    for family, kernel in families.items():
        ranks = _RANKS if kernel is _collective else 1
        yield _rate(family, kernel, ranks)


def _rate(family: str, kernel: Callable[[Any], Any], ranks: int) -> Row:
    """Return the row of a family, whose kernel is launched on `ranks` ranks."""
    world = simulate.World(ranks=ranks)
    x = np.full(_SHAPE, 0.5, np.float32)

    def launch() -> simulate.Launch:
        return world.launch(kernel, [((x,), {})] * ranks, mode=simulate.Mode.eager)

    instructions = sum(len(stream) for stream in launch().streams)
    (taken,) = medians([launch])
    return Row(f"{family}, eager, {_SHAPE} tiles", "", instructions / taken, "instructions/s")


def _stored(tile: Any) -> Any:
    """Store a tile to a new output tensor and return the tensor."""
    out = nl.ndarray(tile.shape, dtype=tile.dtype, buffer=nl.shared_hbm)
    nisa.dma_copy(dst=out, src=tile)
    return out


def _matmul(x: Any) -> Any:
    tile, bank = nl.load(x), nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.psum)
    for _ in range(_TIMES):
        nisa.nc_matmul(dst=bank, stationary=tile, moving=tile, accumulate=False)
    return x


def _elementwise(x: Any) -> Any:
    tile = nl.load(x)
    for _ in range(_TIMES):
        nisa.tensor_tensor(dst=tile, data1=tile, data2=tile, op=nl.multiply)
    return _stored(tile)


def _activation(x: Any) -> Any:
    tile = nl.load(x)
    for _ in range(_TIMES):
        nisa.activation(dst=tile, op=nl.tanh, data=tile)
    return _stored(tile)


def _reduction(x: Any) -> Any:
    tile, column = nl.load(x), nl.ndarray((128, 1), dtype=nl.float32)
    for _ in range(_TIMES):
        nisa.tensor_reduce(dst=column, op=nl.add, data=tile, axis=1)
    return _stored(column)


def _dma(x: Any) -> Any:
    tile = nl.ndarray(_SHAPE, dtype=nl.float32)
    for _ in range(_TIMES):
        nisa.dma_copy(dst=tile, src=x)
    return _stored(tile)


def _transpose(x: Any) -> Any:
    tile, bank = nl.load(x), nl.ndarray((8, 128), dtype=nl.float32, buffer=nl.psum)
    for _ in range(_TIMES):
        nisa.nc_transpose(dst=bank, data=tile)
    return x


def _gather(x: Any) -> Any:
    tile, taken = nl.load(x), nl.ndarray(_SHAPE, dtype=nl.float32)
    indices = nl.ndarray(_SHAPE, dtype=nl.uint32)
    nisa.iota(dst=indices, pattern=[[1, 8]])
    for _ in range(_TIMES):
        nisa.nc_n_gather(dst=taken, data=tile, indices=indices)
    return _stored(taken)


def _loop(x: Any) -> Any:
    tile, register = nl.load(x), nisa.register_alloc(0)
    one = nl.ndarray((1, 1), dtype=nl.int32)

    def body(counter: Any) -> None:
        nisa.register_move(register, counter)
        nisa.register_store(one, register)

    nl.fori_loop(0, _TIMES, body)
    return _stored(tile)


def _collective(x: Any) -> Any:
    local, total = (nl.ndarray(_SHAPE, dtype=nl.float32, buffer=nl.private_hbm) for _ in range(2))
    nisa.dma_copy(dst=local, src=x)
    for _ in range(_TIMES):
        ncc.all_reduce([local], [total], ncc.ReplicaGroup([list(range(_RANKS))]), nl.add)
    return _stored(total)
