"""Link the first use of each term on the pages of notebooks and on the home page to the glossary.

The other pages have these links in their Markdown, and tests/site/test_glossary_links.py checks them. Notebooks have no
such links, because they are also read outside the site. A snippet of the README that the home page includes has none,
because the path of such a link would be wrong on one of the two pages.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

INCLUDE = re.compile(r'^--8<-- "README\.md:(\w+)"$', re.MULTILINE)
GLOSSARY_LINK = re.compile(r"\[([^\[\]]*)\]\([\w./-]*glossary\.md#([^)]+)\)")

# A key is the anchor of a term that is no everyday word; every page that uses the term links it. The value is a pattern
# for the term in prose.
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
    "grouped-query-attention": r"grouped-query attention|GQA",
    "kv-head": r"KV heads?|key/value heads?",
    "kv-cache": r"KV caches?|key/value caches?",
    "cross-attention": r"cross attention",
    "kv-sharing": r"KV sharing",
    "sliding-window": r"sliding windows?",
    "first-visible-key": r"first visible keys?",
    "attention-sink": r"attention sinks?",
    "soft-cap": r"soft caps?",
    "alibi": r"ALiBi",
    "virtual-request": r"virtual requests?",
    "block-table": r"block tables?",
    "slot": r"slots?",
    "chunk": r"(?<!attention\s)chunks?",
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


def blank(match: re.Match) -> str:
    """Return the matched text with spaces instead of its characters; line breaks stay."""
    return re.sub(r"[^\n]", " ", match[0])


def prose(text: str) -> str:
    """Return the text of a page with spaces in place of everything that is no running prose; no position changes."""
    for pattern in (
        r"^ *(`{3,}).*?^ *\1 *$",  # fenced blocks
        r"<!--.*?-->",
        r"<(figure|svg|style)\b.*?</\1>",
        r"</?[a-zA-Z][^<>]*>",
        r"^#+ .*$",  # headings
        r"^\|.*\|\n(?=\|[-|: ]+\|$)",  # heads of tables
        r"\$\$.*?\$\$",
        r"(?<!\\)\$[^$\n]+\$",
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


def linked(text: str, glossary: str) -> str:
    """Return the text of a page, with a link at the first use of each term of DISTINCTIVE that has no link yet.

    Args:
        text: Markdown of the page.
        glossary: path of the glossary, relative to the page.
    """
    words, found = prose(text), []
    links = [(match[2], match.start()) for match in GLOSSARY_LINK.finditer(text)]
    taken = [(match.start(), match.end()) for match in GLOSSARY_LINK.finditer(text)]
    for anchor, pattern in sorted(DISTINCTIVE.items(), key=lambda item: -len(item[1])):  # longer terms first
        spaced = pattern.replace(" ", r"\s+")
        for use in re.finditer(rf"\b(?:{spaced})\b", words, re.IGNORECASE):
            if any(name == anchor and at < use.start() for name, at in links):
                break
            if not any(first < use.end() and use.start() < end for first, end in taken):
                found.append((use.start(), use.end(), anchor))
                taken.append((use.start(), use.end()))
                break
    for first, end, anchor in sorted(found, reverse=True):
        text = f"{text[:first]}[{text[first:end]}]({glossary}#{anchor}){text[end:]}"
    return text


def with_snippets(text: str, readme: str) -> str:
    """Return the text of a page with the snippets of the README in place of the lines that include them."""

    def snippet(include: re.Match) -> str:
        first, end = (f"<!-- --8<-- [{mark}:{include[1]}] -->\n" for mark in ("start", "end"))
        return readme[readme.index(first) + len(first) : readme.index(end)].rstrip("\n")

    return INCLUDE.sub(snippet, text)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Link the terms of a notebook's page and of the home page."""
    if page.file.src_uri.startswith("learn/"):
        return linked(markdown, "../glossary.md")
    if page.file.src_uri == "index.md":
        readme = (Path(config["docs_dir"]).parent / "README.md").read_text(encoding="utf-8")
        return linked(with_snippets(markdown, readme), "glossary.md")
    return markdown
