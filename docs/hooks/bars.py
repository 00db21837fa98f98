"""Draw the bar charts of the site: inline SVG with stacked horizontal bars on a linear axis.

Each chart is drawn twice, for a wide and for a narrow screen. The style sheet shows the drawing that fits the screen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from charts import SIZES, number

ROW, BAR = 44, 18  # height in pixels of a bar with its label, and of the bar alone


@dataclass(frozen=True)
class Segment:
    """One part of a bar.

    Attributes:
        style: CSS class of the part.
        value: length in the units of the axis.
        text: text that the browser shows while the pointer rests on the part.
    """

    style: str
    value: float
    text: str


@dataclass(frozen=True)
class Bars:
    """Contents of one bar chart.

    Attributes:
        description: text for readers who cannot see the chart.
        x_label: label of the axis.
        bars: label and segments of each bar, from the top.
        names: name in the legend for each style.
    """

    description: str
    x_label: str
    bars: Sequence[tuple[str, Sequence[Segment]]]
    names: dict[str, str]

    def html(self) -> str:
        """Return the HTML of both drawings and the legend."""
        legend = "".join(
            f'<li><svg viewBox="0 0 24 12" aria-hidden="true"><rect class="mark part {style}" x="2" width="20" '
            f'height="12"/></svg>{escape(name)}</li>'
            for style, name in self.names.items()
        )
        drawings = "\n".join(self.svg(name, width) for name, (width, _) in SIZES.items())
        return f'<div class="chart">\n{drawings}\n<ul class="legend">{legend}</ul>\n</div>'

    def svg(self, name: str, width: int) -> str:
        """Return one drawing of `width` pixels with the CSS class `name`."""
        left, right, top = 12, width - 12, 8
        bottom = top + ROW * len(self.bars)
        longest = max(sum(segment.value for segment in segments) for _, segments in self.bars)
        scale = (right - left) / longest
        parts = [
            f'<svg class="{name}" viewBox="0 0 {width} {bottom + 46}" role="img" '
            f'aria-label="{escape(self.description)}">'
        ]
        for tick in linear_ticks(longest, 5 if name == "narrow" else 10):
            at = left + tick * scale
            anchor = "start" if tick == 0 else "middle" if at < right - 8 else "end"
            parts.append(f'<path class="grid" d="M{at:.1f} {top}V{bottom}"/>')
            parts.append(f'<text x="{at:.1f}" y="{bottom + 16}" text-anchor="{anchor}">{number(tick)}</text>')
        for place, (label, segments) in enumerate(self.bars):
            y, x = top + ROW * place, float(left)
            parts.append(f'<text x="{left}" y="{y + 14}">{escape(label)}</text>')
            for segment in segments:
                length = segment.value * scale
                parts.append(
                    f'<rect class="mark part {segment.style}" x="{x:.1f}" y="{y + 20}" width="{length:.1f}" '
                    f'height="{BAR}"><title>{escape(segment.text)}</title></rect>'
                )
                x += length
        parts.append(
            f'<text x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle">{escape(self.x_label)}</text>'
        )
        return "\n".join([*parts, "</svg>"])


def linear_ticks(longest: float, most: int) -> list[float]:
    """Return at most `most` + 1 ticks from 0 to `longest`; the step is 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(longest / most))
    step = next(factor * power for factor in (1, 2, 5, 10) if longest / (factor * power) <= most)
    return [count * step for count in range(int(longest / step + 1e-9) + 1)]
