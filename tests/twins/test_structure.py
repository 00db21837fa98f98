"""Checks of the structure of both packages: the same modules, names and signatures; imports in one direction.

Twins are the functions or classes of the same name in `reference` and `fast`. The contract is `reference/interfaces`:
the types, argument checks and errors that both packages use.
"""

from __future__ import annotations

import ast
import graphlib
import inspect
import os
import subprocess
import sys
import typing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import fast
import reference

ROOT = Path(reference.__file__).parents[1]
# modules of the contract and of the communication between ranks; `fast` imports them and has no twins of them
REFERENCE_ALONE = ("interfaces", "distributed/groups", "distributed/simulation", "distributed/arguments")
MODULES = sorted(
    name for path in (ROOT / "reference").rglob("[!_]*.py")
    if not (name := path.relative_to(ROOT / "reference").with_suffix("").as_posix()).startswith(REFERENCE_ALONE)
)  # fmt: skip


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def functions_of(body) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in body if isinstance(n, ast.FunctionDef) and not n.name.startswith("_")}


def public_functions(package: str, module: str) -> dict[str, ast.FunctionDef]:
    """Return the public functions of a module by name, and the public methods of its classes as `Class.method`."""
    tree = parse(ROOT / package / f"{module}.py")
    found = functions_of(tree.body)
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            found |= {f"{node.name}.{name}": method for name, method in functions_of(node.body).items()}
    return found


def parameters(function: ast.FunctionDef) -> list[str]:
    """Return the positional parameters, including `/` and `*args`, as texts with annotations and defaults."""
    spec = ast.parse(ast.unparse(function)).body[0].args
    spec.kwonlyargs, spec.kw_defaults = [], []
    return ast.unparse(spec).split(", ")


def keyword_only(function: ast.FunctionDef) -> dict[str, tuple[str, str | None]]:
    spec = function.args
    return {
        arg.arg: (ast.unparse(arg.annotation or ast.Constant(None)), default and ast.unparse(default))
        for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    }


@dataclass(frozen=True)
class Import:
    """One imported name: `module` is absolute, and `name` is None for `import module`; `known_as` is the local name."""

    module: str
    name: str | None
    known_as: str


