"""Turn the notebooks into pages of the site: Markdown from the cells and the stored outputs, without running code.

The notebook `notebooks/01-latent.ipynb` becomes the page `learn/01-latent.md`. The notebook file is put into the same
folder `learn`. If another page links to the notebook file, the link is changed into a link to the page of the notebook.
"""

from __future__ import annotations

import base64
import os
import posixpath
import re
from html import escape, unescape
from pathlib import Path
from typing import Any

import nbformat
from figures import INK, PLOT, inlined
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

FOLDER = "notebooks"
SECTION = "learn"
ABOUT_A_FIGURE = re.compile(r"\b(figure|plot|plotted|drawn|diagram|bars?|curves?|colou?rs?|axis|axes|shows?)\b", re.I)
ANSI = re.compile(r"\x1b\[[0-9;]*m")
FENCED = re.compile(r"^(`{3,}|~{3,})[^\n]*\n.*?^\1[ \t]*$", re.MULTILINE | re.DOTALL)
ITEM = re.compile(r"^ {0,3}([-*+]|\d+[.)]) ")
FOLDED = {  # tag of a cell: kind and title of the box in which the page hides the cell until a click
    "setup": ("abstract", "Set-up: imports and helpers"),
    "answer": ("example", "The answer in code"),
}
LINK_TO_NOTEBOOK = re.compile(r"\]\((?!\w+:)(?P<path>[^)\s#]*?)(?P<name>[\w-]+)\.ipynb(?P<anchor>#[^)\s]*)?\)")


def fenced(text: str, language: str) -> str:
    """Return the text as a fenced code block; the fence is longer than any sequence of backticks in the text."""
    ticks = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    return f"{ticks}{language}\n{text.rstrip()}\n{ticks}"


def joined(value: str | list[str]) -> str:
    """Return a value of a notebook file as one string; the file stores a string or a list of lines."""
    return value if isinstance(value, str) else "".join(value)


def indented(text: str) -> str:
    """Return the text indented by four spaces, as Markdown requires for the body of a box (admonition)."""
    return "\n".join("    " + line if line.strip() else "" for line in text.strip("\n").splitlines())


def outside_fences(text: str, change: Any) -> str:
    """Return the text with the function `change` applied to each part outside fenced code blocks."""
    parts, at = [], 0
    for fence in FENCED.finditer(text):
        parts += [change(text[at : fence.start()]), fence.group()]
        at = fence.end()
    return "".join([*parts, change(text[at:])])


def blank_lines(text: str) -> str:
    """Add the blank lines that Python-Markdown needs. The site uses Python-Markdown; Jupyter works without the lines.

    A blank line is added before a list or a table that directly follows a paragraph. A blank line is also added before
    a list item if the item above has several paragraphs.
    """
    lines: list[str] = []
    formula = False  # True inside a formula between $$; there, a line that begins with "+" is no list item
    opening = ""  # first line of the paragraph that contains `line`
    for line in text.split("\n"):
        before = lines[-1] if lines else ""
        table, item = line.startswith("|"), bool(ITEM.match(line))
        inside = before.startswith(("|", "#")) or bool(ITEM.match(opening))
        if before.strip() and (item or table) and not inside and not formula:
            lines.append("")
            before = ""
        if not before.strip():
            opening = line
        lines.append(line)
        formula ^= line.count("$$") % 2 == 1
    return "\n".join(lines)


def takeaways(text: str) -> str:
    """Turn each blockquote that begins with a bold title, such as **Takeaway.**, into a box with this title."""

    def box(quote: re.Match[str]) -> str:
        body = re.sub(r"^> ?", "", quote.group(), flags=re.MULTILINE)
        title = re.match(r"\*\*(\w+)\.\*\* *", body)
        return f'!!! tip "{title[1]}"\n\n{indented(body[title.end() :])}\n' if title else quote.group()

    return re.sub(r"(?:^>[^\n]*\n?)+", box, text, flags=re.MULTILINE)


def answers(text: str) -> str:
    """Turn each HTML element <details> into a box of the site; the box opens on a click and contains Markdown."""

    def box(details: re.Match[str]) -> str:
        summary, body = unescape(re.sub(r"<[^>]+>", "", details[1])).strip(), blank_lines(details[2])
        title = summary.replace('"', "'")
        return f'\n??? question "{title}"\n\n{indented(body)}\n'

    found = re.compile(r"^<details>\s*<summary>(.*?)</summary>(.*?)</details>[ \t]*$", re.MULTILINE | re.DOTALL)
    return found.sub(box, text)


def markdown_cell(source: str) -> str:
    """Return the text of a Markdown cell as Markdown of the site."""
    return answers(outside_fences(source, lambda text: takeaways(blank_lines(text))))


