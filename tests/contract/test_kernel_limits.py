"""Limits of kernels that the model states again are those of the kernels' files."""

from __future__ import annotations

import pytest

from model.device import kernel_limit
from model.engine import buckets
from model.layers import attention, experts, head, latent_attention, paged


@pytest.mark.parametrize(
    ("stated", "kernel", "name"),
    [
        (attention._ROWS, "attention_decode", "PARTITIONS"),
        (attention._WIDEST_BLOCK, "attention_block_decode", "MAX_HIDDEN"),
        (attention._LARGEST_HEAD, "attention_block_decode", "MAX_DEPTH"),
        (latent_attention._ROWS, "latent_attention_decode", "PARTITIONS"),
        (latent_attention._QUERY_BYTES, "latent_attention_decode", "MAX_QUERY_BYTES"),
        (experts.DECODED_TOKENS, "experts_decode", "PARTITIONS"),
        (head._ROWS, "lm_head", "PARTITIONS"),
        (paged.MOST_COPIES, "copy_pages", "PARTITIONS"),
        (buckets.MOST_ROWS, "sample", "PARTITIONS"),
    ],
)
def test_the_model_states_the_limit_of_the_kernel(stated: int, kernel: str, name: str) -> None:
    assert stated == kernel_limit(kernel, name)
