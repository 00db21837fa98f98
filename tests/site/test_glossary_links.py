"""Tests of the links to the glossary: a page links an unusual word where the word stands for the first time.

Only running prose counts: paragraphs, lists and the body of tables. Headings, heads of tables, code, formulas, pictures
and the texts of other links do not count. A snippet of the README that a page of the site includes has no link to the
glossary, because the path of such a link would be wrong on one of the two pages. So these snippets do not count either.
"""

from __future__ import annotations

import re

import pytest

from tests.site.test_docs import PAGES, ROOT, glossary_headings

SITE = [path for path in PAGES if path.is_relative_to(ROOT / "docs")]
READ = [
    path
    for path in PAGES
    if path.parent in (ROOT, ROOT / "docs", ROOT / "docs" / "use", ROOT / "docs" / "results")
    and path.name not in ("CHANGELOG.md", "changelog.md", "log.md", "glossary.md")
]
INCLUDE = re.compile(r'^--8<-- "README\.md:(\w+)"$', re.MULTILINE)
GLOSSARY_LINK = re.compile(r"\[([^\[\]]*)\]\([\w./-]*glossary\.md#([^)]+)\)")

# A key is the anchor of a term that is no everyday word; every page that uses the term must link it. The value is a
# pattern for the term in prose.
DISTINCTIVE = {
    "latent": r"(?<!head\s)latents?",
    "cache-entry": r"cache entr(?:y|ies)",
    "cache-format": r"cache formats?",
    "e4m3": r"e4m3",
    "calibration": r"calibrations?",
    "absorbed-path": r"absorbed",
    "expanded-path": r"expanded path|expanded prefill|absorbed and (?:the )?expanded",
    "attention-state": r"attention states?",
    "lse": r"LSE",
    "block-table": r"block tables?",
    "slot": r"slots?",
    "chunk": r"chunks?",
    "chunked-local-attention": r"chunked local attention",
    "padding-row": r"padding rows?",
    "padding-token": r"padding tokens?",
    "cascade": r"cascades?",
    "row-block": r"row blocks?",
    "tile": r"tiles?",
    "split": r"(?<!-)splits?(?! into)",
    "work-item": r"work items?",
    "kept-state": r"kept states?",
    "schedule": r"schedules?",
    "batch-invariant": r"batch[- ]invarian(?:t|ce)",
    "partial-output": r"partial outputs?",
    "partial-lse": r"partial LSE",
    "partial-index": r"partial ind(?:ex|ices)",
    "combine": r"combine[sd]?",
    "merge": r"(?<!not\s)merge[sd]?",
    "reference-score": r"reference scores?",
    "column-block": r"column blocks?",
    "producer": r"producers?",
    "op": r"ops?",
    "launcher": r"launchers?",
    "backend": r"backends?",
    "portable-triton": r"portable Triton",
    "decode-context-parallelism": r"decode context parallelism|DCP",
    "rank-local-tokens": r"rank-local",
    "owner-rank": r"owner ranks?",
    "attention-family": r"attention famil(?:y|ies)",
    "twin": r"(?<!-)twins?",
    "main-job": r"main job",
    "gold-low-budget": r"budgets?|gold",
}
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


def blank(match: re.Match) -> str:
    """Return the matched text with spaces instead of its characters; line breaks stay."""
    return re.sub(r"[^\n]", " ", match[0])


def prose(text: str) -> str:
    """Return the text of a page with spaces in place of everything that is no running prose; no position changes."""
    for name in shared_snippets():
        text = re.sub(rf"^<!-- --8<-- \[start:{name}\].*?\[end:{name}\] -->$", blank, text, flags=re.M | re.S)
    for pattern in (
        r"^ *(`{3,}).*?^ *\1 *$",  # fenced blocks
        r"<!--.*?-->",
        r"^#+ .*$",  # headings
        r"^\|.*\|\n(?=\|[-|: ]+\|$)",  # heads of tables
        r"\$\$.*?\$\$",
        r"`[^`]+`",
        r"!\[[^\]]*\]\([^)]*\)",
        r"\[[^\[\]]*\]\((?![\w./-]*glossary\.md#)[^)]*\)",  # other links
        r"\[[^\[\]]*\]\[[^\[\]]*\]",
        r"(?<=\])\([\w./-]*glossary\.md#[^)]+\)",  # targets of the links to the glossary, but not their texts
        r"https?://\S+",
    ):
        text = re.sub(pattern, blank, text, flags=re.MULTILINE | re.DOTALL if ".*?" in pattern else re.MULTILINE)
    return text


def first_uses(text: str, terms: dict[str, str]) -> dict[str, tuple[int, bool]]:
    """Return for each term that a page uses the line of the first use, and whether a link stands there or before it."""
    found, words = {}, prose(text)
    links = [(match[2], match.start()) for match in GLOSSARY_LINK.finditer(text)]
    for anchor, pattern in terms.items():
        spaced = pattern.replace(" ", r"\s+")  # a term may be broken into two lines
        first = re.search(rf"\b(?:{spaced})\b", words, re.IGNORECASE)
        if first:
            linked = any(name == anchor and at < first.start() for name, at in links)
            found[anchor] = text.count("\n", 0, first.start()) + 1, linked
    return found


def test_terms_are_terms():
    """Look up the terms of both lists -> headings of the glossary; at least 15 pages are read, and each uses a term."""
    anchors = {re.sub(r"[^\w]+", "-", heading).strip("-") for heading in glossary_headings()}
    assert DISTINCTIVE.keys() | COMMON.keys() <= anchors and not DISTINCTIVE.keys() & COMMON.keys()
    assert len(READ) >= 15
    assert all(first_uses(path.read_text(encoding="utf-8"), DISTINCTIVE) for path in READ)


@pytest.mark.parametrize("path", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_first_use_is_linked(path):
    """Find the first use of each term of DISTINCTIVE in the prose of a page -> a link to the term."""
    uses = first_uses(path.read_text(encoding="utf-8"), DISTINCTIVE)
    assert not [f"{path.name}:{line}: {anchor}" for anchor, (line, linked) in uses.items() if not linked]


@pytest.mark.parametrize("path", READ, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_link_is_late(path):
    """Find the first use of each term of COMMON that a page links -> the link is there, and not at a later use."""
    text = path.read_text(encoding="utf-8")
    linked = {match[2] for match in GLOSSARY_LINK.finditer(text)}
    uses = first_uses(text, {anchor: pattern for anchor, pattern in COMMON.items() if anchor in linked})
    assert not [f"{path.name}:{line}: {anchor}" for anchor, (line, first) in uses.items() if not first]


@pytest.mark.parametrize("name", sorted(shared_snippets()))
def test_no_link_in_a_shared_snippet(name):
    """Read a snippet of the README that the site includes -> it has no relative link."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    snippet = text[text.index(f"[start:{name}]") : text.index(f"[end:{name}]")]
    assert not re.findall(r"\]\((?![a-z]+:)[^)]*\)", snippet)


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
    assert first_uses(text, {"chunk": DISTINCTIVE["chunk"]}) == {"chunk": wanted}
