"""The Parquet tables of a profile, read a batch at a time.

A profile is a folder of files named after their tables; a large table is split across numbered ones (`DmaPacket_0`,
`DmaPacket_1`, …). A table without rows is not written. Source: Neuron SDK documentation, "Analyze Profile Output".
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from nkw.files import opened
from simulate.profile.vendor.errors import Broken, pyarrow_missing

MOST_ROWS = 20_000_000
"""Of one table; what is kept of a row is at most the 16 bytes of an interval."""
MOST_TEXTS = 1_000_000
"""Different texts in one column: names of tensors, queues and lines."""
MOST_COLUMN_BYTES = 1 << 30
"""Of one column in one row group; a group of 20,000,000 times has 160 MB."""
_LONGEST_TEXT = 2_000
_BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 1 << 20  # of a column that is read at one time
_LATEST_NS = 1 << 61  # 73 years; differences of such times fit into 64 bits
_PARQUET = re.compile(r"(?P<table>[A-Za-z]+)(?:_(?P<part>[0-9]{1,9}))?\.parquet")

Batch = dict[str, NDArray[Any]]


class Kind(Enum):
    """What the values of a column are; the type of a column that is read is checked against it."""

    time = "a time"
    """Whole ns from 0; no null."""
    whole = "whole numbers"
    """Sizes, counts and times that may be missing; null counts as -1."""
    number = "numbers"
    """Null counts as NaN."""
    text = "text"
    """Numbers of texts in `Names`; null and empty count as -1."""
    truth = "true or false"
    """Null counts as false."""


@dataclass
class Names:
    """Texts of columns by the order in which they were seen."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: object) -> int:
        """The number of a text, -1 for an empty one. Raises Broken where there are too many."""
        if not isinstance(text, str) or not text:
            return -1
        short = text[:_LONGEST_TEXT]
        if short not in self._numbers:
            if len(self.texts) >= MOST_TEXTS:
                raise Broken(f"a column has more than {MOST_TEXTS:,} different texts")
            self._numbers[short] = len(self.texts)
            self.texts.append(short)
        return self._numbers[short]

    def of(self, number: int) -> str:
        """The text of a number; empty for -1."""
        return self.texts[number] if number >= 0 else ""


class Tables:
    """The tables of one profile; `notes` says what was left out."""

    def __init__(self, folder: Path) -> None:
        found: dict[str, list[tuple[int, Path]]] = {}
        for path in folder.iterdir():
            named = _PARQUET.fullmatch(path.name)
            if named:
                found.setdefault(named["table"], []).append((int(named["part"] or -1), path))
        self._files = {name: [path for _, path in sorted(parts)] for name, parts in found.items()}
        self.notes: list[str] = []

    def __contains__(self, table: str) -> bool:
        return table in self._files

    def __len__(self) -> int:
        return len(self._files)

    def count(self, table: str) -> int:
        """The rows of a table."""
        total = 0
        for path in self._files.get(table, ()):
            with self._opened(path, []) as parquet:
                total += parquet.metadata.num_rows
        return total

    def batches(
        self,
        table: str,
        needed: Mapping[str, Kind],
        optional: Mapping[str, Kind] | None = None,
        names: Names | None = None,
    ) -> Iterator[Batch]:
        """The columns of a table, some rows at a time; an optional column that is absent has the value of null.

        Nothing where the profile has no such table, or where it lacks a needed column, which is noted: schemas change
        from release to release. Raises Broken for a column of another type and for too many rows.
        """
        rows = 0
        for path in self._files.get(table, ()):
            for batch in self._file(path, table, needed, optional or {}, names or Names()):
                rows += len(next(iter(batch.values())))
                if rows > MOST_ROWS:
                    raise Broken(f"{table} has more than {MOST_ROWS:,} rows")
                yield batch

    def rows(
        self,
        table: str,
        needed: Mapping[str, Kind],
        optional: Mapping[str, Kind] | None = None,
        names: Names | None = None,
    ) -> Batch:
        """The columns of a whole table; empty where `batches` gives nothing."""
        kinds = {**needed, **(optional or {})}
        parts = list(self.batches(table, needed, optional, names))
        return {
            name: np.concatenate([part[name] for part in parts]) if parts else _absent(kind, 0)
            for name, kind in kinds.items()
        }

    def _file(
        self, path: Path, table: str, needed: Mapping[str, Kind], optional: Mapping[str, Kind], names: Names
    ) -> Iterator[Batch]:
        texts = [name for name, kind in {**needed, **optional}.items() if kind is Kind.text]
        with self._opened(path, texts) as parquet:
            columns = {each.name: each.type for each in parquet.schema_arrow}
            missing = [name for name in needed if name not in columns]
            if missing:
                self.notes.append(f"{table} is left out: it has no column {', '.join(missing)}")
                return
            kinds = {**needed, **{name: kind for name, kind in optional.items() if name in columns}}
            for name, kind in kinds.items():
                if not _fits(columns[name], kind):
                    raise Broken(f"{table}.{name} is of type {_plain(columns[name])}, not {kind.value}")
            _expect_bounded(parquet.metadata, kinds)
            absent = {name: kind for name, kind in optional.items() if name not in columns}
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=list(kinds), use_threads=False):
                yield {
                    **{name: _values(f"{table}.{name}", batch[name], kinds[name], names) for name in kinds},
                    **{name: _absent(kind, batch.num_rows) for name, kind in absent.items()},
                }

    @contextmanager
    def _opened(self, path: Path, texts: Sequence[str]) -> Iterator[Any]:
        """A file, whose columns `texts` keep their dictionaries; equal texts take memory once.

        Raises Broken, which names the file, for all that Arrow refuses: its errors are ValueError, TypeError, KeyError,
        IndexError, OSError and NotImplementedError.
        """
        try:
            import pyarrow.parquet
        except ImportError:
            raise pyarrow_missing() from None
        try:
            with opened(path) as file:
                metadata = pyarrow.parquet.read_metadata(file)
                if metadata.num_rows > MOST_ROWS:
                    raise Broken(f"{path.name} has {metadata.num_rows:,} rows, more than {MOST_ROWS:,}")
                coded = [name for name in texts if name in metadata.schema.names]
                with pyarrow.parquet.ParquetFile(
                    file,
                    metadata=metadata,
                    read_dictionary=coded,
                    buffer_size=_BUFFER_BYTES,
                    pre_buffer=False,
                ) as parquet:
                    yield parquet
        except (Broken, UnicodeDecodeError):
            raise
        except (ValueError, TypeError, LookupError, ArithmeticError, OSError, NotImplementedError) as error:
            raise Broken(f"{path.name} cannot be read: {error}") from None


