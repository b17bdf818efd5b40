"""Frames on the socket between a process and its workers: a JSON header, and a body of bytes.

Both ends, `launch` and `supervisor`, use this module.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from typing import Any

Header = dict[str, Any]

SIZES = struct.Struct("!II")
"""Lengths of the header and of the body in bytes, in front of both."""


def pack(header: Header, body: bytes = b"") -> bytes:
    """Return a frame as bytes: the lengths of header and body (two big-endian uint32), the header as JSON, the body."""
    text = json.dumps(header).encode()
    return SIZES.pack(len(text), len(body)) + text + body


class FrameReader:
    """Reader of frames from a stream of bytes that arrives in pieces of any size."""

    def __init__(self) -> None:
        self._received = bytearray()

    def feed(self, received: bytes) -> Iterator[tuple[Header, bytes]]:
        """Append received bytes, and yield (header, body) of every frame that they complete.

        An incomplete frame is kept for the next call.
        """
        self._received += received
        start = 0
        while len(self._received) - start >= SIZES.size:
            head, body = SIZES.unpack_from(self._received, start)
            middle = start + SIZES.size + head
            if len(self._received) < middle + body:
                break
            header = json.loads(self._received[start + SIZES.size : middle])
            start = middle + body
            yield header, bytes(self._received[middle:start])
        del self._received[:start]
