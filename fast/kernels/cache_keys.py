"""Give a kernel the same key in Triton's disk cache in every process.

The key of a kernel contains the keys of all functions that it calls, and the global constants that they use. Triton 3.6
and 3.7 list the constants of a callee only if the callee has a key already. So the key of a kernel depends on which
other kernels the process launched before. A process that launches kernels in another order, or in several threads, then
compiles kernels that are on disk. Triton's pull request 10494 corrects this.
"""

from __future__ import annotations

from collections.abc import Iterator

from triton.runtime.jit import JITCallable


def hash_callees_first(function: JITCallable) -> None:
    """Compute the keys of all functions that a Triton function calls, each before the keys of its callers.

    Functions whose keys are known are left out. Several threads may call this function for kernels that share callees.
    """
    _hash(function, set())


def _hash(function: JITCallable, entered: set[int]) -> None:
    # a set of functions would compute their hashes, which are their keys
    if id(function) in entered:  # a function that calls itself
        return
    entered.add(id(function))
    if function.hash is None:
        for callee in callees(function):
            _hash(callee, entered)
    function.cache_key  # noqa: B018  computes the key; waits if another thread computes it


def callees(function: JITCallable) -> Iterator[JITCallable]:
    """Yield the Triton functions among the global names that a Triton function uses, and the methods of aggregates."""
    for value in map(function.__globals__.get, function.fn.__code__.co_names):
        if isinstance(value, JITCallable):
            yield value
        elif getattr(value, "__triton_aggregate__", False):
            yield from (each for each in value.hash_attrs if isinstance(each, JITCallable))
