"""Fusion: a compiler from the recorded plans of a launch to fewer and larger numpy calls.

A plan says what one instruction reads, writes and computes. `lower` traces the plans (`tracing`) into operations
between arrays, called values (`graph`, `opcodes`), and follows the provenance of elements: of which value each is a
copy (`provenance`, `provenance_map`). Passes then eliminate dead code and copies (`elimination`) and fuse matmuls
(`matmul_fusion`). Later passes select an implementation of each matmul (`matmul_selection`), pack repeated operations
(`packing`) and place buffers (`buffers`). `execute` runs the result.
"""

from simulate.replay.fusion.execute import Fused, FusionReport
from simulate.replay.fusion.graph import NotFused

__all__ = ["Fused", "FusionReport", "NotFused"]
