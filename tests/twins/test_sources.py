"""What the sources of the packages must not hold: the same lines twice, byte counts of a cache outside its format."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import reference

ROOT = Path(reference.__file__).parents[1]
WINDOW = 20  # lines


def code_lines(path: Path) -> list[tuple[int, str]]:
    """Numbers and texts of the lines that do something: no docstring, comment, import, signature or lone bracket.

    The launchers of one op have one signature in every backend.
    """
    source = path.read_text(encoding="utf-8")
    left_out: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            left_out |= set(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.FunctionDef):
            left_out |= set(range(node.lineno, node.body[0].lineno))
        if isinstance(node, ast.Module | ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            left_out |= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    lines = ((number, re.sub(r"\s*#.*", "", line).strip()) for number, line in enumerate(source.splitlines(), 1))
    return [(number, line) for number, line in lines if number not in left_out and len(line) > 3]


def repeated(paths: list[Path]) -> dict[tuple[str, str], list[tuple[int, int]]]:
    """Where WINDOW lines stand twice: for two files, the first lines of both."""
    seen: dict[tuple[str, ...], tuple[Path, int]] = {}
    found: dict[tuple[str, str], list[tuple[int, int]]] = {}
    for path in paths:
        lines = code_lines(path)
        for start in range(len(lines) - WINDOW + 1):
            window = lines[start : start + WINDOW]
            first = seen.setdefault(tuple(line for _, line in window), (path, window[0][0]))
            if first != (path, window[0][0]):
                found.setdefault((first[0].name, path.name), []).append((first[1], window[0][0]))
    return found


def test_no_lines_stand_twice():
    """Two launchers once repeated 68 of their 74 lines."""
    assert repeated(sorted((ROOT / "fast").rglob("*.py"))) == {}


def test_repeated_lines_are_seen(tmp_path):
    """The reader itself: other comments and indents change nothing, one other line does."""
    lines = [f"value_{number} = {number}" for number in range(30)]
    (tmp_path / "a.py").write_text("\n".join(lines))
    (tmp_path / "b.py").write_text('"""Another."""\nif True:\n' + "\n".join(f"    {x}  # why" for x in lines[:20]))
    assert repeated(sorted(tmp_path.glob("*.py"))) == {("a.py", "b.py"): [(1, 3)]}
    (tmp_path / "b.py").write_text("\n".join([*lines[:10], "other = 1", *lines[10:20]]))
    assert repeated(sorted(tmp_path.glob("*.py"))) == {}


# modules that may count the bytes of an element: the formats, the alignment that the copy engine asks for, messages
# between ranks, and reports of the main job
COUNTS_BYTES = (
    "reference/interfaces/cache_format.py", "fast/backends/selection.py", "fast/distributed/merge.py",
    "reference/distributed/merge.py", "reference/distributed/groups.py", "fast/demo/",
)  # fmt: skip


def test_formats_alone_count_bytes():
    """Outside kernels nothing but a format turns the widths of a cache into bytes."""
    for package in ("reference", "fast"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("fast/kernels/", "fast/assets/", *COUNTS_BYTES)):
                continue
            tree = ast.parse(path.read_text(encoding="utf-8"))
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
            assert not used & {"itemsize", "element_size", "nbytes"}, name


def test_formats_alone_know_the_columns():
    """Every op checks its cache by the format that it is given, never by widths and a dtype of its own."""
    for package in ("reference", "fast"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name.startswith(("fast/kernels/", "reference/interfaces/")):
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and ast.unparse(node.func) == "check_cache":
                    assert len(node.args) == 1 and not node.keywords, f"{name}:{node.lineno}"
                if isinstance(node, ast.Compare) and "kv_cache.dtype" in ast.unparse(node):
                    raise AssertionError(f"{name}:{node.lineno} compares the dtype of a cache")
