"""Draw the charts of the site that show lines and points: inline SVG with two logarithmic axes.

Lines and marks have CSS classes. The style sheet gives each class a colour for the light and for the dark scheme. Text
has the colour of the page's text. Each chart is drawn twice, for a wide and for a narrow screen, because a wide drawing
would be too small to read on a phone. The style sheet shows the drawing that fits the screen.
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
    """A line through points.

    Attributes:
        name: name in the legend.
        style: CSS classes of the line.
        points: (x, y) in the units of the axes.
    """

    name: str
    style: str
    points: Sequence[Point]


@dataclass(frozen=True)
class Mark:
    """A measured point.

    Attributes:
        style: CSS classes of the mark.
        x: value on the horizontal axis.
        y: value on the vertical axis.
        text: text that the browser shows while the pointer rests on the mark.
    """

    style: str
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class Chart:
    """Contents of one chart.

    Attributes:
        description: text for readers who cannot see the chart.
        x_label: label of the horizontal axis.
        y_label: label of the vertical axis.
        lines: lines; each line has an entry in the legend.
        marks: measured points.
        mark_names: name in the legend for each style of the marks.
        links: pairs of marks that a thin line joins.
    """

    description: str
    x_label: str
    y_label: str
    lines: Sequence[Line] = ()
    marks: Sequence[Mark] = ()
    mark_names: dict[str, str] = field(default_factory=dict)
    links: Sequence[tuple[Point, Point]] = ()

    def html(self) -> str:
        """Return the HTML of both drawings and the legend."""
        entries = [(line.style, "line", line.name) for line in self.lines]
        entries += [(style, "mark", name) for style, name in self.mark_names.items()]
        legend = "".join(
            f'<li><svg viewBox="0 0 24 12" aria-hidden="true">{sample(style, kind)}</svg>{escape(name)}</li>'
            for style, kind, name in entries
        )
        drawings = "\n".join(self.svg(name, *size) for name, size in SIZES.items())
        return f'<div class="chart">\n{drawings}\n<ul class="legend">{legend}</ul>\n</div>'

    def svg(self, name: str, width: int, height: int) -> str:
        """Return one drawing of `width` x `height` pixels with the CSS class `name`."""
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
        """Return an axis over all values, with a margin of 1/20 of the range at both ends."""
        low, high = math.log10(min(values)), math.log10(max(values))
        margin = max(high - low, 0.2) / 20
        return cls(10 ** (low - margin), 10 ** (high + margin), start, end)

    def at(self, value: float) -> float:
        """Return the pixel of a value."""
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int) -> list[tuple[float, bool]]:
        """Return a pair for each tick: the value of the tick, and whether this value is a power of ten.

        There are three sets of ticks: 1, 2 and 5 times each power of ten; 1 and 3 times each power of ten; the powers
        of ten alone. The first set with at most `most` ticks is returned. If every set has more ticks, the last set is
        returned.
        """
        powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
        for factors in ((1, 2, 5), (1, 3), (1,)):
            found = [(factor * 10.0**power, factor == 1) for power in powers for factor in factors]
            found = [(tick, major) for tick, major in found if self.low <= tick <= self.high]
            if len(found) <= most:
                break
        return found


def number(value: float) -> str:
    """Return the label of a tick, without trailing zeros."""
    return f"{value:.0f}" if value >= 1 else f"{value:g}"


def shape(style: str, x: float, y: float) -> str:
    """Return the SVG of a mark at (x, y) in pixels: a disc for `fast`, a diamond for a peer (another project)."""
    if style.split()[0] == "ours":
        return f'<path class="mark {style}" d="M{x - 4.5:.1f} {y:.1f}a4.5 4.5 0 1 0 9 0a4.5 4.5 0 1 0 -9 0"/>'
    return f'<path class="mark {style}" d="M{x:.1f} {y - 5.5:.1f}l5.5 5.5l-5.5 5.5l-5.5 -5.5z"/>'


def sample(style: str, kind: str) -> str:
    """Return the SVG of a legend entry: a short line if `kind` is "line", else a mark."""
    return f'<path class="line {style}" d="M1 6H23"/>' if kind == "line" else shape(style, 12, 6)
