"""Checks of modules that sources name as strings, and of the picture of the layers on the page Architecture.

A backend names its kernels by dotted paths such as "fast.kernels.triton.gqa.sizes:schedule_programs", and imports them
at the first call. `tests/twins/test_structure.py` reads import statements alone; this module reads the strings.
"""

from __future__ import annotations

import ast
import re

import pytest

from .test_structure import FLOORS, ROOT, files_of_modules, parse

DOTTED = re.compile(r"(?:fast|reference)(?:\.\w+)+(?::\w*)?")
# folder or file: modules that its files may name as strings. No other file names a module of the packages as a string.
NAMED_AS_STRINGS = {
    "fast/backends/own.py": ("fast.kernels",),  # launchers of the four backends of this package
    "fast/backends/adapters": (
        "fast.backends.adapters",  # launchers of the other modules of the same library
        "fast.kernels.triton.conversion",  # the kernels that adapters launch
        "fast.mla.decode_hooks", "fast.mla.flashinfer_hooks",  # hooks, which the builders and layers of MLA load
    ),
}  # fmt: skip
# strings that name a module and do not load it: why
TEXTS = {
    ("fast/_shadow.py", "reference.interfaces"): "a module that is looked for, and not loaded",
    ("fast/kernels/compile_log.py", "fast.kernels"): "name of a logger, and beginning of the names of kernels",
}
# files that import a module whose name they do not write down: what they import
OTHER_IMPORTS = {
    "fast/backends/registry.py": "the path of a launcher that a backend declares",
    "fast/backends/adapters/sources.py": "a library of an adapter",
}


def named_modules(tree: ast.AST, names: set[str]) -> set[str]:
    """Return the modules of the two packages that a source names as strings, such as "fast.kernels.triton".

    A string names a module if it has a colon, like the path of a launcher, or if a module of this name exists. An
    f-string counts up to its first expression: f"fast.kernels.{package}:{op}" names "fast.kernels".

    Args:
        tree: the parsed source.
        names: import names of all modules and folders of the two packages.
    """
    begun = {id(node.values[0]) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) and node.values}
    found = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        text = node.value
        if id(node) in begun:
            text = text.rstrip(".:")
        module = text.partition(":")[0]
        if DOTTED.fullmatch(text) and (":" in text or module in names):
            found.add(module)
    return found


def dynamic_imports(tree: ast.AST) -> list[str | None]:
    """Return the arguments of `importlib.import_module` and `__import__`; None for one that is no literal string."""
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    called = [node for node in calls if ast.unparse(node.func).split(".")[-1] in ("import_module", "__import__")]
    literals = [node.args[0] if len(node.args) == 1 and not node.keywords else None for node in called]
    return [node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None for node in literals]


def allowed_names(path: str) -> tuple[str, ...]:
    """Return the modules that a file may name as strings."""
    fits = (names for place, names in NAMED_AS_STRINGS.items() if path == place or path.startswith(f"{place}/"))
    return next(fits, ())


def all_names() -> set[str]:
    """Return the import names of all modules and folders of the two packages."""
    modules = set(files_of_modules())
    return modules | {module.rpartition(".")[0] for module in modules if "." in module}


def test_modules_named_as_strings():
    """Read the strings of all files -> only backends name modules as strings: kernels, adapters, and hooks of MLA."""
    names, used = all_names(), set()
    for module, path in files_of_modules().items():
        name, tree = path.relative_to(ROOT).as_posix(), parse(path)
        for named in named_modules(tree, names):
            if (name, named) in TEXTS:
                continue
            fits = [prefix for prefix in allowed_names(name) if f"{named}.".startswith(f"{prefix}.")]
            assert fits, f"{module} names {named} as a string"
            assert named in names, f"{module} names {named}, which does not exist"
            used.update(fits)
    assert used == {prefix for prefixes in NAMED_AS_STRINGS.values() for prefix in prefixes}