def imports_of(tree: ast.AST, package: tuple[str, ...]) -> list[Import]:
    """Return everything that a file of the folder `package` imports, also inside its functions."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, None, alias.asname or alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            found += [Import(module, alias.name, alias.asname or alias.name) for alias in node.names]
    return found


def imported_modules(path: Path) -> set[str]:
    """Return the absolute names of the modules that a file imports; `from a import b` counts as `a` and `a.b`."""
    found = imports_of(parse(path), path.relative_to(ROOT).parts[:-1])
    return {each.module for each in found} | {f"{each.module}.{each.name}" for each in found if each.name is not None}


def test_modules():
    """List the modules of `reference` -> `fast` has the same modules, except those of REFERENCE_ALONE."""
    assert len(MODULES) > 20
    missing = [module for module in MODULES if not (ROOT / "fast" / f"{module}.py").is_file()]
    assert not missing


INTERNAL = {"absorbed_output", "attend_one_request", "own_q_scale"}  # helper functions of `reference` without a twin


@pytest.mark.parametrize("module", MODULES)
def test_signatures(module):
    """Compare the signatures of twins -> the same parameters, with the same order, defaults and annotations.

    A twin in `fast` can have more keyword-only parameters, with defaults.
    """
    ours, theirs = public_functions("reference", module), public_functions("fast", module)
    for name in ours.keys() - INTERNAL:
        assert name in theirs, f"fast/{module}.py has no {name}"
        function, twin = ours[name], theirs[name]
        assert parameters(twin) == parameters(function), name
        assert ast.unparse(twin.returns or ast.Constant(None)) == ast.unparse(function.returns or ast.Constant(None)), (
            name
        )
        extra = keyword_only(twin)
        for key, value in keyword_only(function).items():
            assert extra.pop(key, None) == value, f"{name}: {key}"
        assert all(default is not None for _, default in extra.values()), f"{name}: {extra} without a default"


def test_all():
    """Compare `__all__` of both packages -> the same names; both packages have the same objects of the contract."""
    assert reference.__all__ == fast.__all__
    assert len(set(reference.__all__)) == len(reference.__all__)
    for name in reference.__all__:
        assert hasattr(reference, name) and hasattr(fast, name), name
    from reference import interfaces

    shared = set(interfaces.__all__) & set(reference.__all__)
    assert {"MLAConfig", "AttentionState", "kv_cache_shape", "chunked_prefill_workspace_size"} <= shared
    for name in shared:
        assert getattr(reference, name) is getattr(fast, name) is getattr(interfaces, name), name
    assert reference.MLAAttention is not fast.MLAAttention


def test_annotations_resolve():
    """Resolve the annotations of all public functions -> no error. (beartype ignores unresolved annotations.)"""
    for package in (reference, fast):
        for name in package.__all__:
            if inspect.isfunction(getattr(package, name)):
                typing.get_type_hints(getattr(package, name))


def test_reference_imports():
    """Read the imports of `reference` -> only torch, einops, jaxtyping, the standard library and `reference` itself.

    The modules of `reference/interfaces` and of its folders do not import einops.
    """
    for path in (ROOT / "reference").rglob("*.py"):
        inside = path.is_relative_to(ROOT / "reference" / "interfaces")
        allowed = {"torch", "jaxtyping", "reference"} | (set() if inside else {"einops"})
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert roots - set(sys.stdlib_module_names) <= allowed, path.name


def test_fast_imports():
    """Read the imports of `fast` -> from `reference` only the contract and the communication between ranks.

    The exception is `fast/__main__.py`, which compares the two packages.
    """
    paths = list((ROOT / "fast").rglob("*.py"))
    assert len(paths) > len(MODULES)
    known = ("reference.interfaces", "reference.distributed")
    for path in paths:
        if path == ROOT / "fast" / "__main__.py":
            continue
        for module in imported_modules(path):
            if module.split(".")[0] == "reference":
                assert module.startswith(known), f"{path.relative_to(ROOT)} imports {module}"
                assert not module.startswith(("reference.distributed.merge", "reference.distributed.reorg")), path


FLOORS = (  # lowest floor first; a file imports only from its own floor and from lower floors
    ("reference/interfaces",),
    ("fast/backends",),
    ("fast/kernels",),
    ("reference/distributed", "fast/distributed"),
    ("reference/attention", "fast/attention", "reference/cache", "fast/cache"),
    ("reference/planning", "fast/planning"),
    ("reference/mla", "fast/mla", "reference/gqa", "fast/gqa"),
    ("fast/compilation.py", "fast/parity.py"),
    ("reference/__init__.py", "fast/__init__.py"),
    ("fast/integrations", "fast/demo", "fast/__main__.py"),
)


def files_of_modules() -> dict[str, Path]:
    """Return every file of the two packages by its import name."""
    paths = [path for package in ("reference", "fast") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def floor_of(path: Path) -> int | None:
    """Return the index of a file's floor in FLOORS; None for a file without a floor, such as a file of fast/assets."""
    name = path.relative_to(ROOT).as_posix()
    fits = [floor for floor, prefixes in enumerate(FLOORS) for prefix in prefixes
            if name == prefix or name.startswith(f"{prefix}/")]  # fmt: skip
    return fits[0] if fits else None


def edges() -> dict[Path, set[Path]]:
    """Return the files that each file imports; `from a import b` imports the module a.b, or a if a.b does not exist."""
    files = files_of_modules()
    found: dict[Path, set[Path]] = {}
    for path in files.values():
        imports = imports_of(parse(path), path.relative_to(ROOT).parts[:-1])
        inside = {each: f"{each.module}.{each.name}" for each in imports}
        names = {name if name in files else each.module for each, name in inside.items()}
        found[path] = {files[name] for name in names if name in files} - {path}
    return found


def test_no_import_goes_up():
    """Look up the imports of every file -> no imported file is on a higher floor of FLOORS than the importing file."""
    for path, targets in edges().items():
        if "assets" in path.parts or path.name == "_shadow.py":
            continue
        mine = floor_of(path)
        assert mine is not None, f"{path.relative_to(ROOT)} has no floor"
        for target in targets:
            other = floor_of(target)
            if other is not None:
                assert other <= mine, f"{path.relative_to(ROOT)} imports {target.relative_to(ROOT)} of a higher floor"


def test_no_circle():
    """Follow the imports -> no files import each other in a cycle."""
    graph = edges()
    done: set[Path] = set()

    def visit(path: Path, importers: tuple[Path, ...]) -> None:
        assert path not in importers, " -> ".join(step.relative_to(ROOT).as_posix() for step in (*importers, path))
        if path not in done:
            for target in sorted(graph[path]):
                visit(target, (*importers, path))
            done.add(path)

    for path in sorted(graph):
        visit(path, ())


