"""Files that reports write: complete or absent, and never in the place of something that is no file."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from simulate.errors import InvalidArgument
from simulate.files import claim, complete


def written(path: Path, text: str = "words") -> None:
    with complete(path, "trace", "NKW-TRACE-PATH") as file:
        file.write(text)


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    assert claim(path, "trace", "NKW-TRACE-PATH") == path
    with pytest.raises(ZeroDivisionError), complete(path, "trace", "NKW-TRACE-PATH") as file:
        file.write(str(1 // 0))
    assert path.read_text() == "before"
    written(path)
    assert path.read_text() == "words"
    assert [each.name for each in tmp_path.iterdir()] == ["file"]


def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # as /dev/null, which a rename would replace for everyone on the machine
    for attempt in (lambda: claim(pipe, "trace", "NKW-TRACE-PATH"), lambda: written(pipe)):
        with pytest.raises(InvalidArgument) as refused:
            attempt()
        assert refused.value.message == (f"the trace cannot be written to {pipe}: it is not a regular file")
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert [each.name for each in tmp_path.iterdir()] == ["pipe"]


def test_through_a_link_the_file_it_stands_for_is_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    link, pipe = tmp_path / "link", tmp_path / "pipe"
    link.symlink_to(tmp_path / "folder" / "file")
    written(link)
    assert link.is_symlink()
    assert (tmp_path / "folder" / "file").read_text() == "words"
    os.mkfifo(pipe)
    link.unlink()
    link.symlink_to(pipe)
    with pytest.raises(InvalidArgument):
        written(link)
