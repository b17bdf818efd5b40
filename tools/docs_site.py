"""Builds the documentation as a site with mkdocs-material (extra `docs`); a dead link fails the build.

Pages are copied with the folders of the repository, so that their links hold, and the files that they link to. The
sections of docs/README.md become the navigation.

    python -m tools.docs_site [FOLDER]
"""

from __future__ import annotations

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "build" / "site"

_PATTERNS = (
    "*.md",
    "*/README.md",
    "benchmarks/*/README.md",
    "docs/**/*.md",
    "docs/images/*",
    "notebooks/*.ipynb",
)
_LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def list_pages(root: Path) -> list[Path]:
    """Return the pages of the site and their pictures."""
    pages = {path for pattern in _PATTERNS for path in root.glob(pattern)}
    return sorted(
        path for path in pages if not path.relative_to(root).parts[0].startswith((".", "build", "dist"))
    )


def list_links(page: str) -> list[tuple[str, str]]:
    """Return the (path, anchor) of each link of a page into the repository."""
    return [(match[1], match[2] or "") for match in _LINK.finditer(page)]


def read_navigation(index: str) -> list[dict[str, Any]]:
    """Return the navigation of mkdocs: the sections of docs/README.md, and the pages that their lists link to."""
    navigation: list[dict[str, Any]] = [{"Home": "README.md"}]
    for section in index.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        links = re.findall(r"^- \[([^\]]+)\]\(([^)#]+)\)", text, re.MULTILINE)
        navigation.append({title: [{name: posixpath.normpath(f"docs/{path}")} for name, path in links]})
    return navigation


def _copy_pages(root: Path, folder: Path) -> None:
    """Copy the pages of a repository, and the files that they link to, into a folder."""
    for page in list_pages(root):
        linked = list_links(page.read_text(encoding="utf-8")) if page.suffix == ".md" else []
        for path in [page, *((page.parent / path).resolve() for path, _ in linked)]:
            target = folder / path.relative_to(root)
            if path.is_file() and not target.exists():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)


def build(site: Path, root: Path = ROOT) -> None:
    """Build the site of a repository into a folder.

    Raises:
        subprocess.CalledProcessError: mkdocs is not installed, or it warned, for example about a dead link.
    """
    with tempfile.TemporaryDirectory() as name:
        pages = Path(name) / "pages"
        _copy_pages(root, pages)
        configuration = {
            "site_name": "NKI Workbench",
            "docs_dir": str(pages),
            "site_dir": str(site.resolve()),
            "theme": {
                "name": "material",
                "font": False,
                "features": ["navigation.sections", "navigation.top"],
            },
            "markdown_extensions": ["tables", "toc", "pymdownx.highlight", "pymdownx.superfences"],
            "plugins": ["search"],
            "nav": read_navigation((root / "docs" / "README.md").read_text(encoding="utf-8")),
            "validation": {"nav": {"omitted_files": "ignore"}, "links": {"anchors": "warn"}},
        }
        file = Path(name) / "mkdocs.yml"
        file.write_text(json.dumps(configuration), encoding="utf-8")
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(file)]
        subprocess.run(command, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})


if __name__ == "__main__":
    build(Path(sys.argv[1]) if len(sys.argv) > 1 else SITE)