def folder_circle(graph: dict[str, set[str]]) -> list[str]:
    """Return folders that import each other in a cycle, in order; an empty list if there are none.

    A folder and its own subfolders may import each other.

    Args:
        graph: for each file the files that it imports, as paths from the root such as "fast/mla/layer.py".
    """
    folders: dict[str, set[str]] = {}
    for path, targets in graph.items():
        mine = path.rpartition("/")[0]
        others = {target.rpartition("/")[0] for target in targets}
        folders.setdefault(mine, set()).update(
            other
            for other in others
            if not f"{other}/".startswith(f"{mine}/") and not f"{mine}/".startswith(f"{other}/")
        )
    try:
        tuple(graphlib.TopologicalSorter(folders).static_order())
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def test_no_circle_of_folders():
    """Follow the imports of folders that are not inside each other -> no cycle, although no file imports itself."""
    graph = {
        path.relative_to(ROOT).as_posix(): {target.relative_to(ROOT).as_posix() for target in targets}
        for path, targets in edges().items() if path.name not in ("__init__.py", "_shadow.py")
    }  # fmt: skip
    assert folder_circle(graph) == []
    planted = {"fast/a/x.py": {"fast/b/x.py"}, "fast/b/y.py": {"fast/a/y.py"}, "fast/a/y.py": set()}
    assert set(folder_circle(planted)) == {"fast/a", "fast/b"}
    assert folder_circle({"fast/a/x.py": {"fast/a/b/x.py"}, "fast/a/b/x.py": {"fast/a/y.py"}}) == []


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def is_inside(folder: str, around: str) -> bool:
    return f"{folder}.".startswith(f"{around}.")


def private_uses(source: str, package: tuple[str, ...], folders: set[str]) -> set[str]:
    """Return the private names of other folders that a file imports, or reads from an imported module.

    Args:
        source: source of the file.
        package: folder of the file, such as ("fast", "mla").
        folders: names of all folders of the two packages, such as "fast.mla".
    """
    tree, here, modules, found = ast.parse(source), ".".join(package), {}, set()
    for each in imports_of(tree, package):
        whole = each.module if each.name is None else f"{each.module}.{each.name}"
        if whole.split(".")[0] not in ("fast", "reference"):
            continue
        modules[each.known_as] = whole
        folder = each.module if each.module in folders else each.module.rpartition(".")[0]
        if not is_inside(folder, here) and any(map(is_private, whole.split("."))):
            found.add(whole)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr) and ast.unparse(node.value) in modules:
            module = modules[ast.unparse(node.value)]
            if not is_inside(module if module in folders else module.rpartition(".")[0], here):
                found.add(f"{module}.{node.attr}")
    return found


# private names that other folders use: why they are not public, so that they have no entry in the API pages
SHARED_PRIVATELY = {
    "reference.interfaces._version.__version__": "each package has it as its own `__version__`",
    "fast.integrations._required.missing_transformers": "an error about a missing package, raised in two places",
}


def folders_of_packages() -> set[str]:
    return {".".join(path.relative_to(ROOT).parts[:-1]) for path in files_of_modules().values()}


def test_no_private_use_of_another_folder():
    """Look up the used names -> a name with an underscore is used only in its folder and the folder around it."""
    folders = folders_of_packages()
    found = {
        (path.relative_to(ROOT).as_posix(), name)
        for path in files_of_modules().values()
        for name in private_uses(path.read_text(encoding="utf-8"), path.relative_to(ROOT).parts[:-1], folders)
    }
    assert {name for _, name in found} >= SHARED_PRIVATELY.keys()
    assert {(path, name) for path, name in found if name not in SHARED_PRIVATELY} == set()


