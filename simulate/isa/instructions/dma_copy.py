"""dma_copy: move elements between HBM and SBUF, in any combination, also by run-time row numbers."""

from __future__ import annotations

from enum import Enum

from nkw.errors import RuleViolation, rule
from simulate.hardware import Hardware
from simulate.isa import dma_costs, indirection, propagation, rules
from simulate.isa.book import instruction
from simulate.isa.enums import DgeMode, Engine, OobMode
from simulate.isa.plan import Domain, Effects, Plan
from simulate.isa.shapes import count_contiguous_bytes, unchanged
from simulate.memory import NkiTensor

_EFFECTS = Effects(copies=True)


@instruction
def dma_copy(
    hardware: Hardware,
    dst: NkiTensor,
    src: NkiTensor,
    priority: int | None = None,
    oob_mode: OobMode = OobMode.error,
    dge_mode: DgeMode = DgeMode.unknown,
    engine: Engine = Engine.unknown,
    name: str | None = None,
) -> Plan:
    """Copy `src` to `dst`, element by element in row-major order of both views.

    dst, src: any shape @ HBM or SBUF; the element counts agree, shapes need not. Equal dtypes keep the bits,
    different ones go through float32. One side may be addressed at run time (`.ap(vector_offset=…)`,
    `.ap(scalar_offset=…)`, `.select`, `.vector_select`; on gen4 also a tile's `.indirect`, which the reference lists
    for compute engines and does not mention for a DMA): with oob_mode `error` an index out of range is refused,
    with `skip` the elements it addresses are left untouched. The order of writes to one row from duplicate scatter
    indices is not documented; here the last one stays.

    dge_mode unknown is this simulator's choice: GpSimd writes the descriptors for row numbers in a tile and for casts,
    otherwise they are static. Release notes of the compiler and a profile of the vendor say hardware or software
    descriptors by default on trn2; other published times agree with static ones. Loads are triggered on the Sync
    stream and stores on GpSimd's, so that a store that waits for a result does not hold up the loads behind it [our
    choice; the compiler's is not stated]. A load that casts is triggered on the Sync stream too, with descriptors that
    GpSimd writes; row numbers in a tile put the trigger on GpSimd's stream.

    engine: sync or scalar, with dge_mode hwdge alone. Where rules tolerate another use, that engine is the trigger.

    Raises RuleViolation, OutOfBounds. Cost: dma_costs.dma.
    """
    for operand, tile in (("dst", dst), ("src", src)):
        rules.is_tensor(operand, tile)
        rules.lies_in(operand, tile, *rules.HBM, rules.SBUF)
        if tile.buffer.on_chip:
            rules.partitions_within_limit(hardware, operand, tile)
        if indirection.is_indirect(tile):
            rules.indirect_on_chip(hardware, operand)
            indirection.check_gather(hardware, tile)
    for parameter, value, members in (
        ("oob_mode", oob_mode, OobMode),
        ("dge_mode", dge_mode, DgeMode),
        ("engine", engine, Engine),
    ):
        is_member(parameter, value, members)
    counts_agree(dst, src)
    same = dst.dtype == src.dtype
    if not same:
        rules.not_packed("dst", dst)
        rules.not_packed("src", src)
    dynamic = src.dynamic or dst.dynamic
    if src.dynamic is not None and dst.dynamic is not None:
        one_side_dynamic()
    by_row = dynamic is not None and dynamic.per_partition
    if priority is not None:
        priority_on_chip(hardware, priority)
    mode = dge_mode
    if mode is DgeMode.hwdge:
        hardware_descriptors(hardware, dst, src, by_row)
        rules.engine_can(engine, Engine.unknown, Engine.sync, Engine.scalar)
    elif mode is DgeMode.unknown:
        mode = DgeMode.swdge if by_row or not same else DgeMode.none
        if dynamic is not None and not by_row:
            mode = DgeMode.hwdge if hardware.hardware_dge and same else DgeMode.swdge
    load = dst.buffer.on_chip
    if mode is DgeMode.swdge and (dynamic is not None or not load):
        trigger = Engine.gpsimd
    elif engine is not Engine.unknown and engine is not Engine.dma:
        trigger = engine
    else:
        trigger = Engine.sync if load or mode is DgeMode.hwdge else Engine.gpsimd
    piece = min(count_contiguous_bytes(dst), count_contiguous_bytes(src))
    hbm_bytes = sum(end.size * end.dtype.itemsize for end in (dst, src) if not end.buffer.on_chip)
    total = src.size * max(src.dtype.itemsize, dst.dtype.itemsize)
    apart = any(count_contiguous_bytes(end) == piece for end in (dst, src) if not end.buffer.on_chip)
    return Plan(
        engine=Engine.dma,
        reads=(src,),
        writes=(dst,),
        domain=Domain.bits if same else Domain.float32,
        compute=unchanged,
        cost=dma_costs.dma(
            hardware,
            trigger,
            mode,
            total,
            piece,
            load,
            hbm_bytes,
            not same,
            by_row,
            dynamic is not None,
            apart,
        ),
        name=name,
        propagate=propagation.elementwise,
        trigger=trigger,
        skip_out_of_range=oob_mode is OobMode.skip,
        undocumented=rules.violations(
            (engine_with_hardware_descriptors, dge_mode, engine),
            (row_numbers_by_software, dge_mode, by_row),
        ),
        effects=_EFFECTS,
    )


