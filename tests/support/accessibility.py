"""Check pages with the accessibility checker axe in a browser of playwright, without repeating equal checks."""

from __future__ import annotations

# options of axe that choose the rules whose results can differ between the colour schemes
IN_COLOUR = {"runOnly": {"type": "rule", "values": ["color-contrast", "link-in-text-block"]}}

# Script that runs before the accessibility checker axe. It saves time: it removes elements that look like others.
THINNING = """() => {
  const seen = new Set();
  for (const token of document.querySelectorAll(".highlight code span")) {
    if (token.children.length) continue;
    if (seen.has(token.className)) token.replaceWith(token.textContent);
    seen.add(token.className);
  }
  const keep = (count, selector) => [...document.querySelectorAll(selector)].slice(count).forEach((e) => e.remove());
  keep(5, ".katex-html");
  keep(20, ".chart .mark, .chart .link");
  keep(4, ".doc-object .doc-object");
  keep(8, ".doc-contents > details, .doc-contents li");
  keep(30, ".md-nav__item:not(.md-nav__item--active)");
  const kinds = {};  // number of elements of each kind in the text of the page
  for (const element of document.querySelectorAll("article > *, article li")) {
    const kind = element.tagName + element.className + element.parentElement.tagName;
    if ((kinds[kind] = (kinds[kind] || 0) + 1) > 20) element.remove();
  }
  for (const table of document.querySelectorAll("table")) [...table.rows].slice(6).forEach((row) => row.remove());
}"""

# Mark each text that looks like `most` earlier texts: it has their colour, size and weight, and their backgrounds lie
# behind it. Its contrast is then the same too, and axe need not compute it again; the other rules still see the text.
ALIKE = """(most) => {
  const behind = new Map(), counts = new Map();
  for (const element of document.querySelectorAll("*")) {
    const style = getComputedStyle(element);
    const placed = style.position === "static" ? "" : element.tagName + element.className;
    const own = [style.backgroundColor, style.backgroundImage, style.opacity, style.filter, placed].join();
    const outer = behind.get(element.parentElement) || "";
    behind.set(element, own === "rgba(0, 0, 0, 0),none,1,none," ? outer : outer + own);
    const text = [...element.childNodes].some((node) => node.nodeType === Node.TEXT_NODE && node.data.trim());
    const seen = element.checkVisibility({ visibilityProperty: true, opacityProperty: true });
    if (!text || !seen || element.closest("svg")) continue;
    const look = [style.color, style.fontSize, style.fontWeight, style.textShadow, behind.get(element)].join();
    counts.set(look, (counts.get(look) || 0) + 1);
    if (counts.get(look) > most) element.dataset.alike = "";
  }
}"""
CONTRAST = """axe.configure({ rules: [{ id: "color-contrast", selector: "*:not([data-alike])" }] })"""


def serious(page, axe, **options) -> list[str]:
    """Return the serious and critical accessibility faults that axe, with its options, finds after THINNING."""
    page.evaluate(THINNING)
    page.evaluate(ALIKE, 5)
    page.evaluate(axe.axe_script)
    page.evaluate(CONTRAST)
    found = page.evaluate("(options) => axe.run(options)", {"resultTypes": ["violations"], **options})["violations"]
    return [
        f"{fault['id']}: {node['target']} {node.get('failureSummary', '')[:300]}"
        for fault in found if fault["impact"] in ("serious", "critical") for node in fault["nodes"][:5]
    ]  # fmt: skip
