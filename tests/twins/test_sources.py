"""Checks of the packages' sources.

No code is repeated, only listed modules use the number of bytes of an element, and results with many parts have names.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import reference

ROOT = Path(reference.__file__).parents[1]
WINDOW = 20  # number of consecutive lines that must not occur twice


def code_lines(path: Path) -> list[tuple[int, str]]:
    """Return number and text of each line that is compared.

    Docstrings, comments, imports, signatures and lines of at most three characters are left out. Signatures may be
    repeated, because the launchers of an op have the same signature in every backend.
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
    """Return the sequences of WINDOW lines that occur twice.

    Returns:
        A mapping from a pair of files to a list. The list has one pair for each repeated sequence: the numbers of its
        first line in the two files.
    """
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
    """Search `fast` for repeated code -> no sequence of WINDOW lines occurs twice."""
    assert repeated(sorted((ROOT / "fast").rglob("*.py"))) == {}


def test_repeated_lines_are_seen(tmp_path):
    """Repeat 20 lines with other comments and indents -> they are found, unless a new line interrupts the sequence."""
    lines = [f"value_{number} = {number}" for number in range(30)]
    (tmp_path / "a.py").write_text("\n".join(lines))
    (tmp_path / "b.py").write_text('"""Another."""\nif True:\n' + "\n".join(f"    {x}  # why" for x in lines[:20]))
    assert repeated(sorted(tmp_path.glob("*.py"))) == {("a.py", "b.py"): [(1, 3)]}
    (tmp_path / "b.py").write_text("\n".join([*lines[:10], "other = 1", *lines[10:20]]))
    assert repeated(sorted(tmp_path.glob("*.py"))) == {}


# module that is allowed to use the number of bytes of an element: its purpose
COUNTS_BYTES = {
    "reference/interfaces/cache_format.py": "the formats",
    "reference/interfaces/cache_arguments.py": "alignment of a cache to the words of its format",
    "reference/interfaces/checks.py": "addresses of tensors that must not overlap",
    "reference/interfaces/graphs.py": "memory of captured CUDA graphs",
    "fast/backends/adapters/conversion.py": "alignment of tensors to the words that libraries load",
    "fast/backends/selection.py": "alignment of pointers and strides to the words of the copy engine",
    "reference/distributed/merge.py": "messages between ranks, which hold states of two dtypes",
    "fast/distributed/merge.py": "messages between ranks",
    "reference/distributed/groups.py": "bytes that an exchange sends",
    "fast/demo/gqa/figures.py": "bytes of a cache, which the main job prints",
    "fast/demo/gqa/op_parity.py": "rows of bytes of a cache that has random contents",
    "fast/demo/gqa/serving.py": "bytes of the cache blocks that requests hold",
    "fast/mla/weight_views.py": "alignment of queries to the words of the copy engine",
    "fast/kernels/descriptors.py": "alignment to the words of the copy engine",
    "fast/kernels/cpu/context_parallel.py": "messages between ranks",
    "fast/kernels/cpu/decode.py": "CHUNK_BYTES is a fraction of the CPU's cache",
    "fast/kernels/cpu/gqa.py": "TILE_BYTES is a fraction of the CPU's cache",
    "fast/kernels/torch/attention.py": "TILE_BYTES and SCORE_BYTES bound the memory of a call",
    "fast/kernels/hopper/varlen/launch.py": "alignment to the words of the copy engine",
    "fast/kernels/hopper/varlen/select.py": "shared memory of tiles",
    "fast/kernels/triton/attention_sizes.py": "shared memory of tiles",
    "fast/kernels/triton/cache.py": "rows of a program have a fixed number of bytes",
    "fast/kernels/triton/cache_formats.py": "rows of a program have a fixed number of bytes",
    "fast/kernels/triton/cache_rows.py": "integers as wide as an element",
    "fast/kernels/triton/context_parallel.py": "rows of a program have a fixed number of bytes; messages of ranks",
    "fast/kernels/triton/decode.py": "alignment to the words of the copy engine",
    "fast/kernels/triton/decode_shapes.py": "shared memory of tiles",
    "fast/kernels/triton/gqa/sizes.py": "shared memory of tiles",
}


def sources_without_bytes() -> dict[str, str]:
    """Return name and text of every source that is not listed in COUNTS_BYTES."""
    paths = {path.relative_to(ROOT).as_posix(): path for package in ("reference", "fast") for path in
             (ROOT / package).rglob("*.py")}  # fmt: skip
    left_out = ("fast/assets/", *COUNTS_BYTES)
    return {name: path.read_text(encoding="utf-8") for name, path in paths.items() if not name.startswith(left_out)}


