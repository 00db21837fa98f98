"""Tests of the site: mkdocs builds the site in strict mode, a local server serves it, and headless Chromium visits it.

Chromium visits every page 375 pixels wide in the dark colour scheme. It visits every page except most API pages also
1440 pixels wide in the light scheme, and pages with drawings in the two other combinations. Each visit is recorded, and
the tests check the records. If Chromium is missing, the tests install Debian's package of Chromium; only root can do
this. If the installation fails, the tests that need Chromium are skipped.
"""

from __future__ import annotations

import contextlib
import functools
import html.parser
import http.server
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urldefrag, urljoin, urlsplit

import pytest

from ..support.accessibility import IN_COLOUR, serious

for needed in ("mkdocs", "material", "mkdocstrings", "nbformat"):
    pytest.importorskip(needed)

ROOT = Path(__file__).parents[2]
DRAWN = ["", "performance/", "learn/01-latent/", "learn/02-two-paths/"]  # pages with drawings of every kind
# None: every page; in the light scheme, only every sixth of the API pages, which all look alike
WALKS = {(375, "dark"): None, (1440, "light"): None, (375, "light"): DRAWN, (1440, "dark"): DRAWN}
SCRIPT = """() => {
  for (const details of document.querySelectorAll("details")) details.open = true;
  const scrolls = (element) => ["auto", "scroll"].includes(getComputedStyle(element).overflowX);
  const within = (element) => {  // true if the element, or the box in which it scrolls, lies inside the viewport
    for (let box = element; box !== document.body; box = box.parentElement) {
      const { left, right, width, height } = box.getBoundingClientRect();
      if (box === element && !(width > 0 && height > 0)) return false;
      if (left >= 0 && right <= innerWidth + 1) return true;
      if (box !== element && !scrolls(box) && box.tagName === "ARTICLE") return false;
    }
    return false;
  };
  const shown = (element) => getComputedStyle(element).display !== "none";
  const maths = [...document.querySelectorAll(".arithmatex")];
  const pictures = [...document.querySelectorAll("article img")];
  const figures = [...document.querySelectorAll("article svg.figure, article svg.mla")];
  const cut = [...document.querySelectorAll("article table:not([class]) td:first-child")].filter((cell) => {
    const range = document.createRange();  // the browser gives a word on two lines two boxes
    const walker = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      for (const word of node.data.matchAll(/[A-Za-z0-9_]+/g)) {
        range.setStart(node, word.index);
        range.setEnd(node, word.index + word[0].length);
        if (new Set([...range.getClientRects()].map((box) => Math.round(box.top))).size > 1) return true;
      }
    }
    return false;
  });
  const charts = [...document.querySelectorAll(".chart")];
  const drawings = charts.map((chart) => [...chart.querySelectorAll(":scope > svg")].filter(shown));
  return {
    overflow: document.documentElement.scrollWidth - innerWidth,
    maths: maths.length,
    lost_maths: maths.filter((e) => !e.querySelector(".katex") || !within(e)).map((e) => e.textContent.slice(0, 80)),
    pictures: pictures.length,
    lost_pictures: pictures.filter((e) => !e.naturalWidth || !e.alt || !within(e)).map((e) => e.src),
    figures: figures.filter(shown).length,
    lost_figures: figures.filter(shown).filter((e) => !e.getAttribute("aria-label") || !within(e)).length,
    cut_words: cut.map((cell) => cell.textContent),
    charts: charts.length,
    lost_charts: drawings.filter((found) => found.length !== 1 || !within(found[0])).length,
    marks: drawings.map((found) => found.length && [...found[0].querySelectorAll(".mark")].filter(within).length),
    scheme: document.body.dataset.mdColorScheme,
  };
}"""


