"""Messages between ranks in separate processes: JSON texts whose every field is checked when it is read.

`simulate.run.processes` sends `ProcessMessage`, `StateMessage` and `ArrivalMessage` through the store of
torch.distributed. Any program that reaches this store can write to it. `model.device.neuron.host_group` gathers
`ArraysMessage`, and then the bytes of the arrays, among the processes of a NeuronDevice's ranks. JSON contains only
numbers and texts, unlike pickle, which would run code of the sender. The functions that check a field raise
ValueError for a wrong one, which `_Reading` turns into NkwError.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from nkw.errors import InvalidArgument, Location, NkwError, shown

_LONGEST_TEXT = 2000
_MOST_PROCESS_ID = 2**31 - 1
_EXTENSIONS = {
    np.dtype(scalar).name: np.dtype(scalar)
    for scalar in vars(ml_dtypes).values()
    if isinstance(scalar, type) and issubclass(scalar, np.generic)
}
"""Dtypes of ml_dtypes by name."""
_NATIVE = re.compile(r"[<>|][biufcSU]\d{1,9}", re.ASCII)
"""Pattern of NumPy's texts for dtypes of numbers and texts, such as <f4."""
_STATUSES = ("runs", "waits", "ended", "failed")

Shape = tuple[tuple[int, ...], np.dtype]


@dataclass(frozen=True)
class ProcessMessage:
    """Message with the host and the process id of a rank's process.

    A rank on the same host finds out with it whether the process is gone: a killed process publishes no end.
    """

    host: str
    process_id: int

    def encode(self) -> str:
        """Return the message as JSON text, which `decode` reads."""
        return json.dumps([self.host, self.process_id])

    @classmethod
    def decode(cls, content: bytes, rank: int) -> ProcessMessage:
        """Return the message in JSON bytes that a rank sent.

        Args:
            content: The bytes.
            rank: The sender, for errors.

        Raises:
            NkwError: The bytes are no such message.
        """
        with _Reading(rank):
            host, process_id = _parse_list(content, 2)
            return cls(_check_text(host), _check_integer(process_id, 1, _MOST_PROCESS_ID))


@dataclass(frozen=True)
class StateMessage:
    """Message with what a rank does; a rank reads those of the ranks that it waits for, to find a deadlock.

    count: number of states that the rank has published. status: "runs", "waits", "ended" or "failed". text: what it
    waits in, or its error. missing: for each rendezvous that it waits for, the keys of the arrivals that would
    complete it.
    """

    count: int = 0
    status: str = "ended"
    text: str = ""
    missing: Sequence[Sequence[str]] = ()

    def encode(self) -> str:
        """Return the message as JSON text, which `decode` reads."""
        return json.dumps([self.count, self.status, self.text, [list(keys) for keys in self.missing]])

    @classmethod
    def decode(cls, content: bytes, rank: int) -> StateMessage:
        """Return the message in JSON bytes that a rank sent.

        Args:
            content: The bytes.
            rank: The sender, for errors.

        Raises:
            NkwError: The bytes are no such message.
        """
        with _Reading(rank):
            count, status, text, missing = _parse_list(content, 4)
            if status not in _STATUSES:
                raise ValueError
            keys = [
                [_check_arrival_key(key) for key in _check_list(alternative)]
                for alternative in _check_list(missing)
            ]
            return cls(_check_integer(count, 0), status, _check_text(text), keys)


@dataclass(frozen=True)
class ArrivalMessage:
    """Message of a rank that arrives at a rendezvous.

    terms: what the members must agree on, as texts. where: the kernel line. shapes: shape and dtype of each operand,
    whose bytes follow by another way.
    """

    terms: Mapping[str, str]
    where: Location
    shapes: Sequence[Shape] = field(default_factory=list)

    def encode(self) -> str:
        """Return the message as JSON text, which `decode` reads.

        Raises:
            InvalidArgument: An operand has a dtype that no other process can read.
        """
        shapes = _encode_shapes(self.shapes)
        where = [self.where.file, self.where.line, self.where.function]
        return json.dumps([dict(self.terms), where, shapes])

    @classmethod
    def decode(cls, content: bytes, rank: int) -> ArrivalMessage:
        """Return the message in JSON bytes that a rank sent.

        Args:
            content: The bytes.
            rank: The sender, for errors.

        Raises:
            NkwError: The bytes are no such message.
        """
        with _Reading(rank):
            terms, where, shapes = _parse_list(content, 3)
            file, line, function = _check_list(where, 3)
            if not isinstance(terms, dict):
                raise ValueError
            return cls(
                {_check_text(name): _check_text(value) for name, value in terms.items()},
                Location(_check_text(file), _check_integer(line, 0), _check_text(function)),
                [_parse_shape(shape) for shape in _check_list(shapes)],
            )


