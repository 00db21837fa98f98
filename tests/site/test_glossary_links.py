"""Tests of the links to the glossary: a page links an unusual word where the word stands for the first time.

Only running prose counts: paragraphs, lists and the body of tables. Headings, heads of tables, code, formulas, pictures
and the texts of other links do not count. A snippet of the README that a page of the site includes has no link to the
glossary, because the path of such a link would be wrong on one of the two pages. So these snippets do not count either.
"""

from __future__ import annotations

import re
import sys

import pytest

from tests.site.test_docs import PAGES, ROOT, glossary_headings

pytest.importorskip("mkdocs")
pytest.importorskip("nbformat")
sys.path.insert(0, str(ROOT / "docs" / "hooks"))
try:
    import learn
    from glossary_links import DISTINCTIVE, GLOSSARY_LINK, INCLUDE, blank, first_uses, linked, with_snippets
finally:
    sys.path.pop(0)

SITE = [path for path in PAGES if path.is_relative_to(ROOT / "docs")]
READ = [
    path
    for path in PAGES
    if path.parent in (ROOT, ROOT / "docs", ROOT / "docs" / "use", ROOT / "docs" / "results")
    and path.name not in ("CHANGELOG.md", "changelog.md", "log.md", "glossary.md")
]
# Terms that are everyday words too. A page need not link them. If it does, the link must be at the first use.
COMMON = {
    "block": r"blocks?(?! tables?)",
    "row": r"rows?(?! blocks?)",
    "prefill": r"prefills?",
    "decode": r"decodes?",
    "context": r"contexts?",
    "step": r"steps?",
    "plan": r"plans?",
    "program": r"programs?",
    "weight": r"weights?",
    "prefetch": r"prefetch(?:es)?",
    "scale": r"scales?",
    "contract": r"contract",
}


def shared_snippets() -> set[str]:
    """Return the names of the README's snippets that pages of the site include."""
    return {name for path in SITE for name in INCLUDE.findall(path.read_text(encoding="utf-8"))}


def without_snippets(text: str) -> str:
    """Return the text of a page with spaces in place of the snippets of the README that the site includes."""
    for name in shared_snippets():
        text = re.sub(rf"^<!-- --8<-- \[start:{name}\].*?\[end:{name}\] -->$", blank, text, flags=re.M | re.S)
    return text


def test_terms_are_terms():
    """Look up the terms of both lists -> headings of the glossary; at least 15 pages are read, and each uses a term."""
    anchors = {re.sub(r"[^\w]+", "-", heading).strip("-") for heading in glossary_headings()}
    assert DISTINCTIVE.keys() | COMMON.keys() <= anchors and not DISTINCTIVE.keys() & COMMON.keys()
    assert len(READ) >= 15
    assert all(first_uses(path.read_text(encoding="utf-8"), DISTINCTIVE) for path in READ)


@pytest.mark.parametrize("path", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_first_use_is_linked(path):
    """Find the first use of each term of DISTINCTIVE in the prose of a page -> a link to the term."""
    uses = first_uses(without_snippets(path.read_text(encoding="utf-8")), DISTINCTIVE)
    assert not [f"{path.name}:{line}: {anchor}" for anchor, (line, linked) in uses.items() if not linked]


@pytest.mark.parametrize("path", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_late(path):
    """Find the first use of each term of COMMON that a page links -> the link is there, and not at a later use."""
    text = without_snippets(path.read_text(encoding="utf-8"))
    linked = {match[2] for match in GLOSSARY_LINK.finditer(text)}
    uses = first_uses(text, {anchor: pattern for anchor, pattern in COMMON.items() if anchor in linked})
    assert not [f"{path.name}:{line}: {anchor}" for anchor, (line, first) in uses.items() if not first]


@pytest.mark.parametrize("name", sorted(shared_snippets()))
def test_no_link_in_a_shared_snippet(name):
    """Read a snippet of the README that the site includes -> it has no relative link."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = text[text.index(f"[start:{name}]") : text.index(f"[end:{name}]")]
    assert not re.findall(r"\]\((?![a-z]+:)[^)]*\)", snippet)


@pytest.mark.parametrize("path", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_terms_of_a_notebook_are_linked(path):
    """Make the page of a notebook -> the first use of each term is linked; a second pass changes nothing."""
    page = linked(learn.page_of(path)[0], "../glossary.md")
    uses = first_uses(page, DISTINCTIVE)
    assert len(uses) >= 3 and all(link for _, link in uses.values()), uses
    assert linked(page, "../glossary.md") == page


def test_terms_of_the_home_page_are_linked():
    """Put the README's snippets into the home page -> they are there, and the first use of each term is linked."""
    readme, source = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/index.md"))
    page = linked(with_snippets(source, readme), "glossary.md")
    assert not INCLUDE.search(page) and "pip install -c constraints.txt" in page
    uses = first_uses(page, DISTINCTIVE)
    assert len(uses) > 8 and all(link for _, link in uses.values()), uses


def test_what_is_not_linked():
    """Link a term in code, formulas, headings, pictures, other links and prose -> only the use in prose is linked."""
    text = "# LSE\n\n`LSE` $LSE$ ![LSE](a.svg) [LSE](b.md) <svg><text>LSE</text></svg>\n\nThe *LSE* and the LSE.\n"
    assert linked(text, "g.md") == text.replace("*LSE*", "*[LSE](g.md#lse)*")


LINK = "[chunk](glossary.md#chunk)"


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"A {LINK} and a chunk.\n", (1, True)),
        (f"A chunk.\nThen a {LINK}.\n", (1, False)),  # planted fault: the link stands at the second use
        ("Two\nchunks.\n", (2, False)),  # planted fault: there is no link
        ("| a chunk |\n|---|\n| all chunks |\n", (3, False)),  # the head of a table does not count, its body does
        (f"# A chunk\n\n`chunk` ![chunk](a.svg) [a chunk](b.md) <!-- chunk -->\n\n{LINK}\n", (5, True)),
        ("```text\nchunk\n```\n\n- a [part of the\n  context](glossary.md#chunk), a chunk\n", (6, True)),
        ("<!-- --8<-- [start:what] -->\nA chunk.\n<!-- --8<-- [end:what] -->\nA chunk.\n", (4, False)),
    ],
)
def test_mistakes_are_found(text, wanted):
    """Find the first use of a term in a short text -> its line, and whether the link is there or before it."""
    assert first_uses(without_snippets(text), {"chunk": DISTINCTIVE["chunk"]}) == {"chunk": wanted}