def counts_bytes(source: str) -> bool:
    """Return True if a source text uses `itemsize`, `element_size` or `nbytes`."""
    used = {node.attr for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute)}
    return bool(used & {"itemsize", "element_size", "nbytes"})


def test_formats_alone_count_bytes():
    """Search the sources -> exactly the modules of COUNTS_BYTES use the number of bytes of an element."""
    assert not [name for name, source in sources_without_bytes().items() if counts_bytes(source)]
    assert not [name for name in COUNTS_BYTES if not counts_bytes((ROOT / name).read_text(encoding="utf-8"))]


# (file, line) with a literal number of bytes: why it is not the size of an element that the cache format decides
LITERAL_BYTES = {
    ("reference/interfaces/cache_format.py", "SCALE_BYTES = 4"): "the formats know the size of a float32 scale",
    ("reference/distributed/groups.py", 'self._begin("all_reduce", 2 * (self.size - 1) * _bytes(x) // self.size)'):
        "an exchange sends its data twice",
    ("fast/kernels/cpu/decode.py", "CHUNK_BYTES = 4 << 20"): "memory of a call",
    ("fast/kernels/cpu/gqa.py", "TILE_BYTES = 2 << 20"): "memory of a call",
    ("fast/kernels/cpu/gqa.py", "SCORE_BYTES = 8 << 20"): "memory of a call",
    ("fast/kernels/torch/attention.py", "TILE_BYTES = 256 << 20"): "memory of a call",
    ("fast/kernels/torch/attention.py", "SCORE_BYTES = 256 << 20"): "memory of a call",
    ("fast/kernels/triton/cache.py", "LEAST_COPY_BYTES = 1 << 20"): "length of a copy",
    ("fast/kernels/hopper/varlen/select.py", "L2_BYTES = 8 * 2**20"): "memory of a GPU",
}  # fmt: skip


def is_number(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) in (int, float)


def literal_byte_counts(source: str) -> list[int]:
    """Return the line numbers of a source where a literal stands for the number of bytes of an element.

    Three kinds of lines are found:

    - a statement with a literal factor and one of three names: a name that contains "byte", `head_size` (width of a
      cache entry), or `expect` (bytes that an mbarrier waits for)
    - an assignment of 1, 2, 4 or 8 to a name of bytes or of an element size (`is_size`)
    - an assignment of a product of numbers of elements to a name of bytes, without a name of bytes or of a width of a
      dtype in the product, as if an element had one byte
    """
    found = []
    for statement in ast.walk(ast.parse(source)):
        if isinstance(statement, ast.arguments):
            places = statement.posonlyargs + statement.args
            pairs = [*zip(places[len(places) - len(statement.defaults) :], statement.defaults, strict=True),
                     *zip(statement.kwonlyargs, statement.kw_defaults, strict=True)]  # fmt: skip
            found += [place.lineno for place, default in pairs if is_size(place.arg) and is_size_of_element(default)]
        if not isinstance(statement, ast.stmt):
            continue
        own = [child for child in ast.iter_child_nodes(statement) if isinstance(child, ast.expr)]
        nodes = [node for child in own for node in ast.walk(child)]
        names = [node.id if isinstance(node, ast.Name) else node.attr for node in nodes
                 if isinstance(node, ast.Name | ast.Attribute)]  # fmt: skip
        factors = (node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.LShift))
        counted = any("byte" in name.lower() or name in ("head_size", "expect") for name in names)
        if counted and any(is_number(node.left) or is_number(node.right) for node in factors):
            found.append(statement.lineno)
        if isinstance(statement, ast.Assign | ast.AnnAssign) and any(map(is_size, names)):
            found += [statement.lineno] * is_size_of_element(statement.value)
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            found += [statement.lineno] * (counts_elements_as_bytes(statement.value) and any(map(names_bytes, targets)))
    return sorted(set(found))


def names_bytes(target: ast.expr) -> bool:
    """Return True if an assignment gives a name with "byte" in it."""
    return "byte" in getattr(target, "id", getattr(target, "attr", "")).lower()


def counts_elements_as_bytes(value: ast.expr | None) -> bool:
    """Return True if an expression is a product of names, and no name in it is a number of bytes or a width."""
    products = (node for node in ast.walk(value or ast.Constant(None)) if isinstance(node, ast.BinOp))
    names = {getattr(node, "id", getattr(node, "attr", "")).lower() for node in ast.walk(value or ast.Constant(None))}
    sized = any(word in name for name in names for word in ("byte", "itemsize", "element_size", "bitwidth"))
    return bool(names - {""}) and not sized and any(isinstance(node.op, ast.Mult) for node in products)