def _expect_bounded(metadata: Any, columns: Collection[str]) -> None:
    """Refuse a column of which a row group unpacks to more than memory should hold at one time."""
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group)
        for column in map(rows.column, range(rows.num_columns)):
            if column.path_in_schema in columns and column.total_uncompressed_size > MOST_COLUMN_BYTES:
                raise Broken(
                    f"{column.path_in_schema} has {column.total_uncompressed_size:,} bytes in one row group, more than "
                    f"{MOST_COLUMN_BYTES:,}"
                )


def _plain(found: Any) -> Any:
    """The type of a column's values, which a dictionary may hold."""
    from pyarrow import types

    return found.value_type if types.is_dictionary(found) else found


def _fits(found: Any, kind: Kind) -> bool:
    from pyarrow import types

    found = _plain(found)
    if types.is_null(found):
        return True
    if kind is Kind.text:
        return bool(types.is_string(found) or types.is_large_string(found))
    if kind is Kind.truth:
        return bool(types.is_boolean(found))
    return bool(types.is_integer(found) or types.is_floating(found))


def _values(what: str, column: Any, kind: Kind, names: Names) -> NDArray[Any]:
    import pyarrow

    if pyarrow.types.is_null(column.type):
        values = _absent(kind, len(column))
        if kind is Kind.time and len(column):
            raise Broken(f"{what} holds a null")
        return values
    if pyarrow.types.is_dictionary(column.type) and kind is not Kind.text:
        column = column.dictionary_decode()
    if kind is Kind.text:
        coded = column if pyarrow.types.is_dictionary(column.type) else column.dictionary_encode()
        numbers = np.array([names.number(each) for each in coded.dictionary.to_pylist()] + [-1], np.int64)
        return numbers[coded.indices.fill_null(len(numbers) - 1).to_numpy(zero_copy_only=False)]
    if kind is Kind.truth:
        return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), bool)
    if kind is Kind.number or pyarrow.types.is_floating(column.type):
        found = np.asarray(column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False))
        return found if kind is Kind.number else _rounded(what, found, kind)
    if kind is Kind.time and column.null_count:
        raise Broken(f"{what} holds a null")
    whole = column.cast(pyarrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    return np.asarray(_checked(what, whole, kind), np.int64)


def _rounded(what: str, found: NDArray[np.float64], kind: Kind) -> NDArray[np.int64]:
    if kind is Kind.whole:
        found = np.where(np.isnan(found), -1.0, found)
    return np.rint(_checked(what, found, kind)).astype(np.int64)


def _checked(what: str, found: NDArray[Any], kind: Kind) -> NDArray[Any]:
    lowest, called = (0, "time") if kind is Kind.time else (-_LATEST_NS, "size")
    if not np.all((lowest <= found) & (found < _LATEST_NS)):
        raise Broken(f"{what} holds a value that is no {called}")
    return found


def _absent(kind: Kind, rows: int) -> NDArray[Any]:
    if kind is Kind.number:
        return np.full(rows, np.nan)
    return np.zeros(rows, bool) if kind is Kind.truth else np.full(rows, -1, np.int64)
