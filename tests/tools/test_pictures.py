"""The pictures of README.md are what the simulator predicts today."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest

from tools.pictures import FOLDER, draw_all, write


@pytest.fixture(scope="module")
def pictures() -> dict[str, str]:
    return draw_all()


def test_pictures_are_up_to_date(pictures: dict[str, str]) -> None:
    stored = {path.name: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    assert stored == pictures, "run `make docs`"


def test_readme_shows_every_picture(pictures: dict[str, str]) -> None:
    readme = (FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    assert all(f"docs/images/{name}" in readme for name in pictures)


def test_a_picture_is_a_document_whose_elements_are_inside(pictures: dict[str, str]) -> None:
    for picture in pictures.values():
        root = ElementTree.fromstring(picture)
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for element in root.iter("{http://www.w3.org/2000/svg}rect"):
            right = float(element.get("x", 0)) + float(element.attrib["width"])
            bottom = float(element.get("y", 0)) + float(element.attrib["height"])
            assert right <= width + 0.1 and bottom <= height


def test_pictures_are_written_into_a_folder(tmp_path: Path, pictures: dict[str, str]) -> None:
    write(tmp_path / "images")
    assert {path.name for path in (tmp_path / "images").iterdir()} == set(pictures)
