"""Texts for the errors and reasons of the registry: an error in one line, and the most similar name."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def in_one_line(error: BaseException) -> str:
    """Return the type and the text of an error in one line; the type alone if the error has no text."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def visible(name: object) -> object:
    """Return a name for the end of an error; with quotes if it is empty, or if it starts or ends with a blank."""
    return repr(name) if isinstance(name, str) and (not name or name != name.strip()) else name


def most_similar(name: object, names: Iterable[str]) -> str:
    """Return the most similar name in words for the end of an error; an empty text if no name is similar.

    Capitals, "-" and "_" make no difference. The first letters of the words of a name count as the name: "fa3" is
    "flash_attn_3".
    """
    names, given = list(names), _letters(str(name))
    by_letters = {"".join(word[:1] for word in each.split("_")): each for each in reversed(names)}
    similar = [given] if len(given) > 1 and given in by_letters else []
    if not similar:
        by_letters = {_letters(each): each for each in reversed(names)}
        similar = difflib.get_close_matches(given, by_letters, 1)
    return "".join(f" (the most similar name: {by_letters[each]})" for each in similar)


def _letters(name: str) -> str:
    return name.strip().casefold().replace("-", "").replace("_", "")
