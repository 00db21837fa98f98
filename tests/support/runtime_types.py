"""Make the run-time checks of annotations cheaper.

jaxtyping's import hook wraps every function. Its wrapper compares the shapes of the arguments with each other.

- This takes about 20 us in every call, also for a function without a tensor. Most functions of the two packages have no
  shape in their annotations. For these functions, beartype alone does the same check in about 1 us.
- For a function with shapes, the check takes up to 200 us. It depends only on types, dtypes, shapes and numbers among
  the arguments, so it runs once for each combination of these.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import re

import jaxtyping
import torch
from beartype import beartype

SIMPLE = {int, float, bool, str, type(None), torch.dtype, torch.device}  # compared by value
SHAPED = re.compile(r"\b(Bool|Complex|Float|Inexact|Int|Integer|Key|Num|Real|Shaped|UInt)\d*\[")  # jaxtyping's arrays


def has_shapes(function) -> bool:
    """Return whether an annotation of a function has a shape; annotations may be texts."""
    return any(SHAPED.search(str(each)) for each in function.__annotations__.values())


def without_shapes(function):
    """Return a function that checks the annotations that can be evaluated now, as jaxtyping does; skip the others.

    A method whose annotation names its own class is defined before the class exists. The switch of jaxtyping
    (`plain_errors`) turns these checks off too.
    """
    written, evaluated = function.__annotations__, {}
    for name, annotation in written.items():
        with contextlib.suppress(Exception):
            evaluated[name] = eval(annotation, function.__globals__) if isinstance(annotation, str) else annotation
    if not evaluated:
        return function
    function.__annotations__ = evaluated
    try:
        checked = beartype(function)
    finally:
        function.__annotations__ = written
    switch = jaxtyping.config

    @functools.wraps(function)
    def switched(*arguments, **options):
        return (function if switch.jaxtyping_disable else checked)(*arguments, **options)

    return switched


def kind_of(argument):
    """Return what a check of annotations can see of an argument: a value that can be compared and hashed."""
    kind = type(argument)
    if isinstance(argument, torch.Tensor):
        return kind, argument.dtype, argument.shape
    if kind in SIMPLE or isinstance(argument, type):
        return kind, argument
    if isinstance(argument, (tuple, list)):
        return kind, *map(kind_of, argument)
    if isinstance(argument, dict):
        return kind, *((name, kind_of(each)) for name, each in argument.items())
    if dataclasses.is_dataclass(argument):
        return kind, *(kind_of(getattr(argument, each.name)) for each in dataclasses.fields(argument))
    return kind


def once_for_each_kind(function, checked):
    """Return a function that calls `checked`, and calls `function` if the same kinds of arguments passed before.

    The result of a repeated call is not checked. So the check misses a wrong shape that depends on values of tensors.
    """
    passed, switch = set(), jaxtyping.config

    @functools.wraps(checked)
    def run(*arguments, **options):
        if switch.jaxtyping_disable:
            return function(*arguments, **options)
        kinds = kind_of(arguments), kind_of(options)
        if kinds in passed:
            return function(*arguments, **options)
        result = checked(*arguments, **options)
        passed.add(kinds)
        return result

    return run


def make_checks_cheaper() -> None:
    """Let `jaxtyping.jaxtyped` check in the cheaper ways of this module. Call this before the import hook."""
    with_shapes = jaxtyping.jaxtyped

    @functools.wraps(with_shapes)
    def jaxtyped(function=None, **options):
        if function is None:
            return functools.partial(jaxtyped, **options)
        # jaxtyping looks at an `__init__` again when it wraps the class, and must find its own wrapper
        if inspect.isfunction(function) and function.__name__ != "__init__":
            if not has_shapes(function):
                return without_shapes(function)
            return once_for_each_kind(function, with_shapes(function, **options))
        return with_shapes(function, **options)

    jaxtyping.jaxtyped = jaxtyped
