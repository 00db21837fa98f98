"""Checks that the folders of the tests mirror the folders of the packages, so that a test is found by its path.

The tests of `fast/cache` and `reference/cache` are in `tests/cache`, and the tests of `fast/kernels/hopper/varlen` are
in `tests/kernels/hopper/varlen`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest

import reference

ROOT = Path(reference.__file__).parents[1]
# folders of the tests without a folder of the same name in the packages: `tests/__init__.py` says what each contains
ONLY_TESTS = {"benchmarks", "data", "gpu", "identities", "mutations", "site", "support", "twins"}
# folders of the packages without a folder of tests: the folder of tests that runs their modules
TESTED_IN = {
    "kernels/combine": "kernels/triton",  # the portable decode launches them, on any GPU and in the interpreter
    "kernels/torch": "gqa",  # one test compares all kernels of grouped-query attention
    "kernels/hopper/mla_decode/main_loops": "kernels/hopper/mla_decode",
}
KERNEL_SETS = ("cpu", "hopper", "triton")  # folders of `fast/kernels` whose name begins the names of their tests


def folders_with(modules: Iterable[Path], root: Path) -> set[str]:
    """Return the folders that have some of the modules, or folders with some of them; relative to `root`."""
    return {folder.as_posix() for path in modules for folder in path.relative_to(root).parents} - {"."}


def folders_of_packages() -> set[str]:
    """Return the folders of both packages that have modules besides `__init__.py`."""
    roots = (ROOT / "fast", ROOT / "reference")
    modules = {root: (path for path in root.rglob("*.py") if path.name != "__init__.py") for root in roots}
    return set().union(*(folders_with(paths, root) for root, paths in modules.items()))


def folders_of_tests() -> set[str]:
    return folders_with((ROOT / "tests").rglob("test_*.py"), ROOT / "tests")


def folder_faults(sources: set[str], tests: set[str]) -> list[str]:
    """Return the folders of tests that mirror nothing, and the folders of the packages without a folder of tests.

    Args:
        sources: folders of the packages, relative to the package.
        tests: folders of `tests` with test modules, relative to `tests`.
    """
    strange = {folder for folder in tests - sources if folder.split("/")[0] not in ONLY_TESTS}
    return sorted([f"tests/{folder} mirrors no folder" for folder in strange]
                  + [f"{folder} has no folder of tests" for folder in sources - tests - TESTED_IN.keys()])  # fmt: skip


def module_faults(modules: set[str], folders: set[str]) -> list[str]:
    """Return the test modules that belong to another folder, by the first words of their names.

    A module whose name begins with the name of a folder beside it belongs to this folder. A module whose name begins
    with a name of KERNEL_SETS belongs to the tests of these kernels.

    Args:
        modules: test modules as paths relative to `tests`, such as "cache/test_cache.py".
        folders: folders of `tests`, relative to `tests`.
    """
    faults = []
    for module in sorted(modules):
        folder, _, name = module.rpartition("/")
        words = name.removesuffix(".py").removeprefix("test_")
        kernel_set = words.split("_")[0]
        if kernel_set in KERNEL_SETS and not f"{folder}/".startswith(f"kernels/{kernel_set}/"):
            faults.append(f"{module} belongs to kernels/{kernel_set}")
            continue
        for part in folder.split("/"):
            words = words.removeprefix(f"{part}_")
        beside = f"{folder}/{words.split('_')[0]}"
        if beside in folders:
            faults.append(f"{module} belongs to {beside}")
    return faults


def test_folders_mirror_the_packages():
    """List the folders -> each folder of tests mirrors a folder of a package, and the other way round.

    The exceptions are ONLY_TESTS and TESTED_IN. No exception is out of date.
    """
    sources, tests = folders_of_packages(), folders_of_tests()
    assert folder_faults(sources, tests) == []
    assert TESTED_IN.keys() <= sources - tests and set(TESTED_IN.values()) <= tests
    assert {name for name in ONLY_TESTS if (ROOT / "tests" / name).is_dir()} == ONLY_TESTS
    assert not any((ROOT / package / name).exists() for package in ("fast", "reference") for name in ONLY_TESTS)


def test_modules_lie_in_their_folders():
    """List the test modules -> no name says that the module belongs to another folder."""
    root = ROOT / "tests"
    paths = [path.relative_to(root) for path in root.rglob("test_*.py")]
    modules = {path.as_posix() for path in paths if path.parts[0] not in ONLY_TESTS}
    assert len(modules) > 100
    assert module_faults(modules, folders_of_tests()) == []


@pytest.mark.parametrize(
    "sources, tests, faults",
    [
        ({"cache", "kernels/cpu"}, {"cache", "kernels/cpu", "twins", "data/sample"}, []),
        ({"cache"}, {"cache", "caches"}, ["tests/caches mirrors no folder"]),
        ({"kernels/cpu", "kernels/triton/gqa"}, {"kernels/cpu"}, ["kernels/triton/gqa has no folder of tests"]),
        ({"kernels/torch"}, set(), []),
    ],
)
def test_faults_of_folders_are_seen(sources, tests, faults):
    """Compare a few folders -> `folder_faults` reports exactly the folders without a counterpart."""
    assert folder_faults(sources, tests) == faults


@pytest.mark.parametrize(
    "module, home",
    [
        ("kernels/test_triton_decode.py", "kernels/triton"),
        ("cache/test_triton_fp8.py", "kernels/triton"),
        ("kernels/triton/test_hopper_graphs.py", "kernels/hopper"),
        ("kernels/triton/test_triton_gqa.py", "kernels/triton/gqa"),
        ("kernels/hopper/test_hopper_varlen_warmup.py", "kernels/hopper/varlen"),
        ("integrations/test_transformers_cache.py", "integrations/transformers"),
        ("integrations/transformers/test_gqa_models.py", "integrations/transformers/gqa"),
        ("kernels/triton/gqa/test_triton_gqa.py", None),
        ("kernels/hopper/varlen/test_hopper_varlen.py", None),
        ("kernels/triton/test_merge_compilation.py", None),
        ("integrations/transformers/test_transformers_cache.py", None),
        ("gqa/test_gqa_graphs.py", None),
        ("attention/test_rope.py", None),
    ],
)
def test_misplaced_modules_are_seen(module, home):
    """Place one module -> `module_faults` reports it exactly if its name belongs to another folder."""
    folders = {"kernels/triton", "kernels/triton/gqa", "kernels/hopper/varlen", "integrations/transformers",
               "integrations/transformers/gqa", "gqa", "attention", "cache"}  # fmt: skip
    assert module_faults({module}, folders) == ([f"{module} belongs to {home}"] if home else [])
