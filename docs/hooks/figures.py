"""Figures of matplotlib inside a page: SVG whose black, white and contenders follow the colour scheme of the page.

A page shows `assets/gain.svg` as a picture; the site puts the drawing itself there, and `gain-narrow.svg` beside it for
a narrow screen. `learn.py` does the same with the figures of the notebooks.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\((?P<path>[^)\s]*assets/gain)\.svg\)")
COLOURS = {  # as matplotlib writes them, and what the style sheet calls them
    "#000000": "currentColor", "#ffffff": "var(--md-default-bg-color)",
    "#eeeeee": "var(--md-default-fg-color--lightest)",
}  # fmt: skip
CONTENDERS = ("fast", "reference", "transformers", "FlashMLA", "FA3")


def inlined(svg: str, name: str, alt: str, kind: str = "figure", colours: dict[str, str] | None = None) -> str:
    """The drawing for a page: identifiers of its own, a description, and the colours of the scheme."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', svg).replace("url(#", f"url(#{name}-")
    for colour, wanted in (COLOURS | (colours or {})).items():
        svg = svg.replace(colour, wanted)
    box = re.search(r'viewBox="[^"]*"', svg)
    if box is None:
        raise ValueError(f"{name}: a drawing without a viewBox")
    width = float(box.group().split()[2]) * 4 / 3  # points to pixels
    head = (
        f'<svg class="{kind}" {box.group()} style="max-width: {width:.0f}px" role="img" '
        f'aria-label="{escape(alt)}" data-search-exclude>'
    )
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1).strip()


def contenders(css: str) -> dict[str, str]:
    """The light colour of each contender, and the property that has the scheme's own."""
    light = css.split("\n:root {")[1].split("}")[0]
    return {re.search(rf"--{who}: (#\w+);", light)[1]: f"var(--{who})" for who in CONTENDERS}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Put the drawings where a page shows the file."""
    assets = Path(config.docs_dir) / "assets"

    def draw(image: re.Match[str]) -> str:
        colours = contenders((assets / "site.css").read_text(encoding="utf-8"))
        drawings = [
            inlined((assets / f"{stem}.svg").read_text(encoding="utf-8"), stem, image["alt"], f"figure {kind}", colours)
            for stem, kind in (("gain", "wide"), ("gain-narrow", "narrow"))
        ]
        return "\n".join(['<div class="diagram">', *drawings, "</div>"])

    return IMAGE.sub(draw, markdown)
