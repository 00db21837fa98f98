"""Tests of the colours of figures: docs/hooks/learn.py and docs/hooks/figures.py insert SVG drawings into the pages.

The tests read the inserted drawings and the style sheet; they need neither a build of the site nor a browser.
"""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

for needed in ("mkdocs", "nbformat"):
    pytest.importorskip(needed)

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
PAGES = [*NOTEBOOKS, DOCS / "index.md", DOCS / "performance.md"]
TEXT, SHAPE = 4.5, 3.0  # smallest contrast of text, and of lines and areas
PAGE = "md-default-bg-color"
QUIET = {PAGE, "md-default-fg-color--lightest", "part-idle"}  # backgrounds, frames, and cells in which nothing happens
ON_CELLS = "#111111"  # the fixed colour of texts on coloured cells


@dataclass(frozen=True)
class Drawn:
    """One text, line or area: its colour (a variable of the style sheet, or a fixed colour) and its opacity.

    A text also has the colour of the area below its anchor.
    """

    kind: str
    colour: str
    opacity: float
    below: str = PAGE


@pytest.fixture(autouse=True)
def hooks(monkeypatch):
    """Let the tests import the modules of docs/hooks."""
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "hooks"))


def schemes() -> dict[str, dict[str, str]]:
    """Return the colours of each colour scheme by the names of the variables."""
    import figures

    found = figures.schemes((ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8"))
    return {name: colours | {"currentColor": colours["md-default-fg-color"]} for name, colours in found.items()}


def channels(colour: str) -> list[int]:
    return [int(colour[at : at + 2], 16) for at in (1, 3, 5)]


def contrast(colour: str, below: str, opacity: float = 1.0) -> float:
    """Return the contrast of WCAG between a colour and the colour below it."""

    def luminance(rgb: list[float]) -> float:
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in (c / 255 for c in rgb)]
        return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))

    mixed = [opacity * c + (1 - opacity) * b for c, b in zip(channels(colour), channels(below), strict=True)]
    dark, light = sorted((luminance(mixed), luminance(channels(below))))
    return (light + 0.05) / (dark + 0.05)


def numbers(text: str) -> list[float]:
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", text)]


def read(svg: str) -> list[Drawn]:
    """Return the texts, lines and areas of a drawing in the order in which the browser paints them."""
    found: list[Drawn] = []
    areas: list[tuple[float, float, float, float, str]] = []

    root = ET.fromstring(svg.replace("<svg ", '<svg xmlns:xlink="x" ', 1).replace(" data-search-exclude", "", 1))
    clips = {clip.get("id"): clip.find("rect") for clip in root.iter("clipPath")}

    def area(path: ET.Element) -> tuple[float, float, float, float]:
        """Return left, top, right and bottom of the visible part of a path."""
        points = numbers(path.get("d"))
        left, top, right, bottom = min(points[::2]), min(points[1::2]), max(points[::2]), max(points[1::2])
        if (clip := clips.get(path.get("clip-path", "")[5:-1])) is not None:
            x, y, width, height = (float(clip.get(key)) for key in ("x", "y", "width", "height"))
            left, top, right, bottom = max(left, x), max(top, y), min(right, x + width), min(bottom, y + height)
        return left, top, right, bottom

    def name(colour: str) -> str:
        return colour.removeprefix("var(--").removesuffix(")")

    def visit(element: ET.Element, given: dict[str, str]) -> None:
        style = dict(part.strip().split(": ", 1) for part in element.get("style", "").split(";") if ": " in part)
        given = given | {key: element.get(key) for key in ("fill", "stroke", "transform") if element.get(key)} | style
        if element.tag == "text":
            whole = "".join(element.itertext()).strip()
            x, y = ([float(element.get("x")), float(element.get("y"))] if element.get("x")
                    else numbers(given["transform"])[:2])  # fmt: skip
            below = [fill for left, top, right, bottom, fill in areas if left <= x <= right and top <= y - 2 <= bottom]
            for part in [element, *element.iter("tspan")] if whole else []:
                fill = re.search(r"fill: ([^;]+)", part.get("style", ""))
                colour = name(fill[1] if fill else given.get("fill", "currentColor"))
                found.append(Drawn("text", colour, float(given.get("opacity", 1)), below[-1] if below else PAGE))
            return
        if element.tag in ("path", "rect", "use"):
            for kind, usual in (("fill", "currentColor"), ("stroke", "none")):
                colour = name(given.get(kind, usual))
                if colour != "none" and not colour.startswith("url("):
                    opacity = float(given.get("opacity", 1)) * float(given.get(f"{kind}-opacity", 1))
                    found.append(Drawn(kind, colour, opacity))
            if element.tag == "path" and element.get("d", "").strip().endswith("z") and "transform" not in given:
                fill = name(given.get("fill", "currentColor"))
                if fill != "none":
                    fill = PAGE if fill.startswith("url(") else fill
                    areas.append((*area(element), fill))
        for child in element:
            if child.tag not in ("defs", "clipPath", "symbol"):
                visit(child, given)

    visit(root, {})
    return found


