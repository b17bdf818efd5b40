"""sendrecv: two cores exchange tiles, and what it refuses."""

from __future__ import annotations

import threading

import numpy as np
import pytest

import simulate
from nkw.errors import Deadlock, RendezvousMismatch, RuleViolation
from simulate.hardware import hardware
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.reference import assert_same_bits, sample
from tests.isa.tiles import PSUM, plan, refuses, tile, twins

NAME = "sendrecv"
DMA = nisa.dma_engine


def call(**changes):
    base = {"src": tile((8, 64)), "dst": tile((8, 64)), "send_to_rank": 1, "recv_from_rank": 1, "pipe_id": 0}
    return {**base, **changes}


def test_exists_from_gen3_on():
    refuses("NKW-SENDRECV-CHIP", "trn1", NAME, **call())
    for target in ("trn2", "trn3"):
        plan(target, NAME, **call())


def sized(dtype, elements):
    return {
        "src": tile((8, elements), dtype),
        "dst": tile((8, elements), dtype),
        "dma_engine": DMA.gpsimd_dma,
    }


test_refuses_and_accepts_the_twin = twins(
    "trn2",
    NAME,
    call,
    ("NKW-SAME-DTYPE", {"dst": tile((8, 64), "int32")}, {}),
    ("NKW-SENDRECV-SHAPE", {"dst": tile((8, 8, 8))}, {}),
    ("NKW-SENDRECV-SHAPE", {"dst": tile((7, 64))}, {}),
    ("NKW-BUFFER", {"src": tile((8, 64), buffer=PSUM)}, {}),
    (
        "NKW-SENDRECV-CORES",
        {"send_to_rank": 2, "recv_from_rank": 2},
        {"send_to_rank": 0, "recv_from_rank": 0},
    ),
    ("NKW-SENDRECV-CORES", {"recv_from_rank": 0}, {}),
    ("NKW-SENDRECV-PIPE", {"pipe_id": "a"}, {"pipe_id": 3}),
    ("NKW-SENDRECV-ENGINE", {"dma_engine": "dma"}, {"dma_engine": DMA.dma}),
    ("NKW-SENDRECV-GPSIMD-BYTES", sized("float32", 257), sized("float32", 256)),
    ("NKW-SENDRECV-GPSIMD-BYTES", sized("bfloat16", 257), sized("bfloat16", 256)),
    ("NKW-SENDRECV-GPSIMD-BYTES", sized("uint8", 257), sized("uint8", 256)),
    ("NKW-SENDRECV-GPSIMD-BYTES", sized("float32", 257), {**sized("float32", 257), "dma_engine": DMA.dma}),
)


def exchange(kernel, x):
    return simulate.launch(
        kernel, [((x,), {})], hardware("trn2"), logical_core_size=2, has_grid=True
    ).outputs[0]


@pytest.mark.parametrize("engine", list(DMA))
def test_each_core_gets_what_the_other_sent(engine):
    def kernel(x):
        core = nl.program_id(0)
        mine, theirs = nl.load(x[4 * core : 4 * core + 4]), nl.ndarray((4, 8), dtype=nl.float32)
        nisa.sendrecv(
            src=mine, dst=theirs, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0, dma_engine=engine
        )
        nisa.memset(dst=mine, value=0)  # what was sent is out already
        out = nl.ndarray((8, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[4 * core : 4 * core + 4], src=theirs)
        return out

    x = sample("float32", (8, 8))
    assert_same_bits(exchange(kernel, x), np.concatenate((x[4:], x[:4])))


@pytest.mark.parametrize(
    ("named", "culprit"), [((0, 0), 0), ((1, 1), 1), ((0, 1), 0), ((1, 0), None)], ids=str
)
@pytest.mark.parametrize("mode", [simulate.Mode.eager, simulate.Mode.dry])
def test_a_core_that_names_itself_is_refused(named, culprit, mode):
    def kernel(x):
        peer = named[nl.program_id(0)]
        exchanged = nl.load(x)
        nisa.sendrecv(src=exchanged, dst=exchanged, send_to_rank=peer, recv_from_rank=peer, pipe_id=0)
        out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
        if nl.program_id(0) == 0:
            nisa.dma_copy(dst=out, src=exchanged)
        return out

    before = threading.active_count()
    launch = [((sample("float32", (1, 8)),), {})]
    if culprit is None:
        simulate.launch(kernel, launch, hardware("trn2"), logical_core_size=2, mode=mode, has_grid=True)
    else:
        with pytest.raises(RuleViolation, match=f"NKW-SENDRECV-SELF.*\n.*core {culprit} calls"):
            simulate.launch(kernel, launch, hardware("trn2"), logical_core_size=2, mode=mode, has_grid=True)
    assert threading.active_count() == before


def test_pipes_pair_up_by_their_number():
    def kernel(x):
        core = nl.program_id(0)
        peer = 1 - core
        mine, theirs = nl.load(x[core : core + 1]), nl.ndarray((1, 8), dtype=nl.float32)
        for pipe in (0, 1):
            nisa.sendrecv(src=mine, dst=theirs, send_to_rank=peer, recv_from_rank=peer, pipe_id=pipe)
            nisa.tensor_copy(dst=mine, src=theirs)
        out = nl.ndarray((2, 8), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out[core : core + 1], src=mine)
        return out

    x = sample("float32", (2, 8))
    assert_same_bits(exchange(kernel, x), x)


def test_cores_that_disagree_are_named_and_a_lone_one_is_a_deadlock():
    def kernel(x, width, lone):
        core = nl.program_id(0)
        if core == 0 or not lone:
            exchanged = nl.load(x[0:1, : width[core]])
            nisa.sendrecv(
                src=exchanged, dst=exchanged, send_to_rank=1 - core, recv_from_rank=1 - core, pipe_id=0
            )
        out = nl.ndarray((1, 1), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=x[0:1, 0:1])
        return out

    x = sample("float32", (1, 8))
    exchange(lambda x: kernel(x, (8, 8), False), x)
    with pytest.raises(RendezvousMismatch, match=r"shape: member 0 says \(1, 8\)"):
        exchange(lambda x: kernel(x, (8, 7), False), x)
    with pytest.raises(Deadlock, match="sendrecv"):
        exchange(lambda x: kernel(x, (8, 8), True), x)
