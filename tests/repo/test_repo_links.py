"""Links in the documents lead somewhere."""

import re
from pathlib import Path
from urllib.parse import unquote

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "tests").rglob("*.md")])
LINK = re.compile(r"\[(?:[^\]\[]|\[[^\]]*\])*\]\(([^)\s]+)\)|^\[[^\]]+\]: (\S+)$", re.MULTILINE)
HEADING = re.compile(r"^#+ (.+?)\s*$", re.MULTILINE)
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def text_of(path: Path) -> str:
    """The page without its fenced blocks."""
    return FENCE.sub("", path.read_text())


def anchors(path: Path) -> set[str]:
    """Anchors of the headings, made as GitHub makes them."""
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in HEADING.findall(text_of(path)))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def dead(path: Path) -> list[str]:
    found = []
    for groups in LINK.findall(text_of(path)):
        link = groups[0] or groups[1]
        if re.match(r"https?://|mailto:", link):
            continue
        name, _, anchor = unquote(link).partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists() or not target.is_relative_to(ROOT) or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    assert dead(path) == []


def test_a_dead_link_is_found(tmp_path, monkeypatch):
    monkeypatch.setattr("test_repo_links.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two` (three)\n\n[a](#one-two-three) [b](page.md) [c](none.md) [d](#two)\n```\n[e](no)\n```\n"
    )
    assert dead(page) == ["none.md", "#two"]


def test_each_page_can_be_reached_from_readme():
    reached, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page in reached or page.suffix != ".md" or not page.exists():
            continue
        reached.add(page)
        links = [a or b for a, b in LINK.findall(text_of(page)) if not re.match("https?://", a or b)]
        todo += [(page.parent / link.partition("#")[0]).resolve() for link in links if link[:1] != "#"]
    assert set((ROOT / "docs").rglob("*.md")) - reached == set()
