"""The layout rules on every on-chip operand of the scan, select, random, gather, MX and DMA instructions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from simulate.memory import Dynamic, NkiTensor
from simulate.nki import isa as nisa
from simulate.nki import language as nl
from tests.isa.tiles import HBM, PSUM, like, plan, refuses, tile

CMD, ENGINE = nisa.reduce_cmd, nisa.engine


def _float(p: int, elements: int = 6) -> NkiTensor:
    return tile((p, elements))


def _unsigned(p: int, elements: int = 6, dtype: str = "uint32") -> NkiTensor:
    return tile((p, elements), dtype)


CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "activate2": lambda p: {
        "dst": _float(p),
        "op": nl.prelu,
        "data": _float(p),
        "imm0": _float(p, 1),
        "imm1": _float(p, 1),
        "op0": nl.multiply,
        "op1": nl.add,
        "relu_param": _float(p, 1),
        "reduce_res": _float(p, 1),
    },
    "bn_aggr": lambda p: {"dst": _float(p, 2), "data": _float(p)},
    "bn_stats": lambda p: {"dst": _float(p), "data": _float(p)},
    "dma_transpose": lambda p: {"dst": tile((p, 6)), "src": tile((6, p), buffer=HBM)},
    "dropout": lambda p: {"dst": _float(p), "data": _float(p), "prob": _float(p, 1)},
    "exponential": lambda p: {
        "dst": _float(p),
        "src": _float(p),
        "max_value": _float(p, 1),
        "reduce_res": _float(p, 1),
        "reduce_cmd": CMD.load_reduce,
        "reduce_init": _float(p, 1),
    },
    "local_gather": lambda p: {
        "dst": _float(p, 32),
        "src_buffer": _float(p),
        "index": _unsigned(p, 2, "uint16"),
    },
    "nc_n_gather": lambda p: {"dst": _float(p), "data": _float(p), "indices": _unsigned(p)},
    "nc_stream_shuffle": lambda p: {"dst": _float(p), "src": _float(p), "shuffle_mask": list(range(32))},
    "nonzero_with_count": lambda p: {"dst": tile((p, 7), "int32"), "src": _float(p)},
    "rand2": lambda p: {"dst": _float(p), "min": _float(p, 1), "max": _float(p, 1)},
    "rand_get_state": lambda p: {"dst": _unsigned(p)},
    "rand_set_state": lambda p: {"src_seeds": _unsigned(p)},
    "range_select": lambda p: {
        "dst": _float(p),
        "on_true_tile": _float(p),
        "comp_op0": nl.less,
        "comp_op1": nl.less,
        "bound0": _float(p, 1),
        "bound1": _float(p, 1),
        "reduce_res": _float(p, 1),
    },
    "rng": lambda p: {"dst": _unsigned(p)},
    "select_reduce": lambda p: {
        "dst": _float(p),
        "predicate": _unsigned(p, 6, "uint8"),
        "on_true": _float(p),
        "on_false": _float(p, 1),
        "reduce_res": _float(p, 1),
    },
    "sendrecv": lambda p: {
        "src": _float(p),
        "dst": _float(p),
        "send_to_rank": 0,
        "recv_from_rank": 0,
        "pipe_id": 0,
    },
    "tensor_copy_predicated": lambda p: {"dst": _float(p), "src": _float(p), "predicate": _unsigned(p)},
    "tensor_scalar_cumulative": lambda p: {
        "dst": _float(p),
        "src": _float(p),
        "op0": nl.add,
        "op1": nl.add,
        "imm0": _float(p, 1),
        "imm1": _float(p, 1),
        "reduce_cmd": CMD.load_reduce,
    },
    "tensor_scalar_reduce": lambda p: {
        "dst": _float(p),
        "data": _float(p),
        "op0": nl.add,
        "operand0": _float(p, 1),
        "reduce_op": nl.add,
        "reduce_res": _float(p, 1),
        "reduce_cmd": CMD.load_reduce,
        "reduce_init": _float(p, 1),
    },
    "tensor_tensor_scan": lambda p: {
        "dst": _float(p),
        "data0": _float(p),
        "data1": _float(p),
        "initial": _float(p, 1),
        "op0": nl.multiply,
        "op1": nl.add,
    },
    "topk": lambda p: {
        "val_dst": tile((p, 8), "bfloat16"),
        "idx_dst": _unsigned(p, 8),
        "src": tile((p, 6), "bfloat16"),
        "n": 96,
    },
}
_SBUF_ONLY = {
    *(
        "dma_transpose",
        "local_gather",
        "nc_n_gather",
        "nonzero_with_count",
        "rand_get_state",
        "rand_set_state",
    ),
    *("sendrecv", "topk"),
}
OPERANDS = [
    (name, operand)
    for name, call in CALLS.items()
    for operand, value in call(16).items()
    if isinstance(value, NkiTensor) and value.buffer.on_chip
]


@pytest.mark.parametrize("partitions", [16, 128])
@pytest.mark.parametrize("name", CALLS)
def test_accepts_a_healthy_call(name: str, partitions: int) -> None:
    made = plan("trn3", name, **CALLS[name](partitions))
    assert made.cost.interval_cycles > 0 and made.cost.latency_cycles > 0


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_refuses_more_than_128_partitions(name: str, operand: str) -> None:
    call = CALLS[name](128)
    value = call[operand]
    refuses(
        "NKW-PARTITION-COUNT", "trn3", name, **{**call, operand: like(value, shape=(129, *value.shape[1:]))}
    )


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_starts_on_a_quadrant(name: str, operand: str) -> None:
    call = CALLS[name](16)
    refuses("NKW-PARTITION-START", "trn3", name, **{**call, operand: like(call[operand], start_partition=16)})
    if name != "local_gather":  # whose operands share their cores
        plan("trn3", name, **{**call, operand: like(call[operand], start_partition=32)})


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_lies_in_a_memory_that_the_engine_reaches(name: str, operand: str) -> None:
    call = CALLS[name](16)
    refuses("NKW-BUFFER", "trn3", name, **{**call, operand: like(call[operand], buffer=HBM)})
    in_psum = {**call, operand: like(call[operand], buffer=PSUM)}
    if name == "rand_get_state":
        refuses("NKW-GPSIMD-PSUM", "trn3", name, **in_psum)
    elif name in _SBUF_ONLY:
        refuses("NKW-BUFFER", "trn3", name, **in_psum)
    else:
        plan("trn3", name, **in_psum)


@pytest.mark.parametrize(("name", "operand"), OPERANDS)
def test_is_not_addressed_by_row_numbers(name: str, operand: str) -> None:
    call = CALLS[name](16)
    value = call[operand]
    step = Dynamic(tile((16, 1), "int32"), 1, 1, True)
    moved = NkiTensor.from_storage(value.shape, value.dtype, value.storage, value.strides, value.offset, step)
    refuses("NKW-INDIRECT", "trn3", name, **{**call, operand: moved})
