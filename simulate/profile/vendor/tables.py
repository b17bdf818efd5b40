"""Parquet tables of a profile, read in batches of rows.

A profile is a folder of files named after their tables. A large table is split across numbered files
(`DmaPacket_0`, `DmaPacket_1`, …). A table without rows has no file. Source: Neuron SDK documentation,
"Analyze Profile Output".
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
from simulate.profile.vendor.errors import Broken, make_pyarrow_error

MOST_ROWS = 20_000_000
"""Most rows of a table; at most the 16 bytes of an interval are stored for each."""
MOST_TEXTS = 1_000_000
"""Most distinct texts of a column, such as names of tensors, queues and lines."""
MOST_COLUMN_BYTES = 1 << 30
"""Most bytes of a column in a row group; a group of 20,000,000 times has 160 MB."""
_LONGEST_TEXT = 2_000
_BATCH_ROWS = 1 << 16
_BUFFER_BYTES = 1 << 20  # bytes of a column that are read at a time
_LATEST_NS = 1 << 61  # 73 years; a difference of two such times fits into 64 bits
_PARQUET = re.compile(r"(?P<table>[A-Za-z]+)(?:_(?P<part>[0-9]{1,9}))?\.parquet")

Batch = dict[str, NDArray[Any]]


class ColumnType(Enum):
    """Type as which a column is read: it decides the numpy dtype, and what replaces null."""

    time = "a time"
    """Integer ns from 0, without null."""
    integer = "whole numbers"
    """Sizes, counts and optional times; null is read as -1."""
    number = "numbers"
    """Floating-point numbers; null is read as NaN."""
    text = "text"
    """Numbers of texts in `Names`; null and empty are read as -1."""
    truth = "true or false"
    """Booleans; null is read as false."""


@dataclass
class Names:
    """Texts of columns, numbered in order of first appearance; `texts` has the text of each number."""

    texts: list[str] = field(default_factory=list)
    _numbers: dict[str, int] = field(default_factory=dict)

    def number(self, text: object) -> int:
        """Return the number of a text, a new one for a new text.

        -1 for an empty text and for values that are no text. Texts are cut to 2,000 characters before they
        are compared.

        Raises:
            Broken: If there are more than MOST_TEXTS texts.
        """
        if not isinstance(text, str) or not text:
            return -1
        short = text[:_LONGEST_TEXT]
        if short not in self._numbers:
            if len(self.texts) >= MOST_TEXTS:
                raise Broken(f"a column has more than {MOST_TEXTS:,} different texts")
            self._numbers[short] = len(self.texts)
            self.texts.append(short)
        return self._numbers[short]

    def get_text(self, number: int) -> str:
        """Return the text with a number; an empty string for -1."""
        return self.texts[number] if number >= 0 else ""


class Tables:
    """Parquet tables in the folder of a profile, by name. `notes` lists in sentences what was omitted, and why.

    `in` tells whether there is a table, `len` how many there are.
    """

    def __init__(self, folder: Path) -> None:
        paths_by_table: dict[str, list[tuple[int, Path]]] = {}
        for path in folder.iterdir():
            match = _PARQUET.fullmatch(path.name)
            if match:
                paths_by_table.setdefault(match["table"], []).append((int(match["part"] or -1), path))
        self._files = {
            name: [path for _, path in sorted(numbered_paths)]
            for name, numbered_paths in paths_by_table.items()
        }
        self.notes: list[str] = []

    def __contains__(self, table: str) -> bool:
        return table in self._files

    def __len__(self) -> int:
        return len(self._files)

    def count_rows(self, table: str) -> int:
        """Return the number of rows of a table in all of its files, 0 if it is absent.

        Raises:
            Broken: If a file cannot be read or has more than MOST_ROWS rows.
        """
        num_rows = 0
        for path in self._files.get(table, ()):
            with self._open_parquet(path, []) as parquet:
                num_rows += parquet.metadata.num_rows
        return num_rows

    def read_batches(
        self,
        table: str,
        needed: Mapping[str, ColumnType],
        optional: Mapping[str, ColumnType] | None = None,
        names: Names | None = None,
    ) -> Iterator[Batch]:
        """Yield the columns of a table, a batch of rows at a time.

        Args:
            needed: Types of columns without which a file of the table is left out, which a note says.
            optional: Types of further columns.
            names: Numbers the texts of text columns; needed to get the texts back.

        Yields:
            Arrays by column name. An optional column that is absent is filled with the replacement for null.
                Nothing is yielded if the table is absent.

        Raises:
            Broken: If a column has another type, or if the table has more than MOST_ROWS rows.
        """
        rows = 0
        for path in self._files.get(table, ()):
            for batch in self._read_file(path, table, needed, optional or {}, names or Names()):
                rows += len(next(iter(batch.values())))
                if rows > MOST_ROWS:
                    raise Broken(f"{table} has more than {MOST_ROWS:,} rows")
                yield batch

    def read_rows(
        self,
        table: str,
        needed: Mapping[str, ColumnType],
        optional: Mapping[str, ColumnType] | None = None,
        names: Names | None = None,
    ) -> Batch:
        """Return the columns of a whole table, as `read_batches` yields them, joined.

        Empty arrays if it yields nothing.
        """
        column_types = {**needed, **(optional or {})}
        batches = list(self.read_batches(table, needed, optional, names))
        return {
            name: np.concatenate([batch[name] for batch in batches])
            if batches
            else _make_null_column(column_type, 0)
            for name, column_type in column_types.items()
        }

    def _read_file(
        self,
        path: Path,
        table: str,
        needed: Mapping[str, ColumnType],
        optional: Mapping[str, ColumnType],
        names: Names,
    ) -> Iterator[Batch]:
        """Yield the columns of a file of a table, a batch of rows at a time; see `read_batches`.

        If the file lacks a needed column, a note says so, and nothing is yielded.
        """
        texts = [
            name for name, column_type in {**needed, **optional}.items() if column_type is ColumnType.text
        ]
        with self._open_parquet(path, texts) as parquet:
            columns = {column.name: column.type for column in parquet.schema_arrow}
            missing = [name for name in needed if name not in columns]
            if missing:
                self.notes.append(f"{table} is left out: it has no column {', '.join(missing)}")
                return
            column_types = {
                **needed,
                **{name: column_type for name, column_type in optional.items() if name in columns},
            }
            for name, column_type in column_types.items():
                if not _is_readable(columns[name], column_type):
                    raise Broken(
                        f"{table}.{name} is of type {_get_entry_type(columns[name])}, not {column_type.value}"
                    )
            _expect_bounded(parquet.metadata, column_types)
            absent = {name: column_type for name, column_type in optional.items() if name not in columns}
            for batch in parquet.iter_batches(_BATCH_ROWS, columns=list(column_types), use_threads=False):
                yield {
                    **{
                        name: _convert_column(f"{table}.{name}", batch[name], column_types[name], names)
                        for name in column_types
                    },
                    **{
                        name: _make_null_column(column_type, batch.num_rows)
                        for name, column_type in absent.items()
                    },
                }

    @contextmanager
    def _open_parquet(self, path: Path, texts: Sequence[str]) -> Iterator[Any]:
        """Open a Parquet file as a pyarrow ParquetFile for the duration of the context.

        Args:
            texts: Columns that keep their dictionaries, so that equal texts take memory once.

        Raises:
            Broken: With the name of the file, for every error of Arrow: ValueError, TypeError, KeyError,
                IndexError, OSError and NotImplementedError; also if the file has too many rows.
            InvalidArgument: If pyarrow is not installed.
        """
        try:
            import pyarrow.parquet
        except ImportError:
            raise make_pyarrow_error() from None
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
    """Raise Broken if one of the columns would unpack to more than MOST_COLUMN_BYTES in a row group.

    Args:
        metadata: Metadata of a Parquet file.
    """
    for group in range(metadata.num_row_groups):
        rows = metadata.row_group(group)
        for column in map(rows.column, range(rows.num_columns)):
            if column.path_in_schema in columns and column.total_uncompressed_size > MOST_COLUMN_BYTES:
                raise Broken(
                    f"{column.path_in_schema} has {column.total_uncompressed_size:,} bytes in one row group, more than "
                    f"{MOST_COLUMN_BYTES:,}"
                )


def _get_entry_type(arrow_type: Any) -> Any:
    """Return the Arrow type of a column's entries: the type of a dictionary's values, else the type itself."""
    from pyarrow import types

    return arrow_type.value_type if types.is_dictionary(arrow_type) else arrow_type


def _is_readable(arrow_type: Any, column_type: ColumnType) -> bool:
    """Return whether a column of an Arrow type can be read as a column type; a column of nulls always can."""
    from pyarrow import types

    arrow_type = _get_entry_type(arrow_type)
    if types.is_null(arrow_type):
        return True
    if column_type is ColumnType.text:
        return bool(types.is_string(arrow_type) or types.is_large_string(arrow_type))
    if column_type is ColumnType.truth:
        return bool(types.is_boolean(arrow_type))
    return bool(types.is_integer(arrow_type) or types.is_floating(arrow_type))


def _convert_column(column_name: str, column: Any, column_type: ColumnType, names: Names) -> NDArray[Any]:
    """Convert an Arrow column to a numpy array, with null replaced as `ColumnType` says.

    Args:
        column_name: TABLE.COLUMN, for messages.
        names: Numbers the texts of a text column.

    Raises:
        Broken: If a time is null, negative or too late, or if a size is out of range.
    """
    import pyarrow

    if pyarrow.types.is_null(column.type):
        null_array = _make_null_column(column_type, len(column))
        if column_type is ColumnType.time and len(column):
            raise Broken(f"{column_name} holds a null")
        return null_array
    if pyarrow.types.is_dictionary(column.type) and column_type is not ColumnType.text:
        column = column.dictionary_decode()
    if column_type is ColumnType.text:
        coded = column if pyarrow.types.is_dictionary(column.type) else column.dictionary_encode()
        text_numbers = np.array(
            [names.number(text) for text in coded.dictionary.to_pylist()] + [-1], np.int64
        )
        return text_numbers[coded.indices.fill_null(len(text_numbers) - 1).to_numpy(zero_copy_only=False)]
    if column_type is ColumnType.truth:
        return np.asarray(column.fill_null(False).to_numpy(zero_copy_only=False), bool)
    if column_type is ColumnType.number or pyarrow.types.is_floating(column.type):
        numbers_array = np.asarray(column.cast(pyarrow.float64(), safe=False).to_numpy(zero_copy_only=False))
        return (
            numbers_array
            if column_type is ColumnType.number
            else _round_column(column_name, numbers_array, column_type)
        )
    if column_type is ColumnType.time and column.null_count:
        raise Broken(f"{column_name} holds a null")
    integers = column.cast(pyarrow.int64()).fill_null(-1).to_numpy(zero_copy_only=False)
    return np.asarray(_expect_in_range(column_name, integers, column_type), np.int64)


def _round_column(
    column_name: str, numbers: NDArray[np.float64], column_type: ColumnType
) -> NDArray[np.int64]:
    """Return floating-point times or sizes rounded to integers; NaN of a size becomes -1.

    Raises:
        Broken: If a time is NaN, or an entry is out of range.
    """
    if column_type is ColumnType.integer:
        numbers = np.where(np.isnan(numbers), -1.0, numbers)
    return np.rint(_expect_in_range(column_name, numbers, column_type)).astype(np.int64)


def _expect_in_range(column_name: str, numbers: NDArray[Any], column_type: ColumnType) -> NDArray[Any]:
    """Return a column of times or sizes unchanged. Raises Broken if an entry is NaN or out of range."""
    lowest, quantity = (0, "time") if column_type is ColumnType.time else (-_LATEST_NS, "size")
    if not np.all((lowest <= numbers) & (numbers < _LATEST_NS)):
        raise Broken(f"{column_name} has an entry that is no {quantity}")
    return numbers


def _make_null_column(column_type: ColumnType, rows: int) -> NDArray[Any]:
    """Return a column of nulls, each replaced as `ColumnType` says: NaN, False or -1.

    Args:
        rows: Length of the column.
    """
    if column_type is ColumnType.number:
        return np.full(rows, np.nan)
    return np.zeros(rows, bool) if column_type is ColumnType.truth else np.full(rows, -1, np.int64)
