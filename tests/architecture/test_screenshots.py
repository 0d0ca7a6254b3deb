"""The pictures of the pages: `make screenshots` makes them, the README shows two."""

import re

from tests.architecture.source import ROOT
from tests.browser.screenshots import FOLDER, MOST_BYTES, names

PNG = b"\x89PNG\r\n\x1a\n"


def test_every_page_has_its_pictures_and_no_other_one_lies_there() -> None:
    assert sorted(picture.name for picture in FOLDER.iterdir()) == names()
    assert all(picture.read_bytes().startswith(PNG) for picture in FOLDER.iterdir())
    assert sum(picture.stat().st_size for picture in FOLDER.iterdir()) < MOST_BYTES


def test_the_readme_shows_two_pages_and_every_picture_that_documents_show_exists() -> None:
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert len([picture for picture in shown if picture.startswith("docs/screenshots/")]) == 2
    for document in ("README.md", "docs/dashboard.md", "docs/desktop.md"):
        folder = (ROOT / document).parent
        pictures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", (ROOT / document).read_text(encoding="utf-8"))
        assert [picture for picture in pictures if not (folder / picture).is_file()] == []
