"""List the experiments of the log that were not kept."""

from __future__ import annotations

import re

from markdown.extensions.toc import slugify


def rejected_list(text: str, name: str) -> str:
    """Return a Markdown list of those entries of a log that have rejected experiments.

    Each item has the title, the date and the conclusion of an entry, and links to its rejected experiments.

    Args:
        text: the log, without its example of an entry.
        name: path of the log, to which the links lead.
    """
    items, slugs = [], set()

    def link(heading: str) -> str:
        slug = base = slugify(heading.replace("`", ""), "-")
        count = 0
        while slug in slugs:
            slug, count = f"{base}_{count + 1}", count + 1
        slugs.add(slug)
        return f"[{heading.split(': not kept')[0]}]({name}#{slug})"

    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        title, *experiments = re.split(r"^### ", section, flags=re.MULTILINE)
        heading, _, body = title.partition("\n")
        entry = link(heading).replace(heading, heading.split(maxsplit=1)[1], 1)
        conclusion = " ".join(body.strip().split("\n\n")[0].split())
        rejected = []
        for experiment in experiments:
            name_of, _, text_of = experiment.partition("\n")
            shown = link(name_of)
            if _is_rejected(text_of):
                rejected.append(shown)
        if rejected or _is_rejected(body):
            more = f" Not kept: {'; '.join(rejected)}." if rejected else ""
            items.append(f"- {entry}, {heading.split()[0]}. {conclusion}{more}")
    return "\n".join(items)


def _is_rejected(body: str) -> bool:
    """Return whether the text of an experiment has a line "- **Kept.** no"."""
    return re.search(r"^- \*\*Kept\.\*\* no\b", body, re.MULTILINE | re.IGNORECASE) is not None
