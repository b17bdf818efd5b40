"""The key/value cache's lengths."""

from __future__ import annotations

import pytest

from model.runners.bucket_length import bucket_length


@pytest.mark.parametrize(
    ("needed", "length"), [(1, 128), (127, 128), (128, 128), (129, 256), (200, 256), (256, 256)]
)
def test_length_is_a_bucket_of_128(needed, length) -> None:
    assert bucket_length(needed, 256) == length


@pytest.mark.parametrize(("context", "length"), [(127, 128), (128, 128), (129, 256), (200, 256)])
def test_length_is_at_most_the_context_rounded_up(context, length) -> None:
    assert bucket_length(context, context) == length