def plain(text: str) -> str:
    """Return a Markdown text without links, emphasis and formula commands."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"\\[a-zA-Z]+|[*`$\\{}]", "", text)
    return " ".join(text.split())


def figure_text(cells: list[Any], index: int) -> str:
    """Return the description of a figure for readers who cannot see the figure.

    The description is the entry "alt" of the cell's metadata. Without this entry there are two candidates: first the
    next paragraph after the cell, then the last paragraph before the cell. The function returns the first candidate
    that mentions a figure, or else the first candidate.
    """
    if alt := cells[index].metadata.get("alt"):
        return plain(alt)
    after = next((cell for cell in cells[index + 1 :] if cell.cell_type == "markdown"), None)
    before = next((cell for cell in reversed(cells[:index]) if cell.cell_type == "markdown"), None)
    prose: list[str] = []
    for cell, order in ((after, 1), (before, -1)):
        paragraphs = re.split(r"\n\s*\n", cell.source.strip()) if cell is not None else []
        paragraphs = [text for text in paragraphs if not text.startswith(("#", "$$", "|", ">", "```", "<"))]
        prose += paragraphs[::order][:1]
    told = [text for text in prose if ABOUT_A_FIGURE.search(text)] or prose
    text = plain(told[0]) if told else ""
    return text if len(text) <= 400 else text[:400].rsplit(". ", 1)[0].rstrip(".") + "."


def output_block(output: Any, stem: str, index: int, alt: str, figures: dict[str, bytes]) -> str:
    """Return one stored output of cell `index` as Markdown.

    Args:
        output: the stored output.
        stem: file name of the notebook without ".ipynb".
        index: number of the cell.
        alt: description of a figure for readers who cannot see the figure.
        figures: PNG images by file name. The function adds a PNG output to this dictionary, and writes an SVG output
            into the returned Markdown.

    Raises:
        PluginError: the output is an error, or a figure has no description.
    """
    if output.output_type == "stream":
        return fenced(ANSI.sub("", joined(output.text)), "text") if output.name == "stdout" else ""
    if output.output_type == "error":
        raise PluginError(f"{stem}: a stored output is an error: {output.ename}: {output.evalue}")
    data = output.data
    if "application/vnd.jupyter.widget-view+json" in data:
        return ""  # a slider does not work on a page, because a page has no Python kernel
    if not alt and {"image/svg+xml", "image/png"} & data.keys():
        raise PluginError(f"{stem}: a figure has neither alt metadata nor a paragraph beside its cell")
    name = f"{stem}-{index}"
    if "image/svg+xml" in data:
        drawing = inlined(joined(data["image/svg+xml"]), name, alt, colours=PLOT, ink=INK)
        return f"<figure>\n{drawing}\n</figure>"
    if "image/png" in data:
        figures[f"{name}.png"] = base64.b64decode(joined(data["image/png"]))
        return f'<figure markdown="span">![{escape(alt).replace("]", ")").replace("[", "(")}]({name}.png)</figure>'
    if "text/markdown" in data:
        return blank_lines(joined(data["text/markdown"]))
    if "text/latex" in data:
        return joined(data["text/latex"])
    if "text/html" in data:
        return f'<div class="output">\n{joined(data["text/html"]).strip()}\n</div>'
    return fenced(ANSI.sub("", joined(data.get("text/plain", ""))), "text")


def output_box(block: str) -> str:
    """Return an output in a box of the page; the box of an SVG figure is not parsed as Markdown."""
    if block.startswith("<figure>"):
        return f'<div class="output">\n{block}\n</div>'
    return f'<div class="output" markdown>\n\n{block}\n\n</div>'


def folded(kind: str, title: str, blocks: list[str]) -> str:
    """Return blocks in a box that opens on a click."""
    return "\n\n".join([f'<details class="{kind}" markdown>\n<summary>{title}</summary>', *blocks, "</details>"])


def page_of(path: Path) -> tuple[str, dict[str, bytes]]:
    """Return the Markdown of a notebook's page, and by file name the figures that the notebook stores as PNG."""
    notebook = nbformat.read(path, as_version=4)
    parts: list[str] = []
    figures: dict[str, bytes] = {}
    for index, cell in enumerate(notebook.cells):
        if cell.cell_type == "markdown":
            parts.append(markdown_cell(cell.source))
        elif cell.cell_type == "code" and cell.source.strip():
            alt = figure_text(notebook.cells, index)
            blocks = [output_block(output, path.stem, index, alt, figures) for output in cell.outputs]
            shown = [fenced(cell.source, "python"), *(output_box(block) for block in blocks if block)]
            fold = next((FOLDED[tag] for tag in cell.metadata.get("tags", ()) if tag in FOLDED), None)
            parts += shown if fold is None else [folded(*fold, shown)]
    note = f'[The notebook itself]({path.name}){{ .notebook download="{path.name}" }} runs on a CPU, without a network.'
    return "\n\n".join([*parts, note]) + "\n", figures


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the page, the figures and the file of each notebook to the files of the site."""
    for path in sorted((Path(config.config_file_path).parent / FOLDER).glob("*.ipynb")):
        markdown, figures = page_of(path)
        files.append(File.generated(config, f"{SECTION}/{path.stem}.md", content=pages_for_notebooks(markdown)))
        files.append(File.generated(config, f"{SECTION}/{path.name}", abs_src_path=str(path)))
        for name, content in figures.items():
            files.append(File.generated(config, f"{SECTION}/{name}", content=content))
    return files


def pages_for_notebooks(markdown: str) -> str:
    """Change links to files of docs/ and links to notebooks into links to pages.

    A link to a notebook is left unchanged if attributes `{...}` follow the link.
    """
    markdown = markdown.replace("](../docs/", "](../")
    return LINK_TO_NOTEBOOK.sub(
        lambda link: link.group() if markdown[link.end() :].startswith("{") else
        f"]({link['path']}{link['name']}.md{link['anchor'] or ''})", markdown)  # fmt: skip


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Prepare a page that is not made from a notebook.

    Links to notebook files are changed into links to the pages of the notebooks. `blank_lines` adds the blank lines
    that the lists and tables of the page need.
    """
    here = posixpath.dirname(page.file.src_uri)
    if here == SECTION:
        return markdown
    markdown = outside_fences(markdown, blank_lines)

    def link(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join("docs", here, found["path"], found["name"] + ".ipynb"))
        from_readme = posixpath.normpath(posixpath.join(found["path"], found["name"] + ".ipynb"))
        if f"{FOLDER}/{found['name']}.ipynb" not in (target, from_readme):
            return found.group()
        return f"]({os.path.relpath(SECTION, here or '.')}/{found['name']}.md{found['anchor'] or ''})"

    return LINK_TO_NOTEBOOK.sub(link, markdown)
