"""Checks of the sources: a tuple with more than two fields that crosses a function boundary is read by names.

Such a tuple is a record (a NamedTuple or a dataclass). `tests/twins/test_sources.py` checks the functions that return
tuples; this module checks the functions that receive them.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import reference

ROOT = Path(reference.__file__).parents[1]
MOST_WITHOUT_NAMES = 2  # largest number of fields of a tuple that a function may read by positions
# places that read a long tuple by positions: why the tuple is not a record
READ_BY_POSITIONS = {
    "fast/attention/varlen.py:again: written[:2]": "arguments of two ops of torch.library, which differ at the end",
    "fast/backends/direct_launches.py:direct_call: grid: tuple[int, int, int]": "a grid, as Triton takes it",
    "fast/backends/direct_launches.py:direct_launch: grid: tuple[int, int, int]": "a grid, as Triton takes it",
}


def sources() -> dict[str, ast.Module]:
    """Return the parsed sources of both packages by their names, such as `fast/mla/layer.py`."""
    paths = [path for package in ("fast", "reference") for path in sorted((ROOT / package).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def is_plain_tuple(node: ast.AST | None) -> bool:
    """Return whether an annotation is a tuple with too many fields, such as `tuple[int, int, int]`."""
    return (
        isinstance(node, ast.Subscript) and ast.unparse(node.value).lower().endswith("tuple")
        and isinstance(node.slice, ast.Tuple) and len(node.slice.elts) > MOST_WITHOUT_NAMES
    )  # fmt: skip


def long_records(trees: list[ast.Module]) -> set[str]:
    """Return the names of the NamedTuples with more than MOST_WITHOUT_NAMES fields."""
    classes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
    named = [node for node in classes if any(ast.unparse(base).endswith("NamedTuple") for base in node.bases)]
    return {node.name for node in named if sum(isinstance(x, ast.AnnAssign) for x in node.body) > MOST_WITHOUT_NAMES}


def makers(trees: list[ast.Module], records: set[str]) -> set[str]:
    """Return the names of the functions that return one of the records, or a plain tuple with as many fields."""
    found = set(records)
    for node in (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        made = [each.value for each in ast.walk(node) if isinstance(each, ast.Return)]
        calls = {ast.unparse(value.func) for value in made if isinstance(value, ast.Call)}
        tuples = any(isinstance(value, ast.Tuple) and len(value.elts) > MOST_WITHOUT_NAMES for value in made)
        if ast.unparse(node.returns or ast.Constant(None)) in records or calls & records or tuples:
            found.add(node.name)
    return {name for name in found if not hasattr(torch.Tensor, name)}


def number_of(node: ast.AST) -> int | None:
    """Return a constant index; None for every other subscript."""
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def is_cut(node: ast.AST) -> bool:
    """Return whether a subscript is a slice with a constant bound, and no step."""
    if not isinstance(node, ast.Slice) or node.step is not None:
        return False
    bounds = [bound for bound in (node.lower, node.upper) if bound is not None]
    return bool(bounds) and all(number_of(bound) is not None for bound in bounds)


def named_targets(node: ast.AST) -> int:
    """Return how many names without a star an assignment gives to the elements of one value."""
    elements = node.elts if isinstance(node, ast.Tuple | ast.List) else []
    return sum(not isinstance(each, ast.Starred) for each in elements)


def positional_reads(tree: ast.Module, records: set[str], makers: set[str]) -> list[tuple[str, str]]:
    """Return function and text of each place that reads a tuple of another function by positions.

    A function gets such a tuple as a parameter, or as the result of a call. Four kinds of places are found:

    - a parameter whose annotation is a plain tuple with more than two fields
    - a constant index or slice of a record, of a parameter without annotation, or of the result of a function that
      returns a record; index 0 of a parameter without annotation alone is not found, because kernels get tuples with
      one element for each column block
    - a constant index from 2 on of an attribute, such as `ctx.sizes[5]`, except of a shape
    - an assignment or a loop that gives more than two names to the elements of such a value

    Args:
        tree: the parsed source.
        records: names of the records with more than two fields.
        makers: names of the functions that return such a record.
    """
    found = []
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            name = getattr(function, "name", "<lambda>")
            found += [(name, text) for text in reads_of(function, records, makers)]
    return found


def reads_of(function: ast.FunctionDef | ast.Lambda, records: set[str], makers: set[str]) -> list[str]:
    """Return the text of each place in one function that `positional_reads` describes."""
    spec = function.args
    given = {each.arg: each.annotation for each in (*spec.posonlyargs, *spec.args, *spec.kwonlyargs)}
    found = [f"{name}: {ast.unparse(note)}" for name, note in given.items() if is_plain_tuple(note)]
    texts = {name: "" if note is None else ast.unparse(note) for name, note in given.items()}
    read = {name for name, text in texts.items() if text in records}
    loose = {name for name, text in texts.items() if not text and name not in ("self", "cls")}
    loose |= {spec.vararg.arg} if spec.vararg else set()
    body = function.body if isinstance(function.body, list) else [function.body]
    nodes = [node for statement in body for node in ast.walk(statement)]

    def is_made(node: ast.AST) -> bool:
        called = node.func if isinstance(node, ast.Call) else None
        return getattr(called, "id", getattr(called, "attr", None)) in makers

    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name) and is_made(node.value):
            read.add(node.targets[0].id)
    for node in nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            owner, index = getattr(node.value, "id", None), number_of(node.slice)
            by_position = index is not None or is_cut(node.slice)
            attribute = node.value.attr if isinstance(node.value, ast.Attribute) else "shape"
            of_attribute = not attribute.endswith("shape") and (index or 0) >= MOST_WITHOUT_NAMES
            of_record = owner in read or is_made(node.value) or (owner in loose and index != 0)
            if of_attribute or (by_position and of_record):
                found.append(ast.unparse(node))
        targets, value = [], None
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.For | ast.comprehension):
            targets, value = [node.target], node.iter
        if any(named_targets(target) > MOST_WITHOUT_NAMES for target in targets):
            owner = getattr(value, "id", None)
            if owner in read | loose or is_made(value):
                found.append(ast.unparse(value))
    return found


def test_tuples_are_read_by_names():
    """Search both packages -> no function reads a long tuple of another function by positions, but for a known list."""
    trees = sources()
    records = long_records(list(trees.values()))
    made = makers(list(trees.values()), records)
    assert {"AttentionInputs", "LaunchSizes", "TileKeys"} <= records and "keys_of_tile" in made
    found = {f"{path}:{name}: {text}" for path, tree in trees.items()
             for name, text in positional_reads(tree, records, made)}  # fmt: skip
    assert found == READ_BY_POSITIONS.keys()


RECORDS = """
class Cut(NamedTuple):
    first: int
    end: int
    splits: int