@rule("NKW-ENUM", hint="pass a member, as nisa.dge_mode.hwdge or nisa.oob_mode.skip")
def is_member(parameter: str, value: object, members: type[Enum]) -> None:
    """An enum parameter takes a member of its enum, not a string or a number.

    Raises RuleViolation otherwise.
    """
    if not isinstance(value, members):
        raise RuleViolation(
            is_member, f"{parameter}={value!r:.40}", limit=", ".join(member.name for member in members)
        )


@rule("NKW-DMA-COUNT", hint="slice both sides to the same number of elements")
def counts_agree(dst: NkiTensor, src: NkiTensor) -> None:
    """A DMA reads as many elements as it writes.

    Raises RuleViolation if dst and src have different numbers of elements.
    """
    if dst.size != src.size:
        raise RuleViolation(counts_agree, f"dst has {dst.size} elements, src has {src.size}")


@rule("NKW-DMA-ONE-DYNAMIC", hint="go through SBUF")
def one_side_dynamic() -> None:
    """At most one side of a DMA is addressed at run time.

    Raises RuleViolation at every call: the caller has found that the rule is broken.
    """
    raise RuleViolation(one_side_dynamic, "dst and src both have run-time addresses")


@rule("NKW-DMA-HWDGE", hint="leave dge_mode=nisa.dge_mode.unknown")
def hardware_descriptors(hardware: Hardware, dst: NkiTensor, src: NkiTensor, by_row: bool) -> None:
    """Hardware descriptor generation exists from gen3 on, for equal dtypes and without row numbers in a tile.

    Raises RuleViolation if dge_mode=hwdge, to which the planner applies it, is not possible here.
    """
    if not hardware.hardware_dge or dst.dtype != src.dtype or by_row:
        raise RuleViolation(
            hardware_descriptors,
            f"dge_mode=hwdge on {hardware.name}, {src.dtype} to {dst.dtype}"
            + (", vector_offset" if by_row else ""),
        )


@rule(
    "NKW-DMA-ENGINE",
    limit="dge_mode=hwdge with engine sync or scalar",
    hint="leave engine out, or pass dge_mode=nisa.dge_mode.hwdge where chip and dtypes allow it",
)
def engine_with_hardware_descriptors(dge_mode: DgeMode, engine: Engine) -> None:
    """engine= of dma_copy is valid with dge_mode=hwdge alone, and names the Sync or the Scalar engine.

    Raises RuleViolation otherwise.
    """
    documented = dge_mode is DgeMode.hwdge and engine in (Engine.sync, Engine.scalar)
    if engine is not Engine.unknown and not documented:
        raise RuleViolation(
            engine_with_hardware_descriptors, f"engine={engine.name}, dge_mode={dge_mode.name}"
        )


@rule("NKW-DMA-ROWS", limit="dge_mode unknown or swdge", hint="leave dge_mode out")
def row_numbers_by_software(dge_mode: DgeMode, by_row: bool) -> None:
    """Descriptors that are prepared before the launch, dge_mode=none, take no row numbers in a tile.

    Raises RuleViolation otherwise.
    """
    if by_row and dge_mode is DgeMode.none:
        raise RuleViolation(row_numbers_by_software, "vector_offset with dge_mode=none")


@rule("NKW-DMA-PRIORITY", hint="leave priority out, or pass 0 to 3 on gen4")
def priority_on_chip(hardware: Hardware, priority: int) -> None:
    """DMA priority is 0 (most urgent) to 3, on chips that have traffic classes.

    Raises RuleViolation for another number, and on other chips for every number.
    """
    if not hardware.dma_priority or priority not in (0, 1, 2, 3):
        raise RuleViolation(
            priority_on_chip,
            f"priority={priority} on {hardware.name}",
            limit="0 to 3 on gen4" if hardware.dma_priority else "None before gen4",
        )
