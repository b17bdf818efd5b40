"""Where an example of `explain` stands: the lines of a kernel around it, by code.

`{}` is the place of the example, `…` in an example the text that `filler` gives. `T(shape, dtype, buffer)` makes a tile
filled with zeros, `call(function, base, …)` calls with the base's arguments but for those that the example gives.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Setting:
    """The lines around an example, the chip, the numbers of cores and ranks, and what stands for `…`."""

    lines: str
    target: str = "trn2"
    cores: int = 1
    ranks: int = 1
    filler: str = ""
    level: str = "0.7"
    beta1: bool = False


def _call(function: str, base: str, target: str = "trn2", **options: str) -> Setting:
    return Setting(f"call({function}, dict({base}), {{}})", target, **options)  # type: ignore[arg-type]


def _scalar(target: str = "trn2") -> Setting:
    return _call("nisa.tensor_scalar", "dst=T((128, 8)), data=T((128, 8)), op0=nl.add, operand0=1.0", target)


_SELECT = (
    "dst=T((128, 8)), on_true_tile=T((128, 8)), on_false_value=0.0, pattern=[[1, 8]], "
    "channel_multiplier=1, cmp_op=nl.equal"
)
_RANGE = (
    "dst=T((128, 8)), on_true_tile=T((128, 8)), comp_op0=nl.greater_equal, comp_op1=nl.less, "
    "bound0=T((128, 1)), bound1=T((128, 1))"
)
_ACTIVATION = "dst=T((128, 8)), data=T((128, 8)), op=nl.exp"
_MATMUL = "dst=nl.ndarray((64, 512), nl.float32, nl.psum), stationary=T((128, 64)), moving=T((128, 512))"
_TENSOR = "dst=T((128, 8)), data1=T((128, 8)), data2=T((128, 8)), op=nl.add"
_COPY = "dst=T((128, 8)), src=T((128, 8))"
_DMA = "dst=T((128, 512)), src=x"
_BODY = "body = lambda i: None\n"
_REGISTER = "register = r = nisa.register_alloc(0)\n"
_SCALARS = (
    "scalar = nisa.scalar_load(T((1, 1), nl.int32))\nscalar64 = nisa.scalar_load(wide)\nscalar32 = scalar\n"
)

_GATHER = "dst=T((16, 64)), src_buffer=T((16, 64)), index=T((16, 1), nl.uint16)"
_INDEX = "tile, index = T((16, 16)), T((16, 1), nl.uint16)\n"
_MX = (
    "dst=nl.ndarray((32, 64), nl.float32, nl.psum), stationary=Z((64, 32), nl.float8_e4m3fn_x4)[32:64], "
    "moving=Z((64, 64), nl.float8_e4m3fn_x4)[32:64], stationary_scale=T((64, 32), nl.uint8)[32:36], "
    "moving_scale=T((64, 64), nl.uint8)[32:36]"
)


_BETA1 = """t = tile = a = b = nl.load(x[0:128, 0:8])
out = nl.ndarray((128, 8), dtype=nl.float32, buffer=nl.shared_hbm)
sums = nl.zeros((8, 8), dtype=nl.float32, buffer=nl.psum)
i, j = nl.arange(128)[:, None], nl.arange(8)[None, :]
n = m = 4
"""


def _beta1(lines: str = "{}", **options: str) -> Setting:
    return Setting(_BETA1 + lines, "trn1", beta1=True, **options)  # type: ignore[arg-type]


def _together(collective: str, result: str, base: str = "") -> Setting:
    operands = f"dict(srcs=[H((128, 512))], dsts=[{result}], replica_group=ReplicaGroup([[0, 1]]), {base})"
    return Setting(f"x = a = b = y = H((128, 512))\ncall(ncc.{collective}, {operands}, {{}})", ranks=2)


RUN: dict[str, Setting] = {
    "NKW-ACTIVATE2-PAIR": _call(
        "nisa.activate2",
        "dst=T((128, 8)), op=nl.exp, data=T((128, 8)), imm0=1.0, imm1=0.0",
        "trn3",
    ),
    "NKW-ACTIVATION-REDUCE": _call("nisa.activation", _ACTIVATION),
    "NKW-ACTIVATION-REDUCE-CMD": _call("nisa.activation", f"{_ACTIVATION}, reduce_op=nl.add"),
    "NKW-ADDRESS": Setting("{}"),
    "NKW-AFFINE-COMPARISON": _call("nisa.affine_select", _SELECT),
    "NKW-AFFINE-INT32": _call("nisa.iota", "dst=T((128, 512), nl.int32), pattern=[[1, 512]]"),
    "NKW-AFFINE-PATTERN": _call("nisa.iota", "dst=T((128, 512), nl.int32)"),
    "NKW-AFFINE-COUNT": _call("nisa.iota", "dst=T((128, 512), nl.int32)"),
    "NKW-ARITHMETIC-OPERATOR": _call(
        "nisa.scalar_tensor_tensor",
        "dst=T((128, 8)), data=T((128, 8)), operand0=1.0, op1=nl.add, operand1=T((128, 8))",
    ),
    "NKW-BARRIER-CORES": _call("nisa.core_barrier", "data=S((4, 4))", cores=2),  # type: ignore[arg-type]
    "NKW-BETA1-ASSIGN-MEMORY": _beta1(),
    "NKW-BETA1-ASSIGN-VALUE": _beta1(),
    "NKW-BETA1-AXIS": _beta1(),
    "NKW-BETA1-CONDITION": _beta1(),
    "NKW-BETA1-HBM": _beta1("t = tile = nl.load(x[0:8, 0:8])\n{}"),
    "NKW-BETA1-IOTA": _beta1(filler="dtype=nl.int32"),
    "NKW-BETA1-NO-MASK": _beta1(),
    "NKW-BETA1-OPERANDS": _beta1(),
    "NKW-BETA1-PREDICATE": _beta1("call(nisa.affine_select, dict(on_true_tile=t, on_false_value=0.0), {})"),
    "NKW-BETA1-REDUCE-MASK": _beta1(),
    "NKW-BETA1-TILE": _beta1("x = x[0:128, 0:8]\n{}"),
    "NKW-BETA1-UPDATE": _beta1("tile = nl.load(x[0:8, 0:8])\n{}"),
    "NKW-INDEX-1D": _beta1("nl.load({})"),
    "NKW-INDEX-AFFINE": _beta1(),
    "NKW-INDEX-EMPTY": _beta1(),
    "NKW-INDEX-MIXED": _beta1("nl.load({})"),
    "NKW-MASK-JOIN": _beta1("call(nl.load, dict(src=x[i, j]), {})"),
    "NKW-BITVEC-OPERAND": _call(
        "nisa.tensor_scalar", "dst=T((128, 8), nl.int32), data=T((128, 8), nl.int32)"
    ),
    "NKW-BN-AGGR-OUTPUT": _call("nisa.bn_aggr", "dst=T((128, 2)), data=T((128, 6))"),
    "NKW-BN-AGGR-TRIPLES": _call("nisa.bn_aggr", "dst=T((128, 2)), data=T((128, 6))"),
    "NKW-BN-STATS-OUTPUT": _call("nisa.bn_stats", "dst=T((128, 6)), data=T((128, 8))"),
    "NKW-BN-STATS-SIZE": _call("nisa.bn_stats", "dst=T((128, 6)), data=T((128, 8))"),
    "NKW-BROADCAST": Setting("tile = T((1, 8))\n{}"),
    "NKW-CALL": Setting("x = y = T((128, 8))\n{}"),
    "NKW-DEVICE-OPERATOR": _call("nisa.tensor_tensor", _TENSOR),
    "NKW-DMA-COMPUTE-OPERATOR": _call(
        "nisa.dma_compute", "dst=T((128, 512)), srcs=[x, x], unique_indices=True"
    ),
    "NKW-DMA-COMPUTE-SCALES": _call(
        "nisa.dma_compute", "dst=T((128, 512)), srcs=[x, x], reduce_op=nl.add, unique_indices=True"
    ),
    "NKW-DMA-COMPUTE-SOURCES": Setting(
        "a = b = T((128, 512))\n"
        "call(nisa.dma_compute, dict(dst=T((128, 512)), reduce_op=nl.add, unique_indices=True), {})"
    ),
    "NKW-DMA-COUNT": _call("nisa.dma_copy", ""),
    "NKW-DMA-OVERLAP": Setting("t = T((128, 8))\n{}"),
    "NKW-DMA-PRIORITY": _call("nisa.dma_copy", _DMA, "trn3"),
    "NKW-DMA-TRANSPOSE-AXES": _call(
        "nisa.dma_transpose", "dst=T((16, 16, 16), nl.bfloat16), src=H((16, 16, 16), nl.bfloat16)"
    ),
    "NKW-DROPOUT-PROBABILITY": _call("nisa.dropout", "dst=T((128, 8)), data=T((128, 8))"),
    "NKW-DTYPE": _call("nl.ndarray", "shape=(128, 8)"),
    "NKW-CONSTANT-DTYPE": Setting("mask = np.zeros((2, 2), np.int8)\n{}"),
    "NKW-CONSTANT-SHARED": Setting("tables = np.arange(4, dtype=np.int32).reshape(2, 2)\n{}", cores=2),
    "NKW-DEVICE-PRINT": Setting("sums = nl.zeros((8, 8), nl.float32, nl.psum)\n{}"),
    "NKW-DS": Setting("t = T((8, 8))\n{}"),
    "NKW-EXPAND-AXIS": Setting("t = T((128, 8))\n{}"),
    "NKW-ELEMENT-OPERATOR": _call("nisa.tensor_tensor", _TENSOR),
    "NKW-ELEMENTS-AGREE": _call("nisa.tensor_tensor", "dst=T((128, 512)), op=nl.add"),
    "NKW-ENUM": _call("nisa.dma_copy", _DMA),
    "NKW-RANGE": Setting("{}"),
    "NKW-RMS-COUNT": Setting("t = T((128, 8))\n{}"),
    "NKW-WHERE-TILES": Setting("t = T((128, 8))\n{}"),
    "NKW-FILL": Setting("shape = (128, 8)\n{}"),
    "NKW-FLOAT32-RANGE": _scalar(),
    "NKW-FUNCTION-RANGE": Setting(
        "positions = T((128, 8), value=9.0)\ny = T((128, 8))\n"
        "call(nisa.activation, dict(dst=y), op=nl.sin, data=positions)\n# {}"
    ),
    "NKW-LOOP-BOUND": Setting(_BODY + "{}"),
    "NKW-LOOP-CONDITION": Setting(_REGISTER + "body = lambda i: i\n{}"),
    "NKW-LOOP-FUNCTION": Setting(_BODY + "{}"),
    "NKW-LOOP-STEP": Setting(_BODY + "{}"),
    "NKW-MATMUL-ACCUMULATE": Setting(
        f"sums = dict({_MATMUL})\nnisa.nc_matmul(**sums)\ncall(nisa.nc_matmul, sums, {{}})"
    ),
    "NKW-MATMUL-ARRAY-TILE": _call(
        "nisa.nc_matmul",
        "dst=nl.ndarray((32, 8), nl.float32, nl.psum), stationary=T((64, 32))[32:64], moving=T((64, 8))[32:64]",
    ),
    "NKW-MATMUL-MOVING": _call("nisa.nc_matmul", _MATMUL),
    "NKW-MATMUL-PERF-MODE": _call(
        "nisa.nc_matmul",
        "dst=nl.ndarray((64, 64), nl.float32, nl.psum), stationary=T((128, 2, 64), nl.float8_e4m3), "
        "moving=T((128, 2, 64), nl.float8_e4m3)",
    ),
    "NKW-MATMUL-STATIONARY": _call("nisa.nc_matmul", _MATMUL),
    "NKW-MUTATION": Setting("tile = T((8, 8))\n{}"),
    "NKW-NL-MATMUL-COLUMNS": Setting("a, b = T((128, 64)), T((128, 1024))\n{}", "trn3"),
    "NKW-NL-MEMORY": Setting("t = T((8, 8))\n{}"),
    "NKW-NL-OPERANDS": Setting("t = T((8, 8))\n{}"),
    "NKW-NL-SHAPES": Setting("a, row = T((128, 8)), T((128, 1))\n{}"),
    "NKW-NUMBER": _scalar(),
    "NKW-ONE-DYNAMIC": Setting("x = H((8, 8))\na = b = T((1, 1), nl.int32)\n{}"),
    "NKW-OPERAND": Setting("numpy_array = np.zeros((128, 8), np.float32)\ny = T((128, 8))\n{}"),
    "NKW-OPERATOR": _call("nisa.tensor_tensor", _TENSOR),
    "NKW-OPERATOR-FAMILY": _call(
        "nisa.tensor_scalar", "dst=T((128, 8)), data=T((128, 8)), operand0=1.0, operand1=1.0"
    ),
    "NKW-ORDER-HANDLE": Setting(
        "tile = T((128, 512))\nstore = nisa.dma_copy(dst=H((128, 512)), src=tile)\n{}",
        filler="dst=tile, src=tile",
    ),
    "NKW-ORDER-LATER": Setting(
        "first = nisa.memset(nl.ndarray((4, 4), nl.float32), 0.0)\n"
        "second = nisa.memset(nl.ndarray((4, 4), nl.float32), 0.0)\n{}"
    ),
    "NKW-ORDER-NOT-ENTERED": Setting("{}"),
    "NKW-PARTITION-REDUCE-OPERATOR": _call("nisa.tensor_partition_reduce", "dst=T((1, 8)), data=T((128, 8))"),
    "NKW-PARTITION-REDUCE-OUTPUT": _call("nisa.tensor_partition_reduce", "op=nl.add, data=T((128, 8))"),
    "NKW-PARTITION-START": Setting("tile = T((128, 8))\nnisa.memset(dst={}, value=0.0)"),
    "NKW-PARTITION-STRIDE": Setting("tile = T((128, 8))\nnisa.memset(dst={}, value=0.0)"),
    "NKW-PARTITIONS-AGREE": _call("nisa.tensor_tensor", "dst=T((128, 8)), op=nl.add"),
    "NKW-PSUM-BANK": Setting(
        "sums = nl.ndarray((64, 1024), nl.float32, nl.psum)\n"
        "call(nisa.nc_matmul, dict(stationary=T((128, 64)), moving=T((128, 200))), {})"
    ),
    "NKW-RAND2-RANGE": _call("nisa.rand2", "dst=T((128, 8))", "trn3"),
    "NKW-RANGE-SELECT-COMPARE": _call("nisa.range_select", _RANGE),
    "NKW-RANGE-SELECT-FILL": _call("nisa.range_select", _RANGE),
    "NKW-RANGE-SELECT-POSITION": _call("nisa.range_select", _RANGE),
    "NKW-REDUCE-AXIS": _call("nisa.tensor_reduce", "dst=T((128, 1)), op=nl.add, data=T((128, 8))"),
    "NKW-REDUCE-OPERATOR": _call("nisa.tensor_reduce", "dst=T((128, 1)), data=T((128, 8)), axis=1"),
    "NKW-REGION": _call("nl.ndarray", "shape=(128, 8), dtype=nl.float32"),
    "NKW-REGISTER": Setting("nisa.{}"),
    "NKW-REGISTER-IMMEDIATE": Setting(_REGISTER + "nisa.{}"),
    "NKW-REGISTER-PYTHON": Setting(_REGISTER + _BODY + "{}"),
    "NKW-REGISTER-TILE": Setting(_REGISTER + "float_tile, counts = T((1, 1)), T((1, 8), nl.int32)\nnisa.{}"),
    "NKW-RESHAPE-LAYOUT": Setting("tile = T((128, 4, 4))\n{}"),
    "NKW-SCALAR": Setting("tile = T((1, 1), nl.int32)\n{}"),
    "NKW-SCALAR-64": Setting(_SCALARS + _BODY + "{}"),
    "NKW-SCALAR-OPERAND": Setting(_SCALARS + "{}"),
    "NKW-SCALAR-REDUCE-REVERSE": _call(
        "nisa.tensor_scalar_reduce",
        "dst=T((128, 8)), data=T((128, 8)), op0=nl.add, operand0=1.0, reduce_op=nl.add, reduce_res=T((128, 1))",
    ),
    "NKW-SCALAR-TILE": Setting(
        "uint32_tile, int32_tile = T((1, 1), nl.uint32), T((1, 8), nl.int32)\nnisa.{}"
    ),
    "NKW-SCALAR-WIDTH": Setting(_SCALARS + "{}"),
    "NKW-SEARCH-EIGHT": _call("nisa.max8", "dst=T((128, 8)), src=T((128, 16))"),
    "NKW-SEARCH-SIZE": _call("nisa.max8", "dst=T((128, 8)), src=T((128, 16))"),
    "NKW-SENDRECV-CORES": _call(
        "nisa.sendrecv",
        "src=T((128, 8)), dst=T((128, 8)), recv_from_rank=1 - nl.program_id(0), pipe_id=0",
        cores=2,  # type: ignore[arg-type]
    ),
    "NKW-SENDRECV-SHAPE": _call(
        "nisa.sendrecv",
        "send_to_rank=1 - nl.program_id(0), recv_from_rank=1 - nl.program_id(0), pipe_id=0",
        cores=2,  # type: ignore[arg-type]
    ),
    "NKW-SENDRECV-PIPE": _call(
        "nisa.sendrecv",
        "src=T((128, 8)), dst=T((128, 8)), send_to_rank=1 - nl.program_id(0), "
        "recv_from_rank=1 - nl.program_id(0)",
        cores=2,  # type: ignore[arg-type]
    ),
    "NKW-SHAPE": Setting("{}", filler="dtype=nl.float32"),
    "NKW-STRIDE": Setting("tile = nl.ndarray((128, 80001), nl.uint8)\nnisa.memset(dst={}, value=0)"),
    "NKW-TENSOR-OPERATOR": Setting("a, b, y = T((128, 8)), T((128, 8)), T((128, 8))\n{}"),
    "NKW-TENSOR-SCALAR-OPERATOR": _scalar(),
    "NKW-TILE-SHAPE": Setting("{}", filler="dtype=nl.float32"),
    "NKW-TILE-SIZE": Setting("{}"),
    "NKW-UNARY-OPERAND": _scalar(),
    "NKW-VECTOR-OFFSET": Setting("tile, table, rows = T((128, 8)), H((8, 8)), T((4, 1), nl.int32)\n{}"),
    "NKW-COLLECTIVE-GATHER-DIM": _together("all_gather", "O((256, 512))"),
    "NKW-COLLECTIVE-LISTS": _together("all_reduce", "y", "op=nl.add"),
    "NKW-COLLECTIVE-OPERATOR": _together("all_reduce", "y"),
    "NKW-COLLECTIVE-SCATTER-DIM": _together("reduce_scatter", "O((64, 512))", "op=nl.add"),
    "NKW-GROUP-FORM": Setting("{}"),
    "NKW-GROUP-TYPE": _together("all_reduce", "y", "op=nl.add"),
    "NKW-AFFINE-CARRIED": Setting(
        "kept = nl.ndarray((128, 8), nl.float32)\npart = T((128, 8))\n{}\nnisa.tensor_copy(dst=part, src=kept)"
    ),
    "NKW-DMA-PARTITIONS": Setting("{}"),
    "NKW-DMA-TRANSPOSE-STRIDE": Setting("{}"),
    "NKW-PARTITION-STEP-ZERO": Setting("{}"),
    "NKW-PSUM-HALF-START": Setting("bank = nl.ndarray((16, 8), nl.bfloat16, nl.psum)\n{}"),
    "NKW-COMPILE-CONFIG": Setting("f = lambda x: x\n{}"),
    "NKW-EXPONENTIAL-IDLE": Setting("x, y, z = T((8, 8)), T((8, 8)), T((8, 8))\n{}", "trn3"),
    "NKW-GATHER-COUNT": _call("nisa.local_gather", _GATHER),
    "NKW-GATHER-RUN": _call("nisa.local_gather", _GATHER),
    "NKW-INDIRECT-DATA": Setting(_INDEX + "nisa.tensor_copy(dst=T((16, 16)), src={})", "trn3"),
    "NKW-INDIRECT-FINAL": Setting(_INDEX + "{}", "trn3"),
    "NKW-LOOP-BODY": Setting("total = T((8, 8))\npart = T((8, 8))\n{}\nnl.fori_loop(0, 2, body)"),
    "NKW-MEMSET-PACKED": Setting("packed = nl.ndarray((128, 8), nl.float8_e4m3fn_x4)\nnisa.{}", "trn3"),
    "NKW-MX-ROW-TILE": _call("nisa.nc_matmul_mx", _MX, "trn3"),
    "NKW-NONZERO-INT32": _call(
        "nisa.nonzero_with_count", "dst=T((128, 9), nl.int32), src=T((128, 8)), index_offset=0"
    ),
    "NKW-SCALAR-COMPARISON": Setting(_SCALARS + _BODY + "{}"),
    "NKW-SENDRECV-ENGINE": _call(
        "nisa.sendrecv",
        "src=T((128, 8)), dst=T((128, 8)), send_to_rank=1 - nl.program_id(0), "
        "recv_from_rank=1 - nl.program_id(0), pipe_id=0",
        cores=2,  # type: ignore[arg-type]
    ),
    "NKW-TRANSPOSE-TENSOR": _call("nisa.nc_transpose", "dst=nl.ndarray((128, 512), nl.float32, nl.psum)"),
    "NKW-WORLD": Setting("{}"),
    "NKW-TOLERANCE": _call("tolerance", "dtype='float32', magnitude=1.0"),
    "NKW-KERNEL": Setting("{}"),
    "NKW-KERNEL-ERROR": Setting("{}"),
    "NKW-CHECK-COUNT": Setting("with call(gathered, dict(), {}): pass"),
    "NKW-VECTOR-REDUCE-OPERATOR": _call(
        "nisa.tensor_scalar_reduce",
        "dst=T((128, 8)), data=T((128, 8)), op0=nl.add, operand0=1.0, reduce_res=T((128, 1))",
    ),
}

NOT_RUN = frozenset(
    """
    NKI018 NKI041 NKW-BACKEND NKW-BETA1-AXES NKW-BETA1-LOOP-INDICES NKW-BETA1-TENSOR-ENGINE-MASK
    NKW-COLLECTIVE-MEMORY NKW-COLLECTIVE-ONE-TENSOR NKW-DEADLOCK NKW-DMA-TRANSPOSE-DGE NKW-GRID
    NKW-INDEX-AXES NKW-LEVEL-NAME NKW-LOOP-EVENTS NKW-LOOP-OPTION NKW-LOOP-REDUCE NKW-MASK
    NKW-OLDER-MASK NKW-OLDER-RMW NKW-PLACEMENT NKW-REPLAY-OPTION NKW-RING-CHANNELS NKW-RULES-NAME
    NKW-SCALAR-OFFSET NKW-SCHEDULE NKW-SEQUENCE-SHAPE NKW-TIMING-READING NKW-TIMING-STREAMS
    NKW-TOPK-DIMS NKW-TOPK-LIMITS NKW-TRIPS NKW-TUNE-PARAMETERS
    """.split()
)
"""Known gap: codes whose wrong example is code and has no setting yet; some are switches of a command line."""
