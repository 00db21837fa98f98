"""Make the run-time checks of annotations cheaper for functions whose annotations have no shapes.

jaxtyping's import hook wraps every function. Its wrapper compares the shapes of the arguments with each other, which
takes about 20 us in every call, also for a function without a tensor. Most functions of the two packages have no shape
in their annotations. For these functions, beartype alone does the same check in about 1 us.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re

import jaxtyping
from beartype import beartype

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


def check_types_without_shapes() -> None:
    """Let `jaxtyping.jaxtyped` check functions without shapes with beartype alone. Call this before the import hook."""
    with_shapes = jaxtyping.jaxtyped

    @functools.wraps(with_shapes)
    def jaxtyped(function=None, **options):
        if function is None:
            return functools.partial(jaxtyped, **options)
        # jaxtyping looks at an `__init__` again when it wraps the class, and must find its own wrapper
        if inspect.isfunction(function) and function.__name__ != "__init__" and not has_shapes(function):
            return without_shapes(function)
        return with_shapes(function, **options)

    jaxtyping.jaxtyped = jaxtyped
