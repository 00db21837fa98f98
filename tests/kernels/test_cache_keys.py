"""Tests of `fast.kernels.cache_keys`: the keys of kernels do not depend on the order in which kernels are launched."""

from __future__ import annotations

import importlib
import pkgutil
import random
import sys

import pytest

triton = pytest.importorskip("triton")
from triton import language as tl  # noqa: E402
from triton.runtime.jit import JITCallable  # noqa: E402

import fast.kernels  # noqa: E402
from fast.kernels.cache_keys import callees, hash_callees_first  # noqa: E402

from ..support.triton_mode import INTERPRETED  # noqa: E402

pytestmark = pytest.mark.skipif(INTERPRETED, reason="the interpreter makes no keys")
TWO = tl.constexpr(2)


@triton.jit
def _doubled(x):
    return x * TWO


@triton.jit
def _first_kernel(x):
    tl.store(x, _doubled(1))


@triton.jit
def _second_kernel(x):
    tl.store(x, _doubled(3) + _doubled(4))


@triton.jit
def _recursive(x):
    return _recursive(x)


@triton.jit
def _outer_kernel(x):
    tl.store(x, tl.sum(_recursive(tl.load(x)), 0))


def functions_of(*modules) -> list[JITCallable]:
    """Return all Triton functions in the variables of modules, and the methods of their aggregates."""
    found = {}
    for value in (value for module in modules for value in vars(module).values()):
        methods = value.hash_attrs if getattr(value, "__triton_aggregate__", False) else []
        found |= {id(each): each for each in [value, *methods] if isinstance(each, JITCallable)}
    return list(found.values())


def modules_of_fast() -> list:
    names = [each.name for each in pkgutil.walk_packages(fast.kernels.__path__, "fast.kernels.")]
    return [importlib.import_module(name) for name in names]


def kernels_of_fast() -> list[JITCallable]:
    """Return all kernels of `fast`: the Triton functions whose names end in "_kernel"."""
    return [each for each in functions_of(*modules_of_fast()) if each.__name__.endswith("_kernel")]


@pytest.fixture
def without_keys():
    """Let every Triton function lose its key, as in a new process, whenever the test calls the yielded function."""
    functions = functions_of(*modules_of_fast(), sys.modules[__name__])
    for module in [each for name, each in sys.modules.items() if name.startswith("triton")]:
        functions += functions_of(module)
    kept = [(each, each.hash, each.used_global_vals) for each in functions]

    def forget() -> None:
        for each in functions:
            each.hash, each.used_global_vals = None, {}

    forget()
    yield forget
    for each, key, used in kept:
        each.hash, each.used_global_vals = key, used


def keys_of(kernels, forget, prepare=hash_callees_first) -> dict[str, str]:
    """Return the keys that a new process would compute if it launched the kernels in this order."""
    forget()
    found = {}
    for kernel in kernels:
        prepare(kernel)
        found[f"{kernel.module}.{kernel.__name__}"] = kernel.cache_key
    return found


def test_planted_kernels(without_keys):
    """Hash two kernels with one callee in both orders -> the same keys; without the function, other keys."""
    orders = [_first_kernel, _second_kernel], [_second_kernel, _first_kernel]
    one, other = (keys_of(kernels, without_keys) for kernels in orders)
    assert one == other and len(set(one.values())) == 2
    one, other = (keys_of(kernels, without_keys, lambda _: None) for kernels in orders)
    if one == other:
        pytest.skip("this version of Triton hashes callees first itself")


def test_every_kernel(without_keys):
    """Hash all kernels of `fast` in several orders -> each kernel has the same key."""
    kernels = kernels_of_fast()
    assert len(kernels) >= 40
    wanted = keys_of(kernels, without_keys)
    assert keys_of(kernels[::-1], without_keys) == wanted
    for seed in range(3):
        assert keys_of(random.Random(seed).sample(kernels, len(kernels)), without_keys) == wanted


def test_every_callee_is_found(without_keys):
    """Hash a kernel of `fast` -> all Triton functions that got a key are among the callees that `callees` yields."""
    for kernel in kernels_of_fast():
        without_keys()
        kernel.cache_key  # noqa: B018
        reached, new = set(), [kernel]
        while new:
            function = new.pop()
            if id(function) not in reached:
                reached.add(id(function))
                new.extend(callees(function))
        hashed = [each for each in functions_of(*modules_of_fast()) if each.hash is not None]
        assert len(hashed) > 1 or not list(callees(kernel))
        assert {each.__name__ for each in hashed if id(each) not in reached} == set()


def test_recursion_ends(without_keys):
    """Hash a kernel that calls a function that calls itself -> both have a key."""
    hash_callees_first(_outer_kernel)
    assert _outer_kernel.hash and _recursive.hash and not _recursive.hash.startswith("recursion")