def is_size(name: str) -> bool:
    """Return True if a name contains "byte", "element_size" or "itemsize"."""
    return any(word in name.lower() for word in ("byte", "element_size", "itemsize"))


def is_size_of_element(node: ast.AST | None) -> bool:
    return is_number(node) and node.value in (1, 2, 4, 8)


def test_no_literal_stands_for_the_bytes_of_an_element():
    """Search the sources, kernels included -> no literal is the size of an element, which the cache format decides."""
    found = {}
    for package in ("reference", "fast"):
        for path in (ROOT / package).rglob("*.py"):
            name, source = path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8")
            lines = literal_byte_counts(source) if not name.startswith("fast/assets/") else []
            found |= {(name, source.splitlines()[line - 1].split("#")[0].strip()): line for line in lines}
    assert found.keys() == LITERAL_BYTES.keys()


@pytest.mark.parametrize(
    "line, expected",
    [
        ("whole_bytes = 2 * keys * c.head_size", 1),
        ("apart_bytes = whole_bytes - 2 * (real - 1) * prefix * c.head_size", 1),
        ("absorbed_bytes = 2.0 * (keys * width + states)", 1),
        ("state_bytes = 4 * tokens * heads", 1),
        ("moved = costs.byte * (2.0 * (latents + states))", 1),
        ("read = 2 * keys * config.head_size", 1),
        ("return keys * config.head_size << 1 if keys else 0", 1),
        ("return max(flops, FLOPS_PER_BYTE * (width * 2))", 1),
        ("BYTES_PER_ELEMENT = 2", 1),
        ("element_size: int = 4", 1),
        ("def read(keys, element_size=2): pass", 1),
        ("def read(keys, *, element_bytes=2): pass", 1),
        ("mbarrier.expect(bar, TILE * (WIDTH + TAIL) * 2)", 1),
        ("BYTES: gl.constexpr = TILE * WIDTH * 2", 1),
        ("BYTES: gl.constexpr = TILE * (c.LATENT + c.ROPE)", 1),
        ("self.tile_bytes = tile * width", 1),
        ("row_bytes = 2 * key_bytes", 1),
        ("BYTES: gl.constexpr = ELEMENTS * (tiles.dtype.primitive_bitwidth // 8)", 0),
        ("rows = tile * width", 0),
        ("FLOPS_PER_BYTE = 200", 0),
        ("state_elements = 4 * tokens * heads", 0),
        ("whole_bytes = keys * entry_bytes", 0),
        ("flops = 2 * heads * pairs", 0),
        ("def read(keys, element_size): return keys * element_size", 0),
    ],
)
def test_literal_byte_counts_are_seen(line, expected):
    """Read a line -> `literal_byte_counts` reports the line only if it contains a literal size of an element."""
    assert len(literal_byte_counts(line)) == expected


def is_cache(node: ast.expr) -> bool:
    """Return whether an expression is a cache by its name, such as `kv_cache`, `self.key_cache` or `caches[0]`."""
    if isinstance(node, ast.Subscript):
        return is_cache(node.value)
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.lower().endswith(("cache", "caches"))


def decisions_by_cache_dtype(source: str) -> list[int]:
    """Return the lines that compare the dtype of a cache, or look something up by it.

    The dtype may also have another name in the same file, after `dtype = kv_cache.dtype`.
    """

    def is_dtype(node: ast.AST) -> bool:
        of_cache = isinstance(node, ast.Attribute) and node.attr == "dtype" and is_cache(node.value)
        return of_cache or (isinstance(node, ast.Name) and (node.id in names))

    tree, names = ast.parse(source), set()
    for node in ast.walk(tree):
        value = getattr(node, "value", None)
        if isinstance(node, ast.Assign | ast.AnnAssign | ast.NamedExpr) and value is not None and is_dtype(value):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    deciding = {
        ast.Compare: lambda node: [node.left, *node.comparators],
        ast.Match: lambda node: [node.subject],
        ast.Subscript: lambda node: [node.slice],
        ast.Call: lambda node: node.args if ast.unparse(node.func).endswith((".get", "check_dtype")) else [],
    }
    return [
        node.lineno
        for node in ast.walk(tree)
        for expression in deciding.get(type(node), lambda node: [])(node)
        if any(map(is_dtype, ast.walk(expression)))
    ]