@pytest.mark.parametrize(
    "line, private",
    [
        ("from ..planning.batch import _rows", "fast.planning.batch._rows"),
        ("from ..planning import _batch", "fast.planning._batch"),
        ("from ..planning._batch import rows", "fast.planning._batch.rows"),
        ("from fast.planning.batch import _rows as rows", "fast.planning.batch._rows"),
        ("from reference.interfaces.checks import _check", "reference.interfaces.checks._check"),
        ("from reference.interfaces import _version", "reference.interfaces._version"),
        ("import fast.planning._batch", "fast.planning._batch"),
        ("def f():\n    from ..planning.batch import _rows", "fast.planning.batch._rows"),
        ("from ..planning import batch\nbatch._rows()", "fast.planning.batch._rows"),
        ("from .. import planning as p\np._rows()", "fast.planning._rows"),
        ("import fast.planning.batch\nfast.planning.batch._rows()", "fast.planning.batch._rows"),
        ("from .layer import _weights", None),
        ("from . import _weights", None),
        ("from . import layer\nlayer._weights()", None),
        ("from fast.mla.layer import _weights", None),
        ("from .main_loops.rows import _kernel", None),
        ("from ..planning.batch import rows", None),
        ("from torch._library import triton", None),
        ("from ..planning import __all__", None),
        ("self._rows()", None),
    ],
)
def test_private_uses_are_seen(line, private):
    """Read a file of fast/mla -> `private_uses` reports exactly the private names of other folders."""
    folders = {"fast", "fast.mla", "fast.mla.main_loops", "fast.planning", "reference", "reference.interfaces"}
    assert private_uses(line, ("fast", "mla"), folders) == ({private} if private else set())


FAMILIES = ("mla", "gqa")  # attention families: kinds of attention with a folder of their own in both packages
FLOOR_OF_FAMILIES = next(floor for floor, prefixes in enumerate(FLOORS) if "fast/mla" in prefixes)


def family_faults(graph: dict[str, set[str]], families: tuple[str, ...] = FAMILIES) -> list[str]:
    """Return the forbidden imports of files of a family.

    Only files of the same family and files of higher floors may import a file of a family.

    Args:
        graph: for each file the files that it imports, as paths from the root such as "fast/mla/layer.py".
        families: folder names of the attention families.
    """
    faults = []
    for path, targets in graph.items():
        inside, floor = path.split("/")[1], floor_of(ROOT / path)
        for target in sorted(targets):
            family = target.split("/")[1]
            above = floor is not None and floor > FLOOR_OF_FAMILIES
            if family in families and family != inside and (inside in families or not above):
                faults.append(f"{path} imports {target}")
    return faults


def test_families_stand_alone():
    """Look up the imports of all files -> no family imports another family, and no lower floor imports a family."""
    graph = {path.relative_to(ROOT).as_posix(): {target.relative_to(ROOT).as_posix() for target in targets}
             for path, targets in edges().items()}  # fmt: skip
    folders = {path.split("/")[1] for path in graph if floor_of(ROOT / path) == FLOOR_OF_FAMILIES}
    assert folders == set(FAMILIES)
    assert not family_faults(graph)


@pytest.mark.parametrize(
    "path, target, fault",
    [
        ("fast/gqa/layer.py", "fast/mla/weights.py", True),
        ("reference/gqa/builder.py", "reference/mla/builder.py", True),
        ("fast/mla/layer.py", "fast/gqa/layer.py", True),
        ("fast/planning/batch.py", "fast/mla/choose_path.py", True),
        ("fast/attention/varlen.py", "fast/gqa/layer.py", True),
        ("fast/gqa/layer.py", "fast/attention/varlen.py", False),
        ("fast/gqa/layer.py", "fast/gqa/attention.py", False),
        ("fast/__init__.py", "fast/gqa/layer.py", False),
        ("fast/demo/job.py", "fast/mla/layer.py", False),
    ],
)
def test_a_second_family_is_seen(path, target, fault):
    """Look at one import of a family `mla` or `gqa` -> `family_faults` reports it exactly if it is forbidden."""
    expected = [f"{path} imports {target}"] if fault else []
    assert family_faults({path: {target}}) == expected


def test_length_of_modules():
    """Count lines -> at most 450 in a module of the packages and of the site, at most 600 in a test module."""
    sources = [path for folder in ("reference", "fast", "docs/hooks") for path in (ROOT / folder).rglob("*.py")]
    limits = {path: 450 for path in sources} | {path: 600 for path in (ROOT / "tests").rglob("*.py")}
    long = {path.relative_to(ROOT).as_posix(): lines for path, limit in limits.items()
            if (lines := len(path.read_text(encoding="utf-8").splitlines())) > limit}  # fmt: skip
    assert not long


