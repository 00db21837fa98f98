"""Charts of the site as inline SVG on two logarithmic axes.

Colours are classes that the style sheet sets for the light and the dark scheme; words take the page's own colour. Each
chart is drawn twice, for a wide and for a narrow screen, and the style sheet shows one of them: a drawing that is only
scaled down cannot be read on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]
SIZES = {"wide": (720, 400), "narrow": (350, 380)}


@dataclass(frozen=True)
class Line:
    """A line through points, with a name in the legend."""

    name: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Mark:
    """A measured point; `text` is shown while a pointer rests on it."""

    style: str
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Chart:
    """What is drawn: words for whoever does not see it, axes, lines, marks, and names of the marks' styles."""

    description: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    marks: Sequence[Mark] = ()
    mark_names: dict[str, str] = field(default_factory=dict)
    links: Sequence[tuple[Point, Point]] = ()  # two marks that belong together

    def html(self) -> str:
        """A figure: both drawings and the legend."""
        entries = [(line.style, "line", line.name) for line in self.lines]
        entries += [(style, "mark", name) for style, name in self.mark_names.items()]
        legend = "".join(
            f'<li><svg viewBox="0 0 24 12" aria-hidden="true">{sample(style, kind)}</svg>{escape(name)}</li>'
            for style, kind, name in entries
        )
        drawings = "\n".join(self.svg(name, *size) for name, size in SIZES.items())
        return f'<div class="chart">\n{drawings}\n<ul class="legend">{legend}</ul>\n</div>'

    def svg(self, name: str, width: int, height: int) -> str:
        """One drawing."""
        points = [point for line in self.lines for point in line.points] + [(mark.x, mark.y) for mark in self.marks]
        left, right, top, bottom = 58, width - 12, 10, height - 46
        x = Axis.over([point[0] for point in points], left, right)
        y = Axis.over([point[1] for point in points], bottom, top)
        parts = [
            f'<svg class="{name}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(self.description)}">'
        ]
        for tick, major in x.ticks(6 if name == "narrow" else 12):
            at = x.at(tick)
            parts.append(f'<path class="{"grid" if major else "grid minor"}" d="M{at:.1f} {top}V{bottom}"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="middle">{number(tick)}</text>')
        for tick, major in y.ticks(12):
            at = y.at(tick)
            parts.append(f'<path class="{"grid" if major else "grid minor"}" d="M{left} {at:.1f}H{right}"/>')
            parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{number(tick)}</text>')
        centre, middle = (left + right) / 2, (top + bottom) / 2
        parts.append(f'<text x="{centre}" y="{height - 8}" text-anchor="middle">{escape(self.x_label)}</text>')
        parts.append(
            f'<text x="13" y="{middle}" text-anchor="middle" transform="rotate(-90 13 {middle})">'
            f"{escape(self.y_label)}</text>"
        )
        for line in self.lines:
            way = " ".join(f"{x.at(px):.1f},{y.at(py):.1f}" for px, py in line.points)
            parts.append(f'<polyline class="line {line.style}" points="{way}"/>')
        for (x0, y0), (x1, y1) in self.links:
            parts.append(f'<path class="link" d="M{x.at(x0):.1f} {y.at(y0):.1f}L{x.at(x1):.1f} {y.at(y1):.1f}"/>')
        for mark in self.marks:
            parts.append(
                f"{shape(mark.style, x.at(mark.x), y.at(mark.y))[:-2]}><title>{escape(mark.text)}</title></path>"
            )
        return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True)
class Axis:
    """A logarithmic axis from `low` to `high`, drawn from pixel `start` to pixel `end`."""

    low: float
    high: float
    start: float
    end: float

    @classmethod
    def over(cls, values: Sequence[float], start: float, end: float) -> Axis:
        """With a margin of a twentieth at either end."""
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max(high - low, 0.2) / 20
        return cls(10 ** (low - margin), 10 ** (high + margin), start, end)

    def at(self, value: float) -> float:
        """The pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[tuple[float, bool]]:
        """Powers of ten, and their double and fivefold where there is room; which of them are powers."""
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [(factor * 10.0**power, factor == 1) for power in powers for factor in factors]
            found = [(tick, major) for tick, major in found if self.low <= tick <= self.high]
            if len(found) <= most:
                break
        return found


def number(value: float) -> str:
    """A tick without needless zeros."""
    return f"{value:.0f}" if value >= 1 else f"{value:g}"


def shape(style: str, x: float, y: float) -> str:
    """The mark of a style: a disc for ours, a diamond for a peer, so that colour is not all that tells them apart."""
    if style.split()[0] == "ours":
        return f'<path class="mark {style}" d="M{x - 4.5:.1f} {y:.1f}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0"/>'
    return f'<path class="mark {style}" d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"/>'


def sample(style: str, kind: str) -> str:
    """What a style looks like, for the legend."""
    return f'<path class="line {style}" d="M1 6H23"/>' if kind == "line" else shape(style, 12, 6)
