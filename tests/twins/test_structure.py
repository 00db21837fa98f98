"""Checks of the structure of both packages: same modules, names and signatures, and imports in one direction only."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import torch

import fast
import reference

ROOT = Path(reference.__file__).parents[1]
# modules of the contract and of the communication between ranks; `fast` imports these modules and has no twins of them
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
    """Return the positional parameters, `/` and `*args` as texts with annotations and defaults."""
    spec = ast.parse(ast.unparse(function)).body[0].args
    spec.kwonlyargs, spec.kw_defaults = [], []
    return ast.unparse(spec).split(", ")


def keyword_only(function: ast.FunctionDef) -> dict[str, tuple[str, str | None]]:
    spec = function.args
    return {
        arg.arg: (ast.unparse(arg.annotation or ast.Constant(None)), default and ast.unparse(default))
        for arg, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    }


def imported_modules(path: Path) -> set[str]:
    """Return the absolute names of the modules that a file imports; `from a import b` counts as `a` and `a.b`."""
    package = path.relative_to(ROOT).parts[:-1]
    found = set()
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *([node.module] if node.module else [])))
            found |= {module} | {f"{module}.{alias.name}" for alias in node.names}
    return found


def test_modules():
    """`fast` has a module of the same path for every module of `reference`, except those of REFERENCE_ALONE."""
    assert len(MODULES) > 20
    missing = [module for module in MODULES if not (ROOT / "fast" / f"{module}.py").is_file()]
    assert not missing


INTERNAL = {"attend_one_request"}  # helper of two modules of the reference; no function of `fast` corresponds to it


@pytest.mark.parametrize("module", MODULES)
def test_signatures(module):
    """Twins have the same name and the same parameters, with the same order, defaults and annotations.

    `fast` may add keyword-only parameters that have defaults.
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
    """Both packages have the same `__all__`, and the types of the contract are the same objects in both."""
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
    """All annotations of public functions can be resolved; beartype ignores annotations that cannot be resolved."""
    for package in (reference, fast):
        for name in package.__all__:
            if inspect.isfunction(getattr(package, name)):
                typing.get_type_hints(getattr(package, name))


def test_reference_imports():
    """`reference` imports only torch, einops, jaxtyping, the standard library and itself.

    The modules of `reference/interfaces` import no einops.
    """
    for path in (ROOT / "reference").rglob("*.py"):
        allowed = {"torch", "jaxtyping"} | (
            {"reference", "einops"} if path.parent.name != "interfaces" else {"reference"}
        )
        roots = {module.split(".")[0] for module in imported_modules(path)}
        assert roots - set(sys.stdlib_module_names) <= allowed, path.name


def test_fast_imports():
    """`fast` imports from `reference` only the contract and the communication between ranks.

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
    ("reference/mla", "fast/mla"),
    ("fast/compilation.py", "fast/parity.py"),
    ("reference/__init__.py", "fast/__init__.py"),
    ("fast/integrations", "fast/demo", "fast/__main__.py"),
)


def files_of_modules() -> dict[str, Path]:
    """Return every file of the two packages by its import name."""
    paths = [path for package in ("reference", "fast") for path in (ROOT / package).rglob("*.py")]
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def floor_of(path: Path) -> int | None:
    """Return the floor of a file; None for files without a floor, such as those of fast/assets."""
    name = path.relative_to(ROOT).as_posix()
    fits = [floor for floor, prefixes in enumerate(FLOORS) for prefix in prefixes
            if name == prefix or name.startswith(f"{prefix}/")]  # fmt: skip
    return fits[0] if fits else None


def edges() -> dict[Path, set[Path]]:
    """Return the files that each file imports; `from a import b` is the module a.b if a.b exists, else a."""
    files = files_of_modules()
    found: dict[Path, set[Path]] = {}
    for path in files.values():
        package, names = path.relative_to(ROOT).parts[:-1], set()
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                base = package[: len(package) - node.level + 1] if node.level else ()
                module = ".".join((*base, *([node.module] if node.module else [])))
                names |= {inside if (inside := f"{module}.{alias.name}") in files else module for alias in node.names}
        found[path] = {files[name] for name in names if name in files} - {path}
    return found


def test_no_import_goes_up():
    """Every file has a floor, and a file imports only from its own floor and from lower floors."""
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
    """No files import each other in a cycle."""
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


FAMILIES = ("mla",)
FLOOR_OF_FAMILIES = next(floor for floor, prefixes in enumerate(FLOORS) if "fast/mla" in prefixes)


def family_faults(graph: dict[str, set[str]], families: tuple[str, ...] = FAMILIES) -> list[str]:
    """Return imports of an attention family by another family, or by a file on or below the floor of the families.

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
    """No attention family imports another family, and no lower floor imports a family."""
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
    """`family_faults` reports the forbidden imports of a second family `gqa`, which does not exist yet."""
    expected = [f"{path} imports {target}"] if fault else []
    assert family_faults({path: {target}}, ("mla", "gqa")) == expected


def test_length_of_modules():
    """A module of the packages has at most 450 lines, and a test module has at most 600 lines."""
    sources = [path for package in ("reference", "fast") for path in (ROOT / package).rglob("*.py")]
    limits = {path: 450 for path in sources} | {path: 600 for path in (ROOT / "tests").rglob("*.py")}
    long = {path.relative_to(ROOT).as_posix(): lines for path, limit in limits.items()
            if (lines := len(path.read_text(encoding="utf-8").splitlines())) > limit}  # fmt: skip
    assert not long


def test_imports_reader(tmp_path):
    """`imported_modules` finds relative imports and the imported names."""
    path = ROOT / "reference" / "mla" / "layer.py"
    assert {"torch", "reference.mla.decode", "reference.mla.decode.mla_decode"} <= imported_modules(path)


@pytest.mark.parametrize("package", ["reference", "fast"])
def test_imports_without_extras(package):
    """A package can be imported without Triton and without the packages of any extra."""
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
    """Every module, public class and public function has a docstring."""
    for path in (ROOT / package).rglob("*.py"):
        if "assets" in path.parts:  # scripts beside their data, not modules
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
    """No function rebinds a global name, and a module assigns literals only to names in upper case or with `__`."""
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
    """Under test, new tensors hold NaN or large integers, so that reading an unwritten element makes a test fail."""
    assert torch.empty(64).isnan().all() and torch.empty_like(torch.zeros(64)).isnan().all()
    assert torch.zeros(2).new_empty(64, dtype=torch.bfloat16).isnan().all()
    assert (torch.empty(64, dtype=torch.int32) > 2**30).all()


def test_shapes_are_checked():
    """With beartype installed, a tensor whose shape contradicts the annotation raises before the function runs."""
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
    """Without hypothesis, the tests that need hypothesis are skipped with a reason, and the other tests run."""
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