def drawings(path: Path) -> Iterator[tuple[str, list[Drawn]]]:
    """Yield (identifier, contents) of each figure on the page of a notebook, or on a page of `docs`."""
    import figures
    import learn

    if path.suffix == ".md":
        page = figures.on_page_markdown(path.read_text(encoding="utf-8"), None, {"docs_dir": DOCS}, None)
        found = re.findall(r'<svg class="figure.*?</svg>', page, re.DOTALL)
        assert found
    else:
        found = re.findall(r"<figure>\n(.*?)\n</figure>", learn.page_of(path)[0], re.DOTALL)
    for figure in found:
        yield re.search(r'id="([\w-]+?)-figure_', figure)[1], read(figure)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_texts_are_legible(path):
    """Read every text of the figures of a page -> a contrast of 4.5 in both schemes, also on a coloured cell."""
    for figure, contents in drawings(path):
        texts = {drawn for drawn in contents if drawn.kind == "text"}
        assert texts, figure
        for scheme, colours in schemes().items():
            for text in texts:
                below = colours[text.below]
                colour = text.colour if text.colour == ON_CELLS else colours[text.colour]
                assert contrast(colour, below, text.opacity) >= TEXT, (figure, scheme, text)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_lines_and_areas_are_visible(path):
    """Read every line and area of the figures of a page -> a contrast of 3 with the page in both schemes."""
    for figure, contents in drawings(path):
        shapes = {drawn for drawn in contents if drawn.kind != "text" and drawn.colour not in QUIET}
        for scheme, colours in schemes().items():
            for shape in shapes:
                assert shape.colour in colours, f"{figure}: PLOT of docs/hooks/figures.py has no {shape.colour}"
                assert contrast(colours[shape.colour], colours[PAGE], shape.opacity) >= SHAPE, (figure, scheme, shape)


def test_contrast():
    """Compute contrasts -> the values of WCAG, and colours that are known to be hard to read."""
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#0072b2", "#1e2129") == pytest.approx(3.10, abs=0.01)
    assert contrast("#e69f00", "#ffffff") == pytest.approx(2.25, abs=0.01)
    assert contrast("#000000", "#ffffff", 0.0) == 1


def test_chart_of_the_home_page():
    """Read the chart of README and home page -> drawn from docs/results; the text beside it has the same numbers."""
    import picture

    for path in picture.DRAWINGS:
        assert picture.results_digest() in path.read_text(encoding="utf-8"), f"python docs/hooks/picture.py: {path}"
    times = picture.times_of(json.loads(picture.SOURCE.read_text(encoding="utf-8"))).values()
    peers = {who: [row[who] for row in times] for who in picture.SHOWN}
    every = f"{min(map(min, peers.values())):.2f} to {max(map(max, peers.values())):.2f} times"
    alone = [f"{min(found):.2f} to {max(found):.2f}" for found in peers.values()]
    rows = json.loads((ROOT / "docs" / "results" / "cpu-2-cores.json").read_text(encoding="utf-8"))["rows"]
    longest = {row["who"]: f"{row['ms_median']:.0f} ms" for row in rows if row["context"] == 16384}
    on_cpu = f"{longest['transformers']} for a decoded token in plain transformers, {longest['reference']} with"
    for path in ("README.md", "docs/index.md"):
        text = (ROOT / path).read_text(encoding="utf-8").replace("\n", " ")
        assert all(words in text for words in (every, *alone, on_cpu, f"{longest['fast']} with `fast`")), path


def test_picture_outside_the_site():
    """Read the chart of the README as a file -> its colours are variables, which the file sets in both schemes."""
    for name in ("gain", "gain-narrow"):
        svg = (DOCS / "assets" / f"{name}.svg").read_text(encoding="utf-8")
        style = re.search(r"<style>\nsvg (.*?)</style>\n", svg, re.DOTALL)
        light, dark = style[1].split("@media (prefers-color-scheme: dark)")
        used = set(re.findall(r"var\(--([\w-]+)\)", svg))
        assert not re.search(r"(?:fill|stroke): ?#", svg.replace(style[0], "")), name
        for scheme, rule in (("default", light), ("slate", dark)):
            found = dict(re.findall(r"--([\w-]+): (#\w+)", rule))
            assert found.keys() == used | {"md-default-fg-color"}, (name, scheme)
            assert found.items() <= schemes()[scheme].items(), (name, scheme)


def test_no_picture_has_fixed_colours():
    """Find every picture of README, pages and notebooks' texts -> an SVG file, because PNG has fixed colours."""
    import figures

    texts = [*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *NOTEBOOKS]
    found = [image for path in texts for image in re.findall(r"!\[[^\]]*\]\(([^)\s]+)\)", path.read_text("utf-8"))]
    drawn = {f"{name}.svg" for name in ("mla", *figures.DRAWINGS)}  # the site or the file itself has both schemes
    assert len(found) >= 5 and {image.rpartition("/")[2] for image in found} == drawn, found
    assert not [path for path in (DOCS / "assets").iterdir() if path.suffix in (".png", ".jpg")]


def test_unreplaced_colours_are_noticed(monkeypatch):
    """Insert the figures without the replacements -> the tests of text and of lines both fail."""
    import learn

    monkeypatch.setattr(learn, "INK", {})
    with pytest.raises(AssertionError):
        test_texts_are_legible(ROOT / "notebooks" / "10-cache-formats.ipynb")
    monkeypatch.setattr(learn, "PLOT", {})
    with pytest.raises(AssertionError):
        test_lines_and_areas_are_visible(ROOT / "notebooks" / "10-cache-formats.ipynb")
