// Draw the formulas that the Markdown extension has marked, with the copy of KaTeX beside this file. Add names and
// keyboard access that the theme does not provide, for readers with a keyboard or a screen reader.
document.addEventListener("DOMContentLoaded", () => {
  for (const element of document.querySelectorAll(".arithmatex")) {
    const source = element.textContent.trim();
    const displayMode = source.startsWith("\\[");
    try {
      katex.render(source.slice(2, -2), element, { displayMode, throwOnError: true });
    } catch (error) {
      console.error(`maths: ${error.message}: ${source}`);
    }
  }

  document.querySelector(".md-search[role=dialog]")?.setAttribute("aria-label", "Search");

  // make every element that scrolls sideways reachable from the keyboard
  const scrolls = "div.arithmatex, .katex-display, .md-typeset__scrollwrap, .highlight pre > code, .highlight pre, .output, .diagram";
  const reachable = () => {
    for (const element of document.querySelectorAll(scrolls)) {
      if (element.scrollWidth > element.clientWidth) element.tabIndex = 0;
    }
  };
  reachable();
  document.fonts.ready.then(reachable);
  addEventListener("resize", reachable);
  addEventListener("toggle", reachable, true);
});
