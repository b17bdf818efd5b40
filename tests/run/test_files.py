"""Files from outside, and files that commands write: complete or absent, and never in the place of an input."""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Iterable
from pathlib import Path

import pytest

from nkw.errors import InvalidArgument
from nkw.files import Outputs, complete, opened, read_text


def written(path: Path, text: str = "words") -> None:
    with complete(path, "trace", "NKW-TRACE-PATH") as file:
        file.write(text)


def refusal(path: Path | str, inputs: Iterable[Path] = ()) -> str:
    with pytest.raises(InvalidArgument) as refused:
        Outputs(lambda: inputs).claim(path, "trace", "NKW-TRACE-PATH")
    assert refused.value.code == "NKW-TRACE-PATH"
    return refused.value.message.removeprefix(f"the trace cannot be written to {path}: ")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_replaced_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("before")
    claimed = Outputs(list).claim(path, "trace", "NKW-TRACE-PATH")
    assert claimed is not None
    assert names(tmp_path) == ["file"]  # whatever ends the process now leaves nothing behind
    with pytest.raises(ZeroDivisionError), claimed.writing() as file:
        file.write(str(1 // 0))
    assert path.read_text() == "before"
    with claimed.writing() as file:
        file.write("words")
        assert path.read_text() == "before"
    assert path.read_text() == "words"
    assert names(tmp_path) == ["file"]


def test_the_rest_of_a_killed_process_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / f".file.{os.getpid()}.part").write_text("rest")
    written(tmp_path / "file")
    assert names(tmp_path) == ["file"]


def killed_while_writing(path: Path) -> None:
    """Write half of a file in a process that SIGKILL ends."""
    child = os.fork()
    if child == 0:
        with complete(path, "trace", "NKW-TRACE-PATH") as file:
            file.write("half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL


@pytest.mark.skipif(
    not hasattr(os, "O_TMPFILE"), reason="files have no names before they are complete on Linux"
)
def test_a_killed_process_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "file"
    killed_while_writing(path)
    assert names(tmp_path) == []
    written(path, "before")
    killed_while_writing(path)
    assert names(tmp_path) == ["file"]
    assert path.read_text() == "before"


def test_a_file_system_without_unnamed_files_is_written_as_well(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    path = tmp_path / "file"
    for text in ("before", "words"):
        with complete(path, "trace", "NKW-TRACE-PATH") as file:
            file.write(text)
            assert f".file.{os.getpid()}.part" in names(tmp_path)
        assert path.read_text() == text
        assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("named", [False, True])
def test_a_new_file_has_the_permissions_that_the_process_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    if named:
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    before = os.umask(0o027)
    try:
        written(tmp_path / "file")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == 0o640


def test_no_path_is_no_output() -> None:
    assert Outputs(list).claim(None, "trace", "NKW-TRACE-PATH") is None


@pytest.mark.parametrize("name", ["input", "soft", "hard", "folder/../input", "folder/soft"])
def test_an_input_is_replaced_under_none_of_its_names(tmp_path: Path, name: str) -> None:
    path = tmp_path / "input"
    path.write_text("weights")
    (tmp_path / "folder").mkdir()
    for link in (tmp_path / "soft", tmp_path / "folder" / "soft"):
        link.symlink_to(path)
    os.link(path, tmp_path / "hard")
    assert refusal(tmp_path / name, [path]) == "this command reads that file"
    assert path.read_text() == "weights"
    (tmp_path / "other").write_text("weights")
    assert Outputs(lambda: [path]).claim(tmp_path / "other", "trace", "NKW-TRACE-PATH") is not None


def test_an_input_that_is_read_after_the_claim_is_kept_as_well(tmp_path: Path) -> None:
    path, inputs = tmp_path / "file", list[Path]()
    path.write_text("before")
    claimed = Outputs(lambda: inputs).claim(path, "trace", "NKW-TRACE-PATH")
    assert claimed is not None

    def write() -> None:
        with claimed.writing() as file:
            file.write("words")
            inputs.append(path)

    with pytest.raises(InvalidArgument, match="this command reads that file"):
        write()
    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


def test_two_outputs_are_two_files(tmp_path: Path) -> None:
    outputs = Outputs(list)
    outputs.claim(tmp_path / "file", "trace", "NKW-TRACE-PATH")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    with pytest.raises(InvalidArgument, match="link: it is the file of the trace"):
        outputs.claim(tmp_path / "link", "page", "NKW-PAGE-PATH")
    assert outputs.claim(tmp_path / "page", "page", "NKW-PAGE-PATH") is not None


def test_what_is_no_regular_file_stays_what_it_is(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)  # as /dev/null, which a rename would replace for everyone on the machine
    assert refusal(pipe) == "it is not a regular file"
    with pytest.raises(InvalidArgument):
        written(pipe)
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["pipe"]
    assert refusal(tmp_path) == "it is a folder"


def test_refuses_a_folder_that_is_missing_and_a_name_that_is_too_long(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere" / "file") == "No such file or directory"
    (tmp_path / "file").write_text("")
    assert refusal(tmp_path / "file" / "file") == "Not a directory"
    assert refusal(tmp_path / ("a" * 300)) == "File name too long"


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


def test_what_has_no_end_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("/dev/zero")
    for path in (tmp_path / "pipe", tmp_path / "link", tmp_path):
        with pytest.raises(OSError, match="it is not a regular file"):
            opened(path)
    with pytest.raises(FileNotFoundError):
        opened(tmp_path / "nowhere")
    with pytest.raises(OSError, match="null character"):
        opened("a\0b")


def test_a_text_is_read_up_to_its_longest(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for size in (9, 10):
        path.write_text("x" * size)
        assert read_text(path, 10) == "x" * size
    path.write_text("x" * 11)
    with pytest.raises(OSError, match="more than 10 bytes") as refused:
        read_text(path, 10)
    assert refused.value.errno == errno.EFBIG
