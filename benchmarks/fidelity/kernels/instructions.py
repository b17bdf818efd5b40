"""One instruction repeated, so that its interval and its latency can be read from the timeline.

Every kernel takes x [128, N] in HBM and the number of repetitions, `count`. If `chained`, each repetition works on the
result of the one before, so that the interval between starts is the latency; else they are independent. `from_psum`:
the input is a PSUM tile, else an SBUF tile. The last result is stored to an output, which is returned.
"""

from __future__ import annotations

import nki.isa as nisa
import nki.language as nl

from benchmarks.fidelity.kernels.common import constant, load, psum, sbuf


def matmuls(stationary, moving, count):
    """Repeat nc_matmul of one stationary and one moving tile, which writes four PSUM tiles in turn."""
    left, right = load(stationary), load(moving)
    out = nl.ndarray((left.shape[1], right.shape[1]), dtype=nl.float32, buffer=nl.shared_hbm)
    banks = [psum((left.shape[1], right.shape[1])) for _ in range(4)]
    for i in range(count):
        nisa.nc_matmul(dst=banks[i % 4], stationary=left, moving=right, accumulate=False)
    return _stored(out, banks[0])


def transposes(x, count):
    """Repeat nc_transpose on the Tensor engine, which writes four PSUM tiles in turn."""
    tile = load(x)
    out = nl.ndarray((x.shape[1], x.shape[0]), dtype=x.dtype, buffer=nl.shared_hbm)
    banks = [psum((x.shape[1], x.shape[0]), x.dtype) for _ in range(4)]
    for i in range(count):
        nisa.nc_transpose(dst=banks[i % 4], data=tile)
    return _stored(out, banks[0])


def activations(x, count, function, from_psum, chained=False):
    """Repeat `activation` with the function named `function`, with a zero bias unless it is "copy"."""
    source = _source(x, from_psum)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    bias = constant((x.shape[0], 1), 0.0)
    result = source
    for _ in range(count):
        data = result if chained else source
        result = sbuf(x.shape, x.dtype)
        if function == "copy":
            nisa.activation(dst=result, op=nl.copy, data=data)
        else:
            nisa.activation(dst=result, op=getattr(nl, function), data=data, bias=bias)
    return _stored(out, result)


def vector_copies(x, count, from_psum):
    """Repeat tensor_copy to SBUF on the Vector engine."""
    source = _source(x, from_psum)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    result = source
    for _ in range(count):
        result = sbuf(x.shape, x.dtype)
        nisa.tensor_copy(dst=result, src=source, engine=nisa.vector_engine)
    return _stored(out, result)


def reductions(x, count, from_psum, operator, middle=1):
    """Repeat tensor_reduce along the free axis, or along a middle axis of size `middle` if that is larger than 1.

    The result is [128, 1], or [128, N / middle]. `operator` names a function of `nki.language`.
    """
    source = _source(x, from_psum)
    rows, columns = x.shape
    width = columns // middle if middle > 1 else 1
    out = nl.ndarray((rows, width), dtype=x.dtype, buffer=nl.shared_hbm)
    result = source
    for _ in range(count):
        result = sbuf((rows, width), x.dtype)
        if middle > 1:
            data = source.reshape((rows, middle, width)).permute((0, 2, 1))
            nisa.tensor_reduce(dst=result, op=getattr(nl, operator), data=data, axis=2)
        else:
            nisa.tensor_reduce(dst=result, op=getattr(nl, operator), data=source, axis=1)
    return _stored(out, result)


def tensor_scalars(x, count):
    """Repeat tensor_scalar from SBUF to SBUF on the Vector engine, with a per-partition operand."""
    source = load(x)
    operand = constant((x.shape[0], 1), 1.0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    result = source
    for _ in range(count):
        result = sbuf(x.shape, x.dtype)
        nisa.tensor_scalar(
            dst=result, data=source, op0=nl.multiply, operand0=operand, engine=nisa.vector_engine
        )
    return _stored(out, result)


def additions(x, y, count):
    """Repeat tensor_tensor of two SBUF tiles on the Vector engine; y [128, 1] is broadcast along the free axis."""
    left, right = load(x), load(y)
    if right.shape[1] < left.shape[1]:
        right = right.ap(pattern=[[1, left.shape[0]], [0, left.shape[1]]])
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    result = left
    for _ in range(count):
        result = sbuf(x.shape, x.dtype)
        nisa.tensor_tensor(dst=result, data1=left, data2=right, op=nl.add, engine=nisa.vector_engine)
    return _stored(out, result)


def reciprocals_then_scales(x, count):
    """Repeat `reciprocal` and, on its result, `tensor_scalar`; each waits for the one before on the same engine."""
    source = load(x)
    out = nl.ndarray(x.shape, dtype=nl.float32, buffer=nl.shared_hbm)
    result = source
    for _ in range(count):
        inverse = sbuf(x.shape, nl.float32)
        nisa.reciprocal(dst=inverse, data=result)
        result = sbuf(x.shape, nl.float32)
        nisa.tensor_scalar(dst=result, data=inverse, op0=nl.multiply, operand0=2.0, engine=nisa.vector_engine)
    return _stored(out, result)


def table_loads(x, count):
    """Repeat activations whose functions are in different activation tables, so that each loads its table."""
    source = load(x)
    bias = constant((x.shape[0], 1), 0.0)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    result = source
    for i in range(count):
        result = sbuf(x.shape, x.dtype)
        nisa.activation(dst=result, op=nl.exp if i % 2 else nl.silu, data=source, bias=bias)
    return _stored(out, result)


def register_loads(x, count):
    """Repeat register_load of x [1, 1] from HBM into a new register."""
    tile = load(x)
    for _ in range(count):
        nisa.register_load(nisa.register_alloc(), x)
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    return _stored(out, tile)


def core_barriers(x, count):
    """Repeat core_barrier between the two physical cores of a logical core; core 0 then stores x."""
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    for _ in range(count):
        nisa.core_barrier(out, (0, 1))
    if nl.program_id(0) == 0:
        nisa.dma_copy(dst=out, src=load(x))
    return out


def _source(x, from_psum):
    """Load x into SBUF and return the tile, or its copy in PSUM if `from_psum`."""
    tile = load(x)
    if not from_psum:
        return tile
    bank = psum(x.shape, x.dtype)
    nisa.tensor_copy(dst=bank, src=tile, engine=nisa.vector_engine)
    return bank


def _stored(out, tile):
    """Store a tile of SBUF or PSUM to `out` in HBM and return `out`."""
    if tile.buffer == nl.psum:
        result = sbuf(tile.shape, out.dtype)
        nisa.tensor_copy(dst=result, src=tile, engine=nisa.vector_engine)
        tile = result
    nisa.dma_copy(dst=out, src=tile)
    return out
