"""NKI kernels of a Llama: one kernel per file, each with its plain numpy reference beside it.

Importing the package decides what `import nki` means (`simulate.bind.install`): the real package where a usable one
is installed, else the simulator.
"""

# ruff: noqa: E402  the name `nki` must be bound before the first kernel file imports it
from __future__ import annotations

from simulate.bind import install

install()

from nki_kernels.all_reduce import all_reduce, all_reduce_reference
from nki_kernels.attention_decode import attention_decode, attention_decode_reference
from nki_kernels.attention_prefill import attention_prefill, attention_prefill_reference
from nki_kernels.embedding import embedding, embedding_reference
from nki_kernels.lm_head import lm_head, lm_head_reference
from nki_kernels.matmul import matmul, matmul_reference
from nki_kernels.mlp import mlp, mlp_reference
from nki_kernels.output_projection import output_projection, output_projection_reference
from nki_kernels.qkv_projection import qkv_projection, qkv_projection_reference
from nki_kernels.rmsnorm import rmsnorm, rmsnorm_reference
from nki_kernels.rope import rope, rope_reference

__all__ = [
    "all_reduce",
    "all_reduce_reference",
    "attention_decode",
    "attention_decode_reference",
    "attention_prefill",
    "attention_prefill_reference",
    "embedding",
    "embedding_reference",
    "lm_head",
    "lm_head_reference",
    "matmul",
    "matmul_reference",
    "mlp",
    "mlp_reference",
    "output_projection",
    "output_projection_reference",
    "qkv_projection",
    "qkv_projection_reference",
    "rmsnorm",
    "rmsnorm_reference",
    "rope",
    "rope_reference",
]