@dataclass(frozen=True)
class ArraysMessage:
    """Message with the shapes and dtypes of arrays, whose bytes follow the message, array after array."""

    shapes: Sequence[Shape]

    def encode(self) -> str:
        """Return the message as JSON text, which `decode` reads; the arrays' bytes are not in it.

        Raises:
            InvalidArgument: An array has a dtype that no other process can read.
        """
        return json.dumps(_encode_shapes(self.shapes))

    @classmethod
    def decode(cls, content: bytes, rank: int) -> ArraysMessage:
        """Return the message in JSON bytes that a rank sent.

        Args:
            content: The bytes of the message, without those of the arrays.
            rank: The sender, for errors.

        Raises:
            NkwError: The bytes are no such message.
        """
        with _Reading(rank):
            return cls([_parse_shape(shape) for shape in _check_list(json.loads(content))])

    def split(self, content: bytes, rank: int) -> list[np.ndarray]:
        """Return the arrays whose bytes follow the message, as read-only views of `content`'s bytes.

        Args:
            content: The bytes of all arrays.
            rank: The sender, for errors.

        Raises:
            NkwError: The number of bytes is not that of the arrays.
        """
        sizes = [prod(shape) * dtype.itemsize for shape, dtype in self.shapes]
        with _Reading(rank):
            if sum(sizes) != len(content):
                raise ValueError
        ends = accumulate(sizes)
        return [
            np.frombuffer(content[end - size : end], dtype).reshape(shape)
            for (shape, dtype), size, end in zip(self.shapes, sizes, ends)
        ]


class _Reading:
    """Context that turns ValueError and RecursionError, of reading a message from `rank`, into NkwError."""

    def __init__(self, rank: int) -> None:
        self._rank = rank

    def __enter__(self) -> None:
        return None

    def __exit__(self, error_type: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, (ValueError, RecursionError)):
            raise NkwError(
                "NKW-PROCESS-LOST",
                f"the message of rank {self._rank} cannot be read: start all ranks with the same release, and let no "
                "other program reach MASTER_PORT",
            ) from None


def _parse_list(content: bytes, length: int) -> list[Any]:
    """Return the JSON list of `length` elements in bytes. Raises ValueError for other bytes."""
    return _check_list(json.loads(content), length)


def _check_list(value: Any, length: int | None = None) -> list[Any]:
    """Return a value that is a list, of `length` elements unless that is None. Raises ValueError for another value."""
    if not isinstance(value, list) or length not in (None, len(value)):
        raise ValueError
    return value


def _check_text(value: Any) -> str:
    """Return a value that is a text, without control characters and cut in the middle to 2000 characters.

    Raises ValueError for another value.
    """
    if not isinstance(value, str):
        raise ValueError
    return shown(value, _LONGEST_TEXT)


def _check_integer(value: Any, least: int, most: int = 2**63 - 1) -> int:
    """Return a value that is an int from `least` to `most`. Raises ValueError for another value."""
    if type(value) is not int or not least <= value <= most:
        raise ValueError
    return value


def _check_arrival_key(value: Any) -> str:
    """Return a value that is the key of an arrival: a text that ends in a slash and a member's number.

    Raises ValueError for another value.
    """
    if not isinstance(value, str) or not re.search(r"/\d{1,9}\Z", value, re.ASCII):
        raise ValueError
    return value


def _parse_shape(value: Any) -> Shape:
    """Return the shape and dtype in a JSON pair (lengths, dtype's name). Raises ValueError for another value."""
    lengths, name = _check_list(value, 2)
    shape = tuple(_check_integer(length, 0) for length in _check_list(lengths))
    if not isinstance(name, str):
        raise ValueError
    if name in _EXTENSIONS:
        return shape, _EXTENSIONS[name]
    if not _NATIVE.fullmatch(name):
        raise ValueError
    try:
        return shape, np.dtype(name)
    except TypeError:
        raise ValueError from None


def _encode_shapes(shapes: Sequence[Shape]) -> list[Any]:
    """Return shapes and dtypes as JSON pairs. Raises InvalidArgument for a dtype that no other process can read."""
    return [[list(map(int, shape)), _encode_dtype(dtype)] for shape, dtype in shapes]


def _encode_dtype(dtype: np.dtype) -> str:
    """Return the name under which a message has a dtype. Raises InvalidArgument for a dtype with no such name."""
    if dtype.name in _EXTENSIONS:
        return dtype.name
    if not _NATIVE.fullmatch(dtype.str):
        raise InvalidArgument(
            "NKW-PROCESSES",
            f"an array of dtype {dtype} cannot be sent to another process; send numbers or texts",
        )
    return dtype.str
