"""Memory maps as text and as SVG, and the command."""

from __future__ import annotations

import os
from pathlib import Path
from xml.etree import ElementTree

import nki.isa as nisa
import nki.language as nl
import numpy as np
import pytest

import nki_kernels
import simulate
from simulate.cli import main
from simulate.occupancy import occupancies, svg, text
from simulate.occupancy.command import group_equal_cores
from simulate.occupancy.grid import draw_grid
from tests.kernels.accuracy import normal
from tests.occupancy.kernels import nest

X = np.ones((128, 192), np.float32)
SVG = "{http://www.w3.org/2000/svg}"


def matmul_launch() -> simulate.Launch:
    with simulate.recorded(calls=True) as launches:
        arguments = normal(1, 300, 400), normal(2, 400, 600)
        simulate.World("trn1").launch(nki_kernels.matmul, [(arguments, {})])
    return launches[0]


def test_a_grid_shows_what_covers_most_of_a_cell_and_loses_nothing_small() -> None:
    picture = draw_grid([("A", 0, 4, 0, 50), ("B", 0, 4, 50, 51), ("C", 2, 3, 90, 100)], 4, 100, 4, 2)
    assert picture == ["BBCB", "AAAA"]
    assert draw_grid([], 4, 4, 3, 2) == ["...", "..."]


def test_a_grid_cell_without_a_rectangle_is_empty_up_to_the_edge() -> None:
    assert draw_grid([("A", 0, 50, 0, 1)], 100, 1, 10, 1) == ["AAAAA....."]
    assert draw_grid([("A", 0, 51, 0, 1)], 100, 1, 10, 1) == ["AAAAAA...."]
    assert draw_grid([("A", 99, 100, 0, 1)], 100, 1, 10, 1) == [".........A"]


def test_the_text_of_a_kernel_known_by_hand() -> None:
    with simulate.recorded(calls=True) as launches:
        simulate.World("trn1").launch(nest, [((X,), {})])
    (occupancy,) = occupancies(launches[0])
    shown = text(occupancy)
    assert "SBUF: fits, with 171,520 bytes to spare\n" in shown
    assert "  live         4,768 at most, 2.6 %, first at instruction 2\n" in shown
    assert "A scratch (128, 1000) float32  4,000      3     1  kernels:27\n" in shown
    assert "B kept (128, 128) float32 @      512      1     1  kernels:23\n" in shown
    assert "C tile (128, 64) float32         256      3     1  kernels:14 < kernels:26\n" in shown
    assert "  largest free size of B kept that fits beside the others: 43,008 float32\n" in shown
    assert "    for j in nl.static_range(2)    4,768  2.6 %      0  kernels:30\n" in shown
    assert "   0      3                2,048  54.5 %" in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_text_keeps_to_80_columns_and_is_the_same_twice() -> None:
    shown = [text(occupancies(matmul_launch())[0]) for _ in range(2)]
    assert shown[0] == shown[1]
    assert max(map(len, shown[0].splitlines())) <= 80


def test_an_unused_memory_is_said_to_be_unused() -> None:
    with simulate.recorded() as launches:
        ids = np.zeros((4, 1), np.int32)
        simulate.World("trn1").launch(nki_kernels.embedding, [((ids, normal(2, 3, 8)), {})])
    assert "PSUM: not used; 16,384 bytes per partition are usable" in text(occupancies(launches[0])[0])


def test_the_picture_stands_alone_and_has_every_tile_with_a_tooltip() -> None:
    launch = matmul_launch()
    (occupancy,) = occupancies(launch)
    picture = svg([("matmul", occupancy)])
    assert picture == svg([("matmul", occupancies(matmul_launch())[0])])
    root = ElementTree.fromstring(picture)
    assert not [
        node
        for node in root.iter()
        if "href" in "".join(node.attrib) or node.tag in (f"{SVG}image", f"{SVG}script")
    ]
    assert "url(" not in picture and "@import" not in picture
    titles = [node.text or "" for node in root.iter(f"{SVG}title")]
    for memory in occupancy.memories:
        for use in memory.uses:
            words = f"{memory.sources[use.source]}\nbytes {use.offset:,}:{use.end:,}"
            assert any(
                words in title and f"instructions {use.first_use} to {use.last_use}" in title
                for title in titles
            )
    width, height = float(root.attrib["width"]), float(root.attrib["height"])
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.attrib.get(name, 0)) for name in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width + 0.5 and 0 <= y <= y + h <= height + 0.5


