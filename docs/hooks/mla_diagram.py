"""Draw the picture of MLA on the home page, in the README and in notebooks 1 and 2.

`python docs/hooks/mla_diagram.py` writes the file `docs/assets/mla.svg`. Its colours follow the colour scheme of the
reader's system. On the site, inline SVG replaces the file, so that the colours also follow the site's button for the
colour scheme. The inline SVG has two drawings, one for a wide and one for a narrow screen.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

PICTURE = Path(__file__).resolve().parents[1] / "assets" / "mla.svg"
IMAGE = re.compile(r"!\[(?P<alt>[^\]]*)\]\([^)\s]*assets/mla\.svg\)")
# dimensions of DeepSeek-V3; a test compares these numbers with `MLAConfig.from_preset`
DIMS = {"hidden_size": 7168, "num_heads": 128, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
        "v_head_dim": 128}  # fmt: skip
H, N, L, P, R, V = DIMS.values()
LIGHT = {"back": "#ffffff", "ink": "#1b1f27", "soft": "#59616e", "line": "#6b7482", "box": "#f2f4f7",
         "frame": "#c3cad4", "cache": "#d9eaf7", "cache-line": "#0072b2", "query": "#fdeecb",
         "query-line": "#a86f00"}  # fmt: skip
DARK = {"back": "#1e2129", "ink": "#e8eaee", "soft": "#b4bac5", "line": "#98a1b0", "box": "#2a2f3a",
        "frame": "#4b5362", "cache": "#12354f", "cache-line": "#56b4e9", "query": "#40330f",
        "query-line": "#f2b632"}  # fmt: skip
TALL = 402  # height in pixels of the frame around one attention path
STYLE = """
.mla text { fill: var(--mla-ink); font: 14px "Segoe UI", Roboto, Arial, "Liberation Sans", sans-serif; }
.mla .soft { fill: var(--mla-soft); font-size: 13px; }
.mla .bold { font-weight: 700; }
.mla rect { fill: var(--mla-box); stroke: var(--mla-line); }
.mla .frame { fill: none; stroke: var(--mla-frame); stroke-dasharray: 5 4; }
.mla .query { fill: var(--mla-query); stroke: var(--mla-query-line); }
.mla .cache { fill: var(--mla-cache); stroke: var(--mla-cache-line); stroke-width: 2; }
.mla path { fill: var(--mla-line); }
.mla .line { fill: none; stroke: var(--mla-line); stroke-width: 1.5; }
.mla .back { fill: var(--mla-back); stroke: none; }
"""


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    """Return a line of text; in a name such as `W_{UK}`, the part in braces is drawn as a subscript."""
    text = escape(text).replace(" x ", " \N{MULTIPLICATION SIGN} ")
    text = re.sub(r"_\{(\w+)\}(.?)", r'<tspan dy="4" font-size="10">\1</tspan><tspan dy="-4">\2</tspan>', text)
    return (
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}"' + (f' class="{kind}"' if kind else "") + f">{text}</text>"
    )


def box(x: float, y: float, width: float, height: float, *lines: str, kind: str = "", first: str = "bold") -> list[str]:
    """Return a rectangle with centred lines of text; `first` is the CSS class of the first line."""
    found = [f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind or "box"}"/>']
    top = y + height / 2 - 9 * (len(lines) - 1) + 5
    return found + [words(x + width / 2, top + 18 * i, line, "" if i else first) for i, line in enumerate(lines)]


def arrow(x: float, y0: float, y1: float, *labels: str, side: str = "start", start: float | None = None) -> list[str]:
    """Return a vertical arrow from (x, y0) down to (x, y1), with labels beside the middle of the arrow.

    Args:
        x: horizontal position of the arrow.
        y0: vertical position of the upper end.
        y1: vertical position of the tip.
        labels: lines of text.
        side: "start" puts the labels to the right of the arrow, "end" to the left.
        start: if given, a horizontal line from (start, y0) to the upper end of the arrow is drawn too.
    """
    way = f"M{x:g} {y0:g}" if start is None else f"M{start:g} {y0:g}H{x:g}"
    found = [f'<path class="line" d="{way}V{y1 - 7:g}"/><path d="M{x - 4:g} {y1 - 8:g}h8l-4 8z"/>']
    at = x + (9 if side == "start" else -9)
    top = (y0 + y1) / 2 - 8 * (len(labels) - 1) + 2
    return found + [words(at, top + 16 * i, label, "soft", side) for i, label in enumerate(labels)]


def token(x: float, y: float, wide: bool) -> list[str]:
    """Return the first part of the picture: the query and the cache entry that a layer computes for each token."""
    width = 740 if wide else 360
    span = 420 if wide else 360  # width of the box of the cache
    left, right = (x + 120, x + 560) if wide else (x + 30, x + 330)
    query, cache = (y + 128, y + 118) if wide else (y + 124, y + 226)
    parts = [words(x + width / 2, y + 12, "1. For each token, one layer computes", "bold")]
    middle = x + width / 2
    parts += box(middle - 120, y + 24, 240, 44, f"hidden state: {H} numbers")
    if wide:
        parts += arrow(left, y + 46, query, "W_{DQ}, W_{UQ}, rope", start=middle - 120)
        parts += arrow(
            right, y + 46, cache, "W_{DKV}, norm: the latent", "W_{KR}, rope: the rope key", start=middle + 120
        )
    else:
        parts += arrow(left, y + 46, query, start=middle - 120) + arrow(right, y + 46, cache, start=middle + 120)
        parts += [words(left + 9, query - 20, "W_{DQ}, W_{UQ}, rope", "soft", "start")]
        parts += [words(right - 9, query - 28, "W_{DKV}, norm", "soft", "end")]
        parts += [words(right - 9, query - 10, "W_{KR}, rope", "soft", "end")]
    parts += box(x, query, 240, 54, "query of every head", f"{N} heads x ({P} + {R})", kind="query")
    at = x + width - span
    parts += [f'<rect x="{at:g}" y="{cache:g}" width="{span}" height="124" rx="6" class="cache"/>']
    parts += [words(at + span / 2, cache + 22, "the KV cache keeps, for all heads together", "bold")]
    parts += box(at + 16, cache + 33, span - 152, 32, f"latent: {L}")
    parts += box(at + span - 128, cache + 33, 112, 32, f"rope key: {R}")
    parts += [words(at + span / 2, cache + 88, f"{L} + {R} = {L + R} numbers per token", "bold")]
    plain = f"multi-head attention: {N} x ({P} + {R} + {V}) = {N * (P + R + V)}"
    return [*parts, words(at + span / 2, cache + 110, plain, "soft")]


def path(x: float, y: float, name: str, cost: str) -> list[str]:
    """Return the elements that the pictures of both attention paths have: the frame, the title and the two inputs."""
    parts = [f'<rect x="{x:g}" y="{y:g}" width="360" height="{TALL}" rx="8" class="frame"/>']
    parts += [words(x + 180, y + 22, name, "bold"), words(x + 180, y + 42, cost, "soft")]
    parts += box(x + 20, y + 54, 110, 28, "query", kind="query")
    return parts + box(x + 190, y + 54, 150, 28, "cache: S tokens", kind="cache")


def expanded(x: float, y: float) -> list[str]:
    """Return the picture of the expanded path: compute keys and values of every head, then attend them."""
    parts = path(x, y, "Expanded path, for prefill", f"computes {N * (P + V)} numbers for every cached token")
    parts += arrow(x + 265, y + 82, y + 134, f"S x ({L} + {R})", "W_{UK}, W_{UV}", side="end")
    parts += box(x + 150, y + 134, 200, 54, f"keys S x {N} x ({P} + {R})", f"values S x {N} x {V}", first="")
    parts += arrow(x + 75, y + 82, y + 230, f"{N} x ", f"({P} + {R})", side="end")
    parts += arrow(x + 265, y + 188, y + 230, f"S x {N} x ({P + R} + {V})", side="end")
    parts += box(
        x + 20, y + 230, 320, 50, "each head attends its keys and values", f"{P + R} multiplications per score"
    )
    return parts + arrow(x + 180, y + 280, y + TALL, f"{N} x {V}")


def absorbed(x: float, y: float) -> list[str]:
    """Return the picture of the absorbed path: multiply the query by W_UK, attend the cache, multiply by W_UV."""
    parts = path(x, y, "Absorbed path, for decode", "computes nothing for a cached token")
    parts += arrow(x + 75, y + 82, y + 134, f"{N} x ({P} + {R})", "W_{UK}")
    parts += box(x + 10, y + 134, 170, 54, "absorbed query", f"{N} x ({L} + {R})")
    parts += arrow(x + 75, y + 188, y + 230, f"{N} x ({L} + {R})")
    parts += arrow(x + 265, y + 82, y + 230, f"S x {L + R}")
    parts += box(x + 20, y + 230, 320, 50, "all heads attend the cache itself", f"{L + R} multiplications per score")
    parts += arrow(x + 180, y + 280, y + 326, f"{N} x {L}") + box(x + 140, y + 326, 80, 28, "W_{UV}")
    return parts + arrow(x + 180, y + 354, y + TALL, f"{N} x {V}")


def drawing(wide: bool) -> tuple[int, int, list[str]]:
    """Return width, height and SVG elements of one drawing."""
    width, second = (760, 282) if wide else (380, 388)
    parts = token(10, 8, wide)
    parts += [words(width / 2, second + 2, "2. Attention takes one of two paths", "bold")]
    parts += expanded(10, second + 16)
    parts += absorbed(390, second + 16) if wide else absorbed(10, second + 16 + TALL + 62)
    last = second + 16 + TALL + (0 if wide else TALL + 62)
    same = f"the same output, {N} heads x {V}"
    if not wide:
        parts += box(10, second + 16 + TALL, width - 20, 44, same)
    parts += box(10, last, width - 20, 44, f"{same}; then W_{{O}}" + (f": {H} numbers" if wide else ""))
    return width, last + 54, parts


def variables(scheme: dict[str, str]) -> str:
    """Return the colours of a scheme as CSS custom properties."""
    return " ".join(f"--mla-{name}: {colour};" for name, colour in scheme.items())


def svg() -> str:
    """Return the contents of mla.svg: the wide drawing with a background, in the colours of the reader's system."""
    width, height, parts = drawing(True)
    dark = f"@media (prefers-color-scheme: dark) {{ .mla {{ {variables(DARK)} }} }}"
    style = f".mla {{ {variables(LIGHT)} }}\n{dark}{STYLE}"
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" class="mla" {size}>'
    back = f'<rect width="{width}" height="{height}" rx="8" class="back"/>'
    return "\n".join([head, f"<style>\n{style}</style>", back, *parts, "</svg>", ""])


def inline(alt: str) -> str:
    """Return both drawings for a page of the site; an attribute of the page selects the colour scheme."""
    style = f".mla {{ {variables(LIGHT)} }}\n[data-md-color-scheme=slate] .mla {{ {variables(DARK)} }}{STYLE}"
    drawings = []
    for name, wide in (("wide", True), ("narrow", False)):
        width, height, parts = drawing(wide)
        head = f'<svg class="mla {name}" viewBox="0 0 {width} {height}" role="img" aria-label="{escape(alt)}">'
        drawings.append("\n".join([head, *parts, "</svg>"]))
    return "\n".join(['<div class="diagram">', f"<style>{style}</style>", *drawings, "</div>"])


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Replace each image of `assets/mla.svg` by the inline drawings."""
    return IMAGE.sub(lambda image: inline(image["alt"]), markdown)


if __name__ == "__main__":
    PICTURE.write_text(svg(), encoding="utf-8")
