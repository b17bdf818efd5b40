"""nc_transpose: exchange partitions and free elements, by a matmul with an identity or in one 32 x 32 block."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nkw.errors import RuleViolation, Unsupported, rule
from simulate.hardware import Hardware
from simulate.isa import costs, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.fp8_subnormals import flush_operands
from simulate.isa.instructions.nc_matmul import input_dtypes, inside_one_bank
from simulate.isa.plan import REARRANGES, Accumulate, Domain, Plan
from simulate.isa.shapes import flat
from simulate.memory import MemoryRegion, NkiTensor


@instruction
def nc_transpose(
    hardware: Hardware,
    dst: NkiTensor,
    data: NkiTensor,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Plan:
    """Transpose dst[f, p] = data[p, f], free dims flattened, on the Tensor or the Vector engine.

    Tensor: data [P, F] @ SBUF, P and F <= 128; dst [F, P] @ PSUM, inside one bank except on gen4. Vector: data
    [P, F] @ SBUF or PSUM, P and F <= 32; dst [F, P] @ SBUF or PSUM. dst and data have one dtype. With engine=unknown
    dst decides: PSUM means Tensor, SBUF means Vector.

    The bits move unchanged, except by the Tensor engine of gen2, whose transpose is an ordinary matmul with an
    identity of data's dtype: it takes the dtypes of nc_matmul, -0 becomes 0, and a NaN or infinity turns the other
    elements of its row of dst into NaN (0 * inf). From gen3 on every dtype but x4 is taken. fp8 on the Tensor engine
    of gen3 is refused: it writes 16-bit PSUM elements, and how a kernel describes those is not documented.

    Raises RuleViolation, Unsupported. Cost: costs.matmul; on Vector one element per cycle.
    """
    rules.check_tile(hardware, "dst", dst)
    rules.check_tile(hardware, "data", data)
    if engine is Engine.unknown:
        engine = Engine.tensor if dst.buffer is MemoryRegion.psum else Engine.vector
    rules.engine_can(engine, Engine.tensor, Engine.vector)
    rules.not_packed("data", data)
    rules.same_dtype("dst", dst, "data", data)
    if engine is Engine.vector:
        fits_vector_block(hardware, data)
        transposed_shape(dst, data)
        cost = costs.vector(hardware, data.free_size)
        return _plan(engine, dst, data, Domain.bits, _transposed, cost, name)
    rules.lies_in("dst", dst, MemoryRegion.psum)
    rules.lies_in("data", data, MemoryRegion.sbuf)
    fits_tensor_array(hardware, data)
    transposed_shape(dst, data)
    if not hardware.matmul_crosses_psum_banks:
        inside_one_bank(hardware, dst)
    exact = hardware.matmul_transpose_mode
    if not exact:
        input_dtypes(hardware, data, data)
    elif not hardware.matmul_transpose_fp8 and data.dtype.is_float and data.dtype.itemsize == 1:
        raise Unsupported(
            "NKW-TRANSPOSE-FP8",
            f"nc_transpose of {data.dtype} on the Tensor engine of {hardware.name} cannot be simulated: it writes "
            "16-bit PSUM elements; copy to bfloat16 before, or transpose blocks of 32 x 32 on the Vector engine",
        )
    cost = costs.matmul(
        hardware, data.shape[0], data.free_size, data.shape[0], data.dtype == "float32", transpose=True
    )
    if exact:
        return _plan(engine, dst, data, Domain.bits, _transposed, cost, name)
    compute = flush_operands(hardware, _times_identity, data)
    return _plan(engine, dst, data, Domain.float32, compute, cost, name)


def _plan(
    engine: Engine,
    dst: NkiTensor,
    data: NkiTensor,
    domain: Domain,
    compute: Callable[..., tuple[np.ndarray]],
    cost: costs.Cost,
    name: str | None,
) -> Plan:
    return Plan(
        engine=engine,
        reads=(data,),
        writes=(dst,),
        domain=domain,
        compute=compute,
        cost=cost,
        name=name,
        accumulate=Accumulate.overwrite if engine is Engine.tensor else None,
        propagate=propagation.transposed if domain is Domain.bits else propagation.contracted,
        effects=REARRANGES,
    )


def _transposed(values: np.ndarray) -> tuple[np.ndarray]:
    return (flat(values).T,)


def _times_identity(values: np.ndarray) -> tuple[np.ndarray]:
    """Return the transposed values (elements per partition, partitions) as gen2 computes them, times an identity.

    So -0 becomes 0, and a NaN or infinity turns the other elements of its row of the result into NaN (0 * inf).
    """
    rows = flat(values).T
    product = rows + np.float32(0)
    if rows.shape[1] == 1:
        return (product,)
    broken = ~np.isfinite(rows)
    if broken.any():
        other_columns = broken.sum(axis=1, keepdims=True) - broken
        product[other_columns > 0] = np.nan
    return (product,)


@rule("NKW-TRANSPOSE-SHAPE")
def transposed_shape(dst: NkiTensor, data: NkiTensor) -> None:
    """dst has a partition per free element of data and a free element per partition of data.

    Raises RuleViolation otherwise.
    """
    if dst.shape[0] != data.free_size or dst.free_size != data.shape[0]:
        raise RuleViolation(
            transposed_shape,
            f"dst is ({dst.shape[0]}, {dst.free_size}), data is ({data.shape[0]}, {data.free_size})",
            hint=f"slice dst to [0:{data.free_size}, 0:{data.shape[0]}]",
        )


@rule(
    "NKW-TRANSPOSE-VECTOR",
    hint="transpose into a PSUM tile, which the Tensor engine does up to 128 x 128, and copy it to SBUF",
)
def fits_vector_block(hardware: Hardware, data: NkiTensor) -> None:
    """The Vector engine transposes one block of at most 32 x 32.

    Raises RuleViolation otherwise.
    """
    limit = hardware.vector_transpose_max
    if data.shape[0] > limit or data.free_size > limit:
        raise RuleViolation(
            fits_vector_block,
            f"data is ({data.shape[0]}, {data.free_size})",
            limit=f"({limit}, {limit}) on {hardware.name}",
        )


@rule("NKW-TRANSPOSE-TENSOR", hint="loop over blocks of 128 columns")
def fits_tensor_array(hardware: Hardware, data: NkiTensor) -> None:
    """The Tensor engine transposes at most 128 x 128 elements at a time.

    Raises RuleViolation otherwise.
    """
    if data.free_size > hardware.stationary_free_max:
        raise RuleViolation(
            fits_tensor_array,
            f"data has {data.free_size} elements per partition",
            limit=f"{hardware.stationary_free_max} on {hardware.name}",
        )
