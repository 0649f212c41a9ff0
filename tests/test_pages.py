"""Claims about the pages: every link leads somewhere, and the front page knows its chapters."""
import re

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md"]
for folder in ("experiments", "weights"):
    PAGES += sorted((ROOT / folder).rglob("*.md"))

LINK = re.compile(
    r"\]\("  # after the text of the link: [the recipes](
    r"([^)#:]*)"  # a path from the page's folder, or nothing. One with a colon is on the web
    r"(?:#([^)]*))?\)"  # a heading of that page
)
# | [llama.py](llama.py) | a Llama: ... | 524 |
CHAPTER = re.compile(r"^\| \[(\w+\.py)\].*\| ([\d,]+) \|$", re.MULTILINE)


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page, which all differ: "## What
    LSA adds" is reached by #what-lsa-adds."""
    names = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        plain = re.sub(r"[^\w\- ]", "", heading.lower())
        names.add(plain.replace(" ", "-"))
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(page):
    for path, anchor in LINK.findall(page.read_text()):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text()), f"{path}#{anchor}"


def test_the_front_page_says_how_long_each_chapter_is():
    chapters = CHAPTER.findall((ROOT / "README.md").read_text())
    assert len(chapters) == 5
    for name, length in chapters:
        lines = (ROOT / name).read_text().splitlines()
        assert int(length.replace(",", "")) == len(lines), name