def uses_of(source: str, function: str) -> list[int]:
    """Return the lines that import or name a function."""
    found = []
    for node in ast.walk(ast.parse(source)):
        names = [getattr(node, "id", None), getattr(node, "attr", None)]
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        found += [node.lineno] if function in names else []
    return found


# kernels and launchers that compare the dtype of a cache with another dtype: why
BY_CACHE_DTYPE = {
    "fast/kernels/cpu/cache.py": "copies entries whose dtype is already that of the output",
    "fast/kernels/cpu/decode.py": "converts no entries that already have the dtype of the arithmetic",
    "fast/kernels/cpu/gqa.py": "converts no entries that already have the dtype of the arithmetic",
    "fast/kernels/triton/cache.py": "copies entries whose dtype is already that of the output",
}


def test_formats_alone_know_the_columns():
    """Search the sources -> outside the contract, nothing but a cache format decides what a cache is.

    Other files do not call `check_cache`, which takes a width and a dtype, and do not decide by the dtype of a cache.
    Exactly the files of BY_CACHE_DTYPE compare the dtype of a cache; each of them serves all pairs of dtypes.
    """
    contract = (ROOT / "reference" / "interfaces" / "cache_arguments.py").read_text(encoding="utf-8")
    assert len(uses_of(contract, "check_cache")) >= 2  # the name is right
    for package in ("reference", "fast"):
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if not name.startswith("reference/interfaces/"):
                source = path.read_text(encoding="utf-8")
                assert not uses_of(source, "check_cache"), f"{name} checks a cache by itself"
                assert bool(decisions_by_cache_dtype(source)) == (name in BY_CACHE_DTYPE), name


@pytest.mark.parametrize(
    "line, seen",
    [
        ("from ..interfaces import check_cache", True),
        ("from ..interfaces import check_cache as checked", True),
        ("interfaces.check_cache(kv_cache)", True),
        ("check = check_cache", True),
        ("check_formatted_cache(kv_cache)", False),
        ("'check_cache'", False),
    ],
)
def test_uses_are_seen(line, seen):
    """Read a line -> `uses_of` reports it exactly if it imports or names the function."""
    assert bool(uses_of(line, "check_cache")) == seen


@pytest.mark.parametrize(
    "line, seen",
    [
        ("if kv_cache.dtype == torch.uint8: pass", True),
        ("if torch.uint8 != kv_cache.dtype: pass", True),
        ("x = kv_cache.dtype in (torch.uint8, E4M3)", True),
        ("x = kv_cache.dtype is q.dtype", True),
        ("x = key_cache.dtype == q.dtype", True),
        ("x = self.kv_cache.dtype == q.dtype", True),
        ("x = caches[0].dtype == q.dtype", True),
        ("stored = kv_cache.dtype\nif stored == q.dtype: pass", True),
        ("if (stored := kv_cache.dtype) == q.dtype: pass", True),
        ("x = SIZES[kv_cache.dtype]", True),
        ("x = SIZES.get(kv_cache.dtype)", True),
        ("check_dtype('kv_cache', kv_cache.dtype)", True),
        ("match kv_cache.dtype:\n    case x: pass", True),
        ("x = str(kv_cache.dtype) == 'torch.uint8'", True),
        ("x = torch.empty(2, dtype=kv_cache.dtype)", False),
        ("x = cache_format.gathered_dtype(kv_cache.dtype, out_dtype)", False),
        ("x = q.dtype == torch.uint8", False),
        ("x = kv_cache.shape[1] == 2", False),
        ("'kv_cache.dtype == torch.uint8'", False),
    ],
)
def test_decisions_by_cache_dtype_are_seen(line, seen):
    """Read a line -> `decisions_by_cache_dtype` reports it exactly if the dtype of a cache decides something."""
    assert bool(decisions_by_cache_dtype(line)) == seen


