"""silu_gate: gate * sigmoid(gate) * up."""

from __future__ import annotations

import nki
import nki.isa as nisa
import nki.language as nl
import numpy as np

ROWS = 128  # of a tile


@nki.jit
def silu_gate(gate, up):
    rows, columns = gate.shape
    out = nl.ndarray((rows, columns), dtype=gate.dtype, buffer=nl.shared_hbm)
    for first in range(0, rows, ROWS):
        last = min(rows, first + ROWS)
        gates = nl.load(gate[first:last])
        ups = nl.load(up[first:last])
        opened = nl.ndarray(gates.shape, dtype=nl.float32, buffer=nl.sbuf)
        nisa.activation(dst=opened, op=nl.sigmoid, data=gates)
        nisa.tensor_tensor(dst=opened, data1=opened, data2=gates, op=nl.multiply)
        nisa.tensor_tensor(dst=opened, data1=opened, data2=ups, op=nl.multiply)
        nisa.dma_copy(dst=out[first:last], src=opened)
    return out


def silu_gate_reference(gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    return gate / (1 + np.exp(-gate)) * up


ARGUMENTS = ["bf16[200,64]", "bf16[200,64]"]
SLOW = ("ROWS = 128", "ROWS = 16")
WRONG = {
    "wrong function": ("op=nl.sigmoid", "op=nl.tanh", "error"),
    "gate and up exchanged": ("op=nl.sigmoid, data=gates", "op=nl.sigmoid, data=ups", "error"),
    "sum for product": ("data2=ups, op=nl.multiply", "data2=ups, op=nl.add", "error"),
    "precision": (
        "opened = nl.ndarray(gates.shape, dtype=nl.float32",
        "opened = nl.ndarray(gates.shape, dtype=nl.float8_e4m3",
        "error",
    ),
    "up of the first rows": ("up[first:last]", "up[0 : last - first]", "error"),
    "missing last tile": ("range(0, rows, ROWS)", "range(0, rows - ROWS, ROWS)", "unwritten"),
    "unwritten output": ("nisa.dma_copy(dst=out[first:last], src=opened)", "pass", "unwritten"),
    "copy of input": ("src=opened)", "src=ups)", "copy of argument 1"),
    "constant": (
        "nisa.dma_copy(dst=out[first:last], src=opened)",
        "nisa.memset(dst=opened, value=0.0)\n        nisa.dma_copy(dst=out[first:last], src=opened)",
        "constant",
    ),
}
