"""Output files are claimed early and appear whole or not at all."""

from __future__ import annotations

import os

import pytest

from model.errors import ModelError
from model.output import OutputFile


def test_a_committed_file_takes_its_name(tmp_path) -> None:
    with OutputFile(tmp_path / "a.json") as file:
        file.temporary.write_text("new")
        assert not (tmp_path / "a.json").exists()
        file.commit()
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "new"


def test_without_commit_the_old_file_stays(tmp_path) -> None:
    (tmp_path / "a.json").write_text("old")
    with OutputFile(tmp_path / "a.json") as file:
        file.temporary.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_text() == "old"


def test_a_link_stays_a_link(tmp_path) -> None:
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with OutputFile(tmp_path / "link") as file:
        file.temporary.write_text("new")
        file.commit()
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_refuses_a_folder_that_is_missing_or_is_a_file(tmp_path) -> None:
    with pytest.raises(ModelError, match="cannot be written: No such file or directory"):
        OutputFile(tmp_path / "nowhere" / "a.json")
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot be written: Not a directory"):
        OutputFile(tmp_path / "file" / "a.json")


def test_refuses_what_is_not_a_regular_file(tmp_path) -> None:
    for path in (tmp_path, os.devnull):
        with pytest.raises(ModelError, match="cannot be written: it is not a regular file"):
            OutputFile(path)


def test_refuses_a_name_that_is_too_long(tmp_path) -> None:
    with pytest.raises(ModelError, match="cannot be written"):
        OutputFile(tmp_path / ("a" * 300))