# functions that return a plain tuple with more than two elements: why it is not a record
PLAIN_TUPLES = {
    "fast/backends/signatures.py:_part_of_tensor": "part of a key that is only compared",
    "fast/backends/adapters/conversion.py:_layout_of": "part of a key that is only compared",
    "fast/demo/gqa/op_parity.py:advance": "results that are only compared",
    "fast/demo/op_parity.py:advance": "results that are only compared",
    "fast/kernels/compile_log.py:_variant": "a key that is only compared",
    "fast/mla/weight_views.py:_layout": "a key that is only compared",
    "reference/interfaces/graphs.py:_place": "a key that is only compared",
    "reference/interfaces/graphs.py:captured_tensors": "a sequence of pairs (name, tensor)",
    "fast/kernels/cpu/cache.py:rope_norm_and_cache": "result of an op of torch.library",
    "fast/kernels/triton/rope.py:rope_norm_and_cache": "result of an op of torch.library",
    "fast/mla/cache_write.py:_": "result of an op of torch.library",
    "reference/interfaces/decode_schedule.py:numbers": "an argument int[4] of ops of torch.library",
    "reference/interfaces/gqa/cache.py:key_value_cache_shape": "a shape",
    "reference/interfaces/sizes.py:kv_cache_shape": "a shape",
    "reference/interfaces/sizes.py:stride_order": "an order of dims, as torch takes it",
}
MOST_WITHOUT_NAMES = 2  # largest number of elements of a plain tuple that a function may return


def own_nodes(function: ast.FunctionDef) -> list[ast.AST]:
    """Return the nodes of the body of a function, without those of functions and classes inside it."""
    found, waiting = [], list(function.body)
    while waiting:
        node = waiting.pop()
        found.append(node)
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting.extend(ast.iter_child_nodes(node))
    return found


def returned_tuples(value: ast.expr | None) -> list[ast.Tuple]:
    """Return the plain tuples that an expression after `return` or `yield` may be."""
    if isinstance(value, ast.IfExp):
        return returned_tuples(value.body) + returned_tuples(value.orelse)
    return [value] if isinstance(value, ast.Tuple) else []


def is_long(elements: list[ast.expr]) -> bool:
    """Return whether the elements of a tuple, or of the type of a tuple, are too many for a tuple without names."""
    fixed = [each for each in elements if not isinstance(each, ast.Starred)]
    return len(fixed) > MOST_WITHOUT_NAMES


def long_tuples(source: str) -> set[str]:
    """Return the names of the functions that return a plain tuple with more than MOST_WITHOUT_NAMES elements.

    A tuple is too long if an annotation of the result, or a tuple after `return` or `yield`, has too many elements. A
    tuple `(*first, second)` may have any length, like a list, so only elements without a star count.
    """
    found = set()
    for function in ast.walk(ast.parse(source)):
        if isinstance(function, ast.Lambda) and any(is_long(each.elts) for each in returned_tuples(function.body)):
            found.add("<lambda>")
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        values = [node.value for node in own_nodes(function) if isinstance(node, ast.Return | ast.Yield)]
        lengths = [each.elts for value in values for each in returned_tuples(value)]
        for node in ast.walk(function.returns) if function.returns else ():
            if isinstance(node, ast.Subscript) and ast.unparse(node.value).lower().endswith("tuple"):
                lengths.append(node.slice.elts if isinstance(node.slice, ast.Tuple) else [])
        if any(is_long(each) for each in lengths):
            found.add(function.name)
    return found


def test_long_tuples_are_records():
    """Search both packages -> a function returns more than two results as a record, whose fields have names."""
    found = {
        f"{path.relative_to(ROOT).as_posix()}:{name}"
        for package in ("fast", "reference")
        for path in sorted((ROOT / package).rglob("*.py"))
        for name in long_tuples(path.read_text(encoding="utf-8"))
    }
    assert found == PLAIN_TUPLES.keys()


@pytest.mark.parametrize(
    "source, found",
    [
        ("def f():\n    return 1, 2, 3", {"f"}),
        ("def f(x):\n    return (1, 2) if x else (1, 2, 3)", {"f"}),
        ("def f() -> list[tuple[int, int, int]]:\n    return g()", {"f"}),
        ("def f() -> typing.Tuple[int, int, int]:\n    return g()", {"f"}),
        ("def f():\n    yield 1, 2, 3", {"f"}),
        ("def f():\n    def g():\n        return 1, 2, 3\n    return g", {"g"}),
        ("f = lambda x: (x, x, x)", {"<lambda>"}),
        ("class A:\n    async def f(self):\n        return 1, *self.x, 2, 3", {"f"}),
        ("def f() -> tuple[int, ...]:\n    return 1, *g()", set()),
        ("def f() -> tuple[int, int]:\n    return 1, 2", set()),
        ("def f() -> Record:\n    return Record(1, 2, 3)", set()),
    ],
)
def test_long_tuples_are_seen(source, found):
    """Write functions with tuples of three elements -> they are found, and no record, pair or sequence."""
    assert long_tuples(source) == found