class Parser(html.parser.HTMLParser):
    """Parser that collects the identifiers of a page, the targets of its links, and the files that it loads."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link" and given.get("rel") not in ("canonical", "next", "prev") and "href" in given:
            self.loads.append(given["href"])
        elif tag in ("img", "script", "iframe", "source") and "src" in given:
            self.loads.append(given["src"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The folder of the site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    built = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300
    )
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


@pytest.fixture(scope="module")
def pages(site) -> dict[str, Parser]:
    """All parsed pages, by their addresses below the root of the site."""
    files = sorted(site.rglob("*.html"))
    return {path.relative_to(site).as_posix().removesuffix("index.html"): Parser(path) for path in files}


def find_chromium() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def chromium() -> str:
    """The path of Chromium; if Chromium is missing, the fixture installs it with apt-get as root."""
    pytest.importorskip("playwright")
    if (found := find_chromium()) is not None:
        return found
    if shutil.which("apt-get") is None or os.geteuid() != 0:
        pytest.skip("chromium is missing, and only root on Debian can install it: apt-get install chromium")
    quiet = dict(env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"}, capture_output=True, text=True, timeout=300)
    install = ["apt-get", "install", "-y", "--no-install-recommends", "chromium", "fonts-liberation"]
    for command in (install, ["apt-get", "update"], install):
        done = subprocess.run(command, check=False, **quiet)
        if (found := find_chromium()) is not None:
            return found
    return pytest.skip(f"chromium is missing, and apt-get could not install it: {done.stderr[-300:]}")


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


class WithoutIndex(Quiet):
    """Server of the site with an empty search index; every page reads the index, and only test_search needs it."""

    def translate_path(self, path):
        path = super().translate_path(path)
        return path.replace("search_index.json", "empty_index.json")


@contextlib.contextmanager
def served(site: Path, handler: type[Quiet]):
    """Serve the site on a local server, and yield its address."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(handler, directory=str(site))) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


@pytest.fixture(scope="module")
def address(site):
    """The address of the site on a local server."""
    with served(site, Quiet) as address:
        yield address


@contextlib.contextmanager
def started(chromium: str):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-dev-shm-usage"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def browser(chromium):
    with started(chromium) as browser:
        yield browser


@dataclass
class Visit:
    """Record of one visit: console messages, failed requests, and the results of SCRIPT and of axe.

    `foreign` has the addresses outside the site that the page requested.
    """

    console: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    foreign: list[str] = field(default_factory=list)
    looks: dict = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)


def watch(page, address: str, visits: list[Visit]) -> None:
    """Record the page's console messages and requests in the last visit of `visits`."""
    page.on("console", lambda said: visits[-1].console.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: visits[-1].console.append(str(error)))
    page.on("requestfailed", lambda asked: visits[-1].failed.append(f"{asked.failure} {asked.url}")
            if asked.failure != "net::ERR_ABORTED" else None)  # fmt: skip  # aborted, because the next page was opened
    page.on("response", lambda came: visits[-1].failed.append(f"{came.status} {came.url}")
            if came.status >= 400 else None)  # fmt: skip
    page.on("request", lambda asked: visits[-1].foreign.append(asked.url)
            if not asked.url.startswith((address, "data:", "blob:")) else None)  # fmt: skip


def walk(chromium: str, address: str, names: Sequence[str], width: int, scheme: str) -> list[Visit]:
    """Visit the named pages at one width and in one colour scheme, and return one record for each page."""
    axe, visits = importlib.import_module("axe_playwright_python.sync_playwright").Axe(), []
    size = {"width": width, "height": 900}
    with (
        started(chromium) as browser,
        browser.new_context(viewport=size, color_scheme=scheme, reduced_motion="reduce") as context,
    ):
        page = context.new_page()
        watch(page, address, visits)
        for order, name in enumerate(names):
            visits.append(Visit())
            page.goto(address + name, wait_until="load")
            page.evaluate("document.fonts.ready.then(() => null)")
            visits[-1].looks = page.evaluate(SCRIPT)
            # all API pages look alike, so axe checks every third of them, and those in the light scheme
            if not name.startswith("api/") or scheme == "light" or order % 3 == 0:
                both = scheme == "dark" and not name.startswith("api/")  # axe checks this page in both schemes
                visits[-1].faults = serious(page, axe, **(IN_COLOUR if both else {}))
    return visits


@pytest.fixture(scope="module")
def walks(chromium, site, pages) -> dict[tuple[str, int, str], Visit]:
    """The records of all WALKS by page, width and colour scheme; two threads visit the pages."""
    pytest.importorskip("axe_playwright_python")
    index = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8")) | {"docs": []}
    some = [name for order, name in enumerate(pages) if not name.startswith("api/") or order % 6 == 1]
    names = [each or (list(pages) if scheme == "dark" else some) for (_, scheme), each in WALKS.items()]
    (site / "search" / "empty_index.json").write_text(json.dumps(index), encoding="utf-8")
    with served(site, WithoutIndex) as address, ThreadPoolExecutor(2) as pool:
        walked = list(pool.map(lambda how, each: walk(chromium, address, each, *how), WALKS, names))
    return {(name, *how): visit for how, each, visits in zip(WALKS, names, walked, strict=True)
            for name, visit in zip(each, visits, strict=True)}  # fmt: skip


