"""Parameter classes of a kernel: what the compiler generates for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import pytest

from nkw.errors import InvalidArgument
from simulate.memory import NKIObject


class Plain(NKIObject):
    rows = 4
    columns: int


@dataclass
class Fields(NKIObject):
    offset = None
    rows = 4
    columns: int
    names: list = field(default_factory=list)

    def size(self) -> int:
        return self.rows * self.columns

    @property
    def wide(self) -> bool:
        return self.columns > self.rows


def test_a_class_without_init_takes_its_plain_attributes_too() -> None:
    made = Plain(columns=3)
    assert (made.rows, made.columns) == (4, 3)
    assert Plain(rows=5).rows == 5 and Plain.rows == 4
    assert (Plain(3, 5).columns, Plain(3, 5).rows) == (3, 5)
    with pytest.raises(InvalidArgument, match="NKW-OBJECT"):
        Plain(1, 2, 3)


def test_a_dataclass_takes_attributes_without_annotation_too() -> None:
    made = Fields(7, rows=2, offset=1)
    assert (made.columns, made.rows, made.offset, made.names) == (7, 2, 1, [])
    assert made.size() == 14 and made.wide
    assert Fields(columns=7) == Fields(7, rows=4) != Fields(7, rows=5)
    with pytest.raises(TypeError, match="wide"):
        Fields(7, wide=True)


def test_a_field_without_a_value_is_none() -> None:
    @dataclass
    class Sizes(NKIObject):
        rows: int = 1
        columns: int
        shared: ClassVar[int]

    assert (Sizes().rows, Sizes().columns, Sizes(columns=2).columns) == (1, None, 2)
    assert not hasattr(Sizes, "shared")


def test_what_a_class_is_made_of_is_no_parameter() -> None:
    @dataclass
    class Shared(NKIObject):
        table = [1, 2]  # noqa: RUF012
        _hidden = 3
        rows: int = 1

    assert Shared().rows == 1 and Shared().table is Shared.table
    with pytest.raises(TypeError, match="table"):
        Shared(table=[])
    with pytest.raises(TypeError, match="_hidden"):
        Shared(_hidden=1)
