"""Ordering requests that cannot be kept, or order nothing."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl

from tests.faults.data import copied_out, ramp
from tests.faults.table import fault


@fault("NKW-ORDER-NOT-ENTERED", ramp(4, 8), answer=lambda x: 2 * x)
def block_without_with(x, sick):
    """no_reorder is called like a function, and orders nothing."""
    tile = nl.load(x)
    total = nl.zeros((4, 8), dtype=nl.float32)
    if sick:
        nl.no_reorder()  # blamed
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    else:
        with nl.no_reorder():
            nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
            nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    return copied_out(total)


@fault("NKW-ORDER-BLOCK", ramp(4, 8), answer=lambda x: 2 * x)
def device_loop_in_a_block(x, sick):
    """A device loop stands inside a no_reorder block."""
    tile = nl.load(x)
    total = nl.zeros((4, 8), dtype=nl.float32)

    def body(i):
        nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)

    if sick:
        with nl.no_reorder():
            nl.fori_loop(0, 2, body)  # blamed
    else:
        nl.fori_loop(0, 2, body)
    return copied_out(total)


first_of_cores = {}


@fault("NKW-ORDER-CORE", ramp(8, 4), answer=lambda x: 2 * x, cores=2)
def instruction_of_the_other_core(x, sick):
    """A store on core 1 is to wait for an instruction of core 0."""
    core = nl.program_id(0)
    out = nl.ndarray((8, 4), dtype=nl.float32, buffer=nl.shared_hbm, name="out")
    tile = nl.ndarray((4, 4), dtype=nl.float32)
    first_of_cores[core] = nisa.dma_copy(dst=tile, src=x[core * 4 : core * 4 + 4])
    nisa.core_barrier(data=out, cores=(0, 1))
    doubled = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.multiply, operand0=2.0)
    doubled.depends_on(first_of_cores[1 - core if sick else core])  # blamed
    nisa.dma_copy(dst=out[core * 4 : core * 4 + 4], src=tile)
    return out


@nki.jit
def doubled(x):
    tile = nl.load(x)
    total = nl.ndarray((4, 8), dtype=nl.float32)
    nisa.tensor_tensor(dst=total, data1=tile, data2=tile, op=nl.add, name="double")
    nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0, name="next")
    nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    return copied_out(total)


@fault("NKW-SCHEDULE", ramp(4, 8), answer=lambda x: 3 * x + 1)
def name_of_no_instruction(x, sick):
    """The schedule of a kernel names an instruction that is called otherwise."""
    edges = [("next", "doubled" if sick else "double")]
    return doubled.with_schedule(edges)(x)  # blamed


@fault("NKW-ORDER-LOOP", ramp(4, 8), answer=lambda x: 3 * x + 1)
def out_of_a_device_loop(x, sick):
    """An instruction after a device loop is to wait for one in the body."""
    tile = nl.load(x)
    total = nl.ndarray((4, 8), dtype=nl.float32)
    kept = [nisa.memset(dst=total, value=0.0)]

    def body(i):
        added = nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
        if sick:
            kept.append(added)

    nl.fori_loop(0, 2, body)
    last = nisa.tensor_scalar(dst=tile, data=tile, op0=nl.add, operand0=1.0)
    last.depends_on(kept[-1])  # blamed
    nisa.tensor_tensor(dst=total, data1=total, data2=tile, op=nl.add)
    return copied_out(total)


@fault("NKW-ORDER-LATER", ramp(4, 8), answer=lambda x: 3 * x + 1)
def pair_the_wrong_way_round(x, sick):
    """The pairs of a schedule are written as (producer, consumer)."""

    @nki.jit
    def doubled(x):
        tile = nl.load(x)
        total = nl.ndarray((4, 8), dtype=nl.float32)
        other = nl.ndarray((4, 8), dtype=nl.float32)
        nisa.tensor_tensor(dst=total, data1=tile, data2=tile, op=nl.add, name="double")  # blamed
        nisa.tensor_scalar(dst=other, data=tile, op0=nl.add, operand0=1.0, name="next")
        nisa.tensor_tensor(dst=total, data1=total, data2=other, op=nl.add)
        return copied_out(total)

    pair = ("double", "next") if sick else ("next", "double")
    return doubled.with_schedule([pair])(x)


@fault("NKW-ORDER-HANDLE", ramp(4, 8), answer=lambda x: 3 * x)
def tile_as_producer(x, sick):
    """depends_on gets the tile that the other instruction writes."""
    tile = nl.load(x)
    first = nl.ndarray((4, 8), dtype=nl.float32)
    second = nl.ndarray((4, 8), dtype=nl.float32)
    before = nisa.tensor_copy(dst=first, src=tile)
    after = nisa.tensor_tensor(dst=second, data1=tile, data2=tile, op=nl.add)
    after.depends_on(first if sick else before)  # blamed
    nisa.tensor_tensor(dst=second, data1=second, data2=first, op=nl.add)
    return copied_out(second)


@fault("NKW-ORDER-LATER", ramp(4, 8), answer=lambda x: 3 * x)
def waits_for_a_later_one(x, sick):
    """depends_on is called on the instruction that was meant to run first."""
    tile = nl.load(x)
    first = nl.ndarray((4, 8), dtype=nl.float32)
    second = nl.ndarray((4, 8), dtype=nl.float32)
    before = nisa.tensor_copy(dst=first, src=tile)
    after = nisa.tensor_tensor(dst=second, data1=tile, data2=tile, op=nl.add)
    if sick:
        before.depends_on(after)  # blamed
    else:
        after.depends_on(before)
    nisa.tensor_tensor(dst=second, data1=second, data2=first, op=nl.add)
    return copied_out(second)
