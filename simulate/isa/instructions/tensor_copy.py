"""tensor_copy: copy a tile within or between SBUF and PSUM."""

from __future__ import annotations

from simulate.hardware import Hardware
from simulate.isa import costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import Engine
from simulate.isa.plan import Domain, Plan
from simulate.isa.shapes import unchanged
from simulate.memory import NkiTensor


@instruction
def tensor_copy(
    hardware: Hardware,
    dst: NkiTensor,
    src: NkiTensor,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Plan:
    """Copy `src` to `dst`, element by element in streaming order, on the Vector, Scalar or GpSimd engine.

    dst, src: [P, ...] @ SBUF or PSUM, any dtype; same partitions and elements per partition.

    Equal dtypes move the bits unchanged, NaN payloads included; different dtypes go through float32. With
    engine=unknown the Vector engine is taken, which does every case. The Scalar engine copies from the second
    generation of Trainium on; GpSimd needs both operands in SBUF.

    Raises RuleViolation. Cost: costs.copied on Vector, one element per cycle elsewhere.
    """
    rules.check_tile(hardware, "dst", dst, indirect=True)
    rules.check_tile(hardware, "src", src, indirect=True)
    rules.same_elements("dst", dst, "src", src)
    if engine is Engine.unknown:
        engine = Engine.vector
    elif engine is not Engine.vector:
        with_scalar = (Engine.scalar,) if hardware.scalar_engine_tensor_copy else ()
        rules.engine_can(engine, Engine.vector, *with_scalar, Engine.gpsimd)
        rules.gpsimd_stays_in_sbuf(engine, dst=dst, src=src)
    indirection.check(hardware, engine, dst, src, Engine.vector, Engine.scalar)
    same = dst.dtype == src.dtype
    if not same:
        rules.not_packed("dst", dst)
        rules.not_packed("src", src)
    return Plan(
        engine=engine,
        reads=(src,),
        writes=(dst,),
        domain=Domain.bits if same else Domain.float32,
        compute=unchanged,
        cost=costs.copied(hardware, engine, dst, src),
        name=name,
        propagate=propagation.elementwise,
    )