@pytest.mark.parametrize(
    "line, expected",
    [
        ("from .prefill import forward_prefill", {"fast.mla.prefill", "fast.mla.prefill.forward_prefill"}),
        ("from . import prefill", {"fast.mla", "fast.mla.prefill"}),
        ("from ..cache import latent as cache", {"fast.cache", "fast.cache.latent"}),
        ("from .. import cache", {"fast", "fast.cache"}),
        ("from ..cache.latent import a, b", {"fast.cache.latent", "fast.cache.latent.a", "fast.cache.latent.b"}),
        ("import torch.nn, os as system", {"torch.nn", "os"}),
        ("from torch import nn", {"torch", "torch.nn"}),
        ("def f():\n    from .layer import g", {"fast.mla.layer", "fast.mla.layer.g"}),
        ("if x:\n    from .layer import g", {"fast.mla.layer", "fast.mla.layer.g"}),
        ("text = 'import torch'", set()),
    ],
)
def test_imports_reader(line, expected, tmp_path, monkeypatch):
    """Read the imports of a file fast/mla/x.py -> `imported_modules` finds absolute names for all imports."""
    path = tmp_path / "fast" / "mla" / "x.py"
    path.parent.mkdir(parents=True)
    path.write_text(line)
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert imported_modules(path) == expected


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_imports_without_extras(package):
    """Import a package without Triton and without the packages of any extra -> no error."""
    code = f"""
import importlib.machinery, sys
class Hiding(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.split(".")[0] in {("triton", "transformers", "matplotlib", "beartype", "hypothesis", "numpy")!r}
        return None if hidden else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hiding
import {package}, torch
c = {package}.allocate_kv_cache(2, 4, 24, torch.float32)
{package}.concat_and_cache_mla(torch.ones(1, 16), torch.ones(1, 8), c, torch.tensor([5]))
assert c[1, 1].eq(1).all()
bad = [m for m in sys.modules if m.split(".")[0] in ("triton", "transformers", "matplotlib", "beartype")]
assert not bad, bad
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_docstrings(package):
    """Look for docstrings -> every module, public class and public function has one."""
    for path in (ROOT / package).rglob("*.py"):
        if "assets" in path.parts:  # scripts, not modules
            continue
        tree = parse(path)
        if path.name != "__init__.py" or tree.body:
            assert ast.get_docstring(tree), path
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                assert ast.get_docstring(node), f"{path.name}: {node.name}"
            if isinstance(node, ast.ClassDef):
                for name, method in functions_of(node.body).items():
                    inherited = any(ast.unparse(base) not in ("object",) for base in node.bases)
                    assert ast.get_docstring(method) or inherited, f"{path.name}: {node.name}.{name}"


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_no_ambient_state(package):
    """Search the modules -> no `global` statement; globals with literal values are in upper case or begin with `__`."""
    for path in (ROOT / package).rglob("*.py"):
        tree = parse(path)
        assert not [n for n in ast.walk(tree) if isinstance(n, ast.Global)], f"{path}: a global statement"
        for node in tree.body:
            if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for target in targets:
                    constant = isinstance(target, ast.Name) and target.id.lstrip("_").isupper()
                    assert constant or ast.unparse(target).startswith("__"), f"{path}: {ast.unparse(node)}"


def test_memory_is_poisoned():
    """Allocate tensors in a test -> NaN or large integers, so that reading an unwritten element makes a test fail."""
    assert torch.empty(64).isnan().all() and torch.empty_like(torch.zeros(64)).isnan().all()
    assert torch.zeros(2).new_empty(64, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(64, dtype=torch.int32) > 2**30).all()


def test_shapes_are_checked():
    """Pass a tensor whose shape contradicts the annotation -> an error of the run-time checks of the tests."""
    pytest.importorskip("beartype")
    with pytest.raises(TypeError, match="Type-check error"):
        reference.AttentionState(torch.zeros(3, 2, 4), torch.zeros(3, 2))
    with pytest.raises(TypeError, match="Type-check error"):
        fast.expand_kv(torch.zeros(3, 4), torch.zeros(5, 2, 4), torch.zeros(5, 2, 4))


WITHOUT_HYPOTHESIS = """
import importlib.machinery, sys
find_spec = importlib.machinery.PathFinder.find_spec.__func__
def hiding(cls, name, path=None, target=None):
    hidden = name.split(".")[0] in ("hypothesis", "_hypothesis_pytestplugin")
    return None if hidden else find_spec(cls, name, path, target)
importlib.machinery.PathFinder.find_spec = classmethod(hiding)
import pytest
sys.exit(pytest.main(["-q", "-rs", "-p", "no:cacheprovider", "tests/planning/test_batch.py"]))
"""


def test_without_hypothesis():
    """Run a test file without hypothesis -> the tests that need it are skipped with a reason; the other tests run."""
    environment = {**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_HYPOTHESIS],
        cwd=ROOT,
        env=environment,
        timeout=120,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "hypothesis is not installed" in done.stdout and " passed, " in done.stdout