def faulty(walks, look) -> dict:
    """Return the results of the function `look` for all visits, without empty results."""
    return {visited: found for visited, visit in walks.items() if (found := look(visit))}


def test_pages_are_there(pages):
    """List the pages -> eleven pages of notebooks, and pages of every section of the navigation."""
    assert len([name for name in pages if re.match(r"learn/(0[1-9]|1[01])-[\w-]+/$", name)]) == 11
    assert {"", "performance/", "correctness/", "glossary/", "architecture/", "log/", "changelog/"} <= pages.keys()
    used = {f"use/{page}/" for page in ("install", "transformers", "ordinary-models", "engine")}
    assert used | {"api/reference/", "api/fast/"} <= pages.keys()


def test_links(site, pages):
    """Follow every local link -> its file and its element exist; no page loads a file from another host."""
    count = 0
    for name, page in pages.items():
        for target in [*page.links, *page.loads]:
            if urlsplit(target).scheme in ("http", "https", "mailto"):
                assert target not in page.loads, f"{name}: loads {target}"
                continue
            path, anchor = urldefrag(urljoin(f"/{name}", target))
            path = unquote(path).lstrip("/")
            file = site / path / "index.html" if path.endswith("/") or not path else site / path
            assert file.is_file(), f"{name}: {target}"
            if anchor:
                assert unquote(anchor) in pages[path.removesuffix("index.html")].ids, f"{name}: {target}"
            count += 1
    assert count > 1000


def test_markdown_is_understood(site, pages):
    """Read every page -> no leftover Markdown syntax of lists, tables, fenced blocks, headings or formulas."""
    for name in pages:
        path = site / name / "index.html" if name.endswith("/") or not name else site / name
        article = path.read_text(encoding="utf-8").partition("<article")[2].partition("</article>")[0]
        article = re.sub(r"<(pre|code|script|svg|style|h[1-6])\b.*?</\1>", "code", article, flags=re.DOTALL)
        article = re.sub(r'<(span|div) class="arithmatex">.*?</\1>', "formula", article, flags=re.DOTALL)
        left = re.findall(r"(?:^|<p>|<li>) *(?:\d+[.)] |[-*+] |\||#+ |```|\$|:::|&gt;).*", article, re.MULTILINE)
        left += re.findall(r"\*\*.*|\]\(.*|\$\$.*", re.sub(r"<[^>]+>", "", article))
        assert not left, f"{name}: {left}"


def test_identifiers_are_unique(pages):
    """Read the identifiers of every page -> each identifier names exactly one element."""
    for name, page in pages.items():
        assert not (twice := {found for found in page.ids if page.ids.count(found) > 1}), f"{name}: {twice}"


def test_pages_load(walks):
    """Open every page -> no error and no warning on the console, and every request succeeds."""
    assert not faulty(walks, lambda visit: visit.console + visit.failed)


def test_no_other_host(walks):
    """Open every page -> the browser sends requests only to the host of the site."""
    assert not faulty(walks, lambda visit: visit.foreign)


def test_fits_the_screen(walks):
    """Open every page -> no page scrolls sideways; an element that is wider than the screen scrolls in its own box."""
    assert not faulty(walks, lambda visit: max(0, visit.looks["overflow"]))


def test_maths_are_visible(walks):
    """Open every page -> every formula is typeset and on the screen; notebooks 1 to 7 have more than three formulas."""
    assert not faulty(walks, lambda visit: visit.looks["lost_maths"])
    assert all(visit.looks["maths"] > 3 for (name, *_), visit in walks.items() if re.match(r"learn/0[1-7]", name))


def stored_figures(path: Path) -> int:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return sum(bool({"image/png", "image/svg+xml"} & output.get("data", {}).keys()) for output in outputs)


