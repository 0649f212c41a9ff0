"""Claims about the pages: every link leads somewhere, and the front page knows its files."""
import re

import pytest
from conftest import ROOT

PAGES = [ROOT / "README.md"]
for folder in ("experiments", "weights"):
    PAGES += sorted((ROOT / folder).rglob("*.md"))
BAR = "# --- The method ends here"


def anchors(text: str) -> set[str]:
    """The names that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_within_the_repository_leads_somewhere(page):
    text = page.read_text()
    for path, anchor in re.findall(r"\]\(([^)#:]*)(?:#([^)]*))?\)", text):
        target = page.parent / path if path else page
        assert target.exists(), path
        if anchor:
            assert anchor in anchors(target.read_text()), f"{path}#{anchor}"


def test_the_front_page_says_how_long_each_script_is_and_where_the_method_ends():
    rows = re.findall(r"^\| \[(\w+\.py)\].*\| ([\d,]+) \((?:the link: )?(\d+)\) \|$",
                      (ROOT / "README.md").read_text(), re.MULTILINE)
    assert len(rows) == 5
    for name, lines, method in rows:
        text = (ROOT / name).read_text().splitlines()
        assert int(lines.replace(",", "")) == len(text), name
        if name == "netsim.py":
            begin = text.index("# --- The link ---")
            end = text.index("# --- The client's channel ---")
            assert int(method) == end - begin, name
        else:
            end = next(i for i, line in enumerate(text) if line.startswith(BAR))
            assert int(method) == end, name
