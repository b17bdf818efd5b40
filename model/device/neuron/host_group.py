"""Exchange of arrays among the processes of all ranks, through the memory of their hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from simulate.run.messages import ArraysMessage


def gather_arrays(arrays: Sequence[np.ndarray], ranks: int, group: Any) -> list[np.ndarray]:
    """Return the arrays of all ranks, those of rank 0 first; every rank has to call this function.

    Shapes and dtypes are sent as JSON and elements as bytes: `all_gather_object` would run code in a message.

    Args:
        arrays: Arrays of this rank.
        ranks: Number of ranks.
        group: A process group of torch.distributed whose backend gathers tensors of the host, such as gloo.

    Raises:
        NkwError: A rank sent a message of another form.
    """
    message = ArraysMessage([(array.shape, array.dtype) for array in arrays]).encode().encode()
    values = b"".join(np.ascontiguousarray(array).tobytes() for array in arrays)
    messages, contents = _gather_bytes(message, ranks, group), _gather_bytes(values, ranks, group)
    return [
        array
        for rank in range(ranks)
        for array in ArraysMessage.decode(messages[rank], rank).split(contents[rank], rank)
    ]


def _gather_bytes(content: bytes, ranks: int, group: Any) -> list[bytes]:
    """Return the bytes of each rank in rank order; their lengths may differ."""
    import torch
    import torch.distributed as dist

    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(ranks)]
    dist.all_gather(lengths, torch.tensor([len(content)]), group=group)
    longest = max(int(length) for length in lengths)
    padded = torch.frombuffer(bytearray(content.ljust(max(1, longest), b"\0")), dtype=torch.uint8)
    gathered = [torch.empty_like(padded) for _ in range(ranks)]
    dist.all_gather(gathered, padded, group=group)
    return [tensor.numpy()[: int(length)].tobytes() for tensor, length in zip(gathered, lengths)]