def test_plots_are_visible(walks):
    """Open every page -> every expected figure and chart is loaded, has a description and lies on the screen."""
    assert not faulty(walks, lambda visit: visit.looks["lost_pictures"])
    assert not faulty(walks, lambda visit: visit.looks["lost_charts"])
    assert not faulty(walks, lambda visit: visit.looks["lost_figures"])
    for (name, *_), visit in walks.items():
        if name.startswith("learn/"):
            figures = stored_figures(ROOT / "notebooks" / f"{name.split('/')[1]}.ipynb")
            # the pages of notebooks 1 and 2 also show the picture of MLA, which is no output of a cell
            assert visit.looks["figures"] == figures + name.startswith(("learn/01", "learn/02")), name
    charts = drawn(ROOT / "docs").count('<div class="chart">')
    for how in WALKS:
        assert walks["", *how].looks["figures"] == 2
        assert walks["performance/", *how].looks["charts"] == charts >= 4
        assert all(marks > 5 for marks in walks["performance/", *how].looks["marks"])


def test_first_columns_keep_their_words(walks):
    """Open every page -> no word in the first column of a table is broken over two lines."""
    assert not faulty(walks, lambda visit: visit.looks["cut_words"])


def test_scheme_follows_the_system(walks):
    """Open every page -> it has the colour scheme that the reader's system prefers, dark or light."""
    wanted = {"dark": "slate", "light": "default"}
    assert not faulty(walks, lambda visit: visit.looks["scheme"] not in wanted.values())
    assert all(visit.looks["scheme"] == wanted[scheme] for (*_, scheme), visit in walks.items())


def test_accessible(walks):
    """Check the pages with the accessibility checker axe (API pages: some) -> no serious and no critical fault."""
    assert not faulty(walks, lambda visit: visit.faults)


def brightness(page) -> float:
    """Return the brightness of the page's background, 0 to 255."""
    colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
    return sum(map(float, re.findall(r"[\d.]+", colour)[:3])) / 3


def test_dark_mode(browser, address):
    """Click the button of the header -> the colour scheme changes, and the next page keeps the chosen scheme."""
    with browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light") as context:
        page = context.new_page()
        page.goto(address)
        assert brightness(page) > 200
        page.locator("label[for^=__palette]:visible").click()
        page.wait_for_function("document.body.dataset.mdColorScheme === 'slate'")
        assert brightness(page) < 60
        page.goto(address + "performance/")
        assert brightness(page) < 60
        page.locator("label[for^=__palette]:visible").click()
        page.wait_for_function("document.body.dataset.mdColorScheme === 'default'")


@pytest.mark.parametrize("width", [375, 1440])
def test_search(browser, address, pages, width):
    """Search for a function -> the function's entry on the API pages."""
    with browser.new_context(viewport={"width": width, "height": 900}) as context:
        page, visit = context.new_page(), Visit()
        watch(page, address, [visit])
        page.goto(address)
        if width < 600:
            page.locator("label.md-header__button[for=__search]").click()
        page.locator("input.md-search__input").click()
        page.keyboard.type("merge_attn_states")
        links = page.locator("a.md-search-result__link")
        links.first.wait_for(state="visible", timeout=20_000)
        found = [urlsplit(link.get_attribute("href")) for link in links.all()]
        wanted = [link for link in found if link.fragment.endswith("merge_attn_states")]
        assert wanted, found
        assert wanted[0].fragment in pages[wanted[0].path.lstrip("/")].ids
        assert not visit.console + visit.failed + visit.foreign


def text_of(path: Path) -> str:
    """Return the text of a page without HTML tags."""
    return html.unescape(re.sub(r"<[^>]+>", "", path.read_text(encoding="utf-8")))


@pytest.mark.parametrize("notebook", sorted((ROOT / "notebooks").glob("*.ipynb")), ids=lambda path: path.stem)
def test_notebook_pages(site, notebook):
    """Read the page of a notebook -> code, printed output and takeaway; the site also has the notebook's file.

    Set-up cells, answers and the code of answers are in boxes that open on a click. No figure contains a fixed black or
    white, because the colours must follow the colour scheme.
    """
    source = (site / "learn" / notebook.stem / "index.html").read_text(encoding="utf-8")
    words = text_of(site / "learn" / notebook.stem / "index.html")
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    for cell in code:
        assert "".join(cell["source"]).strip() in words
        for output in cell["outputs"]:
            if output.get("name") == "stdout":
                assert "".join(output["text"]).strip() in words
    assert '<p class="admonition-title">Takeaway</p>' in source
    assert source.count('<details class="question">') == sum("".join(c["source"]).count("<details>") for c in cells)
    assert "&lt;details" not in source and "$$" not in words
    folded = re.findall(r'<details class="(abstract|example)">.*?</details>', source, re.DOTALL)
    tags = [tag for cell in code for tag in cell["metadata"].get("tags", ())]
    assert folded == ["abstract"] * tags.count("setup") + ["example"] * 2
    assert not re.search(r"(?:fill|stroke): #(?:000000|ffffff)", source)
    assert (site / "learn" / notebook.name).read_bytes() == notebook.read_bytes()


