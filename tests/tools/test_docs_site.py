"""The documentation has one index, no dead link, and builds as a site."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tools.docs_site import ROOT, build, list_links, list_pages, read_navigation

PAGES = [path for path in list_pages(ROOT) if path.suffix == ".md"]
INDEX = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")


def find_headings(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page, flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_of_a_page_lead_to_files_and_headings(page: Path) -> None:
    for path, anchor in list_links(page.read_text(encoding="utf-8")):
        target = page.parent / path
        assert target.exists(), path
        if anchor and target.suffix == ".md":
            assert anchor[1:] in find_headings(target.read_text(encoding="utf-8")), path + anchor


def test_index_lists_every_page_of_docs_once() -> None:
    listed = [
        path
        for entry in read_navigation(INDEX)[1:]
        for links in entry.values()
        for link in links
        for path in link.values()
    ]
    pages = {page.relative_to(ROOT).as_posix() for page in PAGES if page.is_relative_to(ROOT / "docs")}
    children = {page for page in pages if page.startswith(("docs/instructions/", "docs/decisions/"))}
    assert sorted(listed) == sorted(set(listed))
    indexes = {"docs/instructions/README.md", "docs/decisions/README.md"}
    assert pages - children - {"docs/README.md"} | indexes == {
        path for path in listed if path.startswith("docs/")
    }


@pytest.mark.parametrize("folder", ["docs/instructions", "docs/decisions"])
def test_index_of_a_folder_lists_its_pages(folder: str) -> None:
    text = (ROOT / folder / "README.md").read_text(encoding="utf-8")
    names = {path.name for path in (ROOT / folder).glob("*.md")} - {"README.md"}
    assert {path for path, _ in list_links(text)} == names


def test_navigation_has_the_sections_of_the_index() -> None:
    index = "# Docs\n\n## How-to\n\n- [Tune](tune.md)\n- [Notes](../notes/README.md): all\n"
    assert read_navigation(index)[1:] == [
        {"How-to": [{"Tune": "docs/tune.md"}, {"Notes": "notes/README.md"}]}
    ]


@pytest.mark.deep
def test_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is an extra (docs)")
    build(tmp_path / "site")
    assert "NKI Workbench" in (tmp_path / "site" / "index.html").read_text(encoding="utf-8")
    assert (tmp_path / "site" / "docs" / "commands" / "index.html").is_file()


@pytest.mark.deep
@pytest.mark.parametrize(("target", "builds"), [("here.md", True), ("gone.md", False)])
def test_a_dead_link_fails_the_build(tmp_path: Path, target: str, builds: bool) -> None:
    pytest.importorskip("mkdocs", reason="mkdocs-material is an extra (docs)")
    docs = tmp_path / "root" / "docs"
    docs.mkdir(parents=True)
    (tmp_path / "root" / "README.md").write_text("# Home\n", encoding="utf-8")
    (docs / "README.md").write_text(
        f"# Docs\n\n## All\n\n- [Here](here.md)\n\n[link]({target})\n", encoding="utf-8"
    )
    (docs / "here.md").write_text("# Here\n", encoding="utf-8")
    if builds:
        build(tmp_path / "site", tmp_path / "root")
    else:
        with pytest.raises(subprocess.CalledProcessError):
            build(tmp_path / "site", tmp_path / "root")