@pytest.mark.parametrize(("partitions", "lanes"), [(128, 1), (65, 1), (64, 2), (33, 2), (32, 4)])
def test_tiles_side_by_side_are_not_drawn_over_each_other(partitions: int, lanes: int) -> None:
    def kernel(x):
        tiles = [nl.ndarray((partitions, 4_000), dtype=nl.float32) for _ in range(4)]
        for tile in tiles:
            nisa.dma_copy(dst=tile, src=x)
        for tile in tiles[1:]:
            nisa.tensor_tensor(dst=tiles[0], data1=tiles[0], data2=tile, op=nl.add)
        out = nl.ndarray((partitions, 4_000), dtype=nl.float32, buffer=nl.shared_hbm)
        nisa.dma_copy(dst=out, src=tiles[0])
        return out

    with simulate.recorded() as launches:
        simulate.World("trn2").launch(kernel, [((np.ones((partitions, 4_000), np.float32),), {})])
    root = ElementTree.fromstring(svg([("kernel", occupancies(launches[0])[0])]))
    field = next(box for box in root.iter(f"{SVG}rect") if box.get("class") == "field")
    right = float(field.attrib["x"]) + float(field.attrib["width"])
    tiles = [
        tuple(float(box.attrib[name]) for name in ("x", "y", "width", "height"))
        for box in root.iter(f"{SVG}rect")
        if box.get("class") == "tile"
        and box.find(f"{SVG}title") is not None
        and float(box.attrib["x"]) < right
    ]
    assert len(tiles) == 4
    for number, (x, y, width, height) in enumerate(tiles):
        for other_x, other_y, other_width, other_height in tiles[:number]:
            across = min(x + width, other_x + other_width) - max(x, other_x)
            up = min(y + height, other_y + other_height) - max(y, other_y)
            assert across <= 0.01 or up <= 0.01
    labels = [node.text or "" for node in root.iter(f"{SVG}text")]
    assert sum(words.startswith("partitions ") and " to " in words for words in labels) == (lanes > 1) * lanes


@pytest.mark.slow
def test_tiles_too_narrow_to_see_are_drawn_together() -> None:
    with simulate.recorded(calls=True) as launches:
        x = np.ones((128, 64 * 1200), np.float32)
        simulate.World("trn1").launch(nest, [((x, 1200, 600), {})], mode=simulate.Mode.dry)
    (occupancy,) = occupancies(launches[0])
    assert len(occupancy.sbuf.uses) == 2401
    picture = svg([("nest", occupancy)])
    assert picture.count("<rect") < 1500
    assert "tiles one after another" in picture


def test_launches_and_cores_that_are_alike_are_shown_once() -> None:
    with simulate.recorded(calls=True) as launches:
        for width in (1000, 1000, 1001):
            simulate.World("trn1", ranks=2).launch(nest, [((X, 3, width), {})] * 2)
    assert [title for title, _ in group_equal_cores(launches)] == [
        "nest #0 on trn1 and 3 equal to it",
        "nest #2 on trn1 and 1 equal to it",
    ]


SCRIPT = """import nki, nki.isa as nisa, nki.language as nl, numpy as np

@nki.jit
def kernel(x):
    out = nl.ndarray(x.shape, dtype=x.dtype, buffer=nl.shared_hbm)
    tile = nl.load(x)
    row = nl.ndarray((128, {columns}), dtype=nl.float32, buffer=nl.sbuf)
    nisa.memset(dst=row, value=0.0)
    nisa.tensor_tensor(dst=tile, data1=tile, data2=row[:, 0:4], op=nl.add)
    nisa.dma_copy(dst=out, src=tile)
    return out

kernel(np.ones((128, 4), np.float32))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NEURON_PLATFORM_TARGET_OVERRIDE", raising=False)
    monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", "trn1")
    return tmp_path


@pytest.mark.parametrize(("columns", "status", "words"), [
    (45051, 0, "SBUF: fits, with 4 bytes to spare"),
    (45052, 0, "SBUF: fits, with 0 bytes to spare"),
    (45053, 1, "SBUF: does not fit: the live bytes exceed the usable ones by 4"),
])  # fmt: skip
def test_the_command_says_what_fits_also_of_a_refused_launch(
    folder: Path, capsys: pytest.CaptureFixture[str], columns: int, status: int, words: str
) -> None:
    (folder / "script.py").write_text(SCRIPT.format(columns=columns))
    assert main(["memory", "script.py"]) == status
    out, err = capsys.readouterr()
    assert words in out
    assert ("NKW-CAPACITY" in err) == (status == 1)


def test_the_command_writes_a_picture(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text(SCRIPT.format(columns=8))
    assert main(["memory", "--svg", "map.svg", "script.py"]) == 0
    assert capsys.readouterr().out == "picture: map.svg\n"
    ElementTree.parse(folder / "map.svg")
    assert main(["memory", "--svg", "map.svg", "--text", "script.py"]) == 0
    assert "SBUF: fits" in capsys.readouterr().out


def test_the_command_refuses_what_it_cannot_do(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "script.py").write_text(SCRIPT.format(columns=8))
    (folder / "empty.py").write_text("")
    assert main(["memory", "empty.py"]) == 2
    assert "error: no kernel was launched" in capsys.readouterr().err
    assert main(["memory", "missing.py"]) == 2
    assert "error: missing.py is not a file" in capsys.readouterr().err
    assert main(["memory", "--svg", "no/such/map.svg", "script.py"]) == 2
    wrong = "error: [NKW-PICTURE-PATH] the picture cannot be written to no/such/map.svg: No such file or directory\n"
    assert capsys.readouterr().err == wrong


@pytest.mark.parametrize("run", ["script.py", "script.py:kernel"])
def test_a_picture_does_not_take_the_place_of_the_script(
    folder: Path, capsys: pytest.CaptureFixture[str], run: str
) -> None:
    (folder / "script.py").write_text(SCRIPT.format(columns=8))
    os.link(folder / "script.py", folder / "other.svg")
    for name in ("script.py", "other.svg"):
        assert main(["memory", "--svg", name, run]) == 2
        wrong = f"[NKW-PICTURE-PATH] the picture cannot be written to {name}: this command reads that file"
        assert capsys.readouterr().err == f"error: {wrong}\n"
    assert (folder / "script.py").read_text() == SCRIPT.format(columns=8)