def cut_of(x) -> Cut:
    return Cut(1, 2, 3)
"""


@pytest.mark.parametrize(
    "source, seen",
    [
        ("def f(split_numbers: tuple[int, int, int, int]):\n    return rule(*split_numbers)", True),
        ("def f(arguments):\n    q, v = arguments[0], arguments[3]", True),
        ("def f(arguments):\n    return arguments[:6]", True),
        ("def f(*arguments):\n    return arguments[2]", True),
        ("def f(sizes):\n    return sizes[5]", True),
        ("def f(cut: Cut):\n    return cut[0]", True),
        ("def f(cut: Cut):\n    return g(*cut[1:])", True),
        ("def f(cut: Cut):\n    first, end, splits = cut", True),
        ("def f(cuts):\n    for first, end, splits in cuts:\n        pass", True),
        ("def f(cuts):\n    return [end for first, end, splits in cuts]", True),
        ("def f(x):\n    first, end, splits = cut_of(x)", True),
        ("def f(x):\n    *_, first, end, splits = module.cut_of(x)", True),
        ("def f(x):\n    cut = cut_of(x)\n    return cut[1]", True),
        ("def f(x):\n    return cut_of(x)[2]", True),
        ("f = lambda cut: cut[2]", True),
        ("def f(ctx: Context):\n    return ctx.sizes[5]", True),
        ("class A:\n    async def f(self, cut):\n        return cut[2]", True),
        ("def f(cut: Cut):\n    return cut.first, cut.end", False),
        ("def f(cut: Cut):\n    return launch(*cut)", False),
        ("def f(pair: tuple[int, int]):\n    return pair[0], pair[1]", False),
        ("def f(pair):\n    first, end = pair", False),
        ("def f(blocks):\n    return blocks[0].dtype", False),
        ("def f(x: Tensor):\n    return x[2]", False),
        ("def f(x: Tensor):\n    return x.shape[2]", False),
        ("def f(ctx: Context):\n    return ctx.pair[1]", False),
        ("def f(names: list[str]):\n    return names[3]", False),
        ("def f(x):\n    rows, columns, depth = x.shape", False),
        ("def f(x):\n    a, b, c = x.split((1, 2, 3))", False),
        ("def f(x, end):\n    return x[:end]", False),
        ("def f():\n    cut = 1, 2, 3\n    return cut[2]", False),
        ("def f(*arguments):\n    *inputs, out, backend = arguments", False),
    ],
)
def test_positional_reads_are_seen(source, seen):
    """Write functions that get tuples -> a long tuple that is read by positions is found, and nothing else."""
    tree = ast.parse(RECORDS + source)
    records = long_records([tree])
    assert bool(positional_reads(tree, records, makers([tree], records))) == seen
