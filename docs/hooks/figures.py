"""Put figures of matplotlib on the site as inline SVG whose colours follow the colour scheme of the page.

A page refers to a figure of DRAWINGS as an image. When the site is built, `on_page_markdown` replaces the image by the
contents of the SVG file. A figure may have a second drawing for narrow screens; the style sheet then shows the drawing
that fits the screen. `learn.py` uses `inlined` for the figures of the notebooks.

An SVG file that is shown outside the site, such as the chart of the README, has the colours of both schemes in a style
element: `themed` writes it.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

# name of the file that a page refers to: names of the drawings that replace it, and the CSS class of each
DRAWINGS = {"gain": {"gain": "wide", "gain-narrow": "narrow"}, "mla-twins": {"mla-twins": "scrolled"}}
IMAGE = re.compile(rf"!\[(?P<alt>[^\]]*)\]\([^)\s]*assets/(?P<stem>{'|'.join(DRAWINGS)})\.svg\)")
THEME = {  # colours of the site's theme in each colour scheme, without transparency
    "default": {
        "md-default-bg-color": "#ffffff", "md-default-fg-color": "#212121",
        "md-default-fg-color--lightest": "#ededed",
    },
    "slate": {
        "md-default-bg-color": "#1e2129", "md-default-fg-color": "#bfc1c6",
        "md-default-fg-color--lightest": "#2c2f36",
    },
}  # fmt: skip
COLOURS = {  # colour that matplotlib writes: replacement from the style sheet
    "#000000": "currentColor", "#ffffff": "var(--md-default-bg-color)",
    "#eeeeee": "var(--md-default-fg-color--lightest)",
}  # fmt: skip
# implementations that the figures compare; the style sheet has two colours for each, one per colour scheme
CONTENDERS = ("fast", "reference", "transformers", "FlashMLA", "FA3", "FlashInfer")
# colour in the figures of the notebooks: replacement from the style sheet, for lines and areas; #111111 is left out,
# because it is the colour of the letters on coloured cells
PLOT = {
    "#0072b2": "var(--plot-blue)", "#56b4e9": "var(--plot-sky)", "#e69f00": "var(--plot-orange)",
    "#009e73": "var(--plot-green)", "#d55e00": "var(--plot-red)", "#cc79a7": "var(--plot-pink)",
    "#f0e442": "var(--plot-yellow)", "#7fcdb5": "var(--plot-mint)", "#66c2a5": "var(--plot-teal)",
    "#8da0cb": "var(--plot-lavender)", "#a6761d": "var(--plot-brown)", "#737373": "var(--plot-ash)",
    "#7f7f7f": "var(--plot-grey)", "#808080": "var(--plot-grey)", "#999999": "var(--plot-grey)",
    "#bfbfbf": "var(--plot-grey)", "#cccccc": "var(--part-idle)", "#d9d9d9": "var(--part-idle)",
    "#dddddd": "var(--part-idle)",
}  # fmt: skip
# the same for letters, which need more contrast
INK = {"#e69f00": "var(--ink-orange)", "#7f7f7f": "var(--ink-grey)", "#808080": "var(--ink-grey)"}
LETTERS = re.compile(r'<g id="text_\d+">.*?</text>', re.DOTALL)  # matplotlib writes a group for each text


def inlined(svg: str, name: str, alt: str, kind: str = "figure", colours: dict[str, str] | None = None,
            ink: dict[str, str] | None = None) -> str:  # fmt: skip
    """Return an SVG drawing for a page, with unique identifiers and a description.

    Args:
        svg: contents of the SVG file.
        name: prefix that makes the identifiers of the drawing unique on the page.
        alt: description for readers who cannot see the drawing.
        kind: CSS classes of the drawing.
        colours: replacements in addition to COLOURS; a mapping from a colour in the SVG file to a colour of the page.
        ink: replacements for texts, which come before the other replacements; a mapping like `colours`.

    Raises:
        ValueError: the drawing has no viewBox.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style[^>]*>.*?</style>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = LETTERS.sub(lambda text: replaced(text.group(), ink or {}), svg)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', svg).replace("url(#", f"url(#{name}-")
    svg = replaced(svg, COLOURS | (colours or {}))
    box = re.search(r'viewBox="[^"]*"', svg)
    if box is None:
        raise ValueError(f"{name}: the drawing has no viewBox")
    width = float(box.group().split()[2]) * 4 / 3  # points to pixels
    head = (
        f'<svg class="{kind}" {box.group()} style="max-width: {width:.0f}px" role="img" '
        f'aria-label="{escape(alt)}" data-search-exclude>'
    )
    return re.sub(r"<svg[^>]*>", lambda _: head, svg, count=1).strip()


def replaced(svg: str, colours: dict[str, str]) -> str:
    """Return the SVG text with each key of `colours` replaced by its value."""
    for colour, wanted in colours.items():
        svg = svg.replace(colour, wanted)
    return svg


def schemes(css: str) -> dict[str, dict[str, str]]:
    """Return for each colour scheme a mapping from the name of a CSS property to its colour.

    Args:
        css: text of the style sheet.
    """
    blocks = {"default": "\n:root {", "slate": '\n[data-md-color-scheme="slate"] {'}
    return {
        scheme: dict(re.findall(r"--([\w-]+): (#\w+);", css.split(block)[1].split("}")[0])) | THEME[scheme]
        for scheme, block in blocks.items()
    }


def themed(svg: str, css: str) -> str:
    """Return an SVG file of matplotlib with colours that follow the colour scheme of the reader's system.

    Args:
        svg: contents of the SVG file.
        css: text of the style sheet.
    """
    svg = replaced(svg, COLOURS | contenders(css))
    names = sorted({*re.findall(r"var\(--([\w-]+)\)", svg), "md-default-fg-color"})
    light, dark = ("; ".join(f"--{name}: {colours[name]}" for name in names) for colours in schemes(css).values())
    style = (
        f"<style>\nsvg {{ {light}; color: var(--md-default-fg-color); fill: currentColor }}\n"
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }}\n</style>"
    )
    return re.sub(r"<svg[^>]*>", lambda head: f"{head.group()}\n{style}", svg, count=1)


def contenders(css: str) -> dict[str, str]:
    """Return a mapping from each contender's colour in the SVG files to the CSS property that replaces this colour.

    The CSS property has one colour for the light scheme and one for the dark scheme.

    Args:
        css: text of the style sheet.
    """
    light = schemes(css)["default"]
    return {light[who]: f"var(--{who})" for who in CONTENDERS}


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace each image of a figure of DRAWINGS by its drawings."""
    assets = Path(config["docs_dir"]) / "assets"

    def draw(image: re.Match[str]) -> str:
        colours = PLOT | contenders((assets / "site.css").read_text(encoding="utf-8"))
        drawings = [
            inlined((assets / f"{stem}.svg").read_text(encoding="utf-8"), stem, image["alt"], f"figure {kind}", colours)
            for stem, kind in DRAWINGS[image["stem"]].items()
        ]
        return "\n".join(['<div class="diagram">', *drawings, "</div>"])

    return IMAGE.sub(draw, markdown)