def test_dynamic_imports():
    """Read all calls of `import_module` -> literal names are of other packages; two files import other names."""
    unknown = set()
    for path in files_of_modules().values():
        for name in dynamic_imports(parse(path)):
            assert name is None or name.split(".")[0] not in ("", "fast", "reference"), f"{path} imports {name}"
            unknown |= {path.relative_to(ROOT).as_posix()} if name is None else set()
    assert unknown == OTHER_IMPORTS.keys()


def top_names(tree: ast.Module) -> set[str]:
    """Return the names that a module defines or imports at its top level."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.ImportFrom | ast.Import):
            found |= {alias.asname or alias.name for alias in node.names}
    return found


def test_named_functions_exist():
    """Read the paths "module:name" of all files -> each module defines or imports this name."""
    files, checked = files_of_modules(), 0
    for path in files.values():
        for node in ast.walk(parse(path)):
            text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
            module, colon, name = text.partition(":")
            if colon and name and DOTTED.fullmatch(text):
                checked += 1
                assert name in top_names(parse(files[module])), text
    assert checked >= 8


@pytest.mark.parametrize(
    "line, expected",
    [
        ("x = 'fast.mla.layer:attend'", {"fast.mla.layer"}),
        ("x = f'fast.kernels.{package}:{op}'", {"fast.kernels"}),
        ("x = f'fast.mla.layer:{op}'", {"fast.mla.layer"}),
        ("importlib.import_module('fast.mla.layer')", {"fast.mla.layer"}),
        ("f(hooks='fast.gone.layer:Hooks')", {"fast.gone.layer"}),
        ("x = 'fast.mla.layer.attend'", set()),
        ("'See fast.mla.layer for more.'", set()),
        ("x = 'reference.mla_decode'", set()),
        ("from fast.mla import layer", set()),
    ],
)
def test_named_modules_are_seen(line, expected):
    """Write a line -> `named_modules` finds exactly the modules that the line names as strings."""
    assert named_modules(ast.parse(line), {"fast.kernels", "fast.mla.layer"}) == expected


@pytest.mark.parametrize(
    "line, expected",
    [
        ("importlib.import_module('fast.mla.layer')", ["fast.mla.layer"]),
        ("import_module('.layer', __package__)", [None]),
        ("__import__('torch')", ["torch"]),
        ("importlib.import_module(name)", [None]),
        ("import fast.mla.layer", []),
    ],
)
def test_dynamic_imports_are_seen(line, expected):
    assert dynamic_imports(ast.parse(line)) == expected


def layers_of_picture(page: str) -> list[list[str]]:
    """Return the names in each layer of the picture on the page Architecture; the lowest layer first."""
    section = page.split("## The layers of imports", 1)[1]
    picture = section.split("```text\n", 1)[1].split("```", 1)[0]
    rows = [line for line in picture.splitlines() if not set(line) <= {"─"}]
    # two spaces or more separate the names from each other and from the description, which is behind column 44
    return [re.split(r"\s{2,}|, ", line[:44].strip()) for line in reversed(rows)]


def names_of_floor(floor: tuple[str, ...]) -> set[str]:
    """Return the names of a floor of FLOORS as the picture has them."""
    whole = {"reference/__init__.py": "reference", "fast/__init__.py": "fast", "fast/__main__.py": "python -m fast"}
    return {whole.get(place, place.removesuffix(".py").rpartition("/")[2]) for place in floor}


def test_picture_of_layers():
    """Compare the picture of the layers with FLOORS -> the same names in the same order; the text names all of them."""
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    layers = layers_of_picture(page)
    assert [set(layer) for layer in layers] == [names_of_floor(floor) for floor in FLOORS]
    text = page.split("## The layers of imports", 1)[1].split("```", 2)[2].split("\n## ", 1)[0]
    written = {"fast": "fast/__init__.py", "reference": "reference/__init__.py"}
    for name in {name for layer in layers for name in layer} - {"python -m fast"}:
        assert f"`{written.get(name, name)}`" in text, f"the text below the picture does not name {name}"