def hook(name: str):
    """Import a module of docs/hooks."""
    sys.path.insert(0, str(ROOT / "docs" / "hooks"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.pop(0)


def test_picture_of_mla():
    """Draw the picture of MLA -> the same SVG as the committed file, with DeepSeek-V3's numbers, used on four pages."""
    from reference.interfaces import PRESETS

    diagram = hook("mla_diagram")
    assert diagram.PICTURE.read_text(encoding="utf-8") == diagram.svg()
    assert diagram.DIMS.items() <= PRESETS["deepseek-v3"].items()
    for path in ("README.md", "docs/index.md", "notebooks/01-latent.ipynb", "notebooks/02-two-paths.ipynb"):
        assert len(diagram.IMAGE.findall((ROOT / path).read_text(encoding="utf-8"))) == 1, path


def drawn(docs: Path) -> str:
    """Return the Markdown of the Performance page with the results in the folder `docs`."""
    return hook("performance").filled((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"), docs)


@pytest.fixture
def copied_docs(tmp_path) -> Path:
    """Folder `docs` of a copy of the results, the log and the sources of `fast`; tests can change this copy."""
    shutil.copytree(ROOT / "docs" / "results", tmp_path / "docs" / "results")
    shutil.copy(ROOT / "docs" / "log.md", tmp_path / "docs")
    shutil.copytree(ROOT / "fast", tmp_path / "fast", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path / "docs"


def test_performance_page_holds_the_results(copied_docs):
    """Draw the page Performance -> it has the times, rates, dates, versions and commands of the results files."""
    page = drawn(copied_docs)
    assert "<!-- results:" not in page
    results = {path.name: json.loads(path.read_text()) for path in copied_docs.glob("results/*.json")}
    del results["mutants.json"]  # the page Correctness shows it
    del results["fp8-loss-cpu-2-cores.json"]  # the page fp8 caches shows it
    del results["cpu-bits.json"], results["h200-bits.json"]  # the page Correctness shows them
    assert all(f"({'results/' + name})" in page for name in results)
    decode = results["h200-decode.json"]
    for row in decode["rows"]:
        for way in decode["rows"][0]["times"]:
            shown = [f"{time['median_us']:.1f}" for time in row["times"][way].values()]
            assert any(all(figure in line for figure in shown) for line in page.splitlines()), (row["dims"], way)
    for report in results.values():
        assert report["date"][:10] in page and report["versions"]["torch"] in page
        assert all(command in page for command in re.split(" && |; ", report.get("command", "")))
    assert f"{decode['ceilings']['read_gb_s']:.0f} GB/s" in page
    assert f"{decode['ceilings']['sustained_matmul_tflops']:.0f} TFLOPS" in page


def test_performance_page_follows_the_results(copied_docs):
    """Change a results file and draw the page -> it has the new times, rows, rates, dates and marks of charts."""
    before = drawn(copied_docs)
    path = copied_docs / "results" / "h200-decode.json"
    report = json.loads(path.read_text())
    new = json.loads(json.dumps(report["rows"][0]))
    new["dims"]["S"] = 4321
    fastest = min(time["median_us"] for time in new["times"]["replayed"].values()) / 2
    for way in new["times"].values():
        way["Another peer"] = {**way["FlashMLA"], "median_us": fastest, "tflops": 999.0}
    report["rows"].append(new)
    report["date"], report["ceilings"]["read_gb_s"] = "2031-02-03", 5432.1
    path.write_text(json.dumps(report))
    after = drawn(copied_docs)
    for text in ("4321", "Another peer", f"**{fastest:.1f}**", "2031-02-03", "5432 GB/s", "999 TFLOPS"):
        assert text in after and text not in before, text
    # each mark is drawn twice, in the wide and in the narrow drawing; a new kernel also has a mark in the legend
    assert after.count('class="mark ours fast"') == before.count('class="mark ours fast"') + 2
    assert after.count('class="mark peer Another-peer"') == 2 + 1


def test_one_colour_a_contender(copied_docs):
    """Collect the colours of all pictures and charts -> each measured implementation has one colour of its own."""
    picture, performance = hook("picture"), hook("performance")
    from fast.demo.report import COLOURS, NO_CONTENDER

    assert picture.COLOURS is COLOURS
    assert len({*COLOURS.values(), NO_CONTENDER}) == len(COLOURS) + 1
    css = (ROOT / "docs" / "assets" / "site.css").read_text(encoding="utf-8")
    light, dark = (dict(re.findall(r"--([\w-]+): (#\w+);", css.split(scheme)[1].split("}")[0]))
                   for scheme in ("\n:root {", '\n[data-md-color-scheme="slate"] {'))  # fmt: skip
    styles = {who: performance.style_of(who).split()[-1] for who in COLOURS}
    assert {who: light[style] for who, style in styles.items()} == COLOURS
    assert len({dark[style] for style in (*styles.values(), "other")}) == len(styles) + 1
    for style in styles.values():
        assert f".chart .{style} {{ --contender: var(--{style}); }}" in css
    assert performance.style_of("fast, planned") == performance.style_of("fast") == "ours fast"
    drawn_styles = set(re.findall(r'class="(?:mark|line) (?:ours|peer) ([\w-]+)"', drawn(copied_docs)))
    assert {"fast", "FlashMLA", "FA3", "reference", "transformers"} <= drawn_styles <= set(styles.values())


def test_performance_page_shows_no_failed_row(copied_docs):
    """Let a row fail its comparison with `reference` -> the page shows no times of this row."""
    path = copied_docs / "results" / "h200-decode.json"
    report = json.loads(path.read_text())
    report["rows"][0]["passed"] = False
    report["rows"][0]["times"]["replayed"]["fast"]["median_us"] = 12345.6
    path.write_text(json.dumps(report))
    page = drawn(copied_docs)
    assert page.count("parity failed") == 2 and "12345.6" not in page
    assert "the outputs of every row passed" in page  # the tables of other files still say this


def test_performance_page_has_no_typed_figures():
    """Read the source of the page Performance -> no time, no rate and no ratio, because a hook inserts the numbers."""
    prose = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    assert not re.search(r"\d(?:\.\d+)?\s*(?:us|ms|GB/s|TFLOPS|%|times)\b", prose)


def test_sources_are_compared(copied_docs):
    """Draw the page -> it says for each results file whether the sources of `fast` changed after the measurement."""
    from ..benchmarks.report import digest

    path = copied_docs / "results" / "cpu-2-cores.json"
    report = json.loads(path.read_text())
    before = drawn(copied_docs).count("`, unchanged since")
    report["fast_sha256"] = digest(ROOT / "fast")
    path.write_text(json.dumps(report))
    known = json.loads((ROOT / "docs" / "results" / path.name).read_text())["fast_sha256"] == report["fast_sha256"]
    assert drawn(copied_docs).count("`, unchanged since") == before + (not known)
    report["fast_sha256"] = "0" * 64
    path.write_text(json.dumps(report))
    assert "sha256 `000000000000`, changed since" in drawn(copied_docs)


def test_negative_results_are_those_of_the_log(copied_docs):
    """Draw the page -> it lists every experiment that the log marks as not kept, and no experiment that was kept."""
    log = (copied_docs / "log.md").read_text(encoding="utf-8").split("```")[2]
    page = drawn(copied_docs).split("## What did not help")[1]
    rejected = r"^- \*\*Kept\.\*\* No\b"
    entries = re.split(r"^## ", log, flags=re.MULTILINE)[1:]
    assert page.count("\n- [") == sum(bool(re.search(rejected, entry, re.MULTILINE)) for entry in entries) > 3
    labels = "- **Prediction.** x1.\n- **Measured.** y2.\n- **Kept.** {}.\n- **Learned.** z3.\n\n"
    text = f"## 2030-01-02  A trial\n\nIt failed.\n\n### A part\n\n{labels}## 2026-11-21  Dec"
    path = copied_docs / "log.md"
    for kept, shown in (("No", True), ("Yes", False)):
        path.write_text((ROOT / "docs" / "log.md").read_text().replace("## 2026-11-21  Dec", text.format(kept), 1))
        listed = "- [A trial](log.md#2030-01-02-a-trial), 2030-01-02. It failed. Not kept: [A part](log.md#a-part)."
        assert (listed in drawn(copied_docs)) == shown
